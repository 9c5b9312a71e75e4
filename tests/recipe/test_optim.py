"""The optimizers against float64 formulas. test_record92.py checks them within the programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_config
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, quick

import train_gpt as T

CFG = small_config()


def matrices(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mapped(s):
    """Return singular values after the six maps."""
    for a, b, c in T.ANVIL_MAPS:
        s = a * s + b * s**3 + c * s**5
    return s


def exact_polar(x):
    """Apply the six maps to the singular values of a matrix."""
    u, s, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return (u * mapped(s / (1.05 * np.sqrt((s**2).sum()) + 1e-6))) @ vt


def exact_equal(update, square, rate):
    """Divide rows (columns of a wide matrix) by their running RMS, and keep the norm."""
    axis = 1 if update.shape[0] >= update.shape[1] else 0
    square = square + rate * (np.mean(update**2, axis=axis) - square)
    even = update / np.expand_dims(np.sqrt(np.maximum(square, 1e-10)), axis)
    return even * np.sqrt((update**2).sum() / (even**2).sum()), square


def exact_adam(param, mean, square, grad, lr, decay, count, betas, eps):
    b1, b2 = betas
    mean, square = b1 * mean + (1 - b1) * grad, b2 * square + (1 - b2) * grad**2
    step = lr * np.sqrt(1 - b2**count) / (1 - b1**count) * mean / (np.sqrt(square) + eps)
    return param - step - np.where(step * param > 0, lr**2 * decay * param, 0), mean, square


@pytest.mark.parametrize("betas, eps", [((0.5, 0.95), 1e-10), ((0.9, 0.99), 0.1)])
def test_thirty_steps_of_adam(betas, eps):
    """Gradients of sizes from 1 to 100, a falling rate, and weight decay of a tenth of the step. A
    row without gradients does not change."""

    @jit
    def adam(param, mean, square, grad, lr, count):
        return T.adam(param, mean, square, grad, T.AdamRates(lr, 10.0, count, betas, eps, True))

    exact = matrices(7, 5).astype(np.float64), np.zeros((7, 5)), np.zeros((7, 5))
    state = tuple(jnp.asarray(x, jnp.float32) for x in exact)
    for count in range(1, 31):
        grad, lr = matrices(7, 5, seed=count) * 10.0 ** (count % 3), 0.1 / count
        grad[3] = 0
        exact = exact_adam(*exact, grad, lr, 10.0, count, betas, eps)
        state = adam(*state, grad, jnp.float32(lr), jnp.float32(count))
        # 1 - 0.99^count loses two of float32's seven digits at count 1
        for got, want in zip(state, exact, strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, rtol=5e-5, atol=5e-6)
    np.testing.assert_array_equal(state[0][3], matrices(7, 5)[3])


@pytest.mark.parametrize("dtype, atol", [("float32", 1e-4), ("bfloat16", 0.08)])
@pytest.mark.parametrize("rows, cols", [(64, 64), (128, 32), (32, 128)])
def test_orthogonalize_maps_the_singular_values(rows, cols, dtype, atol):
    """Each matrix of a bank is mapped by itself, at any scale; zero stays zero."""
    bank = matrices(4, rows, cols) * np.float32([1, 1e-3, 0, 1e4])[:, None, None]
    got = jit(T.orthogonalize, static_argnames="dtype")(bank, dtype=jnp.dtype(dtype))
    assert got.dtype == dtype and not np.any(got[2])
    for x, y in zip(bank, np.asarray(got, np.float64), strict=True):
        np.testing.assert_allclose(y, exact_polar(x), atol=atol)


def test_the_maps_bring_all_singular_values_close_to_1():
    s = mapped(np.geomspace(1 / 256, 1 / 1.05, 10_000))
    assert 0.999 < s.min() and s.max() < 1.001


@pytest.mark.parametrize("shape", [(3, 12, 6), (3, 6, 12), (2, 8, 8)])
def test_four_steps_of_anvil(shape):
    """Two averages of the gradient, neurons with equal norms, and cautious weight decay. A zero
    gradient leaves averages and moments unchanged, without NaN."""
    lr_factors = tuple(range(1, 1 + shape[0]))
    row = T.ParamSpec(shape, None, "anvil", "anvil", 0.3, 2.0, lr_factors=lr_factors)
    param = matrices(*shape, seed=9).astype(np.float64)
    exact = [param, np.zeros(shape), np.zeros(shape), np.zeros((shape[0], max(shape[1:])))]
    state = [jnp.asarray(x, jnp.float32) for x in exact]
    hyper = T.hyper_at(CFG, 5)._replace(lr=np.float32(0.5), momentum=np.float32(0.9))
    hyper = hyper._replace(fast_beta=np.float32(0.85), fast_weight=np.float32(0.4))
    kinds = "params", *T.moments(CFG, row)

    def anvil(*args):
        new = T.anvil(CFG, row, dict(zip(kinds, args, strict=False)), args[4], hyper)
        return tuple(new[kind] for kind in kinds)

    step = jax.shard_map(anvil, mesh=mesh_of(1), in_specs=P(), out_specs=P(), check_vma=False)
    still = quick(step, *state, np.zeros(shape, np.float32))
    shrunk = 1 - 0.15 * 0.15 * 2.0 * (1 + np.arange(shape[0]))[:, None, None]
    np.testing.assert_allclose(still[0], param * shrunk, rtol=1e-6)
    assert not any(np.any(x) for x in still[1:])
    for at in range(4):
        grad = matrices(*shape, seed=at)
        state = quick(step, *state, grad)
        param, fast, slow, square = (x.copy() for x in exact)
        fast, slow = fast + 0.15 * (grad - fast), slow + CFG.slow_rate * (grad - slow)
        blend = 0.4 * fast + 0.6 * slow
        ahead = grad + 0.9 * (blend - grad)
        for i, x in enumerate(ahead):
            update, square[i] = exact_equal(exact_polar(x), square[i], CFG.equalize_rate)
            decay = 0.15 * 2.0 * (slow[i] * param[i] >= 0) * param[i]
            param[i] -= 0.15 * (i + 1) * (update + decay)
        exact = [param, fast, slow, square]
        for got, want in zip(state, exact, strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


def test_rows_of_a_table_are_updated_in_parts():
    """The order of sums does not depend on the parts. Nothing is jitted, since XLA would round
    fused operations differently."""
    size, width, rng = 37, 8, np.random.default_rng(5)
    waiting = []
    for _ in range(3):  # steps on two devices; each requests a row once, with padding
        requested = np.full((2, 16), size, np.int32)
        grads = np.zeros((2, 16, width), np.float32)
        for ids, rows in zip(requested, grads, strict=True):
            count = rng.integers(8, 16)
            ids[:count] = np.sort(rng.choice(size, count, replace=False))
            rows[:count] = rng.standard_normal((count, width))
        waiting.append((jnp.asarray(requested), jnp.asarray(grads)))
    table, square = jnp.asarray(matrices(size, width)), jnp.asarray(np.abs(matrices(size)))
    count = jnp.float32(3)
    rates = T.AdamRates(jnp.float32(0.1), 0.5, count, (0.0, 0.9), eps=1e-10, cautious=True)

    def after(rows_at_once):
        cfg = small_config(rows_at_once=rows_at_once)
        with jax.disable_jit():
            return T.update_rows(cfg, table, square, waiting, rates, T.scatter_rows)

    whole = after(96)
    assert np.any(whole[0] != table) and np.all(whole[1] != square)
    power = sum(float(jnp.sum(grads**2)) for _, grads in waiting)
    assert 0 < float(whole[2]) != power  # the norm of the sum
    for rows_at_once in (5, 16, 95):
        got = after(rows_at_once)
        np.testing.assert_array_equal(got[0], whole[0])
        np.testing.assert_array_equal(got[1], whole[1])
        np.testing.assert_allclose(got[2], whole[2], rtol=1e-6)
