"""Attention: the reference against loops, the kernels against the reference, and the choice.

Every case checks the one contract: token t attends to itself and the `window` tokens before it that
have its segment id.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_config

import train_gpt as T


def inputs(t: int, h: int, cuts: tuple[int, ...], dtype=np.float32, b: int = 2, n: int = 2):
    """q, k, v, an output gradient [b, t, n, h], and segments that change at `cuts`.

    The segments of row 1 change one token earlier, so that rows cannot be mixed up.
    """
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((b, t, n, h)), dtype) for _ in range(4)]
    where = np.arange(t)[None] + np.arange(b)[:, None]
    segments = 3 + sum((where >= cut).astype(np.int32) for cut in (0, *cuts))
    return *arrays, jnp.asarray(segments)


def loops(q, k, v, segments, window: int, scale: float) -> np.ndarray:
    """The contract in float64, one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(v)
    for b, t, n in np.ndindex(q.shape[:3]):
        seen = [s for s in range(max(0, t - window), t + 1) if segments[b, s] == segments[b, t]]
        weights = np.exp(scale * np.array([q[b, t, n] @ k[b, s, n] for s in seen]))
        out[b, t, n] = weights / weights.sum() @ v[b, seen, n]
    return out


# xla


@pytest.mark.parametrize("cuts", [(), (7,), (1, 7, 20)], ids=["one", "two", "four"])
@pytest.mark.parametrize("window", [0, 1, 5, 22, 23, 1000])
def test_xla_follows_the_contract(window, cuts):
    q, k, v, _, segments = inputs(t=24, h=8, cuts=cuts)
    out = T.attend_xla(q, k, v, segments, window, 0.4)
    # float32 sums of 24 terms of size 1
    np.testing.assert_allclose(out, loops(q, k, v, segments, window, 0.4), atol=2e-6)


def test_xla_with_window_0_returns_the_values():
    q, k, v, _, segments = inputs(t=24, h=8, cuts=(9,))
    np.testing.assert_array_equal(T.attend_xla(q, k, v, segments, 0, 0.4), v)


def test_xla_keeps_16_bits_outside_and_32_inside():
    q, k, v, _, segments = inputs(t=24, h=8, cuts=(9,), dtype=jnp.bfloat16)
    out = T.attend_xla(q, k, v, segments, 6, 3.0)
    assert out.dtype == jnp.bfloat16
    # probabilities and output are rounded to 8 bits, 2^-9 each; scores must not be: they reach 30
    np.testing.assert_allclose(
        np.asarray(out, np.float64), loops(q, k, v, segments, 6, 3.0), atol=0.02
    )


# splash, interpreted on the CPU


def value_and_grads(attend, q, k, v, segments, window, scale, out_grad):
    """(output, gradients of q, k, v and scale)."""

    def loss(q, k, v, scale):
        out = attend(q, k, v, segments, window, scale)
        return jnp.sum(out * out_grad), out

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    (_, out), grads = run(q, k, v, jnp.float32(scale))
    return out, grads


def splash(*args):
    return T.attend_splash(*args, interpret=True)


@pytest.mark.parametrize(
    "t, h, window, cuts",
    [
        (256, 64, 64, ()),
        (256, 128, 128, (100, 180)),
        (256, 64, 256, (100, 180)),
        (384, 64, 200, (100, 300)),  # three tiles of 128
    ],
)
def test_splash_agrees_with_xla_forward_and_backward(t, h, window, cuts):
    q, k, v, out_grad, segments = inputs(t, h, cuts, b=1)
    got, got_grads = value_and_grads(splash, q, k, v, segments, window, 0.2, out_grad)
    want, want_grads = value_and_grads(T.attend_xla, q, k, v, segments, window, 0.2, out_grad)
    # both are float32 and differ in the order of sums only; gradients relative to their largest,
    # that of the scale, a long sum, to the size of its terms
    sizes = [float(jnp.abs(y).max()) for y in want_grads[:3]]
    sizes.append(float(jnp.abs(q * want_grads[0]).sum() / 0.2))
    np.testing.assert_allclose(got, want, atol=1e-5)
    for name, x, y, size in zip("qkvs", got_grads, want_grads, sizes, strict=True):
        np.testing.assert_allclose(x / size, y / size, atol=1e-5, err_msg=name)


def test_splash_takes_every_row_of_a_batch_for_itself():
    q, k, v, _, segments = inputs(256, 64, (90,), b=2)
    out = jax.jit(lambda: splash(q, k, v, segments, 1000, 0.2))()
    np.testing.assert_allclose(out, T.attend_xla(q, k, v, segments, 1000, 0.2), atol=1e-5)


@pytest.mark.parametrize("t", [64, 100, 257, 320])
def test_splash_refuses_rows_that_tiles_do_not_fill(t):
    q, k, v, _, segments = inputs(t, 64, ())
    with pytest.raises(T.UserError, match=f"splash .*multiple of 128 tokens, not {t}"):
        splash(q, k, v, segments, 64, 0.2)


# cudnn: the call, carried out by its xla stand-in


@pytest.fixture
def no_gpu(monkeypatch):
    """Carries calls for cuDNN out with XLA, under the same arguments."""
    real = jax.nn.dot_product_attention

    def stand_in(*args, implementation, is_causal, **rest):
        assert implementation == "cudnn"
        assert is_causal is True  # a window alone would let tokens see the future
        return real(*args, implementation="xla", is_causal=is_causal, **rest)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)


@pytest.mark.parametrize(
    "window, cuts", [(0, ()), (1, (9,)), (5, ()), (5, (9, 10, 30)), (39, (20,)), (1000, ())]
)
def test_cudnn_is_asked_for_the_contract(no_gpu, window, cuts):
    q, k, v, _, segments = inputs(t=40, h=16, cuts=cuts, dtype=jnp.bfloat16)
    got = T.attend_cudnn(q, k, v, segments, window, 0.3)
    assert got.dtype == jnp.bfloat16
    # queries, probabilities and output are rounded to 8 bits; a wrong key would change by about 1
    np.testing.assert_allclose(
        np.asarray(got, np.float64), loops(q, k, v, segments, window, 0.3), atol=0.03
    )


def test_cudnn_gives_the_gradients_of_xla(no_gpu):
    q, k, v, out_grad, segments = inputs(t=40, h=16, cuts=(9, 30), dtype=jnp.bfloat16)
    _, got = value_and_grads(T.attend_cudnn, q, k, v, segments, 7, 0.3, out_grad)
    _, want = value_and_grads(T.attend_xla, q, k, v, segments, 7, 0.3, out_grad)
    for name, x, y in zip(("q", "k", "v", "scale"), got, want, strict=True):
        assert x.dtype == y.dtype
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        # 8-bit rounding at a few places on either path
        assert np.linalg.norm(x - y) < 0.02 * np.linalg.norm(y), name


def test_cudnn_refuses_float32():
    q, k, v, _, segments = inputs(t=40, h=16, cuts=())
    with pytest.raises(T.UserError, match="cudnn .*not float32: use compute_dtype=bfloat16"):
        T.attend_cudnn(q, k, v, segments, 7, 0.3)


# The choice


@pytest.mark.parametrize(
    "platform, dtype, backend, reason",
    [
        ("tpu", "bfloat16", "splash", "windowed kernel for TPUs"),
        ("tpu", "float32", "splash", "windowed kernel for TPUs"),
        ("gpu", "bfloat16", "cudnn", "NVIDIA.*dense mask"),
        ("cuda", "bfloat16", "cudnn", "NVIDIA.*dense mask"),
        ("gpu", "float32", "xla", "reference, .*float32 on gpu"),
        ("cpu", "bfloat16", "xla", "reference, .*bfloat16 on cpu"),
        ("cpu", "float32", "xla", "reference, .*float32 on cpu"),
        ("metal", "float32", "xla", "reference, .*float32 on metal"),
        ("rocm", "bfloat16", "xla", "reference, .*bfloat16"),  # cuDNN is NVIDIA's
    ],
)
def test_auto_picks_by_platform_and_says_why(platform, dtype, backend, reason):
    picked, why = T.pick_attention(small_config(compute_dtype=dtype), platform)
    assert picked == backend
    assert re.search(reason, why)


@pytest.mark.parametrize(
    ("width", "capability", "backend"),
    [(128, 8.0, "cudnn"), (256, 8.0, "xla"), (256, 9.0, "cudnn"), (264, 9.0, "xla")],
)
def test_wide_heads_need_a_hopper_for_cudnn(width, capability, backend):
    cfg = small_config(width=2 * width, compute_dtype="bfloat16")
    assert T.pick_attention(cfg, "gpu", capability)[0] == backend


@pytest.mark.parametrize(
    "asked, platform",
    [("xla", "tpu"), ("xla", "gpu"), ("xla", "cpu"), ("splash", "tpu"), ("cudnn", "cuda")],
)
def test_what_is_asked_for_is_taken_where_it_runs(asked, platform):
    cfg = small_config(attention=asked, compute_dtype="bfloat16")
    assert T.pick_attention(cfg, platform) == (asked, "asked for")


@pytest.mark.parametrize("change", [{"compute_dtype": "float32"}, {"width": 528}])
def test_cudnn_asked_for_is_refused_where_it_cannot_work(change):
    cfg = small_config(**{"attention": "cudnn", "compute_dtype": "bfloat16", **change})
    with pytest.raises(T.UserError, match="attention=cudnn takes no heads of"):
        T.pick_attention(cfg, "gpu")


@pytest.mark.parametrize(
    "asked, platform, home",
    [
        ("splash", "cpu", "tpu"),
        ("splash", "gpu", "tpu"),
        ("cudnn", "cpu", "gpu"),
        ("cudnn", "tpu", "gpu"),
    ],
)
def test_what_cannot_run_there_is_refused(asked, platform, home):
    words = f"attention={asked} runs on a {home}, not on a {platform}: use attention=auto or xla"
    with pytest.raises(T.UserError, match=words):
        T.pick_attention(small_config(attention=asked), platform)


def test_every_backend_can_be_asked_for_by_name():
    assert set(T.ATTENTION) == {"xla", "splash", "cudnn"}
    for name in T.ATTENTION:
        assert T.ATTENTION[name] is getattr(T, f"attend_{name}")
