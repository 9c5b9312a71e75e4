"""Factors of eight bits, against NumPy; and that only training has them."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import small_config
from programs import quick
from training import BRIEF, train_losses, trained

import train_gpt as T

KINDS = {"int8": (jnp.int8, jnp.int8), "floats": (T.E4M3, T.E4M3), "gradients": (T.E5M2, T.E4M3)}
MOST = {"int8": 126, "float8_e4m3fn": 448, "float8_e5m2": 57344}


def exact(x, dtype):
    """What `rounded` stands for, in float64."""
    name = jnp.dtype(dtype).name
    scale = np.float64(np.abs(x).max(axis=-1, keepdims=True)) / MOST[name]
    whole = np.round(x / scale)
    floats = np.float32(x / scale).astype(getattr(ml_dtypes, name, np.int8)).astype(np.float64)
    return scale * (whole if name == "int8" else floats)


def inputs():
    """Rows [2, 7, 48] whose sizes differ by a thousand, one of zeros; and weights [30, 48]."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 7, 48)) * np.logspace(-2, 1, 7)[:, None]
    x[1, 3] = 0
    w = rng.standard_normal((30, 48)) * np.logspace(1, -1, 30)[:, None]
    return np.float32(x), np.float32(w)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_rounded_rows(kind):
    x, w = inputs()
    got = quick(lambda x, w: T.rounded_product(x, w, KINDS[kind]), x, w)
    x[1, 3] = 1e-30  # which rounds to nothing
    x8, w8 = map(exact, (x, w), KINDS[kind])
    want = x8 @ w8.T
    scale = np.abs(x8) @ np.abs(w8).T  # a float on the edge may fall to either side
    assert np.all(np.abs(got - want) <= (1e-6 if kind == "int8" else 2e-3) * scale + 1e-25)
    off = np.linalg.norm(want - np.float64(x) @ w.T) / np.linalg.norm(want)
    assert off < {"int8": 0.02, "floats": 0.05, "gradients": 0.08}[kind]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MOST)
def test_no_row_leaves_the_range_of_eight_bits(kind, dtype):
    """Whatever its largest number is, also where factors are rounded to bfloat16."""
    sizes = np.concatenate([np.linspace(0.5, 2, 5000), np.logspace(-20, 20, 100), [0.0]])
    x = jnp.asarray(sizes[:, None] * [1.0, -1.0, 0.3], dtype)
    y, scale = quick(lambda x: T.rounded(x, jnp.dtype(kind)), x)
    y = np.asarray(y, np.float32)
    assert np.abs(y).max() <= MOST[kind] + (kind == "int8") and np.all(y[:, 0] == -y[:, 1])
    np.testing.assert_allclose(y * scale, np.asarray(x, np.float32), rtol=0.13, atol=1e-30)
    assert np.all(y[:-1, 0] > 0.98 * MOST[kind])


def test_gradients_are_those_of_what_was_not_rounded():
    x, w = inputs()
    slope = np.random.default_rng(1).standard_normal((2, 7, 30), np.float32)
    _, back = jax.vjp(T.product_8, x, w)
    _, plain = jax.vjp(lambda x, w: x @ w.T, x, w)
    for got, want in zip(back(slope), plain(slope), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_what_an_nvidia_gpu_multiplies():
    """Forward e4m3 by e4m3; the gradient of x e5m2 by e4m3; that of weights as ever."""

    def both(x, w):
        y, back = jax.vjp(T.product_8, x, w)
        return back(y)

    shapes = (
        jax.ShapeDtypeStruct((64, 48), jnp.bfloat16),
        jax.ShapeDtypeStruct((32, 48), "bfloat16"),
    )
    for platform, forward, gradient in (
        ("cuda", ("f8E4M3FN", "f8E4M3FN", "bf16"), ("f8E5M2", "f8E4M3FN", "bf16")),
        ("tpu", ("i8", "i8", "i32"), ("bf16", "bf16", "bf16")),
    ):
        text = jax.export.export(jax.jit(both), platforms=(platform,))(*shapes).mlir_module()
        dots = re.findall(r"dot_general .* : (.*) loc", text)
        for size, (one, other, sums) in (("64x48", forward), ("64x32", gradient)):
            form = rf"\(tensor<{size}x{one}>, tensor<\w+x{other}>\) -> tensor<\w+x{sums}>"
            assert any(re.fullmatch(form, x) for x in dots), (platform, size, dots)


def test_logits_of_eight_bits_and_their_gradients():
    """The loss with its own gradient and the plain one, near those that are not rounded."""
    rng = np.random.default_rng(0)
    x, head = (rng.standard_normal((n, 32), np.float32) for n in (48, 104))
    targets, weights = rng.integers(0, 97, (48, 2)).astype(np.int32), np.ones((48, 2), np.float32)

    def run(loss, eight_bits):
        cfg = small_config(eight_bits=eight_bits)
        found = quick(
            jax.value_and_grad(lambda *x: loss(*x, targets, weights, cfg)[0], (0, 1)), x, head
        )
        return jax.tree.leaves(found)

    plain = run(T.cross_entropy, "none")
    for loss in (T.cross_entropy, T.fused_cross_entropy):
        for got, want in zip(run(loss, "head"), plain, strict=True):
            off = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert 0 < off < 0.02, off


def test_only_training_multiplies_eight_bits():
    """Validation, and so all losses that are compared, is that of the parameters as they are."""
    cfg = replace(BRIEF, devices=1)
    mesh = T.make_mesh(cfg, jax.devices()[:1])[1]
    texts = []
    for eight_bits in ("none", "mlp,head"):
        own = replace(cfg, eight_bits=eight_bits)
        found = T.programs(own, mesh, T.PLAIN)
        texts.append({str(x): T.lower(y, mesh).as_text() for x, y in found.items()})
    without, within = texts
    assert without.keys() == within.keys()
    for key, text in within.items():
        if key.startswith("grads"):
            products = re.compile(r"dot_general .*xi8>")
            assert products.search(text) and not products.search(without[key])
        else:
            assert text == without[key]


def test_a_run_with_eight_bits_learns_as_well(shards, tmp_path):
    runs = [
        train_losses(trained(replace(BRIEF, eight_bits=x), tmp_path / x, shards))
        for x in ("none", "mlp,head")
    ]
    assert runs[0] != runs[1]
    np.testing.assert_allclose(*runs, atol=0.02)


def test_the_sample_of_a_run_is_of_the_model_that_it_validates(shards, tmp_path, monkeypatch):
    cfg, said, show = replace(BRIEF, eight_bits="mlp,head", sample_tokens=1), [], T.demonstrate

    def without(*args):
        monkeypatch.delattr(T, "product_8")
        show(*args)

    monkeypatch.setattr(T, "demonstrate", without)
    run = trained(cfg, tmp_path, shards, say=said.append)
    assert (run / "sample.txt").exists(), said


def test_what_cannot_be_in_eight_bits():
    with pytest.raises(
        T.UserError, match="eight_bits='qkv' is not valid: none, mlp, head, mlp,head"
    ):
        T.override(small_config(), ["eight_bits=qkv"])
    with pytest.raises(T.UserError, match="squared_relu=False is not valid: True for eight_bits"):
        T.override(small_config(), ["eight_bits=mlp", "squared_relu=0"])
    assert T.override(small_config(), ["eight_bits=head", "squared_relu=0"])
