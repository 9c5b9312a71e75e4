"""Checkpoints on the disk, without a run: whole or not to be seen, checked, for any devices."""

import contextlib
import json
import os
import re
import shutil
import threading
import time
import tracemalloc
import zipfile
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from types import SimpleNamespace

import jax
import numpy as np
import programs
import pytest
from programs import lay, mesh_of
from training import arrays, assert_same_arrays

import train_gpt as T

CFG = replace(programs.CFG, compute_dtype="bfloat16")  # as the n-gram table then is
LOADER = T.LoaderState(1234, (5, 0, 77, 3, 100, 1, 2, 4))
META = {"train_time_ms": 1.5, "logs": {"log.txt": 7}, "data": {}, "source_sha256": "0"}
META |= {"config": asdict(CFG), "cursor": LOADER.cursor, "dropped_ngrams": 5}


OFFSETS = np.array(LOADER.offsets)


def quiet(line):
    """In place of print."""


def numbers(seed: int = 0, cfg=CFG) -> dict[str, np.ndarray]:
    """kind.name -> an array of a training state, all of it different numbers."""
    rng = np.random.default_rng(seed)
    leaves = T.map_state(cfg, lambda shape, dtype, row: (shape, dtype))
    return {
        f"{kind}.{name}": rng.standard_normal(shape).astype(dtype)
        for kind, names in leaves.items()
        for name, (shape, dtype) in names.items()
    }


def stored(found: dict) -> dict:
    """The same as it lies in a checkpoint, which has the bits of bfloat16 as numbers."""
    found = found | {"loader.offsets": OFFSETS}
    short = {name: x for name, x in found.items() if x.dtype.itemsize == 2}
    assert [*short] == ["params.ngram_table"]
    return found | {name: x.view(np.uint16) for name, x in short.items()}


def state_of(found: dict, mesh, cfg=CFG):
    """These numbers as a training state on the devices of `mesh`: most need padding there."""
    state = T.map_state(cfg, lambda shape, dtype, row: None)
    return {
        kind: lay(cfg, {name: found[f"{kind}.{name}"] for name in names}, mesh)
        for kind, names in state.items()
    }


def rows_of(state) -> dict[str, np.ndarray]:
    """All that a process writes of a state."""
    copies, pieces = T.own_arrays(CFG, state)
    return dict(pieces) | copies


def write(folder, step: int, found: dict, devices: int = 8):
    """A checkpoint of one process with so many devices."""
    rows = rows_of(state_of(found, mesh_of(devices))) | {f"{T.OFFSETS}0": OFFSETS}
    T.write_checkpoint(folder, rows.items(), META | {"step": step})


@contextlib.contextmanager
def as_process(number: int, of: int = 2):
    """Inside, this is one of several processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: number)
        patch.setattr(jax, "process_count", lambda: of)
        yield


def write_as_two(folder, step: int, found: dict, devices: int = 8):
    """A checkpoint of two processes: of what is cut, each has the rows of half of the devices."""
    own, counts = [[(f"{T.OFFSETS}{i}", OFFSETS[i : i + 4])] for i in (0, 4)], Counter()
    for member, x in rows_of(state_of(found, mesh_of(devices))).items():
        name = member.rpartition(".")[0]
        own[counts[name] >= devices // 2].append((member, x))
        counts[name] += 1
    for process in (1, 0):
        with as_process(process):
            T.write_checkpoint(folder, own[process], META | {"step": step})


@pytest.fixture
def folder(tmp_path) -> T.Path:
    """RUN_DIR/checkpoints with the steps 6 (of one process) and 8 (of two)."""
    write(tmp_path / "checkpoints", 6, numbers(6))
    write_as_two(tmp_path / "checkpoints", 8, numbers(8))
    return tmp_path / "checkpoints"


# ------------------------------------------------------------------------------------------------
# What lies where
# ------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_a_folder_with_facts_and_one_file_of_each_process(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["6", "8"]
    assert sorted(path.name for path in (folder / "6").iterdir()) == ["0.npz", "meta.json"]
    assert sorted(path.name for path in (folder / "8").iterdir()) == ["0.npz", "1.npz", "meta.json"]
    meta = json.loads((folder / "8/meta.json").read_text())["checkpoint"]
    assert meta == json.loads(json.dumps(META)) | {"step": 8, "processes": 2}


def test_members_are_named_by_kind_parameter_and_first_row_and_hold_no_padding(folder):
    table, want, each = T.param_table(CFG), stored(numbers()), {}
    with np.load(folder / "6/0.npz") as file:
        for member in file.files:
            name, _, first = member.rpartition(".")
            each.setdefault(name, []).append((int(first), len(file[member])))
            assert file[member].shape[1:] == want[name].shape[1:]
            assert file[member].dtype == want[name].dtype
    assert each.keys() == want.keys()
    assert {name.split(".")[0] for name in each} == {
        *("params", "first", "second", "fast", "slow", "equaliser", "loader"), *T.AVERAGES
    }  # fmt: skip
    # 104 rows on 8 devices are 13 each; of the last device's, 10 are of the table
    assert each["first.embed"] == [*((13 * i, 13) for i in range(7)), (91, 10)]
    # of 522 rows each device has 66, the last one 60; their second moments lie as they do
    assert each["params.ngram_table"] == [*((66 * i, 66) for i in range(7)), (462, 60)]
    assert each["second.ngram_table"] == each["params.ngram_table"]
    # of 16 matrices 6 are padding
    assert each["slow.mlp_bank"] == [(2 * i, 2) for i in range(5)]
    assert each["loader.offsets"] == [(0, 8)]
    assert each["params.smear_gate"] == [(0, 1)]
    with np.load(folder / "8/0.npz") as first, np.load(folder / "8/1.npz") as second:
        assert "params.embed.39" in first.files and "params.embed.52" in second.files
        assert "params.smear_gate.0" in first.files
        assert {name.split(".")[1] for name in second.files} == {"offsets"} | {
            name for name, row in table.items() if row.sharded
        }


def test_what_is_read_says_all_that_was_written(folder):
    saved = T.read_checkpoint(folder / "8")
    want = {key: value for key, value in META.items() if key not in ("config", "cursor")}
    want |= {"cfg": CFG, "step": 8, "loader": LOADER, "processes": 2}
    assert saved == T.Saved(folder=folder / "8", **want)
    assert type(saved.loader) is T.LoaderState
    for step in (6, 8):
        assert_same_arrays(arrays(folder / str(step)), stored(numbers(step)))


# ------------------------------------------------------------------------------------------------
# Any number of devices and processes
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("step", [6, 8])
def test_any_number_of_devices_reads_what_any_number_has_written(folder, tmp_path, step, devices):
    state = T.load_state(mesh_of(devices), T.read_checkpoint(folder / str(step)))
    want = state_of(numbers(step), mesh_of(devices))
    assert jax.tree.structure(state) == jax.tree.structure(want)
    for got, same in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        assert (got.dtype, got.sharding) == (same.dtype, same.sharding)
        np.testing.assert_array_equal(got, same)  # zeros where there is padding
    rows = rows_of(state) | {f"{T.OFFSETS}0": OFFSETS}
    T.write_checkpoint(tmp_path / "again", rows.items(), META | {"step": step})
    assert_same_arrays(arrays(tmp_path / f"again/{step}"), stored(numbers(step)))


def test_a_part_of_the_state_can_be_read_alone(folder):
    state = T.load_state(mesh_of(1), T.read_checkpoint(folder / "8"), kinds=("params",))
    assert state.keys() == {"params"} and state["params"].keys() == T.param_table(CFG).keys()


@contextlib.contextmanager
def peak_below(size: int):
    """Inside, Python and numpy never take more bytes (jax's arrays are on the devices)."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size, f"{peak:,} bytes on the host"


@pytest.mark.parametrize("devices", [1, 4])
def test_no_host_ever_has_the_whole_ngram_table(tmp_path, monkeypatch, devices):
    """Nor the share of a device, where that is large: the record's table takes 65 GB."""
    cfg, size = replace(CFG, ngram_rows=2**18 + 6), 2**18
    monkeypatch.setattr(T, "PIECE", size)
    found = numbers(cfg=cfg)
    state = state_of(found, mesh_of(devices), cfg)
    half = found["params.ngram_table"].nbytes // 2
    with peak_below(half):
        copies, pieces = T.own_arrays(cfg, state)
        meta = META | {"step": 2, "config": asdict(cfg)}
        copies[f"{T.OFFSETS}0"] = OFFSETS
        T.write_checkpoint(tmp_path, chain(pieces, copies.items()), meta)
    with zipfile.ZipFile(tmp_path / "2/0.npz") as file:
        sizes = [x.file_size for x in file.infolist() if x.filename.startswith("params.ngram")]
    assert len(sizes) > 64 and max(sizes) <= size + 128  # numpy's header
    saved = T.read_checkpoint(tmp_path / "2")
    with peak_below(half):
        again = T.load_state(mesh_of(devices), saved)
    for got, same in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert (got.dtype, got.sharding) == (same.dtype, same.sharding)
        np.testing.assert_array_equal(got, same)


def test_what_is_copied_of_the_state_stays():
    """The next step takes the memory of the state while the thread of the Saver still writes."""
    state, want = state_of(numbers(), mesh_of(2)), numbers()
    copies, pieces = T.own_arrays(CFG, state)
    table = [piece.copy() for _, piece in pieces]
    spoil = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * 0 - 1, x), donate_argnums=0)
    jax.block_until_ready(spoil(state))
    got = {"params.ngram_table": table}
    for name, x in copies.items():
        got.setdefault(name.rpartition(".")[0], []).append(x)
    assert_same_arrays({name: np.concatenate(x) for name, x in got.items()}, want)


def test_training_waits_until_the_table_is_written_and_no_longer(tmp_path, monkeypatch):
    state, written, goes_on = state_of(numbers(), mesh_of(2)), [], threading.Event()

    def write_checkpoint(folder, rows, meta, leaving, real=T.write_checkpoint):
        def seen():
            for name, x in rows:
                if name.startswith("params.ngram_table."):
                    time.sleep(0.2)
                else:
                    assert goes_on.wait(10)
                yield name, x
                written.append(name)

        real(folder, seen(), meta, leaving)

    log = SimpleNamespace(
        folder=tmp_path,
        meta=lambda step, cursor: META | {"step": step, "cursor": cursor},
        sync=lambda: None,
        write=lambda name, line: written.append(line),
    )
    monkeypatch.setattr(T, "write_checkpoint", write_checkpoint)
    with T.Saver(CFG, mesh_of(8), log) as saver:
        saver.save(2, state, LOADER)
        assert written == ["params.ngram_table.0", "params.ngram_table.261"]
        goes_on.set()
    assert not saver.missing and {*rows_of(state), "loader.offsets.0"} == {*written[:-1]}
    size = (tmp_path / "checkpoints/2/0.npz").stat().st_size / 1e6
    assert re.fullmatch(
        rf"checkpoint:2 held the loop for [\d.]+ms, {size:.1f} MB written in [\d.]+s", written[-1]
    )


# ------------------------------------------------------------------------------------------------
# A checkpoint that can be seen is whole
# ------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As by SIGKILL: nothing of the program runs after it."""


CALLS = [(os, "fsync"), (os, "replace"), (os, "rename"), (shutil, "rmtree")]
CALLS += [(zipfile, "ZipFile")]


def kill_at(patch, number: int, after: bool):
    """The process ends in the `number`-th call that touches the disk: before it, or amid it."""
    calls = []

    def mortal(real, *args, **kwargs):
        calls.append(real)
        if len(calls) != number + 1:
            return real(*args, **kwargs)
        if after:  # a folder that is removed loses some of its files
            if real is shutil.rmtree:
                next(T.Path(args[0]).iterdir()).unlink()
            else:
                real(*args, **kwargs)
        raise Killed

    for owner, name in CALLS:
        patch.setattr(owner, name, partial(mortal, getattr(owner, name)))
    return calls


@pytest.mark.parametrize("after", [False, True])
def test_wherever_a_process_is_killed_it_leaves_whole_checkpoints_only(tmp_path, after):
    """While it writes the third, which takes the place of the first."""
    for step in (2, 4):
        write(tmp_path / "whole", step, numbers(step), devices=1)
    number, ended = 0, False
    while not ended:
        folder = shutil.copytree(tmp_path / "whole", tmp_path / f"{number}")
        with pytest.MonkeyPatch.context() as patch:
            calls = kill_at(patch, number, after)
            try:
                write(folder, 6, numbers(6), devices=1)
                ended = True
            except Killed:
                number += 1
        seen = T.checkpoint_steps(folder)
        assert {*seen} >= {4} and {*seen} <= {2, 4, 6}
        for step in seen:
            assert T.read_checkpoint(folder / str(step)).step == step
            assert_same_arrays(arrays(folder / str(step)), stored(numbers(step)))
    assert sorted(seen) == [4, 6] and number == len(calls) >= 8


def test_process_0_waits_for_the_rows_of_the_others(tmp_path, monkeypatch):
    """And gives up when they do not come, or when the run ends for another reason."""
    rows = rows_of(state_of(numbers(), mesh_of(2))).items()
    leaving = threading.Event()
    leaving.set()
    with as_process(0):
        with pytest.raises(OSError, match="no rows of process 1: does it see "):
            T.write_checkpoint(tmp_path, rows, META | {"step": 3}, leaving)
        monkeypatch.setattr(T, "PART_SECONDS", 0.1)
        with pytest.raises(OSError, match="no rows of process 1: does it see "):
            T.write_checkpoint(tmp_path, rows, META | {"step": 5}, threading.Event())
    assert T.checkpoint_steps(tmp_path) == []


def test_only_the_newest_two_are_kept(folder):
    write(folder, 10, numbers(10))
    assert sorted(path.name for path in folder.iterdir()) == ["10", "8"]


# ------------------------------------------------------------------------------------------------
# A damaged one is passed over
# ------------------------------------------------------------------------------------------------


def flip(file, at: int):
    """One bit of byte `at` other than it was."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-4]),
    "cut in half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "one bit": lambda file: flip(file, file.stat().st_size // 2),
    "not text": lambda file: file.write_bytes(b"\xff\xfe"),
    "a list": lambda file: file.write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["0.npz", "1.npz", "meta.json"])
def test_damaged_checkpoint_is_passed_over_with_a_warning(folder, damage, name):
    DAMAGE[damage](folder / "8" / name)
    said = []
    assert T.find_checkpoint(folder.parent, said.append).step == 6
    (line,) = said
    assert line.startswith(f"warning: {folder / '8'} cannot be used (") and "\n" not in line
    shutil.rmtree(folder / "6")
    with pytest.raises(T.UserError, match="no checkpoint in .*: name the folder of a run"):
        T.find_checkpoint(folder.parent, quiet)


@pytest.mark.parametrize("name", ["0.npz", "meta.json"])
def test_no_flipped_bit_changes_a_state(folder, name):
    """It is found, or it is where nothing stands that is read (a date in the zip, a space)."""
    path, rng, found = folder / "6" / name, np.random.default_rng(0), 0
    whole, want = path.read_bytes(), T.read_checkpoint(folder / "6")
    for at in rng.integers(len(whole), size=60):
        flip(path, at)
        try:
            assert T.read_checkpoint(folder / "6") == want
            assert_same_arrays(arrays(folder / "6"), stored(numbers(6)))
        except AssertionError:
            raise
        except Exception:  # whatever find_checkpoint passes over
            found += 1
        path.write_bytes(whole)
    assert found >= 40


def test_find_checkpoint_takes_the_newest_whole_one(folder):
    (folder / ".99").mkdir()  # what a killed process may leave
    (folder / "10").mkdir()
    (folder / "12").write_text("not a folder")
    shutil.copytree(folder / "6", folder / "14")  # a copy under another name
    said = []
    assert T.find_checkpoint(folder.parent, said.append).folder == folder / "8"
    assert [line.split()[1] for line in said] == [str(folder / str(n)) for n in (14, 12, 10)]


def test_what_was_passed_over_is_set_aside(folder):
    (folder / "damaged-8").mkdir()  # of an earlier time
    (folder / "8/meta.json").write_text("")
    T.set_aside(T.find_checkpoint(folder.parent, quiet))
    assert sorted(path.name for path in folder.iterdir()) == ["6", "damaged-8"]
    assert sorted(path.name for path in (folder / "damaged-8").iterdir())[0] == "0.npz"
    assert T.checkpoint_steps(folder) == [6]


@pytest.mark.parametrize(
    ("member", "array", "words"),
    [
        ("first.embed.0", np.zeros((13, 31), np.float32), r"first.embed.0 is float32\[13, 31\]"),
        ("first.embed.0", np.zeros((13, 32)), r"float64\[13, 32\], .*float32\[13, 32\]"),
        ("first.embed.0", np.zeros((12, 32), np.float32), r"\[12, 32\], .*float32\[13, 32\]"),
        (
            "params.ngram_table.0",
            np.zeros((66, 32), np.float32),
            r"float32\[66, 32\], not uint16\[66, 32\]",
        ),
        ("params.ngram_table.0", np.zeros((66, 31), np.uint16), r"not uint16\[66, 32\]"),
        ("second.ngram_table.0", np.zeros((66, 1), np.float32), r"not float32\[66\]"),
        ("slow.qk_bank.0", None, "lacks rows of slow.qk_bank: use another"),
        ("first.embed.0", None, "lacks rows of first.embed: use another"),
        ("params.smear_gate.0", None, "lacks rows of params.smear_gate"),
    ],
)
def test_array_of_another_program_is_refused(folder, member, array, words):
    with np.load(folder / "6/0.npz") as file:
        members = {name: file[name] for name in file.files}
    changed = members | {member: array} if array is not None else members
    if array is None:
        del changed[member]
    np.savez(folder / "6/0.npz", **changed)
    with pytest.raises(T.UserError, match=words) as error:
        T.load_state(mesh_of(8), T.read_checkpoint(folder / "6"))
    assert "\n" not in str(error.value)
