"""The kernels for MLPs against their plain twin and autodiff."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import distance, lowered
from programs import jit

import train_gpt as T


@pytest.mark.parametrize(
    ("shape", "f", "keep", "dtype", "off"),
    [
        ((1, 1024, 128), 384, 0.7, "float32", 1e-6),  # blocks of 512
        ((2, 384, 128), 256, -1.3, "bfloat16", 0.01),  # of 256, one of them of both rows
        ((1, 384, 128), 512, 0.0, "float32", 1e-6),  # of 128
        ((1, 40, 128), 128, 1.0, "float32", 1e-6),  # one, of whatever there is
    ],
)
def test_an_mlp_and_its_gradients_are_the_plain_ones(shape, f, keep, dtype, off):
    """Up to rounding. The plain form computes in float32: in bfloat16 XLA for CPUs, from jax 0.11
    on, gives an MLP's second matrix gradients that are up to 0.0125 away from those, while the
    kernel's are 0.0037."""
    rng, d = np.random.default_rng(f), shape[-1]
    x, down = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    weights = [jnp.asarray(rng.standard_normal((f, d)) / d**0.5, dtype) for _ in range(2)]
    inputs = x, *weights, jnp.float32(keep), jnp.float32(0.6)

    def run(function, *inputs):
        y, gradients = jax.vjp(function, *inputs)
        return y, *gradients((x + down).astype(y.dtype))

    got = jit(partial(run, T.add_mlp_tpu))(*inputs)
    like = jax.eval_shape(partial(run, T.add_mlp), *inputs)
    want = jit(partial(run, T.add_mlp))(*(x.astype(np.float32) for x in inputs))
    for y, z, shape in zip(got, want, like, strict=True):
        assert y.dtype == shape.dtype and y.shape == shape.shape and distance(y, z) < off
    np.testing.assert_array_equal(got[0], jit(T.add_mlp_tpu)(*inputs))  # without gradients


@pytest.mark.parametrize(("rows", "f", "dtype"), [(512, 384, "float32"), (384, 256, "bfloat16")])
def test_an_mlp_of_eight_bits_is_the_plain_one(rows, f, dtype):
    """Forward what is rounded alike; on the way back as if nothing had been."""
    rng = np.random.default_rng(f)
    x = jnp.asarray(rng.standard_normal((1, rows, 128)), dtype)
    weights = [jnp.asarray(rng.standard_normal((f, 128)) / 12, dtype) for _ in range(2)]
    inputs = x, *weights, jnp.float32(0.7), jnp.float32(-0.6)

    def run(function, *inputs):
        y, gradients = jax.vjp(function, *inputs)
        return y, *gradients(y)

    got = jit(partial(run, T.add_mlp_8_tpu))(*inputs)
    for y, z in zip(got, jit(partial(run, T.add_mlp_8))(*inputs), strict=True):
        assert y.dtype == z.dtype and distance(y, z) < (1e-3 if dtype == "float32" else 0.02)
    assert distance(got[0], jit(T.add_mlp)(*inputs)) < 0.02
    np.testing.assert_array_equal(got[0], jit(T.add_mlp_8_tpu)(*inputs))  # without gradients


def test_blocks_are_the_largest_of_which_the_way_back_fits_the_vmem():
    """What libtpu takes: 512 tokens of 5376 hidden units, not of 5632, and 256 of 6656."""
    hidden = 2816, 5376, 5632, 6656, 7168, 8192
    assert [T.mlp_block(768, f) for f in hidden] == [512, 512, 256, 256, 128, 0]


def test_an_mlp_and_its_gradients_can_be_lowered_for_a_tpu():
    shapes = (1, 256, 128), (384, 128), (384, 128)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    scales = [jax.ShapeDtypeStruct((), jnp.float32)] * 2

    def both(*inputs):
        y, gradients = jax.vjp(T.add_mlp_tpu, *inputs)
        return gradients(y)

    for function, count in ((both, 2), (T.add_mlp_tpu, 1), (T.add_mlp_8_tpu, 1)):
        assert lowered(function, *arrays, *scales).count("tpu_custom_call") == count
