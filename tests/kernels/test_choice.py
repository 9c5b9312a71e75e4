"""choose_kernels: the kernels for a run on each kind of device, and the line in the log."""

from dataclasses import replace
from types import SimpleNamespace

import bench
import jax
import jax.numpy as jnp
import preflight
import pytest
from conftest import mostly_slow, small_config
from programs import mesh_of, traced

import train_gpt as T

RECORD = T.PRESETS["speedrun"]
SMALL = small_config()
TPU_KERNELS = "attend,cross_entropy,add_rows,blend"
GPU_KERNELS = "attend,cross_entropy"
NO_ATTENTION = "cross_entropy,add_rows,blend; plain attention: "  # on a TPU
ONLY_LOSS = "cross_entropy; plain attention: "


def tpu(kind: str = "TPU v6 lite"):
    return SimpleNamespace(platform="tpu", device_kind=kind)


def gpu(capability: str = "9.0", kind: str = "NVIDIA H100 80GB HBM3", **more):
    known = {"device_kind": kind, "compute_capability": capability, **more}
    return SimpleNamespace(platform="gpu", **known)


def names(kernels: T.Kernels) -> set[str]:
    """Return the names of functions that are not plain forms ("loss in rows" for a partial)."""
    found = set()
    for part, plain in zip(kernels, T.PLAIN, strict=True):
        if part is plain:
            continue
        function = getattr(part, "func", None)
        if function is T.attend_heads:
            part = part.args[0].func
        elif function is T.fused_cross_entropy:
            assert part.keywords == {"in_rows": True}
            found.add("loss in rows")
            continue
        found.add(part.__name__)
    return found


EVERYWHERE = {"fused_cross_entropy"}
ON_GPU = {"loss in rows"}  # without attention
ON_TPU = {"fused_cross_entropy", "add_rows_tpu", "blend_tpu"}  # without attention


def with_row(tokens: int) -> T.Config:
    """Return the record with another row length in one stage."""
    stage = replace(RECORD.stages[2], row_tokens=tokens, batch_tokens=8 * tokens)
    return replace(RECORD, stages=(*RECORD.stages[:2], stage, *RECORD.stages[3:]))


def with_windows(*windows: tuple[int, int]) -> T.Config:
    """Return the record with one stage per pair of a short and a long window."""
    share = 1 / len(windows)
    stages = tuple(T.Stage(share, 8 * 16_384, 16_384, 0, pair) for pair in windows)
    return replace(RECORD, stages=stages, extension=0)


def heads_of(width: int) -> T.Config:
    """Return the record with heads of another width."""
    return replace(RECORD, heads=768 // width)


def with_scores(narrow: float, wide: float, *windows: tuple[int, int]) -> T.Config:
    """Return the record with these bounds on scores of narrow and wide heads in the first stage."""
    scales = narrow / 64, wide / 128
    return replace(with_windows(*(windows or [(128, 640)])), attn_scales=scales)


@pytest.mark.parametrize(
    ("device", "attention", "others", "reason"),
    [
        *((tpu(x), "attend_tpu", ON_TPU, TPU_KERNELS) for x in ("TPU v5 lite", "TPU v6 lite")),
        (tpu("TPU v6e"), "attend_tpu", ON_TPU, TPU_KERNELS),
        *((gpu(x), "attend_gpu", ON_GPU, GPU_KERNELS) for x in ("8.0", "8.9", "9.0", "12.1")),
    ],
)
def test_v5e_v6e_and_nvidia_gpus_since_ampere_have_kernels(device, attention, others, reason):
    kernels, line = T.choose_kernels(RECORD, device)
    assert names(kernels) == others | {attention} and line == reason
    plain, line = T.choose_kernels(replace(RECORD, kernels="plain"), device)
    assert plain is T.PLAIN and line == "plain (requested)"


def test_other_hardware_has_plain_attention_and_tables():
    devices = [SimpleNamespace(platform=x, device_kind="a device") for x in ("metal", "rocm")]
    for device in (*devices, jax.devices("cpu")[0]):
        for cfg in (RECORD, SMALL):
            kernels, reason = T.choose_kernels(cfg, device)
            assert names(kernels) == EVERYWHERE
            assert reason == f"{ONLY_LOSS}there are no kernels for a {device.platform}"


@pytest.mark.parametrize("name", TPU_KERNELS.split(","))
def test_settings_can_select_or_exclude_each_kernel(name):
    """This shows on a real chip which kernel is slow."""
    every, _ = T.choose_kernels(RECORD, tpu())
    one, reason = T.choose_kernels(replace(RECORD, kernels=name), tpu())
    assert one == T.PLAIN._replace(**{name: getattr(every, name)}) != T.PLAIN
    assert reason == f"{name}; requested: {name}; auto: {TPU_KERNELS}"
    others = ",".join(field for field in TPU_KERNELS.split(",") if field != name)
    rest, _ = T.choose_kernels(replace(RECORD, kernels=others), tpu())
    assert rest == every._replace(**{name: getattr(T.PLAIN, name)}) != every


def test_a_kernel_that_does_not_exist_for_the_device_is_ignored():
    kernels, reason = T.choose_kernels(replace(RECORD, kernels="attend,add_rows,blend"), gpu())
    assert names(kernels) == {"attend_gpu"}
    assert reason == f"attend; requested: attend,add_rows,blend; auto: {GPU_KERNELS}"


@pytest.mark.parametrize(
    ("cfg", "device", "reason"),
    [
        (RECORD, tpu("TPU v4"), "a TPU v4 has less than 128 MiB of VMEM"),
        (RECORD, tpu("TPU v5"), "a TPU v5 has less than 128 MiB of VMEM"),
        (RECORD, tpu("TPU7x"), "a TPU7x has less than 128 MiB of VMEM"),
        (replace(RECORD, width=704, heads=11), tpu(), "width of 704 is not a multiple of 128"),
        (with_row(192), tpu(), "rows of 192 tokens are not a multiple of 128"),
        (replace(RECORD, val_row=64), tpu(), "rows of 64 tokens are not a multiple of 128"),
        (RECORD, gpu("7.5"), "kernels need compute capability 8.0+"),
        (RECORD, gpu("gfx942", "AMD Instinct MI300X"), "kernels need compute capability 8.0+"),
        (replace(RECORD, compute_dtype="float32"), gpu(), "in bfloat16, not in float32"),
        (heads_of(16), gpu(), "kernels need heads of width 32, 64 or 128, not 16"),
        (heads_of(96), gpu(), "kernels need heads of width 32, 64 or 128, not 96"),
        (heads_of(256), gpu(), "kernels need heads of width 32, 64 or 128, not 256"),
        (with_row(192), gpu(), "rows of 192 tokens are not a multiple of 128"),
        (with_scores(50, 8), gpu(), "scores up to 50 could overflow without a running maximum"),
    ],
)
def test_the_log_names_the_condition_that_fails(cfg, device, reason):
    kernels, line = T.choose_kernels(cfg, device)
    assert line.endswith(reason)
    if "heads" in reason or "scores" in reason:  # only attention is plain
        assert names(kernels) == ON_GPU and line.startswith(ONLY_LOSS)
    else:
        assert names(kernels) == EVERYWHERE and line.startswith(ONLY_LOSS)


HEADS = "kernels need an even number of heads of width 128, not {} of {}"


@pytest.mark.parametrize(
    ("cfg", "reason"),
    [
        (heads_of(64), HEADS.format(12, 64)),
        (replace(RECORD, width=896, heads=7), HEADS.format(7, 128)),
        (with_windows((128, 640), (128, 8192)), "a window of 8192 tokens of width 768"),
        (with_windows((8192, 640)), "a window of 8192 tokens of width 768"),
        (replace(RECORD, val_windows=(768, 65_536)), "a window of 65536 tokens of width 768"),
        (with_scores(8, 50), "scores up to 50 could overflow without a running maximum"),
    ],
)
def test_a_tpu_has_the_other_kernels_if_only_attention_does_not_fit(cfg, reason):
    if "window" in reason:
        reason += " does not fit in VMEM"
    kernels, line = T.choose_kernels(cfg, tpu())
    assert names(kernels) == ON_TPU
    assert line == f"{NO_ATTENTION}{reason}"


def test_gpus_have_three_stages_if_the_shared_memory_suffices():
    """Also if heads are narrow. Two stages fit 99 KiB, the minimum. bench.py times both."""
    for capability, facts in preflight.CORES.items():
        size = facts["shared_memory_per_block_optin"]
        device = gpu(capability, shared_memory_per_block_optin=size)
        if capability == "7.5":
            assert names(T.choose_kernels(RECORD, device)[0]) == EVERYWHERE
            continue
        tiles = T.tiles_for(RECORD, device)
        assert tiles in bench.TILES
        assert tiles.stages == (3 if size > 160 * 1024 else 2)
        assert (T.THREE_STAGES if tiles.stages == 3 else 74_240) <= size
        assert T.tiles_for(heads_of(64), device).stages == 3
        kernels, _ = T.choose_kernels(RECORD, device)
        assert kernels.attend.args[0].args == (tiles,)
    assert T.tiles_for(RECORD, gpu()).stages == 2


@pytest.mark.parametrize("device", [tpu(), gpu()])
def test_the_bound_on_scores_holds_for_all_heads_and_stages(device):
    """The bound is 48, for the attention scale times the head width, narrow or wide. YaRN increases
    attention scales by 1 + 0.2 ln 32 = 1.7 as either window grows: 32 becomes 54."""
    for score, fits in ((48, True), (48.01, False)):
        for cfg in (with_scores(score, 8), with_scores(8, score)):
            _, line = T.choose_kernels(cfg, device)
            assert (line in (TPU_KERNELS, GPU_KERNELS)) == fits
            assert line.endswith("without a running maximum") != fits
    for windows in ([(128, 128), (128, 4096)], [(128, 4096), (4096, 4096)]):
        line = T.choose_kernels(with_scores(*(32, 32), *windows), device)[1]
        assert "scores up to 54 could" in line
    for width in (32, 64, 128):  # half of each is at least 16, the minimum of a tensor core
        assert T.choose_kernels(heads_of(width), gpu())[1] == GPU_KERNELS


def test_the_largest_window_with_a_kernel_fits_in_vmem():
    """Three rings of bfloat16 and three of float32 may take 70 % of 100 MiB. A window longer than
    the rows counts as the longest row."""
    windows = [
        window
        for window in range(256, 8192, 256)
        if T.choose_kernels(with_windows((128, window)), tpu())[1] == TPU_KERNELS
    ]
    plan = T.plan_for(T.Heads(6, 128, 128, windows[-1], offset=True), 256)
    assert 60 * 2**20 < plan.ring_bytes("bfloat16") < 70 * 2**20
    assert windows == [*range(256, windows[-1] + 1, 256)] and windows[-1] >= 2560
    stages = (T.Stage(1.0, 8 * 1024, 1024, 0, (128, 10**6)),)
    cfg = replace(RECORD, stages=stages, extension=0, val_row=1024, val_windows=(128, 10**6))
    assert T.choose_kernels(cfg, tpu())[1] == TPU_KERNELS


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 5])
def test_gradients_of_the_record_can_be_traced_with_all_kernels(number):
    """Kernels fit the model in the first and the last stage. Nothing is compiled."""
    cfg, mesh = RECORD, mesh_of(8)
    kernels, _ = T.choose_kernels(cfg, tpu())
    pairs = zip(kernels._fields, kernels, T.PLAIN, strict=True)
    assert not [name for name, x, plain in pairs if x is plain]
    for key, program in T.programs(cfg, mesh, kernels).items():
        if isinstance(key, T.Gradients) and key.number == number:
            grads, *_ = traced(program, mesh).out_info
            assert grads.keys() == T.param_specs(cfg).keys()


def recording(called: set) -> T.Kernels:
    """Return stubs that record the fields that are called, and return arrays of the right shape."""

    def attend(heads, qkv, inputs):
        called.add("attend")
        return jnp.zeros((*qkv.shape[:2], heads.count * heads.v_width), qkv.dtype)

    def cross_entropy(x, *rest):
        called.add("cross_entropy")
        return jnp.sum(x.astype(jnp.float32)), jnp.zeros(())

    def add_rows(table, *rest):
        called.add("add_rows")
        return table

    def blend(x, weights, sources):
        called.add("blend")
        return sources[0]

    return T.Kernels(attend, cross_entropy, add_rows, blend)


# Every idea of the record in three layers, with widths that fit all kernels.
THREE = replace(
    RECORD,
    layers=(
        T.Layer("short", paired=True, narrow=True, values=True, x0=True, ngram=True),
        T.Layer("short", xsa=True, new_gates=True, skip=1),
        T.Layer("long", values=True, gated=True, reads_back=2, mudd=True),
    ),
    width=256,
    heads=2,
    mlp_width=256,
    vocab=512,
    real_tokens=500,
    bos=499,
    ngram_rows=1024,
    sign_rows=64,
    stages=tuple(
        replace(
            stage,
            batch_tokens=2 * 256,
            row_tokens=256,
            windows=(64, 128),
            candidates=tuple(min(x, 384) for x in stage.candidates),
        )
        for stage in RECORD.stages
    ),
    val_batch=512,
    val_row=256,
    val_windows=(64, 128),
)


@pytest.mark.parametrize("idea", mostly_slow(["", *T.IDEAS, "all"], {"", "mudd", "all"}))
def test_the_log_names_only_kernels_that_the_model_calls(idea):
    """Without an idea the model may not call a kernel at all."""
    cfg = T.override(THREE, [f"without={idea}"]) if idea else THREE
    called = set()
    mesh = mesh_of(1)
    programs = T.programs(cfg, mesh, recording(called))
    gradients = next(key for key in programs if isinstance(key, T.Gradients))
    traced(programs[gradients], mesh)
    for device in (tpu(), gpu()):
        kernels, line = T.choose_kernels(cfg, device)
        chosen = T.kernel_names(kernels)
        assert line.split("; ")[0] == chosen
        assert {*chosen.split(",")} - {"plain"} <= called, (device.platform, chosen)
    of_all = {"attend", "cross_entropy", "add_rows"}
    assert called == (of_all if idea in ("mudd", "all") else of_all | {"blend"})


def test_a_model_without_attention_has_no_kernel_for_it():
    layers = tuple(replace(layer, attends="", paired=False, xsa=False) for layer in THREE.layers)
    for device in (tpu(), gpu()):
        kernels, line = T.choose_kernels(replace(THREE, layers=layers), device)
        assert kernels.attend is T.PLAIN.attend
        assert line.endswith("; plain attention: no layer has attention")
