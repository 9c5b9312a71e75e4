"""records/lines.py: a trace of jax joined with the lines of train_gpt.py."""

import inspect
import json
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import lines
import numpy as np
import pytest
from programs import QUICK

import train_gpt as T

STEPS = 2
MESH = SimpleNamespace(
    devices=np.array([SimpleNamespace(platform="cpu", device_kind="cpu")]), size=1
)


def lines_of(function) -> range:
    """Return the line numbers of a function of train_gpt.py."""
    text, first = inspect.getsourcelines(function)
    return range(first, first + len(text))


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Return (folder, name -> executable) of two programs, with a trace of two steps: the first
    program runs in both steps, the second in one."""

    def grads0(x, w):
        def layer(x, _):
            return T.norm(T.squared_relu(x @ w)), None

        return jax.lax.scan(layer, x, None, 3)[0]

    def anvil(x):
        return T.norm(x)

    folder = tmp_path_factory.mktemp("traces")
    x, w = jnp.ones((32, 64)), jnp.ones((64, 64))
    jits = {f.__name__: jax.jit(f, compiler_options=QUICK) for f in (grads0, anvil)}
    compiled = {"grads0": jits["grads0"].lower(x, w).compile()}
    compiled["anvil"] = jits["anvil"].lower(x).compile()
    with jax.profiler.trace(folder / "grads0"):
        for _ in range(STEPS):
            jax.block_until_ready(compiled["grads0"](x, w))
        jax.block_until_ready(compiled["anvil"](x))
    return folder, compiled


def test_kernels_of_a_trace_by_program_and_line(traced):
    """A loop counts by the kernels inside it."""
    folder, compiled = traced
    of_trace = {"grads0": (STEPS, ["grads0", "anvil"])}
    rows = lines.keep_lines(folder, of_trace, compiled, MESH)
    assert rows == json.loads((folder / "lines.json").read_text())
    assert {row["trace"] for row in rows} == {"grads0"}
    assert {row["program"] for row in rows} == {"grads0", "anvil"}
    assert not any(row["kernel"].startswith(lines.OUTER) for row in rows)
    assert {row["count"] for row in rows if row["program"] == "grads0"} == {1, 3}
    norms = [row for row in rows if row["function"] == "norm"]
    assert norms and all(row["line"] in lines_of(T.norm) for row in norms)
    assert {row["count"] % 3 for row in norms if row["program"] == "grads0"} == {0}
    assert {row["count"] for row in norms if row["program"] == "anvil"} == {0.5}
    took = [row["ms_per_step"] for row in rows]
    assert took == sorted(took, reverse=True) and took[-1] >= 0

    text = lines.describe("grads0", rows).splitlines()
    assert text[0] == "grads0, ms per step by program and by line:"
    sums = {line.split()[1]: float(line.split()[0]) for line in text[1:3]}
    assert {*sums} == {"grads0", "anvil"}
    assert sum(sums.values()) == pytest.approx(sum(took), abs=2e-3)
    assert any(line.endswith(", norm") for line in text[3:])


# Instructions as XLA of jax 0.11.2 writes them for an H100.
GPU = """HloModule jit_grads2, is_scheduled=true
FunctionNames
1 "<module>"
2 "attend_gpu"
3 "run_tiles"
4 "token_losses"
5 "norm"
FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1}
2 {file_name_id=1 function_name_id=2 line=20 end_line=21}
3 {file_name_id=1 function_name_id=3 line=30 end_line=31}
4 {file_name_id=1 function_name_id=4 line=40 end_line=41}
5 {file_name_id=1 function_name_id=5 line=50 end_line=51}
StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=2}
5 {file_location_id=5 parent_frame_id=2}
%add (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %n.1 = f32[8]{0} negate(%p.1), metadata={op_name="neg" stack_frame_id=4}
}
%together (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  %custom-call.7 = f32[8]{0} custom-call(%p.2), custom_call_target="__cublas$lt$matmul", \
metadata={op_name="dot" stack_frame_id=4}
  ROOT %loop_add_fusion.4 = f32[8]{0} fusion(%custom-call.7), kind=kLoop, calls=%add
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %pallas_call.119 = f32[8]{0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(grads2)/jvp(attention0)/attend/pallas_call" stack_frame_id=3}
  %wrapped_convert = f32[8]{0} negate(%x), metadata={op_name="convert" stack_frame_id=5}
  %all-gather-start = (f32[8]{0}, f32[64]{0}) all-gather-start(%x), dimensions={0}
  ROOT %call = f32[8]{0} call(%x), to_apply=%together
}
"""
NVJET = "nvjet_sm90_tst_128x160_64x5_2x1_v_bz_NNT"
NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
EVENTS = {  # (kernel, its instruction in the trace): (function, line)
    ("attend__2", "pallas_call.119"): ("attend_gpu", 20),
    ("wrapped_convert", ""): ("norm", 50),
    ("loop_add_fusion_4", "call"): ("token_losses", 40),
    (NVJET, "custom-call.7"): ("token_losses", 40),
    (NVJET, "call"): ("other", 0),
    (NCCL, "all-gather-start"): ("other", 0),
    ("memcpy128", ""): ("other", 0),
    ("call", ""): None,
}


@pytest.mark.parametrize(("names", "spot"), EVENTS.items())
def test_kernels_of_a_gpu_by_instruction_or_by_name(names, spot):
    """Kernels that start together all have the instruction that starts them."""
    assert lines.spot_of(*names, lines.spots(GPU)) == spot


def plane(name: str, **events) -> SimpleNamespace:
    """Return a plane of a trace: its lines (with _ for a space) map to (name, facts) of events."""

    def made(line):
        each = [SimpleNamespace(name=x, stats=[*y.items()], duration_ns=2e6) for x, y in line]
        return iter(each)

    named = {line.replace("_", " "): each for line, each in events.items()}
    return SimpleNamespace(
        name=name, lines=[SimpleNamespace(name=x, events=made(y)) for x, y in named.items()]
    )


HOST = plane("/host:CPU", python=[("jit", {}), ("copy.1", {"hlo_op": "copy.1"})])
OP = {"hlo_op": "add.4", "hlo_module": "jit_grads0"}
TRACES = {
    "gpu": plane(
        "/device:GPU:0", **{"Stream_#14(Compute)": [("add_4", OP)], "XLA_Ops": [("x", OP)]}
    ),
    "tpu": plane(
        "/device:TPU:0", XLA_Modules=[("m", {})], XLA_Ops=[("%add.4 = f32[8] add(%x)", {})]
    ),
}
EXECUTED = {"gpu": ("add_4", "add.4", "jit_grads0", 2.0), "tpu": ("add.4", "", "", 2.0)}


@pytest.mark.parametrize("platform", EXECUTED)
def test_only_executed_kernels_are_read(platform, tmp_path, monkeypatch):
    """From the newest trace in a folder."""
    read = []
    traces = SimpleNamespace(planes=[HOST, TRACES[platform]])
    monkeypatch.setattr(
        jax.profiler, "ProfileData", SimpleNamespace(from_file=lambda x: read.append(x) or traces)
    )
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "host.xplane.pb").touch()
    os.utime(tmp_path / "b/host.xplane.pb", (1, 1))
    assert [*lines.executed(tmp_path, platform)] == [EXECUTED[platform]]
    assert read == [str(tmp_path / "a/host.xplane.pb")]
