"""The loss against NumPy float64. That with its own gradient: tests/kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import small_config
from programs import jit

import train_gpt as T

SMALL = small_config()


def draw(*shape, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("cap", [(23.0, 5.0, 7.5), (30.0, 0.0, 4.0)])
def test_logits_are_capped_in_float32(dtype, cap):
    z = jnp.asarray(np.linspace(-60, 60, 2001), dtype)
    got = T.cap_logits(z, small_config(logit_cap=cap))
    assert got.dtype == jnp.float32
    want = cap[0] * reference.sigmoid((np.asarray(z, np.float64) + cap[1]) / cap[2])
    np.testing.assert_allclose(got, want, atol=1e-6 * cap[0])  # half of cap * (1 + tanh)
    assert got.min() > 0 and got.max() <= cap[0]


@pytest.mark.parametrize("fillers", [0, 1])  # rows that only fill up a batch
@pytest.mark.parametrize("prefix", [None, 0.25])
@pytest.mark.parametrize("t, weights", [(7, [1.0, 0.5, 0.25]), (7, [0.3]), (3, [1.0, 0.5, 0.25])])
def test_targets_ahead_end_with_the_row_and_cross_documents(t, weights, prefix, fillers):
    rng = np.random.default_rng(0)
    next_bt, prefixes = (rng.integers(n, 48, (2 + fillers, t)).astype(np.int32) for n in (0, -20))
    prefixes[2:] = next_bt[2:] = -1
    aims, k = T.Aims(None, next_bt, prefixes), len(weights)
    targets, got = jit(lambda *args: T.targets_ahead(*args, prefix))(aims, np.float32(weights))
    shape = 2 + fillers, t, k + bool(prefix)
    assert targets.shape == got.shape == shape and targets.dtype == jnp.int32
    for row, token, ahead in np.ndindex(2, t, k):
        if token + ahead < t:
            assert targets[row, token, ahead] == next_bt[row, token + ahead]
            assert got[row, token, ahead] == np.float32(weights[ahead])
        else:
            assert got[row, token, ahead] == 0
    assert not got[2:].any() and targets.min() >= 0
    if prefix:
        has = prefixes >= 0
        np.testing.assert_array_equal(got[..., k], prefix * has)
        np.testing.assert_array_equal(targets[..., k], prefixes * has)


def loss_inputs(tokens: int, k: int = 3):
    """Outputs, head, targets [r, k] of which some repeat within a token, and weights."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 97, (tokens, k)).astype(np.int32)
    targets[::3] = targets[::3, :1]
    targets[1::3, -1] = targets[1::3, 0]
    weights = rng.uniform(0, 1, (tokens, k)).astype(np.float32)
    weights[-1, 1:] = 0
    weights[5] = 0
    return draw(tokens, 32), draw(104, 32, seed=1), targets, weights


def exact_sums(x, head, targets, weights, cfg) -> tuple[float, float]:
    """(weighted, plain) sums."""
    losses = np.take_along_axis(reference.losses(x, head, cfg), targets, axis=1)
    return float(np.sum(losses * weights)), float(np.sum(losses[weights[:, 0] > 0, 0]))


def exact_gradients(x, head, targets, weights, cfg):
    """Of the weighted sum, for x and head, target by target, in float64."""
    a, b, c = cfg.logit_cap
    x, head, weights = (np.asarray(y, np.float64) for y in (x, head, weights))
    inner = reference.sigmoid((x @ head.T + b) / c)
    chances = np.exp(-reference.losses(x, head, cfg))
    assert np.abs(chances.sum(1) - 1).max() < 1e-12
    d_logits = np.zeros_like(chances)
    for token, k in np.ndindex(targets.shape):
        d_logits[token] += weights[token, k] * chances[token]
        d_logits[token, targets[token, k]] -= weights[token, k]
    d_products = d_logits * a / c * inner * (1 - inner)
    return d_products @ head, d_products.T @ x


def distance(got, want) -> float:
    """Relative norm of the difference."""
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


CHUNKS = {60: 1, 59: 2, 25: 3, 7: 10, 1: 60}  # of 60 tokens, by loss_chunk


def sums_and_gradients(x, head, targets, weights, cfg):
    """((weighted, plain), gradients of a quarter of the weighted sum for x and head)."""

    def run(x, head):
        weighted, plain = T.cross_entropy(x, head, targets, weights, cfg)
        return weighted / 4, plain

    (weighted, plain), grads = jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(x, head)
    return (4 * weighted, plain), grads


@pytest.mark.parametrize("k, chunk", [*((3, c) for c in CHUNKS), (2, 25), (1, 25)])
def test_cross_entropy_and_its_gradient_against_float64(k, chunk):
    """With equal targets and zero weights, whatever the chunk."""
    inputs = loss_inputs(60, k)
    cfg = small_config(loss_chunk=chunk)
    sums, grads = sums_and_gradients(*inputs, cfg)
    assert [y.dtype for y in sums] == [jnp.float32, jnp.float32]
    assert tuple(map(float, sums)) == pytest.approx(exact_sums(*inputs, cfg), rel=1e-6)
    for got, want in zip(grads, exact_gradients(*inputs, cfg), strict=True):
        assert got.dtype == jnp.float32
        # seen: 4e-7 of the largest
        np.testing.assert_allclose(4 * got, want, rtol=0, atol=2e-6 * np.abs(want).max())
    assert not np.any(grads[0][5])  # a token without weight


@pytest.mark.parametrize("chunk", [1, 60])
def test_cross_entropy_of_bfloat16_has_float32_losses_and_sums(chunk):
    """Losses of bfloat16 logits would be off by up to 1/16, half a step at 15; a head's gradient
    summed in bfloat16 over 60 chunks by several percent."""
    x, head, targets, weights = loss_inputs(60)
    x, head = jnp.asarray(x, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    cfg = small_config(loss_chunk=chunk)
    sums, grads = sums_and_gradients(x, head, targets, weights, cfg)
    assert [y.dtype for y in sums] == [jnp.float32, jnp.float32]
    assert tuple(map(float, sums)) == pytest.approx(
        exact_sums(x, head, targets, weights, cfg), rel=1e-6
    )
    for got, want in zip(grads, exact_gradients(x, head, targets, weights, cfg), strict=True):
        assert got.dtype == jnp.bfloat16
        assert distance(4 * got.astype(jnp.float32), want) < 0.005  # seen: 0.003


@pytest.mark.parametrize(
    "tokens, chunk, chunks", [*((60, *c) for c in CHUNKS.items()), (59, 30, 59)]
)
def test_chunks_are_equal_and_none_is_longer_than_asked(tokens, chunk, chunks):
    shapes = [
        y.shape for y in T.in_chunks(small_config(loss_chunk=chunk), *loss_inputs(tokens)[2:])
    ]
    assert shapes == 2 * [(chunks, tokens // chunks, 3)]
    assert tokens / chunks <= chunk


def test_a_candidate_head_has_the_rows_of_the_candidates_and_only_they_get_a_gradient():
    head, ids = draw(104, 32), np.array([0, 3, 50, 103])
    np.testing.assert_array_equal(T.candidate_head(jnp.asarray(head), ids), head[ids])
    grad = jax.grad(lambda head: jnp.sum(T.candidate_head(head, ids) ** 2))(jnp.asarray(head))
    np.testing.assert_array_equal(np.flatnonzero(np.any(grad, axis=1)), ids)
    np.testing.assert_array_equal(grad[ids], 2 * head[ids])


def test_no_cap_that_is_allowed_can_overflow():
    """The worst case: all logits at the cap, in the largest table that uint16 ids can use."""
    for cap in range(100, 0, -1):
        try:
            cfg = small_config(vocab=65536, real_tokens=65536, logit_cap=(float(cap), 5.0, 7.5))
        except T.UserError:
            continue
        break
    assert cap > 23  # that of the record
    x, head, targets = jnp.full((2, 32), 1e4), jnp.ones((65536, 32)), np.array([[0], [65535]])
    sums, grads = sums_and_gradients(x, head, targets, np.ones((2, 1), np.float32), cfg)
    np.testing.assert_allclose(sums, 2 * np.log(65536), rtol=1e-4, err_msg=f"logit_cap={cap}")
    assert all(np.isfinite(grad).all() for grad in grads)
