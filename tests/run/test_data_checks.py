"""What is looked at before a run starts: enough tokens, known ids, the folder they are in."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tokenize_text
from conftest import BOS, documents, small_config, stream_of
from programs import CFG, next_rows

import train_gpt as T

PLAIN = T.Stage(1.0, 8 * 32, 32, 0, (8, 32))
PACKED = T.Stage(1.0, 8 * 64, 64, 24, (16, 64))


def check(folder, train, val=None, **changes):
    """check_tokens on new shards with these tokens."""
    val = documents(3, 1025) if val is None else val
    streams = stream_of(folder, *train), stream_of(folder, val, split="val")
    return T.check_tokens(small_config(**changes) if changes else CFG, *streams)


@pytest.mark.parametrize("stage", [PLAIN, PACKED], ids=["plain", "packed"])
def test_exactly_enough_tokens_are_enough_and_fewer_are_refused_with_the_step(tmp_path, stage):
    tokens, cursor = documents(8, 9000), 0
    for _ in range(5):
        rows, cursor = next_rows(stream_of(tmp_path / "all", tokens), cursor, stage)
    # A last plain row shares its last target with the row after it.
    enough = cursor + (stage is PLAIN)
    assert tokens[enough - 1] == rows[-1, -1]
    run = {"steps": 5, "stages": (stage,), "extension": 0}
    check(tmp_path, [tokens[:enough]], **run)
    with pytest.raises(T.UserError, match=r"last for 4 of 5 steps: get more shards") as error:
        check(tmp_path, [tokens[: enough - 1]], **run)
    assert str(tmp_path) in str(error.value)
    with pytest.raises(T.UserError, match=r"last for 2 of 5 steps"):
        check(tmp_path, [tokens[: enough // 2]], **run)


@pytest.mark.parametrize("bad", ["x_train_000000.bin", "x_train_000001.bin", "x_val_000000.bin"])
def test_the_shard_with_an_unknown_id_is_named(tmp_path, bad):
    shards = {
        "x_train_000000.bin": documents(1, 900),
        "x_train_000001.bin": documents(1, 8000),
        "x_val_000000.bin": documents(3, 1025),
    }
    for last in (small_config().real_tokens - 1, small_config().real_tokens):
        shards[bad][-1] = last
        *train, val = shards.values()
        if last < small_config().real_tokens:
            check(tmp_path, train, val)
    with pytest.raises(T.UserError, match=r"token id 97 >= 97: not made with bytes: set") as error:
        check(tmp_path, train, val)
    assert str(tmp_path / bad) in str(error.value)


def test_tokens_of_another_encoding_are_refused_if_no_document_begins(tmp_path):
    """Before they train to a loss that means nothing."""
    with pytest.raises(T.UserError, match="no document begins with bos=95: not made with bytes"):
        check(tmp_path, [np.minimum(documents(1, 8000), 94)], bos=95)


def test_the_answer_is_size_and_hash_of_the_shards_that_will_be_read(tmp_path):
    """Not of what lies beyond the last step; so a record can be held against their hashes."""
    found = check(tmp_path, [documents(1, 900), documents(1, 8000), documents(2, 500)])
    assert [*found] == ["x_train_000000.bin", "x_train_000001.bin", "x_val_000000.bin"]
    for name, facts in found.items():
        content = (tmp_path / name).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


# ---- The folder --------------------------------------------------------------------------------


def test_data_folder_is_looked_for_here_and_beside_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(T, "__file__", str(tmp_path / "script/train_gpt.py"))
    (tmp_path / "script/tokens").mkdir(parents=True)
    cfg = replace(small_config(), data="tokens")
    assert T.data_folder(cfg) == tmp_path / "script/tokens"
    (tmp_path / "tokens").mkdir()
    assert T.data_folder(cfg).resolve() == tmp_path / "tokens"
    with pytest.raises(
        T.UserError, match="no folder .*none: run data/cached_fineweb10B.py, or nam"
    ):
        T.data_folder(replace(cfg, data=str(tmp_path / "none")))


def test_two_data_sets_in_a_folder_are_refused(tmp_path):
    stream_of(tmp_path, documents(1, 50))
    (tmp_path / "other_val_000000.bin").write_bytes(b"")
    with pytest.raises(T.UserError, match=r"holds several data sets \(other, x\): give each its"):
        T.data_folder(replace(small_config(), data=str(tmp_path)))


def test_demo_corpus_is_made_where_it_is_missing_and_only_there(tmp_path, monkeypatch):
    """By the tool beside the script, in a process of its own; again if its merges are missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(T, "__file__", str(tmp_path / "train_gpt.py"))
    with pytest.raises(T.UserError, match="corpus.py: copy the folder data/ there too, or"):
        T.data_folder(T.PRESETS["tiny"], print)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/builtin_corpus.py").touch()
    made, said = [], []

    def run(command, **options):
        made.append(command)
        if len(made) < 3:
            stream_of(demo, documents(1, 50))
            stream_of(demo, documents(1, 50), split="val")
            (demo / T.MERGES).write_text("[]")
        return SimpleNamespace(returncode=int(len(made) == 3), stderr="error: a disk is full")

    monkeypatch.setattr(subprocess, "run", run)
    cfg, demo = T.PRESETS["tiny"], tmp_path / "data/builtin"
    for _ in range(2):
        assert T.data_folder(cfg, said.append).resolve() == demo
        assert made == [[sys.executable, tmp_path / "data/builtin_corpus.py"]]
    assert said == [f"making the demo corpus in {demo}"]
    (demo / T.MERGES).unlink()
    assert T.data_folder(cfg, said.append).resolve() == demo and len(made) == 2
    (tmp_path / "other").mkdir()
    assert T.data_folder(replace(cfg, data="other"), said.append).name == "other" and len(made) == 2
    (demo / T.MERGES).unlink()
    with pytest.raises(T.UserError, match="^data/builtin_corpus.py: a disk is full$"):
        T.data_folder(cfg, said.append)


# ---- Text of one's own, with a description of its shards ---------------------------------------


def own_text(folder, train: int, val: int, **about):
    """Shards of so many tokens as data/tokenize_text.py leaves them."""
    for split, count in (("train", train), ("val", val)):
        tokens = documents(5, count)
        tokens[tokens == BOS] = 256
        stream_of(folder, tokens, split=split)
    about = {"encoding": "bytes", "real_tokens": 257, "bos": 256} | about
    own = {name: tokenize_text.settings(name, folder, about) for name in T.PRESETS}
    about = about | {"settings": own}
    (folder / T.DESCRIPTION).write_text(json.dumps(about))
    return folder


def fitted(folder, *items, preset="tiny", say=lambda line: None):
    """The config of `PRESET --data FOLDER --set ITEMS`."""
    args = SimpleNamespace(preset=preset, set=[*items], data=str(folder), seed=None)
    return T.resolve(args, say)


def test_own_text_says_what_its_tokens_are_and_has_no_target(tmp_path):
    cfg = fitted(own_text(tmp_path / "a", 720_000, 98_305))
    assert (cfg.encoding, cfg.real_tokens, cfg.bos, cfg.vocab) == ("bytes", 257, 256, 384)
    assert cfg.target == 0 and not any(any(stage.candidates) for stage in cfg.stages)
    same = {"encoding": "gpt2", "real_tokens": 50257, "bos": 256}  # the vocabulary of the record
    cfg = fitted(own_text(tmp_path / "b", 9_000_000, 10_485_761, **same), preset="speedrun")
    assert cfg.stages == T.Config().stages and cfg.vocab == 50304


def test_enough_text_changes_no_step_and_what_is_set_counts(tmp_path):
    want, said = T.PRESETS["tiny"], []
    folder = own_text(tmp_path, 720_000, 98_305)
    cfg = fitted(folder, say=said.append)
    assert (cfg.steps, cfg.val_tokens, cfg.val_row) == (want.steps, want.val_tokens, want.val_row)
    assert said[0].startswith(f"{tmp_path} holds text of your own: encoding=bytes real_tokens=257")
    cfg = fitted(folder, "steps=60", "val_tokens=4096", "target=2.5", "vocab=400")
    assert (cfg.steps, cfg.val_tokens, cfg.target, cfg.vocab) == (60, 4096, 2.5, 400)


@pytest.mark.parametrize("train, val", [(300_000, 30_000), (2_000_000, 5000), (40_000, 999)])
def test_short_text_makes_a_run_short(tmp_path, train, val):
    """Nearly as long as there are tokens for; what is validated fits, in whole rows."""
    full = T.PRESETS["tiny"]
    cfg = fitted(own_text(tmp_path, train, val))
    streams = [T.TokenStream(tmp_path, split, cfg.bos) for split in ("train", "val")]
    T.check_tokens(cfg, *streams)
    assert cfg.tokens_after(cfg.steps) > 0.8 * train or cfg.steps == full.steps
    assert 0.7 * min(val, full.val_tokens) < cfg.val_tokens < val
    assert cfg.val_batch // cfg.val_row == full.val_batch // full.val_row


def test_text_that_is_too_short_and_a_damaged_description_are_refused(tmp_path):
    own_text(tmp_path, 900, 99)
    with pytest.raises(T.UserError, match="too few tokens for tiny: tokenize more text"):
        fitted(tmp_path)
    for text in (
        "",
        "[]",
        '{"encoding": "bytes"}',
    ):
        (tmp_path / T.DESCRIPTION).write_text(text)
        with pytest.raises(T.UserError, match=f"{T.DESCRIPTION} .*: tokenize the text again"):
            fitted(tmp_path)


def test_a_file_of_text_is_tokenized_beside_it_once(tmp_path):
    """As bytes where it is short; again when it has changed, also to one with an older date."""
    text = tmp_path / "poems.txt"
    text.write_text("Roses are red. " * 9000)
    folder = tmp_path / "poems.txt.tokens"  # of poems.md it is another
    cfg = fitted(text)
    made = folder.stat().st_mtime_ns
    assert (cfg.data, cfg.encoding) == (str(folder), "bytes")
    assert fitted(text) == cfg and folder.stat().st_mtime_ns == made
    assert T.text_tokens(str(folder)) == str(folder) and T.text_tokens(None) is None
    text.write_text("Violets are blue. " * 9000)
    os.utime(text, (1, 1))
    fitted(text)
    tokens = T.TokenStream(folder, "train", cfg.bos).read(1, 7)
    assert bytes(tokens.tolist()) == b"Violets"
    (folder / T.DESCRIPTION).unlink()
    with pytest.raises(T.UserError, match=f"{folder} is there already"):
        T.text_tokens(str(text))
    with pytest.raises(T.UserError, match="none: there is no such text, and no such folder"):
        T.text_tokens(str(tmp_path / "none"))


def test_a_file_that_is_no_text_is_refused_in_one_line(tmp_path):
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    with pytest.raises(T.UserError, match=r"^data/tokenize_text.py: .*image.png: unknown kind"):
        fitted(tmp_path / "image.png")
