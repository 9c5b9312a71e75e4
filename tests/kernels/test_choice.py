"""pick_kernels: which kernels serve a run on which device, and what the log says of it."""

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
    """Names of the functions that are not plain forms; "loss in rows" and attend_gpu on GPUs."""
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
ON_GPU = {"loss in rows"}  # and attention
ON_TPU = {"fused_cross_entropy", "add_rows_tpu", "blend_tpu"}  # and attention


def with_row(tokens: int) -> T.Config:
    """The record with another length of row in one stage."""
    stage = replace(RECORD.stages[2], row_tokens=tokens, batch_tokens=8 * tokens)
    return replace(RECORD, stages=(*RECORD.stages[:2], stage, *RECORD.stages[3:]))


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


@pytest.mark.parametrize(
    ("device", "attention", "others", "reason"),
    [
        *((tpu(x), "attend_tpu", ON_TPU, TPU_KERNELS) for x in ("TPU v5 lite", "TPU v6 lite")),
        (tpu("TPU v6e"), "attend_tpu", ON_TPU, TPU_KERNELS),
        *((gpu(x), "attend_gpu", ON_GPU, GPU_KERNELS) for x in ("8.0", "8.9", "9.0", "12.1")),
    ],
)
def test_v5e_v6e_and_nvidia_gpus_since_ampere_have_kernels(device, attention, others, reason):
    kernels, said = T.pick_kernels(RECORD, device)
    assert names(kernels) == others | {attention} and said == reason
    plain, said = T.pick_kernels(replace(RECORD, kernels="plain"), device)
    assert plain is T.PLAIN and said == "plain, as asked for"


def test_other_hardware_has_plain_attention_and_tables():
    devices = [SimpleNamespace(platform=x, device_kind="a device") for x in ("metal", "rocm")]
    for device in (*devices, jax.devices("cpu")[0]):
        for cfg in (RECORD, SMALL):
            kernels, reason = T.pick_kernels(cfg, device)
            assert names(kernels) == EVERYWHERE
            assert reason == f"{ONLY_LOSS}there are no kernels for a {device.platform}"


@pytest.mark.parametrize("name", TPU_KERNELS.split(","))
def test_each_kernel_can_be_had_by_itself_and_left_out(name):
    """So that a chip can tell which one is slow."""
    all_of_them, _ = T.pick_kernels(RECORD, tpu())
    one, reason = T.pick_kernels(replace(RECORD, kernels=name), tpu())
    assert one == T.PLAIN._replace(**{name: getattr(all_of_them, name)}) != T.PLAIN
    assert reason == f"{name}; asked for: {name}; auto: {TPU_KERNELS}"
    others = ",".join(field for field in TPU_KERNELS.split(",") if field != name)
    rest, _ = T.pick_kernels(replace(RECORD, kernels=others), tpu())
    assert rest == all_of_them._replace(**{name: getattr(T.PLAIN, name)}) != all_of_them


def test_a_kernel_that_was_asked_for_and_does_not_serve_is_not_among_those_that_are_used():
    kernels, reason = T.pick_kernels(replace(RECORD, kernels="attend,add_rows,blend"), gpu())
    assert names(kernels) == {"attend_gpu"}
    assert reason == f"attend; asked for: attend,add_rows,blend; auto: {GPU_KERNELS}"


@pytest.mark.parametrize(
    ("cfg", "device", "reason"),
    [
        *((RECORD, tpu(x), f"a {x} has no 128 MiB of VMEM") for x in ("TPU v4", "TPU v5", "TPU7x")),
        (replace(RECORD, width=704, heads=11), tpu(), "128 columns do not fill a width of 704"),
        (with_row(192), tpu(), "tiles of 128 tokens do not fill rows of 192"),
        (replace(RECORD, val_row=64), tpu(), "tiles of 128 tokens do not fill rows of 64"),
        (RECORD, gpu("7.5"), "no compute capability of 8.0 or more"),
        (RECORD, gpu("gfx942", "AMD Instinct MI300X"), "no compute capability of 8.0 or more"),
        (replace(RECORD, compute_dtype="float32"), gpu(), "in bfloat16, not in float32"),
        (heads_of(16), gpu(), "tiles do not fit heads 16 wide, and half of it"),
        (heads_of(96), gpu(), "tiles do not fit heads 96 wide, and half of it"),
        (heads_of(256), gpu(), "tiles do not fit heads 256 wide, and half of it"),
        (with_row(192), gpu(), "tiles of 128 tokens do not fill rows of 192"),
        (with_scores(50, 8), gpu(), "scores up to 50 could overflow without a running maximum"),
    ],
)
def test_where_a_condition_fails_all_is_plain_and_the_log_says_which(cfg, device, reason):
    kernels, said = T.pick_kernels(cfg, device)
    assert said.endswith(reason)
    if "heads" in reason or "scores" in reason:  # of attention alone
        assert names(kernels) == ON_GPU and said.startswith(ONLY_LOSS)
    else:
        assert names(kernels) == EVERYWHERE and said.startswith(ONLY_LOSS)


APART = "tiles do not hold {} heads {} wide one by one, and of half in twos"


@pytest.mark.parametrize(
    ("cfg", "reason"),
    [
        (heads_of(64), APART.format(12, 64)),
        (replace(RECORD, width=896, heads=7), APART.format(7, 128)),
        (with_windows((128, 640), (128, 8192)), "a window of 8192 of width 768"),
        (with_windows((8192, 640)), "a window of 8192 of width 768"),
        (replace(RECORD, val_windows=(768, 65_536)), "a window of 65536 of width 768"),
        (with_scores(8, 50), "scores up to 50 could overflow without a running maximum"),
    ],
)
def test_a_tpu_has_the_other_kernels_where_only_attention_does_not_fit(cfg, reason):
    if "window" in reason:
        reason += " does not fit the VMEM"
    kernels, said = T.pick_kernels(cfg, tpu())
    assert names(kernels) == ON_TPU
    assert said == f"{NO_ATTENTION}{reason}"


def test_three_stages_where_the_shared_memory_of_a_gpu_since_ampere_holds_them():
    """Or where heads are narrow. Two fit 99 KiB, the least. bench.py times both."""
    for capability, facts in preflight.CORES.items():
        size = facts["shared_memory_per_block_optin"]
        device = gpu(capability, shared_memory_per_block_optin=size)
        if capability == "7.5":
            assert names(T.pick_kernels(RECORD, device)[0]) == EVERYWHERE
            continue
        tiles = T.tiles_for(RECORD, device)
        assert tiles in bench.TILES
        assert tiles.stages == (3 if size > 160 * 1024 else 2)
        assert (T.THREE_STAGES if tiles.stages == 3 else 74_240) <= size
        assert T.tiles_for(heads_of(64), device).stages == 3
        kernels, _ = T.pick_kernels(RECORD, device)
        assert kernels.attend.args[0].args == (tiles,)
    assert T.tiles_for(RECORD, gpu()).stages == 2


@pytest.mark.parametrize("device", [tpu(), gpu()])
def test_scores_may_be_as_sharp_as_a_sum_of_them_in_float32_can_be(device):
    """The bound is 48, of an attention scale times the width of its heads, half or whole ones.
    YaRN sharpens attention by 1 + 0.2 ln 32 = 1.7: 32 is 54 at last; either window counts."""
    for score, fits in ((48, True), (48.01, False)):
        for cfg in (with_scores(score, 8), with_scores(8, score)):
            _, said = T.pick_kernels(cfg, device)
            assert (said in (TPU_KERNELS, GPU_KERNELS)) == fits
            assert said.endswith("without a running maximum") != fits
    for windows in ([(128, 128), (128, 4096)], [(128, 4096), (4096, 4096)]):
        said = T.pick_kernels(with_scores(*(32, 32), *windows), device)[1]
        assert "scores up to 54 could" in said
    for width in (32, 64, 128):  # half of that is 16 or more: a tensor core's least
        assert T.pick_kernels(heads_of(width), gpu())[1] == GPU_KERNELS


def test_the_largest_window_that_a_tpu_is_given_stays_within_its_vmem():
    """Three rings of bfloat16 and three of float32, of which 70 % of 100 MiB is the limit. A window
    beyond the rows counts as the longest row, so that a large number asks for everything."""
    served = [
        window
        for window in range(256, 8192, 256)
        if T.pick_kernels(with_windows((128, window)), tpu())[1] == TPU_KERNELS
    ]
    plan = T.Plan(T.Heads(6, 128, 128, served[-1], offset=True), 256)
    assert 60 * 2**20 < plan.ring_bytes("bfloat16") < 70 * 2**20
    assert served == [*range(256, served[-1] + 1, 256)] and served[-1] >= 2560
    stages = (T.Stage(1.0, 8 * 1024, 1024, 0, (128, 10**6)),)
    cfg = replace(RECORD, stages=stages, extension=0, val_row=1024, val_windows=(128, 10**6))
    assert T.pick_kernels(cfg, tpu())[1] == TPU_KERNELS


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 5])
def test_gradients_of_the_record_can_be_traced_with_all_kernels(number):
    """What they take and give fits the model, in the first stage and the last: no compilation."""
    cfg, mesh = RECORD, mesh_of(8)
    kernels, _ = T.serving_kernels(cfg, tpu())
    pairs = zip(kernels._fields, kernels, T.PLAIN, strict=True)
    assert not [name for name, x, plain in pairs if x is plain]
    for key, program in T.programs(cfg, mesh, kernels).items():
        if isinstance(key, T.Gradients) and key.number == number:
            grads, *_ = traced(program, mesh).out_info
            assert grads.keys() == T.param_table(cfg).keys()


def recording(called: set) -> T.Kernels:
    """Stubs that note by which field they are called, and return zeros of the right shape."""

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


# Every idea of the record in three layers, of widths that all kernels take.
THREE = replace(
    RECORD,
    layers=(
        T.Layer("short", paired=True, narrow=True, values=True, x0=True, ngram=True),
        T.Layer("short", xsa=True, looks=True, skip=1),
        T.Layer("long", values=True, gated=True, reads=2, mudd=True),
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
def test_the_log_names_no_kernel_that_the_model_does_not_call(idea):
    """With any idea left out: what it switches off may have been all that called a kernel."""
    cfg = T.override(THREE, [f"without={idea}"]) if idea else THREE
    called = set()
    mesh = mesh_of(1)
    programs = T.programs(cfg, mesh, recording(called))
    gradients = next(key for key in programs if isinstance(key, T.Gradients))
    traced(programs[gradients], mesh)
    for device in (tpu(), gpu()):
        kernels, said = T.serving_kernels(cfg, device)
        chosen = T.kernel_names(kernels)
        assert said.split("; ")[0] == chosen
        assert {*chosen.split(",")} - {"plain"} <= called, (device.platform, chosen)
    of_all = {"attend", "cross_entropy", "add_rows"}
    assert called == (of_all if idea in ("mudd", "all") else of_all | {"blend"})


def test_a_model_without_attention_has_no_kernel_for_it():
    layers = tuple(replace(layer, attends="", paired=False, xsa=False) for layer in THREE.layers)
    for device in (tpu(), gpu()):
        kernels, said = T.serving_kernels(replace(THREE, layers=layers), device)
        assert kernels.attend is T.PLAIN.attend and said.endswith(
            "; plain attention: no layer attends"
        )
