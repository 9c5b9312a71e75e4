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

    def run(function):
        def total(*inputs):
            y = function(*inputs)
            return jnp.sum(y.astype(jnp.float32) * (x + down)), y

        backward = jax.value_and_grad(total, argnums=range(5), has_aux=True)
        (_, y), grads = jit(backward)(*inputs)
        return y, *grads

    fused = partial(T.fused_mlp, interpret=True)
    got, want = run(fused), run(T.add_mlp)
    np.testing.assert_array_equal(got[0], jit(fused)(*inputs))
    for y, z in zip(got, want, strict=True):
        assert y.dtype == z.dtype and y.shape == z.shape and distance(y, z) < off


def test_blocks_are_the_largest_of_which_the_way_back_fits_the_vmem():
    """What libtpu takes: 512 tokens of 5376 hidden units, not of 5632, and 256 of 6656."""
    hidden = 2816, 5376, 5632, 6656, 7168, 8192
    assert [T.mlp_block(768, f) for f in hidden] == [512, 512, 256, 256, 128, 0]
