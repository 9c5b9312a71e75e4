"""Memory of programs, before and after compiling, and the compiler's errors."""

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
from programs import (
    CFG,
    FakeMesh,
    by_name,
    fake_devices,
    mesh_of,
    named,
    programs_of,
    quick_compilation,
)
from training import BRIEF

import train_gpt as T

KERNELS, _ = T.choose_kernels(CFG, jax.devices()[0])
RECORD = T.Config()
GIB = 2**30


class Compiled:
    """An executable that reports `peak` bytes."""

    def __init__(self, peak: int):
        self.memory = SimpleNamespace(peak_memory_in_bytes=peak)

    def memory_analysis(self):
        return self.memory


class Mesh(FakeMesh):
    """A mesh of CPUs that report `limit` bytes of memory."""

    def __init__(self, devices, limit):
        super().__init__(jax.devices()[:devices])
        stats = None if limit is None else {"bytes_limit": limit}
        self.local_devices = [SimpleNamespace(memory_stats=lambda: stats)]


def compiled_with(monkeypatch, cfg, devices, limit, peak=0, say=lambda line: None):
    """Return compile_all if each program needs `peak` bytes in addition to other arrays."""
    made = []
    built = SimpleNamespace(compile=lambda: (made.append(1), Compiled(peak=peak))[1])
    monkeypatch.setattr(T.Program, "lower", lambda *_: built)
    monkeypatch.setattr(T, "programs", lambda cfg, mesh, *_, real=T.programs: real(cfg, plain, *_))
    plain = mesh_of(devices)
    try:
        return T.compile_all(cfg, Mesh(devices, limit), KERNELS, say), made
    except T.UserError as error:
        return str(error), made


# ---- Before compiling: the estimate ------------------------------------------------------------


def refused(cfg, mesh) -> str:
    """Return the error of check_memory for a run that does not fit."""
    with pytest.raises(T.UserError) as error:
        T.check_memory(cfg, mesh)
    return str(error.value)


def test_a_run_that_does_not_fit_is_refused_with_settings_that_fit():
    mesh = FakeMesh(fake_devices("H100:59.3"))
    line = refused(RECORD, mesh)
    form = r"grads3 needs [\d.]+ GiB per device, but only 57.3 of 59.3 GiB are usable: "
    fix = re.fullmatch(form + r"add --set (ngram_rows=\d+), or use more devices", line)[1]
    T.check_memory(T.override(RECORD, [fix]), mesh)
    line = refused(RECORD, FakeMesh(fake_devices("TPU v6 lite:4")))
    assert line.endswith("use smaller sizes, such as those of tiny, or more devices")


def test_without_the_tool_for_estimates_kept_arrays_are_counted(monkeypatch):
    """As for a copy of train_gpt.py without records/: the refusal then has no settings."""
    mesh = FakeMesh(fake_devices("H100:59.3"))
    full = T.expected_bytes(RECORD, mesh)
    monkeypatch.setattr(T, "records_tool", lambda name: None)
    kept = T.expected_bytes(RECORD, mesh)
    assert kept.keys() == full.keys() and all(kept[name] <= full[name] for name in kept)
    assert kept["grads3"] < full["grads3"]
    assert refused(RECORD, mesh).endswith("such as those of tiny, or more devices")


@pytest.mark.parametrize("devices, limit", [(1, 90 * GIB), (8, 31.25 * GIB), (1, None)])
def test_a_run_that_fits_is_compiled(monkeypatch, devices, limit):
    monkeypatch.setattr(os, "sysconf", lambda name: 2**20)  # pages of a machine with CPUs
    line = T.check_memory(RECORD, Mesh(devices, limit))
    form = r"it fits: about [\d.]+ of [\d.]+ GiB per device"
    if limit is None:
        form = r"it needs about [\d.]+ GiB per device .of unknown memory."
    assert re.fullmatch(form, line)
    _, made = compiled_with(monkeypatch, RECORD, devices, limit)
    assert len(made) == len(T.programs(RECORD, mesh_of(devices), KERNELS))


def test_a_run_needs_the_memory_of_a_machine_with_cpus(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 2**17)
    line = refused(RECORD, Mesh(1, None))
    form = r"speedrun needs about 86\.\d GiB, and jax sees only CPUs, with 16\.0 GiB: use tiny, "
    assert re.match(form, line)


def test_the_smallest_memory_of_all_devices_counts():
    mesh = SimpleNamespace(local_devices=fake_devices("A100:59", "A100:30"))
    assert T.memory_limit(mesh) == 30 * GIB


@pytest.mark.parametrize("gib", [0.5, 1.5, 3])
def test_tiny_fits_the_smallest_gpus(machine, gib):
    machine(f"T1000:{gib}")
    T.check_memory(*T.make_mesh(T.PRESETS["tiny"]))


@pytest.mark.parametrize("stats", [None, {}, {"bytes_limit": 0}])
def test_a_gpu_that_does_not_report_its_memory_is_accepted(machine, stats):
    """As with XLA_PYTHON_CLIENT_ALLOCATOR=platform. The loss is then computed in chunks."""
    (gpu,) = machine("H100")
    gpu.memory_stats = lambda: stats
    cfg, mesh = T.make_mesh(RECORD)
    assert T.check_memory(cfg, mesh).endswith("GiB per device (of unknown memory)")
    assert T.with_whole_loss(cfg, mesh, T.memory_limit(mesh)).whole_loss == "never"


@pytest.mark.parametrize("kind, devices, settings, whole_loss", [
    ("TPU v6 lite:31.25", 8, "", "always"),
    ("TPU v6 lite:31.25", 4, "ngram_rows=39059456", "never"),
    ("H100:59.3", 8, "", "always"),
    ("H100:59.3", 8, "whole_loss=never", "never"),
    ("H100:59.3", 8, "pointer_width=64", "never"),  # its logits are float32
    ("H200:104.8", 1, "", "always"),
    ("H100:59.3", 1, "ngram_rows=22675456", "never"),
    ("A100:29.6", 8, "", "never"),
    ("A100:29.6", 8, "whole_loss=always", "always"),
])  # fmt: skip
def test_the_loss_is_computed_at_once_if_its_logits_fit_four_times(
    machine, kind, devices, settings, whole_loss
):
    machine(*[kind] * devices)
    cfg, mesh = T.make_mesh(T.override(RECORD, settings.split()))
    assert T.with_whole_loss(cfg, mesh, T.memory_limit(mesh)).whole_loss == whole_loss


# ---- Compiling ---------------------------------------------------------------------------------


def test_a_program_that_does_not_fit_once_compiled_is_refused(monkeypatch):
    """The compiler then reports the bytes of its temporary arrays."""
    line, made = compiled_with(monkeypatch, RECORD, 1, 80 * GIB, peak=75 * GIB)
    assert made and re.search(r" of 80.0 GiB are usable: add --set ngram_rows=\d+, ", line)
    cfg, mesh = replace(RECORD, whole_loss="always"), FakeMesh(fake_devices(*["H100:28"] * 8))
    line = T.memory_refusal(cfg, mesh, "grads3", 27.9 * GIB, 28 * GIB)
    assert line.endswith("add --set whole_loss=never, or use more devices")


@pytest.mark.slow
def test_warm_up_needs_no_more_memory_than_expected():
    """At the start of each program, all live arrays except its own take at most the bytes that
    compile_all counts."""
    cfg, mesh = replace(BRIEF, steps=8), mesh_of(2)  # other tests have compiled it
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
    assert not [x for x in jax.live_arrays() if id(x) not in before]  # all arrays are freed


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (73.72G) exceeds available HBM (31.25G).",
            r"grads0 needs 8[12]\.\d GiB .* of 31.2 GiB .*: add --set ngram_rows=\d+, .*: ",
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
def test_errors_of_the_compiler_are_complete_and_have_a_fix(monkeypatch, text, said):
    def compile():
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(T, "cpu_cores", lambda: 1)  # programs are compiled one by one
    monkeypatch.setattr(T.Program, "lower", lambda *_: SimpleNamespace(compile=compile))
    with pytest.raises(T.UserError) as error:
        T.compile_all(RECORD, mesh_of(1), KERNELS, lambda line: None)
    assert re.fullmatch(rf"\S+ cannot be compiled: {said}{re.escape(text)}", str(error.value))


def test_an_error_while_other_programs_compile_ends_the_run_at_once(monkeypatch):
    """It does not wait for them, and starts no more."""
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


def test_messages_about_other_processes_need_several(monkeypatch, capsys):
    """A distributed client of JAX is not enough, as on a TPU VM. The error is complete."""
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
    """A profile then distinguishes updates by the same function."""
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
    """A cache would not find them otherwise. Sets have another order in each process."""
    started = []
    for seed in "12":
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/helpers")))
        of_process = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        command = sys.executable, "-c", LOWERED
        started.append(subprocess.Popen(command, env=of_process, stdout=subprocess.PIPE, text=True))
    one, other = (process.communicate()[0] for process in started)
    assert one.startswith("grads0 ") and one == other


def test_options_of_sparse_cores_can_be_disabled():
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
    """Here for a CPU. Programs of another preset are compiled."""
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
            T.compile_all(cfg, mesh, T.choose_kernels(cfg, jax.devices()[0])[0])
            found.append(events.count("/jax/compilation_cache/cache_hits"))
    assert f"saved: copy {tmp_path}/new/dir to v6e-8" in capsys.readouterr().out
    count = len(T.programs(BRIEF, mesh, T.PLAIN))
    assert found[0] == count > found[1]


# ---- Bytes of other arrays in memory -----------------------------------------------------------

HEADS = 2 * 38_633_472  # head and embedding of the record
VALUES, NGRAMS = 154_533_888, 42_301_440
QK, OTHERS = 48 * 256 * 768, 16 * 768**2 + 24 * 2816 * 768  # padded for eight devices
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
def test_bytes_of_other_arrays_during_a_program_on_eight_devices(
    name, changes, adam_steps, table_steps, beside
):
    """An upper bound. Arguments and results of the program are not included."""
    lanes = 48 * 768 + 16 * 768 + 24 * 2816  # mean squares of banks
    kept = 4 * (HEADS + VALUES) + 4 * QK + 5 * OTHERS + lanes + NGRAMS  # averages included
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
