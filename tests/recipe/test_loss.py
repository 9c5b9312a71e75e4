"""The loss against NumPy in float64. tests/kernels has tests of the fused loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_config
from programs import jit

import train_gpt as T


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def exact_losses(x_rd, head_vd, cfg):
    """Return the cross-entropy [r, v] of every id as a target, by a stable log-softmax."""
    a, b, c = cfg.logit_cap
    logits = a * sigmoid((np.asarray(x_rd, np.float64) @ np.asarray(head_vd, np.float64).T + b) / c)
    top = logits.max(-1, keepdims=True)
    return top + np.log(np.exp(logits - top).sum(-1, keepdims=True)) - logits


def loss_inputs(tokens: int, k: int = 3):
    """Return outputs, head, targets [r, k] (some repeat within a token) and weights."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 97, (tokens, k)).astype(np.int32)
    targets[::3] = targets[::3, :1]
    targets[1::3, -1] = targets[1::3, 0]
    weights = rng.uniform(0, 1, (tokens, k)).astype(np.float32)
    weights[-1, 1:] = 0
    weights[5] = 0
    x, head = (rng.standard_normal((n, 32)).astype(np.float32) for n in (tokens, 104))
    return x, head, targets, weights


def exact(x, head, targets, weights, cfg):
    """Return (weighted sum, plain sum, gradients of the weighted sum for x and head) in float64,
    target by target."""
    a, b, c = cfg.logit_cap
    x, head, weights = (np.asarray(y, np.float64) for y in (x, head, weights))
    every = exact_losses(x, head, cfg)
    losses = np.take_along_axis(every, targets, axis=1)
    inner = sigmoid((x @ head.T + b) / c)
    probs = np.exp(-every)
    assert np.abs(probs.sum(1) - 1).max() < 1e-12
    d_logits = np.zeros_like(probs)
    for token, k in np.ndindex(targets.shape):
        d_logits[token] += weights[token, k] * probs[token]
        d_logits[token, targets[token, k]] -= weights[token, k]
    d_products = d_logits * a / c * inner * (1 - inner)
    sums = float(np.sum(losses * weights)), float(np.sum(losses[weights[:, 0] > 0, 0]))
    return *sums, d_products @ head, d_products.T @ x


def sums_and_gradients(x, head, targets, weights, cfg):
    """Return (weighted sum, plain sum, gradients of the weighted sum for x and head)."""

    def run(x, head):
        return T.cross_entropy(x, head, targets, weights, cfg)

    (weighted, plain), grads = jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(x, head)
    return weighted, plain, *grads


@pytest.mark.parametrize("k, chunk, chunks", [(3, 60, 1), (3, 59, 2), (3, 7, 10), (1, 25, 3)])
def test_cross_entropy_and_its_gradient_against_float64(k, chunk, chunks):
    """With equal targets and zero weights, in the fewest equal chunks up to the given length."""
    inputs, cfg = loss_inputs(60, k), small_config(loss_chunk=chunk)
    assert [x.shape for x in T.in_chunks(cfg, 104, inputs[2])] == [(chunks, 60 // chunks, k)]
    assert len(T.in_chunks(cfg, 52, inputs[2])[0]) == -(-chunks // 2), "half as many ids"
    got, want = sums_and_gradients(*inputs, cfg), exact(*inputs, cfg)
    assert {x.dtype for x in got} == {np.dtype("float32")}
    np.testing.assert_allclose(got[:2], want[:2], rtol=1e-6)
    for x, y in zip(got[2:], want[2:], strict=True):  # seen: 4e-7 of the largest
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * np.abs(y).max())
    assert not np.any(got[2][5])  # a token without weight


def test_cross_entropy_of_bfloat16_has_float32_losses_and_sums():
    """With bfloat16 logits, losses would have errors up to 1/16; a head's gradient summed in
    bfloat16 over 60 chunks, several percent."""
    x, head, targets, weights = loss_inputs(60)
    inputs = jnp.asarray(x, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16), targets, weights
    cfg = small_config(loss_chunk=1)
    got, want = sums_and_gradients(*inputs, cfg), exact(*inputs, cfg)
    assert got[0].dtype == got[1].dtype == jnp.float32
    np.testing.assert_allclose(got[:2], want[:2], rtol=1e-6)
    for x, y in zip(got[2:], want[2:], strict=True):
        assert x.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(x).astype(np.float64) - y) < 0.005 * np.linalg.norm(
            y
        )  # seen: 0.003


def test_allowed_logit_caps_cannot_overflow():
    """Worst case: all logits at the cap, with the largest vocabulary of uint16 ids."""
    for cap in range(100, 0, -1):
        try:
            cfg = small_config(vocab=65536, real_tokens=65536, logit_cap=(float(cap), 5.0, 7.5))
        except T.UserError:
            continue
        break
    assert cap > 23  # the cap of the record
    x, head, targets = jnp.full((2, 32), 1e4), jnp.ones((65536, 32)), np.array([[0], [65535]])
    got = sums_and_gradients(x, head, targets, np.ones((2, 1), np.float32), cfg)
    np.testing.assert_allclose(got[:2], 2 * np.log(65536), rtol=1e-4, err_msg=f"logit_cap={cap}")
    assert all(np.isfinite(x).all() for x in got)
