"""Which processes a process joins and waits for, and the accelerators that jax does not see."""

import http.server
import os
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from conftest import small_config
from programs import mesh_of

import train_gpt as T

SLURM = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"
TPU = "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY", "GCE_METADATA_IP"


@pytest.fixture
def joined(monkeypatch):
    """With what jax.distributed.initialize is called, where no variable says anything."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: calls.append(args))
    for name in SLURM + TPU:
        monkeypatch.delenv(name, raising=False)
    return calls


# ---- Who is joined -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata, variables, joins",
    [
        ("no answer", {}, 0),
        ("404", {}, 0),
        ("10.0.0.2", {}, 0),
        ("10.0.0.2,10.0.0.3", {}, 1),
        ("unused:0:10.0.0.2,unused:1:10.0.0.3", {}, 1),
        # Where these are set, nobody is asked:
        ("a,b", {"TPU_SKIP_MDS_QUERY": "1"}, 0),  # as jax does without a TPU
        ("a,b", {"TPU_PROCESS_ADDRESSES": "local"}, 0),  # on Kaggle, where no host has this name
        ("a,b", {"TPU_WORKER_HOSTNAMES": "localhost"}, 0),
        ("404", {"TPU_WORKER_HOSTNAMES": "tpu-0.tpu,tpu-1.tpu"}, 1),  # on GKE
    ],
)
def test_a_tpu_joins_the_others_of_its_slice_if_there_are_any(
    joined, monkeypatch, metadata, variables, joins
):
    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            attribute = "/computeMetadata/v1/instance/attributes/worker-network-endpoints"
            assert (self.path, self.headers["Metadata-Flavor"]) == (attribute, "Google")
            self.send_response(404 if metadata == "404" else 200)
            self.end_headers()
            self.wfile.write(f"{metadata}{', no such file' * (metadata == '404')}".encode())
            asked.append(self.path)

    asked = []
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        port = 1 if metadata == "no answer" else server.server_port
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{port}")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        T.join_hosts(None, None, None)
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # one host by itself, on purpose
        T.join_hosts(None, None, None)
        server.shutdown()
    assert joined == [(None, None, None, None)] * joins
    assert len(asked) == (not variables and port > 1)


@pytest.mark.parametrize(
    "tasks, nodes, words, gpus",
    [
        ("2", "2", (None, None, None), []),  # [] is all of them, None what jax does: one
        ("16", "2", (None, None, None), None),
        ("1", "1", ("node1:1", 2, 1), []),  # each process from a shell of its own
    ],
)
def test_the_only_task_of_a_slurm_node_has_all_its_gpus(
    joined, monkeypatch, tasks, nodes, words, gpus
):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    for name, value in zip(SLURM, (tasks, nodes), strict=True):
        monkeypatch.setenv(name, value)
    T.join_hosts(*words)
    assert joined == [(*words, gpus)]
    if tasks == "1":
        T.join_hosts(None, None, None)
        assert len(joined) == 1, "a step of one task is alone"


def test_jax_takes_all_gpus_for_an_empty_list(monkeypatch):
    """By its own code, of which no more runs than that."""
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


# ---- What is waited for ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, ImportError, OSError])
def test_a_process_that_cannot_join_the_others_says_so(joined, monkeypatch, error):
    def initialize(*args):
        raise error("nothing found")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(T.UserError, match="cannot join the other processes .*nothing found"):
        T.join_hosts(None, None, None)


def test_a_port_that_another_program_has_is_one_line(joined):
    """Where jax would end by a signal."""
    with socket.create_server(("", 0)) as other:
        where = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(T.UserError, match=f"already in use .*: --coordinator {where} --pr"):
            T.join_hosts(where, 2, 0)
        T.join_hosts(where, 2, 1)  # it is for the first process only
    T.join_hosts(where, 2, 0)
    assert joined == [(where, 2, 1, None), (where, 2, 0, None)]


def test_a_long_wait_for_other_processes_is_said_and_has_an_end(joined, monkeypatch, capsys):
    assert T.from_all(3) == [3] and not capsys.readouterr().out
    monkeypatch.setattr(T, "STALL_SECONDS", 0.1)
    assert T.patiently(lambda: time.sleep(0.5) or 5) == 5
    assert capsys.readouterr().out == "waiting for the other processes of this run\n"
    over = threading.Event()
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_: over.wait(60))
    real = T.patiently
    monkeypatch.setattr(T, "patiently", lambda do, line, most: real(do, line, most / 1000))
    with pytest.raises(T.UserError, match="cannot join the other processes .TimeoutError"):
        T.join_hosts("127.0.0.1:1", 2, 1)
    line = "waiting for the other processes of this run: "
    assert capsys.readouterr().out.startswith(f"{line}--coordinator 127.0.0.1:1 --processes 2 ")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")  # as a shell of `srun --ntasks=4 --pty` has it
    with pytest.raises(T.UserError, match="TASKS=4, so `srun` must start all 4 tasks; `env -u SLU"):
        T.join_hosts(None, None, None)
    assert capsys.readouterr().out.startswith(f"{line}SLURM_STEP_NUM_TASKS=4, so `srun` must start")
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    with pytest.raises(T.UserError, match="the hosts of this TPU slice, a,b, must all start it"):
        T.join_hosts(None, None, None)
    over.set()


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_a_launcher_that_are_not_connected_are_refused(joined, monkeypatch, variable):
    """As by torchrun or mpirun: each would train a whole run with the same seed."""
    monkeypatch.setenv(variable, "1")
    T.join_hosts(None, None, None)
    monkeypatch.setenv(variable, "2")
    words = f"{variable}=2, .*: give each --coordinator HOST:PORT --processes 2 --process-id I, or"
    with pytest.raises(T.UserError, match=words):
        T.join_hosts(None, None, None)
    assert not joined
    T.join_hosts("127.0.0.1:1", 2, 1)
    assert len(joined) == 1


# ---- Accelerators that jax does not see --------------------------------------------------------

HELD = ", or end what holds it (a notebook)\n"
TPU_PLUGIN = f"pip install 'jax[tpu]' in a new environment{HELD}"
OLD = "a driver below 580 (nvidia-smi) cuda12, for compute capability below 7.5 (V100, P100)"
CUDA_PLUGIN = f"pip install 'jax[cuda13]', for {OLD} {T.FOR_OLD_GPUS}{HELD}"


@pytest.mark.parametrize(
    "device, words",
    [
        ("nvidia0", CUDA_PLUGIN),
        ("accel0", TPU_PLUGIN),
        ("vfio/0", TPU_PLUGIN),
        ("vfio/vfio", ""),
    ],
)
def test_an_accelerator_that_jax_does_not_see_is_one_line(
    monkeypatch, tmp_path, capsys, device, words
):
    """A warning, but for who has named the preset that needs one; nothing if he chose the CPU."""
    path, done = T.Path, []
    (tmp_path / device).parent.mkdir(exist_ok=True)
    (tmp_path / device).touch()
    monkeypatch.setattr(T, "Path", lambda name: tmp_path if name == "/dev" else path(name))
    monkeypatch.setattr(T, "train", lambda cfg, *_: done.append(cfg.preset))
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert T.main([]) == 0 and done == ["tiny"]
    out = capsys.readouterr().out
    line = f"warning: jax sees only the CPU, not {tmp_path / device}: "
    assert out.count("\n") == bool(words) + 1 and words in out
    assert out.startswith(line if words else "next, a text of your own: ")
    refusal = words.replace("\n", "; or set JAX_PLATFORMS=cpu\n")
    for preset in ("speedrun", "pointer"):
        assert T.main([preset]) == (2 if words else 0)
        assert refusal in capsys.readouterr().err
    assert T.main(["speedrun", "--show"]) == (2 if words else 0)
    assert refusal in capsys.readouterr().err
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert T.main(["tiny"]) == 0 and capsys.readouterr().out == "" and done[-1] == "tiny"
    monkeypatch.setenv("JAX_PLATFORMS", "")
    for hidden in ("", "-1"):  # no GPU, on purpose
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert T.main(["tiny"]) == 0
        assert bool(capsys.readouterr().out) == (words == TPU_PLUGIN)


# ---- GPUs: of two kinds, taken, or with other libraries ----------------------------------------


def accelerators(*kinds):
    """Devices that say they are such GPUs, or TPUs; the name is what comes before a colon, then
    GiB."""
    found = []
    for kind in kinds:
        name, _, size = kind.partition(":")
        stats = {"bytes_limit": float(size or 1) * 2**30}
        platform = "tpu" if name.startswith("TPU") else "gpu"
        device = {"device_kind": name, "process_index": 0, "platform": platform}
        device["compute_capability"] = "9.0"
        found.append(SimpleNamespace(**device, memory_stats=lambda stats=stats: stats))
    return found


def test_two_kinds_of_gpus_are_refused_and_what_one_kind_is_named():
    cfg = small_config()
    words = "^A100 and T1000 cannot share a program: use CUDA_VISIBLE_DEVICES={} or "
    words += "CUDA_VISIBLE_DEVICES={}, or --set devices={}$"
    with pytest.raises(T.UserError, match=words.format("0,1", "2,3", 2)):
        T.make_mesh(cfg, accelerators("A100", "A100", "T1000", "T1000"))
    with pytest.raises(T.UserError, match=words.format("0,2,3", "1", 1)):
        T.make_mesh(cfg, accelerators("A100", "T1000", "A100", "A100"))
    _, mesh = T.make_mesh(replace(cfg, devices=2), [*jax.devices()[:2], *accelerators("T1000")])
    assert mesh.size == 2


class MeshOf:
    """A mesh of CPUs whose `devices` are others."""

    def __init__(self, devices, axes):
        self.mesh = mesh_of(len(devices))
        self.local_devices = [*devices]
        self.devices = SimpleNamespace(flat=devices)

    def __getattr__(self, name):
        return getattr(self.mesh, name)


@pytest.fixture
def machine(monkeypatch):
    """A function that puts these accelerators in the machine, as far as counting bytes goes."""

    def put_in(*kinds):
        monkeypatch.setattr(T, "all_devices", lambda: accelerators(*kinds))
        monkeypatch.setattr(T, "Mesh", MeshOf)

    return put_in


def resolved(*words):
    """(the Config that the command line asks for, what it says of it)."""
    said = []
    return T.resolve(T.parse([*words]), said.append), said


def test_where_nobody_names_a_preset_the_first_kind_trains_alone(machine):
    machine("A100:29", "A100:29", "T1000:3")
    cfg, said = resolved()
    assert (cfg.preset, T.make_mesh(cfg)[1].size) == ("tiny", 2)
    assert said == ["devices of several kinds: devices=2, those of the first alone"]
    assert resolved("--set", "devices=1")[0].devices == 1
    machine("A100:29", "T1000:3", "A100:29")
    with pytest.raises(T.UserError, match="CUDA_VISIBLE_DEVICES=0,2 or CUDA_VISIBLE_DEVICES=1, or"):
        T.make_mesh(resolved("speedrun")[0])


@pytest.mark.parametrize(
    ("kinds", "devices", "ends"),
    [
        (["L4:4"], 0, "TEXT; speedrun does not fit 1 x L4"),
        (["A100:59"], 0, "train_gpt.py speedrun --set ngram_rows=22446080"),
        (["A100:59", "T1000:3"], 1, "speedrun --set devices=1 ngram_rows=22446080"),
        (["H200:105"], 0, "python train_gpt.py speedrun"),
    ],
)
def test_what_these_devices_could_do_follows_from_those_of_the_run(machine, kinds, devices, ends):
    machine(*kinds)
    said = []
    T.say_what_else(said.append, devices)
    assert said[0].startswith(f"next, a text of your own: {T.command_for(T.__file__)} TEXT")
    assert said[0].endswith(ends)


@pytest.mark.parametrize(
    ("gib", "settings", "names"),
    [
        (4, [], ["tiny"]),
        (16.5, [], ["speedrun", "tiny"]),
        (16.5, ["stages.0.row_tokens=256", "steps=20", "vocab=512"], ["tiny"]),  # of no speedrun
    ],
)
def test_texts_have_the_large_model_where_it_fits(machine, gib, settings, names):
    machine(f"L4:{gib}")
    assert T.presets_here(settings) == names


def test_settings_that_fit_can_be_added_to_what_a_run_is_without(machine):
    machine("T4:10.9")
    cfg = T.override(T.PRESETS["speedrun"], ["without=xsa"])
    settings = T.settings_here(cfg)
    assert settings[0] == "without=ngrams" and T.override(cfg, settings).without == "xsa,ngrams"


def test_the_loss_is_in_one_chunk_where_that_fits_or_is_wanted(machine):
    """If a compiler then says that it does not, the cure is not to have it so."""

    def decided(gib, *settings, kind="H100"):
        machine(*[f"{kind}:{gib}"] * 8)
        cfg, mesh = T.make_mesh(T.override(T.PRESETS["speedrun"], [*settings]))
        return T.with_whole_loss(cfg, mesh, T.memory_limit(mesh)), mesh

    assert decided(59)[0].whole_loss == "always"
    assert decided(59, "whole_loss=never")[0].whole_loss == "never"
    assert decided(25)[0].whole_loss == "never"
    assert decided(59, "pointer_width=64")[0].whole_loss == "never", "its logits are float32"
    for gib, whole in ((31.25, "always"), (22, "never")):
        assert decided(gib, kind="TPU v6 lite")[0].whole_loss == whole
    cfg, mesh = decided(28, "whole_loss=always")
    name = "grads3"
    line = T.too_large(cfg, mesh, name, 27.9 * 2**30, 28 * 2**30)
    assert line.endswith("add --set whole_loss=never, or use more devices")


@pytest.mark.parametrize("stats", [None, {}, {"bytes_limit": 0}])
def test_a_gpu_that_does_not_report_its_memory_is_not_refused(monkeypatch, machine, stats):
    """As with XLA_PYTHON_CLIENT_ALLOCATOR=platform. Only the loss is not computed in one chunk."""
    machine("H100")
    (gpu,) = T.all_devices()
    gpu.memory_stats = lambda: stats
    monkeypatch.setattr(T, "all_devices", lambda: [gpu])
    assert T.settings_here(T.PRESETS["speedrun"]) == []
    cfg, mesh = T.make_mesh(T.PRESETS["speedrun"])
    T.check_memory(cfg, mesh)
    assert T.memory_line(cfg, mesh).endswith("GiB; this device does not report its memory")
    assert T.with_whole_loss(cfg, mesh, T.memory_limit(mesh)).whole_loss == "never"


def test_limits_of_a_container_hold(monkeypatch, tmp_path):
    """Those of a cgroup and of all around it; "max" is none."""
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
    groups["/proc/self/cgroup"] = "0::/elsewhere\n"  # the container sees its own as the root
    assert found("memory.max", tmp_path) == ["max"]


@pytest.mark.parametrize("gib", [0.5, 1.5, 3])
def test_tiny_fits_the_smallest_gpus(machine, gib):
    machine(f"T1000:{gib}")
    T.check_memory(*T.make_mesh(T.PRESETS["tiny"]))


def test_the_memory_is_that_of_the_device_which_has_the_least():
    mesh = SimpleNamespace(local_devices=accelerators("A100:59", "A100:30"))
    assert T.memory_limit(mesh) == 30 * 2**30


@pytest.mark.parametrize("path", ["", "/usr/local/cuda-11/lib64"])
def test_libraries_that_do_not_fit_together_are_one_line(monkeypatch, path):
    monkeypatch.setenv("LD_LIBRARY_PATH", path)
    leads = f"unset LD_LIBRARY_PATH, which leads to others ({path}), or " if path else ""
    cure = f"{leads}a new environment (for V100, P100: {T.FOR_OLD_GPUS})"
    for text in (
        "FAILED_PRECONDITION: DNN library initialization failed. Look at the errors above",
        "INTERNAL: Failed to initialize BLAS support",
    ):
        line = T.line_of(jax.errors.JaxRuntimeError(text))
        assert line == f"jax cannot use its CUDA libraries: {cure}: {text}"
    assert T.line_of(jax.errors.JaxRuntimeError("INTERNAL: a fault")) is None


def test_out_of_memory_on_a_gpu_says_that_another_process_may_hold_it(monkeypatch):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    assert "nvidia-smi" not in T.line_of(error)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    line = T.line_of(error)
    assert "; or end what else holds the GPU (nvidia-smi lists it), choose another by" in line
    assert "CUDA_VISIBLE_DEVICES, or share it by XLA_PYTHON_CLIENT_MEM_FRACTION: RES" in line


@pytest.mark.parametrize("capability, cuda, runs", [
    ("7.0", "cuda 13000", False),
    ("6.1", "cuda 13000", False),
    ("7.0", "cuda 12090", True),
    ("7.5", "cuda 13000", True),
    ("12.0", "cuda 13000", True),
    ("gfx942", "rocm 70000", True),
])  # fmt: skip
def test_a_gpu_that_is_older_than_the_cuda_of_jax_is_refused(monkeypatch, capability, cuda, runs):
    client = SimpleNamespace(platform_version=f"PJRT C API\n{cuda}")
    gpu = SimpleNamespace(device_kind="V100", compute_capability=capability, client=client)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    if runs:
        T.start_gpu()
    else:
        words = r"^jax.cuda13. has no code for a V100: pip install 'jax\[cuda12\]' 'nvidia-cudnn-cu"
        with pytest.raises(T.UserError, match=words):
            T.start_gpu()


def test_a_first_program_that_takes_long_is_said(monkeypatch, capsys):
    T.start_gpu()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(T, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(jax, "block_until_ready", lambda x: time.sleep(0.3))
    T.start_gpu()
    assert capsys.readouterr().out.startswith("waiting for the first program of this GPU: ")
