"""Optimizers: Adam and Muon against NumPy float64, and the walk over the parameter table."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_config
from jax.sharding import PartitionSpec as P

import train_gpt as T


def matrices(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Adam


@pytest.mark.parametrize("betas", [(0.8, 0.95), (0.9, 0.999), (0.0, 0.5)])
@pytest.mark.parametrize("eps", [1e-10, 0.1])
def test_ten_steps_of_adam_against_float64(betas, eps):
    b1, b2 = betas
    param = matrices(7, 5)
    exact, mean, square = param.astype(np.float64), np.zeros((7, 5)), np.zeros((7, 5))
    state = jnp.asarray(param), jnp.zeros((7, 5)), jnp.zeros((7, 5))
    for count in range(1, 11):
        grad, rate = matrices(7, 5, seed=count) * 10.0 ** (count % 3), 0.1 / count
        mean = b1 * mean + (1 - b1) * grad
        square = b2 * square + (1 - b2) * grad.astype(np.float64) ** 2
        exact -= rate * (mean / (1 - b1**count)) / (np.sqrt(square / (1 - b2**count)) + eps)
        state = T.adam(state[0], grad, *state[1:], rate, jnp.float32(count), betas, eps)
        # float32; 1 - 0.999^count in it is good to 1e-4 at count 1
        for got, want in zip(state, (exact, mean, square), strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_the_first_step_of_adam_has_the_size_of_the_rate():
    """That is what the bias correction is for."""
    grad = matrices(7, 5)
    zero = jnp.zeros((7, 5))
    param, *_ = T.adam(zero, grad, zero, zero, 0.1, jnp.float32(1), (0.8, 0.95), 1e-10)
    np.testing.assert_allclose(param, -0.1 * np.sign(grad), rtol=1e-5)


# Muon: orthogonalization

# Where the five polynomials send singular values from 1/1024 of the Frobenius norm up. In bfloat16
# the small ones drown in rounding a little.
BAND = {"float32": (0.84, 1.15), "bfloat16": (0.80, 1.20)}
SHAPES = [(64, 64), (128, 32), (32, 128), (48, 40)]


def with_spectrum(rows: int, cols: int, values, seed: int = 0):
    """(matrix, u, v) with the given singular values, orthonormal u [rows, k] and v [cols, k]."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((n, len(values))))[0] for n in (rows, cols))
    return (u * np.asarray(values)) @ v.T, u, v


def orthogonalized(x, dtype) -> np.ndarray:
    out = T.orthogonalize(jnp.asarray(x, jnp.float32)[None], jnp.dtype(dtype))
    assert out.dtype == dtype
    return np.asarray(out[0], np.float64)


@pytest.mark.parametrize("dtype", BAND)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e8])
@pytest.mark.parametrize("rows, cols", SHAPES)
def test_singular_values_land_in_a_band_around_1(rows, cols, size, dtype):
    x, _, _ = with_spectrum(rows, cols, size * np.geomspace(1, 0.01, min(rows, cols)))
    values = np.linalg.svd(orthogonalized(x, dtype), compute_uv=False)
    low, high = BAND[dtype]
    assert low < values.min() and values.max() < high


@pytest.mark.parametrize("rows, cols", SHAPES)
def test_singular_vectors_stay(rows, cols):
    """The result is U p(S) V^T with p near 1: as good as the nearest orthogonal matrix, U V^T."""
    x, u, v = with_spectrum(rows, cols, np.geomspace(1, 0.01, min(rows, cols)))
    inside = u.T @ orthogonalized(x, "float32") @ v
    np.testing.assert_allclose(inside, np.diag(np.diag(inside)), atol=1e-3)
    assert np.abs(np.diag(inside) - 1).max() < 0.16


@pytest.mark.parametrize("rows, cols", SHAPES)
def test_orthogonalize_is_the_composed_polynomial_of_the_singular_values(rows, cols):
    x = matrices(rows, cols)
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s /= 1.02 * np.sqrt((s**2).sum()) + 1e-6
    for a, b, c in T.POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    np.testing.assert_allclose(orthogonalized(x, "float32"), (u * s) @ vt, atol=1e-4)


def test_polar_express_maps_the_whole_interval_into_the_band():
    s = np.geomspace(1 / 1024, 1 / 1.02, 10_000)
    for a, b, c in T.POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    assert len(T.POLAR_EXPRESS) == 5
    assert BAND["float32"][0] < s.min() and s.max() < BAND["float32"][1]


def test_directions_without_gradient_get_no_update():
    x, u, v = with_spectrum(64, 64, np.geomspace(1, 0.1, 5))
    out = orthogonalized(x, "float32")
    values = np.linalg.svd(out, compute_uv=False)
    assert 0.84 < values[4] and values[0] < 1.15
    assert values[5] < 1e-3  # float32 rounding, which the polynomials amplify a thousandfold
    np.testing.assert_allclose(u.T @ out @ v, np.eye(5), atol=0.16)


@pytest.mark.parametrize("dtype", BAND)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-9])
def test_a_vanishing_gradient_fades_out_instead_of_dividing_by_zero(size, dtype):
    values = np.linalg.svd(orthogonalized(size * matrices(64, 64), dtype), compute_uv=False)
    assert np.isfinite(values).all() and values.max() < 1.2
    assert size > 0 or values.max() == 0


def test_a_bank_is_a_loop_over_its_matrices():
    bank = jnp.asarray(matrices(5, 48, 16)) * jnp.array([1, 1e-3, 0, 10, 1e4])[:, None, None]
    got = T.orthogonalize(bank, jnp.float32)
    for x, y in zip(bank, got, strict=True):
        np.testing.assert_allclose(y, T.orthogonalize(x[None], jnp.float32)[0], atol=1e-5)


# Muon: momentum, step size, dtype


def polar(x) -> np.ndarray:
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt


@pytest.mark.parametrize("mu", [0.0, 0.85, 0.95])
def test_momentum_and_its_look_ahead_against_float64(mu, monkeypatch):
    """With the exact polar factor in place of the polynomials, to see everything else exactly."""
    monkeypatch.setattr(
        T, "orthogonalize", lambda x, dtype: jnp.stack([polar(np.asarray(y)) for y in x])
    )
    scale = np.array([1.0, 2.0, 0.5])
    param, average = matrices(3, 12, 6).astype(np.float64), np.zeros((3, 12, 6))
    bank, momentum = jnp.asarray(param, jnp.float32), jnp.zeros((3, 12, 6))
    for step in range(5):
        grad = matrices(3, 12, 6, seed=step + 1)
        average = mu * average + (1 - mu) * grad
        ahead = mu * average + (1 - mu) * grad
        param = param - 0.1 * np.array([s * polar(x) for s, x in zip(scale, ahead, strict=True)])
        bank, momentum = T.muon(
            bank, grad, momentum, 0.1, mu, jnp.asarray(scale, jnp.float32), jnp.float32
        )
        np.testing.assert_allclose(momentum, average, atol=1e-6)
        np.testing.assert_allclose(bank, param, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_masters_and_momentum_stay_float32_with_full_precision(dtype):
    """A step far below the 2^-8 of bfloat16 moves them, whatever the update was computed in."""
    bank = jnp.ones((2, 16, 8))
    grad = jnp.asarray(matrices(2, 16, 8))
    new, momentum = T.muon(bank, grad, 0 * bank, 1e-4, 0.9, jnp.ones(2), dtype)
    assert new.dtype == momentum.dtype == jnp.float32
    assert (new != bank).mean() > 0.95
    np.testing.assert_allclose(momentum, 0.1 * grad, rtol=1e-6)


# Step sizes of the table


@pytest.mark.parametrize("cfg", [small_config(), T.PRESETS["speedrun"]], ids=lambda c: c.preset)
def test_step_sizes_are_1_but_2_on_the_way_to_four_times_the_width(cfg):
    table = T.param_table(cfg)
    assert set(table["attn_bank"].scale) == {1.0}
    assert set(table["mlp_bank"].scale[: cfg.layers]) == {2.0}
    assert set(table["mlp_bank"].scale[cfg.layers : 2 * cfg.layers]) == {1.0}


@pytest.mark.parametrize("matrix", ["attention", "up", "down"])
def test_an_update_of_rate_1_changes_outputs_by_the_size_of_the_inputs(matrix):
    """Root mean square over random inputs: the same for all, so that one rate serves them all."""
    cfg = small_config(layers=2)
    bank, index = {"attention": ("attn_bank", 0), "up": ("mlp_bank", 0), "down": ("mlp_bank", 2)}[
        matrix
    ]
    row = T.param_table(cfg)[bank]
    zero = jnp.zeros((1, *row.shape[1:]))
    scale = jnp.asarray(row.scale[index : index + 1])
    grad = jnp.asarray(matrices(1, *row.shape[1:]))
    new, _ = T.muon(zero, grad, zero, 1.0, 0.0, scale, jnp.float32)
    weight = np.asarray(new[0]) if matrix == "down" else np.asarray(new[0]).T  # to x @ weight
    x = matrices(4000, len(weight), seed=1)
    assert np.sqrt(np.mean((x @ weight) ** 2)) == pytest.approx(1, abs=0.1)


# The walk over the table, inside shard_map


def walk(cfg: T.Config, devices: int):
    """apply_updates compiled over so many devices: (state, grads, hyper) -> state."""
    mesh = T.make_mesh(dataclasses.replace(cfg, devices=devices))
    specs = T.map_state(cfg, lambda kind, name, row: T.partition(row))
    step = jax.shard_map(
        lambda state, grads, hyper: T.apply_updates(cfg, state, grads, hyper),
        mesh=mesh,
        in_specs=(specs, specs["params"], P()),
        out_specs=specs,
        check_vma=False,
    )
    return jax.jit(step)


CFG = small_config(lr_muon=0.03, lr_embed=0.5, lr_head=0.02, lr_scalar=0.07)
HYPER = np.array([0.5, 0.9, 3.0], np.float32)
cached_walk = functools.cache(functools.partial(walk, CFG))


def random_state(cfg: T.Config):
    """A state in the middle of training, and gradients of the padding that are zero."""
    rng = np.random.default_rng(0)

    def leaf(kind, name, row):
        x = rng.standard_normal(row.shape).astype(np.float32)
        x[row.shape[0] - row.spare :] = 0
        return x**2 if kind == "second" else x

    return T.map_state(cfg, leaf), T.map_state(cfg, leaf)["params"]


def expected(cfg: T.Config, state, grads, hyper, name: str):
    """(param, first, second or None) of one parameter by one call of its optimizer."""
    lr, mu, count = hyper
    row = T.param_table(cfg)[name]
    old, first, rate = state["params"][name], state["first"][name], lr * row.lr
    if row.optimizer == "muon":
        scale = jnp.asarray(row.scale, jnp.float32)
        return *T.muon(old, grads[name], first, rate, mu, scale, cfg.dtype), None
    second, betas = state["second"][name], cfg.adam_betas
    return T.adam(old, grads[name], first, second, rate, count, betas, cfg.adam_eps)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", T.param_table(CFG))
def test_every_parameter_takes_the_step_of_its_row(name, devices):
    state, grads = random_state(CFG)
    new = cached_walk(devices)(state, grads, HYPER)
    want = expected(CFG, state, grads, HYPER, name)
    for kind, array in zip(("params", "first", "second"), want, strict=True):
        assert (name in new[kind]) == (array is not None)
        if array is not None:
            assert new[kind][name].dtype == np.float32
            # float32, products in another order when compiled
            np.testing.assert_allclose(new[kind][name], array, rtol=1e-5, atol=1e-5)


def test_another_optimizer_in_the_table_is_another_step(monkeypatch):
    table = T.param_table(CFG)
    table["attn_bank"] = dataclasses.replace(table["attn_bank"], optimizer="adam", lr=0.2)
    monkeypatch.setattr(T, "param_table", lambda cfg: table)
    state, grads = random_state(CFG)
    new = walk(CFG, 2)(state, grads, HYPER)
    assert set(new["second"]) == set(table) - {"mlp_bank"}
    want = expected(CFG, state, grads, HYPER, "attn_bank")
    for kind, array in zip(("params", "first", "second"), want, strict=True):
        np.testing.assert_allclose(new[kind]["attn_bank"], array, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", [0, 1, 2, 3, 5])
def test_each_matrix_of_a_bank_is_orthogonalized_alone(other):
    """Matrix 4 is q of layer 1: the gradients of its k (5) and of layer 0 (0 to 3) are not its."""
    state, grads = random_state(CFG)
    factor = np.where(np.arange(8) == other, np.float32(-3), np.float32(1))[:, None, None]
    changed = {**grads, "attn_bank": grads["attn_bank"] * factor}
    one, two = (cached_walk(1)(state, g, HYPER)["params"]["attn_bank"] for g in (grads, changed))
    np.testing.assert_array_equal(one[4], two[4])
    assert (one[other] != two[other]).any()


@pytest.mark.parametrize("devices", [1, 8])
def test_a_zero_gradient_at_the_start_changes_nothing(devices):
    """Tokens that were never seen have 0 / (0 + eps); padding and dead layers a zero matrix."""
    params = random_state(CFG)[0]["params"]
    zeros = jax.tree.map(np.zeros_like, params)
    second = {name: zeros[name] for name in zeros if "bank" not in name}
    state = {"params": params, "first": zeros, "second": second}
    new = cached_walk(devices)(state, zeros, np.array([1.0, 0.85, 1.0], np.float32))
    jax.tree.map(np.testing.assert_array_equal, new, state)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_step_is_the_same_bit_by_bit_when_run_again(devices):
    state, grads = random_state(CFG)
    one, two = (cached_walk(devices)(state, grads, HYPER) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, two)
