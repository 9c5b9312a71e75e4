"""What is looked at before a run starts: enough tokens, known ids, the folder they are in."""

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
    with pytest.raises(T.UserError, match=r"last for 4 of 5 steps: get more text or") as error:
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
    with pytest.raises(
        T.UserError, match=r"id 97 >= 97, so its encoding is not bytes: set"
    ) as error:
        check(tmp_path, train, val)
    assert str(tmp_path / bad) in str(error.value)


def test_tokens_of_another_encoding_are_refused_if_no_document_begins(tmp_path):
    """Before they train to a loss that means nothing."""
    with pytest.raises(T.UserError, match="begins with bos=95, so its encoding is not bytes"):
        check(tmp_path, [np.minimum(documents(1, 8000), 94)], bos=95)


def test_tokens_of_an_own_tokenizer_are_ids_without_bytes(tmp_path, fitted):
    """A refusal names what to set; a description beside the shards sets it, but for texts."""
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
        T.UserError, match="no folder .*fineweb10B: run data/cached_fineweb10B.py, or nam"
    ):
        T.data_folder(replace(cfg, data=T.Config.data))
    of_text = "no folder .*none: --data TEXT makes it again if the text is the same; else --start "
    with pytest.raises(T.UserError, match=of_text):  # of a run, whose tokens are gone
        T.data_folder(replace(cfg, data=str(tmp_path / "none")))


def test_two_data_sets_in_a_folder_are_refused(tmp_path):
    stream_of(tmp_path, documents(1, 50))
    (tmp_path / "other_val_000000.bin").write_bytes(b"")
    with pytest.raises(T.UserError, match=r"holds several data sets \(other, x\): give each its"):
        T.data_folder(replace(small_config(), data=str(tmp_path)))


def test_hidden_files_are_no_shards(tmp_path):
    """As macOS leaves beside every file on a disk of another system."""
    (tmp_path / "._x_train_000000.bin").write_bytes(b"Mac OS X")
    (tmp_path / "._y_val_000000.bin").write_bytes(b"Mac OS X")
    stream = stream_of(tmp_path, documents(1, 50))
    assert [path.name for path in stream.paths] == ["x_train_000000.bin"]
    assert T.data_folder(replace(small_config(), data=str(tmp_path))) == tmp_path


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
    with pytest.raises(T.UserError, match="^$"):  # the tool has said why
        T.data_folder(cfg, said.append)


# ---- Text of one's own, with a description of its shards ---------------------------------------


def own_text(folder, train: int, val: int, **about):
    """Shards of so many tokens as data/tokenize_text.py leaves them."""
    for split, count in (("train", train), ("val", val)):
        tokens = documents(5, count)
        tokens[tokens == BOS] = 256
        stream_of(folder, tokens, split=split)
    about = {"encoding": "bytes", "real_tokens": 257, "bos": 256} | about
    (folder / T.DESCRIPTION).write_text(json.dumps(about))
    return folder


def config_of(*words, items=(), data=(), val=(), seed=None, say=lambda line: None):
    """The config of the command line WORDS --set ITEMS --data DATA --val VAL."""
    words, data, val = ([*map(str, texts)] for texts in (words, data, val))
    return T.resolve(SimpleNamespace(words=words, set=[*items], data=data, val=val, seed=seed), say)


@pytest.fixture
def fitted(monkeypatch):
    """config_of, but texts become tokens in this process, which is faster."""

    def run_tool(name, *args):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            tokenize_text.main([*map(str, args)])
        return out.getvalue()

    monkeypatch.setattr(T, "run_tool", run_tool)
    return config_of


def test_own_text_says_what_its_tokens_are_and_has_no_target(tmp_path, fitted):
    cfg = fitted("tiny", own_text(tmp_path / "a", 720_000, 98_305))
    assert (cfg.encoding, cfg.real_tokens, cfg.bos, cfg.vocab) == ("bytes", 257, 256, 384)
    assert cfg.target == 0 and not any(any(stage.candidates) for stage in cfg.stages)
    same = {"encoding": "gpt2", "real_tokens": 50257, "bos": 256}  # the vocabulary of the record
    text = own_text(tmp_path / "b", 9_000_000, 10_485_761, **same)
    cfg = fitted("speedrun", text, items=["steps=30"])
    assert cfg.stages == T.Config().stages and cfg.vocab == 50304 and cfg.passes == 1


def test_enough_text_changes_no_step_and_what_is_set_counts(tmp_path, fitted):
    want, said = T.PRESETS["tiny"], []
    folder = own_text(tmp_path, 720_000, 98_305)
    cfg = fitted(folder, say=said.append)
    assert (cfg.steps, cfg.val_tokens, cfg.val_row) == (want.steps, want.val_tokens, want.val_row)
    begin = "data of your own, with validation on its shards: "
    assert said[0].startswith(f"{begin}data={tmp_path} encoding=bytes real_tokens=257")
    cfg = fitted(folder, items=["steps=60", "val_tokens=4096", "target=2.5", "vocab=400"])
    assert (cfg.steps, cfg.val_tokens, cfg.target, cfg.vocab) == (60, 4096, 2.5, 400)


@pytest.mark.parametrize("train, val", [(300_000, 30_000), (2_000_000, 5000), (40_000, 999)])
def test_all_steps_have_tokens_and_what_is_validated_fits_in_whole_rows(
    tmp_path, fitted, train, val
):
    full = T.PRESETS["tiny"]
    cfg = fitted(own_text(tmp_path, train, val))
    stream = T.TokenStream(tmp_path, "train", cfg.bos, cfg.passes)
    T.check_tokens(cfg, stream, T.TokenStream(tmp_path, "val", cfg.bos))
    assert cfg.steps == full.steps and cfg.passes == -(-cfg.tokens_after(cfg.steps) // train)
    assert 0.7 * min(val, full.val_tokens) < cfg.val_tokens < val
    assert cfg.val_batch // cfg.val_row == full.val_batch // full.val_row
    assert bool(cfg.val_every) == (cfg.passes > 1)


def test_passes_are_bounded_and_then_the_run_is_shorter(tmp_path, fitted):
    folder = own_text(tmp_path, 40_000, 999)
    cfg = fitted(folder, items=["passes=2"])
    assert cfg.passes == 2 and 70_000 < cfg.tokens_after(cfg.steps) < 80_000
    cfg = fitted(folder, items=["passes=1", "steps=60"])
    stream = T.TokenStream(tmp_path, "train", cfg.bos, cfg.passes)
    words = "last for 39 of 60 steps: get more text or shards, lower --set steps=, or raise pass"
    with pytest.raises(T.UserError, match=words):
        T.check_tokens(cfg, stream, T.TokenStream(tmp_path, "val", cfg.bos))


def test_text_that_is_too_short_and_a_damaged_description_are_refused(tmp_path, fitted):
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


def test_a_text_may_be_named_in_any_way(tmp_path, fitted, monkeypatch):
    """As a word, before or behind the preset, by --data or --set; several, a folder, with ~."""
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
        ([], [want.data], []),  # its tokens
    ]:
        assert fitted(*words, data=data, items=items) == want
    both = fitted("a.txt", "b.txt")
    assert both.data != want.data and both == fitted("a.txt", data=["b.txt"])
    for words, data, says in [
        ([""], [], "unknown preset ''; there are"),
        (["c.txt"], [], "'c.txt'; there are: plain, tiny, .*, pointer; there is no c.txt$"),
        ([], ["c.txt"], "^there is no c.txt$"),  # --data names no presets
        ([], [""], "^there is no ''$"),
        ([], ["a.txt", "tiny"], "^there is no tiny$"),
        (["tiny", "speedrun"], [], "two presets: name tiny or speedrun"),
    ]:
        with pytest.raises(T.UserError, match=says):
            fitted(*words, data=data)


def test_a_text_for_validation_may_be_named_too(tmp_path, fitted, monkeypatch):
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
        (["tiny"], "^--val: name a text to train on, in front of it$"),
        ([cfg.data], "has its validation: --val goes with a text"),
        ([shards], "has its validation: --val goes with a text"),
    ]:
        with pytest.raises(T.UserError, match=says):
            fitted(*words, val=["b.txt"])
    (shards / T.DESCRIPTION).unlink()
    with pytest.raises(T.UserError, match="has shards for validation: --val goes with a text"):
        fitted(shards, val=["b.txt"])
    with pytest.raises(T.UserError, match="^there is no c.txt$"):
        fitted("a.txt", val=["c.txt"])


def test_a_folder_of_texts_may_be_called_as_a_preset(tmp_path, fitted, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(T.UserError, match="tiny: no text: name .txt or .md"):
        fitted(data=["tiny"])
    assert fitted("tiny") == T.PRESETS["tiny"]
    (tmp_path / "tiny/a.txt").write_text("Roses are red. " * 900)
    for words, items in ((["tiny"], []), ([], ["data=tiny"])):
        cfg = fitted(*words, items=items, data=[] if items else ["tiny"])
        assert cfg.data.startswith(str(tmp_path / "tiny.tokens"))


def test_a_default_that_a_text_is_too_short_for_gives_way(tmp_path, fitted, monkeypatch, capsys):
    text = tmp_path / "a.txt"
    text.write_text("Roses are red. " * 900)
    monkeypatch.setattr(T, "presets_here", lambda settings: ["speedrun", "tiny"])
    assert fitted(text).preset == "tiny"
    said = r"for speedrun: take tiny, or more text \([\d,]+ tokens of some [\d,]+ are there\)"
    assert re.search(f"{said}; it gets the model", capsys.readouterr().err)
    with pytest.raises(T.UserError, match=said):
        fitted("speedrun", text)  # what was named is not replaced


def test_what_a_text_takes_to_fit_stands_above_what_was_set(tmp_path, fitted, monkeypatch):
    monkeypatch.setattr(T, "presets_here", lambda settings: ["speedrun", "tiny"])
    monkeypatch.setattr(T, "settings_here", lambda cfg: ["without=xsa,ngrams", "recompute=1"])
    same = {"encoding": "gpt2", "real_tokens": 50257, "bos": 256}
    text, said = own_text(tmp_path, 9_000_000, 10_485_761, **same), []
    cfg = fitted(text, items=["steps=30", "without=xsa"], say=said.append)
    assert (cfg.preset, cfg.without, cfg.ngram_rows, cfg.recompute) == (
        "speedrun", "xsa,ngrams", 0, True
    )  # fmt: skip
    assert said[1] == "speedrun in the memory that is here: without=xsa,ngrams recompute=1"


def test_a_text_becomes_tokens_in_a_process_of_its_own(tmp_path, capfd):
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
