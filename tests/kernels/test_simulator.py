"""TPU kernels in JAX's TPU simulator (helpers/simulator.py), against their plain forms.

Other tests interpret TPU kernels. The simulator also models VMEM and the copies to and from it, and
finds uses of uninitialized memory, reads out of bounds and races. It is slow.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_config
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from layers import (
    RECORD,
    assert_rounded_layer,
    assert_same_layer,
    distance,
    layer,
    layer_inputs,
    long,
    narrow,
    paired,
    record_parts,
)
from programs import jit, mesh_of, quick_compilation, run_steps
from simulator import tpu_simulator
from test_check import CFG
from test_tables import KINDS, ids_of, weighted

import train_gpt as T

slow = pytest.mark.slow


def run_small_kernel(body):
    """Run a kernel `body` that reads x, writes y and has scratch memory: return y."""
    x = jnp.ones((8, 128))
    block = x, T.as_one_block
    scratch = {"scratch": pltpu.VMEM(x.shape, x.dtype)}
    operands = {"x": block}, {"y": block}, body, scratch
    run = jax.jit(lambda: T.run_kernel("small", {"i": 2}, *operands)["y"])
    return np.asarray(run())


def reads_scratch(r):
    r.y[...] = r.x[...] + r.scratch[...]


def reads_too_far(r):
    r.y[...] = r.x[pl.ds(8 * r.i, 8)]


def reads_too_early(r):
    def copy(semaphore):
        copying = pltpu.make_async_copy(r.x, r.scratch, semaphore)
        copying.start()
        r.y[...] = r.scratch[...]
        copying.wait()

    pl.run_scoped(copy, pltpu.SemaphoreType.DMA)


def test_the_simulator_finds_faults_that_the_interpreter_does_not():
    """Uninitialized memory, a read out of bounds, a race (JAX 0.12 raises an error itself)."""
    assert np.isfinite(run_small_kernel(reads_too_far)).all()
    assert np.isfinite(run_small_kernel(reads_too_early)).all()
    with tpu_simulator():
        assert np.isnan(run_small_kernel(reads_scratch)).all()
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds read"), tpu_simulator():
        run_small_kernel(reads_too_far)
    race = pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match="race|RACE")
    with race, tpu_simulator():
        run_small_kernel(reads_too_early)
    with pytest.raises(AssertionError, match="no kernel ran"), tpu_simulator():
        pass


BLOCK = 128  # tokens, in rows that 256 does not divide
SCALE = BLOCK / T.BLOCK  # of windows, so that they span the same number of blocks as the record's
LAYERS = 0, 1, 2, 3, 8, 10  # all layers of the record with attention; layer 5 equals layer 0
STAGES = {f"stage{n}": RECORD.stages[n].windows for n in (0, 1, 2, 4)}  # stage 3 equals stage 2


def layer_of_record(i: int, windows: tuple[int, int]):
    """Return (heads, parts, inputs) of layer `i` of the record, with two heads and scaled windows.

    The two rows are three blocks longer than a window, so that ring buffers wrap around.
    In row 0 documents start one token before, at, and one token after the edge of a block. Two of
    them have one token, and one is longer than the window. Row 1 begins inside a document.
    """
    windows = tuple(int(SCALE * window) for window in windows)
    heads = replace(T.heads_of(RECORD, i, windows), count=2)
    reach = T.plan_for(heads, BLOCK).reach
    blocks = reach // BLOCK + 3
    t = BLOCK * (blocks + (blocks + 1) % 2)  # an odd number, so that a block has 128 tokens
    starts = np.zeros((2, t), np.int32)
    starts[0, [BLOCK - 1, BLOCK, BLOCK + 1, t - BLOCK // 2]] = 1
    starts[1, [2 * BLOCK, t - BLOCK - 1, t - BLOCK + 1]] = 1
    parts = record_parts(i)
    return heads, parts, layer_inputs(heads, t, parts, np.float32, np.cumsum(starts, axis=1))


@slow
@pytest.mark.parametrize("i", LAYERS)
@pytest.mark.parametrize("windows", STAGES.values(), ids=STAGES)
def test_layers_of_the_record_forward_and_backward(i, windows):
    heads, parts, inputs = layer_of_record(i, windows)
    with tpu_simulator():
        assert_same_layer(T.attend_tpu, heads, parts, inputs)


@slow
@pytest.mark.parametrize("i", LAYERS)
def test_layers_of_the_record_in_validation(i):
    """With the longest windows. Without gradients the kernel saves nothing."""
    heads, _, (arrays, _, *rest) = layer_of_record(i, RECORD.val_windows)
    with tpu_simulator():
        got = np.asarray(jit(layer(T.attend_tpu, heads))(arrays, *rest))
    want = np.asarray(jit(layer(T.PLAIN.attend, heads))(arrays, *rest))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


MORE_LAYERS = [  # (row, heads, parts); a block is gcd(row, 256) tokens
    (384, long(1, 256), "xsa gates"),  # exactly two blocks back
    # six heads, so that heads in different halves of a tile see each other's keys
    (384, paired(6, 201), "added added_gates"),
    (256, narrow(2, 1000, v_width=128), ""),  # beyond the row, which is one block
    *((384, long(1, w), "gates") for w in (0, 127, 129, 257)),
    *((384, narrow(2, w), "xsa") for w in (1, 128, 256)),
    *((384, paired(2, w), "") for w in (0, 254, 255, 257)),
    (384, paired(6, 300, v_width=64), "xsa gates"),
    (512, long(6, 384), "gates"),  # the record's width
    (512, T.Heads(2, 64, 128, 100, offset=True), ""),
    (128, narrow(2, 5), ""),
]


@slow
@pytest.mark.parametrize("t, heads, parts", MORE_LAYERS)
def test_windows_of_any_size_forward_and_backward(t, heads, parts):
    with tpu_simulator():
        assert_same_layer(T.attend_tpu, heads, parts, layer_inputs(heads, t, parts, np.float32))


@slow
@pytest.mark.parametrize("heads", [narrow(2, 99), paired(6, 200)])
def test_layers_in_bfloat16_have_only_rounding_errors(heads):
    with tpu_simulator():
        assert_rounded_layer(T.attend_tpu, heads)


@slow
@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-6), ("bfloat16", 6e-3)])
def test_per_token_weighted_sums(dtype, off):
    """Two rows of two blocks, and weights that fill two tiles."""
    rng = np.random.default_rng(1)
    shape = 2, 512, 384
    x, *sources = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(11))
    weights = jnp.asarray(rng.standard_normal((*shape[:2], 10, 24)), jnp.float32)
    args = rng.standard_normal(shape).astype(np.float32), x, weights, tuple(sources)
    with tpu_simulator():
        got = jax.device_get(jit(partial(weighted, T.blend_tpu))(*args))
    want = jit(partial(weighted, T.blend))(*args)
    for y, z in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert y.dtype == z.dtype and y.shape == z.shape and distance(y, z) <= off


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_tables(kind):
    """Two rows of tokens, and two tables that share the ids and do not fill the last tile."""
    rng = np.random.default_rng(2)
    shape = 2, 512
    table = rng.standard_normal((2 * 600, 128)).astype(np.float32)
    parts = [rng.standard_normal((*shape, 128)).astype(np.float32) for _ in range(2)]
    ids = ids_of(kind, np.prod(shape), 600).reshape(shape)
    with tpu_simulator():  # a new function, since JAX may have compiled add_rows_tpu before
        got = np.asarray(jit(lambda *args: T.add_rows_tpu(*args))(table, ids, parts))
    want = jit(T.scatter_rows)(table, ids, parts)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-4)


@slow
def test_kernels_pass_the_check_before_a_run():
    """Trials run in sequence: check_kernels uses threads, but the simulator is not thread-safe."""
    kernels = T.PLAIN._replace(attend=T.attend_tpu, add_rows=T.add_rows_tpu, blend=T.blend_tpu)
    for trial in T.trials(CFG):
        if trial.field in T.kernel_names(kernels).split(","):
            with tpu_simulator(), quick_compilation():
                assert T.failure(trial, CFG, kernels) == ""


@slow
def test_a_run_has_the_losses_of_the_plain_forms(shards):
    """Two steps of two micro-batches with two rows each, all updates and a validation."""
    cfg = small_config(
        layers=(
            T.Layer("short", narrow=True, values=True, xsa=True, x0=True, ngram=True),
            T.Layer(skip=1, new_gates=True),
            T.Layer("short", paired=True, values=True, x0=True),
            T.Layer("long", values=True, gated=True, reads_back=2, mudd=True),
        ),
        width=256,
        heads=2,
        stages=(T.Stage(1.0, 4 * 384, 384, 0, (64, 192), 1.0, (1.0, 0.5), (1.0, 0.0)),),
        steps=2,
        extension=0,
        micro_tokens=2 * 384,
        table_every=(2, 2),
        momentum_warmup=1,
        momentum_cooldown=1,
        rails_step=1,
        table_change=0,
        tail=2,
        tail_average=1,
        val_every=0,
        val_tokens=4 * 384,
        val_batch=4 * 384,
        val_row=384,
        val_windows=(128, 256),
    )
    mesh = mesh_of(1)
    words = [bytes([i]) for i in range(cfg.bos)]
    in_simulator = T.Kernels(T.attend_tpu, T.fused_cross_entropy, T.add_rows_tpu, T.blend_tpu)

    def losses(kernels):
        with quick_compilation():
            compiled, _ = T.compile_all(cfg, mesh, kernels, lambda line: None)
        by_name = {str(key): program for key, program in compiled.items()}
        return run_steps(cfg, mesh, by_name, shards, words)[0]

    with tpu_simulator():
        got = losses(in_simulator)
    np.testing.assert_allclose(got, losses(T.PLAIN), rtol=0, atol=1e-5)
