"""Attention: every backend against one dense reference in NumPy float64, and the choice of one.

The contract: token t attends to itself and to the `window` tokens before it that have its segment
id. A case is one program, and its batch has one row for each way in which documents can lie.
"""

import functools
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_config
from programs import jit

import train_gpt as T

SCALE = 0.4


def segment_rows(t: int) -> np.ndarray:
    """Segments int32 [4, t]: no BOS at all (0), BOS first (1), a few documents, many short ones."""
    starts = np.zeros((4, t), np.int32)
    starts[1:3, 0] = 1
    cuts = [t // 3, min(t // 3 + 1, t - 1), 3 * t // 4]  # inside of blocks; one of one token
    starts[2, cuts] = 1
    starts[3, 2::5] = 1  # the row begins inside of a document
    return np.cumsum(starts, axis=1, dtype=np.int32)


@functools.cache
def inputs(t: int, h: int, dtype=np.float32, n: int = 2):
    """q, k, v, an output gradient [4, t, n, h] and segments; q and k large enough to sharpen."""
    rng = np.random.default_rng(t)
    arrays = [jnp.asarray(rng.standard_normal((4, t, n, h)), dtype) for _ in range(4)]
    return *arrays, segment_rows(t)


def allowed(segments_bt, window: int) -> np.ndarray:
    """The contract as a mask, bool [b, t, s]."""
    t = segments_bt.shape[1]
    back = np.arange(t)[:, None] - np.arange(t)
    return (segments_bt[:, :, None] == segments_bt[:, None]) & (back >= 0) & (back <= window)


def reference(q, k, v, segments, window: int, scale: float, out_grad):
    """(output, its gradients for q, k, v and scale) in float64, by the rules of calculus."""
    q, k, v, out_grad = (np.asarray(x, np.float64) for x in (q, k, v, out_grad))
    products = np.einsum("btnh,bsnh->bnts", q, k)
    weights = np.exp(scale * products) * allowed(segments, window)[:, None]
    probs = weights / weights.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnh->btnh", probs, v)
    by_probs = np.einsum("btnh,bsnh->bnts", out_grad, v)
    by_scores = probs * (by_probs - np.sum(probs * by_probs, -1, keepdims=True))
    grads = (
        scale * np.einsum("bnts,bsnh->btnh", by_scores, k),
        scale * np.einsum("bnts,btnh->bsnh", by_scores, q),
        np.einsum("bnts,btnh->bsnh", probs, out_grad),
        np.sum(by_scores * products),
    )
    return out, grads


def value_and_grads(attend, q, k, v, segments, window: int, scale: float, out_grad):
    """The same of a backend."""

    def loss(q, k, v, scale, segments):
        out = attend(q, k, v, segments, window, scale)
        return jnp.sum(out * out_grad), out

    run = jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    (_, out), grads = run(q, k, v, jnp.float32(scale), segments)
    return out, grads


def check(attend, q, k, v, out_grad, segments, window: int, atol: float):
    """Output and gradients against the reference; `atol` is of the largest gradient of its kind."""
    got, got_grads = value_and_grads(attend, q, k, v, segments, window, SCALE, out_grad)
    want, want_grads = reference(q, k, v, segments, window, SCALE, out_grad)
    assert got.dtype == q.dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=atol)
    # the gradient of the scale is a long sum: compare to the size of its terms
    sizes = [max(np.abs(x).max(), 1e-3) for x in want_grads[:3]]
    sizes.append(np.abs(np.asarray(q, np.float64) * want_grads[0]).sum() / SCALE + 1e-3)
    for name, x, y, size in zip("qkvs", got_grads, want_grads, sizes, strict=True):
        x = np.asarray(x, np.float64)
        np.testing.assert_allclose(x / size, y / size, atol=atol, err_msg=name)


# The band. 24 = 2 * 2 * 2 * 3, so blocks of 1, 2, 3, 4, 6, 8, 12 or 24 tokens; 23 is prime.

BANDS = [  # (row, window, block)
    (24, 0, 1),
    (24, 1, 1),
    (24, 5, 6),  # smaller than its block
    (24, 6, 6),
    (24, 7, 8),
    (24, 9, 12),  # two blocks
    (24, 13, 24),  # no smaller block holds it
    (24, 22, 24),
    (24, 23, 24),  # row - 1
    (24, 24, 24),
    (24, 1000, 24),
    (23, 1, 1),
    (23, 2, 23),  # no divisor but 1
    (35, 4, 5),  # odd blocks
    (35, 6, 7),
    (1, 3, 1),
    (2, 1, 1),
]


@pytest.mark.parametrize("t, window, block", BANDS)
def test_band_cuts_rows_into_blocks_that_hold_the_window(t, window, block):
    """The smallest divisor of the row; so t * 2c scores and not t * t."""
    q, k, v, _, segments = inputs(t, 8)
    parts = jax.eval_shape(lambda *x: T.band(*x, window), q, k, v, segments)
    keys, blocks = (2 * block if block < t else t), 4 * t // block
    assert [x.shape for x in parts] == [
        *((blocks, block, 2, 8), (blocks, keys, 2, 8), (blocks, keys, 2, 8)),
        (blocks, 1, block, keys),
    ]
    assert parts[3].dtype == bool
    assert np.prod(parts[3].shape) == 4 * t * min(2 * block, t)


@pytest.mark.parametrize("t, window", [(24, 0), (24, 5), (24, 12), (24, 23), (23, 4), (35, 6)])
def test_band_allows_every_pair_of_the_contract_once_and_no_other(t, window):
    """Keys carry their row and place, so each allowed score says which pair it is of."""
    segments = segment_rows(t)
    names = np.arange(4 * t, dtype=np.float32).reshape(4, t, 1, 1)
    parts = jit(T.band, static_argnums=4)(names, names, names, segments, window)
    q, k, v, mask = (np.asarray(x) for x in parts)
    np.testing.assert_array_equal(k, v)
    pairs = [
        (int(q[i, c, 0, 0]), int(k[i, s, 0, 0])) for i, _, c, s in zip(*mask.nonzero(), strict=True)
    ]
    rows, times, seen = allowed(segments, window).nonzero()
    assert sorted(pairs) == list(zip(rows * t + times, rows * t + seen, strict=True))


def test_band_of_the_record_stays_small():
    """A row of 49,152 tokens at a window of 640 takes 768 * 1536 scores a block: 75 MB of mask."""
    shapes = [jax.ShapeDtypeStruct((1, 49_152, 6, 128), jnp.bfloat16)] * 3
    segments = jax.ShapeDtypeStruct((1, 49_152), jnp.int32)
    mask = jax.eval_shape(lambda *x: T.band(*x, 640), *shapes, segments)[3]
    assert mask.shape == (64, 1, 768, 1536)
    assert 75e6 < mask.size < 76e6


# xla


@pytest.mark.parametrize("t, window", [band[:2] for band in BANDS])
def test_xla_follows_the_contract_forward_and_backward(t, window):
    q, k, v, out_grad, segments = inputs(t, 8)
    # float32 sums of up to 35 terms of size 1
    check(T.attend_xla, q, k, v, out_grad, segments, window, atol=3e-6)


@pytest.mark.parametrize("together", [1, 2, 3])
def test_xla_in_groups_of_blocks_computes_the_same(monkeypatch, together):
    """Rows of 262,144 tokens would need 51 GB of scores at once; 4 rows of 4 blocks stand in."""
    q, k, v, out_grad, segments = inputs(32, 8)
    n, c, s = q.shape[2], 8, 16
    monkeypatch.setattr(T, "SCORE_BYTES", together * 4 * n * c * s)
    check(T.attend_xla, q, k, v, out_grad, segments, 7, atol=3e-6)
    arguments = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    jaxpr = jax.make_jaxpr(T.attend_xla, static_argnums=4)(
        *arguments, jnp.asarray(segments), 7, 0.1
    )
    assert "scan" in str(jaxpr)


def test_xla_with_window_0_returns_the_values():
    q, k, v, _, segments = inputs(24, 8)
    out = jit(T.attend_xla, static_argnums=4)(q, k, v, segments, 0, SCALE)
    np.testing.assert_array_equal(out, v)


@pytest.mark.parametrize("t, window", [(24, 5), (24, 1000), (23, 4)])
def test_a_key_reaches_exactly_the_tokens_that_may_see_it(t, window):
    """Each token's key and value in turn; all other outputs stay the same bit for bit."""
    q, k, v, _, segments = inputs(t, 8)

    @jit
    def outputs(at):
        here = (jnp.arange(4 * t) == at).reshape(4, t, 1, 1)
        k_new, v_new = (jnp.where(here, x + 1, x) for x in (k, v))
        return T.attend_xla(q, k_new, v_new, segments, window, SCALE)

    before, reach = np.asarray(outputs(-1)), allowed(segments, window)
    for at in range(4 * t):
        moved = (np.asarray(outputs(at)) != before).any(axis=(2, 3))
        want = np.zeros((4, t), bool)
        want[at // t] = reach[at // t, :, at % t]
        np.testing.assert_array_equal(moved, want, err_msg=f"token {at % t} of row {at // t}")


def test_xla_keeps_16_bits_outside_and_32_inside():
    q, k, v, out_grad, segments = inputs(24, 8, jnp.bfloat16)
    out = jit(T.attend_xla, static_argnums=4)(q, k, v, segments, 6, 3.0)
    assert out.dtype == jnp.bfloat16
    want, _ = reference(q, k, v, segments, 6, 3.0, out_grad)
    # probabilities and output are rounded to 8 bits, 2^-9 each; scores must not be: they reach 30
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=0.02)


def test_xla_does_not_make_the_square_of_the_row():
    """The largest array of 96 tokens with blocks of 4 has 4 * 2 * 96 * 8 scores, not 96 * 96."""
    q, k, v, _, segments = inputs(96, 4)
    jaxpr = jax.make_jaxpr(lambda *x: T.attend_xla(*x, segments, 4, SCALE))(q, k, v)
    largest = max(x.aval.size for eqn in jaxpr.eqns for x in eqn.outvars)
    assert largest == 4 * 2 * 96 * 8


# splash, interpreted on the CPU


def splash(*args):
    return T.attend_splash(*args, interpret=True)


@pytest.mark.parametrize(
    "t, h, window, row",
    [
        (384, 64, 200, 0),  # three tiles of 128
        (256, 128, 128, 1),
        (256, 64, 64, 2),  # one tile of 256, whose documents are longer and shorter than the window
        (256, 64, 255, 3),
    ],
)
def test_splash_follows_the_contract_forward_and_backward(t, h, window, row):
    q, k, v, out_grad, segments = (x[row : row + 1] for x in inputs(t, h))
    check(splash, q, k, v, out_grad, segments, window, atol=1e-5)


@pytest.mark.parametrize("window", [1, 384, 512, 2047])
def test_splash_mask_is_worked_through_like_a_plain_one(window):
    """The shortcut for blocks of one value changes nothing of what the kernel is told."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    t, n = 2048, 2
    plain = masks.MultiHeadMask([masks.LocalMask((t, t), (window, 0), 0)] * n)
    told = [
        jax.tree.leaves(kernel.make_splash_mha_single_device(mask))
        for mask in (plain, T.splash_mask(t, n, window))
    ]
    assert len(told[0]) == len(told[1]) > 4
    for want, got in zip(*told, strict=True):
        np.testing.assert_array_equal(got, want)


def test_splash_takes_every_row_of_a_batch_for_itself():
    """With a window beyond the row, so that documents alone tell."""
    q, k, v, out_grad, segments = (x[1:3] for x in inputs(128, 64))
    out = jit(lambda: splash(q, k, v, segments, 1000, 0.2))()
    want, _ = reference(q, k, v, segments, 1000, 0.2, out_grad)
    np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("t", [64, 100, 257, 320])
def test_splash_refuses_rows_that_tiles_do_not_fill(t):
    q, k, v, _, segments = inputs(t, 64)
    with pytest.raises(T.UserError, match=f"splash .*multiple of 128 tokens, not {t}"):
        splash(q, k, v, segments, 64, 0.2)


# triton, interpreted on the CPU


def triton(*args):
    return T.attend_triton(*args, interpret=True)


@pytest.mark.parametrize(
    "t, h, window, row",
    [
        (384, 16, 200, 0),  # three blocks
        (256, 32, 128, 1),  # the window ends with a block
        (256, 64, 63, 2),  # documents longer and shorter than the window
        (256, 16, 255, 3),  # many short documents
        (256, 16, 10_000, 2),
        (128, 128, 5, 2),
    ],
)
def test_triton_follows_the_contract_forward_and_backward(t, h, window, row):
    q, k, v, out_grad, segments = (x[row : row + 1] for x in inputs(t, h))
    check(triton, q, k, v, out_grad, segments, window, atol=1e-5)


@pytest.mark.parametrize("name", ["FORWARD_TILES", "QUERY_TILES", "KEY_TILES"])
@pytest.mark.parametrize("queries, keys", [(64, 128), (32, 32), (128, 32)])
def test_triton_takes_tiles_of_any_shape(monkeypatch, name, queries, keys):
    monkeypatch.setattr(T, name, T.Tiles(queries, keys, 4, 2))
    q, k, v, out_grad, segments = (x[:1] for x in inputs(256, 16))
    check(triton, q, k, v, out_grad, segments, 150, atol=1e-5)


def test_triton_takes_every_row_and_head_for_itself():
    q, k, v, out_grad, segments = inputs(256, 16, n=3)
    check(triton, q, k, v, out_grad, segments, 150, atol=1e-5)


def test_triton_in_16_bits_is_as_exact_as_they_are():
    """2^-9 is the error of one rounding: of weights, of their gradients and of what comes out."""
    q, k, v, out_grad, segments = inputs(256, 32, jnp.bfloat16)
    got, got_grads = value_and_grads(triton, q, k, v, segments, 100, SCALE, out_grad)
    want, want_grads = reference(q, k, v, segments, 100, SCALE, out_grad)
    for x, y in zip((got, *got_grads[:3]), (want, *want_grads[:3]), strict=True):
        error = np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
        assert error < 0.01  # seen: 0.003 to 0.006


def test_triton_reads_no_tile_that_a_block_cannot_see():
    """Poison outside of the reach of the last block: a tile that is read spoils sums, 0 * nan."""
    t, window = 512, 100
    q, k, v, _, _ = (x[:1] for x in inputs(t, 16))
    far = (np.arange(t) < 256)[None, :, None, None]
    segments = np.zeros((1, t), np.int32)
    k, v = (jnp.where(far, np.nan, x) for x in (k, v))
    out = np.asarray(jit(lambda *x: triton(*x, window, SCALE))(q, k, v, segments))
    assert np.isnan(out[:, :256]).all() and np.isfinite(out[:, 384:]).all()


@pytest.mark.parametrize("t", [64, 100, 257, 320])
def test_triton_refuses_rows_that_tiles_do_not_fill(t):
    q, k, v, _, segments = inputs(t, 16)
    with pytest.raises(T.UserError, match=f"triton .*multiple of 128 tokens, not {t}"):
        triton(q, k, v, segments, 64, 0.2)


# window, interpreted on the CPU, against the plain form


def layer_inputs(heads: T.Heads, t: int, look: bool, values: bool, dtype):
    """proj, values or None, look or None, an output gradient, segments, frequencies."""
    rng = np.random.default_rng(t)
    n, d = heads.count, heads.count * heads.width

    def draw(columns: int):
        return jnp.asarray(rng.standard_normal((2, t, columns)), dtype)

    looks = np.zeros((2, t, heads.gates))
    looks[..., n : 2 * n] = rng.standard_normal((2, t, n))
    freqs = rng.uniform(0.1, 1.5, heads.width // 4).astype(np.float32)
    return (
        draw(3 * d + heads.gates),
        draw(d) if values else None,
        jnp.asarray(looks, dtype) if look else None,
        np.asarray(draw(d), np.float32),
        segment_rows(t)[1:3],
        freqs,
    )


def layer(attend, heads, proj, values, look, out_grad, segments, freqs):
    """(output, gradients of proj, values and look, those that there are)."""
    there = tuple(i for i, x in enumerate((proj, values, look)) if x is not None)

    def loss(*arrays):
        out = attend(heads, *arrays, segments, freqs, jnp.float32(0.1))
        return jnp.sum(out.astype(jnp.float32) * out_grad), out

    (_, out), grads = jit(jax.value_and_grad(loss, there, has_aux=True))(proj, values, look)
    d = heads.count * heads.width
    return out, *(grads[0][..., i * d : (i + 1) * d] for i in range(4)), *grads[1:]


LAYERS = [  # rows of 384 are three blocks of 128
    (384, T.Heads(2, 128, window=150), False, False),  # half a block at the edge
    pytest.param(  # exactly two blocks back
        *(384, T.Heads(2, 128, window=256, offset=True), True, True), marks=pytest.mark.slow
    ),
    # four heads, or even heads and the first half would be the same
    (384, T.Heads(4, 128, window=301, paired=True, offset=True), True, True),
]


@pytest.mark.parametrize("t, heads, look, values", LAYERS)
def test_window_computes_a_layer_forward_and_backward(t, heads, look, values):
    arrays = layer_inputs(heads, t, look, values, np.float32)
    got = layer(functools.partial(T.attend_window, interpret=True), heads, *arrays)
    want = layer(T.ATTENTION["xla"], heads, *arrays)
    assert len(got) == len(want) == 5 + look + values
    for part, (x, y) in enumerate(zip(got, want, strict=True)):
        # Relative to the largest: sums of up to 384 terms in float32. Seen: 4e-6.
        np.testing.assert_allclose(x, y, atol=2e-5 * np.abs(y).max(), err_msg=str(part))


def test_window_in_16_bits_is_as_exact_as_they_are():
    """The plain form on the same rounded inputs, in float32; 2^-9 is the error of one rounding."""
    heads = T.Heads(2, 128, window=150, offset=True)
    arrays = layer_inputs(heads, 384, True, True, jnp.bfloat16)
    wide = [x if i > 2 else x.astype(jnp.float32) for i, x in enumerate(arrays)]
    got = layer(functools.partial(T.attend_window, interpret=True), heads, *arrays)
    for x, y in zip(got, layer(T.ATTENTION["xla"], heads, *wide), strict=True):
        assert x.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(x, np.float32) - y) / np.linalg.norm(y)
        assert error < 0.006  # seen: 0.0046


def test_window_survives_gates_that_are_shut():
    """A gate of 1e-35 is no division by zero."""
    heads = T.Heads(2, 128, window=100)
    proj, *others = layer_inputs(heads, 128, False, False, np.float32)
    proj = proj.at[..., -heads.gates :].set(-80.0)
    for x in layer(functools.partial(T.attend_window, interpret=True), heads, proj, *others):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("t, width", [(192, 128), (128, 64)])
def test_window_refuses_what_tiles_do_not_fill(t, width):
    heads = T.Heads(2, width, window=10)
    arrays = layer_inputs(heads, t, False, False, np.float32)
    words = f"attention=window .*multiple of 128, not heads of {width} and rows of {t}: use"
    with pytest.raises(T.UserError, match=words):
        layer(T.attend_window, heads, *arrays)


def test_plan_takes_every_visible_pair_of_blocks_and_no_other():
    """By brute force over tokens: which blocks, which halves of them."""
    for window in (1, 127, 128, 129, 255, 256, 257, 384, 640, 700):
        for paired in (False, True):
            plan = T.Plan(T.Heads(2, 128, window, paired), 256)
            reach = {s: (window - s) // 2 if paired else window for s in (-1, 0, 1)}
            furthest = max(reach.values())
            assert plan.slots == max(j for j in range(9) if (j - 1) * 256 < furthest) + 1
            for j in range(1, plan.slots):
                back = j * 256 + np.arange(256) - np.arange(256)[:, None]  # [keys, queries]
                seen = back <= furthest
                keys, queries = plan.part(j)
                assert not np.delete(seen, np.r_[keys], 0).any()
                assert not np.delete(seen, np.r_[queries], 1).any()


# cudnn: the call, carried out by its xla stand-in


@pytest.fixture
def no_gpu(monkeypatch):
    """Checks the calls for cuDNN and carries them out with XLA; the list of their mask shapes."""
    real, calls = jax.nn.dot_product_attention, []

    def stand_in(q, k, v, **named):
        # The mask has documents, window and causality: nothing else may be asked for, since a
        # causal flag would count from the corner of a band that is not square.
        assert named.keys() == {"mask", "scale", "implementation"}
        assert named["implementation"] == "cudnn" and named["scale"] == 1.0
        blocks, c, n, h = q.shape
        assert k.shape == v.shape == (blocks, k.shape[1], n, h)
        assert named["mask"].dtype == bool
        assert named["mask"].shape == (blocks, 1, c, k.shape[1])
        calls.append(named["mask"].shape)
        return real(q, k, v, **{**named, "implementation": "xla"})

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    return calls


@pytest.mark.parametrize("t, window, block", [(40, 0, 1), (40, 7, 8), (37, 9, 37)])
def test_cudnn_is_asked_for_the_contract(no_gpu, t, window, block):
    q, k, v, out_grad, segments = inputs(t, 16, jnp.bfloat16)
    # queries, probabilities and output are rounded to 8 bits; a wrong key would change by about 1
    check(T.attend_cudnn, q, k, v, out_grad, segments, window, atol=0.03)
    assert set(no_gpu) == {(4 * t // block, 1, block, min(2 * block, t))}


def test_cudnn_refuses_float32():
    q, k, v, _, segments = inputs(24, 8)
    with pytest.raises(T.UserError, match="cudnn .*not float32: use compute_dtype=bfloat16"):
        T.attend_cudnn(q, k, v, segments, 7, 0.3)


# The choice


@pytest.mark.parametrize(
    "platform, dtype, backend, reason",
    [
        ("tpu", "bfloat16", "xla", "not window: .*heads 8 wide; not splash: .*rows of 32"),
        ("tpu", "float32", "xla", "not window: .*heads 8 wide; not splash: .*rows of 32"),
        ("gpu", "bfloat16", "cudnn", "mask of the band; not triton: .*heads 8 wide"),
        ("gpu", "float32", "xla", "^the reference; not triton: .*float32; not cudnn: .*float32"),
        ("cpu", "bfloat16", "xla", "^the reference$"),
        ("cpu", "float32", "xla", "^the reference$"),
        ("metal", "float32", "xla", "^the reference$"),
        ("rocm", "bfloat16", "xla", "^the reference$"),  # cuDNN is NVIDIA's
    ],
)
def test_auto_picks_by_platform_and_says_why(platform, dtype, backend, reason):
    picked, why = T.pick_attention(small_config(compute_dtype=dtype), platform)
    assert picked == backend
    assert re.search(reason, why)


@pytest.mark.parametrize(
    ("width", "capability", "backend"),
    [(128, 8.0, "cudnn"), (256, 8.0, "xla"), (256, 9.0, "cudnn"), (264, 9.0, "xla")],
)
def test_wide_heads_need_a_hopper_for_cudnn(width, capability, backend):
    cfg = small_config(width=2 * width, heads=2, compute_dtype="bfloat16")
    assert T.pick_attention(cfg, "gpu", capability)[0] == backend


@pytest.mark.parametrize(
    ("change", "capability", "backend", "reason"),
    [
        ({}, 9.0, "triton", "the kernels for NVIDIA GPUs in this file"),
        ({}, 8.0, "triton", "in this file"),
        ({}, 7.5, "xla", "not triton: compute capability 7.5 is below 8.0; not cudnn: "),
        ({"val_row": 64}, 9.0, "cudnn", "tiles of 128 tokens do not fill rows of 64"),
        ({"width": 96, "heads": 2}, 9.0, "cudnn", "heads 48 wide"),
        ({"attn_scale": 0.38}, 9.0, "cudnn", "scores up to 49 could overflow"),
        ({"compute_dtype": "float32"}, 9.0, "xla", "in bfloat16, not in float32"),
    ],
)
def test_an_nvidia_gpu_gets_our_kernels_where_tiles_fit(change, capability, backend, reason):
    cfg = replace(small_config(), **(FITS | {"compute_dtype": "bfloat16"} | change))
    picked, why = T.pick_attention(cfg, "gpu", capability)
    assert picked == backend and reason in why
    if backend != "triton":
        with pytest.raises(T.UserError, match="attention=triton cannot run: .*attention=auto"):
            T.pick_attention(replace(cfg, attention="triton"), "gpu", capability)


@pytest.mark.parametrize(
    "asked, platform",
    [("xla", "tpu"), ("xla", "gpu"), ("xla", "cpu"), ("splash", "tpu"), ("cudnn", "gpu")],
)
def test_what_is_asked_for_is_taken_where_it_runs(asked, platform):
    cfg = replace(small_config(), **FITS, attention=asked, compute_dtype="bfloat16")
    assert T.pick_attention(cfg, platform) == (asked, "asked for")


def test_an_amd_gpu_gets_the_reference():
    """Its compute capability is a name."""
    device = SimpleNamespace(platform="gpu", device_kind="MI300X", compute_capability="gfx942")
    cfg = replace(small_config(), **FITS, compute_dtype="bfloat16")
    assert T.attention_on(cfg, device)[0] == "xla"


@pytest.mark.parametrize("change", [{"compute_dtype": "float32"}, {"width": 528, "heads": 2}])
def test_cudnn_asked_for_is_refused_where_it_cannot_work(change):
    cfg = small_config(**{"attention": "cudnn", "compute_dtype": "bfloat16", **change})
    with pytest.raises(T.UserError, match="attention=cudnn cannot run: it takes no heads of"):
        T.pick_attention(cfg, "gpu")


@pytest.mark.parametrize(
    "asked, platform, home",
    [
        ("splash", "cpu", "tpu"),
        ("window", "gpu", "tpu"),
        ("cudnn", "cpu", "gpu"),
        ("cudnn", "tpu", "gpu"),
        ("triton", "cpu", "gpu"),
    ],
)
def test_what_cannot_run_there_is_refused(asked, platform, home):
    words = f"attention={asked} runs on a {home}, not on a {platform}: use attention=auto or xla"
    with pytest.raises(T.UserError, match=words):
        T.pick_attention(small_config(attention=asked), platform)


@pytest.mark.parametrize(
    ("change", "backend"),
    [
        ({}, "window"),
        ({"val_row": 64}, "xla"),
        ({"stages": (T.Stage(1.0, 8 * 192, 192, 0, (8, 32)),)}, "xla"),
        ({"heads": 4}, "splash"),
        ({"attn_scale": 0.37}, "window"),
        ({"attn_scale": 0.38}, "splash"),
    ],
)
def test_a_tpu_gets_our_kernel_where_tiles_of_128_fit(change, backend):
    cfg = replace(small_config(), **(FITS | change))
    assert T.pick_attention(cfg, "tpu")[0] == backend


FITS = {
    **{"width": 256, "heads": 2, "val_row": 128, "val_batch": 1024},
    "stages": (T.Stage(1.0, 8 * 128, 128, 0, (8, 32)),),
}


def long_run(window: int) -> T.Config:
    """The record's widths with one stage of a long window."""
    stage = T.Stage(1.0, 8 * 16_384, 16_384, 0, (128, window))
    return replace(T.PRESETS["speedrun"], stages=(stage,), extension=0)


@pytest.mark.parametrize(
    ("cfg", "kind", "reason"),
    [
        (replace(small_config(), **FITS, attn_scale=0.4), "TPU v6 lite", "scores up to 51 could"),
        (replace(small_config(), **FITS | {"heads": 4}), "TPU v6 lite", "heads 64 wide"),
        (long_run(8192), "TPU v6 lite", "window of 8192 of width 768 does not fit"),
        (long_run(640), "TPU v4", "does not fit the VMEM of a TPU v4"),
    ],
)
def test_our_kernel_is_refused_where_it_cannot_run(cfg, kind, reason):
    backend, why = T.pick_attention(cfg, "tpu", kind=kind)
    assert backend == "splash" and reason in why
    with pytest.raises(T.UserError, match=f"attention=window cannot run: .*{reason}"):
        T.pick_attention(replace(cfg, attention="window"), "tpu", kind=kind)


def test_scores_grow_with_the_windows_of_the_stages():
    """YaRN sharpens attention by 1 + 0.2 ln 32 = 1.7: 0.25 * 128 is 32 at first, 54 at last."""
    stages = tuple(T.Stage(0.5, 8 * 4096, 4096, 0, (8, window)) for window in (128, 4096))
    cfg = replace(small_config(), **FITS | {"stages": stages}, extension=0, attn_scale=0.25)
    assert "scores up to 54" in T.pick_attention(cfg, "tpu")[1]


@pytest.mark.parametrize("width", [128, 256, 384])
def test_means_are_those_of_the_row_also_in_bfloat16(width):
    got = jit(lambda: T.means(jnp.ones((16, width)), jnp.bfloat16))()
    np.testing.assert_allclose(got, 1.0, rtol=1e-6)


def test_every_backend_can_be_asked_for_by_name():
    assert set(T.ATTENTION) == set(T.BACKENDS) - {"auto"}
    for name in set(T.ATTENTION) - {"window"}:
        assert T.ATTENTION[name].func is T.attend_heads
        assert T.ATTENTION[name].args == (getattr(T, f"attend_{name}"),)
    assert T.ATTENTION["window"] is T.attend_window
