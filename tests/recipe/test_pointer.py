"""The copy pointer: against numbers of its authors' program, and NumPy in float64.

Limits are relative to the largest magnitude of an array. Of the golden numbers (cplm.*, see
tests/golden/record92/README.md) float32 and float64 runs of the original differ by up to 1.3e-6.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, small_config
from programs import QUICK, first_state, quick
from test_record92 import arrays, check, check_stored, draw, facts
from training import BRIEF, back_to, train_losses, trained
from training import arrays as saved_arrays

import train_gpt as T

LOSSES = {"plain": T.cross_entropy, "own gradient": T.fused_cross_entropy}

# ---- Golden numbers ----------------------------------------------------------------------------

GOLDEN, ABOUT = arrays("cplm"), facts("cplm")
WEIGHTS = {"full": ((1.0, 0.5, 0.2), 0.25), "sampled": ((1.0, 0.3), 0.15), "eval": ((1.0,), 0.0)}
T_ROW = sum(ABOUT["segment_lengths"])


def golden_config() -> T.Config:
    """Return a config with the width, vocabulary and blocks of the golden file."""
    blocks = ABOUT["block_train"], ABOUT["block_eval"]
    sizes = {"width": ABOUT["dim"], "vocab": ABOUT["vocab"], "real_tokens": ABOUT["copy_id"]}
    own = {"pointer_width": ABOUT["copy_dim"], "pointer_reach": blocks, "logit_cap": (23, 5, 7.5)}
    return small_config(**sizes, **own, loss_chunk=100)


def golden_parameters() -> dict[str, np.ndarray]:
    """Return the parameters of upstream under our names, and hidden states."""
    d, v, w = ABOUT["dim"], ABOUT["vocab"], ABOUT["copy_dim"]
    shapes = (T_ROW, d), (d, v), (w, d), (w, d), (w,)
    scales = 1, 0.1, d**-0.5, d**-0.5, 1
    seed = ABOUT["seed"] * 1000 + 960
    each = enumerate(zip(shapes, scales, strict=True))
    hidden, head, q, k, sink = (np.float32(draw(seed + i, s) * scale) for i, (s, scale) in each)
    own = {"pointer_qk": np.stack([q, k]), "pointer_sink": sink, "pointer_gain": np.float32([3])}
    return own | {"hidden": hidden, "head": head.T}


def golden_aims(case: str) -> T.Targets:
    """Return targets and prefixes of the row, as ids or as indices of the given candidates."""
    targets = GOLDEN["tokens"][1:]
    prefixes = arrays("model")["prefix_table"][targets]
    ids = GOLDEN["sampled/classes"] if case == "sampled" else np.empty(0, np.int32)
    if ids.size:
        place = np.full(ABOUT["vocab"] + 1, -1, np.int32)
        place[ids] = np.arange(ids.size)
        targets, prefixes = place[targets], place[prefixes]
    return T.Targets(*(jnp.asarray(x, jnp.int32)[None] for x in (ids, targets, prefixes)))


@functools.cache
def golden_outcome(case: str, loss: str):
    """Return (intermediate results, gradients) of T.batch_loss on given hidden states."""
    cfg, params, all_targets = golden_config(), golden_parameters(), golden_aims(case)
    weights, prefix = WEIGHTS[case]
    stage, hyper = None, T.hyper_at(cfg, 0)
    if case != "eval":
        stage = T.Stage(1.0, T_ROW, T_ROW, 0, (8, 32), 1.0, weights, weights, (prefix,))
        hyper = hyper._replace(loss_weights=np.float32(weights), prefix_weight=np.float32(prefix))
    masked = None
    if case == "eval":  # upstream sets logits of impossible next tokens to -60
        rng = np.random.default_rng(ABOUT["seed"] * 1000 + 971)
        rare = rng.random((ABOUT["vocab"],) * 2) < 0.05
        inputs, targets = GOLDEN["tokens"][:-1], GOLDEN["tokens"][1:]
        rare[inputs, targets] = False
        rare[:, ABOUT["copy_id"]] = False
        masked = rare[inputs]
    rows = T.Rows(jnp.asarray(GOLDEN["tokens"][None]), None, None, all_targets)
    segments = np.repeat(np.arange(1, 4), ABOUT["segment_lengths"])[None].astype(np.int32)

    def run(params):
        seen = {}

        def telling(x, head, targets, weights, cfg, pointed):
            if masked is None:
                losses = T.chunk_losses(x, head, targets, cfg)
            else:
                logits = jnp.where(masked, -60.0, T.cap_logits(x @ head.T, cfg))
                losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=1)
            mixed = T.mix_pointed(losses, pointed)
            seen["loss_per_token"] = jnp.sum(mixed * weights, axis=1)
            seen["p_copy"], seen["a_sink"] = pointed.T
            seen["alpha"] = jnp.exp(-losses[:, -1])
            return LOSSES[loss](x, head, targets, weights, cfg, pointed)

        found = (
            {"head": params["head"][all_targets.candidates]} if all_targets.candidates.size else {}
        )
        model = T.Model({}, cfg, T.PLAIN._replace(cross_entropy=telling), stage, hyper, None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(T, "segment_ids", lambda *_: jnp.asarray(segments))
            patch.setattr(T, "forward", lambda *_: T.norm(params["hidden"])[None])
            return T.batch_loss(params, found, model, rows)[0], seen

    params = jax.tree.map(jnp.asarray, params)
    (_, seen), grads = quick(jax.value_and_grad(run, has_aux=True), params)
    return seen, grads


@pytest.mark.parametrize("case", WEIGHTS)
def test_golden_shares_and_losses_of_every_token(case):
    seen, _ = golden_outcome(case, "plain")
    for key, x in seen.items():
        check(f"{case} {key}", x, GOLDEN[f"{case}/{key}"], 1e-5)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", ["full", "sampled"])
def test_golden_gradients(case, loss):
    _, grads = golden_outcome(case, loss)
    grads = {name: np.asarray(x) for name, x in grads.items()}
    theirs = {"hidden": grads["hidden"], "head": grads["head"].T, "gain": grads["pointer_gain"]}
    theirs |= dict(zip(("copy_q", "copy_k"), grads["pointer_qk"], strict=True))
    for name, x in (theirs | {"sink": grads["pointer_sink"]}).items():
        check_stored(GOLDEN, f"{case}/grad/{name}", x, 1e-5)


# ---- Against NumPy -----------------------------------------------------------------------------

CFG = small_config(pointer_width=8, pointer_reach=(16, 32), loss_chunk=50)


def exact_shares(cfg, params, x_td, tokens, reach, cap):
    """Return shares [t, 2] in float64, query by query and key by key."""
    x = np.float64(x_td)
    w_q, w_k = np.float64(params["pointer_qk"])
    q, k = (
        y / np.sqrt(np.mean(y * y, axis=1, keepdims=True) + 2.0**-23)
        for y in (x @ w_q.T, x @ w_k.T)
    )
    q *= float(params["pointer_gain"][0])
    segment, since, segments = 0, 0, []
    for i, token in enumerate(tokens[:-1]):
        begins = i == 0 or (cfg.documents and token == cfg.bos) or (cap and since == cap)
        segment, since = (segment + 1, 1) if begins else (segment, since + 1)
        segments.append(segment)
    found = np.zeros((len(x), 2))
    for i in range(len(x)):
        seen = [j for j in range(i) if segments[j] == segments[i] and j // reach >= i // reach - 1]
        scores = np.append(k[seen] @ q[i], q[i] @ np.float64(params["pointer_sink"]))
        shares = np.exp(scores / np.sqrt(cfg.pointer_width) - scores.max())
        shares /= shares.sum()
        found[i] = sum(shares[:-1][tokens[seen] == tokens[i + 1]]), shares[-1]
    return found


def inputs(t: int, b: int = 2):
    """Return repeating tokens, segments, features and parameters for a row of t tokens."""
    rng = np.random.default_rng(t)
    tokens = rng.integers(0, 9, (b, t + 1)).astype(np.uint16)
    tokens[:, [3, t // 2]] = BOS
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    x = normal((b, t, CFG.width))
    qk = normal((2, 8, CFG.width))
    params = {"pointer_qk": qk, "pointer_sink": normal(8), "pointer_gain": np.float32([1.5])}
    return tokens, x, params | {"head": normal((CFG.vocab, CFG.width))}


def rows_of(tokens, ids=()) -> T.Rows:
    ids = np.broadcast_to(np.array(ids, np.int32), (len(tokens), len(ids)))
    return T.Rows(tokens, None, None, T.Targets(ids, *(tokens[:, 1:].astype(np.int32),) * 2))


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("t", [16, 64, 75, 5])
def test_shares_against_float64(t, trains, documents):
    """For rows of one block, of several blocks, and shorter than a block."""
    cfg = replace(CFG, documents=documents)
    stage = cfg.stages[0] if trains else None
    cap = cfg.attention_cap if trains and documents else 0
    tokens, x, params = inputs(t)
    reach = cfg.pointer_reach[not trains]
    model = T.Model(params, cfg, T.PLAIN, stage, T.hyper_at(cfg, 0), None)
    got = quick(lambda x: T.pointer_probs(model, rows_of(tokens), x), x)
    want = [exact_shares(cfg, params, *row, reach, cap) for row in zip(x, tokens, strict=True)]
    assert np.mean(np.array(want)[..., 0] > 0) > 0.2 or t == 5
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("at_once", [8, 10])
def test_queries_in_parts_have_the_same_results(at_once, monkeypatch):
    tokens, x, params = inputs(64)
    model = T.Model(params, CFG, T.PLAIN, None, T.hyper_at(CFG, 0), None)

    def run(x):
        shares = T.pointer_probs(model, rows_of(tokens), x)
        return jnp.sum(shares * jnp.arange(128.0).reshape(64, 2)[None]), shares

    want = quick(jax.value_and_grad(run, has_aux=True), x)
    monkeypatch.setattr(T, "QUERIES_AT_ONCE", at_once)
    got = quick(jax.value_and_grad(run, has_aux=True), x)
    for y, z in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("ids", [(), (*range(0, 9), 30, 44, BOS, 97, 100)], ids=["all", "some"])
def test_the_mixture_against_float64(loss, ids):
    """In validation. The softmax is over all ids or over candidates, `<copy>` (97) included. The
    probabilities of all tokens sum to one."""
    tokens, x, params = inputs(64)
    found = {"head": params["head"][rows_of(tokens, ids).targets.candidates]} if ids else {}
    place = {number: i for i, number in enumerate(ids or range(CFG.vocab))}
    rows = rows_of(tokens, ids)
    at = np.vectorize(place.get)(tokens[:, 1:]).astype(np.int32)
    rows = rows._replace(targets=T.Targets(rows.targets.candidates, at, at))
    model = T.Model(
        {}, CFG, T.PLAIN._replace(cross_entropy=LOSSES[loss]), None, T.hyper_at(CFG, 0), None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T, "forward", lambda *_: jnp.asarray(x))
        weighted, plain = quick(lambda p: T.batch_loss(p, found, model, rows), params)
    a, b, c = CFG.logit_cap
    total, losses = 0.0, 0.0
    for row, features in zip(tokens, np.float64(x), strict=True):
        shares = exact_shares(CFG, params, features, row, 32, 0)
        head = np.float64(params["head"])[list(place)]
        chances = np.exp(a / (1 + np.exp(-(features @ head.T + b) / c)))
        chances /= chances.sum(1, keepdims=True)
        gate = chances[:, place[97]]
        others = np.delete(chances, place[97], axis=1) / (1 - gate[:, None])
        believed = 1 - gate * (1 - shares[:, 1])
        np.testing.assert_allclose(others.sum(1) * believed + gate * (1 - shares[:, 1]), 1)
        chance = chances[np.arange(64), [place[y] for y in row[1:]]] / (1 - gate) * believed
        losses -= np.sum(np.log(chance + gate * shares[:, 0]))
        total += np.mean(gate * shares[:, 0] / chance)
    assert total > 0.01  # the pointer has an effect
    np.testing.assert_allclose([weighted, plain], losses, rtol=2e-6)


@pytest.mark.parametrize("chunk", [48, 10])
def test_the_fused_loss_equals_the_plain_loss(chunk):
    """With several targets, and some zero weights."""
    rng = np.random.default_rng(0)
    x, head = (rng.standard_normal((n, 32), np.float32) for n in (48, 104))
    targets = rng.integers(0, 97, (48, 4)).astype(np.int32)
    targets[:, -1] = 97
    targets[3, :3] = 7
    weights = rng.uniform(0, 1, (48, 4)).astype(np.float32)
    weights[:, -1] = weights[5] = 0
    pointed = rng.dirichlet(np.ones(3), 48)[:, :2].astype(np.float32)
    cfg = small_config(loss_chunk=chunk)

    def run(loss, x, head, pointed):
        return loss(x, head, targets, weights, cfg, pointed)

    each = (functools.partial(run, loss) for loss in LOSSES.values())
    plain, own = (
        quick(jax.value_and_grad(f, (0, 1, 2), has_aux=True), x, head, pointed) for f in each
    )
    for got, want in zip(jax.tree.leaves(own), jax.tree.leaves(plain), strict=True):
        assert got.dtype == want.dtype and np.any(want)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6 * np.abs(want).max())
    assert not np.any(own[1][2][5]), "a token without weight"


@functools.cache
def slopes(loss):
    """Return a jitted function: the gradients for (x, head, targets, weights, pointed)."""
    cfg = small_config(logit_cap=(23.0, 5.0, 7.5), loss_chunk=64)

    def weighted(x, head, targets, weights, pointed):
        return loss(x, head, targets, weights, cfg, pointed)[0]

    return jax.jit(jax.value_and_grad(weighted, (0, 1)), compiler_options=QUICK)


@pytest.mark.parametrize("strength", [8, 14, 20])
def test_gradients_with_a_gate_close_to_one(strength):
    """In bfloat16, terms of the order 1 / (1 - gate) almost cancel."""
    rng = np.random.default_rng(0)
    way = rng.standard_normal(64)
    way /= np.linalg.norm(way)
    x, head = rng.standard_normal((256, 64)) + strength * way, 0.1 * rng.standard_normal((104, 64))
    head -= np.outer(head @ way + 0.25, way)
    head[97] = way
    x, head = (np.asarray(jnp.asarray(y, jnp.bfloat16), np.float32) for y in (x, head))
    targets = np.stack([rng.integers(0, 97, 256), np.full(256, 97)], axis=1).astype(np.int32)
    weights, pointed = (
        np.eye(1, 2).repeat(256, axis=0),
        np.float32([[0.7, 0.3]]).repeat(256, axis=0),
    )

    def run(loss, dtype):
        args = (jnp.asarray(y, dtype) for y in (x, head))
        return jax.tree.leaves(slopes(loss)(*args, targets, weights, pointed))

    want = run(T.cross_entropy, "float32")
    logits = T.cap_logits(x @ head.T, small_config(logit_cap=(23.0, 5.0, 7.5)))
    assert np.median(jax.nn.softmax(logits)[:, 97]) > {8: 0.6, 14: 0.97, 20: 0.99}[strength]
    for loss in LOSSES.values():
        got = run(loss, "bfloat16")
        for y, z in zip(got, want, strict=True):
            y, z = np.asarray(y, np.float32), np.asarray(z)
            assert np.linalg.norm(y - z) < 0.02 * np.linalg.norm(z)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_finite_for_a_certain_softmax_and_gate(loss):
    """With probabilities as close to one and zero as the cap allows."""
    x, targets = jnp.ones((4, 32)), jnp.array([[0, 97], [1, 97], [0, 97], [1, 97]])
    head = jnp.zeros((104, 32)).at[97].set(50.0)
    cfg, weights = small_config(logit_cap=(64.0, 0.0, 1.0)), jnp.eye(1, 2).repeat(4, axis=0)
    for pointed in (jnp.zeros((4, 2)), jnp.eye(2)[jnp.array([0, 1, 0, 1])]):

        def run(head, pointed):
            return LOSSES[loss](x, head, targets, weights, cfg, pointed)[0]

        found = quick(jax.value_and_grad(run, (0, 1)), head, pointed)
        assert all(np.isfinite(y).all() for y in jax.tree.leaves(found))


# ---- Inputs ------------------------------------------------------------------------------------


def test_candidates_include_the_id_of_copies():
    """Their number stays, and the walk through the vocabulary is correct."""
    row = np.arange(20).astype(np.uint16)
    prefix_v = np.full(104, -1, np.int32)
    all_targets, offset = T.row_targets(row, 3, 48, prefix_v, [97])
    assert 97 in all_targets.candidates and len(all_targets.candidates) == 48
    np.testing.assert_array_equal(all_targets.candidates[all_targets.ids], row[1:])
    without, before = T.row_targets(row, 3, 48, prefix_v)
    assert len({*without.candidates} - {*all_targets.candidates}) <= 1 and before >= offset
    with pytest.raises(T.UserError, match="20 different targets, more than its 19"):
        T.row_targets(row, 3, 19, prefix_v, [97])
    assert len(T.row_targets(row, 3, 19, prefix_v)[0].candidates) == 19


def test_the_id_of_copies_is_the_first_unused_id():
    row = np.arange(20).astype(np.uint16)
    all_targets, _ = T.row_targets(row, 3, 48, np.full(70000, -1, np.int32), [65536])
    assert all_targets.candidates[-1] == 65536
    np.testing.assert_array_equal(all_targets.candidates[all_targets.ids], row[1:])


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_of_the_mixture_has_no_bound(loss):
    """A bounded loss would be too low for a confident wrong model."""
    x, head = jnp.ones((2, 32)), jnp.zeros((104, 32)).at[1].set(0.25)
    targets, weights = jnp.array([[0, 97], [1, 97]]), jnp.eye(1, 2).repeat(2, axis=0)
    cfg = small_config(logit_cap=(46.0, 0.0, 1.0))

    def run(x):
        pointed = jnp.array([[0.0, 1.0]]).repeat(2, axis=0)
        return LOSSES[loss](x, head, targets, weights, cfg, pointed)[0]

    total, grad = quick(jax.value_and_grad(run), x)
    np.testing.assert_allclose(total, 46 / (1 + np.exp(-8)) - 23, rtol=1e-5)
    assert np.any(grad[0])


def test_a_vocabulary_needs_an_id_for_copies():
    with pytest.raises(T.UserError, match="pointer_width=8 must be 0, as vocab=97 has no unu"):
        T.validate(replace(CFG, vocab=97))


def test_the_preset_is_the_record_with_fewer_steps():
    cfg, record = T.PRESETS["pointer"], T.PRESETS["speedrun"]
    assert cfg.boundaries == (0, 282, 599, 981, 1040, 1060)
    assert cfg.tokens_after(cfg.steps) == 292_225_024 <= 293e6
    # Stages by the rule of the record, with 134 fewer steps.
    quotients = np.array([0.2854, 0.3209, 0.3931 - 0.06 * 0.9994, 0.06 * 0.9994]) / 0.9994
    for base, steps in ((1122, record), (988, cfg)):
        ends = np.round(np.cumsum(quotients) * base) + [0, 0, 52, 52]
        assert [*ends] == [*steps.boundaries[1:-1]]
    stages = tuple(
        replace(x, share=y.share) for x, y in zip(cfg.stages, record.stages, strict=True)
    )
    changes = {"preset": "speedrun", "steps": record.steps, "pointer_width": 0, "stages": stages}
    assert replace(cfg, **changes) == record
    each = (T.flops_per_token(x, 0) for x in (cfg, record))
    assert next(each) - next(each) == 6 * 768 * 2 * 128
    table = T.param_specs(cfg)
    own = {name: row for name, row in table.items() if name not in T.param_specs(record)}
    assert sum(np.prod(row.shape) for row in own.values()) == 196_737  # the number of its authors
    assert {row.betas for row in own.values()} == {(0.9, 0.99)}
    assert {row.lr for row in own.values()} == {cfg.lr_adam}
    assert [row.decay for row in own.values()] == [cfg.decay_adam, 0, 0]


# ---- Programs and runs -------------------------------------------------------------------------

RUN = replace(
    BRIEF,
    layers=BRIEF.layers[:1],
    pointer_width=4,
    pointer_reach=(16, 16),
    steps=6,
    stages=(replace(BRIEF.stages[0], prefix_weights=(0.2,)),),
    checkpoint_every=2,
)


@pytest.mark.slow
@pytest.mark.parametrize("candidates", [48, 0])
def test_every_parameter_of_the_pointer_learns(candidates, shards, tmp_path):
    """With candidates and without. Mean squares of Adam show that gradients are not zero."""
    stages = tuple(replace(x, candidates=(candidates,)) for x in RUN.stages)
    cfg = replace(RUN, stages=stages, devices=1)
    end = saved_arrays(trained(cfg, tmp_path, shards) / "checkpoints/6")
    start = first_state(cfg)["params"]
    for name in ("pointer_qk", "pointer_sink", "pointer_gain"):
        assert np.all(end[f"second.{name}"] > 0), name
        assert np.all(end[f"params.{name}"] != start[name]), name
    assert np.all(end["second.head"][cfg.real_tokens] > 0), "that of `<copy>`"


@pytest.mark.slow
def test_runs_with_a_pointer_agree_on_any_number_of_devices_and_resume(shards, tmp_path):
    each = [trained(replace(RUN, devices=n), tmp_path / str(n), shards) for n in (1, 2, 8)]
    one, *others = map(train_losses, each)
    for losses in others:
        np.testing.assert_allclose(losses, one, rtol=2e-5)
    end = saved_arrays(each[1] / "checkpoints/6")
    trained(replace(RUN, devices=2), tmp_path / "2", shards, back_to(each[1], 4))
    assert train_losses(each[1]) == others[0]
    again = saved_arrays(each[1] / "checkpoints/6")
    assert all(np.array_equal(again[name], end[name]) for name in end)
