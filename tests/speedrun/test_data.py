"""From shards to batches on the devices: what is read, and in which order."""

import functools
import math
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import BOS, documents, small_config, stream_of, write_shard
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import CFG, mesh_of

import train_gpt as T


def texts(*lengths) -> np.ndarray:
    """Documents of these lengths, BOS included; their other tokens tell the position in them."""
    return np.concatenate([np.r_[BOS, np.arange(1, n) % BOS] for n in lengths]).astype(np.uint16)


# ------------------------------------------------------------------------------------------------
# Shards and streams
# ------------------------------------------------------------------------------------------------


def shorten(path, by):
    path.write_bytes(path.read_bytes()[:-by])


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.unlink(), id="missing"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:1023]), id="too short"),
        pytest.param(lambda path: write_shard(path, texts(9), magic=7), id="wrong magic"),
        pytest.param(lambda path: write_shard(path, texts(9), version=2), id="wrong version"),
        pytest.param(lambda path: shorten(path, 2), id="truncated by a token"),
        pytest.param(lambda path: shorten(path, 1), id="truncated by a byte"),
        pytest.param(lambda path: path.open("ab").write(b"ab"), id="too long"),
        pytest.param(lambda path: write_shard(path, np.zeros(0)), id="no tokens"),
    ],
)
def test_open_shard_names_a_damaged_file_and_the_fix(tmp_path, damage):
    path = write_shard(tmp_path / "x_train_000001.bin", texts(9))
    assert len(T.open_shard(path)) == 9
    damage(path)
    with pytest.raises(T.UserError, match="download or tokenize it again") as error:
        T.open_shard(path)
    assert str(path) in str(error.value)


def test_open_shard_gives_the_tokens(tmp_path):
    tokens = np.array([50256, 0, 65535, 258], np.uint16)
    np.testing.assert_array_equal(T.open_shard(write_shard(tmp_path / "a.bin", tokens)), tokens)


def test_stream_is_the_shards_of_one_split_in_the_order_of_their_names(tmp_path):
    parts = {
        name: documents(i, 50 + i) for i, name in enumerate(("b_train_2", "b_train_1", "b_v_3"))
    }
    for name, tokens in parts.items():
        write_shard(tmp_path / f"{name}.bin", tokens)
    for other in ("b_val_1", "b_train_set_val_1", "b_train_x"):
        write_shard(tmp_path / f"{other}.bin", documents(9, 70))
    stream = T.TokenStream(tmp_path, "train", BOS)
    assert [path.name for path in stream.paths] == ["b_train_1.bin", "b_train_2.bin"]
    assert len(stream) == 51 + 50
    want = np.concatenate([parts["b_train_1"], parts["b_train_2"]])
    np.testing.assert_array_equal(stream.read(0, len(stream)), want)


def test_stream_reads_across_shard_borders(tmp_path):
    parts = [documents(i, n) for i, n in enumerate((10, 1, 25))]
    stream, whole = stream_of(tmp_path, *parts), np.concatenate(parts)
    for start in range(0, 12):
        for count in (0, 1, 9, 11, 20):
            got = stream.read(start, count)
            assert got.dtype == np.uint16
            np.testing.assert_array_equal(got, whole[start : start + count])


def test_stream_knows_the_shard_of_every_place(tmp_path):
    stream = stream_of(tmp_path, documents(0, 10), documents(1, 1), documents(2, 25))
    places = [stream.shard_at(cursor) for cursor in range(36)]
    assert places == [(0, 0)] * 10 + [(1, 10)] + [(2, 11)] * 25


@pytest.mark.parametrize("read", [lambda s: s.shard_at(36), lambda s: s.read(30, 7)])
def test_stream_refuses_to_go_beyond_its_end(tmp_path, read):
    stream = stream_of(tmp_path, documents(0, 10), documents(1, 26))
    with pytest.raises(T.UserError, match=r"end at 36: download more shards or use fewer steps"):
        read(stream)


def test_stream_without_shards_names_the_folder_and_the_fix(tmp_path):
    with pytest.raises(T.UserError, match=r"no val shards .*cached_fineweb10B") as error:
        stream_of(tmp_path, documents(0, 10)), T.TokenStream(tmp_path, "val", BOS)
    assert str(tmp_path) in str(error.value)


# ------------------------------------------------------------------------------------------------
# Rows
# ------------------------------------------------------------------------------------------------


def test_plain_rows_leave_no_token_out_and_share_one_with_the_neighbour(tmp_path):
    parts = [documents(0, 70), documents(1, 80)]  # the first border lies inside the first batch
    stream, whole = stream_of(tmp_path, *parts), np.concatenate(parts)
    stage = T.Stage(1.0, 64, 16, 0, (1, 1))
    first, cursor = T.next_rows(stream, 5, stage)
    second, end = T.next_rows(stream, cursor, stage)
    rows = np.concatenate([first, second])
    assert (rows.shape, rows.dtype, cursor, end) == ((8, 17), np.uint16, 69, 133)
    np.testing.assert_array_equal(rows[:-1, -1], rows[1:, 0])
    np.testing.assert_array_equal(rows[:, :-1].ravel(), whole[5:133])  # every input once
    np.testing.assert_array_equal(rows[:, 1:].ravel(), whole[6:134])  # every target once


def pack_slowly(shards, cursor, rows, t, doc_cap):
    """The positions of the tokens of each row and the next cursor, found token by token."""
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


PACK_SHARDS = (  # many short documents, too few tokens for some batches, short and long ones
    documents(5, 2400, mean=6),
    documents(6, 150)[3:],
    np.concatenate([documents(7, 900, mean=5)[11:], documents(8, 600, mean=60)]),
)


@pytest.mark.parametrize("doc_cap", [1, 2, 7, 24, 33, 10_000])
@pytest.mark.parametrize(("rows", "t"), [(4, 32), (3, 7), (1, 60), (8, 1)])
def test_plan_packed_agrees_with_a_walk_over_every_token(tmp_path, rows, t, doc_cap):
    stream, cursor, batches = stream_of(tmp_path, *PACK_SHARDS), 0, 0
    while (want := pack_slowly(PACK_SHARDS, cursor, rows, t, doc_cap)) is not None:
        pieces, cursor = T.plan_packed(stream, cursor, packed(rows, t, doc_cap))
        got = [[] for _ in range(rows)]
        for row, start, stop in pieces:
            got[row].extend(range(start, stop))
        assert (got, cursor) == want
        batches += 1
    assert batches > 2 and cursor > len(PACK_SHARDS[0])  # some were beyond the first shard
    with pytest.raises(T.UserError, match="end at"):
        T.plan_packed(stream, cursor, packed(rows, t, doc_cap))


def test_packed_rows_by_hand(tmp_path):
    """Capped at 5, cut by the end of a row, a whole document, a lone BOS as the last target."""
    stream = stream_of(tmp_path, np.r_[1, 2, texts(7, 9, 2, 4, 3)].astype(np.uint16))
    rows, cursor = T.next_rows(stream, 0, packed(2, 7, 5))
    assert rows.dtype == np.uint16
    assert rows.tolist() == [[BOS, 1, 2, 3, 4, BOS, 1, 2], [BOS, 1, BOS, 1, 2, 3, BOS, 1]]
    assert cursor == 2 + 7 + 9 + 2 + 4 + 2  # just after the last piece
    rows, cursor = T.next_rows(stream, 0, packed(1, 5, 5))
    assert rows.tolist() == [[BOS, 1, 2, 3, 4, BOS]] and cursor == 2 + 7 + 1


def test_plan_packed_leaves_a_shard_with_too_few_documents_for_the_next(tmp_path):
    stream = stream_of(tmp_path, texts(8, 8, 8), texts(8, 8, 8, 8))
    pieces, cursor = T.plan_packed(stream, 0, packed(2, 7, 8))
    assert (pieces, cursor) == ([(0, 0, 8), (1, 8, 16)], 16)
    pieces, cursor = T.plan_packed(stream, cursor, packed(2, 7, 8))  # one left in the first shard
    assert (pieces, cursor) == ([(0, 24, 32), (1, 32, 40)], 40)


@pytest.mark.parametrize("doc_cap", [5, 24, 1000])
def test_segment_ids_change_exactly_where_a_piece_begins(shards, doc_cap):
    stream, cursor = T.TokenStream(shards, "train", BOS), 0
    for _ in range(2):
        pieces, _ = T.plan_packed(stream, cursor, packed(4, 64, doc_cap))
        rows, cursor = T.next_rows(stream, cursor, packed(4, 64, doc_cap))
        ids = np.asarray(T.segment_ids(rows[:, :-1], BOS))
        lengths = [[b - a for r, a, b in pieces if r == row] for row in range(4)]
        borders = [(r, at) for r in range(4) for at in np.cumsum(lengths[r]).tolist() if at < 64]
        found = [(r, at + 1) for r, at in np.argwhere(np.diff(ids) != 0).tolist()]
        assert found == borders and len(found) >= 4


def test_plain_rows_after_packed_ones_repeat_no_token(tmp_path):
    stream = stream_of(tmp_path, texts(8, 8, 8, 8))
    pieces, cursor = T.plan_packed(stream, 0, packed(2, 7, 8))
    assert cursor == max(stop for _, _, stop in pieces)


def test_shard_without_documents_is_passed_over(tmp_path):
    stream = stream_of(tmp_path, np.ones(50, np.uint16), texts(8, 8))
    assert T.plan_packed(stream, 0, packed(1, 7, 8))[0] == [(0, 50, 58)]


# ------------------------------------------------------------------------------------------------
# Batches
# ------------------------------------------------------------------------------------------------


WORDS = [bytes([i % 48]) * (1 + i // 48) for i in range(BOS)]  # half of them begin with another


def batches(cfg, folder, devices, step=0, place=None):
    """All batches of a run from the background thread, and the mesh they lie on."""
    mesh, stream = mesh_of(devices), T.TokenStream(folder, "train", cfg.bos)
    source = T.train_batches(cfg, mesh, stream, WORDS, step, place or T.loader_state(cfg, mesh))
    return list(T.prefetch(source, 3, always())), mesh


@pytest.fixture(scope="module")
def eight(shards):
    """The batches of a run of 8 steps, plain and packed ones, on 8 devices."""
    return batches(CFG, shards, 8)[0]


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_batches_hold_the_same_on_any_number_of_devices(shards, eight, devices):
    """But for what each asks the others for, which leads to the same rows of the n-gram table."""
    got, mesh = batches(CFG, shards, devices)
    for step, ((batch, after), want) in enumerate(zip(got, eight, strict=True)):
        stage = T.stage_at(CFG, step)
        rows, t = stage.rows, stage.row_tokens
        assert batch.rows.tokens.dtype == batch.rows.hashed.dtype == np.uint16
        assert batch.rows.tokens.shape == (rows, t + 1)
        assert batch.rows.aims.candidates.shape == (rows, T.schedule(CFG).candidates[step])
        for x in jax.tree.leaves((batch.rows, batch.requests)):
            assert x.sharding == NamedSharding(mesh, P(T.AXIS))
            assert x.addressable_shards[0].data.shape == (x.shape[0] // devices, *x.shape[1:])
        for got_value, value in zip(batch.hyper, T.hyper_at(CFG, step), strict=True):
            assert got_value.sharding == NamedSharding(mesh, P())
            assert got_value.dtype == np.float32
            np.testing.assert_array_equal(got_value, value)
        unused = {"slots": 0}
        assert_same(batch.rows._replace(**unused), want[0].rows._replace(**unused))
        assert after == want[1]
        capacity = T.capacity(stage.batch_tokens, devices)
        assert batch.requests.shape == (devices, devices, capacity)
        ids = T.ngram_ids(np.asarray(batch.rows.hashed), CFG.ngram_rows).swapaxes(0, 1)
        share = -(-CFG.ngram_rows // devices)
        asked = np.asarray(batch.requests) + share * np.arange(devices)[:, None]
        found = zip(
            asked.reshape(devices, -1),
            np.split(np.asarray(batch.rows.slots), devices),
            strict=True,
        )
        found = np.concatenate([rows[at] for rows, at in found])
        np.testing.assert_array_equal(found, T.table_rows(ids, CFG.ngram_rows))


def test_batches_follow_the_stages(shards, eight):
    """Plain rows from the start of the stream, then packed ones from where these ended."""
    stream, place = T.TokenStream(shards, "train", BOS), T.loader_state(CFG, mesh_of(8))
    known = T.vocabulary(CFG, WORDS)
    for step, (batch, after) in enumerate(eight):
        cursor, offsets = place
        rows, cursor = T.next_rows(stream, cursor, T.stage_at(CFG, step))
        assert rows.shape == ((8, 33) if step < 3 else (8, 65))
        assert step >= 3 or cursor == 256 * (step + 1)
        np.testing.assert_array_equal(batch.rows.tokens, rows)
        np.testing.assert_array_equal(batch.rows.hashed, known.hashed_v[rows[:, :-1]])
        each = []
        for r, row in enumerate(rows):
            aims, offset = T.aim(row, offsets[r], T.schedule(CFG).candidates[step], known.prefix_v)
            each.append(offset)
            assert_same(jax.tree.map(lambda x, r=r: x[r], batch.rows.aims), aims)
        place = T.LoaderState(cursor, tuple(each))
        assert after == place
        assert T.cursor_after(CFG, stream, step + 1) == cursor  # found without reading a token


@pytest.mark.parametrize("step", range(1, 8))
def test_batches_go_on_from_the_place_of_a_step(shards, eight, step):
    """What a resumed run does."""
    got, _ = batches(CFG, shards, 8, step, eight[step - 1][1])
    assert_same(got, eight[step:])


def test_rows_start_their_walks_evenly_apart():
    assert T.loader_state(CFG, mesh_of(8)) == (0, (0, 12, 25, 37, 50, 63, 75, 88))


def many(devices: int, processes: int):
    """A mesh of so many devices of so many processes, none of which is there."""
    each = [SimpleNamespace(process_index=i * processes // devices) for i in range(devices)]
    here = [device for device in each if device.process_index == jax.process_index()]
    return SimpleNamespace(size=devices, devices=np.array(each), local_devices=here)


class Counting(T.TokenStream):
    """Counts the tokens that are read."""

    count = 0

    def __init__(self, folder):
        super().__init__(folder, "train", BOS)
        self.documents(0), self.documents(1)  # to find where they begin takes all of a shard, once

    def read(self, cursor, count):
        self.count += count
        return super().read(cursor, count)


@pytest.mark.parametrize("devices, processes", [(8, 2), (8, 4), (4, 2), (16, 4)])
def test_processes_make_their_own_rows_of_what_one_makes(shards, monkeypatch, devices, processes):
    """And read no others; on more devices than rows, too."""
    cfg, known = T.for_devices(CFG, devices), T.vocabulary(CFG, WORDS)
    whole, parts = [], [[] for _ in range(processes)]
    for process, into in ((0, whole), *enumerate(parts)):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        mesh, stream = many(devices, 1 if into is whole else processes), Counting(shards)
        place = T.loader_state(cfg, mesh)
        for step in range(cfg.steps):
            stream.count = 0
            rows, wanted, place = T.next_batch(cfg, mesh, stream, known, step, place)
            into.append((rows, wanted, place, stream.count))
    for step, (rows, wanted, place, _) in enumerate(whole):
        got = [part[step] for part in parts]
        joined = jax.tree.map(lambda *x: np.concatenate(x), *(x[:2] for x in got))
        assert_same(joined, (rows, wanted))
        assert {x[2].cursor for x in got} == {place.cursor}
        assert sum((x[2].offsets for x in got), ()) == place.offsets
        stage = T.stage_at(cfg, step)
        assert {x[3] for x in got} == {stage.rows // processes * (stage.row_tokens + 1)}


def test_a_run_goes_on_with_another_number_of_rows():
    """Of as many its walks stand where they stood; else they are evenly apart from the first."""
    saved, mesh = (77, (5, 1, 2, 3, 4, 9, 6, 7)), functools.partial(many, processes=1)
    assert all(T.loader_state(CFG, mesh(n), *saved) == saved for n in (1, 2, 8))
    wide = T.for_devices(CFG, 16)
    more = T.loader_state(wide, mesh(16), *saved)
    apart = tuple((5 + CFG.vocab * r // 16) % CFG.vocab for r in range(16))
    assert more == (77, apart) and T.loader_state(wide, mesh(16), *more) == more
    back = T.loader_state(CFG, mesh(4), *more)
    assert back.offsets == tuple((5 + CFG.vocab * r // 8) % CFG.vocab for r in range(8))


@pytest.mark.parametrize("rows", [4, 520, 522, 65_536, 2**20 - 2])
def test_every_row_of_the_ngram_table_has_a_place_of_its_own(rows):
    places = T.table_rows(np.arange(rows), rows)
    assert np.array_equal(np.sort(places), np.arange(rows)) and places[-1] == 0


@pytest.mark.parametrize("devices", [8, 16, 64])
def test_owners_are_asked_for_equally_many_ngrams(devices):
    """Of ids as frequent as those of text (Zipf), which in order would be anything but even."""
    rng, rows, tokens = np.random.default_rng(0), T.Config.ngram_rows, 16_384
    frequent = rng.zipf(1.2, 10 * tokens)
    hashed = frequent[frequent < 32_980][:tokens].reshape(1, -1)
    ids = np.unique(T.ngram_ids(hashed, rows))

    def fullest(places):
        counts = np.bincount(places // (rows // devices), minlength=devices)
        return (counts.max() - counts.mean()) / np.sqrt(counts.mean())

    assert fullest(ids) > 10 and fullest(T.table_rows(ids, rows)) < 4


def test_what_does_not_fit_finds_the_row_of_no_history_and_is_counted(monkeypatch):
    """Eight devices, and all n-grams of one owner; of the others nothing changes."""
    cfg, rows = small_config(ngram_rows=2**16), 2**16
    hashed = np.random.default_rng(0).integers(0, BOS, (16, 256)).astype(np.uint16)
    wanted, places = T.request(cfg, hashed, 8)
    room = T.capacity(16 * 256, 8)
    assert wanted.shape == (8, 8, room) and T.dropped_ngrams(places) == 0
    ids = T.ngram_ids(hashed, rows)
    used = np.setdiff1d(ids, rows - 1)
    order = np.concatenate([[rows - 1], used, np.setdiff1d(np.arange(rows - 1), used)])
    moved = np.argsort(order)
    assert moved[rows - 1] == 0 and moved[used].max() < rows // 8
    monkeypatch.setattr(T, "table_rows", lambda ids, rows: moved[ids])
    wanted, places = T.request(cfg, hashed, 8)
    assert np.all(wanted[:, 1:] == rows // 8)  # nothing of seven owners
    want = moved[ids].swapaxes(0, 1)
    found = np.concatenate(
        [own[0][at] for own, at in zip(wanted, np.split(places, 8), strict=True)]
    )
    fits = found == want
    for own, own_fits in zip(np.split(want, 8), np.split(fits, 8), strict=True):
        assert len(np.unique(own[own_fits])) == room < len(np.unique(own))
    assert np.all(found[~fits] == 0) and np.sum(~fits) == T.dropped_ngrams(places) > 1000


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [8, 64, 4096, 393_216])
def test_room_is_for_different_ngrams_and_five_deviations_but_not_for_more_than_can_be(
    tokens, devices
):
    each = tokens // devices
    mean = 2 * each * min(1, (1300 / each) ** 0.06) / devices
    room, need = T.capacity(tokens, devices), mean + 5 * math.sqrt(mean)
    assert room == 2 * each or need <= room < need + 8 and room % 8 == 0
    assert room <= 2 * each


# ------------------------------------------------------------------------------------------------
# Candidates and vocabulary
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["speedrun", "medium", "tiny"])
def test_the_walk_meets_every_id(preset):
    assert math.gcd(T.STRIDE, T.PRESETS[preset].vocab) == 1


@pytest.mark.parametrize("count", [5, 20, 60, 104])
def test_candidates_are_the_targets_and_the_next_ids_of_the_walk(count):
    targets, place = np.array([7, 3, 7, 99, 50, 3, 1]), 90
    ids, after = T.candidates(targets, place, count, 104)
    assert ids.tolist() == sorted(set(ids.tolist())) and len(ids) == count
    others = [i for i in (np.arange(place, 208) * T.STRIDE % 104).tolist() if i not in targets]
    assert set(ids) == {1, 3, 7, 50, 99, *others[: count - 5]}
    assert after == (
        place if count == 5 else (place + min(104, int((count - 5) * 1.7) + 256)) % 104
    )


def test_too_many_targets_are_refused():
    with pytest.raises(T.UserError, match=r"5 different tokens, more than its 4 .*stages.N.cand"):
        T.candidates(np.array([7, 3, 7, 99, 50, 1]), 0, 4, 104)


def test_aims_are_places_among_the_candidates():
    """Of a token without a prefix, or with one that is no candidate: -1."""
    prefix_v = np.full(104, -1, np.int32)
    prefix_v[[7, 99, 50]] = 3, 20, 1
    row = np.array([5, 7, 3, 99, 50, 1], np.uint16)
    aims, _ = T.aim(row, 0, 5, prefix_v)
    assert aims.candidates.tolist() == [1, 3, 7, 50, 99]
    assert (aims.targets.tolist(), aims.prefixes.tolist()) == ([2, 1, 4, 3, 0], [1, -1, -1, 0, -1])
    aims, after = T.aim(row, 17, 0, prefix_v)  # all ids
    assert (aims.candidates.shape, after) == ((0,), 17)
    assert aims.targets.tolist() == [7, 3, 99, 50, 1]
    assert aims.prefixes.tolist() == [3, -1, 20, 1, -1]


def test_prefixes_and_normal_forms_by_hand():
    """The longest other word; the smallest id of a form, which part of a character has not."""
    words = [b"a", b"ab", b"abcd", b"abd", b"b", b" A", b"\xc3\xa1", b"\xc3", b" ", b"AB ", b"\n"]
    words.append(b" \xc3")
    assert T.prefix_table(words, 13).tolist() == [-1, 0, 1, 1, -1, 8, 7, -1, -1, -1, -1, 8, -1]
    table = T.normalised_ids(words, 13)
    assert table.dtype == np.uint16 and table.tolist() == [0, 1, 2, 3, 4, 0, 0, 7, 8, 1, 8, 11, 12]
    raw, known = (T.vocabulary(small_config(ngram_ids=x), WORDS) for x in ("raw", "normalised"))
    np.testing.assert_array_equal(raw.hashed_v, np.arange(104))
    np.testing.assert_array_equal(raw.prefix_v, known.prefix_v)


# ------------------------------------------------------------------------------------------------
# Sharing
# ------------------------------------------------------------------------------------------------


def test_put_sends_each_device_its_part():
    mesh, rows = mesh_of(4), np.arange(8 * 3, dtype=np.uint16).reshape(8, 3)
    cut, whole = T.put(rows, mesh, P(T.AXIS)), T.put(rows, mesh, P())
    for i, shard in enumerate(cut.addressable_shards):
        assert shard.device == jax.devices()[i]
        np.testing.assert_array_equal(shard.data, rows[2 * i : 2 * i + 2])
    assert whole.sharding.is_fully_replicated and len(whole.addressable_shards) == 4
    np.testing.assert_array_equal(whole, rows)


# ------------------------------------------------------------------------------------------------
# Prefetch
# ------------------------------------------------------------------------------------------------


class Source:
    """Counts upwards, remembers how far it was drawn, and may fail at some number."""

    def __init__(self, count, fails_at=None):
        self.count, self.fails_at, self.drawn = count, fails_at, 0

    def __iter__(self):
        for i in range(self.count):
            if i == self.fails_at:
                raise T.UserError(f"no item {i}")
            self.drawn += 1
            yield i


def wait_for(condition, seconds=10):
    """Give the thread time to come to `condition`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the thread did not get there"
        time.sleep(0.001)


def always() -> threading.Event:
    """A clock that runs."""
    running = threading.Event()
    running.set()
    return running


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_prefetch_keeps_the_order_and_ends_with_its_source(depth):
    assert list(T.prefetch(Source(50), depth, always())) == list(range(50))


@pytest.mark.parametrize("depth", [1, 4])
def test_prefetch_makes_at_most_depth_and_one_in_hand_ahead(depth):
    source = Source(1000)
    supply = T.prefetch(source, depth, always())
    for taken in range(5):
        assert next(supply) == taken
        wait_for(lambda now=taken: source.drawn == now + 1 + depth + 1)
        time.sleep(0.02)
        assert source.drawn == taken + 1 + depth + 1


def test_prefetch_raises_what_the_source_raised_after_the_items_before_it():
    supply = T.prefetch(Source(9, fails_at=3), 2, always())
    assert [next(supply) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(T.UserError, match="no item 3"):
        next(supply)


def test_a_stalled_loader_is_reported_and_waited_for(monkeypatch):
    monkeypatch.setattr(T, "STALL_SECONDS", 0.05)
    go, said = threading.Event(), []

    def late(line):
        said.append(line)
        if len(said) == 3:
            go.set()

    source = (go.wait(5) and i for i in range(2))
    assert list(T.prefetch(source, 2, always(), late)) == [0, 1]
    assert len(said) >= 3 and all(line.startswith("waiting for the loader") for line in said)


def test_loader_rests_while_the_clock_does():
    running, drawn = always(), []
    supply = T.prefetch((drawn.append(i) or i for i in range(100)), 50, running)
    assert [next(supply) for _ in range(3)] == [0, 1, 2]
    running.clear()
    time.sleep(0.05)
    before = len(drawn)
    time.sleep(0.3)
    assert len(drawn) == before
    running.set()
    assert list(supply) == list(range(3, 100))
