"""What is looked at before a run starts: enough tokens, known ids, the folder they are in."""

import hashlib
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import BOS, documents, small_config, stream_of
from programs import CFG

import train_gpt as T

PLAIN = T.Stage(1.0, 8 * 32, 32, 0, (8, 32))
PACKED = T.Stage(1.0, 8 * 64, 64, 24, (16, 64))


def check(folder, train, val=None, **changes):
    """check_tokens on new shards with these tokens."""
    val = documents(3, 1025) if val is None else val
    streams = stream_of(folder, *train), stream_of(folder, val, split="val")
    return T.check_tokens(small_config(**changes) if changes else CFG, *streams)


@pytest.mark.parametrize("stage", [PLAIN, PACKED], ids=["plain", "packed"])
def test_check_tokens_accepts_exactly_enough_and_counts_the_steps(tmp_path, stage):
    tokens, cursor = documents(8, 9000), 0
    for _ in range(5):
        rows, cursor = T.next_rows(stream_of(tmp_path / "all", tokens), cursor, stage)
    # A last plain row shares its last target with the row after it.
    need = cursor + (stage is PLAIN)
    assert tokens[need - 1] == rows[-1, -1]
    check(tmp_path, [tokens[:need]], steps=5, stages=(stage,), extension=0)
    with pytest.raises(T.UserError, match=r"last for 4 of 5 steps: get more shards") as error:
        check(tmp_path, [tokens[: need - 1]], steps=5, stages=(stage,), extension=0)
    assert str(tmp_path) in str(error.value)
    with pytest.raises(T.UserError, match=r"last for 2 of 5 steps"):
        check(tmp_path, [tokens[: need // 2]], steps=5, stages=(stage,), extension=0)


def test_check_tokens_accepts_a_last_target_that_ends_the_last_shard(tmp_path):
    """The lone BOS of the last packed row is the last token that there is."""
    packed = T.Stage(1.0, 8 * 8, 8, 8, (4, 4))
    check(tmp_path, [np.tile([BOS, *range(7), BOS], 8)], steps=1, stages=(packed,), extension=0)


def test_check_tokens_accepts_exactly_enough_validation_tokens(tmp_path):
    check(tmp_path, [documents(1, 8000)], documents(2, 1025))
    with pytest.raises(T.UserError, match=r"holds 1,024 validation tokens, 1,025 are needed"):
        check(tmp_path, [documents(1, 8000)], documents(2, 1024))


@pytest.mark.parametrize("bad", ["x_train_000000.bin", "x_train_000001.bin", "x_val_000000.bin"])
def test_check_tokens_names_the_shard_with_an_unknown_id(tmp_path, bad):
    shards = {
        "x_train_000000.bin": documents(1, 900),
        "x_train_000001.bin": documents(1, 8000),
        "x_val_000000.bin": documents(3, 1025),
    }
    shards[bad][-1] = small_config().real_tokens - 1
    check(tmp_path, list(shards.values())[:2], shards["x_val_000000.bin"])
    shards[bad][-1] = small_config().real_tokens
    with pytest.raises(T.UserError, match=r"token id 97 is not below 97: .*again") as error:
        check(tmp_path, list(shards.values())[:2], shards["x_val_000000.bin"])
    assert str(tmp_path / bad) in str(error.value)


@pytest.mark.parametrize("stage", [PLAIN, PACKED], ids=["plain", "packed"])
def test_check_tokens_finds_a_row_with_more_different_tokens_than_candidates(tmp_path, stage):
    """Wherever it is: here in the 4th of 5 steps."""
    few = replace(stage, candidates=(9,))
    tokens = np.tile([BOS, *range(8)], 1000).astype(np.uint16)
    change = {"steps": 5, "extension": 0}
    check(tmp_path, [tokens], stages=(few,), **change)
    cursor = T.cursor_after(small_config(stages=(few,), **change), stream_of(tmp_path, tokens), 3)
    tokens[cursor + 9 : cursor + 18] = [BOS, *range(40, 48)]
    with pytest.raises(
        T.UserError,
        match=r"^step 3, of stage 0: a row has 17 different tokens, more than its 9 candidates: "
        r"raise --set stages.N.candidates=$",
    ):
        check(tmp_path, [tokens], stages=(few,), **change)
    check(tmp_path, [tokens], stages=(replace(few, candidates=(17,)),), **change)
    check(tmp_path, [tokens], stages=(stage,), **change)
    halves = replace(few, candidates=(9, 17))  # from step 3 on: 17
    check(tmp_path, [tokens], stages=(halves,), **change)


def test_rows_that_cannot_have_too_many_different_tokens_are_not_read(tmp_path, monkeypatch):
    for cfg in (CFG, T.PRESETS["tiny"]):
        counts = [T.schedule(cfg).candidates[step] for step in range(cfg.steps)]
        rows = [T.stage_at(cfg, step).row_tokens for step in range(cfg.steps)]
        enough = [not n or n >= t for n, t in zip(counts, rows, strict=True)]
        assert any(counts) and all(enough), "the test says nothing"
    monkeypatch.setattr(T, "next_rows", None)
    check(tmp_path, [documents(1, 8000)])


def test_check_tokens_answers_with_the_shards_that_will_be_read(tmp_path):
    """Not with what lies beyond the last step; so a record can be held against their hashes."""
    found = check(tmp_path, [documents(1, 900), documents(1, 8000), documents(2, 500)])
    assert [*found] == ["x_train_000000.bin", "x_train_000001.bin", "x_val_000000.bin"]
    for name, facts in found.items():
        content = (tmp_path / name).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_cursor_after_is_where_the_loader_stands(tmp_path):
    """After plain rows, packed ones, and shards that are left for the next one."""
    stream, cursor = stream_of(tmp_path, *(documents(seed, 1500) for seed in range(9))), 0
    for step in range(CFG.steps):
        assert T.cursor_after(CFG, stream, step) == cursor
        _, cursor = T.next_rows(stream, cursor, T.stage_at(CFG, step))
    assert T.cursor_after(CFG, stream, CFG.steps) == cursor > 4500


def test_what_was_found_before_the_clock_is_forgotten(tmp_path):
    """The loader looks for the documents again, inside the clock: no work is done for free."""
    stream = stream_of(tmp_path, documents(1, 8000))
    T.cursor_after(CFG, stream, CFG.steps)
    assert stream.documents.cache_info().currsize == 0
    T.next_rows(stream, 0, PACKED)
    assert stream.documents.cache_info().currsize == 1


def test_data_folder_that_is_missing_is_named(tmp_path):
    cfg = replace(small_config(), data=str(tmp_path / "nothing"))
    with pytest.raises(T.UserError, match="run data/cached_fineweb10B.py, or name a ") as error:
        T.data_folder(cfg)
    assert cfg.data in str(error.value)


def test_data_folder_is_looked_for_here_and_beside_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(T, "__file__", str(tmp_path / "script/train_gpt.py"))
    (tmp_path / "script/tokens").mkdir(parents=True)
    cfg = replace(small_config(), data="tokens")
    assert T.data_folder(cfg) == tmp_path / "script/tokens"
    (tmp_path / "tokens").mkdir()
    assert T.data_folder(cfg).resolve() == tmp_path / "tokens"


def test_demo_corpus_is_made_where_it_is_missing_and_only_there(tmp_path, monkeypatch):
    """Beside the script; one without its merges is not whole."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(T, "__file__", str(tmp_path / "train_gpt.py"))
    made, said = [], []

    def build(folder):
        made.append(folder)
        stream_of(folder, documents(1, 50))
        stream_of(folder, documents(1, 50), split="val")
        (folder / T.MERGES).write_text("[]")

    monkeypatch.setattr(T, "run_tool", {"data/builtin_corpus.py": {"build": build}}.get)
    cfg, demo = T.PRESETS["tiny"], tmp_path / "data/builtin"
    for _ in range(2):
        assert T.data_folder(cfg, said.append).resolve() == demo
        assert made == [demo]
    assert said == [f"making the demo corpus in {demo}"]
    (demo / T.MERGES).unlink()
    assert T.data_folder(cfg, said.append).resolve() == demo and len(made) == 2
    other = replace(cfg, data=str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    assert T.data_folder(other, said.append) == tmp_path / "other" and len(made) == 2


# ------------------------------------------------------------------------------------------------
# One's own text, with a description of its shards
# ------------------------------------------------------------------------------------------------

ABOUT = {"encoding": "bytes", "real_tokens": 257, "bos": 256}


def own_text(folder, train: int, val: int, **about):
    """Shards of so many tokens as data/tokenize_text.py leaves them."""
    for split, count in (("train", train), ("val", val)):
        tokens = documents(5, count)
        tokens[tokens == BOS] = 256
        stream_of(folder, tokens, split=split)
    names = {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in folder.glob("*.bin")}
    (folder / T.DESCRIPTION).write_text(json.dumps({"sha256": names, **ABOUT, **about}))
    return folder


def fitted(folder, *items, preset="tiny", say=lambda line: None):
    """The config of `PRESET --data FOLDER --set ITEMS`."""
    return T.resolve(SimpleNamespace(preset=preset, set=items, data=str(folder), seed=None), say)


@pytest.mark.parametrize(
    "encoding, real, bos, vocab", [("bytes", 257, 256, 384), ("gpt2", 50257, 50256, 50304)]
)
def test_own_text_says_what_its_tokens_are(tmp_path, encoding, real, bos, vocab):
    folder = own_text(tmp_path, 10, 10, encoding=encoding, real_tokens=real, bos=bos)
    cfg = fitted(folder, "steps=60", "val_tokens=4096")
    assert (cfg.encoding, cfg.real_tokens, cfg.bos, cfg.vocab) == (encoding, real, bos, vocab)
    assert cfg.target == 0 and (cfg.steps, cfg.val_tokens) == (60, 4096)  # as they were asked for
    assert fitted(folder, "steps=60", "val_tokens=4096", "vocab=60000").vocab == 60000


def test_few_steps_that_are_asked_for_have_a_short_extension(tmp_path):
    """As those that the text makes few; what is asked for stays."""
    folder = own_text(tmp_path, 720_000, 98_305)
    assert fitted(folder, "steps=24").extension == 3
    assert fitted(folder, "steps=24", "extension=10").extension == 10


def test_merges_of_other_shards_are_refused(tmp_path):
    """They are too few for the ids of these: text and bits per byte would be wrong."""
    (tmp_path / T.MERGES).write_text('["6162"]')
    with pytest.raises(T.UserError, match="merges.json is not of these shards"):
        T.token_bytes(T.PRESETS["tiny"], tmp_path)


def test_enough_text_changes_no_step(tmp_path):
    want, said = T.PRESETS["tiny"], []
    cfg = fitted(own_text(tmp_path, 720_000, 98_305), say=said.append)
    assert (cfg.steps, cfg.val_tokens, cfg.val_row) == (want.steps, want.val_tokens, want.val_row)
    assert said == [f"{tmp_path} holds bytes tokens, its own vocabulary of 384"]


@pytest.mark.parametrize("few, kept", [(40, 0), (200, 200), (384, 0)])
def test_own_text_has_candidates_for_all_that_its_rows_hold(tmp_path, monkeypatch, few, kept):
    """Of 384 ids; a row of 128 tokens has 80 different ones. But what was asked for is taken."""
    first, *others = T.PRESETS["tiny"].stages
    stages = replace(first, candidates=(few, few)), *others
    monkeypatch.setitem(T.PRESETS, "tiny", replace(T.PRESETS["tiny"], stages=stages))
    folder = own_text(tmp_path, 720_000, 98_305)
    cfg = fitted(folder)
    assert {*cfg.stages[0].candidates} == {kept}
    assert all(not any(stage.candidates) for stage in cfg.stages[1:])
    streams = [T.TokenStream(folder, split, cfg.bos) for split in ("train", "val")]
    T.check_tokens(cfg, *streams)
    asked = fitted(folder, "stages.0.candidates=(40,)")
    assert asked.stages[0].candidates == (40,)
    with pytest.raises(T.UserError, match="step 0, of stage 0: a row has .* raise --set stages"):
        T.check_tokens(asked, *streams)


@pytest.mark.parametrize("preset", T.PRESETS)
@pytest.mark.parametrize("train, val", [(300_000, 30_000), (2_000_000, 5000), (40_000, 999)])
def test_short_text_makes_a_run_short_as_little_as_can_be(tmp_path, preset, train, val):
    """The steps are all that there are tokens for; what is validated fits, in whole rows."""
    said = []
    full, folder = T.PRESETS[preset], own_text(tmp_path, train, val)
    if preset != "tiny" and train < 10_000_000:  # not even one step a stage
        with pytest.raises(T.UserError, match=f"too few for .* steps, the least of {preset}: tok"):
            fitted(folder, preset=preset)
        return
    cfg = fitted(folder, preset=preset, say=said.append)
    streams = [T.TokenStream(tmp_path, split, cfg.bos) for split in ("train", "val")]
    T.check_tokens(cfg, *streams)
    if cfg.steps < full.steps:
        with pytest.raises(T.UserError, match=rf"last for \d+ of {cfg.steps + 1} steps"):
            T.cursor_after(replace(cfg, steps=cfg.steps + 1), streams[0], cfg.steps + 1)
        assert 0 < cfg.extension <= max(1, cfg.steps // 8)
        assert f"for {cfg.steps} of {full.steps} steps" in said[0]
    else:
        assert train > full.total_tokens
    assert 0.7 * min(val, full.val_tokens) < cfg.val_tokens < val
    assert cfg.val_batch // cfg.val_row == full.val_batch // full.val_row


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"encoding": "bytes"}', '"x"', "\udcff", "[" * 10**5, "sha256 a list"],
)
def test_a_description_that_cannot_be_used_is_named(tmp_path, text):
    """By a new run and, whose config stands in its checkpoint, by one that resumes."""
    cfg = fitted(own_text(tmp_path, 700_000, 98_305), "val_tokens=4096", "steps=30")
    if text == "sha256 a list":
        text = json.dumps({**ABOUT, "sha256": [x.name for x in tmp_path.glob("*.bin")]})
    (tmp_path / T.DESCRIPTION).write_text(text, errors="surrogateescape")
    with pytest.raises(T.UserError, match=f"{T.DESCRIPTION}: .*: tokenize the text again"):
        fitted(tmp_path)
    with pytest.raises(T.UserError, match=f"{T.DESCRIPTION} is damaged: tokenize the text again"):
        T.check_tokens(cfg, *(T.TokenStream(tmp_path, x, cfg.bos) for x in ("train", "val")))


def test_shards_that_the_description_does_not_name_are_refused(tmp_path):
    """As when a tokenization was killed while the names of its shards appeared."""
    own_text(tmp_path, 10, 10)
    (tmp_path / "x_train_000001.bin").write_bytes((tmp_path / "x_train_000000.bin").read_bytes())
    with pytest.raises(T.UserError, match="not the shards that it describes: tokenize the text"):
        fitted(tmp_path)


def test_a_description_of_another_encoding_or_of_other_shards_is_refused(tmp_path):
    with pytest.raises(T.UserError, match="no encoding has this name and these numbers"):
        fitted(own_text(tmp_path / "a", 10, 10, encoding="gpt2"))
    cfg = fitted(own_text(tmp_path / "b", 700_000, 98_305), "val_tokens=4096", "steps=30")
    streams = [T.TokenStream(tmp_path / "b", split, cfg.bos) for split in ("train", "val")]
    T.check_tokens(cfg, *streams)
    stream_of(tmp_path / "b", np.full(98_305, 256), split="val")
    streams[1] = T.TokenStream(tmp_path / "b", "val", cfg.bos)
    with pytest.raises(T.UserError, match="x_val_000000.bin is not as dataset.json says: tokeniz"):
        T.check_tokens(cfg, *streams)


def test_a_setting_that_the_text_contradicts_is_refused(tmp_path):
    folder = own_text(tmp_path, 10, 10)
    with pytest.raises(T.UserError, match="--set bos=: the text in .* has 256: drop it"):
        fitted(folder, "bos=0")
    with pytest.raises(T.UserError, match="--set encoding=: the text in .* has bytes: drop it"):
        fitted(folder, "encoding=gpt2")
