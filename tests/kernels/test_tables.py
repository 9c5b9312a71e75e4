"""Gradients of tables, and per-token weighted sums: plain forms and TPU kernels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import distance, lowered
from programs import jit

import train_gpt as T

RNG = np.random.default_rng(0)
KINDS = ["even", "frequent", "first", "last", "ends"]
ADDERS = {"scatter": jit(T.scatter_rows), "kernel": jit(T.add_rows_tpu)}
IN_ORDER = {
    "scatter": jit(partial(T.scatter_rows, ascending=True)),
    "kernel": jit(partial(T.add_rows_tpu, ascending=True)),
}


def ids_of(kind: str, tokens: int, rows: int):
    """Return token ids below `rows`: evenly distributed, with frequent ids, a single id, or two
    clusters of ids."""
    ids = {
        "even": RNG.integers(0, rows, tokens),
        "frequent": np.minimum(3 * RNG.pareto(1, tokens), rows - 1),
        "first": np.zeros(tokens),
        "last": np.full(tokens, rows - 1),
        "ends": np.where(RNG.random(tokens) < 0.5, 0, rows - 1) - RNG.integers(-3, 1, tokens),
    }
    return np.clip(ids[kind], 0, rows - 1).astype(np.int32)


@pytest.mark.parametrize("adder", ADDERS)
@pytest.mark.parametrize(
    ("shape", "rows", "tables"),
    [
        ((512,), 256, 1),
        ((3, 128), 300, 4),  # like value tables, which share ids
        ((2, 2, 128), 8 * 72, 1),  # like the two n-grams of each token
    ],
)
def test_every_row_is_added_to_the_row_of_its_id(adder, shape, rows, tables):
    """One block and many blocks, tiles without tokens, a last tile that is not full."""
    for kind in KINDS:
        ids = ids_of(kind, np.prod(shape), rows).reshape(shape)
        table = RNG.standard_normal((tables * rows, 128))
        parts = [RNG.standard_normal((*shape, 128)).astype(np.float32) for _ in range(tables)]
        got = np.asarray(ADDERS[adder](table.astype(np.float32), ids, parts))
        order = np.argsort(ids.reshape(-1), kind="stable")
        in_order = [part.reshape(-1, 128)[order] for part in parts]
        again = IN_ORDER[adder](table.astype(np.float32), ids.reshape(-1)[order], in_order)
        want = table.copy()
        for n, part in enumerate(parts):
            np.add.at(want, ids + n * rows, part)
        for found in (got, again):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=3e-4)
        untouched = np.setdiff1d(np.arange(rows), ids)
        np.testing.assert_array_equal(got[untouched], table[untouched].astype(np.float32))


def test_many_small_rows_of_one_id_are_summed_in_float32():
    """In bfloat16 a sum of ones would stop at 256, where numbers are 2 apart."""
    rows, ids = [jnp.ones((512, 128), jnp.bfloat16)], np.full(512, 5, np.int32)
    got = np.asarray(ADDERS["kernel"](np.zeros((8, 128), np.float32), ids, rows))
    assert got[5].tolist() == [512] * 128 and not np.delete(got, 5, axis=0).any()


@pytest.mark.parametrize(
    ("shape", "rows", "tables"),
    [((1, 49_152), 50_304, 4), ((1, 2, 49_152), 102_784, 1)],  # values, n-grams
)
def test_the_kernel_for_tables_of_the_record_can_be_lowered_for_a_tpu(shape, rows, tables):
    table = jax.ShapeDtypeStruct((tables * rows, 768), jnp.float32)
    parts = [jax.ShapeDtypeStruct((*shape, 768), jnp.bfloat16)] * tables
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    assert lowered(T.add_rows_tpu, table, ids, parts).count("tpu_custom_call") == 1


def weighted(function, down, x, weights, sources):
    """Return (gradients of x, weights and sources, output) of a per-token weighted sum."""

    def total(x, weights, sources):
        y = function(x, weights, sources)
        return jnp.sum(y.astype(jnp.float32) * down), y

    return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(x, weights, sources)


@pytest.mark.parametrize(
    ("shape", "groups", "count", "dtype", "off"),
    [
        ((2, 40, 256), 64, 3, "float32", 1e-6),  # one block of all tokens
        ((1, 512, 384), 12, 10, "bfloat16", 6e-3),  # many blocks; weights in two tiles
    ],
)
def test_a_per_token_weighted_sum_and_its_gradients(shape, groups, count, dtype, off):
    x, *sources = (jnp.asarray(RNG.standard_normal(shape), dtype) for _ in range(count + 1))
    weights = jnp.asarray(RNG.standard_normal((*shape[:2], count, groups)), jnp.float32)
    args = RNG.standard_normal(shape).astype(np.float32), x, weights, tuple(sources)
    got, want = (jit(partial(weighted, function))(*args) for function in (T.blend_tpu, T.blend))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and distance(x, y) <= off


def test_weighted_sums_of_the_record_can_be_lowered_for_a_tpu():
    x = jax.ShapeDtypeStruct((1, 49_152, 768), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((1, 49_152, 11, 12), jnp.float32)
    down = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    text = lowered(partial(weighted, T.blend_tpu), down, x, weights, (x,) * 11)
    assert text.count("tpu_custom_call") == 2
