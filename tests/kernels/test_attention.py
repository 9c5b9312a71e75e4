"""Attention: the plain forms against NumPy float64, and the kernels against both.

Token t attends to itself and to the `window` tokens before it that have the same segment id. The
widths of v and of q and k may differ. Every batch has rows with different document boundaries.
Kernels are interpreted on a CPU, and lowered for absent TPUs and GPUs. test_simulator.py runs TPU
kernels in a simulator, test_gpu.py runs GPU kernels on a GPU.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import preflight
import pytest
from conftest import mostly_slow
from layers import (
    KINDS,
    RECORD,
    assert_rounded_layer,
    assert_same_layer,
    distance,
    layer,
    layer_inputs,
    layer_shapes,
    layer_with_gradients,
    long,
    lowered,
    narrow,
    paired,
    record_layer,
    segment_rows,
)
from programs import cuda_compiler, jit

import train_gpt as T

SCALE = 0.4
slow = pytest.mark.slow


@functools.cache
def inputs(t: int, h: int, v: int, dtype=np.float32, n: int = 2):
    """Return q, k [4, t, n, h], v, an output gradient [4, t, n, v], and segments."""
    rng = np.random.default_rng(t)
    arrays = [jnp.asarray(rng.standard_normal((4, t, n, x)), dtype) for x in (h, h, v, v)]
    return *arrays, segment_rows(t)


def reference(q, k, v, out_grad, segments, window: int, scale: float):
    """Return (output, gradients of q, k, v and scale), in float64 by explicit formulas."""
    q, k, v, out_grad = (np.asarray(x, np.float64) for x in (q, k, v, out_grad))
    back = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    seen = (segments[:, :, None] == segments[:, None]) & (back >= 0) & (back <= window)
    products = np.einsum("btnh,bsnh->bnts", q, k)
    weights = np.exp(scale * products) * seen[:, None]
    probs = weights / weights.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnv->btnv", probs, v)
    by_probs = np.einsum("btnv,bsnv->bnts", out_grad, v)
    by_scores = probs * (by_probs - np.sum(probs * by_probs, -1, keepdims=True))
    grads = (
        scale * np.einsum("bnts,bsnh->btnh", by_scores, k),
        scale * np.einsum("bnts,btnh->bsnh", by_scores, q),
        np.einsum("bnts,btnv->bsnv", probs, out_grad),
        np.sum(by_scores * products),
    )
    return out, grads


def with_gradients(attend):
    """Return a function (q, k, v, out_grad, segments, window, scale) -> (output, gradients).

    It is not jitted: plain attention needs a static window.
    """

    def run(q, k, v, out_grad, segments, window, scale):
        def loss(q, k, v, scale):
            out = attend(q, k, v, segments, window, scale)
            return jnp.sum(out * out_grad), out

        grads, out = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, scale)
        return out, grads

    return run


def check(got, arrays, window: int, atol: float):
    """Compare output and gradients with the reference. `atol` is relative to the largest number."""
    out, grads = got
    want, want_grads = reference(*arrays, window, SCALE)
    q = arrays[0]
    assert out.dtype == q.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=atol)
    # The gradient of the scale is a long sum: its tolerance is relative to the size of its terms.
    sizes = [max(np.abs(x).max(), 1e-3) for x in want_grads[:3]]
    sizes.append(np.abs(np.asarray(q, np.float64) * want_grads[0]).sum() / SCALE + 1e-3)
    for name, x, y, size in zip("qkvs", grads, want_grads, sizes, strict=True):
        x = np.asarray(x, np.float64)
        np.testing.assert_allclose(x / size, y / size, atol=atol, err_msg=name)


plain = jit(with_gradients(T.attend_plain), static_argnums=5)
band = jit(with_gradients(T.attend_band), static_argnums=5)


@pytest.mark.parametrize(
    "t, window, block",
    [
        (24, 0, 1),
        (24, 5, 6),  # the window is smaller than its block
        (24, 9, 12),  # two blocks
        (24, 13, 24),  # the window fits in no smaller block
        (24, 1000, 24),
        (23, 2, 23),  # no divisor except 1
        (35, 4, 5),  # odd blocks
        (1, 3, 1),
    ],
)
def test_plain_forms_equal_the_reference_forward_and_backward(t, window, block):
    """float32 sums have up to 35 terms of size 1. A band has t * 2 block scores."""
    arrays = inputs(t, 8, 6)
    check(plain(*arrays, window, SCALE), arrays, window, atol=3e-6)
    check(band(*arrays, window, SCALE), arrays, window, atol=3e-6)
    q, k, v, _, segments = arrays
    mask = jax.eval_shape(lambda *x: T.band(*x, window), q, k, v, segments)[3]
    assert mask.shape == (4 * t // block, 1, block, min(2 * block, t)) and mask.dtype == bool


def test_plain_in_groups_of_blocks_equals_the_reference(monkeypatch):
    """4 rows of 4 blocks, three at a time, represent rows of 262,144 tokens (51 GB of scores)."""
    arrays = inputs(32, 8, 6)
    monkeypatch.setattr(T, "SCORE_BYTES", 3 * 4 * 2 * 8 * 16)
    run = with_gradients(T.attend_band)
    check(jit(run, static_argnums=5)(*arrays, 7, SCALE), arrays, 7, atol=3e-6)
    assert "scan" in str(jax.make_jaxpr(run, static_argnums=5)(*arrays, 7, SCALE))


@pytest.mark.parametrize("attend", [T.attend_plain, T.attend_band])
def test_plain_has_bfloat16_outputs_and_float32_scores(attend):
    q, k, v, out_grad, segments = inputs(24, 8, 6, jnp.bfloat16)
    out = jit(attend, static_argnums=4)(q, k, v, segments, 6, 3.0)
    assert out.dtype == jnp.bfloat16
    want, _ = reference(q, k, v, out_grad, segments, 6, 3.0)
    # Probabilities and outputs are rounded, 2^-9 each. Scores, up to 30, must not be rounded.
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=0.02)


TILES = T.Tiles(64, 64, 4, 3)
attend_gpu = functools.partial(T.attend_gpu, TILES)
triton_heads = functools.partial(T.attend_heads, attend_gpu)
# One program per shape for all windows: the kernels get the range of visible tokens as data.
compiled_triton = jit(with_gradients(attend_gpu))


@pytest.mark.parametrize(
    "t, h, v, n, windows",
    [
        (384, 16, 32, 1, (1, 63, 64, 65, 127, 128, 129, 200, 383, 10_000)),  # edges of tiles
        (256, 32, 16, 3, (150,)),  # heads must not mix
        pytest.param(*(128, 128, 128, 1, (5, 127)), marks=slow),  # one tile; the widest heads
        pytest.param(*(256, 64, 64, 2, (63, 255)), marks=slow),
    ],
)
def test_triton_equals_the_reference_forward_and_backward(t, h, v, n, windows):
    arrays = inputs(t, h, v, n=n)
    for window in windows:
        check(compiled_triton(*arrays, window, SCALE), arrays, window, atol=1e-5)


@pytest.mark.parametrize("tile", mostly_slow([(128, 64), (64, 128), (32, 128)], {(128, 64)}))
def test_triton_works_with_tiles_of_any_shape(tile):
    attend = functools.partial(T.attend_gpu, T.Tiles(*tile, 4, 2))
    arrays = inputs(256, 16, 32, n=1)
    check(jit(with_gradients(attend))(*arrays, 150, SCALE), arrays, 150, atol=1e-5)


def test_triton_in_bfloat16_has_only_rounding_errors():
    """2^-9 is the error of one rounding: weights, their gradients and results are rounded."""
    arrays = inputs(256, 32, 16, jnp.bfloat16)
    got, got_grads = compiled_triton(*arrays, 100, SCALE)
    want, want_grads = reference(*arrays, 100, SCALE)
    for x, y in zip((got, *got_grads[:3]), (want, *want_grads[:3]), strict=True):
        assert x.dtype == jnp.bfloat16
        assert distance(x, y) < 0.01  # observed: 0.003 to 0.006


def test_triton_reads_only_tiles_that_a_block_can_see():
    """NaNs outside the reach of the last block: reading such a tile makes sums NaN (0 * NaN)."""
    t, window = 512, 100
    q, k, v, _, _ = (x[:1] for x in inputs(t, 16, 16))
    far = (np.arange(t) < 256)[None, :, None, None]
    segments = np.zeros((1, t), np.int32)
    k, v = (jnp.where(far, np.nan, x) for x in (k, v))
    out = np.asarray(jit(lambda *x: attend_gpu(*x, window, SCALE))(q, k, v, segments))
    assert np.isnan(out[:, :256]).all() and np.isfinite(out[:, 384:]).all()


@pytest.mark.parametrize(
    "t, heads, parts",
    [
        (128, T.Heads(2, 16, 32, 101, paired=True), "xsa gates"),
        pytest.param(384, T.Heads(1, 32, 32, 129, offset=True), "gates", marks=slow),
        pytest.param(384, narrow(2, 10_000), "xsa", marks=slow),
    ],
)
def test_triton_computes_a_layer_forward_and_backward(t, heads, parts):
    assert_same_layer(triton_heads, heads, parts, layer_inputs(heads, t, parts, np.float32))


LAYERS = [  # (row, heads, parts); a block is gcd(row, 256) tokens
    (384, narrow(2, 150), "added added_gates xsa"),  # three blocks, only the last half of the first
    (384, paired(2, 201), "added added_gates"),
]


@pytest.mark.parametrize("t, heads, parts", LAYERS)
def test_tpu_kernels_compute_a_layer_forward_and_backward(t, heads, parts):
    assert_same_layer(T.attend_tpu, heads, parts, layer_inputs(heads, t, parts, np.float32))


def test_tpu_kernels_in_bfloat16_have_only_rounding_errors():
    assert_rounded_layer(T.attend_tpu, long(1, 100))


def test_a_plan_has_exactly_the_visible_blocks():
    """Compares blocks and half blocks with masks of tokens."""
    for window in (1, 127, 128, 129, 255, 256, 257, 384, 640, 700):
        for heads in (narrow(2, window), paired(2, window)):
            plan = T.plan_for(heads, 256)
            reach = {s: (window - s) // 2 if heads.paired else window for s in (-1, 0, 1)}
            furthest = max(reach.values())
            assert plan.slots == max(j for j in range(9) if (j - 1) * 256 < furthest) + 1
            for j in range(1, plan.slots):
                back = j * 256 + np.arange(256) - np.arange(256)[:, None]  # [keys, queries]
                seen = back <= furthest
                keys, queries = plan.part(j)
                assert not np.delete(seen, np.r_[keys], 0).any()
                assert not np.delete(seen, np.r_[queries], 1).any()


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_the_record_can_be_lowered(kind):
    heads, parts = record_layer(kind, RECORD.stages[0].windows)
    shapes = layer_shapes(heads, 1, 49_152, parts, jnp.bfloat16)
    text = lowered(layer_with_gradients(T.attend_tpu, heads), *shapes)
    assert text.count("tpu_custom_call") == 2
    if kind == "long":  # as in validation
        text = lowered(layer(T.attend_tpu, heads), shapes[0], *shapes[2:])
        assert text.count("tpu_custom_call") == 1
    text = lowered(layer_with_gradients(triton_heads, heads), *shapes, platform="cuda")
    assert text.count("xla.gpu.triton") == 3


@cuda_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["a100-40", "rtx4090", "h100", "b200", "rtxpro6000"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_the_record_compile_for_gpus(name, kind):
    """Tiles fit in the shared memory. Some seconds each."""
    (device,) = preflight.absent_devices(f"{name}x1")
    mesh = jax.sharding.Mesh(np.array([device]), (T.AXIS,))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    heads, parts = record_layer(kind, RECORD.stages[2].windows)
    run = layer_with_gradients(T.choose_kernels(RECORD, device)[0].attend, heads)
    run = jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    shapes = layer_shapes(heads, 1, 49_152, parts, jnp.bfloat16, whole)
    text = jax.jit(run).lower(*shapes).compile().as_text()
    assert text.count('"__gpu$xla.gpu.triton"') == 3


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs libtpu: pip install "jax[tpu]"'
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "validation"])
def test_layers_of_the_record_compile_for_a_v6e(monkeypatch, kind):
    """Registers, VMEM and layouts, which only the real compiler checks. 10 seconds each."""
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    mesh = jax.sharding.Mesh(np.array(preflight.absent_devices("v6e-8")[:1]), (T.AXIS,))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    if kind == "validation":  # the longest window and row, without gradients
        heads, parts = record_layer("long", RECORD.val_windows)
        arrays, _, *rest = layer_shapes(heads, 1, RECORD.val_row, parts, jnp.bfloat16, whole)
        run, shapes = layer(T.attend_tpu, heads), (arrays, *rest)
    else:
        heads, parts = record_layer(kind, RECORD.stages[2].windows)
        run = layer_with_gradients(T.attend_tpu, heads)
        shapes = layer_shapes(heads, 1, 49_152, parts, jnp.bfloat16, whole)
    run = jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    text = jax.jit(run).lower(*shapes).compile().as_text()
    assert text.count("tpu_custom_call") == (1 if kind == "validation" else 2)
