"""Batches equal the loader of record 92 (tests/golden/record92/README.md).

Tables of the vocabulary need GPT-2's encoding, which tiktoken downloads once. Without it, tests of
these tables are skipped, and rows are compared without prefixes.
"""

import functools
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import ROOT, write_shard
from programs import jit, mesh_of

import train_gpt as T

GOLDEN = ROOT / "tests/golden/record92"
META = json.loads((GOLDEN / "data.json").read_text())
RECORD = replace(T.PRESETS["speedrun"], ngram_ids="raw", ngram_rows=META["ngram_rows"])
STEPS = range(len(META["plan"]))
# Jitted, since single operations take longer.
segment_ids = jit(T.segment_ids, static_argnums=(1, 2))
sign_ids = jit(T.sign_ids, static_argnums=1)


def stage_of(step: dict) -> T.Stage:
    """Return the stage of one step of the plan."""
    sizes = (step[name] for name in ("global_tokens", "row_tokens", "doc_cap"))
    return T.Stage(1 / len(STEPS), *sizes, (1, 1), candidates=(step["candidates"],))


CFG = replace(RECORD, steps=len(STEPS), extension=0, stages=tuple(map(stage_of, META["plan"])))


@pytest.fixture(scope="module", autouse=True)
def room_for_all():
    """Golden data has random ids, so it has more different n-grams than text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T, "capacity", lambda tokens, devices: 2 * tokens // devices)
        yield


def sha256(x, dtype="<i4") -> str:
    """Return the hash of an array in this type."""
    return hashlib.sha256(np.ascontiguousarray(x, dtype).tobytes()).hexdigest()


@functools.cache
def gpt2() -> list[bytes]:
    """Return the bytes of GPT-2's tokens, or an empty list without its encoding."""
    try:
        return T.token_bytes(RECORD, Path("."))
    except T.UserError:
        return []


needs_gpt2 = pytest.mark.skipif("not gpt2()", reason="needs the GPT-2 encoding of tiktoken")


def draw_shard(about: dict) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, starts of documents) with log-normal lengths, median 350."""
    rng, size = np.random.default_rng(about["seed"]), about["tokens"]
    draws = np.exp(rng.standard_normal(4000) * 1.1 + np.log(350))
    lengths = [*about["first_document_lengths"], *np.clip(draws, 1, 12_000).astype(int).tolist()]
    starts = about["lead"] + np.cumsum([0, *lengths])
    starts = starts[starts < size]
    tokens = rng.integers(0, CFG.bos, size)
    tokens[starts] = CFG.bos
    return tokens.astype(np.uint16), starts


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """Golden arrays and the two streams."""
    folder = tmp_path_factory.mktemp("record92")
    with np.load(GOLDEN / "data.npz") as file:
        arrays = dict(file)
    for about in META["shards"]:
        tokens, starts = draw_shard(about)
        np.testing.assert_array_equal(starts, arrays[f"{Path(about['name']).stem}/bos"])
        path = write_shard(folder / about["name"], tokens)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == about["sha256_of_file"]
    train, val = (T.TokenStream(folder, split, CFG.bos) for split in ("train", "val"))
    return SimpleNamespace(arrays=arrays, train=train, val=val, known=T.vocabulary(CFG, gpt2()))


@pytest.fixture(scope="module")
def batches(golden):
    """(Rows, wanted, place before, place after) of each step."""
    found, place = [], T.loader_state(CFG, mesh_of(8))
    for step in STEPS:
        batch, after = T.next_batch(CFG, mesh_of(8), golden.train, golden.known, step, place)
        found.append((*jax.device_get(batch[:2]), place, after))
        place = after
    return found


def borders(segments) -> list[int]:
    """Return the starts of the segments of a row, and its end."""
    return [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]


@pytest.mark.parametrize("step", STEPS)
def test_rows_and_their_pieces(golden, batches, step):
    """Both shards, all lengths of rows. Upstream has eight devices with a row each."""
    rows, _, place, after = batches[step]
    stage, about = CFG.stages[step], META["steps"][step]
    assert rows.tokens.dtype == np.uint16
    assert sha256(rows.tokens, "<u2") == about["sha256_of_rows_uint16"]
    if f"step{step}/rows" in golden.arrays:
        np.testing.assert_array_equal(rows.tokens, golden.arrays[f"step{step}/rows"])
    pieces, cursor = T.plan_packed(golden.train, place.cursor, stage)
    assert cursor == after.cursor
    bases = [golden.train.shard_at(start) for _, start, _ in pieces]
    assert {number for number, _ in bases} == {about["shard"]}
    places = [(row, a - b, z - b) for (row, a, z), (_, b) in zip(pieces, bases, strict=True)]
    np.testing.assert_array_equal(places, golden.arrays[f"step{step}/pieces"])


@pytest.mark.parametrize("step", STEPS)
def test_segments_of_documents(golden, batches, step):
    """Segment ids rise at the boundaries of upstream, also after 2560 tokens."""
    inputs = batches[step][0].tokens[:, :-1].astype(np.int32)
    ids = np.asarray(segment_ids(inputs, CFG.bos, CFG.attention_cap))
    for row, want in zip(ids, golden.arrays[f"step{step}/cu_seqlens"], strict=True):
        assert borders(row) == np.unique(want).tolist()
    assert CFG.attention_cap == META["virtual_cap"]


@pytest.mark.parametrize("step", STEPS)
def test_hashes(golden, batches, step):
    """Rows of the n-gram table and of the signs, and requests between devices."""
    rows, wanted, *_ = batches[step]
    about, arrays = META["steps"][step], golden.arrays
    np.testing.assert_array_equal(rows.hashed, rows.tokens[:, :-1])
    ids = T.ngram_hashes(rows.hashed, CFG.ngram_rows).swapaxes(0, 1)  # upstream: [8, 2, t]
    signs = np.asarray(sign_ids(rows.hashed, CFG.sign_rows)).swapaxes(0, 1)
    assert sha256(ids) == about["sha256_of_ngram_ids_int32"]
    assert sha256(signs) == about["sha256_of_sign_rows_int32"]
    np.testing.assert_array_equal(ids[:, :, :12], arrays[f"step{step}/ngram_first"])
    np.testing.assert_array_equal(signs[:, :, :12], arrays[f"step{step}/sign_first"])
    places = T.spread(ids, CFG.ngram_rows)
    check_request(wanted, rows.slots, places)
    for devices in (1, 2) if step == 0 else ():
        check_request(*T.request(CFG, rows.hashed, devices, devices), places)


def check_request(wanted, found, places):
    """Check that tokens [rows, 2, t] find the rows at these `places` among the fetched rows."""
    devices = len(wanted)
    share, owners = CFG.ngram_rows // devices, np.arange(devices)[:, None]
    assert share * devices == CFG.ngram_rows
    shares = wanted, np.split(found, devices), np.split(places, devices)
    for asked, at, want in zip(*shares, strict=True):
        np.testing.assert_array_equal((asked + share * owners).reshape(-1)[at], want)
        assert np.sum(asked < share) == len(np.unique(want))  # each row once


def test_requests_of_the_largest_batch():
    """Its numbers need more than 16 bits."""
    stage = max(RECORD.stages, key=lambda stage: stage.batch_tokens)
    shape = stage.rows, stage.row_tokens
    hashed = np.random.default_rng(0).integers(0, CFG.bos, shape).astype(np.uint16)
    ids = T.ngram_hashes(hashed, CFG.ngram_rows).swapaxes(0, 1)
    check_request(*T.request(CFG, hashed, 8, 8), T.spread(ids, CFG.ngram_rows))


@pytest.mark.parametrize("step", STEPS)
def test_candidates(golden, batches, step):
    """The candidates of each row, and the places of targets and prefixes in them."""
    rows, _, place, after = batches[step]
    about, arrays, all_targets = META["steps"][step], golden.arrays, rows.targets
    count, tokens = META["plan"][step]["candidates"], rows.tokens
    assert not np.any(all_targets.candidates[:, count:])  # padding for steps with more candidates
    all_targets = all_targets._replace(candidates=all_targets.candidates[:, :count])
    assert all_targets.candidates.shape == (8, count) and {x.dtype for x in all_targets} == {
        np.dtype("i4")
    }
    if not count:
        np.testing.assert_array_equal(all_targets.ids, tokens[:, 1:])
        np.testing.assert_array_equal(all_targets.prefixes, golden.known.prefix_v[tokens[:, 1:]])
        assert place.offsets == after.offsets
        return
    assert list(place.offsets) == about["walk_before"]
    assert list(after.offsets) == about["walk_after"]
    assert [sha256(x) for x in all_targets.candidates] == about["sha256_of_candidates_int32"]
    assert sha256(all_targets.ids) == about["sha256_of_target_pos_int32"]
    assert [len(np.unique(row[1:])) for row in tokens] == about["distinct_targets"]
    stored = {"candidates": all_targets.candidates, "target_pos": all_targets.ids}
    if gpt2():
        assert sha256(all_targets.prefixes) == about["sha256_of_prefix_pos_int32"]
        assert np.sum(all_targets.prefixes >= 0, axis=1).tolist() == about["prefix_targets_found"]
        stored["prefix_pos"] = all_targets.prefixes
    for name, x in stored.items():
        for rank in (0, 7):
            if f"step{step}/{name}_rank{rank}" in arrays:
                np.testing.assert_array_equal(x[rank], arrays[f"step{step}/{name}_rank{rank}"])


def test_candidates_with_many_targets_and_with_enough_targets(golden):
    targets = T.STRIDE * np.arange(9000) % CFG.vocab
    ids, offset = T.candidates(targets, 0, 10_240, CFG.vocab)
    assert offset == META["fallback"]["walk_after"]
    assert sha256(ids) == META["fallback"]["sha256_of_candidates_int32"]
    others = np.setdiff1d(ids, targets)
    np.testing.assert_array_equal(others, golden.arrays["fallback/negatives"])
    ids, offset = T.candidates(np.arange(10_240), offset, 10_240, CFG.vocab)
    np.testing.assert_array_equal(ids, np.arange(10_240))
    assert offset == META["exact"]["walk_after"]


def test_hashes_with_integer_overflow():
    example = META["hash_example"]
    tokens = np.asarray([example["tokens"]], dtype=np.uint16)
    both = np.asarray(T.ngram_hashes(tokens, CFG.ngram_rows))[:, 0].tolist()
    assert both == [example["bigram"], example["trigram"]]


@pytest.mark.parametrize("batch", range(META["val"]["batches"]))
def test_validation_rows(golden, batch):
    """All tokens, in rows that begin within documents."""
    t, rows = META["val"]["row_tokens"], META["val"]["global_tokens"] // META["val"]["row_tokens"]
    stage = replace(CFG.stages[0], batch_tokens=rows * t, row_tokens=t, doc_cap=0)
    pieces, cursor = T.plan_rows(golden.val, batch * rows * t, stage)
    got = T.read_rows(golden.val, pieces, range(rows))
    assert (got.shape, cursor) == ((rows, t + 1), (batch + 1) * rows * t)
    ids = np.asarray(segment_ids(got[:, :-1].astype(np.int32), CFG.bos, 0))
    for row, want in zip(ids, golden.arrays[f"val/{batch}/cu_seqlens"], strict=True):
        assert borders(row) == np.unique(want).tolist()
    hashed = T.ngram_hashes(got[:, :-1], CFG.ngram_rows).swapaxes(0, 1)[:, :, :16]
    np.testing.assert_array_equal(hashed, golden.arrays[f"val/{batch}/first_ngram_ids"])


@needs_gpt2
def test_prefix_of_every_token():
    about = json.loads((GOLDEN / "prefix.json").read_text())
    with np.load(GOLDEN / "prefix.npz") as samples:
        table = T.prefix_table(gpt2(), CFG.vocab)
        np.testing.assert_array_equal(table[samples["ids"]], samples["prefix"])
    assert (len(table), np.sum(table >= 0)) == (about["entries"], about["with_prefix"])
    assert sha256(table) == about["sha256_int32"]


@needs_gpt2
def test_normalised_ids():
    """They equal pull request 375, which has their sum in its tests."""
    table = T.normalised_ids(gpt2(), CFG.vocab)
    want = "79fb57ac259495ba36f1afb9b0d5da35f3048b5067fa59c101d5a3c1ed15c2a2"
    assert sha256(table[: CFG.real_tokens]) == want
    assert len(np.unique(table[: CFG.real_tokens])) == 32_980
    np.testing.assert_array_equal(table[CFG.bos :], np.arange(CFG.bos, CFG.vocab))
