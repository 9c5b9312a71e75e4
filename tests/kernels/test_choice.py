"""pick_kernels: which kernels serve a run on which device, and what the log says of it."""

import importlib.util
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from conftest import small_config
from jax.experimental import pallas as pl
from jax.extend.core import jaxprs_in_params
from programs import mesh_of

import train_gpt as T

RECORD = T.PRESETS["speedrun"]
SMALL = small_config()
TABLES = "weighted sums and gradients of tables for TPUs"
TPU_KERNELS = f"attention, MLPs, {TABLES}"
GPU_KERNELS = "attention for NVIDIA GPUs"


def tpu(kind: str = "TPU v6 lite"):
    return SimpleNamespace(platform="tpu", device_kind=kind)


def gpu(capability: str = "9.0", kind: str = "NVIDIA H100 80GB HBM3"):
    return SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


def names(kernels: T.Kernels) -> set[str]:
    """What of the five is not the plain form, with the attention of a GPU by its own name."""
    found = set()
    for part, plain in zip(kernels, T.PLAIN, strict=True):
        if part is not plain:
            is_gpu = getattr(part, "func", None) is T.attend_heads
            found.add((part.args[0] if is_gpu else part).__name__)
    return found


EVERYWHERE = {"lean_mlp", "fused_cross_entropy"}
FUSED = {"fused_mlp", "fused_cross_entropy"}
ON_TPU = FUSED | {"sum_rows", "weighted_sum"}  # and attention


def with_row(tokens: int, stage: int = 2) -> T.Config:
    """The record with another length of row in one stage."""
    stages = list(RECORD.stages)
    stages[stage] = replace(stages[stage], row_tokens=tokens, batch_tokens=8 * tokens)
    return replace(RECORD, stages=tuple(stages))


def with_windows(*windows: tuple[int, int]) -> T.Config:
    """The record's widths with a stage for each pair of a short and a long window."""
    share = 1 / len(windows)
    stages = tuple(T.Stage(share, 8 * 16_384, 16_384, 0, pair) for pair in windows)
    return replace(RECORD, stages=stages, extension=0)


def heads_of(width: int) -> T.Config:
    """The record with heads of another width."""
    return replace(RECORD, heads=768 // width)


def with_scores(narrow: float, wide: float, *windows: tuple[int, int]) -> T.Config:
    """The record with scores up to these, of half and of whole heads, before windows grow."""
    scales = narrow / 64, wide / 128
    return replace(with_windows(*(windows or [(128, 640)])), attn_scales=scales)


@pytest.mark.parametrize("kind", ["TPU v6 lite", "TPU v5 lite", "TPU v5p", "TPU7x"])
def test_the_record_has_attention_and_tables_of_its_own_on_tpus_since_v5(kind):
    kernels, reason = T.pick_kernels(RECORD, tpu(kind))
    assert names(kernels) == ON_TPU | {"attend_window"}
    assert reason == TPU_KERNELS


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0", "12.1"])
def test_the_record_has_an_attention_of_its_own_on_nvidia_gpus_since_ampere(capability):
    kernels, reason = T.pick_kernels(RECORD, gpu(capability))
    assert names(kernels) == EVERYWHERE | {"attend_triton"}
    assert reason == GPU_KERNELS


@pytest.mark.parametrize("platform", ["cpu", "metal", "rocm"])
def test_other_hardware_has_plain_attention_and_tables(platform):
    device = SimpleNamespace(platform=platform, device_kind="a device")
    for cfg in (RECORD, SMALL):
        kernels, reason = T.pick_kernels(cfg, device)
        assert names(kernels) == EVERYWHERE
        assert reason == f"plain attention: there are no kernels for a {platform}"


def test_the_devices_of_this_machine_have_the_plain_attention():
    kernels, reason = T.pick_kernels(SMALL, jax.devices("cpu")[0])
    assert names(kernels) == EVERYWHERE
    assert reason.endswith("no kernels for a cpu")


@pytest.mark.parametrize("device", [tpu(), gpu(), jax.devices("cpu")[0]])
def test_plain_kernels_are_those_of_part_one(device):
    kernels, reason = T.pick_kernels(replace(RECORD, kernels="plain"), device)
    assert kernels is T.PLAIN and names(kernels) == set()
    assert reason == "plain, as asked for"


@pytest.mark.parametrize("name", T.Kernels._fields)
def test_each_kernel_can_be_had_by_itself_and_left_out(name):
    """So that a chip can tell which one is slow."""
    all_of_them, _ = T.pick_kernels(RECORD, tpu())
    one, reason = T.pick_kernels(replace(RECORD, kernels=name), tpu())
    assert one == T.PLAIN._replace(**{name: getattr(all_of_them, name)}) != T.PLAIN
    assert reason == f"{name}, as asked for (auto: {TPU_KERNELS})"
    others = ",".join(field for field in T.Kernels._fields if field != name)
    rest, _ = T.pick_kernels(T.override(RECORD, "kernels", others), tpu())
    assert rest == all_of_them._replace(**{name: getattr(T.PLAIN, name)}) != all_of_them


def test_a_kernel_that_was_asked_for_and_does_not_serve_is_named():
    kernels, reason = T.pick_kernels(replace(RECORD, kernels="attend,add_mlp,blend"), gpu())
    assert names(kernels) == {"attend_triton", "lean_mlp"}
    assert reason == (
        "attend,add_mlp,blend, as asked for, but plain blend (auto: attention for NVIDIA GPUs)"
    )


@pytest.mark.parametrize(
    ("cfg", "device", "reason"),
    [
        (RECORD, tpu("TPU v4"), "a TPU v4 has too little VMEM"),
        (RECORD, tpu("TPU v4 lite"), "a TPU v4 lite has too little VMEM"),
        (RECORD, tpu("TPU v3"), "a TPU v3 has too little VMEM"),
        (RECORD, tpu("TPU v2"), "a TPU v2 has too little VMEM"),
        (replace(RECORD, width=704, heads=11), tpu(), "128 columns do not fill a width of 704"),
        (with_row(192), tpu(), "tiles of 128 tokens do not fill rows of 192"),
        (with_row(16_448, stage=0), tpu(), "tiles of 128 tokens do not fill rows of 16448"),
        (replace(RECORD, val_row=64), tpu(), "tiles of 128 tokens do not fill rows of 64"),
        (SMALL, tpu(), "128 columns do not fill a width of 32"),
    ],
)
def test_a_tpu_has_no_kernel_at_all_where_tiles_do_not_fit(cfg, device, reason):
    kernels, said = T.pick_kernels(cfg, device)
    assert names(kernels) == EVERYWHERE
    assert said.startswith("plain attention: ") and said.endswith(reason)


@pytest.mark.parametrize(
    ("cfg", "reason"),
    [
        (heads_of(64), "tiles do not hold 12 heads 64 wide one by one, and of half in twos"),
        (heads_of(192), "tiles do not hold 4 heads 192 wide one by one, and of half in twos"),
        (
            replace(RECORD, width=896, heads=7),
            "tiles do not hold 7 heads 128 wide one by one, and of half in twos",
        ),
        (with_windows((128, 8192)), "a window of 8192 of width 768 does not fit the VMEM"),
        (
            with_windows((128, 640), (128, 8192)),
            "a window of 8192 of width 768 does not fit the VMEM",
        ),
        (with_windows((8192, 640)), "a window of 8192 of width 768 does not fit the VMEM"),
        (
            replace(RECORD, val_windows=(768, 65_536)),
            "a window of 65536 of width 768 does not fit the VMEM",
        ),
        (
            replace(with_windows((128, 2560)), compute_dtype="float32", width=1536, heads=12),
            "a window of 2560 of width 1536 does not fit the VMEM",
        ),
        (with_scores(8, 50), "scores up to 50 could overflow without a running maximum"),
    ],
)
def test_a_tpu_has_the_other_kernels_where_only_attention_does_not_fit(cfg, reason):
    kernels, said = T.pick_kernels(cfg, tpu())
    if cfg.compute_dtype == "float32":
        assert names(kernels) == EVERYWHERE | {"sum_rows", "weighted_sum"}
        assert said == f"plain attention, {TABLES}: {reason}"
    else:
        assert names(kernels) == ON_TPU
        assert said == f"plain attention, MLPs, {TABLES}: {reason}"


@pytest.mark.parametrize(
    "cfg",
    [
        replace(RECORD, mlp_width=2880),  # no multiple of 128
        replace(RECORD, mlp_width=4096),  # layer 9 has two: 8192
        replace(RECORD, compute_dtype="float32"),
    ],
)
def test_a_tpu_has_no_kernel_for_mlps_alone_where_only_they_do_not_fit(cfg):
    kernels, said = T.pick_kernels(cfg, tpu())
    assert names(kernels) == ON_TPU - {"fused_mlp"} | {"lean_mlp", "attend_window"}
    assert said == f"attention, {TABLES}"


@pytest.mark.parametrize(
    ("cfg", "device", "reason"),
    [
        (RECORD, gpu("7.5"), "the compute capability is below 8.0"),
        (RECORD, gpu("gfx942", "AMD Instinct MI300X"), "the compute capability is below 8.0"),
        (
            replace(RECORD, compute_dtype="float32"),
            gpu(),
            "they compute in bfloat16, not in float32",
        ),
        (heads_of(16), gpu(), "tiles do not fit heads 16 wide, and half of it"),
        (heads_of(96), gpu(), "tiles do not fit heads 96 wide, and half of it"),
        (heads_of(256), gpu(), "tiles do not fit heads 256 wide, and half of it"),
        (with_row(192), gpu(), "tiles of 128 tokens do not fill rows of 192"),
        (replace(RECORD, val_row=64), gpu(), "tiles of 128 tokens do not fill rows of 64"),
        (
            with_scores(50, 8),
            gpu(),
            "scores up to 50 could overflow without a running maximum",
        ),
        (
            small_config(compute_dtype="bfloat16"),
            gpu(),
            "tiles do not fit heads 8 wide, and half of it",
        ),
    ],
)
def test_a_gpu_has_plain_attention_where_a_condition_fails(cfg, device, reason):
    kernels, said = T.pick_kernels(cfg, device)
    assert names(kernels) == EVERYWHERE
    assert said == f"plain attention: {reason}"


def test_a_gpu_whose_jax_has_no_triton_has_plain_attention(monkeypatch):
    assert importlib.util.find_spec("jax.experimental.pallas.triton")  # as jax 0.10 has
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    kernels, said = T.pick_kernels(RECORD, gpu())
    assert names(kernels) == EVERYWHERE
    assert said == f"plain attention: jax {jax.__version__} has no Triton any more"


@pytest.mark.parametrize("width", [32, 64, 128])
def test_a_gpu_takes_heads_whose_width_is_a_power_of_two_from_32_to_128(width):
    """Half of that, which most layers have in q and k, is 16 or more: a tensor core's least."""
    assert T.pick_kernels(heads_of(width), gpu())[1] == GPU_KERNELS


@pytest.mark.parametrize("device", [tpu(), gpu()])
@pytest.mark.parametrize("heads", ["half", "whole"])
def test_scores_may_be_as_sharp_as_a_sum_of_them_in_float32_can_be(device, heads):
    """The bound is 48, of an attention scale times the width of its heads, half or whole ones."""
    for score, fits in ((48, True), (48.01, False)):
        cfg = with_scores(score, 8) if heads == "half" else with_scores(8, score)
        _, said = T.pick_kernels(cfg, device)
        assert (said in (TPU_KERNELS, GPU_KERNELS)) == fits
        assert said.endswith("without a running maximum") != fits


@pytest.mark.parametrize("device", [tpu(), gpu()])
def test_scores_grow_with_the_windows_of_the_stages(device):
    """YaRN sharpens attention by 1 + 0.2 ln 32 = 1.7: 32 is 54 at last; either window counts."""
    for windows in ([(128, 128), (128, 4096)], [(128, 4096), (4096, 4096)]):
        said = T.pick_kernels(with_scores(*(32, 32), *windows), device)[1]
        assert "scores up to 54 could" in said


def test_a_window_beyond_the_rows_counts_as_the_longest_row():
    """Otherwise "everything" could not be asked for with a large number."""
    stages = (T.Stage(1.0, 8 * 1024, 1024, 0, (128, 10**6)),)
    cfg = replace(RECORD, stages=stages, extension=0, val_row=1024, val_windows=(128, 10**6))
    assert T.pick_kernels(cfg, tpu())[1] == TPU_KERNELS


def test_the_largest_window_that_a_tpu_is_given_stays_within_its_vmem():
    """Three rings of bfloat16 and three of float32, of which 70 % of 100 MiB is the limit."""
    served = [
        window
        for window in range(256, 8192, 256)
        if T.pick_kernels(with_windows((128, window)), tpu())[1] == TPU_KERNELS
    ]
    plan = T.Plan(T.Heads(6, 128, 128, served[-1], offset=True), 256)
    assert 60 * 2**20 < plan.ring_bytes("bfloat16") < 70 * 2**20
    assert served == [*range(256, served[-1] + 1, 256)] and served[-1] >= 2560


# ------------------------------------------------------------------------------------------------
# Operands
# ------------------------------------------------------------------------------------------------


def kernel_calls(jaxpr):
    """All calls of kernels in a jaxpr and in those that it calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for inner in jaxprs_in_params(eqn.params):
                yield from kernel_calls(inner)


def unread(call) -> list[int]:
    """The operands of a kernel that neither it nor a choice of its blocks reads."""
    mapping, kernel = call.params["grid_mapping"], call.params["jaxpr"]
    scalars = mapping.num_index_operands
    read = {id(x) for eqn in kernel.eqns for x in eqn.invars}
    for block in mapping.block_mappings:  # these take the place in the grid, and then the scalars
        choice = block.index_map_jaxpr.jaxpr
        used = {id(x) for eqn in choice.eqns for x in eqn.invars}
        refs = choice.invars[len(choice.invars) - scalars :] if scalars else []
        read |= {id(x) for x, ref in zip(kernel.invars, refs, strict=False) if id(ref) in used}
    operands = kernel.invars[: scalars + mapping.num_inputs]
    return [i for i, x in enumerate(operands) if id(x) not in read]


def test_an_operand_that_is_not_read_would_be_found():
    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...]

    x = jax.ShapeDtypeStruct((8, 128), "float32")
    call = pl.pallas_call(kernel, out_shape=x)
    (found,) = kernel_calls(jax.make_jaxpr(call)(x, x).jaxpr)
    assert unread(found) == [1]


@pytest.mark.parametrize("device", [tpu(), gpu()], ids=["tpu", "gpu"])
def test_no_kernel_has_an_operand_that_it_does_not_read(device):
    """Of such kernels libtpu 0.0.43 to 0.0.45 can read zeros from memory (jax issue 39744)."""
    mesh = mesh_of(8)
    kernels, _ = T.pick_kernels(RECORD, device, 8)
    found, calls = T.programs(RECORD, mesh, kernels), []
    for name in ("grads0", "tables4", "eval"):  # which have all kernels, with their gradients
        step, args, out, *_ = found[name]
        specs = jax.tree.map(lambda x: x.sharding.spec, args)
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        calls += kernel_calls(jax.make_jaxpr(step)(*args).jaxpr)
    assert len(calls) > 20
    found = [(call.params["jaxpr"].debug_info.func_src_info, unread(call)) for call in calls]
    assert [x for x in found if x[1]] == []
