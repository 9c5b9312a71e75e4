"""The model against a second one (reference.py), and what holds whatever its numbers."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import BOS, small_config
from programs import jit

import train_gpt as T

ROW = 24  # tokens
WINDOWS = (5, 11)  # short, long
WIDE = (1000, 1000)

# Layers: paired with values, plain, without attention, long with values. Plain kernels; those that
# a CPU gets otherwise are held against them below.
SMALL, AUTO = small_config(kernels="plain"), small_config()
# Six heads, so that which heads pair up and which get odd positions are different questions; head
# width 8 as in SMALL. All kinds of layers that SMALL lacks: paired after the backout, long before.
SIX = small_config(
    layers=6,
    width=48,
    heads=6,
    long_layers=(1, 4),
    paired_layers=(0, 5),
    value_layers=(2, 4, 5),
    skip=(1, 3),
    backout=2,
    kernels="plain",
)
NO_OFFSET = small_config(long_layers=(), kernels="plain")


def hyper_for(cfg: T.Config, seed: int = 0) -> T.Hyper:
    """Frequencies and attention scale that make positions matter in short rows."""
    freqs = np.random.default_rng(seed).uniform(0.1, 1.5, cfg.head_width // 4)
    return T.hyper_at(cfg, 0)._replace(
        freqs=freqs.astype(np.float32), attn_scale=np.float32(0.3), weights=np.float32([1, 0.6])
    )


@functools.cache
def random_params(cfg: T.Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Every parameter non-zero, at sizes that keep all parts of the model in play."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, row in T.param_table(cfg).items():
        std = {1: 0.5, 2: 0.7}.get(len(row.shape), 0.25)
        params[name] = rng.normal(0, std, row.shape).astype(np.float32)
    for name in ("resid_lambdas", "post_lambdas", "qkv_lambda", "o_lambda"):
        params[name] += 1
    params["head"] *= 3  # logits of both signs, up to 10
    return params


def rows(cfg: T.Config, b: int, t: int, *starts: int, seed: int = 0) -> np.ndarray:
    """Tokens int32 [b, t] without BOS but at `starts` of every row."""
    tokens = np.random.default_rng(seed).integers(0, cfg.bos, (b, t)).astype(np.int32)
    tokens[:, list(starts)] = cfg.bos
    return tokens


def run_forward(cfg: T.Config, windows):
    """forward with its look-up, as a function of (copies, tokens, hyper)."""

    def run(copies, tokens, hyper):
        found = T.look_up(cfg, copies, tokens)
        return T.forward(copies, found, tokens, cfg, T.PLAIN, windows, hyper)

    return run


@functools.cache
def compiled_forward(cfg: T.Config, windows):
    return jit(run_forward(cfg, windows))


def hidden(cfg: T.Config, params, tokens, windows=WINDOWS, **hyper) -> np.ndarray:
    """Normed output of the last layer, [b, t, d]."""
    hyper = hyper_for(cfg)._replace(**hyper)
    return np.asarray(compiled_forward(cfg, windows)(params, tokens, hyper))


@functools.cache
def compiled_loss(cfg: T.Config):
    """The two sums of a batch, and gradients of the first for the float32 parameters."""
    kernels, _ = T.pick_kernels(cfg, jax.devices()[0])

    def loss(params, tokens, hyper):
        copies = T.compute_copies(cfg, params)
        found = T.look_up(cfg, copies, tokens[:, :-1])
        return T.loss_sums(copies, found, tokens, cfg, kernels, WINDOWS, hyper, hyper.weights)

    return jit(jax.value_and_grad(loss, has_aux=True))


TOKENS = rows(SMALL, 2, ROW + 1, 0, 9, 13)


@functools.cache
def loss_and_gradients(cfg: T.Config, params=random_params):
    """((weighted loss, plain loss), gradients) of TOKENS."""
    sums, grads = compiled_loss(cfg)(params(cfg), TOKENS, hyper_for(cfg))
    return tuple(map(float, sums)), {name: np.asarray(x) for name, x in grads.items()}


# ------------------------------------------------------------------------------------------------
# The whole model
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg, windows", [(SMALL, WINDOWS), (SIX, (4, 23))], ids=["four", "six"])
def test_forward_agrees_with_the_reference(cfg, windows):
    params, tokens = random_params(cfg), rows(cfg, 2, ROW, 0, 9, 13)
    tokens[1, 0] = 5  # this row begins inside of a document
    got = hidden(cfg, params, tokens, windows)
    assert got.dtype == np.float32
    # outputs have size 1; float32 through up to 6 layers of sums over 128 terms; seen: 3e-6
    want = reference.forward(cfg, params, tokens, windows, hyper_for(cfg))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("dtype, rel", [("float32", 1e-5), ("bfloat16", 0.02)])
def test_loss_sums_agree_with_the_reference(dtype, rel):
    """Weighted over the two next tokens, and plain; 48 tokens, their losses between 2 and 20."""
    cfg = replace(SMALL, compute_dtype=dtype)
    got, _ = loss_and_gradients(cfg)
    want = reference.loss_sums(cfg, random_params(cfg), TOKENS, WINDOWS, hyper_for(cfg))
    assert got == pytest.approx(want, rel=rel)
    assert want[0] > 1.3 * want[1]  # so the second target counts


def test_gradient_of_every_parameter_against_differences_in_float64():
    """Along one random direction for each parameter, and for each layer of the stacked ones."""
    _, grads = loss_and_gradients(SMALL)
    params, hyper = reference.exact(random_params(SMALL)), hyper_for(SMALL)
    rng = np.random.default_rng(1)
    for name, grad in grads.items():
        step = 1e-6 * rng.standard_normal(grad.shape)
        ends = [
            reference.loss_sums(
                SMALL, params | {name: params[name] + sign * step}, TOKENS, WINDOWS, hyper
            )[0]
            for sign in (1, -1)
        ]
        size = 1e-6 * np.linalg.norm(grad)
        assert abs(np.sum(grad * step) - (ends[0] - ends[1]) / 2) < 2e-4 * size, name


def test_kernels_of_a_cpu_give_the_losses_and_gradients_of_plain_ones():
    """The loss with its own gradient and the lean ReLU^2, through the whole model."""
    sums, grads = loss_and_gradients(AUTO)
    want, wanted = loss_and_gradients(SMALL)
    assert sums == pytest.approx(want, rel=1e-6)
    for name, grad in grads.items():
        error = np.linalg.norm(grad - wanted[name]) / np.linalg.norm(wanted[name])
        assert error < 1e-5, (name, error)


def test_hyper_is_traced_so_that_steps_share_a_program():
    """Frequencies and attention scale change the output of one compiled program."""
    params, tokens = random_params(SMALL), TOKENS[:, :-1]
    base = hidden(SMALL, params, tokens)
    run = compiled_forward(SMALL, WINDOWS)
    programs = run._cache_size()
    for change in ({"attn_scale": np.float32(0.5)}, {"freqs": np.float32([1.0, 0.5])}):
        assert np.abs(hidden(SMALL, params, tokens, **change) - base).max() > 1e-3
    assert run._cache_size() == programs


# ------------------------------------------------------------------------------------------------
# What a token can see. Equal means bitwise: the same program ran, on the same numbers.
# ------------------------------------------------------------------------------------------------


def changed(tokens, at: int):
    """`tokens` with another id at one position of every row."""
    other = tokens.copy()
    other[:, at] = (other[:, at] + 1) % BOS
    return other


def moved(cfg, tokens, other, windows=WIDE, **params) -> list[int]:
    """Positions at which the outputs for two batches differ, in any row."""
    params = random_params(cfg) | {
        name: np.zeros_like(random_params(cfg)[name]) if x == 0 else x for name, x in params.items()
    }
    one, two = (hidden(cfg, params, x, windows) for x in (tokens, other))
    return np.flatnonzero((one != two).any(axis=(0, 2))).tolist()


# Smear, key offset and the bigram hash look at the token before whatever its document. Without:
ALONE = {"smear_lambda": 0, "bigram_table": 0}


@pytest.mark.parametrize("at", [0, 1, 2, 10, ROW - 1])
def test_no_token_sees_the_future(at):
    tokens = rows(SMALL, 2, ROW)
    assert moved(SMALL, tokens, changed(tokens, at)) == list(range(at, ROW))


def lone_layer(**changes) -> T.Config:
    """One layer with attention, before one without."""
    kinds = {"long_layers": (), "paired_layers": (), **changes}
    return small_config(layers=2, value_layers=(0,), skip=(0, 1), backout=0, **kinds)


@pytest.mark.parametrize(
    "kind, windows, reach",
    [
        ("", (4, 1000), range(2, 7)),
        ("long_layers", (1000, 4), range(2, 8)),  # keys show the token before theirs: one further
        ("paired_layers", (4, 1000), range(2, 5)),  # in steps of half a token
        ("paired_layers", (5, 1000), range(2, 6)),  # from its first half to the last two before
    ],
)
def test_one_layer_sees_exactly_its_window_back(kind, windows, reach):
    cfg = lone_layer(**({kind: (0,)} if kind else {}))
    tokens = rows(cfg, 2, ROW)
    assert moved(cfg, tokens, changed(tokens, 2), windows, **ALONE) == list(reach)


@pytest.mark.parametrize("at", [1, 8])
def test_attention_does_not_cross_documents(at):
    tokens = rows(NO_OFFSET, 2, ROW, 0, 9)
    assert moved(NO_OFFSET, tokens, changed(tokens, at), **ALONE) == list(range(at, 9))


@pytest.mark.parametrize("part", ALONE)
def test_smear_and_bigram_hash_cross_documents_by_one_token(part):
    tokens = rows(NO_OFFSET, 2, ROW, 0, 9)
    off = {name: 0 for name in ALONE if name != part}
    assert moved(NO_OFFSET, tokens, changed(tokens, 7), **off) == [7, 8]
    assert moved(NO_OFFSET, tokens, changed(tokens, 8), **off) == list(range(8, ROW))


def test_key_offset_crosses_documents():
    """The key of a BOS shows the document before. The BOS itself sees one key, whatever it is."""
    tokens = rows(SMALL, 2, ROW, 0, 9)
    for at in (1, 8):
        want = [*range(at, 9), *range(10, ROW)]
        assert moved(SMALL, tokens, changed(tokens, at), **ALONE) == want


def test_the_number_of_documents_before_does_not_matter():
    tokens, other = rows(NO_OFFSET, 2, ROW, 0, 9), rows(NO_OFFSET, 2, ROW, 0, 4, 9)
    assert moved(NO_OFFSET, tokens, other, **ALONE) == list(range(4, 9))


def test_a_document_reads_the_same_wherever_it_stands():
    """Positions enter as differences only, so two places in a row differ by rounding."""
    tokens = rows(NO_OFFSET, 2, ROW, 0, 11)
    tokens[:, 3:9] = tokens[:, 14:20] = rows(NO_OFFSET, 2, 6, 0, seed=5)
    params = random_params(NO_OFFSET)
    x = hidden(
        NO_OFFSET, params | {name: np.zeros_like(params[name]) for name in ALONE}, tokens, WIDE
    )
    np.testing.assert_allclose(x[:, 3:9], x[:, 14:20], atol=3e-5)
    assert np.abs(x[:, 3:9] - x[:, 4:10]).max() > 0.1


def test_rows_of_a_batch_do_not_mix():
    params, tokens = random_params(SMALL), rows(SMALL, 2, ROW, 0)
    other = tokens.copy()
    other[0] = other[0, ::-1]
    one, two = (hidden(SMALL, params, x, WIDE) for x in (tokens, other))
    np.testing.assert_array_equal(one[1], two[1])
    assert (one[0] != two[0]).any()


def test_segments_rise_at_every_bos():
    tokens = jnp.array([[BOS, 1, 2, BOS, BOS, 3], [4, 5, BOS, 6, 7, 8]])
    got = T.segment_ids(tokens, BOS)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, [[1, 1, 1, 2, 3, 3], [0, 0, 1, 1, 1, 1]])


# ------------------------------------------------------------------------------------------------
# Parts: norm, mix, gate
# ------------------------------------------------------------------------------------------------


def draw(*shape, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_norm_against_float64(scale):
    x = (draw(3, 5, 64) * scale).astype(np.float32)
    want = reference.rms(np.asarray(x, np.float64))
    np.testing.assert_allclose(T.norm(x), want, rtol=1e-6, atol=1e-7)


def test_norm_takes_its_statistics_in_float32_and_keeps_the_dtype():
    x = jnp.asarray(draw(4, 4096) + 1, jnp.bfloat16)
    got, want = T.norm(x), reference.rms(np.asarray(x, np.float64))
    assert got.dtype == jnp.bfloat16
    # one rounding to 8 bits at the end, 2^-8 at most, and none before
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2.0**-8 + 1e-6)


def test_norm_of_zero_is_zero():
    assert not np.any(T.norm(jnp.zeros((2, 8))))


def test_mix_adds_in_float32_and_rounds_once():
    x, y = (jnp.asarray(draw(4096, seed=seed), jnp.bfloat16) for seed in (0, 1))
    got = jit(T.mix)((np.float32(1.003), x), (np.float32(-0.997), y))
    assert got.dtype == jnp.bfloat16
    want = 1.003 * np.asarray(x, np.float64) - 0.997 * np.asarray(y, np.float64)
    terms = np.abs(np.asarray(x, np.float64)) + np.abs(np.asarray(y, np.float64))
    assert (
        np.abs(np.asarray(got, np.float64) - want) <= 2.0**-8 * np.abs(want) + 1e-6 * terms
    ).all()


def test_gradients_of_mixing_weights_are_summed_in_float32():
    """A weight's gradient is a sum over all tokens: in bfloat16 it was up to 45 % off."""
    x, out_grad = (jnp.asarray(draw(64, 512, seed=seed) + 0.1, jnp.bfloat16) for seed in (0, 1))
    run = jit(jax.grad(lambda w: jnp.sum((T.mix((w, x)) * out_grad).astype(jnp.float32))))
    got = run(np.float32(1.3))
    want = np.sum(np.asarray(x, np.float64) * np.asarray(out_grad, np.float64))
    assert got.dtype == jnp.float32
    assert float(got) == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gate_reads_the_first_twelve_features_in_float32(dtype):
    x, weights = jnp.asarray(draw(2, 5, 32), dtype), draw(4, 12)
    got = T.gate(x, weights)
    assert got.dtype == jnp.float32 and got.shape == (2, 5, 4)
    want = reference.sigmoid(np.asarray(x, np.float64)[..., :12] @ weights.T.astype(np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-5)


# ------------------------------------------------------------------------------------------------
# Parts: positions, RoPE, paired heads, key offset, smear
# ------------------------------------------------------------------------------------------------

FREQS = np.float32([1.0, 0.4, 0.05])  # of heads 12 wide: pairs (i, i + 6), of which i < 3 turn


def test_positions_count_tokens_or_their_halves():
    heads = T.Heads(6, 8, window=5)
    np.testing.assert_array_equal(T.positions(3, heads), [[0], [1], [2]])
    want = [[0, 1], [2, 3], [4, 5]]  # even heads, odd heads
    np.testing.assert_array_equal(T.positions(3, replace(heads, paired=True)), want)


def test_rope_tables_turn_half_of_the_pairs():
    positions = np.array([[0, 1], [2, 3], [40_000, 40_001]])
    cos, sin = T.rope_tables(FREQS, positions)
    assert cos.shape == sin.shape == (3, 2, 6) and cos.dtype == sin.dtype == jnp.float32
    angles = (positions[..., None].astype(np.float32) * FREQS).astype(np.float64)
    np.testing.assert_allclose(cos[..., :3], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin[..., :3], np.sin(angles), atol=1e-6)
    assert (cos[..., 3:] == 1).all() and (sin[..., 3:] == 0).all()


@jit
def roped(x_btnh, positions_tn):
    return T.rope(x_btnh, *T.rope_tables(FREQS, positions_tn))


@pytest.mark.parametrize("heads", [1, 4])
def test_rope_turns_every_head_by_its_own_position(heads):
    """With one column of positions all heads turn alike."""
    x = draw(2, 5, 4, 12)
    positions = np.random.default_rng(0).integers(0, 50, (5, heads))
    got = np.asarray(roped(x, positions))
    for row, token, head in np.ndindex(2, 5, 4):
        position = positions[token, head % heads]
        want = reference.turned(x[row, token, head].astype(np.float64), position, FREQS)
        np.testing.assert_allclose(got[row, token, head], want, atol=5e-6)
    np.testing.assert_array_equal(got[..., [3, 4, 5, 9, 10, 11]], x[..., [3, 4, 5, 9, 10, 11]])


def test_rope_makes_scores_depend_on_the_distance_only():
    q, k = (
        roped(np.broadcast_to(draw(12, seed=seed), (1, 40, 1, 12)), np.arange(40)[:, None])
        for seed in (0, 1)
    )
    scores = np.asarray(q, np.float64)[0, :, 0] @ np.asarray(k, np.float64)[0, :, 0].T
    for distance in range(-39, 40):
        along = np.diagonal(scores, distance)
        np.testing.assert_allclose(along, along[0], atol=1e-4)  # of scores of size 3
    assert np.ptp(scores[0]) > 1


def test_rope_keeps_the_dtype():
    x = jnp.asarray(draw(1, 3, 2, 12), jnp.bfloat16)
    assert jax.eval_shape(roped, x, np.arange(3)[:, None]).dtype == jnp.bfloat16


def test_paired_heads_follow_each_other_along_the_row():
    """Row 2t of the doubled sequence is the first half of the heads of token t, 2t + 1 the rest."""
    x = draw(2, 5, 6, 8)
    got = np.asarray(T.pair_heads(x))
    assert got.shape == (2, 10, 3, 8)
    for t in range(5):
        np.testing.assert_array_equal(got[:, 2 * t], x[:, t, :3])
        np.testing.assert_array_equal(got[:, 2 * t + 1], x[:, t, 3:])


def test_key_offset_moves_the_dimensions_that_stand_still():
    x = draw(2, 5, 3, 12)
    want = x.copy()
    for t in range(1, 5):  # the first token keeps its own
        want[:, t, :, [3, 4, 5, 9, 10, 11]] = x[:, t - 1][..., [3, 4, 5, 9, 10, 11]].transpose(
            2, 0, 1
        )
    np.testing.assert_array_equal(T.key_offset(jnp.asarray(x)), want)


def test_key_offset_moves_what_rope_leaves():
    """A dimension either turns or is taken from the token before, whatever the head width."""

    @jit
    def run(ones_h, freqs):
        ones = jnp.broadcast_to(ones_h, (1, 2, 1, ones_h.size))
        turned = T.rope(ones, *T.rope_tables(freqs, jnp.ones((2, 1), int)))
        return turned, T.key_offset(ones * jnp.arange(2.0)[None, :, None, None])

    for h in (4, 20):
        turned, offset = run(np.ones(h, np.float32), np.ones(h // 4, np.float32))
        still, stepped = turned[0, 1, 0] == 1, offset[0, 1, 0] == 0
        np.testing.assert_array_equal(still, stepped)
        assert stepped.sum() == h // 2


def test_smear_adds_the_token_before_as_it_was():
    x, weights, strength = draw(2, 5, 32), draw(1, 12, seed=1), jnp.float32(0.7)
    smear = jit(T.smear)
    got = smear(x, weights, strength)
    want = x.astype(np.float64)
    want[:, 1:] += 0.7 * reference.sigmoid(x[:, 1:, :12] @ weights.T) * x[:, :-1]
    np.testing.assert_allclose(got, want, atol=2e-6)
    np.testing.assert_array_equal(smear(x, weights, jnp.float32(0)), x)
    x = jnp.asarray(x, jnp.bfloat16)
    assert jax.eval_shape(T.smear, x, weights, strength).dtype == jnp.bfloat16


# ------------------------------------------------------------------------------------------------
# Parts: tables
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table_rows", [16, 520, 251_520])
def test_bigram_ids_are_the_hash_in_int32(table_rows):
    """Ids up to 65535 wrap around: 36313 * 65535 is above 2**31, and 27191 * 251519 as well."""
    tokens = np.random.default_rng(0).integers(0, 2**16, (3, 500)).astype(np.int32)
    tokens[:, :3] = [[0, 0, 0], [65535, 65535, 65535], [50256, 50256, 50256]]
    got = np.asarray(jit(T.bigram_ids, static_argnums=1)(tokens, table_rows))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, [reference.bigrams(row, table_rows) for row in tokens])
    assert (np.asarray(got[:, 0]) == table_rows - 1).all()
    assert 0 <= got[:, 1:].min() and got[:, 1:].max() < table_rows - 1
    assert (36313 * tokens.astype(np.int64) >= 2**31).any()
    pairs = zip(tokens[0, 1:-1].tolist(), tokens[0, 2:].tolist(), strict=True)
    wrapped = reference.wrapped
    signed = [wrapped(36313 * now) ^ wrapped(27191 * before) for before, now in pairs]
    assert min(signed) < 0  # where the modulo of C would be negative


@pytest.mark.parametrize("length", [1, 2, 3])
def test_bigram_ids_of_short_rows(length):
    """Token 1 is hashed with the row of token 0, 519, and not with its id."""
    tokens = np.array([[7, 8, 9], [1, 8, 9]], np.int32)[:, :length]
    got = np.asarray(jit(T.bigram_ids, static_argnums=1)(tokens, 520))
    np.testing.assert_array_equal(got, [reference.bigrams(row, 520) for row in tokens])
    np.testing.assert_array_equal(got[0, :2], got[1, :2])


def test_look_up_gives_every_table_its_rows():
    """Tables whose rows say which they are."""
    tokens = rows(SMALL, 2, 6, 0)
    ids = jit(lambda tokens: T.table_ids(SMALL, tokens))(tokens)
    assert set(ids) == set(T.TABLES)
    assert {str(x.dtype) for x in ids.values()} == {"int32"}
    hashes = [reference.bigrams(row, 520) for row in tokens]
    want = {
        "embed": tokens,
        "value_tables": np.stack([tokens, 104 + tokens]),
        "bigram_table": np.array(hashes),
    }
    tables = {
        name: np.arange(row.shape[0])[:, None] * np.ones((1, 32), np.float32)
        for name, row in T.param_table(SMALL).items()
        if name in T.TABLES
    }
    found = jit(lambda *args: T.look_up(SMALL, *args))(tables, tokens)
    np.testing.assert_array_equal(ids["value_tables"], tokens)
    for name in T.TABLES:
        found[name] = np.asarray(found[name])
        assert found[name].shape == (*want[name].shape, 32)
        np.testing.assert_array_equal(found[name][..., 31], want[name])


# ------------------------------------------------------------------------------------------------
# Parts: one layer
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "i, kind",
    [
        (0, "paired"),
        (5, "paired, values"),
        (2, "short, values"),
        (1, "long"),
        (4, "long, values"),
    ],
)
def test_attention_of_one_layer(i, kind):
    """Six heads: the pairs are (0, 3), (1, 4), (2, 5), and heads 1, 3, 5 have odd positions."""
    cfg, hyper = SIX, hyper_for(SIX)
    assert ("paired" in kind) == (i in cfg.paired_layers)
    assert ("long" in kind) == (i in cfg.long_layers)
    params, tokens = random_params(cfg), rows(cfg, 2, 16, 3, 9)
    x = draw(2, 16, 48)
    values = draw(2, 16, 48, seed=1) if "values" in kind else None
    window = 11 if "long" in kind else 5

    @jit
    def layer(params, x, values, tokens):
        segments = T.segment_ids(tokens, cfg.bos)
        return T.attention(params, cfg, T.PLAIN, i, x, values, segments, window, hyper)

    got = layer(params, x, values, tokens)
    hyper = hyper._replace(freqs=hyper.freqs.astype(np.float64))
    for row in range(2):
        documents = np.cumsum(tokens[row] == cfg.bos)
        value = None if values is None else values[row].astype(np.float64)
        exact, x_td = reference.exact(params), x[row].astype(np.float64)
        want = reference.attention(cfg, exact, i, x_td, value, documents, window, hyper)
        want *= params["post_lambdas"][i, 0]
        np.testing.assert_allclose(got[row], want, atol=1e-5 * np.abs(want).max())


def test_mlp_is_relu_squared_between_the_banks_two_halves():
    params, x = random_params(SMALL), draw(2, 5, 32)
    for i in (0, 3):
        want = reference.mlp(SMALL, reference.exact(params), i, x.astype(np.float64))
        want *= params["post_lambdas"][i, 1]
        got = jit(lambda params, x, i=i: T.mlp(params, SMALL, T.PLAIN, i, x))(params, x)
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


# ------------------------------------------------------------------------------------------------
# Gradients, dtypes, FLOPs
# ------------------------------------------------------------------------------------------------


def fresh_params(cfg):
    """Those of step 0."""
    return jit(lambda: T.init_state(cfg, 1, 0)["params"])()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exactly_what_is_used_gets_a_gradient(dtype):
    """Rows of tables that no token looks up and scalars of the skip layer do not."""
    cfg = replace(SMALL, compute_dtype=dtype)
    _, grads = loss_and_gradients(cfg)
    for name, grad in grads.items():
        assert grad.dtype == np.float32 and np.isfinite(grad).all(), name
    used = {name: np.ones(grad.shape[:1], bool) for name, grad in grads.items()}
    tokens = TOKENS[:, :-1]
    seen = np.isin(np.arange(cfg.vocab), tokens)
    used["embed"], used["value_tables"] = seen, np.tile(seen, 2)
    hashes = [reference.bigrams(row, cfg.bigram_rows) for row in tokens]
    used["bigram_table"] = np.isin(np.arange(cfg.bigram_rows), hashes)
    for name in ("x0_lambdas", "bigram_lambdas", "qkv_lambda", "o_lambda"):
        used[name][2] = False  # layer 2 has no attention
    for name, want in used.items():
        reached = (grads[name] != 0).reshape(len(want), -1).any(axis=1)
        np.testing.assert_array_equal(reached, want, err_msg=name)
    for name in ("resid_lambdas", "post_lambdas"):
        np.testing.assert_array_equal(grads[name] != 0, [[1, 1], [1, 1], [0, 1], [1, 1]])


def calm_params(cfg: T.Config):
    """Such that no parameter's gradient is a sum over tokens of terms that nearly cancel."""
    return random_params(cfg, seed=4)


@pytest.mark.parametrize("cfg", [SMALL, AUTO], ids=lambda cfg: cfg.kernels)
def test_gradients_survive_bfloat16(cfg):
    """Every parameter's is within some percent of the float32 one's, sums over tokens too."""
    _, want = loss_and_gradients(SMALL, calm_params)
    _, got = loss_and_gradients(replace(cfg, compute_dtype="bfloat16"), calm_params)
    for name in want:
        error = np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name])
        assert error < 0.06, (name, error)  # seen: up to 0.045


def test_activations_have_the_compute_dtype():
    for dtype in ("float32", "bfloat16"):
        cfg = small_config(compute_dtype=dtype)
        copies = jax.eval_shape(lambda p, cfg=cfg: T.compute_copies(cfg, p), random_params(cfg))
        x = jax.eval_shape(run_forward(cfg, WINDOWS), copies, TOKENS[:, :-1], hyper_for(cfg))
        assert x.dtype == cfg.dtype and x.shape == (2, ROW, 32)


def test_a_fresh_model_knows_nothing_and_almost_all_of_it_learns():
    """The loss is that of 104 equal chances, unused ids too. Down-projections, the smear's strength
    and the bigram table start at zero, so what stands before them has no gradient yet."""
    (_, plain), grads = loss_and_gradients(SMALL, fresh_params)
    assert plain / (2 * ROW) == pytest.approx(np.log(104), abs=0.02)
    still = {name for name, grad in grads.items() if not grad.any()}
    assert still == {"smear_gate", "bigram_lambdas"}
    assert not grads["mlp_bank"][:4].any() and grads["mlp_bank"][4:].any(axis=(1, 2)).all()
    assert grads["attn_bank"].any(axis=(1, 2)).all()


def test_flops_per_token():
    """Six per weight of a matmul: 40 square matrices, 22 of four squares, the head; tables and
    gates cost nothing."""
    assert T.flops_per_token(T.Config()) == 6 * (40 * 768**2 + 22 * 3072 * 768 + 50304 * 768)
    assert T.flops_per_token(T.Config()) == pytest.approx(685e6, rel=1e-3)
    assert T.flops_per_token(SMALL) == 6 * (12 * 32**2 + 8 * 128 * 32 + 104 * 32)
    assert T.flops_per_token(replace(SMALL, bigram_rows=1040)) == T.flops_per_token(SMALL)
