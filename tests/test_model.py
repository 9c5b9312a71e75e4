"""The model against a second one in NumPy float64, and properties that hold whatever its numbers.

`reference_forward` is written from the docstrings of train_gpt.py, with loops and no jax.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, small_config

import train_gpt as T

WINDOWS = (3, 11)  # short, long; long_layers of small_config is layer 1


def random_params(cfg: T.Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Every parameter non-zero, at sizes that keep all parts of the model in play."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, row in T.param_table(cfg).items():
        std = {2: 1.0, 3: 0.2}.get(len(row.shape), 0.5)
        params[name] = rng.normal(0, std, row.shape).astype(np.float32)
    params["attn_scale"] = rng.uniform(0.1, 0.4, cfg.layers).astype(np.float32)
    params["head"] *= 0.5
    params["attn_bank"][4 * cfg.layers :] = 0
    params["mlp_bank"][2 * cfg.layers :] = 0
    return params


def rows(cfg: T.Config, b: int, t: int, *starts: int, seed: int = 0) -> np.ndarray:
    """Tokens [b, t] without BOS but at `starts` of every row."""
    tokens = np.random.default_rng(seed).integers(0, cfg.bos, (b, t)).astype(np.int32)
    tokens[:, list(starts)] = cfg.bos
    return tokens


def compute_copies(cfg: T.Config, params):
    """What the steps hand to the model: matrices in compute_dtype, scalars in float32."""
    table = T.param_table(cfg)
    return {k: jnp.asarray(x, cfg.dtype if table[k].sharded else None) for k, x in params.items()}


@functools.cache
def compiled_forward(cfg: T.Config, windows):
    return jax.jit(lambda params, tokens: T.forward(params, tokens, cfg, windows, T.attend_xla))


@functools.cache
def compiled_loss(cfg: T.Config):
    def loss(params, tokens):
        return T.loss_sum(params, tokens, cfg, WINDOWS, T.attend_xla)

    return jax.jit(jax.value_and_grad(loss))


def hidden(cfg: T.Config, params, tokens, windows=WINDOWS) -> np.ndarray:
    """Output of the last layer, [b, t, d]."""
    return np.asarray(compiled_forward(cfg, windows)(compute_copies(cfg, params), tokens))


def loss_and_gradients(cfg: T.Config, params, tokens):
    """Summed loss and the gradient of every parameter."""
    loss, grads = compiled_loss(cfg)(compute_copies(cfg, params), tokens)
    return loss, jax.tree.map(np.asarray, grads)


# A second implementation


def rms(x):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 2.0**-23)


def turn(x_tnh, base: float):
    """RoPE as complex numbers: dimension i with i + h/2, the first quarter of the head turning."""
    t, _, h = x_tnh.shape
    out = x_tnh.astype(np.complex128)[..., : h // 2] + 1j * x_tnh[..., h // 2 :]
    for i in range(h // 4):
        freq = base ** -(i / (h // 4 - 1))
        out[..., i] *= np.exp(-1j * freq * np.arange(t))[:, None]
    return np.concatenate([out.real, out.imag], -1)


def reference_row(cfg: T.Config, params, tokens_t, windows) -> np.ndarray:
    n, h, half = cfg.heads, cfg.width // cfg.heads, cfg.layers // 2
    t = len(tokens_t)
    document = np.cumsum(tokens_t == cfg.bos)
    x0 = rms(params["embed"][tokens_t])
    x, first_values, saved = x0, None, {}
    for i in range(cfg.layers):
        partner = cfg.layers - 1 - i  # the U: last with first, last but one with second, ...
        if partner < half:
            x = x + params["skip"][half - 1 - partner] * saved[partner]
        stay, back = params["resid_mix"][i]
        x = stay * x + back * x0

        wq, wk, wv, wo = params["attn_bank"][4 * i : 4 * i + 4]
        q, k, v = ((rms(x) @ w.T).reshape(t, n, h) for w in (wq, wk, wv))
        q, k = turn(rms(q), cfg.rope_base), turn(rms(k), cfg.rope_base)
        first_values = v if i == 0 else first_values
        mix = params["value_mix"][i]
        v = (1 - mix) * v + mix * first_values
        window = windows[1] if i in cfg.long_layers else windows[0]
        o = np.zeros_like(v)
        for now, head in np.ndindex(t, n):
            seen = [s for s in range(max(0, now - window), now + 1) if document[s] == document[now]]
            weight = np.exp(params["attn_scale"][i] * (k[seen, head] @ q[now, head]))
            o[now, head] = weight @ v[seen, head] / weight.sum()
        x = x + o.reshape(t, -1) @ wo.T

        up, down = params["mlp_bank"][i], params["mlp_bank"][cfg.layers + i]
        x = x + np.maximum(rms(x) @ up.T, 0) ** 2 @ down
        saved[i] = x
    return rms(x)


def reference_forward(cfg: T.Config, params, tokens, windows=WINDOWS) -> np.ndarray:
    params = {name: np.asarray(x, np.float64) for name, x in params.items()}
    return np.stack([reference_row(cfg, params, row, windows) for row in tokens])


def reference_loss(x_rd, head_dv, targets_r, softcap: float) -> np.ndarray:
    """Cross-entropy of each token by a stable log-softmax."""
    z = np.asarray(x_rd, np.float64) @ np.asarray(head_dv, np.float64)
    logits = softcap / (1 + np.exp(-z / (softcap / 4)))
    top = logits.max(-1, keepdims=True)
    log_probs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return -log_probs[np.arange(len(targets_r)), targets_r]


FOUR = small_config(layers=4, long_layers=(0, 3))
THREE = small_config(layers=3)


@pytest.mark.parametrize(
    "cfg, windows",
    [
        (FOUR, WINDOWS),
        (THREE, (1000, 1000)),
        (small_config(layers=1, long_layers=()), (4, 1000)),
    ],
    ids=["four", "three", "one"],
)
def test_forward_agrees_with_the_reference(cfg, windows):
    params, tokens = random_params(cfg), rows(cfg, 2, 20, 0, 9, 13)
    got = hidden(cfg, params, tokens, windows)
    assert got.dtype == np.float32
    # outputs have size 1; float32 through 4 layers of sums over 128 terms
    np.testing.assert_allclose(got, reference_forward(cfg, params, tokens, windows), atol=3e-5)


@pytest.mark.parametrize("dtype, rel", [("float32", 1e-5), ("bfloat16", 0.02)])
def test_loss_sum_predicts_the_next_token_of_every_position(dtype, rel):
    cfg = small_config(compute_dtype=dtype)
    params, tokens = random_params(cfg), rows(cfg, 2, 21, 0, 9)
    got, _ = loss_and_gradients(cfg, params, tokens)
    x = reference_forward(cfg, params, tokens[:, :-1]).reshape(-1, cfg.width)
    want = reference_loss(x, params["head"], tokens[:, 1:].ravel(), cfg.softcap).sum()
    assert got.dtype == jnp.float32
    assert float(got) == pytest.approx(want, rel=rel)  # a sum of 40 losses


def test_bfloat16_stays_close():
    cfg = small_config(compute_dtype="bfloat16")
    params, tokens = random_params(cfg), rows(cfg, 2, 20, 0, 9)
    x = hidden(cfg, params, tokens)
    assert x.dtype == jnp.bfloat16
    error = np.asarray(x, np.float64) - reference_forward(cfg, params, tokens)
    assert np.sqrt(np.mean(error**2)) < 0.02  # of outputs of size 1, in 8 bits


# What a token can see. Equal means bitwise: the same program ran, on the same numbers.


WIDE = (1000, 1000)


def changed(tokens, at: int):
    """`tokens` with another id at one position of every row."""
    other = tokens.copy()
    other[:, at] = (other[:, at] + 1) % BOS
    return other


def moved(cfg, tokens, other, windows=WIDE) -> list[int]:
    """Positions at which the outputs for two batches differ, in any row."""
    params = random_params(cfg)
    one, two = (hidden(cfg, params, x, windows) for x in (tokens, other))
    return np.flatnonzero((one != two).any(axis=(0, 2))).tolist()


@pytest.mark.parametrize("at", [0, 1, 10, 19])
def test_no_token_sees_the_future(at):
    tokens = rows(THREE, 2, 20)
    assert moved(THREE, tokens, changed(tokens, at)) == list(range(at, 20))


@pytest.mark.parametrize("window", [0, 4, 16])
def test_one_layer_sees_exactly_window_tokens_back(window):
    cfg = small_config(layers=1, long_layers=())
    tokens = rows(cfg, 2, 20)
    reached = moved(cfg, tokens, changed(tokens, 2), (window, 1000))
    assert reached == list(range(2, 2 + window + 1))


def test_each_layer_sees_through_its_own_window():
    """Layer 0 reaches 2 back, the long layer 1 reaches 5 back: 7 together."""
    cfg = small_config(layers=2, long_layers=(1,))
    tokens = rows(cfg, 2, 20)
    assert moved(cfg, tokens, changed(tokens, 4), (2, 5)) == list(range(4, 12))


@pytest.mark.parametrize("at", [1, 8])
def test_no_token_sees_another_document(at):
    tokens = rows(THREE, 2, 20, 0, 9)
    assert moved(THREE, tokens, changed(tokens, at)) == list(range(at, 9))


def test_the_number_of_documents_before_does_not_matter():
    tokens, other = rows(THREE, 2, 20, 0, 9), rows(THREE, 2, 20, 0, 4, 9)
    assert moved(THREE, tokens, other) == list(range(4, 9))


def test_a_document_reads_the_same_wherever_it_stands():
    """Positions enter as differences only, so two places in a row differ by rounding."""
    tokens = rows(THREE, 2, 20, 0, 11)
    tokens[:, 3:9] = tokens[:, 14:20] = rows(THREE, 2, 6, 0, seed=5)
    x = hidden(THREE, random_params(THREE), tokens, WIDE)
    np.testing.assert_allclose(x[:, 3:9], x[:, 14:20], atol=3e-5)


def test_rows_of_a_batch_do_not_mix():
    params, tokens = random_params(THREE), rows(THREE, 2, 20, 0)
    other = tokens.copy()
    other[0] = other[0, ::-1]
    one, two = (hidden(THREE, params, x, WIDE) for x in (tokens, other))
    np.testing.assert_array_equal(one[1], two[1])
    assert (one[0] != two[0]).any()


def test_segments_rise_at_every_bos():
    tokens = jnp.array([[BOS, 1, 2, BOS, BOS, 3], [4, 5, BOS, 6, 7, 8]])
    got = T.segment_ids(tokens, BOS)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, [[1, 1, 1, 2, 3, 3], [0, 0, 1, 1, 1, 1]])


# Parts: norm, RoPE, softcap


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_norm_against_float64(scale):
    x = (np.random.default_rng(0).standard_normal((3, 5, 64)) * scale).astype(np.float32)
    exact = np.asarray(x, np.float64)
    want = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 2.0**-23)
    np.testing.assert_allclose(T.norm(jnp.asarray(x)), want, rtol=1e-6, atol=1e-7)


def test_norm_takes_its_statistics_in_float32_and_keeps_the_dtype():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4096)) + 1, jnp.bfloat16)
    got, exact = T.norm(x), np.asarray(x, np.float64)
    assert got.dtype == jnp.bfloat16
    want = exact / np.sqrt((exact**2).mean(-1, keepdims=True))
    # one rounding to 8 bits at the end, 2^-8 at most, and none before
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2.0**-8 + 1e-6)


def test_norm_of_zero_is_zero():
    assert not np.any(T.norm(jnp.zeros((2, 8))))


def roped(x_h, length: int, cfg: T.Config) -> np.ndarray:
    """One head vector at every position of a row, [t, h]."""
    x = jnp.broadcast_to(jnp.asarray(x_h, jnp.float32), (length, cfg.head_width))
    return np.asarray(T.rope(x[None, :, None], *T.rope_tables(cfg, length))[0, :, 0])


def test_rope_makes_scores_depend_on_the_distance_only():
    cfg = small_config(width=128)
    rng = np.random.default_rng(0)
    q, k = (roped(rng.standard_normal(64), 40, cfg).astype(np.float64) for _ in range(2))
    scores = q @ k.T
    for distance in range(-39, 40):
        along = np.diagonal(scores, distance)
        np.testing.assert_allclose(along, along[0], atol=1e-4)  # of scores of size 8
    assert np.ptp(scores[0]) > 1


def test_rope_turns_one_half_of_the_head_and_leaves_the_other():
    cfg = small_config(width=128)  # 64 wide: pairs (i, i + 32), of which i < 16 turn
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    y = roped(x, 40, cfg)
    still = np.r_[16:32, 48:64]
    np.testing.assert_array_equal(y[:, still], np.tile(x[still], (40, 1)))
    np.testing.assert_array_equal(y[0], x)
    assert (np.abs(y[1:, np.r_[:16, 32:48]] - x[np.r_[:16, 32:48]]) > 0).all()
    lengths = np.hypot(y[:, :16], y[:, 32:48])
    np.testing.assert_allclose(lengths, np.tile(lengths[0], (40, 1)), rtol=1e-6)


def test_rope_frequencies_fall_from_1_to_1_over_base():
    cfg = small_config(width=128, rope_base=500.0)
    cos, sin = T.rope_tables(cfg, 10)
    assert cos.shape == sin.shape == (10, 32) and cos.dtype == sin.dtype == np.float32
    angles = 7 * 500.0 ** -(np.arange(16) / 15)
    np.testing.assert_allclose(cos[7, :16], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin[7, :16], np.sin(angles), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_softcap_is_taken_in_float32(dtype):
    cfg = small_config(softcap=15.0)
    z = jnp.asarray(np.linspace(-60, 60, 2001), dtype)
    got = T.cap_logits(z, cfg)
    assert got.dtype == jnp.float32
    want = 15 / (1 + np.exp(-np.asarray(z, np.float64) / 3.75))
    np.testing.assert_allclose(got, want, rtol=1e-5)  # float32 exponential of up to 16
    assert got.min() > 0 and got.max() <= 15


def test_softcap_has_slope_1_at_zero():
    slope = jax.grad(lambda z: T.cap_logits(z, small_config()))(0.0)
    assert slope == pytest.approx(1.0, rel=1e-6)


# Cross-entropy


def loss_inputs(tokens: int):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, 32)).astype(np.float32)
    head = rng.standard_normal((32, 104)).astype(np.float32)
    return x, head, rng.integers(0, 97, tokens).astype(np.int32)


def loss_and_grads(cfg, x, head, targets):
    run = jax.value_and_grad(lambda x, head: T.cross_entropy(x, head, targets, cfg), argnums=(0, 1))
    return jax.jit(run)(x, head)


CHUNKS = {60: 1, 59: 2, 25: 3, 7: 10, 1: 60}  # of 60 tokens, by loss_chunk


@pytest.mark.parametrize("chunk", CHUNKS)
def test_cross_entropy_against_float64_whatever_the_chunk(chunk):
    x, head, targets = loss_inputs(60)
    loss, (grad_x, grad_head) = loss_and_grads(small_config(loss_chunk=chunk), x, head, targets)
    want = reference_loss(x, head, targets, 30.0).sum()
    assert float(loss) == pytest.approx(want, rel=1e-6)
    whole, (whole_x, whole_head) = loss_and_grads(small_config(loss_chunk=60), x, head, targets)
    np.testing.assert_allclose(grad_x, whole_x, atol=1e-5)
    np.testing.assert_allclose(grad_head, whole_head, atol=2e-5)  # sums of 60 in another order


def test_cross_entropy_gradient_against_differences_in_float64():
    x, head, targets = loss_inputs(12)
    _, grads = loss_and_grads(small_config(loss_chunk=5), x, head, targets)
    rng = np.random.default_rng(1)
    for i, grad in enumerate(grads):
        at = [np.asarray(x, np.float64), np.asarray(head, np.float64)]
        step = 1e-6 * rng.standard_normal(at[i].shape)
        ends = []
        for sign in (1, -1):
            there = list(at)
            there[i] = at[i] + sign * step
            ends.append(reference_loss(*there, targets, 30.0).sum())
        assert np.sum(grad * step) == pytest.approx((ends[0] - ends[1]) / 2, rel=1e-4)


@pytest.mark.parametrize(
    "tokens, chunk, chunks", [*((60, *c) for c in CHUNKS.items()), (59, 30, 59)]
)
def test_chunks_are_equal_and_none_is_longer_than_asked(tokens, chunk, chunks):
    x, head, targets = loss_inputs(tokens)
    cfg = small_config(loss_chunk=chunk)
    jaxpr = jax.make_jaxpr(lambda x, head: T.cross_entropy(x, head, targets, cfg))(x, head)
    scans = [e.params["length"] for e in jaxpr.eqns if e.primitive.name == "scan"]
    assert scans == ([chunks] if chunks > 1 else [])
    assert tokens / chunks <= chunk


def test_cross_entropy_of_bfloat16_has_float32_logits():
    """A loss of bfloat16 logits would be off by up to 1/16, half a step at 15."""
    x, head, targets = loss_inputs(60)
    x, head = jnp.asarray(x, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    loss = T.cross_entropy(x, head, targets, small_config())
    want = reference_loss(x, head, targets, 30.0).sum()
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(want, rel=1e-6)


def test_no_softcap_that_is_allowed_can_overflow():
    """The worst case: all logits at the cap, in the largest table that uint16 ids can use."""
    for cap in range(100, 0, -1):
        try:
            cfg = small_config(vocab=65536, real_tokens=65536, softcap=float(cap))
        except T.UserError:
            continue
        break
    x, head, targets = np.full((2, 32), 1e4), np.ones((32, 65536)), np.array([0, 65535])
    loss = T.cross_entropy(jnp.asarray(x), jnp.asarray(head), jnp.asarray(targets), cfg)
    assert float(loss) == pytest.approx(2 * np.log(65536), rel=1e-4), f"softcap={cap}"


def test_a_zero_head_gives_the_uniform_loss():
    """Every row of the table counts, padding too: log(104), to float32 rounding of 15 +- x."""
    cfg = small_config()
    params, tokens = T.init_state(cfg, 0)["params"], rows(cfg, 2, 21, 0, 9)
    loss, _ = loss_and_gradients(cfg, params, tokens)
    assert float(loss) / 40 == pytest.approx(np.log(104), abs=2e-6)


# Gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_parameter_that_is_used_gets_a_finite_gradient(dtype):
    cfg = small_config(compute_dtype=dtype)
    tokens = rows(cfg, 2, 21, 0, 9)
    _, grads = loss_and_gradients(cfg, random_params(cfg), tokens)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in grads.values())
    seen = np.isin(np.arange(cfg.vocab), tokens[:, :-1])
    np.testing.assert_array_equal((grads["embed"] != 0).any(1), seen)
    assert (grads["head"] != 0).any(0).all()  # the softmax reaches every column
    for bank, used in (("attn_bank", 8), ("mlp_bank", 4)):
        reached = (grads[bank] != 0).any(axis=(1, 2))
        assert reached[:used].all() and not reached[used:].any()
    assert (grads["resid_mix"] != 0).all() and (grads["skip"] != 0).all()
    assert (grads["attn_scale"] != 0).all()
    assert (grads["value_mix"][1:] != 0).all()  # layer 0 mixes its values with themselves


def test_at_the_start_only_the_head_learns():
    """All other paths to the loss go through a matrix that is zero."""
    cfg = small_config()
    _, grads = loss_and_gradients(cfg, T.init_state(cfg, 0)["params"], rows(cfg, 2, 21, 0))
    assert {name for name, x in grads.items() if x.any()} == {"head"}


def test_gradients_of_scalars_and_head_survive_bfloat16():
    """Sums over all tokens are taken in float32; in bfloat16 they were up to 45 % off."""
    rng = np.random.default_rng(0)
    cfg = small_config(layers=4, width=64, long_layers=(3,), loss_chunk=128)
    params = {
        name: jnp.asarray(rng.normal(size=row.shape) * 0.1 + (not row.sharded), jnp.float32)
        for name, row in T.param_table(cfg).items()
    }
    tokens = jnp.asarray(rng.integers(0, BOS, (16, 65)))

    def gradients(dtype):
        half = replace(cfg, compute_dtype=dtype)

        def loss(params):
            return T.loss_sum(T.compute_copies(half, params), tokens, half, (16, 64), T.attend_xla)

        return jax.grad(loss)(params)

    exact, rough = gradients("float32"), gradients("bfloat16")
    for name in ("resid_mix", "skip", "value_mix", "head"):
        error = np.linalg.norm(rough[name] - exact[name]) / np.linalg.norm(exact[name])
        assert error < 0.1, (name, error)
