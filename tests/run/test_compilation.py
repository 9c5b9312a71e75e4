"""Compilation: what programs need of a device's memory, and what is said where that is too much."""

import gc
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import preflight
import pytest
from conftest import ROOT
from programs import CFG, by_name, mesh_of, named, programs_of, quick_compilation
from training import BRIEF

import train_gpt as T

KERNELS, _ = T.pick_kernels(CFG, jax.devices()[0])
RECORD = T.Config()
GIB = 2**30


class Compiled:
    """An executable that needs so many bytes."""

    def __init__(self, peak: int):
        self.memory = SimpleNamespace(peak_memory_in_bytes=peak)

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
    monkeypatch.setattr(T.Program, "lower", lambda *_: built)
    monkeypatch.setattr(T, "programs", lambda cfg, mesh, *_, real=T.programs: real(cfg, plain, *_))
    plain = mesh_of(devices)
    try:
        return T.compile_all(cfg, Mesh(devices, limit), KERNELS, say), made
    except T.UserError as error:
        return str(error), made


def kind_of(devices: int, limit: float, platform: str, capability="9.0"):
    """A mesh of devices that are not here, for questions about memory."""
    mesh = Mesh(devices, limit)
    mesh.devices = SimpleNamespace(
        flat=[SimpleNamespace(platform=platform, device_kind="", compute_capability=capability)]
    )
    return mesh


def refused(monkeypatch, cfg, mesh) -> str:
    """What check_memory says of a run that does not fit."""
    plain = mesh.mesh
    monkeypatch.setattr(T, "programs", lambda cfg, mesh, *_, real=T.programs: real(cfg, plain, *_))
    with pytest.raises(T.UserError) as error:
        T.check_memory(cfg, mesh)
    return str(error.value)


# GiB of a device, what compilers for it said of the largest program with all that lies beside it,
# less the n-gram table.
CHIPS = [
    ("tpu", 1, 31.25, 21.8, "grads3"),
    ("tpu", 8, 15.75, 11.9, "grads3"),
    ("gpu", 1, 59.3, 24.7, "grads3"),
]


@pytest.mark.parametrize("platform, devices, limit, beside, name", CHIPS)
def test_the_rows_that_a_refusal_names_fit_and_few_more_would(
    monkeypatch, platform, devices, limit, beside, name
):
    """By what was compiled, with 2 GiB to spare and at most 1.2 GiB left over; other settings make
    room for more."""
    mesh = kind_of(devices, limit * GIB, platform)
    line = refused(monkeypatch, RECORD, mesh)
    form = rf"{name} needs [\d.]+ GiB of the {limit:.1f} GiB of a device, 2.0 of which must stay"
    setting = re.fullmatch(form + r" free: add --set (ngram_rows=\d+), or use more devices", line)[
        1
    ]
    fits = T.override(RECORD, [setting])
    table = fits.ngram_rows * (2 * 768 + 4) / devices / GIB
    assert 0 <= limit - 2 - beside - table <= 1.2
    T.check_memory(fits, mesh)
    line = refused(monkeypatch, replace(fits, ngram_rows=fits.ngram_rows + 2**16), mesh)
    assert f"--set {setting}, or" in line


VALIDATION, AGAIN = "val_row val_batch", "recompute rows_at_once"


@pytest.mark.parametrize(
    "limit, settings",
    [
        (59.3, "ngram_rows"),  # H100
        (29.6, "ngram_rows"),  # A100 of 40 GB
        (23.5, f"ngram_rows {VALIDATION} {AGAIN}"),  # RTX 5090
        (17.7, f"ngram_rows {VALIDATION} {AGAIN} table_every"),  # RTX 4090
        (16.5, f"ngram_rows {VALIDATION} {AGAIN} table_every micro_tokens"),  # L4
        (10.9, f"without {AGAIN} table_every micro_tokens {VALIDATION}"),  # as a T4 with kernels
    ],
)
def test_a_refusal_names_what_fits_and_has_the_most_ngrams(monkeypatch, limit, settings):
    mesh = kind_of(1, limit * GIB, "gpu")
    line = refused(monkeypatch, RECORD, mesh)
    items = re.search("add --set (.*), or use more devices$", line)[1].split()
    assert [item.partition("=")[0] for item in items] == settings.split()
    cfg = T.override(RECORD, items)
    assert cfg.ngram_rows >= 400_000 or not cfg.ngram_rows
    fits = T.for_devices(cfg, 1)
    T.check_memory(fits, mesh)
    longest = max(stage.row_tokens for stage in fits.stages)
    assert longest == min(cfg.micro_tokens, 49_152)
    for stage, before in zip(fits.stages, RECORD.stages, strict=True):
        assert stage.batch_tokens == before.batch_tokens and stage.rows == fits.stages[0].rows


README = (ROOT / "README.md").read_text()
GPU_ROWS = re.findall(r"^\| one (.*) \| `(.*)` \| ([\d.]+) of ([\d.]+) \|", README, re.M)


@pytest.mark.parametrize("name, settings, size, limit", GPU_ROWS)
def test_the_table_of_the_readme_has_what_a_refusal_names(monkeypatch, name, settings, size, limit):
    capability = "7.5" if "T4" in name else "8.0"
    mesh = kind_of(1, float(limit) * GIB, "gpu", capability)
    line = refused(monkeypatch, RECORD, mesh)
    assert f"add --set {settings}, or" in line
    fits = T.for_devices(T.override(RECORD, settings.split()), 1)
    expected = max(T.expected_bytes(fits, mesh).values())
    assert f"{expected / GIB:.1f}" == size
    assert len(GPU_ROWS) == 7


def test_where_nothing_fits_other_sizes_or_devices_help(monkeypatch):
    line = refused(monkeypatch, RECORD, kind_of(1, 4 * GIB, "tpu"))
    assert line.endswith("use smaller sizes, such as those of tiny, or more devices")


@pytest.mark.parametrize("devices, limit", [(1, 90 * GIB), (8, 31.25 * GIB), (1, None)])
def test_a_run_that_fits_is_compiled(monkeypatch, devices, limit):
    monkeypatch.setattr(os, "sysconf", lambda name: 2**20)  # of the machine's memory, with CPUs
    T.check_memory(RECORD, Mesh(devices, limit))
    said = T.memory_line(RECORD, Mesh(devices, limit))
    form = r"it fits: about [\d.]+ GiB of the [\d.]+ GiB of a device"
    if limit is None:
        form = r"it needs about [\d.]+ GiB; this device does not report its memory"
    assert re.fullmatch(form, said)
    _, made = compiled_with(monkeypatch, RECORD, devices, limit)
    assert len(made) == len(T.programs(RECORD, mesh_of(devices), KERNELS))


def test_what_the_memory_of_a_machine_with_cpus_does_not_hold_is_refused(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 2**17)
    words = r"^speedrun needs about 86\.\d GiB, and jax sees only CPUs, with 16\.0: use tiny, or"
    with pytest.raises(T.UserError, match=words):
        T.check_memory(RECORD, Mesh(1, None))


def test_what_does_not_fit_once_it_has_compiled_is_refused(monkeypatch):
    """Then the bytes of what it makes on the way are known."""
    line, made = compiled_with(monkeypatch, RECORD, 1, 80 * GIB, peak=75 * GIB)
    assert made and re.search(r" GiB of the 80.0 GiB of .*: add --set ngram_rows=\d+, ", line)


@pytest.mark.slow
def test_warm_up_needs_no_more_than_what_was_said_to_fit():
    """With all arrays that are alive at a program's start, and what it makes itself, a device with
    just the bytes that compile_all counts would do."""
    cfg, mesh = replace(BRIEF, steps=8), mesh_of(2)  # as other tests have compiled it
    names = by_name({name: name for name in T.programs(cfg, mesh, T.PLAIN)})
    compiled = {names[name]: one for name, one in programs_of(cfg, 2).items()}
    counted = {}
    gc.collect()
    before = {id(x) for x in jax.live_arrays()}

    def watched(name, program):
        def run(*args):
            alive = [x for x in jax.live_arrays() if id(x) not in before]
            held = T.device_bytes(alive)
            own = T.device_bytes(T.programs(cfg, mesh, T.PLAIN)[name].args)
            counted[name] = held - own, T.resident_bytes(cfg, mesh, name)
            return program(*args)

        return run

    T.warm_up(cfg, mesh, T.PLAIN, {name: watched(name, one) for name, one in compiled.items()})
    assert counted.keys() == compiled.keys()
    for name, (held, allowed) in counted.items():
        assert held <= allowed, name
    gc.collect()
    assert not [x for x in jax.live_arrays() if id(x) not in before]  # and nothing stays


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (73.72G) exceeds available HBM (31.25G).",
            r"grads0 needs 8[12]\.\d GiB of the 31.2 GiB .*: add --set ngram_rows=\d+, .*: ",
        ),
        (
            "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out of memory in memory "
            'space vmem for %sum, metadata={op_name="jit(step)/weighted_sum/pallas_call" id=1}',
            "--set kernels=plain runs without kernels: ",
        ),
        ("INVALID_ARGUMENT: No such compile option: 'xla_tpu_x'", "--set sparse_cores=0 .*: "),
        ("INTERNAL: Mosaic failed to compile TPU kernel: " + "x" * 900, "--set kernels=plain .*: "),
        ("INTERNAL: Triton compilation failed", "--set kernels=plain .*: "),
        ("INTERNAL: whatever else " + "x" * 900, ""),
    ],
)
def test_what_a_compiler_says_is_shown_whole_with_what_to_do(monkeypatch, text, said):
    def compile():
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(T, "cpu_cores", lambda: 1)  # so that programs are compiled one by one
    monkeypatch.setattr(T.Program, "lower", lambda *_: SimpleNamespace(compile=compile))
    with pytest.raises(T.UserError) as error:
        T.compile_all(RECORD, mesh_of(1), KERNELS, lambda line: None)
    assert re.fullmatch(rf"\S+ cannot be compiled: {said}{re.escape(text)}", str(error.value))


def test_a_refusal_while_others_compile_ends_the_run_at_once(monkeypatch):
    """It neither waits for the rest nor compiles what has not begun."""
    started, over = [], threading.Event()

    def compile_one(cfg, mesh, key, lowered):
        started.append(key)
        if len(started) == 2:
            raise T.UserError("the second does not fit")
        over.wait(60)

    monkeypatch.setattr(T, "cpu_cores", lambda: 2)
    monkeypatch.setattr(T.Program, "lower", lambda *_: None)
    monkeypatch.setattr(T, "compile_one", compile_one)
    began = time.monotonic()
    with pytest.raises(T.UserError, match="the second does not fit"):
        T.compile_all(BRIEF, mesh_of(1), T.PLAIN, lambda line: None)
    assert time.monotonic() - began < 20 and len(started) <= 4
    over.set()


def test_a_command_with_an_error_does_not_wait_for_threads():
    code = "import train_gpt as T, concurrent.futures as f, time\n"
    code += "f.ThreadPoolExecutor(1).submit(time.sleep, 60)\nprint('so far')\nT.end_process(2)"
    done = subprocess.run([sys.executable, "-c", code], timeout=40, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, b"so far\n")


def test_on_one_process_no_message_speaks_of_others(monkeypatch, capsys):
    """Also where jax's distributed client runs, as on a TPU VM; no text is cut."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(T.os, "_exit", lambda status: None)
    text = "INTERNAL: " + "y" * 900

    def fail():
        raise jax.errors.JaxRuntimeError(text)

    with pytest.raises(jax.errors.JaxRuntimeError):
        T.report_errors(fail)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert T.report_errors(fail) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: another process has ended") and text in said


def test_a_module_has_the_name_of_its_program():
    """So a trace tells apart what updates of the same function execute."""
    mesh = mesh_of(1)
    every = T.programs(BRIEF, mesh, T.PLAIN).values()
    updates = [program for program in every if program.name.startswith(("anvil", "tables"))]
    assert len(updates) > 1
    for program in updates:
        assert f"module @jit_{program.name} " in program.lower().as_text().replace('"', "")


LOWERED = """
import hashlib, programs, training
import train_gpt as T
cfg, mesh = T.override(training.BRIEF, ["compute_dtype=bfloat16"]), programs.mesh_of(1)
for program in T.programs(cfg, mesh, T.PLAIN).values():
    print(program.name, hashlib.sha256(program.lower().as_text().encode()).hexdigest())
"""


def test_programs_are_the_same_in_every_process():
    """Or a cache of compiled ones would not find them: a set of names has another order in each."""
    started = []
    for seed in "12":
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/helpers")))
        of_process = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        command = sys.executable, "-c", LOWERED
        started.append(subprocess.Popen(command, env=of_process, stdout=subprocess.PIPE, text=True))
    one, other = (process.communicate()[0] for process in started)
    assert one.startswith("grads0 ") and one == other


def test_options_of_sparse_cores_can_be_left_out():
    """They stand in the log as they are, see run_facts."""
    sent = "all_gather", "reduce_scatter", "dense_all_to_all", "2d_all_gather", "nd_reduce_scatter"
    assert T.compiler_options(RECORD, "tpu") == {
        **{f"xla_tpu_enable_sparse_core_collective_offload_{name}": True for name in sent},
        "xla_tpu_enable_offloading_scatter_to_sparsecore": True,
        "xla_tpu_offload_gather_to_sparsecore": False,
        "xla_tpu_offload_all_supported_gathers_to_sparsecore": False,
    }
    off = T.override(RECORD, ["sparse_cores=0"])
    for cfg in (RECORD, off):
        assert T.compiler_options(cfg, "gpu") == {"xla_allow_excess_precision": False}
        assert T.compiler_options(cfg, "cpu") == {}
    assert T.compiler_options(off, "tpu") == {}


@pytest.mark.slow
def test_the_trainer_finds_saved_executables(program_cache, monkeypatch, tmp_path, capsys):
    """Of a CPU, for which jax's cache works as for TPUs; others are compiled."""
    monkeypatch.setattr(T, "PRESETS", {"brief": BRIEF, "other": replace(BRIEF, mlp_width=48)})
    monkeypatch.setattr(preflight, "absent_devices", lambda target: jax.devices())
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    found = []
    with quick_compilation():
        assert preflight.main(["v6e-8", "brief", "--save", str(tmp_path / "new/dir")]) == 0
        for cfg in T.PRESETS.values():
            mesh = T.make_mesh(cfg)[1]
            events.clear()
            T.compile_all(cfg, mesh, T.pick_kernels(cfg, jax.devices()[0])[0])
            found.append(events.count("/jax/compilation_cache/cache_hits"))
    assert f"saved: copy {tmp_path}/new/dir to v6e-8" in capsys.readouterr().out
    count = len(T.programs(BRIEF, mesh, T.PLAIN))
    assert found[0] == count > found[1]


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
        ("grads3", {"adam_every": 1, "table_every": (1, 1)}, 0, 0, "state"),
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
    # Gradients of a step; in the largest stage 10,384 n-gram rows from each of 8 devices.
    adam, tables = 2 * HEADS + 4 * SMALL, 2 * VALUES + 8 * 10_384 * (4 + 2 * 768)
    cfg = replace(RECORD, **changes)
    want = sum(sizes[part] for part in beside.split()) + adam_steps * adam + table_steps * tables
    assert T.resident_bytes(cfg, mesh_of(8), named(cfg, name)) == want
