"""The kernels for MLPs against their plain twin and autodiff."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import distance
from programs import jit

import train_gpt as T


@pytest.mark.parametrize(
    ("shape", "f", "keep"),
    [
        ((1, 1024, 256), 384, 0.7),  # blocks of 512
        ((2, 384, 128), 256, -1.3),  # of 256, one of them of both rows
        ((1, 384, 128), 512, 0.0),  # of 128
        ((1, 40, 128), 128, 1.0),  # one, of whatever there is
    ],
)
@pytest.mark.parametrize("dtype, off", [(jnp.float32, 1e-6), (jnp.bfloat16, 0.01)])
def test_an_mlp_and_its_gradients_are_the_plain_ones(shape, f, keep, dtype, off):
    rng, d = np.random.default_rng(f), shape[-1]
    x, down = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    weights = [jnp.asarray(rng.standard_normal((f, d)) / d**0.5, dtype) for _ in range(2)]
    inputs = x, *weights, jnp.float32(keep), jnp.float32(0.6)
    fused = partial(T.fused_mlp, interpret=True)
    y = alike(fused, T.add_mlp, inputs, x + down, off)
    np.testing.assert_array_equal(y, jit(fused)(*inputs))


def test_an_mlp_in_parts_is_the_plain_one(monkeypatch):
    """Half of the hidden units at a time, as of two MLPs in one."""
    monkeypatch.setattr(T, "mlp_part", lambda d, f: f // 2)
    rng, shape, f = np.random.default_rng(0), (1, 256, 128), 512
    x, down = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    weights = [rng.standard_normal((f, 128)).astype(np.float32) / 11 for _ in range(2)]
    inputs = x, *weights, np.float32(0.7), np.float32(0.6)
    alike(partial(T.fused_mlp, interpret=True), T.add_mlp, inputs, down, 1e-6)


def test_hidden_units_are_taken_together_where_blocks_are_large():
    assert [T.mlp_part(768, f) for f in (2816, 5632, 5760)] == [2816, 2816, 2880 * 2]


def test_blocks_are_the_largest_of_which_the_way_back_fits_the_vmem():
    """What libtpu takes: 512 tokens of 5376 hidden units, not of 5632, and 256 of 6656."""
    hidden = 2816, 5376, 5632, 6656, 7168, 8192
    assert [T.mlp_block(768, f) for f in hidden] == [512, 512, 256, 256, 128, 0]


def alike(function, plain, inputs, down, off):
    """The output of `function`; it and its gradients are those of `plain` up to rounding.

    `plain` computes in float32: in bfloat16 XLA for CPUs, from jax 0.11 on, gives an MLP's second
    matrix gradients that are up to 0.0125 away from those, while the kernel's are 0.0037.
    """

    def run(function, *inputs):
        y, gradients = jax.vjp(function, *inputs)
        return y, *gradients(down.astype(y.dtype))

    got, like = jit(partial(run, function))(*inputs), jax.eval_shape(partial(run, plain), *inputs)
    want = jit(partial(run, plain))(*(x.astype(np.float32) for x in inputs))
    for y, z, shape in zip(got, want, like, strict=True):
        assert y.dtype == shape.dtype and y.shape == shape.shape and distance(y, z) < off
    return got[0]


NARROW = pytest.param(jnp.bfloat16, 0.01, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("shape", "p", "k", "normed"),
    [
        ((1, 768, 128), 384, 0, True),  # three blocks, nothing added
        ((2, 320, 256), 384, 128, True),  # blocks of 128; added to the last third
        ((1, 40, 128), 256, 256, False),  # one, of whatever there is; to all
        pytest.param((3, 7, 128), 128, 128, True, marks=pytest.mark.slow),
        pytest.param((1, 512, 128), 256, 0, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype, off", [(jnp.float32, 1e-6), NARROW])
def test_a_projection_and_its_gradients_are_the_plain_ones(shape, p, k, normed, dtype, off):
    rng, d = np.random.default_rng(p), shape[-1]
    x = rng.standard_normal(shape).astype(np.float32)
    x[0, :2] = 0.0  # norm divides by a least size
    weights = rng.standard_normal((p, d)) / d**0.5
    added = [rng.standard_normal((*shape[:-1], k))] * (k > 0)
    inputs = [jnp.asarray(y, dtype) for y in (x, weights, *added)]
    down = rng.standard_normal((*shape[:-1], p)).astype(np.float32)

    def run(function, *more):
        return lambda x, w, *added: function(x, w, added[0] if added else None, normed, *more)

    alike(run(T.fused_projection, True), run(T.project), inputs, down, off)


@pytest.mark.parametrize(
    ("shape", "lanes"),
    [
        ((1, 768, 128), 14),
        ((2, 320, 256), 130),
        pytest.param((1, 40, 128), 1, marks=pytest.mark.slow),
        pytest.param((3, 7, 128), 14, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype, off", [(jnp.float32, 1e-6), NARROW])
def test_a_small_mlp_and_its_gradients_are_the_plain_ones(shape, lanes, dtype, off):
    """Hidden units of any sign and size, 30 too, where GELU is a straight line."""
    rng, d = np.random.default_rng(lanes), shape[-1]
    x = rng.standard_normal(shape).astype(np.float32)
    x[0, :2] *= np.float32([[0.0], [30.0]])
    w1, w2, b2 = (rng.standard_normal(s).astype("f4") for s in ((64, d), (lanes, 64), lanes))
    inputs = jnp.asarray(x, dtype), *(jnp.asarray(y) for y in (w1 / d**0.5, w2, b2))
    down = rng.standard_normal((*shape[:-1], lanes)).astype(np.float32)
    fused = partial(T.fused_small_mlp, interpret=True)
    alike(fused, T.small_mlp, inputs, down, 2 * off)


def test_gelu_is_that_of_jax():
    x = np.linspace(-8, 8, 4001, dtype=np.float32)
    want = np.asarray(jax.nn.gelu(x, approximate=False), np.float64)
    np.testing.assert_allclose(T.gelu(x), want, rtol=0, atol=1e-6)


def test_equal_kernels_called_from_different_places_have_one_text():
    """Or libtpu compiles each of them; what it gets is lowered here, not compiled."""
    x, w, added = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 256, 128), (384, 128), (1, 256, 128))
    )

    def one(x, w, added):
        return T.fused_projection(x, w, added, True)

    def two(x, w, added):
        return one(x, w, added)

    def both(x, w, added):
        first, second = (jax.vjp(f, x, w, added) for f in (one, two))
        return first[1](first[0]), second[1](second[0])

    text = jax.jit(both).trace(x, w, added).lower(lowering_platforms=("tpu",)).as_text()
    kernels = re.findall(r'tpu_custom_call.*?backend_config = "(.*?)"', text)
    assert len(kernels) >= 2 and len(set(kernels)) == 2
