"""Several processes that join, devices of a run, and errors of accelerators."""

import os
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from conftest import small_config
from programs import fake_devices

import train_gpt as T


@pytest.fixture
def joined(monkeypatch):
    """The arguments of each call of jax.distributed.initialize, in an environment without variables
    of launchers."""
    calls = []

    def initialize(*named, local_device_ids):
        calls.append((*named, local_device_ids))

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for name in (*T.LAUNCHERS, *T.TPU_HOSTS, "SLURM_STEP_NUM_NODES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    return calls


def join(*options):
    """Call join_processes with these options of the command line."""
    T.join_processes(T.parse([str(option) for option in options]))


def named(coordinator, processes, process_id) -> list:
    """Return the options that name the other processes."""
    group = ["--coordinator", coordinator, "--processes", processes]
    return [*group, "--process-id", process_id]


# ---- Joining the other processes ---------------------------------------------------------------


def test_a_process_without_options_is_alone(joined):
    join()
    join("--set", "steps=3")
    assert joined == []


def test_distributed_leaves_the_search_to_jax_and_coordinator_names_the_others(joined):
    join("--distributed")
    join(*named("node1:1", 2, 1))
    assert joined == [(None, None, None, None), ("node1:1", 2, 1, None)]


@pytest.mark.parametrize("options", [
    named("node1:1", 2, 1)[:-2],
    named("node1:1", 2, 1)[:2],
    ["--processes", "2"],
    ["--process-id", "0"],
    ["--distributed", "--process-id", "0"],
    ["--distributed", *named("node1:1", 2, 1)],
])  # fmt: skip
def test_incomplete_or_contradicting_options_are_refused(joined, options):
    with pytest.raises(T.UserError, match="--distributed or --coordinator .* --processes N --proc"):
        join(*options)
    assert joined == []


@pytest.mark.parametrize("variable", [*T.LAUNCHERS, *T.TPU_HOSTS])
def test_processes_of_a_launcher_are_refused_without_either_option(joined, monkeypatch, variable):
    """Each process would train a whole run. The message names both options, and the command for
    a single process."""
    one, two = ("1", "2") if variable in T.LAUNCHERS else ("localhost", "host-0,host-1")
    for value in ("", one):
        monkeypatch.setenv(variable, value)
        join()
    monkeypatch.setenv(variable, two)
    with pytest.raises(T.UserError) as refusal:
        join()
    for part in (f"{variable}={two}", "--distributed", "--coordinator", f"env -u {variable} "):
        assert part in str(refusal.value)
    assert joined == []
    join("--distributed")
    join(*named("node1:1", 2, 1))
    assert len(joined) == 2
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # one host of a TPU slice may use its CPU
    if variable in T.TPU_HOSTS:
        join()


@pytest.mark.parametrize(
    "tasks, nodes, options, gpus",
    [
        ("2", "2", ["--distributed"], []),  # [] is all GPUs; with None JAX uses one
        ("16", "2", ["--distributed"], None),
        ("1", "1", named("node1:1", 2, 1), []),  # each process in its own shell
    ],
)
def test_the_only_slurm_task_of_a_node_uses_all_its_gpus(
    joined, monkeypatch, tasks, nodes, options, gpus
):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", nodes)
    join(*options)
    assert [call[-1] for call in joined] == [gpus]


def test_jax_uses_all_gpus_for_an_empty_list(monkeypatch):
    """Run the code of JAX up to this choice."""
    from jax._src import distributed

    variables = {"JOB_ID": "7", "STEP_NODELIST": "node[1-2]", "NTASKS": "2", "PROCID": "1"}
    for name, value in (variables | {"LOCALID": "0"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    seen = []
    monkeypatch.setattr(distributed, "_jax", None)
    monkeypatch.setattr(distributed.config, "update", lambda *args: seen.append(args))
    for gpus, want in (([], []), (None, [("jax_cuda_visible_devices", "0")])):
        with pytest.raises(AttributeError):
            distributed.State().initialize(local_device_ids=gpus)
        assert [x for x in seen if "cuda" in x[0]] == want


def test_devices_of_several_hosts_need_an_option(monkeypatch):
    """JAX shows all devices of a TPU slice to a process that has not joined the others."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(T.UserError, match="several hosts: add --distributed on each"):
        T.all_devices()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert T.all_devices() == jax.devices()


# ---- Waiting for the other processes -----------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, ImportError, OSError])
def test_a_failure_to_join_is_reported(joined, monkeypatch, error):
    def initialize(*named, **options):
        raise error("nothing found")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(T.UserError, match="cannot join the other processes .*nothing found"):
        join("--distributed")


def test_a_port_in_use_is_reported_by_the_first_process(joined):
    """JAX would end by a signal."""
    with socket.create_server(("", 0)) as other:
        where = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(T.UserError, match=f"already in use.*--coordinator {where} --processes"):
            join(*named(where, 2, 0))
        join(*named(where, 2, 1))
    join(*named(where, 2, 0))
    assert joined == [(where, 2, 1, None), (where, 2, 0, None)]


def test_a_long_wait_for_other_processes_prints_a_line_and_ends(joined, monkeypatch, capsys):
    assert T.from_processes(3) == [3] and not capsys.readouterr().out
    monkeypatch.setattr(T, "STALL_SECONDS", 0.1)
    assert T.wait_for(lambda: time.sleep(0.5) or 5) == 5
    assert capsys.readouterr().out == f"{T.LONG_WAIT}\n"
    over, real = threading.Event(), T.wait_for
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: over.wait(60))
    shorter = lambda task, message, timeout: real(task, message, timeout / 1000)  # noqa: E731
    monkeypatch.setattr(T, "wait_for", shorter)
    for options in (["--distributed"], named("127.0.0.1:1", 2, 1)):
        with pytest.raises(T.UserError, match="cannot join the other processes .TimeoutError"):
            join(*options)
        line = capsys.readouterr().out
        assert line.startswith(f"{T.LONG_WAIT}: ") and " ".join(map(str, options)) in line
    over.set()


# ---- Accelerators that a run cannot use --------------------------------------------------------


@pytest.mark.parametrize("preset", ["speedrun", "pointer"])
def test_a_large_preset_needs_an_accelerator_unless_cpus_are_chosen(monkeypatch, capsys, preset):
    trained = []
    monkeypatch.setattr(T, "train", lambda cfg, *_: trained.append(cfg.preset))
    monkeypatch.delenv("JAX_PLATFORMS")
    assert T.main(["tiny"]) == 0 and T.main([preset]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {preset} needs an accelerator, and JAX sees only CPUs: ")
    for part in ("jax[tpu]", "jax[cuda13]", T.FOR_OLD_GPUS, "JAX_PLATFORMS=cpu"):
        assert part in line
    assert T.main([preset, "--show"]) == 0
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert T.main([preset]) == 0
    assert trained == ["tiny", preset]


@pytest.mark.parametrize("capability, cuda, runs", [
    ("7.0", "cuda 13000", False),
    ("6.1", "cuda 13000", False),
    ("7.0", "cuda 12090", True),
    ("7.5", "cuda 13000", True),
    ("12.0", "cuda 13000", True),
    ("gfx942", "rocm 70000", True),
])  # fmt: skip
def test_a_gpu_that_is_too_old_for_the_cuda_of_jax_is_refused(monkeypatch, capability, cuda, runs):
    """A first program runs on all other GPUs."""
    (gpu,) = fake_devices("V100", capability=capability)
    gpu.client = SimpleNamespace(platform_version=f"PJRT C API\n{cuda}")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    ran = []
    monkeypatch.setattr(jax, "block_until_ready", ran.append)
    if runs:
        T.check_hardware(T.PRESETS["speedrun"])
    else:
        with pytest.raises(T.UserError, match=r"not support V100: pip install 'jax\[cuda12\]' 'nv"):
            T.check_hardware(T.PRESETS["speedrun"])
    assert len(ran) == runs


def test_gpus_of_two_kinds_are_refused_with_the_variable_for_each_kind(machine):
    machine("A100:29", "T1000:3", "A100:29")
    fix = "CUDA_VISIBLE_DEVICES=0,2 or CUDA_VISIBLE_DEVICES=1"
    for cfg in (T.PRESETS["tiny"], T.PRESETS["speedrun"]):
        with pytest.raises(T.UserError, match=f"^A100 and T1000 cannot run the same .*: set {fix}"):
            T.make_mesh(cfg)
    assert T.make_mesh(replace(small_config(), devices=1))[1].size == 1  # of one kind


@pytest.mark.parametrize("path", ["", "/usr/local/cuda-11/lib64"])
def test_wrong_cuda_libraries_are_reported_in_one_line(monkeypatch, path):
    monkeypatch.setenv("LD_LIBRARY_PATH", path)
    for text in (
        "FAILED_PRECONDITION: DNN library initialization failed. Look at the errors above",
        "INTERNAL: Failed to initialize BLAS support",
    ):
        line = T.message_for(jax.errors.JaxRuntimeError(text))
        assert line.startswith("JAX cannot use its CUDA libraries: ") and line.endswith(text)
        assert T.FOR_OLD_GPUS in line and (f"unset LD_LIBRARY_PATH ({path})" in line) == bool(path)
    assert T.message_for(jax.errors.JaxRuntimeError("INTERNAL: a bug")) is None


def test_out_of_memory_on_a_gpu_mentions_other_processes(monkeypatch):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    assert "nvidia-smi" not in T.message_for(error)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    line = T.message_for(error)
    for part in ("nvidia-smi", "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION: RES"):
        assert part in line


# ---- Cores and memory of the machine -----------------------------------------------------------


def test_limits_of_containers_are_used(monkeypatch, tmp_path):
    """The limits of a cgroup and of its parents; "max" is no limit."""
    own = tmp_path / "jobs/one"
    own.mkdir(parents=True)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "jobs/memory.max").write_text(f"{2 * 2**30}\n")
    (own / "memory.max").write_text(f"{3 * 2**30}\n")
    (own / "cpu.max").write_text("150000 100000\n")
    read = T.Path.read_text
    groups = {"/proc/self/cgroup": "1:name=systemd:/\n0::/jobs/one\n"}
    monkeypatch.setattr(T.Path, "read_text", lambda path: groups.get(str(path)) or read(path))
    found = T.cgroup_values
    assert [*found("memory.max", tmp_path)] == [str(3 * 2**30), str(2 * 2**30), "max"]
    assert found("cpu.max", tmp_path) == ["150000 100000"]
    monkeypatch.setattr(T, "cgroup_values", lambda name: found(name, tmp_path))
    assert T.machine_bytes() == 2 * 2**30 and T.cpu_cores() == 1
    (own / "cpu.max").write_text("max 100000\n")
    assert T.cpu_cores() == len(os.sched_getaffinity(0))
    groups["/proc/self/cgroup"] = "0::/elsewhere\n"  # a container sees its own cgroup as the root
    assert found("memory.max", tmp_path) == ["max"]
