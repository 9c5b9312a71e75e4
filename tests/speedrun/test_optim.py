"""Optimizers: NorMuon and Adam against NumPy float64, and the walk over the parameter table."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_config
from jax.sharding import PartitionSpec as P
from programs import jit, lay, mesh_of, quick_compilation

import train_gpt as T


def matrices(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ------------------------------------------------------------------------------------------------
# The references: every rule once more, in float64, one matrix at a time
# ------------------------------------------------------------------------------------------------

QUINTICS = (  # of Polar Express
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def exact_polar(x):
    """What Polar Express makes of one matrix, by way of its singular values."""
    u, s, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    s = s / (1.02 * np.sqrt((s**2).sum()) + 1e-6)
    for a, b, c in QUINTICS:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


def exact_even(update, variance, beta):
    """NorMuon of one matrix: rows over their running root mean square, at the norm of before."""
    variance = beta * variance + (1 - beta) * np.mean(update**2, axis=1)
    even = update / np.sqrt(np.maximum(variance, 1e-10))[:, None]
    norm = np.sqrt((even**2).sum())
    return even * (np.sqrt((update**2).sum()) / norm if norm else 1.0), variance


def exact_muon(param, grad, momentum, variance, lr, decay, mu, beta, scale):
    """One step on one matrix: (param, momentum, variance, update)."""
    momentum = momentum + (1 - mu) * (grad - momentum)
    ahead = grad + mu * (momentum - grad)
    update, variance = exact_even(exact_polar(ahead), variance, beta)
    mask = update * param >= 0
    return param - lr * scale * (update + lr * decay * mask * param), momentum, variance, update


def exact_adam(param, grad, mean, square, lr, decay, count, betas, eps):
    """One step: (param, mean, square)."""
    b1, b2 = betas
    mean = mean + (1 - b1) * (grad - mean)
    square = square + (1 - b2) * (grad**2 - square)
    step = lr * np.sqrt(1 - b2**count) / (1 - b1**count) * mean / (np.sqrt(square) + eps)
    return param - step - np.where(step * param > 0, lr**2 * decay * param, 0), mean, square


# ------------------------------------------------------------------------------------------------
# Adam
# ------------------------------------------------------------------------------------------------

adam = jit(T.adam, static_argnames=("betas", "eps"))


@pytest.mark.parametrize("betas", [(0.5, 0.95), (0.9, 0.99)])
@pytest.mark.parametrize("eps", [1e-10, 0.1])
def test_thirty_steps_of_adam_against_float64(betas, eps):
    """Gradients of sizes from 1 to 100, a falling rate, a decay that is a tenth of the step."""
    exact = matrices(7, 5).astype(np.float64), np.zeros((7, 5)), np.zeros((7, 5))
    state = tuple(jnp.asarray(x, jnp.float32) for x in exact)
    for count in range(1, 31):
        grad, lr = matrices(7, 5, seed=count) * 10.0 ** (count % 3), 0.1 / count
        exact = exact_adam(exact[0], grad, *exact[1:], lr, 10.0, count, betas, eps)
        state = adam(state[0], grad, *state[1:], lr, 10.0, jnp.float32(count), betas, eps)
        # 1 - 0.99^count loses two of float32's seven digits at count 1
        for got, want in zip(state, exact, strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, rtol=5e-5, atol=5e-6)


@pytest.mark.parametrize("count", [1, 3])
def test_eps_joins_the_root_before_its_correction(count):
    """With a square of 0 before: sqrt(0.05 g^2) + eps, and that over sqrt(1 - 0.95^count)."""
    grad, eps = 2.0, 0.3
    step = 0.1 * 0.5 * grad / (1 - 0.5**count)
    step *= np.sqrt(1 - 0.95**count) / (np.sqrt(0.05) * grad + eps)
    one, zero = jnp.ones((1, 1)), jnp.zeros((1, 1))
    new, *_ = adam(one, grad * one, zero, zero, 0.1, 0.0, jnp.float32(count), (0.5, 0.95), eps)
    assert 1 - float(new[0, 0]) == pytest.approx(step, rel=1e-5)


def test_the_first_step_of_adam_has_the_size_of_the_rate():
    """That is what the bias correction is for."""
    grad, zero = matrices(7, 5), jnp.zeros((7, 5))
    param, *_ = adam(zero, grad, zero, zero, 0.1, 0.0, jnp.float32(1), (0.8, 0.95), 1e-10)
    np.testing.assert_allclose(param, -0.1 * np.sign(grad), rtol=1e-5)


def test_adam_decays_only_what_the_step_shrinks():
    """By lr^2 * decay = 0.05 of the weight; where the step is 0 or makes it larger, not at all."""
    param, mean = np.array([[2.0, 2.0, 2.0, -2.0, -2.0]]), np.array([[1.0, -1.0, 0.0, 1.0, -1.0]])
    args = [jnp.asarray(x, jnp.float32) for x in (param, 0 * mean, 2 * mean, np.ones((1, 5)))]
    new, *_ = adam(*args, 0.1, 5.0, jnp.float32(1000), (0.5, 0.99), 1e-10)
    step = 0.1 * mean / np.sqrt(0.99)
    decay = 0.05 * param * np.array([[1, 0, 0, 0, 1]])
    np.testing.assert_allclose(new, param - step - decay, rtol=1e-5)


def test_a_row_that_was_never_seen_rests_and_one_seen_once_keeps_moving():
    """Row 0 is seen by every step, row 1 by the first only, row 2 by none."""
    start = jnp.ones((3, 4))
    state = start, jnp.zeros((3, 4)), jnp.zeros((3, 4))
    for count in range(1, 6):
        grad = jnp.asarray([[1.0], [float(count == 1)], [0.0]] * np.ones((3, 4)), jnp.float32)
        before = state[0]
        state = adam(before, grad, *state[1:], 0.1, 1.0, jnp.float32(count), (0.75, 0.95), 1e-10)
        moved = np.asarray(before - state[0]).min(axis=1)
        assert moved[0] > 0.05 and moved[1] > 0.01
    np.testing.assert_array_equal(state[0][2], start[2])
    assert not np.any(state[1][2]) and not np.any(state[2][2])


# ------------------------------------------------------------------------------------------------
# Muon: orthogonalization
# ------------------------------------------------------------------------------------------------

# Where the five polynomials send singular values from 1/1024 of the Frobenius norm up. In bfloat16
# the small ones drown in rounding a little.
BAND = {"float32": (0.84, 1.15), "bfloat16": (0.80, 1.20)}
SHAPES = [(64, 64), (128, 32), (32, 128), (48, 40)]
orthogonalize = jit(T.orthogonalize, static_argnames="dtype")


def with_spectrum(rows: int, cols: int, values, seed: int = 0):
    """(matrix, u, v) with the given singular values, orthonormal u [rows, k] and v [cols, k]."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((n, len(values))))[0] for n in (rows, cols))
    return (u * np.asarray(values)) @ v.T, u, v


def orthogonalized(x, dtype) -> np.ndarray:
    out = orthogonalize(jnp.asarray(x, jnp.float32)[None], dtype=jnp.dtype(dtype))
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
    np.testing.assert_allclose(orthogonalized(x, "float32"), exact_polar(x), atol=1e-4)


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
    bank = matrices(5, 24, 16) * np.float32([1, 1e-3, 0, 10, 1e4])[:, None, None]
    got = orthogonalize(bank, dtype=jnp.dtype("float32"))
    for x, y in zip(bank, got, strict=True):
        np.testing.assert_allclose(y, exact_polar(x), atol=1e-4)


# ------------------------------------------------------------------------------------------------
# Muon: rows of equal size, momentum, decay
# ------------------------------------------------------------------------------------------------

even_rows = jit(T.even_rows)
muon = jit(T.muon, static_argnames="dtype")
F32 = jnp.dtype("float32")


@pytest.mark.parametrize("shape", [(3, 12, 6), (3, 6, 12)])
def test_even_rows_against_float64_over_four_steps(shape):
    """Rows of sizes from 0.01 to 1; the running mean square outlives each step."""
    exact, variance = np.zeros(shape[:2]), jnp.zeros(shape[:2])
    for step in range(4):
        update = matrices(*shape, seed=step) * np.geomspace(0.01, 1, shape[1])[:, None]
        got, variance = even_rows(update.astype(np.float32), variance, 0.95)
        assert got.dtype == variance.dtype == jnp.float32
        pairs = [exact_even(x, v, 0.95) for x, v in zip(update, exact, strict=True)]
        want, exact = (np.stack(x) for x in zip(*pairs, strict=True))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(variance, exact, rtol=1e-5)


def test_even_rows_makes_rows_equal_and_keeps_the_norm_of_the_matrix():
    """At the first step exactly: every row is divided by its own size."""
    update = matrices(4, 16, 8) * np.geomspace(0.01, 1, 16, dtype=np.float32)[:, None]
    got, _ = even_rows(update, jnp.zeros((4, 16)), 0.95)
    sizes = np.linalg.norm(got, axis=2)
    np.testing.assert_allclose(sizes, sizes[:, :1] * np.ones((1, 16)), rtol=1e-5)
    norms = [np.linalg.norm(x, axis=(1, 2)) for x in (update, got)]
    np.testing.assert_allclose(*norms, rtol=1e-5)


@pytest.mark.parametrize("remembered", [0.0, 0.1])
def test_even_rows_leaves_zero_matrices_and_zero_rows_zero(remembered):
    """Matrix 0 is zero, so is row 2 of matrix 1; nothing becomes NaN, nothing else is disturbed."""
    update = matrices(2, 4, 6)
    update[0] = update[1, 2] = 0
    variance = np.full((2, 4), remembered, np.float32)
    got, after = even_rows(update, variance, 0.95)
    assert np.isfinite(got).all() and np.isfinite(after).all()
    assert not np.any(got[0]) and not np.any(got[1, 2])
    np.testing.assert_allclose(got[1], exact_even(update[1], variance[1], 0.95)[0], rtol=1e-4)
    np.testing.assert_allclose(after[0], 0.95 * remembered, rtol=1e-6)


@pytest.mark.parametrize("mu", [0.0, 0.85, 0.95])
@pytest.mark.parametrize("shape", [(3, 12, 6), (3, 6, 12)])
def test_eight_steps_of_muon_against_float64(shape, mu):
    """Momentum, its look-ahead, row sizes, decay and the factor of each matrix together."""
    scale, lr, decay = np.array([1.0, 2.0, 0.5]), 0.1, 2.0
    exact = [[x, 0 * x, np.zeros(shape[1])] for x in matrices(*shape).astype(np.float64)]
    state = jnp.asarray(matrices(*shape)), jnp.zeros(shape), jnp.zeros(shape[:2])
    for step in range(8):
        grad = matrices(*shape, seed=step + 1)
        state = muon(
            state[0], grad, *state[1:], lr, decay, mu, 0.95, jnp.asarray(scale, F32), dtype=F32
        )
        for one, g, s in zip(exact, grad, scale, strict=True):
            *one[:], update = exact_muon(one[0], g, *one[1:], lr, decay, mu, 0.95, s)
            # No element is so near to 0 that float32 could see its other sign, which decides decay.
            assert min(np.abs(update).min(), np.abs(one[0]).min()) > 1e-5
        for got, want in zip(state, zip(*exact, strict=True), strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, np.stack(want), atol=2e-5)


def test_muon_decays_what_the_update_shrinks_or_leaves():
    """By lr^2 * scale * decay = 0.01 * 2 * 5 of the weight; row 3 of matrix 0 has no update."""
    param, grad, zero = matrices(3, 12, 6), matrices(3, 12, 6, seed=1), jnp.zeros((3, 12, 6))
    grad[0, 3] = 0
    rest, scale = (zero, jnp.zeros((3, 12)), 0.1), jnp.full(3, 2.0)
    plain, with_decay = (
        np.asarray(muon(param, grad, *rest, decay, 0.9, 0.95, scale, dtype=F32)[0])
        for decay in (0.0, 5.0)
    )
    update = param - plain
    assert not update[0, 3].any() and (update != 0).sum() == 3 * 12 * 6 - 6
    shrinks = update * param >= 0
    assert 0.3 < shrinks.mean() < 0.7 and shrinks[0, 3].all()
    np.testing.assert_allclose(plain - with_decay, 0.1 * param * shrinks, atol=1e-6)


def test_without_gradient_muon_only_decays():
    """Zero momentum gives a zero update, which "leaves" every weight: all decay, none is NaN."""
    param, zero = matrices(3, 12, 6), jnp.zeros((3, 12, 6))
    args = 0.1, 5.0, 0.9, 0.95, jnp.ones(3)
    new, momentum, variance = muon(param, zero, zero, jnp.zeros((3, 12)), *args, dtype=F32)
    np.testing.assert_allclose(new, 0.95 * param, rtol=1e-6)
    assert not np.any(momentum) and not np.any(variance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masters_and_moments_stay_float32_with_full_precision(dtype):
    """A step far below the 2^-8 of bfloat16 moves them, whatever the update was computed in."""
    bank, grad, zero = jnp.ones((3, 12, 6)), matrices(3, 12, 6), jnp.zeros((3, 12, 6))
    args = 1e-4, 0.0, 0.9, 0.95, jnp.ones(3)
    new, momentum, variance = muon(
        bank, grad, zero, jnp.zeros((3, 12)), *args, dtype=jnp.dtype(dtype)
    )
    assert new.dtype == momentum.dtype == variance.dtype == jnp.float32
    assert (new != bank).mean() > 0.95
    np.testing.assert_allclose(momentum, 0.1 * grad, rtol=1e-5)


# ------------------------------------------------------------------------------------------------
# Step sizes of the table
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width, tall", [(32, 2.0), (128, 1.0), (256, 1.0)])
def test_factors_of_attention_up_and_down_matrices(width, tall):
    """1, sqrt(128 / width) but at least 1, and twice that."""
    cfg = small_config(width=width, mlp_width=128)
    table = T.param_table(cfg)
    assert set(table["attn_bank"].scale) == {1.0}
    np.testing.assert_allclose(table["mlp_bank"].scale, [tall] * 4 + [2 * tall] * 4)
    for bank in ("attn_bank", "mlp_bank"):
        assert len(table[bank].scale) == table[bank].shape[0]


@pytest.mark.parametrize("name, size", [("attention", 1.0), ("up", 1.0), ("down", 4.0)])
def test_what_an_update_of_rate_1_does_to_outputs(name, size):
    """Root mean square of the change, for random inputs of size 1: the same for all matrices, but
    for the down-projections (128 inputs, factor 4), which move faster by experiment."""
    cfg = small_config()
    bank, index = {"attention": ("attn_bank", 0), "up": ("mlp_bank", 0), "down": ("mlp_bank", 4)}[
        name
    ]
    row = T.param_table(cfg)[bank]
    zero = jnp.zeros((1, *row.shape[1:]))
    scale = jnp.asarray(row.scale[index : index + 1])
    grad = jnp.asarray(matrices(1, *row.shape[1:]))
    new, *_ = muon(zero, grad, zero, zero[..., 0], 1.0, 0.0, 0.0, 0.95, scale, dtype=F32)
    weight = np.asarray(new[0]) if name == "down" else np.asarray(new[0]).T  # to x @ weight
    x = matrices(4000, len(weight), seed=1)
    assert np.sqrt(np.mean((x @ weight) ** 2)) == pytest.approx(size, rel=0.1)


# ------------------------------------------------------------------------------------------------
# The walk over the table, inside shard_map, for all ten steps of small_config
# ------------------------------------------------------------------------------------------------

CFG = small_config(vocab=101, bigram_rows=523)  # eight devices share no table equally
TABLE = T.param_table(CFG)
MUON = ("attn_bank", "mlp_bank")
ADAM = tuple(name for name in TABLE if name not in MUON)
MATRICES = [(name, i) for name in MUON for i in range(len(TABLE[name].scale))]
SCALE = {"attn_bank": [1.0] * 12, "mlp_bank": [2.0] * 4 + [4.0] * 4}
KINDS = ("params", "first", "second")


def walk(cfg: T.Config, devices: int, with_adam: bool):
    """apply_updates on so many devices: (state, grads, hyper) -> state, in logical shapes.

    `grads` has those of Muon's banks, with Adam those of all parameters; the state is all there.
    """
    mesh = mesh_of(devices)
    specs = jax.tree.map(lambda x: x.sharding.spec, T.abstract_state(cfg, mesh))
    names = T.param_table(cfg) if with_adam else T.updated(cfg, "muon")
    step = jax.shard_map(
        functools.partial(T.apply_updates, cfg),
        mesh=mesh,
        in_specs=(specs, {name: specs["params"][name] for name in names}, P()),
        out_specs=specs,
        check_vma=False,
    )
    with quick_compilation():
        step = jax.jit(step)

    def run(state, grads, hyper):
        args = {kind: lay(cfg, arrays, mesh) for kind, arrays in state.items()}
        new = step(args, lay(cfg, grads, mesh), hyper)
        for kind, name in itertools.product(KINDS, T.param_table(cfg)):
            padding = np.asarray(new[kind][name])[len(state[kind][name]) :]
            assert not padding.any(), f"padding of {kind} {name}"
        return {kind: jax.device_get(T.unpadded(cfg, arrays)) for kind, arrays in new.items()}

    return run


cached_walk = functools.cache(functools.partial(walk, CFG))


@functools.cache
def start():
    """Random parameters (head and embedding differ), the rest zero."""
    rng = np.random.default_rng(0)
    state = T.map_state(CFG, lambda shape, row: np.zeros(shape, np.float32))
    params = {name: rng.standard_normal(row.shape) for name, row in TABLE.items()}
    return state | {"params": {name: x.astype(np.float32) for name, x in params.items()}}


NEVER, ONCE = slice(0, None, 3), slice(1, None, 3)  # rows of tables


@functools.cache
def gradients(step: int) -> dict[str, np.ndarray]:
    """Of all parameters. Every third row of a table has none, the next one only at step 0."""
    found = {}
    for at, (name, row) in enumerate(TABLE.items()):
        found[name] = matrices(*row.shape, seed=100 * step + at) * np.float32(1 + step % 3)
        if name in T.TABLES or name == "head":
            found[name][NEVER] = 0
            if step:
                found[name][ONCE] = 0
    return found


@functools.cache
def history(devices: int, every: int) -> list:
    """The states before and after each of the ten steps, with Adam at every `every`-th."""
    cfg, states, sums = small_config(adam_every=every), [start()], dict.fromkeys(TABLE, 0)
    for step in range(10):
        with_adam = T.is_adam_step(cfg, step)
        grads = {name: sums[name] + grad for name, grad in gradients(step).items()}
        due = grads if with_adam else banks(grads)
        sums = {name: 0 if name in due else grads[name] for name in grads}
        state = cached_walk(devices, with_adam)(states[-1], due, T.hyper_at(cfg, step))
        states.append(state)
    return states


def banks(grads):
    """Of Muon's parameters only."""
    return {name: grads[name] for name in MUON}


LAST_TIED = 5  # round(2/3 of 8 scheduled steps) = 5, which ends a group of 1, of 2 and of 3


@functools.cache
def exact_history(every: int):
    """(the same in float64 by the rules above, {bank: which elements are sure of their decay})."""
    rates = [T.hyper_at(CFG, step).lr.item() for step in range(10)]
    state = jax.tree.map(lambda x: x.astype(np.float64), start())
    states, sure = [state], {name: np.ones(TABLE[name].shape, bool) for name in MUON}
    sums = dict.fromkeys(ADAM, 0.0)
    for step in range(10):
        old, grads = states[-1], gradients(step)
        new = {kind: dict(entries) for kind, entries in old.items()}
        mu = 0.85 + 0.1 * min(step / 4, 1 - max(0, step - 8) / 2)
        for kind, bank in itertools.product(KINDS, MUON):
            new[kind][bank] = new[kind][bank].copy()
        for bank, i in MATRICES:
            row = TABLE[bank]
            *out, update = exact_muon(
                old["params"][bank][i], grads[bank][i], *(old[k][bank][i] for k in KINDS[1:]),
                rates[step] * row.lr, 1.2, mu, 0.95, SCALE[bank][i],
            )  # fmt: skip
            for kind, x in zip(KINDS, out, strict=True):
                new[kind][bank][i] = x
            sure[bank][i] &= np.abs(update) > 1e-4  # its sign in float32 decides over decay
        sums = {name: sums[name] + grads[name] for name in ADAM}
        for name in ADAM if (step + 1) % every == 0 else ():
            total = sums[name]
            if name == "head" and step <= LAST_TIED:
                total = total + sums["embed"]
            row, count = TABLE[name], (step + 1) // every
            out = exact_adam(
                old["params"][name], total, old["first"][name], old["second"][name],
                rates[step] * row.lr, row.decay, count, row.betas, 1e-10,
            )  # fmt: skip
            for kind, x in zip(KINDS, out, strict=True):
                new[kind][name] = x
        if (step + 1) % every == 0:
            sums = dict.fromkeys(ADAM, 0.0)
        if (step + 1) % every == 0 and step <= LAST_TIED:
            for kind in KINDS:
                new[kind]["embed"] = new[kind]["head"]
        states.append(new)
    return states, sure


BOTH = pytest.mark.parametrize("devices", [1, 8])
# Adam at every so many steps, on so many devices.
HISTORIES = [(2, 8), (1, 1)]
HISTORIES += [pytest.param(*x, marks=pytest.mark.slow) for x in ((1, 8), (2, 1), (3, 8))]
EVERY = pytest.mark.parametrize("every, devices", HISTORIES)


@EVERY
@pytest.mark.parametrize("name", TABLE)
def test_ten_steps_of_every_parameter_against_float64(name, every, devices):
    """Tied steps and untied ones, sums and Adam steps, warm-up and cool-down of the momentum."""
    want, sure = exact_history(every)
    assert name in ADAM or sure[name].mean() > 0.98
    for step, (got, exact) in enumerate(zip(history(devices, every), want, strict=True)):
        for kind in got:
            assert set(got[kind]) == set(TABLE)
            x, y = got[kind][name], exact[kind][name]
            assert (x.dtype, x.shape) == (np.float32, y.shape)
            if kind == "params" and name in MUON:
                x, y = x[sure[name]], y[sure[name]]
            # Small singular values grow a thousandfold in the polynomials, and so does rounding.
            limit = 2e-4 if name in MUON else 2e-5
            np.testing.assert_allclose(x, y, rtol=limit, atol=limit, err_msg=f"{kind} {step}")


def test_between_its_steps_adam_rests_and_at_them_everything_of_it_moves():
    """Even steps change nothing of Adam's, bit for bit."""
    for step in range(10):
        before, after = history(8, 2)[step : step + 2]
        for name in ADAM:
            for kind in KINDS:
                same = np.array_equal(before[kind][name], after[kind][name])
                assert same == (step % 2 == 0), (kind, name, step)


@EVERY
def test_head_and_embedding_are_one_until_the_last_tied_step(every, devices):
    """Parameters and moments alike; then they part, from the same ones."""
    states = history(devices, every)
    first = every - 1  # the first Adam step makes the embedding a copy of the head
    assert (states[first]["params"]["head"] != states[first]["params"]["embed"]).any()
    for kind in KINDS:
        for step in range(first, LAST_TIED + 1):
            after = states[step + 1][kind]
            np.testing.assert_array_equal(after["head"], after["embed"])
        parted = states[LAST_TIED + 1 + every][kind]
        assert (parted["head"] != parted["embed"]).any()


BOTH = pytest.mark.parametrize("devices", [1, 8])


@BOTH
def test_while_tied_the_head_learns_from_both_uses(devices):
    """As if it had one gradient, the sum of both; the embedding's own has no other effect."""
    state, hyper = history(8, 2)[4], T.hyper_at(CFG, 5)
    assert hyper.tied == 1
    grads, one = gradients(4), cached_walk(devices, True)(state, gradients(4), hyper)
    summed = {**grads, "head": grads["head"] + grads["embed"], "embed": 0 * grads["embed"]}
    two = cached_walk(devices, True)(state, summed, hyper)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    without = cached_walk(devices, True)(state, {**grads, "embed": 0 * grads["embed"]}, hyper)
    assert (np.asarray(one["params"]["head"]) != without["params"]["head"]).any()


@BOTH
def test_once_untied_neither_gradient_reaches_the_other(devices):
    state, hyper = history(8, 2)[6], T.hyper_at(CFG, 7)
    assert hyper.tied == 0
    one = cached_walk(devices, True)(state, gradients(7), hyper)
    for name, other in itertools.permutations(("head", "embed")):
        grads = {**gradients(7), other: 3 * matrices(101, 32, seed=5)}
        two = cached_walk(devices, True)(state, grads, hyper)
        np.testing.assert_array_equal(one["params"][name], two["params"][name])
        assert (np.asarray(one["params"][other]) != two["params"][other]).any()


def test_rows_of_tables_that_no_token_used_rest_and_others_never_stop():
    """Neither decay nor rounding moves the rows without gradient; those used once go on moving."""
    states = history(8, 2)
    for name in ("value_tables", "bigram_table", "head"):  # the embedding has no other rows
        for kind in KINDS:
            np.testing.assert_array_equal(
                states[-1][kind][name][NEVER], start()[kind][name][NEVER], err_msg=name
            )
        for step in range(1, 10, 2):
            moved = states[step + 1]["params"][name] != states[step]["params"][name]
            assert moved[ONCE].mean() > 0.99, (name, step)


@EVERY
def test_muon_updates_its_banks_at_every_step(every, devices):
    for before, after in itertools.pairwise(history(devices, every)):
        for name in MUON:
            for kind in KINDS:
                assert (before[kind][name] != after[kind][name]).mean() > 0.99


@pytest.mark.parametrize("other", [0, 1, 2, 3, 5])
def test_each_matrix_of_a_bank_is_orthogonalized_alone(other):
    """Matrix 4 is q of layer 1: the gradients of its k (5) and of layer 0 (0 to 3) are not its."""
    grads, hyper = gradients(0), T.hyper_at(CFG, 0)
    factor = np.where(np.arange(12) == other, np.float32(-3), np.float32(1))[:, None, None]
    changed = {**grads, "attn_bank": grads["attn_bank"] * factor}
    program = cached_walk(8, False)
    one, two = (program(start(), banks(g), hyper)["params"]["attn_bank"] for g in (grads, changed))
    np.testing.assert_array_equal(one[4], two[4])
    assert (one[other] != two[other]).any()


def test_a_zero_gradient_at_the_start_moves_nothing_of_adam():
    """Tokens that were never seen have 0 / (0 + eps); small parameters rest too."""
    zeros = jax.tree.map(np.zeros_like, start()["params"])
    state = {**start(), "params": {**start()["params"], "embed": start()["params"]["head"]}}
    new = cached_walk(1, True)(state, zeros, T.hyper_at(CFG, 1))
    for kind in KINDS:
        for name in ADAM:
            np.testing.assert_array_equal(new[kind][name], state[kind][name], err_msg=name)


def test_another_optimizer_in_the_table_is_another_step(monkeypatch):
    """Nothing but the row says how a parameter learns."""
    table = {"attn_bank": dataclasses.replace(TABLE["attn_bank"], optimizer="adam", lr=0.2)}
    monkeypatch.setattr(T, "param_table", lambda cfg: table)
    state = T.map_state(CFG, lambda shape, row: matrices(*shape) ** 2)
    grads, hyper = {"attn_bank": matrices(12, 32, 32, seed=1)}, T.hyper_at(CFG, 3)
    new = walk(CFG, 2, True)(state, grads, hyper)
    old = [state[kind]["attn_bank"].astype(np.float64) for kind in KINDS]
    want = exact_adam(
        old[0], grads["attn_bank"], *old[1:], 0.2 * hyper.lr, 1.2, 2, (0.0, 0.0), 1e-10
    )
    for kind, x in zip(KINDS, want, strict=True):
        np.testing.assert_allclose(new[kind]["attn_bank"], x, rtol=1e-5, atol=1e-5)
