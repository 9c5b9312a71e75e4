"""Checks of data before a run: enough tokens, valid ids, folders, texts."""

import contextlib
import hashlib
import io
import json
import re
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
    """Return check_tokens for new shards with these tokens."""
    val = documents(3, 1025) if val is None else val
    streams = stream_of(folder, *train), stream_of(folder, val, split="val")
    return T.check_tokens(small_config(**changes) if changes else CFG, *streams)


@pytest.mark.parametrize("stage", [PLAIN, PACKED], ids=["plain", "packed"])
def test_the_last_step_needs_all_its_tokens(tmp_path, stage):
    tokens, cursor = documents(8, 9000), 0
    for _ in range(5):
        rows, cursor = next_rows(stream_of(tmp_path / "all", tokens), cursor, stage)
    # The last target of a plain row is the first token of the next row.
    enough = cursor + (stage is PLAIN)
    assert tokens[enough - 1] == rows[-1, -1]
    run = {"steps": 5, "stages": (stage,), "extension": 0}
    check(tmp_path, [tokens[:enough]], **run)
    with pytest.raises(
        T.UserError, match=r"enough for only 4 of 5 steps: get more text or"
    ) as error:
        check(tmp_path, [tokens[: enough - 1]], **run)
    assert str(tmp_path) in str(error.value)
    with pytest.raises(T.UserError, match=r"enough for only 2 of 5 steps"):
        check(tmp_path, [tokens[: enough // 2]], **run)


@pytest.mark.parametrize("bad", ["x_train_000000.bin", "x_train_000001.bin", "x_val_000000.bin"])
def test_a_shard_with_an_unknown_id_is_named(tmp_path, bad):
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
    with pytest.raises(
        T.UserError, match=r"id 97 >= 97, so its encoding is not bytes: set"
    ) as error:
        check(tmp_path, train, val)
    assert str(tmp_path / bad) in str(error.value)


def test_tokens_without_a_document_are_refused(tmp_path):
    """They are from another tokenizer, and the loss would have no meaning."""
    with pytest.raises(T.UserError, match="begins with bos=95, so its encoding is not bytes"):
        check(tmp_path, [np.minimum(documents(1, 8000), 94)], bos=95)


def test_tokens_of_another_tokenizer_are_ids_without_bytes(tmp_path, fitted):
    """The error names the settings, which a description may contain. Texts are refused."""
    words = r"is not bytes: set encoding \(ids for your own .*\), vocab, real_tokens and bos, "
    with pytest.raises(T.UserError, match=words):
        check(tmp_path / "a", [np.minimum(documents(1, 8000), 94)], bos=95)
    assert T.token_bytes(small_config(encoding="ids"), tmp_path) == []
    folder = own_text(tmp_path / "b", 720_000, 98_305, encoding="ids", real_tokens=300)
    cfg = fitted("tiny", folder)
    assert (cfg.encoding, cfg.real_tokens, cfg.bos, cfg.vocab) == ("ids", 300, 256, 384)
    (tmp_path / "a.txt").write_text("Roses are red. " * 900)
    with pytest.raises(T.UserError, match="encoding=ids: only your tokenizer knows text of such"):
        fitted("tiny", tmp_path / "a.txt", items=["encoding=ids"])


def test_sizes_and_hashes_of_the_shards_of_a_run(tmp_path):
    """Shards after the last step are not included."""
    found = check(tmp_path, [documents(1, 900), documents(1, 8000), documents(2, 500)])
    assert [*found] == ["x_train_000000.bin", "x_train_000001.bin", "x_val_000000.bin"]
    for name, facts in found.items():
        content = (tmp_path / name).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


# ---- The folder of shards ----------------------------------------------------------------------


def test_data_may_be_in_the_current_folder_or_next_to_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(T, "__file__", str(tmp_path / "script/train_gpt.py"))
    (tmp_path / "script/tokens").mkdir(parents=True)
    cfg = replace(small_config(), data="tokens")
    assert T.data_folder(cfg) == tmp_path / "script/tokens"
    (tmp_path / "tokens").mkdir()
    assert T.data_folder(cfg).resolve() == tmp_path / "tokens"
    with pytest.raises(
        T.UserError, match="no folder .*fineweb10B: run data/cached_fineweb10B.py, or pass"
    ):
        T.data_folder(replace(cfg, data=T.Config.data))
    of_text = "no folder .*none: pass --data TEXT with the same text, or train on another: --start "
    with pytest.raises(T.UserError, match=of_text):  # the deleted tokens of a run
        T.data_folder(replace(cfg, data=str(tmp_path / "none")))


def test_two_data_sets_in_a_folder_are_refused(tmp_path):
    stream_of(tmp_path, documents(1, 50))
    (tmp_path / "other_val_000000.bin").write_bytes(b"")
    with pytest.raises(T.UserError, match=r"holds several data sets \(other, x\): give each its"):
        T.data_folder(replace(small_config(), data=str(tmp_path)))


def test_hidden_files_are_not_shards(tmp_path):
    """macOS writes such files on disks of other systems."""
    (tmp_path / "._x_train_000000.bin").write_bytes(b"Mac OS X")
    (tmp_path / "._y_val_000000.bin").write_bytes(b"Mac OS X")
    stream = stream_of(tmp_path, documents(1, 50))
    assert [path.name for path in stream.paths] == ["x_train_000000.bin"]
    assert T.data_folder(replace(small_config(), data=str(tmp_path))) == tmp_path


def test_the_demo_corpus_is_made_only_if_it_is_missing(tmp_path, monkeypatch):
    """Or if its merges are missing. The tool is in data/, next to the script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(T, "__file__", str(tmp_path / "train_gpt.py"))
    with pytest.raises(T.UserError, match="corpus.py: copy the directory data/ too, or"):
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
        return SimpleNamespace(returncode=int(len(made) == 3), stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    cfg, demo = T.PRESETS["tiny"], tmp_path / "data/builtin"
    for _ in range(2):
        assert T.data_folder(cfg, said.append).resolve() == demo
        assert made == [[sys.executable, tmp_path / "data/builtin_corpus.py", demo]]
    assert said == [f"making the demo corpus in {demo}"]
    (demo / T.MERGES).unlink()
    assert T.data_folder(cfg, said.append).resolve() == demo and len(made) == 2
    (tmp_path / "other").mkdir()
    assert T.data_folder(replace(cfg, data="other"), said.append).name == "other" and len(made) == 2
    (demo / T.MERGES).unlink()
    with pytest.raises(T.UserError, match="^$"):  # the tool has printed the reason
        T.data_folder(cfg, said.append)


# ---- Texts, and shards with a description ------------------------------------------------------


def own_text(folder, train: int, val: int, **about):
    """Write shards with these numbers of tokens, as data/tokenize_text.py does."""
    for split, count in (("train", train), ("val", val)):
        tokens = documents(5, count)
        tokens[tokens == BOS] = 256
        stream_of(folder, tokens, split=split)
    about = {"encoding": "bytes", "real_tokens": 257, "bos": 256} | about
    (folder / T.DESCRIPTION).write_text(json.dumps(about))
    return folder


def config_of(*words, items=(), data=(), val=(), seed=None, say=lambda line: None):
    """Return the config of the command line WORDS --set ITEMS --data DATA --val VAL."""
    words, data, val = ([*map(str, texts)] for texts in (words, data, val))
    return T.resolve(SimpleNamespace(words=words, set=[*items], data=data, val=val, seed=seed), say)


@pytest.fixture
def fitted(monkeypatch):
    """Return config_of with a tokenizer in this process, which is faster."""

    def run_tool(name, *args):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            tokenize_text.main([*map(str, args)])
        return out.getvalue()

    monkeypatch.setattr(T, "run_tool", run_tool)
    return config_of


def test_a_description_sets_the_encoding_and_removes_the_target(tmp_path, fitted):
    cfg = fitted("tiny", own_text(tmp_path / "a", 720_000, 98_305))
    assert (cfg.encoding, cfg.real_tokens, cfg.bos, cfg.vocab) == ("bytes", 257, 256, 384)
    assert cfg.target == 0 and not any(any(stage.candidates) for stage in cfg.stages)
    same = {"encoding": "gpt2", "real_tokens": 50257, "bos": 256}  # the vocabulary of `speedrun`
    text = own_text(tmp_path / "b", 9_000_000, 10_485_761, **same)
    cfg = fitted("speedrun", text, items=["steps=30"])
    assert cfg.stages == T.Config().stages and cfg.vocab == 50304 and cfg.epochs == 1


def test_enough_text_keeps_the_steps_and_settings_are_kept(tmp_path, fitted):
    want, said = T.PRESETS["tiny"], []
    folder = own_text(tmp_path, 720_000, 98_305)
    cfg = fitted(folder, say=said.append)
    assert (cfg.steps, cfg.val_tokens, cfg.val_row) == (want.steps, want.val_tokens, want.val_row)
    begin = "data of your own, with validation on its shards: "
    assert said[0].startswith(f"{begin}data={tmp_path} encoding=bytes real_tokens=257")
    cfg = fitted(folder, items=["steps=60", "val_tokens=4096", "target=2.5", "vocab=400"])
    assert (cfg.steps, cfg.val_tokens, cfg.target, cfg.vocab) == (60, 4096, 2.5, 400)


@pytest.mark.parametrize("train, val", [(300_000, 30_000), (2_000_000, 5000), (40_000, 999)])
def test_short_texts_are_repeated_and_validated_in_complete_rows(tmp_path, fitted, train, val):
    full = T.PRESETS["tiny"]
    cfg = fitted(own_text(tmp_path, train, val))
    stream = T.TokenStream(tmp_path, "train", cfg.bos, cfg.epochs)
    T.check_tokens(cfg, stream, T.TokenStream(tmp_path, "val", cfg.bos))
    assert cfg.steps == full.steps and cfg.epochs == -(-cfg.tokens_after(cfg.steps) // train)
    assert 0.7 * min(val, full.val_tokens) < cfg.val_tokens < val
    assert cfg.val_batch // cfg.val_row == full.val_batch // full.val_row
    assert bool(cfg.val_every) == (cfg.epochs > 1)


def test_with_fewer_epochs_the_run_is_shorter(tmp_path, fitted):
    folder = own_text(tmp_path, 40_000, 999)
    cfg = fitted(folder, items=["epochs=2"])
    assert cfg.epochs == 2 and 70_000 < cfg.tokens_after(cfg.steps) < 80_000
    cfg = fitted(folder, items=["epochs=1", "steps=60"])
    stream = T.TokenStream(tmp_path, "train", cfg.bos, cfg.epochs)
    words = "enough for only 39 of 60 steps: get more text or shards, .* raise epochs"
    with pytest.raises(T.UserError, match=words):
        T.check_tokens(cfg, stream, T.TokenStream(tmp_path, "val", cfg.bos))


def test_short_texts_and_damaged_descriptions_are_refused(tmp_path, fitted):
    own_text(tmp_path, 90, 10)
    with pytest.raises(T.UserError, match="has too few tokens for tiny: take more text"):
        fitted(tmp_path)
    for text in (
        "",
        "[]",
        '{"encoding": "bytes"}',
    ):
        (tmp_path / T.DESCRIPTION).write_text(text)
        with pytest.raises(T.UserError, match=f"{T.DESCRIPTION} or a shard .*: name the text in"):
            fitted(tmp_path)


def test_ways_to_name_a_text(tmp_path, fitted, monkeypatch):
    """As a word before or after the preset, by --data or --set; several texts; ~; its tokens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"Roses are {name}. " * 900)
    want = fitted("tiny", data=["a.txt"])
    assert want.data.startswith(str(tmp_path / "a.txt.tokens")) and want.encoding == "bytes"
    for words, data, items in [
        (["a.txt"], [], []),
        (["a.txt", "tiny"], [], []),
        (["tiny"], [], ["data=a.txt"]),
        ([], ["~/a.txt"], []),
        ([], [want.data], []),  # the tokens of the text
    ]:
        assert fitted(*words, data=data, items=items) == want
    both = fitted("a.txt", "b.txt")
    assert both.data != want.data and both == fitted("a.txt", data=["b.txt"])
    for words, data, says in [
        ([""], [], "unknown preset '' .choose from"),
        (
            ["c.txt"],
            [],
            "'c.txt' .choose from plain, tiny, .*, pointer., and c.txt does not exist$",
        ),
        ([], ["c.txt"], "^c.txt does not exist$"),  # --data takes no presets
        ([], [""], "^'' does not exist$"),
        ([], ["a.txt", "tiny"], "^tiny does not exist$"),
        (["tiny", "speedrun"], [], "more than one preset: choose tiny or speedrun"),
    ]:
        with pytest.raises(T.UserError, match=says):
            fitted(*words, data=data)


def test_texts_for_validation(tmp_path, fitted, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "train.txt", "val.txt"):
        (tmp_path / name).write_text(f"Roses are {name}. " * 900)
    said = []
    cfg = fitted("tiny", "a.txt", val=["b.txt"], say=said.append)
    val = T.TokenStream(T.Path(cfg.data), "val", cfg.bos)
    assert bytes(val.read(1, 16).tolist()) == b"Roses are b.txt."
    by_name = fitted("tiny", "train.txt", "val.txt", say=said.append)
    assert by_name == fitted("train.txt", val=["val.txt"], say=said.append)
    fitted("a.txt", "b.txt", say=said.append)
    on = [re.search("^data of your own, with validation on (.*): data=", line)[1] for line in said]
    assert on[:3] == ["b.txt", "val.txt, by name", "val.txt"]
    assert on[3:] == ["the last tenth of all (--val TEXT names another)"]
    shards = own_text(tmp_path / "shards", 9000, 999)
    for words, says in [
        (["tiny"], "^--val requires a text to train on"),
        ([cfg.data], "has its validation: --val goes with a text"),
        ([shards], "has its validation: --val goes with a text"),
    ]:
        with pytest.raises(T.UserError, match=says):
            fitted(*words, val=["b.txt"])
    (shards / T.DESCRIPTION).unlink()
    with pytest.raises(T.UserError, match="contains validation shards: --val requires a text"):
        fitted(shards, val=["b.txt"])
    with pytest.raises(T.UserError, match="^c.txt does not exist$"):
        fitted("a.txt", val=["c.txt"])


def test_a_folder_of_texts_may_have_the_name_of_a_preset(tmp_path, fitted, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(T.UserError, match="tiny: no text: name .txt or .md"):
        fitted(data=["tiny"])
    assert fitted("tiny") == T.PRESETS["tiny"]
    (tmp_path / "tiny/a.txt").write_text("Roses are red. " * 900)
    for words, items in ((["tiny"], []), ([], ["data=tiny"])):
        cfg = fitted(*words, items=items, data=[] if items else ["tiny"])
        assert cfg.data.startswith(str(tmp_path / "tiny.tokens"))


def test_a_text_trains_tiny_unless_a_preset_is_named(tmp_path, fitted, machine):
    """Whatever the devices are. A text that is too short for a named preset is refused."""
    text = tmp_path / "a.txt"
    text.write_text("Roses are red. " * 900)
    machine("H200:104.8")
    assert fitted(text).preset == "tiny"
    short = r"for speedrun: take tiny, or more text \([\d,]+ tokens of some [\d,]+ are there\)"
    with pytest.raises(T.UserError, match=short):
        fitted("speedrun", text)


def test_a_text_is_tokenized_in_another_process(tmp_path, capfd):
    text = tmp_path / "poems.txt"
    text.write_text("Roses are red. " * 900)
    cfg = config_of(text)
    tokens = T.TokenStream(T.Path(cfg.data), "train", cfg.bos).read(1, 5)
    assert bytes(tokens.tolist()) == b"Roses"
    assert "making tokens of 13,500 bytes of text: bytes" in capfd.readouterr().err
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    with pytest.raises(T.UserError, match="^$"):
        config_of(tmp_path / "image.png")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}/image.png: no text: name .txt or .md")
