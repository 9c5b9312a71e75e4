"""Properties of the model. test_record92.py compares its numbers."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import BOS, small_config
from programs import features, jit, mesh_of, quick

import train_gpt as T

ROW = 24  # tokens
WIDE = (1000, 1000)
CFG = small_config()


@functools.cache
def random_params(cfg: T.Config = CFG) -> dict[str, np.ndarray]:
    """Return parameters without zeros."""
    rng, table = np.random.default_rng(0), T.param_specs(cfg)
    return {name: rng.normal(0, 0.3, row.shape).astype(np.float32) for name, row in table.items()}


def tokens_with(*starts: int, seed: int = 0) -> np.ndarray:
    """Return tokens int32 [2, ROW] with BOS only at `starts` of both rows."""
    tokens = np.random.default_rng(seed).integers(0, BOS, (2, ROW)).astype(np.int32)
    tokens[:, list(starts)] = BOS
    return tokens


@jit
def outputs(params, tokens, places):
    """Return the outputs for tokens with these rows of the n-gram table."""
    cfg = replace(CFG, val_windows=WIDE)
    model = T.Model(params, cfg, T.PLAIN, None, T.hyper_at(CFG, 0), T.sign_pool(CFG, 0))
    return features(model, tokens, tokens, places.swapaxes(0, 1))


# Smear and n-grams use earlier tokens of other documents. Without them:
ALONE = "smear_lambda", "ngram_table"


def moved(tokens, other, off=()) -> list[int]:
    """Return the positions at which the outputs for two batches differ in any bit."""
    params = random_params()
    params = params | {name: np.zeros_like(params[name]) for name in off}
    places = (T.ngram_hashes(x, CFG.ngram_rows) for x in (tokens, other))
    one, two = (
        np.asarray(outputs(params, x, at)) for x, at in zip((tokens, other), places, strict=True)
    )
    return np.flatnonzero((one != two).any(axis=(0, 2))).tolist()


def changed(tokens, at: int):
    """Return `tokens` with another id at one position of every row."""
    other = tokens.copy()
    other[:, at] = (other[:, at] + 1) % BOS
    return other


@pytest.mark.parametrize("at", [0, 1, 10, ROW - 1])
def test_no_token_sees_the_future(at):
    tokens = tokens_with()
    assert moved(tokens, changed(tokens, at)) == list(range(at, ROW))


@pytest.mark.parametrize("at", [1, 8])
def test_attention_stays_in_its_document_except_for_the_key_offset(at):
    """The key offset moves part of the last token's key to a BOS, which sees only its own key."""
    tokens = tokens_with(0, 9)
    assert moved(tokens, changed(tokens, at), off=ALONE)[: 9 - at] == list(range(at, 9))
    assert 9 not in moved(tokens, changed(tokens, at), off=ALONE)


@pytest.mark.parametrize("preset", T.PRESETS)
def test_the_layers_of_a_preset_have_matching_shapes(preset):
    cfg = T.PRESETS[preset]
    params = T.abstract_state(cfg, mesh_of(1))["params"]
    copies = jax.eval_shape(lambda params: T.compute_copies(cfg, params), params)
    x = jax.ShapeDtypeStruct((1, 128, cfg.width), cfg.dtype)
    if cfg.ngram_rows:
        copies["ngram_table"] = params["ngram_table"]

    def run(copies):
        signs = T.sign_pool(cfg, 0) if cfg.sign_rows else None
        model = T.Model(copies, cfg, T.PLAIN, None, T.hyper_at(cfg, 0), signs)
        tokens = np.zeros((1, 128), np.int32)
        return features(model, tokens, tokens, np.zeros((1, 2, 128), np.int32))

    assert jax.eval_shape(run, copies) == x


@pytest.mark.parametrize("kv", [2, 4])
def test_shared_keys_and_values_equal_a_copy_for_each_head(kv):
    """For 8 query heads and all kinds of layers."""
    layers = tuple(replace(layer, attends=layer.attends or "short") for layer in CFG.layers)
    full = replace(CFG, layers=layers, heads=8, width=128)
    few = T.validate(replace(full, kv_heads=kv))
    # With twice the weights, attention is so sharp that rounding errors grow to 4e-3 on some CPUs.
    params = {name: 0.5 * x for name, x in random_params(few).items()}
    attentions, h = len(layers), full.head_width
    qk = params["qk_bank"].reshape(attentions, 8 + kv, h, 128)
    q, k = np.split(qk, [8], axis=1)
    v = params["v_bank"].reshape(attentions, kv, h, 128)
    k, v = (np.repeat(x, 8 // kv, axis=1).reshape(attentions, 128, 128) for x in (k, v))
    qk = np.concatenate([q.reshape(attentions, 128, 128), k], axis=1)
    vo = np.stack([v, params["vo_bank"]], axis=1).reshape(-1, 128, 128)
    copied = params | {"qk_bank": qk.reshape(-1, 2 * h, 128), "vo_bank": vo}
    assert T.param_specs(few)["v_bank"].shape == (attentions, kv * h, 128)
    del copied["v_bank"]
    tokens = np.random.default_rng(0).integers(0, 90, (2, 32)).astype(np.int32)
    slots = np.random.default_rng(1).integers(0, 500, (2, 2, 32)).astype(np.int32)

    def run(cfg, params):
        signs = T.sign_pool(cfg, 0)
        model = T.Model(params, cfg, T.PLAIN, None, T.hyper_at(cfg, 0), signs)
        return features(model, tokens, tokens, slots)

    got = quick(functools.partial(run, few), params)
    want = quick(functools.partial(run, full), copied)
    np.testing.assert_allclose(got, want, atol=1e-4)  # measured: 7e-6


def test_shared_keys_have_no_attention_kernel():
    device = SimpleNamespace(device_kind="TPU v6 lite", platform="tpu")
    cfg = replace(T.PRESETS["speedrun"], kv_heads=2)
    kernels, why = T.choose_kernels(cfg, device)
    assert kernels.attend is T.PLAIN.attend and "do not share keys" in why
    assert kernels.blend is not T.PLAIN.blend


@pytest.mark.parametrize("stage", [None, CFG.stages[0]], ids=["validation", "training"])
def test_without_documents_a_row_is_one_segment(stage):
    """Neither the attention cap nor an id begins a segment."""
    tokens = np.random.default_rng(0).integers(65_530, 65_536, (2, 4 * CFG.attention_cap + 1))
    rows = T.Rows(tokens.astype(np.uint16), None, None, None)
    cfg = T.override(CFG, ["without=documents", "vocab=65536", "real_tokens=65536"])
    model = T.Model({}, cfg, T.PLAIN, stage, None, None)
    segments = np.asarray(T.segments_of(model, rows))
    assert segments.shape == (2, 4 * CFG.attention_cap) and len({*segments.flat}) == 1
    with_documents = model._replace(cfg=replace(cfg, documents=True, bos=65_535))
    parts = np.asarray(T.segments_of(with_documents, rows))
    assert (parts.max(axis=1) > 1).all()


def test_ngram_dropout_masks_rows_by_step_seed_and_tokens():
    """The mean stays. The mask of a row does not depend on its place in the batch."""
    cfg = replace(CFG, ngram_drop=0.25)
    tokens = np.random.default_rng(0).integers(0, 60_000, (8, 513)).astype(np.uint16)
    ones = np.ones((8, 2, 512, 4), np.float32)

    def weights_at(step, rows=tokens, **changes):
        of_run = replace(cfg, **changes)
        model = T.Model({}, of_run, T.PLAIN, cfg.stages[0], T.hyper_at(of_run, step), None)
        return np.asarray(T.ngram_dropout(model, ones[: len(rows)], rows))

    weights = weights_at(3)
    assert {*np.unique(weights)} == {0.0, np.float32(1 / 0.75)}
    assert np.all(weights == weights[..., :1]), "whole rows"
    assert np.mean(weights == 0) == pytest.approx(0.25, abs=0.02)
    np.testing.assert_array_equal(weights_at(3, tokens[[5, 1, 7]]), weights[[5, 1, 7]])
    for others in (weights_at(3, tokens + 1), weights_at(4), weights_at(3, seed=1)):
        assert np.mean(others == weights) < 0.7


def test_gradients_with_ngram_dropout():
    """They are zero for masked rows, and equal finite differences. Validation has no dropout."""
    cfg = replace(CFG, ngram_drop=0.5)
    tokens = np.random.default_rng(0).integers(0, BOS, (2, ROW + 1)).astype(np.uint16)
    hashed = tokens[:, :-1]
    params, signs = random_params(), T.sign_pool(cfg, 0)
    looked_up = {"embed": params["embed"][tokens[:, :-1]]}
    looked_up["value_tables"] = [np.zeros((2, ROW, cfg.width), np.float32)] * 3
    ngrams = np.random.default_rng(1).normal(size=(2, 2, ROW, cfg.width)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=1)
    def output_and_grad(ngrams, stage):
        def output(ngrams):
            model = T.Model(params, cfg, T.PLAIN, stage, T.hyper_at(cfg, 0), signs)
            rows = T.Rows(tokens, hashed, None, None)
            y = T.forward(model, looked_up | {T.NGRAMS: ngrams}, rows)
            return jax.numpy.sum(y[..., 0] ** 3)

        return jax.value_and_grad(output)(ngrams)

    model = T.Model({}, cfg, T.PLAIN, cfg.stages[0], T.hyper_at(cfg, 0), signs)
    kept = np.asarray(T.ngram_dropout(model, np.ones_like(ngrams), tokens))[..., 0] > 0
    stage = cfg.stages[0]
    grads = np.asarray(output_and_grad(ngrams, stage)[1])
    assert np.all(np.any(grads != 0, axis=-1) == kept)
    undropped = np.asarray(output_and_grad(ngrams, None)[1])
    assert np.all(np.any(undropped != 0, axis=-1))
    # One element of a kept row, by central differences.
    where = (*np.argwhere(kept)[3], 5)
    step = np.zeros_like(ngrams)
    step[where] = 1e-2
    above, below = (output_and_grad(x, stage)[0] for x in (ngrams + step, ngrams - step))
    assert grads[where] == pytest.approx(float(above - below) / 2e-2, rel=0.05)
