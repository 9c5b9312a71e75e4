"""part3.py against Part I's plain forms, on a CPU.   python -m pytest draft/test_part3.py

The module under test is train_gpt.py up to Part III, then part3.py. -m slow: more of them.
"""

import functools
import importlib.util
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

HERE = Path(__file__).parent


def module():
    """train_gpt.py with part3.py in place of its Part III."""
    text = (HERE.parent / "train_gpt.py").read_text()
    text = text[: text.index("# " + "=" * 96 + "\n# PART III")] + (HERE / "part3.py").read_text()
    path = Path(tempfile.mkdtemp()) / "with_part3.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("with_part3", path)
    found = importlib.util.module_from_spec(spec)
    sys.modules["with_part3"] = found
    spec.loader.exec_module(found)
    return found


T = module()
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=QUICK | {"xla_allow_excess_precision": False})


def distance(got, want) -> float:
    """Relative norm of the difference."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def segment_rows(t: int) -> np.ndarray:
    """Segments int32 [3, t], any rising ids: one from the start, a few (one of one token), many."""
    starts = np.zeros((3, t), np.int32)
    starts[:2, 0] = 1
    cuts = [t // 3, min(t // 3 + 1, t - 1), 3 * t // 4]  # one document has one token
    starts[1, cuts] = 7
    starts[2, 2::5] = 1  # the row begins inside of a document
    return np.cumsum(starts, axis=1, dtype=np.int32)


# ------------------------------------------------------------------------------------------------
# Attention
# ------------------------------------------------------------------------------------------------


def layer_inputs(heads, t: int, parts: str, dtype, full: int = 128):
    """(dict of arrays that have gradients, output gradient, segments, freqs)."""
    rng = np.random.default_rng(t)
    n = heads.count
    qk, v = n * heads.qk_width, n * heads.v_width

    def draw(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    arrays = {"qkv": draw(3, t, 2 * qk + v)}
    if "added" in parts:
        arrays["added"] = draw(3, t, n * full)
    if "xsa" in parts:
        arrays["xsa"] = draw(3, t, n, dtype=np.float32)
    if "gates" in parts:  # of any sign, and none
        arrays["gates"] = draw(3, t, n, dtype=np.float32).at[:, 40:65].set(0.0)
    freqs = rng.uniform(0.1, 1.5, 32).astype(np.float32)
    return arrays, np.asarray(draw(3, t, v), np.float32), segment_rows(t), freqs


def run_layer(attend, heads, arrays, out_grad, segments, freqs):
    """{"y": output, "q", "k", "v", "added", ...: gradients of those there are}."""

    def loss(arrays):
        y = attend(
            heads,
            arrays["qkv"],
            **{k: arrays.get(k.split("_")[0]) for k in ("added_btd", "xsa_btn", "gates_btn")},
            segments_bt=segments,
            freqs=freqs,
            scale=jnp.float32(0.1),
        )
        return jnp.sum(y.astype(jnp.float32) * out_grad), y

    grads, y = jit(jax.grad(loss, has_aux=True))(arrays)
    qk = heads.count * heads.qk_width
    d_qkv = jnp.split(grads.pop("qkv"), (qk, 2 * qk), axis=-1)
    return {"y": y, **dict(zip("qkv", d_qkv, strict=True)), **grads}


window_heads = functools.partial(T.attend_window, interpret=True)


def short(count, window, **more):
    return T.Heads(count, 64, 128, window, **more)


def narrow(count, window):
    return T.Heads(count, 64, 64, window)


def paired(count, window, v=128):
    return T.Heads(count, 64, v, window, paired=True)


def long(count, window):
    return T.Heads(count, 128, 128, window, offset=True)


LAYERS = [  # (row, heads, parts); a block is gcd(row, 256) tokens
    (384, narrow(2, 150), "added xsa"),  # three blocks; of the first only its last half
    (384, long(2, 256), "added xsa gates"),  # exactly two blocks back
    # six heads, or each head would meet heads of its own half of a tile alone
    (384, paired(6, 201), "added"),
    (256, short(4, 1000), ""),  # beyond the row, which is one block
]
MORE_LAYERS = [
    *((384, long(1, w), "gates") for w in (0, 1, 127, 128, 129, 257)),
    *((384, narrow(2, w), "xsa") for w in (0, 1, 127, 128, 129, 257)),
    *((384, paired(2, w), "added") for w in (0, 1, 254, 255, 256, 257)),
    (384, paired(4, 300), ""),
    (384, paired(6, 300, v=64), "added xsa gates"),
    (768, paired(6, 384), "added"),  # the record's width
    (512, long(6, 384), "added gates"),
    (512, narrow(6, 128), "added xsa"),
    (512, T.Heads(2, 128, 64, 100, offset=True), "added"),
    (512, T.Heads(2, 64, 128, 100, offset=True), ""),
    (128, T.Heads(2, 64, 64, 5), ""),
]
slow = pytest.mark.slow


def errors(got, want) -> dict:
    """The largest differences, relative to the largest number of their kind or 1."""
    found = {}
    for name, x in got.items():
        y = np.asarray(want[name])
        found[name] = float(np.abs(x - y).max() / max(np.abs(y).max(), 1))
    print({name: f"{x:.1e}" for name, x in found.items()})
    return found


@pytest.mark.parametrize(
    "t, heads, parts", [*LAYERS, *(pytest.param(*layer, marks=slow) for layer in MORE_LAYERS)]
)
def test_window_computes_a_layer_forward_and_backward(t, heads, parts):
    arrays = layer_inputs(heads, t, parts, np.float32)
    got = run_layer(window_heads, heads, *arrays)
    want = run_layer(T.PLAIN.attend, heads, *arrays)
    assert got.keys() == want.keys() >= {"y", "q", "k", "v", *parts.split()}
    worst = errors(got, want)
    assert max(worst.values()) < 2e-5, worst  # sums of up to 768 terms in float32


RECORD_LAYERS = [narrow(2, 100), long(1, 100), paired(6, 200), short(2, 100)]


@pytest.mark.parametrize("heads", RECORD_LAYERS)
def test_window_in_16_bits_is_as_exact_as_they_are(heads):
    """The plain form on the same rounded inputs, in float32; 2^-9 is the error of one rounding."""
    arrays, *rest = layer_inputs(heads, 512, "added xsa gates", jnp.bfloat16)
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    want, worst = run_layer(T.PLAIN.attend, heads, wide, *rest), {}
    for name, x in run_layer(window_heads, heads, arrays, *rest).items():
        assert x.dtype == (jnp.float32 if name in ("xsa", "gates") else jnp.bfloat16)
        worst[name] = distance(x.astype(jnp.float32), want[name])
    print(worst)
    assert max(worst.values()) < 0.008, worst


def test_plan_takes_every_visible_pair_of_blocks_and_no_other():
    """By brute force over tokens: which blocks, which halves of them."""
    for window in (1, 127, 128, 129, 255, 256, 257, 384, 640, 700):
        for is_paired in (False, True):
            plan = T.Plan(T.Heads(2, 64, 128, window, is_paired), 256)
            reach = {s: (window - s) // 2 if is_paired else window for s in (-1, 0, 1)}
            furthest = max(reach.values())
            assert plan.slots == max(j for j in range(9) if (j - 1) * 256 < furthest) + 1
            for j in range(1, plan.slots):
                back = j * 256 + np.arange(256) - np.arange(256)[:, None]  # [keys, queries]
                seen = back <= furthest
                keys, queries = plan.part(j)
                assert not np.delete(seen, np.r_[keys], 0).any()
                assert not np.delete(seen, np.r_[queries], 1).any()


@pytest.mark.parametrize("h", [64, 128])
def test_means_and_swaps_are_those_of_each_head(h):
    x = np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32)
    heads = x.reshape(16, -1, h)
    swapped = np.concatenate([heads[..., h // 2 :], heads[..., : h // 2]], axis=-1)
    want = np.repeat(heads.mean(-1), h, axis=1)
    np.testing.assert_allclose(jit(lambda x: T.means(x, h, x.dtype))(x), want, atol=1e-6)
    ones = jit(lambda: T.means(jnp.ones((16, 128)), h, jnp.bfloat16))()
    np.testing.assert_array_equal(ones, 1.0)

    def swap(x):
        from jax.experimental import pallas as pl

        def body(x, y):
            y[...] = T.swap_halves(x[...], h)

        return pl.pallas_call(body, out_shape=x, interpret=True)(x)

    np.testing.assert_array_equal(jit(swap)(x), swapped.reshape(16, 128))


# ------------------------------------------------------------------------------------------------
# Attention for GPUs, under attend_heads
# ------------------------------------------------------------------------------------------------

triton_heads = functools.partial(T.attend_heads, functools.partial(T.attend_triton, interpret=True))
TRITON = [
    (256, T.Heads(2, 32, 16, 150), "added xsa"),
    (256, T.Heads(2, 16, 32, 201, paired=True), "added"),
    (384, T.Heads(1, 32, 32, 129, offset=True), "gates"),
    pytest.param(128, T.Heads(2, 64, 128, 100, paired=True), "", marks=slow),
    pytest.param(384, T.Heads(2, 64, 64, 10_000), "xsa", marks=slow),
    pytest.param(384, T.Heads(1, 64, 128, 0), "", marks=slow),
]


@pytest.mark.parametrize("t, heads, parts", TRITON)
def test_triton_computes_a_layer_forward_and_backward(t, heads, parts):
    arrays = layer_inputs(heads, t, parts, np.float32, max(heads.qk_width, heads.v_width))
    arrays = (*arrays[:3], arrays[3][: heads.qk_width // 4])
    got = run_layer(triton_heads, heads, *arrays)
    want = run_layer(T.PLAIN.attend, heads, *arrays)
    worst = errors(got, want)
    assert max(worst.values()) < 2e-5, worst


# ------------------------------------------------------------------------------------------------
# Loss, ReLU^2
# ------------------------------------------------------------------------------------------------


def small(**changes):
    return replace(T.Config(), **{"width": 64, "heads": 1, "compute_dtype": "float32"} | changes)


def loss_inputs(dtype, p: int, tokens: int = 96, k: int = 4):
    """Normed features, a head of p rows, targets of which some are equal, weights."""
    rng = np.random.default_rng(5)
    x = T.norm(jnp.asarray(rng.standard_normal((tokens, 64)), dtype))
    head = jnp.asarray(0.7 * rng.standard_normal((p, 64)), dtype)
    targets = rng.integers(0, p, (tokens, k)).astype(np.int32)
    targets[3] = targets[3, 0]
    targets[4, -1] = targets[4, 0]
    weights = rng.uniform(0, 1, (tokens, k)).astype(np.float32)
    weights[5] = 0
    return x, head, targets, weights


def sums_and_gradients(function, inputs, chunk: int):
    x, head, targets, weights = inputs

    def run(x, head):
        return function(x, head, targets, weights, small(loss_chunk=chunk))

    (weighted, plain), grads = jit(jax.value_and_grad(run, (0, 1), has_aux=True))(x, head)
    return weighted, plain, *grads


@pytest.mark.parametrize("form", ["default", "cuda"])
@pytest.mark.parametrize("p, k, chunk", [(104, 4, 96), (37, 1, 40), (513, 3, 32)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_both_forms_of_the_loss_are_the_plain_one(monkeypatch, form, p, k, chunk, dtype):
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, **forms: forms[form](*args))
    inputs = loss_inputs(dtype, p, k=k)
    want = sums_and_gradients(T.cross_entropy, inputs, chunk)
    got = sums_and_gradients(T.fused_cross_entropy, inputs, chunk)
    offs = [1e-6] * 4 if dtype == jnp.float32 else [3e-4, 3e-4, 0.006, 0.006]
    print([distance(x, y) for x, y in zip(got, want, strict=True)])
    for x, y, off in zip(got, want, offs, strict=True):
        assert x.dtype == y.dtype and distance(x, y) < off
    assert not np.any(got[2][5]), "a token without weight"


def test_loss_over_candidates_reaches_only_their_rows_of_the_head():
    """Through candidate_head, as loss_sums does: the head's gradient is that of the plain form."""
    x, head, targets, weights = loss_inputs(jnp.float32, 200)
    candidates = np.unique(np.random.default_rng(0).integers(0, 200, 80)).astype(np.int32)

    def gradient(function):
        def loss(head):
            part = T.candidate_head(head, candidates)
            return function(x, part, targets % len(candidates), weights, small())[0]

        return np.asarray(jit(jax.grad(loss))(head))

    got, want = gradient(T.fused_cross_entropy), gradient(T.cross_entropy)
    assert distance(got, want) < 1e-6 and not np.delete(got, candidates, axis=0).any()


def test_without_gradients_the_loss_is_the_plain_one():
    inputs = loss_inputs(jnp.bfloat16, 104)
    got, want = (
        jit(lambda *x, f=f: f(*x, small()))(*inputs)
        for f in (T.fused_cross_entropy, T.cross_entropy)
    )
    assert got == want


@pytest.mark.parametrize("dtype, off", [(jnp.float32, 1e-6), (jnp.bfloat16, 2.5 * 2**-8)])
def test_lean_squared_relu_is_the_plain_one_with_its_gradient(dtype, off):
    rng = np.random.default_rng(0)
    z, grad = (jnp.asarray(rng.standard_normal((64, 65)), dtype) for _ in range(2))
    pairs = [jax.vjp(function, z) for function in (T.lean_squared_relu, T.squared_relu)]
    (y, dz), (want_y, want_dz) = [(y, *back(grad)) for y, back in pairs]
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_allclose(np.float64(dz), np.float64(want_dz), rtol=off, atol=1e-14)


# ------------------------------------------------------------------------------------------------
# Gradients of tables
# ------------------------------------------------------------------------------------------------

sum_rows = jit(functools.partial(T.sum_rows, interpret=True))


@pytest.mark.parametrize(
    "shape, rows, tables",
    [((1, 256), 300, 1), ((2, 128), 1000, 4), ((1, 2, 256), 8 * 72, 1), ((2, 2, 128), 5000, 1)],
)
@pytest.mark.parametrize("kind", ["even", "first", "last", "frequent"])
def test_sums_of_rows_are_those_of_scatter_rows(shape, rows, tables, kind):
    """Embedding, value tables side by side, and n-grams: ids [b, 2, t] into [devices * c, d]."""
    rng = np.random.default_rng(0)
    count = int(np.prod(shape))
    ids = {
        "even": rng.integers(0, rows, count),
        "first": np.zeros(count),
        "last": np.full(count, rows - 1),
        "frequent": np.minimum(3 * rng.pareto(1, count), rows - 1),
    }[kind]
    ids = ids.astype(np.int32).reshape(shape)
    table = rng.standard_normal((tables * rows, 128)).astype(np.float32)
    parts = [rng.standard_normal((*shape, 128)).astype(np.float32) for _ in range(tables)]
    got, want = sum_rows(table, ids, parts), jit(T.scatter_rows)(table, ids, parts)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-4)


# ------------------------------------------------------------------------------------------------
# The choice
# ------------------------------------------------------------------------------------------------

RECORD, TINY = T.PRESETS["speedrun"], T.PRESETS["tiny"]
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
OLD = SimpleNamespace(platform="tpu", device_kind="TPU v4")
GPU = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
CHOICES = [
    (RECORD, TPU, "attention and gradients of tables for TPUs"),
    (RECORD, GPU, "attention for NVIDIA GPUs"),
    (RECORD, CPU, "plain attention: there are no kernels for a cpu"),
    (replace(RECORD, kernels="plain"), TPU, "plain, as asked for"),
    (RECORD, OLD, "plain attention: a TPU v4 has too little VMEM"),
    (
        replace(RECORD, heads=12),
        TPU,
        "table gradients for TPUs: tiles do not hold 12 heads 64 wide one by one",
    ),
    (
        replace(RECORD, width=896, heads=7),
        TPU,
        "table gradients for TPUs: tiles do not hold 7 heads 128 wide",
    ),
    (
        replace(RECORD, val_windows=(768, 65_536)),
        TPU,
        "a window of 65536 of width 768 does not fit",
    ),
    (
        replace(RECORD, val_row=64),
        TPU,
        "plain attention: tiles of 128 tokens do not fill rows of 64",
    ),
    (replace(RECORD, attn_scales=(0.13, 0.3)), TPU, "table gradients for TPUs: scores up to 5"),
    (replace(RECORD, attn_scales=(0.7, 0.085)), GPU, "plain attention: scores up to 6"),
    (replace(RECORD, heads=8), GPU, "plain attention: tiles do not fit heads 96 wide"),
    (replace(RECORD, heads=24), GPU, "attention for NVIDIA GPUs"),
    (TINY, GPU, "they compute in bfloat16, not in float32"),
]


@pytest.mark.parametrize("cfg, device, reason", CHOICES)
def test_the_choice_says_why(cfg, device, reason):
    kernels, said = T.pick_kernels(cfg, device)
    assert reason in said
    served = said in ("attention and gradients of tables for TPUs", "attention for NVIDIA GPUs")
    assert (kernels.attend is not T.PLAIN.attend) == served
    assert (kernels.add_rows is T.sum_rows) == ("table" in said)
