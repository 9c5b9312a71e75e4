"""From shards to batches on the devices: tokens, and their order."""

import contextlib
import math
import re
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import BOS, documents, small_config, stream_of, write_shard
from programs import CFG, mesh_of, next_rows, stage_at

import train_gpt as T


def texts(*lengths) -> np.ndarray:
    """Return documents of these lengths. After BOS, a token is its position in the document."""
    return np.concatenate([np.r_[BOS, np.arange(1, n) % BOS] for n in lengths]).astype(np.uint16)


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "a part of the header": lambda path: path.write_bytes(path.read_bytes()[:1023]),
    "wrong magic": lambda path: write_shard(path, texts(9), magic=7),
    "wrong version": lambda path: write_shard(path, texts(9), version=2),
    "half a download": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "too long": lambda path: path.open("ab").write(b"ab"),
    "no tokens": lambda path: write_shard(path, np.zeros(0)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_with_the_fix(tmp_path, damage):
    path, tokens = tmp_path / "x_train_000001.bin", np.array([50256, 0, 65535, 258], np.uint16)
    np.testing.assert_array_equal(T.open_shard(write_shard(path, tokens)), tokens)
    DAMAGES[damage](path)
    with pytest.raises(T.UserError, match="download or tokenize it again") as error:
        T.open_shard(path)
    assert str(path) in str(error.value)


def test_a_stream_joins_the_shards_of_a_split_in_order_of_names(tmp_path):
    """A read may cross shards."""
    sizes = {"b_train_3": 25, "b_train_1": 10, "b_train_2": 1}
    sizes |= {"b_val_1": 9, "b_train_set_val_1": 9, "b_train_x": 9, "b_train_4_old": 9}
    parts = {name: documents(n, n) for name, n in sizes.items()}
    for name, tokens in parts.items():
        write_shard(tmp_path / f"{name}.bin", tokens)
    stream = T.TokenStream(tmp_path, "train", BOS)
    assert [path.stem for path in stream.paths] == ["b_train_1", "b_train_2", "b_train_3"]
    whole = np.concatenate([parts[f"b_train_{i}"] for i in (1, 2, 3)])
    assert len(stream) == len(whole) == 36
    for start in range(0, 12):
        for count in (0, 1, 9, 11, 20):
            got = stream.read(start, count)
            assert got.dtype == np.uint16
            np.testing.assert_array_equal(got, whole[start : start + count])
    places = [stream.shard_at(cursor) for cursor in range(36)]
    assert places == [(0, 0)] * 10 + [(1, 10)] + [(2, 11)] * 25
    for beyond in (lambda: stream.shard_at(36), lambda: stream.read(30, 7)):
        with pytest.raises(T.UserError, match="end at 36: download more shards or use fewer steps"):
            beyond()
    with pytest.raises(T.UserError, match=rf"no test shards .*{tmp_path}: pass another --data"):
        T.TokenStream(tmp_path, "test", BOS)


def test_plain_rows_contain_each_token_once(tmp_path):
    parts = [documents(0, 70), documents(1, 80)]  # the first shard ends within the first batch
    stream, whole = stream_of(tmp_path, *parts), np.concatenate(parts)
    stage = T.Stage(1.0, 64, 16, 0, (1, 1))
    first, cursor = next_rows(stream, 5, stage)
    second, end = next_rows(stream, cursor, stage)
    rows = np.concatenate([first, second])
    assert (rows.shape, rows.dtype, cursor, end) == ((8, 17), np.uint16, 69, 133)
    np.testing.assert_array_equal(rows[:-1, -1], rows[1:, 0])
    np.testing.assert_array_equal(rows[:, :-1].ravel(), whole[5:133])  # every input once
    np.testing.assert_array_equal(rows[:, 1:].ravel(), whole[6:134])  # every target once


def pack_slowly(shards, cursor, rows, t, doc_cap):
    """Return the positions of the tokens of each row and the next cursor, token by token."""
    base = 0
    for shard in shards:
        filled, taken, copies = [[]], 0, False
        for at in range(max(cursor - base, 0), len(shard)):
            if shard[at] == BOS:
                taken, copies = 0, True
            if not copies or taken == doc_cap:
                continue
            filled[-1].append(base + at)
            taken += 1
            if len(filled[-1]) == t + 1:
                if len(filled) == rows:
                    return filled, filled[-1][-1] + 1
                filled.append([])
                copies = False
        base += len(shard)
    return None


def packed(rows, t, doc_cap) -> T.Stage:
    return T.Stage(1.0, rows * t, t, doc_cap, (1, 1))


PACK_SHARDS = (  # many short documents; none; too few tokens; short and long documents
    documents(5, 2400, mean=6),
    np.ones(50, np.uint16),
    documents(6, 150)[3:],
    np.concatenate([documents(7, 900, mean=5)[11:], documents(8, 600, mean=60)]),
)


@pytest.mark.parametrize("doc_cap", [1, 2, 7, 24, 33, 10_000])
@pytest.mark.parametrize(("rows", "t"), [(4, 32), (3, 7), (1, 60), (8, 1)])
def test_packed_rows_equal_a_search_token_by_token(tmp_path, rows, t, doc_cap):
    """Segment ids change only at the start of a piece. An incomplete batch at the end of the stream
    is refused."""
    stream, cursor, batches = stream_of(tmp_path, *PACK_SHARDS), 0, 0
    while (want := pack_slowly(PACK_SHARDS, cursor, rows, t, doc_cap)) is not None:
        pieces, after = T.plan_packed(stream, cursor, packed(rows, t, doc_cap))
        got = [[] for _ in range(rows)]
        for row, start, stop in pieces:
            got[row].extend(range(start, stop))
        assert (got, after) == want
        if batches < 2:
            tokens, _ = next_rows(stream, cursor, packed(rows, t, doc_cap))
            for row, (ids, places) in enumerate(zip(segments(tokens), got, strict=True)):
                borders = np.cumsum([stop - start for r, start, stop in pieces if r == row])
                assert np.flatnonzero(np.diff(ids)).tolist() == (borders[borders < t] - 1).tolist()
                np.testing.assert_array_equal(np.concatenate(PACK_SHARDS)[places], tokens[row])
        cursor = after
        batches += 1
    assert batches > 2 and cursor > len(PACK_SHARDS[0])  # some batches are after the first shard
    with pytest.raises(T.UserError, match="end at"):
        T.plan_packed(stream, cursor, packed(rows, t, doc_cap))


def passes_of(folder, shards, stage, passes, seed=0) -> list[list]:
    """Return the pieces (start, stop) of each epoch."""
    for i, tokens in enumerate(shards):
        write_shard(folder / f"x_train_{i:06d}.bin", tokens)
    found, cursor = [[] for _ in range(passes)], 0
    with contextlib.suppress(T.UserError):  # the end of the stream
        while True:
            stream = T.TokenStream(folder, "train", BOS, passes, seed)  # a cursor is enough
            pieces, after = T.plan_rows(stream, cursor, stage)
            stream.shard_at(after)
            found[stream.pass_at(after) - 1] += [piece[1:] for piece in pieces]
            cursor = after
    return found


TWICE = [documents(1, 1000), documents(2, 900)]
IN_ROWS = T.Stage(1.0, 4 * 16, 16, 0, (1, 1))


def test_later_epochs_have_other_rows_in_another_order(tmp_path):
    first, second, third = passes_of(tmp_path, TWICE, IN_ROWS, 3)
    starts = [start for start, _ in first]
    assert starts == [*range(0, len(starts) * 16, 16)]  # as in a run of one epoch
    for number, pieces in enumerate((second, third), 1):
        places = [start - number * 1900 for start, _ in pieces]
        jumps = np.diff(places) != 16
        assert jumps.mean() > 0.9
        assert len({*places}) == len(places)
        assert len({place + i for place in places for i in range(16)}) > 1850  # of 1900
        of_first = [place < 1000 for place in places]  # one shard after the other
        assert of_first == sorted(of_first, reverse=True)
        assert {place % 16 for place in places if place < 900} != {0}
    assert [start - 1900 for start, _ in second] != [start - 3800 for start, _ in third]
    assert passes_of(tmp_path, TWICE, IN_ROWS, 3, seed=1)[0] == first
    assert passes_of(tmp_path, TWICE, IN_ROWS, 3, seed=1)[1] != second


def test_later_epochs_have_documents_in_another_order(tmp_path):
    stage = packed(4, 16, 1000)
    first, second = passes_of(tmp_path, TWICE, stage, 2)
    want, cursor = [], 0
    whole = T.TokenStream(tmp_path, "train", BOS)
    with contextlib.suppress(T.UserError):
        while True:
            pieces, cursor = T.plan_packed(whole, cursor, stage)
            want += [piece[1:] for piece in pieces]
    assert first == want
    places = {*np.flatnonzero(whole.read(0, 1900) == BOS).tolist()}
    starts = [start - 1900 for start, _ in second]
    assert len({*starts}) == len(starts) > 30 and {*starts} <= places
    assert starts != sorted(starts) and starts != [start for start, _ in first]
    is_whole = [stop - 1900 in places for _, stop in second]
    assert sum(is_whole) > 10  # documents that fit into their row


def segments(tokens):
    return np.asarray(T.segment_ids(tokens[:, :-1], BOS))


WORDS = [
    bytes([i % 48]) * (1 + i // 48) for i in range(BOS)
]  # half of them begin with another word


def batches(cfg, folder, devices, step=0, place=None):
    """Return all batches of a run, each with the state of the loader after it."""
    mesh, stream = mesh_of(devices), T.TokenStream(folder, "train", cfg.bos)
    place = place or T.loader_state(cfg, mesh)
    return list(T.train_batches(cfg, mesh, stream, WORDS, step, place))


@pytest.fixture(scope="module")
def eight(shards):
    """The plain and packed batches of a run of 8 steps on 8 devices."""
    return batches(CFG, shards, 8)


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_batches_follow_the_stages(shards, eight):
    """Plain rows first, then packed rows of the tokens after them. Each row has its own position in
    the vocabulary, for its candidates."""
    stream, place = T.TokenStream(shards, "train", BOS), T.loader_state(CFG, mesh_of(8))
    assert place == (0, (0, 12, 25, 37, 50, 63, 75, 88))  # evenly spaced over the vocabulary
    known = T.vocabulary(CFG, WORDS)
    for step, (batch, after) in enumerate(eight):
        rows, cursor = next_rows(stream, place.cursor, stage_at(CFG, step))
        assert rows.shape == ((8, 33) if step < 3 else (8, 65))
        assert step >= 3 or cursor == 256 * (step + 1)
        np.testing.assert_array_equal(batch.rows.tokens, rows)
        np.testing.assert_array_equal(batch.rows.hashed, known.hashed_v[rows[:, :-1]])
        count, each = T.schedule(CFG).candidates[step], zip(rows, place.offsets, strict=True)
        all_targets = [T.row_targets(row, offset, count, known.prefix_v) for row, offset in each]
        for r, (own, _) in enumerate(all_targets):
            assert_same(jax.tree.map(lambda x, r=r: x[r], batch.rows.targets), own)
        place = T.LoaderState(cursor, tuple(offset for _, offset in all_targets))
        assert after == place


@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_resumed_run_continues_with_the_same_batches(shards, eight, step):
    assert_same(batches(CFG, shards, 8, step, eight[step - 1][1]), eight[step:])


def many(devices: int, processes: int):
    """Return the attributes of a mesh with these numbers of devices and processes."""
    each = [SimpleNamespace(process_index=i * processes // devices) for i in range(devices)]
    here = [device for device in each if device.process_index == jax.process_index()]
    return SimpleNamespace(size=devices, devices=np.array(each), local_devices=here)


@pytest.mark.parametrize("devices, processes", [(8, 4), (16, 4)])
def test_each_process_loads_only_its_own_rows(shards, monkeypatch, devices, processes):
    """Together, they have the rows of a single process, also with more devices than rows."""
    cfg, known, read = T.for_devices(CFG, devices), T.vocabulary(CFG, WORDS), []

    class Stream(T.TokenStream):
        def read(self, cursor, count):
            read.append(count)
            return super().read(cursor, count)

    def made(process: int, of: int) -> list:
        monkeypatch.setattr(jax, "process_index", lambda: process)
        monkeypatch.setattr(T, "put", lambda array, mesh, spec: array)  # without devices
        mesh, stream, found = many(devices, of), Stream(shards, "train", BOS), []
        place = T.loader_state(cfg, mesh)
        for step in range(cfg.steps):
            read.clear()
            batch, place = T.next_batch(cfg, mesh, stream, known, step, place)
            found.append((batch.rows, batch.requests, place, sum(read)))
        return found

    parts = zip(*(made(process, processes) for process in range(processes)), strict=True)
    for step, (whole, got) in enumerate(zip(made(0, 1), parts, strict=True)):
        assert_same(jax.tree.map(lambda *x: np.concatenate(x), *(x[:2] for x in got)), whole[:2])
        assert {x[2].cursor for x in got} == {whole[2].cursor}
        assert sum((x[2].offsets for x in got), ()) == whole[2].offsets
        stage = stage_at(cfg, step)
        assert {x[3] for x in got} == {stage.rows // processes * (stage.row_tokens + 1)}


def test_positions_in_the_vocabulary_after_a_change_of_rows():
    """They stay if the number of rows stays. Otherwise they are spaced evenly from the first."""
    saved = 77, (5, 1, 2, 3, 4, 9, 6, 7)
    assert all(T.loader_state(CFG, many(n, 1), *saved) == saved for n in (1, 2, 8))
    more = T.loader_state(T.for_devices(CFG, 16), many(16, 1), *saved)
    assert more == (77, tuple((5 + CFG.vocab * r // 16) % CFG.vocab for r in range(16)))
    back = T.loader_state(CFG, many(4, 1), *more)
    assert back.offsets == tuple((5 + CFG.vocab * r // 8) % CFG.vocab for r in range(8))


@pytest.mark.parametrize("devices", [8, 64])
def test_requests_of_ngrams_are_spread_evenly_over_owners(devices):
    """For ids with the frequencies of text (Zipf). In order of hashes they would be very uneven."""
    rng, rows, tokens = np.random.default_rng(0), T.Config.ngram_rows, 16_384
    frequent = rng.zipf(1.2, 10 * tokens)
    hashed = frequent[frequent < 32_980][:tokens].reshape(1, -1)
    ids = np.unique(T.ngram_hashes(hashed, rows))

    def fullest(places):
        counts = np.bincount(places // (rows // devices), minlength=devices)
        return (counts.max() - counts.mean()) / np.sqrt(counts.mean())

    assert fullest(ids) > 10 and fullest(T.spread(ids, rows)) < 4
    places = T.spread(np.arange(522), 522)  # a permutation
    assert np.array_equal(np.sort(places), np.arange(522)) and places[-1] == 0


def test_dropped_ngrams_use_the_row_of_no_history_and_are_counted(monkeypatch):
    """With eight devices, the first one owns all n-grams."""
    cfg, rows = small_config(ngram_rows=2**16), 2**16
    hashed = np.random.default_rng(0).integers(0, BOS, (16, 256)).astype(np.uint16)
    wanted, places = T.request(cfg, hashed, 8, 8)
    room = T.capacity(16 * 256, 8)
    assert wanted.shape == (8, 8, room) and T.dropped_ngrams(places) == 0
    ids = T.ngram_hashes(hashed, rows)
    used = np.setdiff1d(ids, rows - 1)
    order = np.concatenate([[rows - 1], used, np.setdiff1d(np.arange(rows - 1), used)])
    moved = np.argsort(order)
    assert moved[rows - 1] == 0 and moved[used].max() < rows // 8
    monkeypatch.setattr(T, "spread", lambda ids, rows: moved[ids])
    wanted, places = T.request(cfg, hashed, 8, 8)
    assert np.all(wanted[:, 1:] == rows // 8)  # no requests to the other owners
    want = moved[ids].swapaxes(0, 1)
    each = zip(wanted, np.split(places, 8), strict=True)
    found = np.concatenate([own[0][at] for own, at in each])
    fits = found == want
    for own, own_fits in zip(np.split(want, 8), np.split(fits, 8), strict=True):
        assert len(np.unique(own[own_fits])) == room < len(np.unique(own))
    assert np.all(found[~fits] == 0) and np.sum(~fits) == T.dropped_ngrams(places) > 1000


def test_the_example_of_device_request_has_the_numbers_of_the_code():
    """All lines of numbers in its docstring. Rows are returned as by fetch_requests."""
    lines = re.findall(r"^ +(\S.*?)  +((?:\d  )+\d)\b", T.device_request.__doc__, re.M)
    example = {name: [int(x) for x in numbers.split()] for name, numbers in lines}
    table_rows, devices, size = 8, 2, 3
    hashed = np.array([example["tokens"]], np.uint16)
    requests, slots = T.device_request(small_config(ngram_rows=table_rows), hashed, devices, size)
    hashes = T.ngram_hashes(hashed, table_rows)
    shards = np.split(np.arange(table_rows), devices)
    returned = [np.take(*pair, mode="clip") for pair in zip(shards, requests, strict=True)]
    want = {"tokens": hashed[0], "rows returned": np.concatenate(returned)}
    for n, kind in enumerate(("bigram", "trigram")):
        want[f"{kind} hashes"] = hashes[n, 0]
        want[f"{kind} rows"] = T.spread(hashes, table_rows)[n, 0]
        want[f"{kind} slots"] = slots[0, n]
    want |= {f"requests[{owner}]": row for owner, row in enumerate(requests)}
    assert example == {name: x.tolist() for name, x in want.items()}
    found = want["rows returned"][slots[0]]
    fits = found == np.stack([want["bigram rows"], want["trigram rows"]])
    assert np.argwhere(~fits).tolist() == [[1, 3]]  # the trigram of the fourth token
    assert T.dropped_ngrams(slots) == 1


def test_a_row_with_too_many_targets_is_refused():
    with pytest.raises(T.UserError, match=r"5 different targets, more than its 4 .*stages.N.cand"):
        T.candidates(np.array([7, 3, 7, 99, 50, 1]), 0, 4, 104)
    assert all(math.gcd(T.STRIDE, cfg.vocab) == 1 for cfg in T.PRESETS.values())  # reaches every id


def test_prefixes_and_normal_forms():
    """A prefix is the longest other word. A form has its smallest id; parts of letters stay."""
    words = [b"a", b"ab", b"abcd", b"abd", b"b", b" A", b"\xc3\xa1", b"\xc3", b" ", b"AB ", b"\n"]
    words.append(b" \xc3")
    assert T.prefix_table(words, 13).tolist() == [-1, 0, 1, 1, -1, 8, 7, -1, -1, -1, -1, 8, -1]
    table = T.normalised_ids(words, 13)
    assert table.dtype == np.uint16 and table.tolist() == [0, 1, 2, 3, 4, 0, 0, 7, 8, 1, 8, 11, 12]
    raw, known = (T.vocabulary(small_config(ngram_ids=x), WORDS) for x in ("raw", "normalised"))
    np.testing.assert_array_equal(raw.hashed_v, np.arange(104))
    np.testing.assert_array_equal(raw.prefix_v, known.prefix_v)


def always() -> threading.Event:
    """Return the event of a running clock."""
    running = threading.Event()
    running.set()
    return running


def counting(drawn: list, fails_at=None):
    """Yield numbers, and append them to `drawn`."""
    for i in range(100):
        if i == fails_at:
            raise T.UserError(f"no item {i}")
        drawn.append(i)
        yield i


@pytest.mark.parametrize("depth", [1, 4])
def test_prefetch_keeps_the_order_and_is_at_most_depth_and_one_ahead(depth):
    drawn = []
    supply = T.prefetch(counting(drawn), depth, always())
    for taken in range(5):
        assert next(supply) == taken
        end = time.monotonic() + 10
        while len(drawn) < taken + depth + 2 and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(drawn) == taken + depth + 2
    assert list(supply) == list(range(5, 100))


def test_an_error_of_the_loader_is_raised_after_earlier_batches():
    supply = T.prefetch(counting([], fails_at=3), 2, always())
    assert [next(supply) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(T.UserError, match="no item 3"):
        next(supply)


def test_waiting_for_the_loader_is_reported(monkeypatch):
    monkeypatch.setattr(T, "STALL_SECONDS", 0.05)
    go, said = threading.Event(), []

    def late(line):
        said.append(line)
        if len(said) == 3:
            go.set()

    source = (go.wait(5) and i for i in range(2))
    assert list(T.prefetch(source, 2, always(), late)) == [0, 1]
    assert len(said) >= 3 and all(line.startswith("waiting for the loader") for line in said)


@pytest.mark.parametrize("runs", [True, False])
def test_the_thread_of_the_loader_ends_when_closed(runs):
    """While it waits for the clock, or for space. A notebook would keep it and its batches."""
    running = always()
    before = {*threading.enumerate()}
    supply = T.prefetch(counting([]), 2, running)
    next(supply)
    (thread,) = {*threading.enumerate()} - before
    if not runs:
        running.clear()
    time.sleep(0.15)
    supply.close()
    thread.join(2)
    assert not thread.is_alive()


def test_the_loader_pauses_with_the_clock():
    running, drawn = always(), []
    supply = T.prefetch(counting(drawn), 50, running)
    assert [next(supply) for _ in range(3)] == [0, 1, 2]
    running.clear()
    time.sleep(0.05)
    before = len(drawn)
    time.sleep(0.2)
    assert len(drawn) == before
    running.set()
    assert list(supply) == list(range(3, 100))
