"""data/tokenize_text.py: the trainer reads what the files hold, or one line says why not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import shards
import tiktoken
import tokenize_text  # conftest.py has put data/ on the path

import train_gpt as T

BOS = 256
TEXTS = ["one\ntwo\n", "Grüße <|endoftext|> inside\n", "three 3's"]
AS_TEXT = "<|endoftext|>\n".join([TEXTS[0], TEXTS[1], "", TEXTS[2]])
FILES = {
    "A.TXT": AS_TEXT,
    "a.md": "\ufeff<|endoftext|>\r\n" + AS_TEXT.replace("\n", "\r\n"),
    "a.jsonl": "".join(json.dumps({"id": 9, "text": text}) + "\n\n" for text in ["", *TEXTS]),
}
WORDS = [f"document {n} " * 20 for n in range(100)]


def jsonl(path: Path, texts: list[str]) -> Path:
    """A .jsonl file of these documents."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def tokenize(out: Path, *argv, encoding: str = "bytes") -> tuple[list[int], list[int]]:
    """Run the tool; the training and the validation tokens, as the trainer reads them."""
    tokenize_text.main([*map(str, argv), "--out", str(out), "--encoding", encoding])
    bos = {"bytes": 256, "gpt2": 50256}[encoding]
    about = json.loads((out / T.DESCRIPTION).read_text())
    assert about.pop("settings").keys() == T.PRESETS.keys()
    assert about == {"encoding": encoding, "real_tokens": bos + 1, "bos": bos}
    streams = [T.TokenStream(out, split, bos) for split in ("train", "val")]
    return tuple(stream.read(0, len(stream)).tolist() for stream in streams)


def of_bytes(texts: list[str]) -> list[int]:
    """The tokens of documents by hand: 256, then their bytes."""
    return [token for text in texts for token in (BOS, *text.encode())]


@pytest.mark.parametrize("name", FILES)
def test_bytes_of_a_file_are_those_of_its_documents(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name].encode())
    held = jsonl(tmp_path / "val.jsonl", ["only this"])
    train, val = tokenize(tmp_path / "new" / "out", path, "--val", held)
    assert train == of_bytes(TEXTS) and val == of_bytes(["only this"])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="needs GPT-2's ranks")
def test_gpt2_tokens_are_those_that_tiktoken_has_for_whole_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_text, "BATCH_DOCUMENTS", 7)
    texts = [*TEXTS, *WORDS, "Hello world", "\ud800 lone", "  \n\n\t x" * 50]
    path = jsonl(tmp_path / "a.jsonl", texts)
    train, val = tokenize(tmp_path / "out", path, encoding="gpt2")
    gpt2 = tiktoken.get_encoding("gpt2")
    want = [token for text in texts for token in (50256, *gpt2.encode_ordinary(text))]
    assert [*train, *val[1:]] == want and val[0] == 50256
    assert len(want) - len(train) == len(want) // 10
    assert [50256, 15496, 995, 50256] == want[want.index(15496) - 1 :][:4]  # Hello world


def test_validation_is_the_last_tenth_of_the_text(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("0123456789" * 100)
    train, val = tokenize(tmp_path / "one", path)
    assert train == of_bytes(["0123456789" * 90]) and val == of_bytes(["0123456789" * 10])
    documents = jsonl(tmp_path / "b.jsonl", ["x" * 8, "y" * 89, "z" * 10])  # 110 tokens
    assert tokenize(tmp_path / "begins", documents)[1] == of_bytes(["z" * 10])  # one BOS
    monkeypatch.setattr(tokenize_text, "VAL_TOKENS", 20)
    train, val = tokenize(tmp_path / "most", path)
    assert len(train) == 1001 - 20 and val == [BOS, *b"01234567890123456789"]


def test_a_long_text_lies_in_several_shards_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_text, "SHARD_TOKENS", 15_000)
    files = [jsonl(tmp_path / f"{n}.jsonl", WORDS[n : n + 50]) for n in (0, 50)]
    train, _ = tokenize(tmp_path / "out", *files, "--val", jsonl(tmp_path / "val.jsonl", ["x"]))
    assert train == of_bytes(WORDS) and 15_000 < len(train) < 30_000
    names = ["text_train_000001.bin", "text_train_000002.bin", "text_val_000000.bin"]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.bin")) == names


@pytest.mark.parametrize("name, content, says", [
    ("a.txt.gz", b"x", "a.txt.gz: unknown kind of file, use .txt, .md, .jsonl"),
    ("a.txt", None, "a.txt: there is no such file"),
    ("a.txt", b"", "no text in .*a.txt"),
    ("a.txt", b"<|endoftext|>\n<|endoftext|>\n", "no text in .*a.txt"),
    ("a.txt", b"12345678", "9 tokens are too few for training and validation"),
    ("a.txt", b"fine\nbad \xff\n", "a.txt: not UTF-8 text"),
    ("a.txt", "UTF-16 of Windows".encode("utf-16"), "a.txt: not UTF-8 text"),
    ("a.jsonl", b'{"text": "fine"}\n{"text": \n', "a.jsonl, line 2: no JSON object with a string"),
    ("a.jsonl", b'{"text": "fine"}\n{"body": "x"}\n', "line 2: no JSON object with a string"),
    ("a.jsonl", b'{"text": 1}\n', "line 1: no JSON object"),
    ("a.jsonl", b"[" * 200_000, "line 1: no JSON object"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_named_and_nothing_is_written(tmp_path, name, content, says):
    path, out = tmp_path / name, tmp_path / "out"
    if content is not None:
        path.write_bytes(content)
    before = [*tmp_path.iterdir()]
    with pytest.raises(T.UserError, match=says):
        tokenize(out, path)
    assert [*tmp_path.iterdir()] == before


def test_what_cannot_be_done_is_said_before_any_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = jsonl(Path("a.jsonl"), WORDS)
    monkeypatch.setattr(tokenize_text, "documents", None)  # nothing is read
    Path("full").mkdir()
    shards.write_shard(Path("full", "mine_train_000001.bin"), np.ones(5, np.uint16))
    for argv, says in [
        (["a.jsonl", "--val", "./a.jsonl"], "a file is named twice"),
        (["a.jsonl", "--val", "b.txt"], "b.txt: there is no such file"),
        (["a.jsonl", "--out", ""], "--out .* is there already"),
        (["a.jsonl", "--out", "full"], "--out .*full is there already"),
        (["a.jsonl", "--out", "a.jsonl"], "--out .*a.jsonl is there already"),
        (["a.jsonl", "--out", "a.jsonl/x"], "File exists"),
        (["a.jsonl", "--encoding", "gpt5"], "invalid choice: 'gpt5'"),
        ([], "required: FILE"),
    ]:
        with pytest.raises((T.UserError, OSError), match=says):
            tokenize_text.main(["--out", "out", "--encoding", "bytes", *argv])
        assert sorted(Path().iterdir()) == [path, Path("full")]
    assert [path.name for path in Path("full").iterdir()] == ["mine_train_000001.bin"]


def test_an_interrupted_tokenization_leaves_nothing(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", WORDS)

    def interrupted(*_):
        assert len([*tmp_path.glob(".tokenizing-*/*/text_train_*.bin")]) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dumps", interrupted)  # dataset.json is the last file
    with pytest.raises(KeyboardInterrupt):
        tokenize(tmp_path / "out", path)
    assert [*tmp_path.iterdir()] == [path]


HOLDS = """
import sys, pathlib, shards
with shards.work_folder(pathlib.Path(sys.argv[1]), sys.argv[2]) as work:
    (work / "half").write_text("x")
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("prefix", [".tokenizing-", ".writing-"])
def test_what_a_killed_process_has_left_is_removed_by_the_next(tmp_path, prefix):
    def begin():
        argv = [sys.executable, "-c", HOLDS, tmp_path, prefix]
        return subprocess.Popen(
            argv, cwd=Path(shards.__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def left():
        return {path.name for path in tmp_path.glob(f"{prefix}*")}

    with begin() as killed:
        assert killed.stdout.readline() == b"ready\n"
        dead = left()
        killed.kill()
    assert len(dead) == 1 and left() == dead
    path = jsonl(tmp_path / "a.jsonl", WORDS)
    with begin() as alive:
        assert alive.stdout.readline() == b"ready\n"
        held = left()
        assert len(held) == 1 and held != dead  # it has removed what the dead one had left
        tokenize(tmp_path / "out", path)
        shards.write_whole(tmp_path / "file", b"whole")
        assert left() == held and (tmp_path / held.pop() / "half").exists()
        alive.communicate()
    assert alive.returncode == 0 and not left()
    (tmp_path / f"{prefix}older").mkdir()
    tokenize(tmp_path / "out", path, "--anew")
    shards.write_whole(tmp_path / "file", b"whole")
    assert not left() and {x.name for x in tmp_path.iterdir()} == {"a.jsonl", "out", "file"}


def test_a_file_system_without_locks_is_no_obstacle_and_loses_nothing(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    (tmp_path / ".tokenizing-other").mkdir()  # dead or alive: nobody knows
    tokenize(tmp_path / "out", jsonl(tmp_path / "a.jsonl", WORDS))
    assert {x.name for x in tmp_path.iterdir()} == {"a.jsonl", "out", ".tokenizing-other"}


def test_as_a_command(tmp_path):
    def command(*argv):
        argv = [sys.executable, tokenize_text.__file__, *argv, "--encoding", "bytes"]
        env = os.environ | {"JAX_PLATFORMS": "nosuch"}  # it has no use for devices
        return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)

    path = jsonl(tmp_path / "a.jsonl", WORDS)
    done = command("a.jsonl", "--out", "a.tokens")
    total = len(of_bytes(WORDS))
    assert done.returncode == 0 and f"{total:,} tokens" in done.stderr
    assert done.stdout.startswith(f"a.tokens: {total - total // 10:,} tokens for training, ")
    again = command(path, "--out", "a.tokens")
    line = f"--out {tmp_path}/a.tokens is there already: name another folder, or delete it"
    assert (again.returncode, again.stdout, again.stderr) == (2, "", f"error: {line}\n")
