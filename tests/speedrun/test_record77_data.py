"""Our rows against those that the loader of record 77 cuts (tests/golden/record77/README.md)."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, write_shard

import train_gpt as T

GOLDEN = ROOT / "tests/golden/record77"
META = json.loads((GOLDEN / "data.json").read_text())
CFG = T.PRESETS["speedrun"]


def draw_shard(about: dict) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, where documents begin): lengths are about log-normal, with a median of 350."""
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
    """The golden arrays, the two streams and the tokens of each shard."""
    folder, shards = tmp_path_factory.mktemp("record77"), {}
    with np.load(GOLDEN / "data.npz") as file:
        arrays = dict(file)
    for about in META["shards"]:
        tokens, starts = draw_shard(about)
        np.testing.assert_array_equal(starts, arrays[f"{Path(about['name']).stem}/bos"])
        assert len(starts) == about["documents"]
        path = write_shard(folder / about["name"], tokens)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == about["sha256_of_file"]
        shards[about["name"]] = tokens
    train, val = (T.TokenStream(folder, split, CFG.bos) for split in ("train", "val"))
    assert [path.name for path in train.paths + val.paths] == list(shards)
    return SimpleNamespace(arrays=arrays, train=train, val=val, shards=shards)


def stage(step: int) -> T.Stage:
    plan = META["plan"][step]
    return T.Stage(1.0, plan["global_tokens"], plan["row_tokens"], plan["doc_cap"], (1, 1))


@pytest.fixture(scope="module")
def steps(golden):
    """(rows, pieces) of every step, from one cursor that goes on."""
    found, cursor = [], 0
    for step in range(len(META["plan"])):
        s = stage(step)
        pieces, after = T.plan_packed(golden.train, cursor, s.rows, s.row_tokens, s.doc_cap)
        rows, cursor = T.next_rows(golden.train, cursor, s)
        assert cursor == after
        found.append((rows, pieces))
    return found


STEPS = range(len(META["plan"]))


@pytest.mark.parametrize("step", STEPS)
def test_rows_and_the_pieces_they_are_made_of(golden, steps, step):
    """Both shards, both lengths of rows; the original with eight devices, of one row each."""
    rows, pieces = steps[step]
    want = {name: golden.arrays[f"world8/{step}/{name}"] for name in ("rows", "pieces", "shard")}
    np.testing.assert_array_equal(rows, want["rows"])
    bases = [golden.train.shard_at(start)[1] for _, start, _ in pieces]
    places = [(row, a - b, z - b) for (row, a, z), b in zip(pieces, bases, strict=True)]
    np.testing.assert_array_equal(places, want["pieces"])
    numbers = {row: golden.train.shard_at(start)[0] for row, start, _ in pieces}
    assert [numbers[row] for row in range(8)] == want["shard"].tolist()


@pytest.mark.parametrize("step", STEPS)
def test_documents_apart_as_in_the_original(golden, steps, step):
    """Its boundaries are where our segment ids rise, but for those of empty segments at the end."""
    inputs = steps[step][0][:, :-1].astype(np.int32)
    ids = np.asarray(T.segment_ids(inputs, CFG.bos))
    for row, borders in zip(ids, golden.arrays[f"world8/{step}/cu_seqlens"], strict=True):
        found = np.flatnonzero(np.diff(row)) + 1
        inner = np.unique(borders)[1:-1]
        np.testing.assert_array_equal(found, inner)


@pytest.mark.parametrize("step", STEPS)
def test_bigram_ids(golden, steps, step):
    inputs = steps[step][0][:, :-1].astype(np.int32)
    ids = np.asarray(T.bigram_ids(inputs, META["bigram_rows"]))
    if step == 0:
        np.testing.assert_array_equal(ids, golden.arrays["world8/0/bigram_ids"])
    want = META["sha256_of_bigram_ids_int32_per_step"][step]
    assert ids.dtype == np.int32 and hashlib.sha256(ids.tobytes()).hexdigest() == want
    assert META["bigram_rows"] == CFG.bigram_rows


def test_a_last_piece_of_one_token_and_a_shard_that_runs_out_are_among_them(golden, steps):
    """So that the comparison above is known to have the hard cases."""
    for step, row in META["rows_whose_last_piece_is_one_token"]:
        last = [piece for piece in steps[step][1] if piece[0] == row][-1]
        assert last[2] - last[1] == 1 and steps[step][0][row, -1] == CFG.bos
    first = len(golden.shards["fineweb_train_000000.bin"])
    beyond = [step for step in STEPS if steps[step][1][0][1] >= first]
    assert beyond == [7, 8, 9]
    unused = first - max(stop for _, _, stop in steps[6][1])
    assert unused > stage(6).row_tokens  # what is left holds rows, but not a whole batch


@pytest.mark.parametrize("batch", range(META["val"]["batches"]))
def test_validation_rows(golden, batch):
    """Unaligned, every token; documents apart also where a row begins inside one."""
    t, rows = META["val"]["row_tokens"], META["val"]["global_tokens"] // META["val"]["row_tokens"]
    got, cursor = T.plain_rows(golden.val, batch * rows * t, rows, t)
    assert (got.shape, cursor) == ((rows, t + 1), (batch + 1) * rows * t)
    tokens = golden.shards["fineweb_val_000000.bin"]
    for r in range(rows):
        at = (batch * rows + r) * t
        np.testing.assert_array_equal(got[r], tokens[at : at + t + 1])
    inputs = got[:, :-1].astype(np.int32)
    ids = np.asarray(T.segment_ids(inputs, CFG.bos))
    for row, borders in zip(ids, golden.arrays[f"val/{batch}/cu_seqlens"], strict=True):
        inner = np.unique(borders)[1:-1]
        np.testing.assert_array_equal(np.flatnonzero(np.diff(row)) + 1, inner)
    hashed = np.asarray(T.bigram_ids(inputs, META["bigram_rows"]))[:, :16]
    np.testing.assert_array_equal(hashed, golden.arrays[f"val/{batch}/first_bigram_ids"])
