"""Compilation: what programs need of a device's memory, and what is said where that is too much."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import preflight
import pytest
from programs import CFG, mesh_of, quick_compilation
from training import BRIEF

import train_gpt as T

KERNELS, _ = T.pick_kernels(CFG, jax.devices()[0])
RECORD = T.Config()
GIB = 2**30


class Compiled:
    """An executable with these sizes in bytes, and none of a peak."""

    def __init__(self, temporary=0, arguments=0, outputs=0, aliased=0, peak=0):
        self.memory = SimpleNamespace(
            temp_size_in_bytes=temporary,
            argument_size_in_bytes=arguments,
            output_size_in_bytes=outputs,
            alias_size_in_bytes=aliased,
            peak_memory_in_bytes=peak,
        )

    def memory_analysis(self):
        return self.memory


class Mesh:
    """A mesh whose devices say that they have `limit` bytes."""

    def __init__(self, devices, limit):
        self.mesh = mesh_of(devices)
        stats = None if limit is None else {"bytes_limit": limit}
        self.local_devices = [SimpleNamespace(memory_stats=lambda: stats)]

    def __getattr__(self, name):
        return getattr(self.mesh, name)


def compiled_with(monkeypatch, cfg, devices, limit, peak=0, say=lambda line: None):
    """compile_all where each program needs `peak` bytes, and on top what is there beside it."""
    made = []
    built = SimpleNamespace(compile=lambda: (made.append(1), Compiled(peak=peak))[1])
    monkeypatch.setattr(T, "lower", lambda *_: built)
    monkeypatch.setattr(T, "programs", lambda cfg, mesh, *_, real=T.programs: real(cfg, plain, *_))
    plain = mesh_of(devices)
    try:
        return T.compile_all(cfg, Mesh(devices, limit), KERNELS, say), made
    except T.UserError as error:
        return str(error), made


def test_a_run_that_cannot_fit_is_refused_before_it_compiles_with_sizes_and_settings(monkeypatch):
    """The record's arrays take nearly 70 GiB of one device."""
    line, made = compiled_with(monkeypatch, RECORD, 1, 60 * GIB)
    assert not made and re.fullmatch(
        r"grads0 needs 69.4 GiB of the 60.0 GiB of a device: use some of --set recompute=1 "
        r"micro_tokens=24576 ngram_rows=21150720, or more devices",
        line,
    )
    T.override(RECORD, re.search("--set (.*),", line)[1].split())  # it is valid


@pytest.mark.parametrize("devices, limit", [(1, 80 * GIB), (8, 32 * GIB), (1, None)])
def test_a_run_that_fits_is_compiled(monkeypatch, devices, limit):
    _, made = compiled_with(monkeypatch, RECORD, devices, limit)
    assert len(made) == len(T.programs(RECORD, mesh_of(devices), KERNELS))


def test_what_does_not_fit_once_it_has_compiled_is_refused(monkeypatch):
    """Then the bytes of what it makes on the way are known."""
    line, made = compiled_with(monkeypatch, RECORD, 1, 80 * GIB, peak=80 * GIB)
    assert made and " GiB of the 80.0 GiB of a device: use some of --set recompute=1 " in line


def test_the_trainer_finds_saved_executables(program_cache, monkeypatch, tmp_path, capsys):
    """Of a CPU, for which jax's cache works as for TPUs; others are compiled, and that is said."""
    monkeypatch.setattr(T, "PRESETS", {"brief": BRIEF, "other": replace(BRIEF, mlp_width=48)})
    monkeypatch.setattr(preflight, "absent_devices", lambda target: jax.devices())
    said = []
    with quick_compilation():
        assert preflight.main(["v6e-8", "brief", "--save", str(tmp_path / "new/dir")]) == 0
        for cfg in T.PRESETS.values():
            mesh = T.make_mesh(cfg)[1]
            T.compile_all(cfg, mesh, T.pick_kernels(cfg, jax.devices()[0])[0], said.append)
    assert f"saved: copy {tmp_path}/new/dir to v6e-8" in capsys.readouterr().out
    count = len(T.programs(BRIEF, mesh, T.PLAIN))
    ready = [re.match(r"(\d+) of \d+ programs are ready, (\d+) were in", line) for line in said]
    assert [x.groups() for x in ready if x][count - 1] == (str(count), str(count))
    assert 0 <= int(ready[-1][2]) < count


# ---- Bytes -------------------------------------------------------------------------------------

HEADS = 2 * 38_633_472  # head and embedding of the record
VALUES, NGRAMS = 154_533_888, 42_301_440
QK, OTHERS = 48 * 256 * 768, 16 * 768**2 + 24 * 2816 * 768  # as they are on eight devices
SMALL = 216 + 12 + 22 + 22 + 11 + 11 + 1 + 1 + 98_304 + 1792 + 28 + 10_752
SMALL += 98_304 + 2944 + 46 + 1


@pytest.mark.parametrize(
    "name, changes, adam_steps, table_steps, beside",
    [
        ("grads0", {}, 1, 3, "state"),
        ("grads3", {"adam_every": 1, "event_every": (1, 1)}, 0, 0, "state"),
        ("eval", {}, 1, 3, "state"),
        ("anvil", {}, 2, 4, "copies"),
        ("adam", {}, 0, 4, "copies anvil"),
        ("adam_tied", {}, 0, 4, "copies anvil"),
        ("tables2-2-2-2", {}, 2, 0, "copies anvil"),
        ("finish", {}, 1, 3, "copies"),
    ],
)
def test_bytes_beside_a_program_of_the_record_on_eight_devices(
    name, changes, adam_steps, table_steps, beside
):
    """At most. What a program takes or gives stands in its own account, as the n-gram table."""
    lanes = 48 * 768 + 16 * 768 + 24 * 2816  # of banks: mean squares
    kept = 4 * (HEADS + VALUES) + 4 * QK + 5 * OTHERS + lanes + NGRAMS  # with their averages
    sizes = {
        "state": 4 * (kept // 8 + 3 * SMALL),
        "copies": 2 * (HEADS + VALUES) + 2 * (QK + OTHERS) // 8 + 4 * SMALL + 8192 * 768,
        "anvil": 2 * (QK + OTHERS) // 8,
    }
    # Gradients of a step: 10,384 rows from each of 8 devices, as it is in the largest stage.
    adam, tables = 2 * HEADS + 4 * SMALL, 2 * VALUES + 8 * 10_384 * (4 + 2 * 768)
    want = sum(sizes[part] for part in beside.split()) + adam_steps * adam + table_steps * tables
    assert T.resident_bytes(replace(RECORD, **changes), mesh_of(8), name) == want


def test_a_peak_that_the_compiler_does_not_tell_is_all_that_is_alive():
    """What is donated counts once."""
    sizes = {"temporary": 5, "arguments": 100, "outputs": 30, "aliased": 20}
    assert T.program_bytes(Compiled(**sizes)) == sizes | {"peak": 115}
    assert T.program_bytes(Compiled(**sizes, peak=111)) == sizes | {"peak": 111}
