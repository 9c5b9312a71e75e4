"""FP8: rounding, the matmul with its gradient, and its places: MLPs, the head, a training run."""

import functools
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, small_config
from jax.sharding import SingleDeviceSharding
from programs import CFG, cuda_compiler, mesh_of, no_wishes, programs_of, quick, quick_compilation

import train_gpt as T

KINDS = [T.E4M3, T.E5M2]
TOP = {T.E4M3: 448.0, T.E5M2: 57344.0}
OFF = {T.E4M3: 2.0**-4, T.E5M2: 2.0**-3}  # half a step of the last bit, relative to the number
LEAST = {T.E4M3: 2.0**-10, T.E5M2: 2.0**-17}  # half of the smallest number: the error near zero
SMALL = small_config()


def draw(*shape, seed=0, std=1.0):
    return np.random.default_rng(seed).normal(0, std, shape).astype(np.float32)


def wide(scaled) -> np.ndarray:
    """What a Scaled stands for, in float64."""
    return np.asarray(scaled.values).astype(np.float64) * float(scaled.scale)


def exact_round(x, kind, bound=None) -> np.ndarray:
    """The same without jax, in float64."""
    x = np.asarray(x).astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2((np.abs(x).max() if bound is None else bound) / TOP[kind]))
    return (x / scale).astype(np.float32).astype(kind).astype(np.float64) * scale


def distance(got, want) -> float:
    """Relative norm of the difference."""
    want = np.asarray(want).astype(np.float64)
    return np.linalg.norm(np.asarray(got).astype(np.float64) - want) / np.linalg.norm(want)


# ------------------------------------------------------------------------------------------------
# Rounding
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("std", [1e-20, 1e-6, 0.02, 1.0, 300.0, 1e20])
def test_rounding_is_off_by_half_a_step_and_scales_are_powers_of_two(kind, dtype, std):
    x = jnp.asarray(draw(64, 65, std=std), dtype)
    got = jax.jit(lambda x: T.round_fp8(x, kind))(x)
    exact, scale = np.asarray(x).astype(np.float64), float(got.scale)
    assert got.values.dtype == kind and got.scale.dtype == jnp.float32
    assert np.log2(scale) % 1 == 0
    largest = np.abs(exact).max() / scale
    assert TOP[kind] / 2 < largest <= TOP[kind], "the smallest power of two for which it fits"
    error = np.abs(wide(got) - exact)
    assert (error <= np.maximum(OFF[kind] * np.abs(exact), LEAST[kind] * scale)).all()
    assert error.max() > OFF[kind] / 4 * np.abs(exact).max(), "it does round"
    assert ((np.sign(wide(got)) == np.sign(exact)) | (wide(got) == 0)).all()
    np.testing.assert_array_equal(wide(got), exact_round(x, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_no_largest_number_overflows(kind):
    """Also one just above and below a power of two times the largest of the format."""
    edges = TOP[kind] * np.float32(2) ** np.arange(-60, 60)
    edges = [edges, np.nextafter(edges, np.inf), np.nextafter(edges, 0)]
    edges = np.float32([*np.concatenate(edges), *np.exp(np.linspace(-40, 40, 300))])
    round_each = jax.jit(jax.vmap(lambda x: T.round_fp8(x[None], kind)))
    got = round_each(edges)
    back = np.asarray(got.values)[:, 0].astype(np.float64) * np.asarray(got.scale)
    assert (np.abs(back - edges) <= OFF[kind] * edges).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_visible(kind, bad):
    x = draw(4, 8)
    x[1, 2] = bad
    rounded = jax.jit(lambda x: T.round_fp8(x, kind))(x)
    assert np.isnan(rounded.scale)
    other = T.round_fp8(jnp.ones((4, 8)), T.E4M3)
    assert np.isnan(T.multiply_fp8(rounded, other, (1, 1), jnp.float32)).all()


def test_nan_stays_visible_where_the_bound_is_known_beforehand():
    """norm makes NaN of infinity, so there is nothing else to see."""
    x = draw(4, SMALL.width)
    x[1, 2] = np.inf
    rounded = T.round_fp8(T.norm(x), T.E4M3, T.norm_bound(SMALL))
    other = T.round_fp8(jnp.ones((3, SMALL.width)), T.E4M3)
    product = np.asarray(T.multiply_fp8(rounded, other, (1, 1), jnp.float32))
    assert np.isnan(product[1]).all() and np.isfinite(product[[0, 2, 3]]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_are_zeros(kind):
    rounded = T.round_fp8(jnp.zeros((4, 8)), kind)
    other = T.round_fp8(jnp.asarray(draw(5, 8, std=1e20)), T.E4M3)
    assert np.isfinite(rounded.scale) and rounded.scale > 0
    assert not np.any(T.multiply_fp8(rounded, other, (1, 1), jnp.float32))


@pytest.mark.parametrize("width", [32, 768, 784, 1000])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_output_of_norm_is_above_its_bound(width, dtype):
    """The worst is one number alone; 784 is a square, whose root is 448 / 16."""
    x = jnp.asarray(np.eye(width), dtype) * 1000
    rounded = T.round_fp8(T.norm(x), T.E4M3, T.norm_bound(small_config(width=width, heads=2)))
    assert np.diag(wide(rounded)) == pytest.approx(np.sqrt(width), rel=2**-4)


# ------------------------------------------------------------------------------------------------
# The matmul
# ------------------------------------------------------------------------------------------------


def linear(x, w, grad, bound=None):
    """(y, gradient for x, for w) of linear_fp8."""

    def run(x, w, grad):
        y, back = jax.vjp(lambda x, w: T.linear_fp8(x, w, bound), x, w)
        return y, *back(grad)

    return jax.jit(run)(x, w, grad)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bound", [None, 20.0])
def test_matmul_and_gradients_are_those_of_the_rounded_operands(dtype, bound):
    """To the sums' rounding: E4M3 forwards, and E5M2 gradients times them backwards."""
    x, w, grad = (
        jnp.asarray(draw(*shape, seed=i, std=std), dtype)
        for i, (shape, std) in enumerate([((80, 48), 1), ((64, 48), 0.02), ((80, 64), 1e-6)])
    )
    x8, w8, g8 = exact_round(x, T.E4M3, bound), exact_round(w, T.E4M3), exact_round(grad, T.E5M2)
    for got, want in zip(linear(x, w, grad, bound), (x8 @ w8.T, g8 @ w8, g8.T @ x8), strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        assert distance(got, want) < (1e-6 if dtype == jnp.float32 else 2**-8)


def test_matmul_and_gradients_are_as_close_to_float32_as_the_formats_allow():
    """Each term is off by no more than its two factors together are."""
    x, w, grad = draw(80, 48), draw(64, 48, seed=1), draw(80, 64, seed=2)

    def worst(x, kind):
        """By how much each number of x may be off."""
        scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / TOP[kind]))
        return np.maximum(OFF[kind] * np.abs(x), LEAST[kind] * scale)

    factors = (x, w.T, T.E4M3), (grad, w, T.E5M2), (grad.T, x, T.E5M2)
    for got, (a, b, kind) in zip(linear(x, w, grad), factors, strict=True):
        off_a, off_b = worst(a, kind), worst(b, T.E4M3)
        bound = off_a @ np.abs(b) + np.abs(a) @ off_b + off_a @ off_b
        error = np.abs(got - a.astype(np.float64) @ b)
        assert (error <= bound + 1e-5).all()
        assert distance(got, a @ b) < 0.08  # seen: 0.037, 0.060, 0.063


def test_what_the_gradient_needs_is_kept_in_8_bits():
    shapes = (
        jax.ShapeDtypeStruct((80, 48), jnp.bfloat16),
        jax.ShapeDtypeStruct((64, 48), "bfloat16"),
    )
    _, saved = jax.eval_shape(lambda x, w: T.linear_fp8_forward(x, w, None), *shapes)
    kept = [(x.dtype.itemsize, x.size) for x in jax.tree.leaves(saved)]
    assert kept == [(1, 80 * 48), (4, 1), (1, 64 * 48), (4, 1)]


def test_what_is_not_differentiated_is_not_rounded():
    x, w = draw(80, 48), draw(64, 48, seed=1)
    got = jax.jit(lambda x, w: T.linear_fp8(x, w, None))(x, w)
    np.testing.assert_array_equal(got, jax.jit(lambda x, w: x @ w.T)(x, w))


# ------------------------------------------------------------------------------------------------
# MLPs and the head
# ------------------------------------------------------------------------------------------------


def mlp_and_gradients(cfg, bank):
    """Output of layer 1 and gradients for bank, weight and input."""
    x, grad = T.norm(draw(2, 40, cfg.width)), draw(2, 40, cfg.width, seed=2, std=1e-4)

    def run(bank, weights, x):
        return T.mlp({"mlp_bank": bank, "post_lambdas": weights}, cfg, 1, x)

    weights = np.full((cfg.layers, 2), 1.3, np.float32)
    y, back = quick(lambda *args: jax.vjp(run, *args), bank, weights, x)
    return y, *back(grad)


def test_mlp_in_fp8():
    bank = draw(8, SMALL.mlp_width, SMALL.width, std=0.1)
    want = mlp_and_gradients(SMALL, bank)
    for fp8 in T.FP8:
        got = mlp_and_gradients(replace(SMALL, fp8=fp8), bank)
        low, high = (0.02, 0.12) if fp8 in ("mlp", "both") else (0, 0)  # seen: 0.06 to 0.09
        for name, a, b in zip(("y", "bank", "weight", "x"), got, want, strict=True):
            # The weight's gradient is y times random numbers: that size, whatever is left of it.
            size = np.linalg.norm(want[0]) * 1e-4 if name == "weight" else np.linalg.norm(b)
            assert low * (name != "weight") <= np.linalg.norm(a - b) / size <= high, (fp8, name)


def test_mlp_whose_down_projection_is_zero():
    """As at the start: only it has a gradient."""
    bank = draw(8, SMALL.mlp_width, SMALL.width, std=0.1)
    bank[SMALL.layers :] = 0
    y, d_bank, d_weights, dx = mlp_and_gradients(replace(SMALL, fp8="mlp"), bank)
    assert not np.any(y) and not np.any(dx) and not np.any(d_weights)
    want = mlp_and_gradients(SMALL, bank)[1]
    assert np.isfinite(d_bank).all() and distance(d_bank, want) < 0.12


def head_inputs(c=60, k=3):
    """Normed features, a head with logits up to 10, targets of which some are equal, weights."""
    rng = np.random.default_rng(5)
    x, head = T.norm(draw(c, SMALL.width)), draw(SMALL.vocab, SMALL.width, seed=1, std=0.7)
    targets = rng.integers(0, SMALL.vocab, (c, k)).astype(np.int32)
    targets[3, 1] = targets[3, 0]
    weights = rng.uniform(0, 1, (c, k)).astype(np.float32)
    weights[5] = 0
    return x, head, targets, weights


def losses_and_gradients(cfg, x, head, targets, weights):
    def run(x, head):
        weighted, plain = T.cross_entropy(x, head, targets, weights, cfg)
        return weighted, plain

    run = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)
    (weighted, plain), grads = quick(run, x, head)
    return weighted, plain, *grads


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [60, 20])
def test_head_in_fp8(dtype, chunk):
    cfg = small_config(loss_chunk=chunk, compute_dtype=dtype)
    x, head, *rest = head_inputs()
    x, head = x.astype(dtype), jnp.asarray(head, dtype)
    want = losses_and_gradients(cfg, x, head, *rest)
    for fp8, rounds in (("none", False), ("mlp", False), ("head", True), ("both", True)):
        got = losses_and_gradients(replace(cfg, fp8=fp8), x, head, *rest)
        for a, b, limit in zip(got, want, (0.01, 0.01, 0.12, 0.12), strict=True):
            assert a.dtype == b.dtype
            # seen: 0.0035 of the sums, 0.062 and 0.058 of the gradients
            assert distance(a, b) <= rounds * limit and (distance(a, b) > 0) == rounds, fp8
        assert not np.any(got[2][5]), "a token without weight"


def test_losses_of_the_head_are_those_of_the_rounded_operands():
    """The logits of targets too: they would otherwise not fit the sum that they are a part of."""
    x, head, targets, weights = head_inputs()
    x8 = exact_round(x, T.E4M3, T.norm_bound(SMALL)).astype(np.float32)
    head8 = exact_round(head, T.E4M3).astype(np.float32)
    got = losses_and_gradients(replace(SMALL, fp8="head"), x, head, targets, weights)
    want = losses_and_gradients(SMALL, x8, head8, targets, weights)
    np.testing.assert_allclose(got[:2], want[:2], rtol=1e-6)
    for a, b in zip(got[2:], want[2:], strict=True):
        assert distance(a, b) < 0.08  # E5M2 alone; seen: 0.05


def test_the_bound_of_a_logits_gradient_holds():
    """Where a probability is 1 the gradient is as large as it gets: nothing overflows there."""
    for place in (-3.0, 0.0, 3.0):
        x = np.float32([[np.sqrt(SMALL.width), *[0] * (SMALL.width - 1)]] * 8)
        head = np.zeros((SMALL.vocab, SMALL.width), np.float32)
        head[:, 0], head[0, 0] = -10, place
        weights = np.full((8, 3), 0.99 * 2.0**-10, np.float32)
        targets = np.int32([[0, 0, 0]] * 4 + [[1, 1, 1]] * 4)
        *_, dx, d_head = losses_and_gradients(replace(SMALL, fp8="head"), x, head, targets, weights)
        assert np.isfinite(dx).all() and np.isfinite(d_head).all() and np.any(dx)


@pytest.mark.parametrize("bad", ["x", "head"])
def test_a_loss_that_is_not_finite_is_seen(bad):
    x, head, *rest = head_inputs()
    x, head = np.array(x), np.array(head)
    (x if bad == "x" else head)[2, 3] = np.nan if bad == "x" else np.inf
    weighted, plain, *_ = losses_and_gradients(replace(SMALL, fp8="head"), x, head, *rest)
    assert np.isnan(weighted) and np.isnan(plain)


def test_evaluation_of_the_head_is_not_rounded():
    inputs = head_inputs()

    def losses(cfg):
        return jax.jit(lambda *args: T.cross_entropy(*args, cfg))(*inputs)

    assert losses(replace(SMALL, fp8="both")) == losses(SMALL)


# ------------------------------------------------------------------------------------------------
# A run
# ------------------------------------------------------------------------------------------------

BOTH = replace(CFG, fp8="both")


@functools.cache
def programs(fp8: bool) -> dict:
    """Those of CFG; only programs of gradients and of validation know of FP8."""
    found = dict(programs_of(CFG, 1))
    with quick_compilation():
        for variant in found if fp8 else ():
            if isinstance(variant, T.Variant) and variant.kind != "update":
                found[variant] = T.lower_variant(BOTH, variant, mesh_of(1)).compile()
    return found


@functools.cache
def trained(fp8: bool, folder):
    """(losses of all steps, whether all gradients were finite, copies at the end)."""
    mesh, losses, finite, compiled = mesh_of(1), [], True, programs(fp8)
    state = compiled["init"](T.put(np.uint32(0), mesh, jax.P()))
    copies, waiting = compiled["copies"](state["params"]), {}
    stream = T.TokenStream(folder, "train", BOS)
    for step, batch in enumerate(T.train_batches(CFG, mesh, stream, 0, 0)):
        grads, _ = compiled[T.step_variants(CFG, step)[0]](copies, *batch[:2], no_wishes(mesh))
        finite &= all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
        state, copies, waiting, report = T.run_step(
            *(CFG, compiled, T.step_variants(CFG, step), state, copies, waiting, batch),
            no_wishes(mesh),
        )
        losses.append(float(report[0]))
    return losses, finite, copies


@pytest.mark.slow
def test_a_run_in_fp8_learns_as_one_without(shards):
    (got, finite, _), (want, _, _) = trained(True, shards), trained(False, shards)
    assert finite and got[-1] < got[0] - 0.3
    np.testing.assert_allclose(got, want, atol=0.01)  # seen: 0.0013 at most
    assert np.abs(np.subtract(got, want)).max() > 1e-5, "it does round"


@pytest.mark.slow
def test_validation_does_not_depend_on_fp8(shards):
    """With equal parameters, and such as give the MLPs something to round."""
    mesh, copies = mesh_of(1), trained(True, shards)[2]
    assert np.any(np.asarray(copies["mlp_bank"])[CFG.layers :])
    stream = T.TokenStream(shards, "val", BOS)
    losses = [T.evaluate(CFG, mesh, programs(x), copies, 0, stream) for x in (True, False)]
    assert losses[0] == losses[1] and 1 < losses[0] < 5


# ------------------------------------------------------------------------------------------------
# Where it runs
# ------------------------------------------------------------------------------------------------


def test_other_names_are_refused():
    assert small_config().fp8 == "none"
    with pytest.raises(T.UserError, match="fp8='yes' is not valid: none, head, mlp, both"):
        small_config(fp8="yes")


def gpu(capability):
    kind = f"GPU {capability}"
    return SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


TPU = SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")


@pytest.mark.parametrize("device", [TPU, gpu("8.0"), gpu("8.6"), gpu("gfx942")])
@pytest.mark.parametrize("fp8", ["head", "mlp", "both"])
def test_fp8_says_what_it_needs(device, fp8):
    with pytest.raises(T.UserError, match=f"fp8={fp8} needs an NVIDIA GPU .*: use fp8=none"):
        T.check_fp8(small_config(fp8=fp8), device)
    T.check_fp8(small_config(), device)


@pytest.mark.parametrize("device", [CPU, gpu("8.9"), gpu("9.0"), gpu("10.0")])
def test_fp8_runs_where_there_is_some_or_it_is_emulated(device):
    T.check_fp8(small_config(fp8="both"), device)


def test_choices_of_a_device_without_fp8_are_refused():
    with pytest.raises(T.UserError, match="fp8=both needs an NVIDIA GPU"):
        T.choices(BOTH, SimpleNamespace(devices=np.array([TPU])))


# ------------------------------------------------------------------------------------------------
# The real compiler for NVIDIA GPUs: no GPU is needed, but jax's plugin
# ------------------------------------------------------------------------------------------------

RECORD = replace(T.PRESETS["speedrun"], loss_chunk=2048)


def on_h100(function, *shapes, **options) -> str:
    """The optimized HLO of a function of arrays (shape, dtype)."""
    one = SingleDeviceSharding(T.absent_devices("h100x8")[0])
    args = [jax.ShapeDtypeStruct(*x, sharding=one) for x in shapes]
    return jax.jit(function).lower(*args).compile(compiler_options=options).as_text()


def mlp_at_full_width(cfg):
    def run(bank, weights, x, grad):
        def layer(bank, weights, x):
            return T.mlp({"mlp_bank": bank, "post_lambdas": weights}, cfg, 1, x)

        y, back = jax.vjp(layer, bank, weights, x)
        return y, back(grad)

    shapes = [((24, cfg.mlp_width, cfg.width), "bfloat16"), ((cfg.layers, 2), "float32")]
    return run, *shapes, *[((1, 4096, cfg.width), "bfloat16")] * 2


def head_at_full_width(cfg):
    def run(*args):
        return jax.value_and_grad(lambda *args: T.cross_entropy(*args, cfg)[0], (0, 1))(*args)

    shapes = [((4096, cfg.width), "bfloat16"), ((cfg.vocab, cfg.width), "bfloat16")]
    return run, *shapes, ((4096, 2), "int32"), ((4096, 2), "float32")


def matmuls(text: str) -> list[tuple[str, ...]]:
    """The element types of the operands of every matmul, inside fusions and as cuBLAS calls."""
    found = []
    for computation in T.hlo_computations(text)[0].values():
        for one in computation.values():
            if one.op == "dot" or 'custom_call_target="__cublas' in one.rest:
                shapes = [computation[name].shape for name in one.operands()[:2]]
                found.append(tuple(shape.split("[")[0] for shape in shapes))
    return sorted(found)


FORWARD, BACKWARD = ("f8e4m3fn", "f8e4m3fn"), ("f8e5m2", "f8e4m3fn")


@cuda_compiler
@pytest.mark.parametrize("part, layers", [(mlp_at_full_width, 2), (head_at_full_width, 1)])
def test_the_gpu_compiler_calls_cublas_for_every_matmul(part, layers):
    """One forwards and two backwards, all operands in 8 bits, none widened by a kernel of XLA's."""
    want, cfg = layers * [FORWARD, BACKWARD, BACKWARD], replace(RECORD, fp8="both")
    text = on_h100(*part(cfg), **T.compiler_options(cfg, T.absent_devices("h100x8")[0]))
    assert matmuls(text) == sorted(want)
    calls = re.findall(r'custom_call_target="(__cublas[^"]*)"', text)
    assert calls == ["__cublas$lt$matmul$f8"] * len(want)


@cuda_compiler
def test_the_gpu_compiler_makes_bfloat16_matmuls_without_fp8():
    """What the test above would see if nothing were rounded."""
    assert matmuls(on_h100(*head_at_full_width(RECORD))) == [("bf16", "bf16")] * 3
