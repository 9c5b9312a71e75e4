"""The kernels for MLPs against their plain twin and autodiff."""

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


def test_an_mlp_and_its_gradients_can_be_lowered_for_a_tpu():
    """To the language of Mosaic, which has fewer functions than an interpreted kernel."""
    shapes = (1, 256, 128), (384, 128), (384, 128)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    scales = [jax.ShapeDtypeStruct((), jnp.float32)] * 2

    def both(*inputs):
        y, gradients = jax.vjp(T.fused_mlp, *inputs)
        return gradients(y)

    lowered = jax.jit(both).trace(*arrays, *scales).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 2
