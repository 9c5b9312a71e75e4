"""data/tokenize_text.py: what comes out is what went in, described, and whole or not there."""

import gzip
import hashlib
import itertools
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import shards
import tiktoken
import tiktoken_ext.openai_public
import tokenize_text
from shards import open_shard, write_shard
from test_data_tools import TOOLS, error_of

BOS = 256


def documents(folder: Path, split: str) -> list[str]:
    """The texts of all byte-level shards of a split, in order."""
    texts = []
    for path in sorted(folder.glob(f"*_{split}_*.bin")):
        tokens = open_shard(path)
        assert tokens[0] == BOS, f"{path.name} begins inside a document"
        pieces = np.split(tokens, np.flatnonzero(tokens == BOS))[1:]
        texts += [piece[1:].astype(np.uint8).tobytes().decode() for piece in pieces]
    return texts


TEXTS = ["one\ntwo\n", "Grüße <|endoftext|> inside", "three"]
AS_TEXT = (
    "one\ntwo\n\n<|endoftext|>\nGrüße <|endoftext|> inside\n<|endoftext|>\n<|endoftext|>\nthree\n"
)
AS_JSON = "\n\n".join(json.dumps({"id": 1, "text": text}) for text in [*TEXTS, ""])
COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def data_set(out: Path) -> dict | None:
    """What dataset.json says, if what is in `out` passes for a data set; checks that it is one."""
    names = {path.name for path in out.glob("*.bin")}
    if not any("_val_" in name for name in names):
        return None
    about = json.loads((out / "dataset.json").read_text())
    if not {*about["sha256"]} <= names:
        return None
    found = {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names}
    assert about["sha256"] == found
    for split, tokens in about["tokens"].items():
        arrays = [open_shard(out / name) for name in names if f"_{split}_" in name]
        assert tokens == sum(map(len, arrays))
        assert about["documents"][split] == sum((x == about["bos"]).sum() for x in arrays)
    return about


def tokenize(out: Path, *argv) -> tuple[list[str], list[str]]:
    """Run the tool with the byte encoding; (training documents, validation documents)."""
    tokenize_text.main([*map(str, argv), "--out", str(out), "--encoding", "bytes"])
    data_set(out)
    assert not list(out.glob(".*"))
    return documents(out, "train"), documents(out, "val")


@pytest.fixture
def many(tmp_path) -> Path:
    """A .jsonl file of 400 documents."""
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(400)))
    return path


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("suffix, content", [(".txt", AS_TEXT), (".jsonl", AS_JSON)])
def test_formats(tmp_path, compression, suffix, content):
    path = tmp_path / f"my.in{suffix}{compression}"
    path.write_bytes(COMPRESS[compression](content.encode()))
    assert tokenize(tmp_path / "out", path, "--val-fraction", 0) == (TEXTS, [])


@pytest.mark.parametrize("option", [["--doc-marker=---"], ["--doc-marker", "---"]])
def test_windows_text_file_with_byte_order_marks(tmp_path, option):
    path, mark = tmp_path / "a.MD", b"\xef\xbb\xbf"
    path.write_bytes(mark + b"---\r\none\r\ntwo\r\n---\r\n" + mark + b"three\n" + mark + b"---")
    train, _ = tokenize(tmp_path / "out", path, "--val-fraction", 0, *option)
    assert train == ["one\r\ntwo", "three"]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_long_lines_and_documents_in_parts(tmp_path, monkeypatch, size):
    monkeypatch.setattr(tokenize_text, "LINE_BYTES", max(size, len(tokenize_text.codecs.BOM_UTF8)))
    for module in (shards, tokenize_text):
        monkeypatch.setattr(module, "PIECE_CHARS", size)
    texts, paths = ["Gr\u00fc\u00dfe\r\n\r\n\n", "\U0001f600" * 5, " one\n \ntwo", "abc|\nx"], []
    for suffix in (".txt", ".jsonl"):
        paths.append(tmp_path / f"a{suffix}")
        lines = [json.dumps({"text": text}) for text in texts]
        whole = "\r\n|\n".join(texts) if suffix == ".txt" else "\n".join(lines)
        paths[-1].write_bytes(whole.encode())
    train, _ = tokenize(tmp_path / "out", *paths, "--val-fraction", 0, "--doc-marker", "|")
    assert train == [*texts, *texts]


def test_other_text_key_and_lone_surrogate(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "a\\ud800b"}\n')
    train, _ = tokenize(tmp_path / "out", path, "--val-fraction", 0, "--text-key", "body")
    assert train == ["a\ufffdb"]


def test_split_depends_on_documents_alone(tmp_path, many, monkeypatch):
    train, val = tokenize(tmp_path / "a", many, "--val-fraction", 0.1)
    assert len(train) + len(val) == 400 and not set(train) & set(val)
    assert 20 <= len(val) <= 60
    lines = many.read_text().splitlines(keepends=True)
    parts = [tmp_path / "1.jsonl", tmp_path / "2.jsonl.gz"]
    parts[0].write_text("".join(lines[:150:-1]))
    parts[1].write_bytes(gzip.compress("".join(lines[150::-1]).encode()))
    monkeypatch.setattr(tokenize_text, "BATCH_CHARS", 30)
    again = tokenize(tmp_path / "b", *parts, "--val-fraction", 0.1)
    assert again == (train[::-1], val[::-1])


def test_explicit_validation_file(tmp_path, many, capsys):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("only this")
    train, val = tokenize(tmp_path / "out", many, "--val", held_out)
    assert len(train) == 400 and val == ["only this"]
    assert "left out" not in capsys.readouterr().out
    held_out.write_text("only this\n<|endoftext|>\ndocument 7\n<|endoftext|>\ndocument 3")
    again, val = tokenize(tmp_path / "out", many, "--val", held_out, "--overwrite")
    assert again == [text for text in train if text not in val] and len(again) == 398
    assert "2 training documents are left out" in capsys.readouterr().out
    other = tmp_path / "other.txt"
    other.write_text("other")
    _, val = tokenize(tmp_path / "two", many, "--val", other, "--val", held_out)
    assert val == ["other", "only this", "document 7", "document 3"]
    held_out.write_bytes(many.read_bytes())
    copy = held_out.rename(tmp_path / "copy.jsonl")
    argv = (many, "--val", copy, "--out", tmp_path / "new", "--encoding", "bytes")
    assert "no documents for train" in error_of(capsys, tokenize_text.main, *argv)


DIGITS = "".join(map(str, range(10_000)))
SHORT = [f"{n:049}" for n in range(500)]


@pytest.mark.parametrize("texts, argv, size", [
    ([DIGITS[:999]], [], 100), ([DIGITS[:29_999]], [], 2000), ([DIGITS[:29_999]], [0.09], 2700),
    (["z" * 98, DIGITS[:19_900]], [0.9], 2000), (SHORT, [1e-9], 2000), (SHORT, [1 - 1e-9], 2500),
    (SHORT[:50], [1e-9], 250), ([DIGITS, "z"], [0.1, "--shard-tokens", 9999], 3889),
    (SHORT[:50], [1e-9, "--shard-tokens", 100], 50), (SHORT[:5], [1e-9], 25),
])  # fmt: skip
def test_few_documents_are_split_by_tokens(tmp_path, capsys, texts, argv, size):
    path = tmp_path / "a.txt"
    path.write_text("\n<|endoftext|>\n".join(texts))
    train, val = tokenize(tmp_path / "out", path, *(["--val-fraction", *argv] if argv else []))
    assert f"validation is the end of the text, {size:,} tokens" in capsys.readouterr().out
    assert "".join(train[: len(texts)] + val) == "".join(texts) or train[-1] == texts[-1] == "z"
    assert sum(len(text) + 1 for text in val) == size + ("".join(val[:1]) not in texts)


def test_what_is_written_beside_the_shards(tmp_path, many):
    tokenize(tmp_path, many, "--name", "n.a-me", "--doc-marker", "---", "--shard-tokens", 5000)
    about, names = data_set(tmp_path), sorted(path.name for path in tmp_path.glob("*.bin"))
    assert len(names) == 3 and [*about.pop("sha256")] == names
    assert about == {
        "name": "n.a-me", "encoding": "bytes", "real_tokens": 257, "bos": 256,
        "doc_marker": "---", "documents": about["documents"], "tokens": about["tokens"],
    }  # fmt: skip
    assert sum(about["documents"].values()) == 400


def test_one_document_shows_progress(tmp_path, capsys, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("word " * 100)
    for module, name in ((shards, "PIECE_CHARS"), (tokenize_text, "LINE_BYTES")):
        monkeypatch.setattr(module, name, 10)
    monkeypatch.setattr(tokenize_text, "BATCH_CHARS", 50)
    monkeypatch.setattr(time, "monotonic", itertools.count(0, 3).__next__)
    tokenize(tmp_path / "out", path, "--val-fraction", 0)
    first, *_, last = lines = capsys.readouterr().err.splitlines()
    assert first.startswith("0 documents, 50 tokens,") and len(lines) > 5
    assert last.startswith("1 documents, 501 tokens,")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_memory_for_a_long_document(tmp_path, suffix):
    """Less than five times its size, beside what the program itself needs."""
    code = "import resource, sys, tokenize_text; tokenize_text.main(sys.argv[1:]);"
    code += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"

    def peak(size: int) -> int:
        path = tmp_path / f"{size}{suffix}"
        text = "".join(f"{n} words in a line\n" for n in range(size // 23))
        path.write_text(json.dumps({"text": text}) if suffix == ".jsonl" else text)
        argv = [sys.executable, "-c", code, path, "--out", tmp_path / path.stem]
        argv += ["--encoding", "bytes"]
        env = os.environ | {"PYTHONPATH": str(TOOLS)}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        return int(done.stdout.split()[-1])

    assert peak(40_000_000) - peak(1000) < 5 * 40_000_000


def test_more_spaces_than_tiktoken_can_take(tmp_path, capsys, monkeypatch):
    path, pattern = tmp_path / "a.txt", tiktoken_ext.openai_public.r50k_pat_str
    gpt2 = tiktoken.Encoding(
        "gpt2",
        pat_str=pattern,
        mergeable_ranks={bytes([i]): i for i in range(256)} | {b"  ": 256},
        special_tokens={"<|endoftext|>": 257},
    )
    monkeypatch.setattr(tokenize_text, "text_encoding", lambda _: gpt2)
    path.write_text("x" + " " * tokenize_text.MAX_SPACES + "y")
    argv = [str(path), "--out", str(tmp_path / "out"), "--val-fraction", "0"]
    tokenize_text.main(argv)
    path.write_text("x" + " " * (tokenize_text.MAX_SPACES + 1) + "y")
    line = error_of(capsys, tokenize_text.main, *argv, "--overwrite")
    assert "a.txt: over 999,998 spaces in a row" in line


def test_numbers_of_any_length(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"n": {"9" * 10_000}, "m": -{"9" * 10_000}.5e{"9" * 5000}, "text": "x"}}')
    assert tokenize(tmp_path / "out", path, "--val-fraction", 0) == (["x"], [])


def test_documents_are_not_cut_at_the_end_of_a_shard(tmp_path):
    path = tmp_path / "a.txt"
    sizes = [3, 4, 9, 30, 1, 2]  # with BOS: 4 + 5, 10, 31 alone as it is too large, 2 + 3
    path.write_text("\n<|endoftext|>\n".join("x" * size for size in sizes))
    out = tmp_path / "out"
    train, _ = tokenize(out, path, "--val-fraction", 0, "--shard-tokens", 10, "--name", "n")
    assert [len(text) for text in train] == sizes
    found = {p.name: len(open_shard(p)) for p in out.glob("*.bin")}
    assert found == {f"n_train_{n:06d}.bin": size for n, size in enumerate([9, 10, 31, 5], 1)}


def test_validation_shards_begin_at_zero(tmp_path, many):
    tokenize(tmp_path / "out", many, "--val-fraction", 0.5)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.bin"))
    assert names == ["text_train_000001.bin", "text_val_000000.bin"]


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.parquet", b"x", "unknown kind"),
        ("a.txt.zst", b"x", "unknown kind"),
        ("a.txt.xz", b"plain text", "damaged, or not xz"),
        ("a.txt.gz", b"plain text", "damaged, or not gz"),
        ("a.txt.xz", lzma.compress(os.urandom(999).hex().encode())[:500], "damaged, or not xz"),
        ("a.txt.gz", gzip.compress(os.urandom(999).hex().encode())[:500], "damaged, or not gz"),
        ("a.txt", b"fine\n<|endoftext|>\nfine\nbad \xff\n", "line 4: not UTF-8"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "\xff"}\n', "line 2: not UTF-8"),
        ("a.jsonl", b'{"text": "fine"}\n\n{"text": \n', "line 3: not JSON"),
        ("a.jsonl", b'{"text": "fine"}\n{"body": "x", "id": 1}\n', "line 2: no text under"),
        ("a.jsonl", b'{"text": 1}\n', "line 1: no text under the key 'text'"),
        ("a.jsonl", b'["text"]\n', "not an object"),
        ("a.txt", b"\n<|endoftext|>\n", "no documents"),
        ("a.txt", b"x" * 98, "99 tokens are too few for training and validation"),
        ("a.txt", b"cut \xc3", "line 1: not UTF-8"),
        ("a.jsonl", b'{"text": "fine"}\n' + b"[" * 200_000, "line 2: JSON that is nested too"),
        ("a.jsonl", b'{"text": 9}', "line 1: no text under the key 'text'"),
    ],
)
def test_bad_input_files(tmp_path, capsys, name, content, says):
    path, out = tmp_path / name, tmp_path / "out"
    path.write_bytes(content)
    argv = (path, "--out", out, "--encoding", "bytes", "--shard-tokens", 1)
    line = error_of(capsys, tokenize_text.main, *argv)
    assert says in line
    assert name in line or "documents" in says or "too few" in says
    assert not list(out.glob("*"))  # nor what was written before the error


@pytest.mark.parametrize(
    "argv, says",
    [
        (["missing.txt"], "missing.txt: No such file"),
        (["many.jsonl", "--val", "missing.txt"], "missing.txt: No such file"),
        (["many.jsonl", "."], ".: is a folder, name the files in it"),
        (["many.jsonl", "pipe.txt"], "pipe.txt: is not a file"),
        (["many.jsonl", "many.jsonl"], "many.jsonl: given twice"),
        (["many.jsonl", "--val", "./many.jsonl"], "many.jsonl: given twice"),
        (["many.jsonl", "--val", "soft.jsonl"], "many.jsonl: the same file as soft.jsonl"),
        (["hard.jsonl", "--val", "many.jsonl"], "hard.jsonl: the same file as many.jsonl"),
        (["many.jsonl", "--out", ""], "argument --out: is empty"),
        (["many.jsonl", "--out", "many.jsonl/x"], "--out many.jsonl/x: Not a directory"),
        (["many.jsonl", "--doc-marker", "a\nb"], "--doc-marker: use one line"),
        (["many.jsonl", "--val-fraction", "1"], "--val-fraction"),
        (["many.jsonl", "--val-fraction", "0.1", "--val", "many.jsonl"], "not allowed with"),
        (["many.jsonl", "--shard-tokens", "0"], "--shard-tokens"),
        (["many.jsonl", "--name", "a/b"], "--name"),
        (["many.jsonl", "--encoding", "gpt5"], "--encoding"),
        ([], "FILE"),
    ],
)
def test_bad_arguments(tmp_path, many, capsys, monkeypatch, argv, says):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.txt")
    os.symlink("many.jsonl", "soft.jsonl")
    os.link("many.jsonl", "hard.jsonl")
    argv = "--out", "out", "--encoding", "bytes", *argv
    assert says in error_of(capsys, tokenize_text.main, *argv)
    assert not Path("out").exists()


def test_old_shards_are_kept_unless_told(tmp_path, many, capsys):
    out = tmp_path / "out"
    tokenize(out, many, "--val-fraction", 0.5, "--shard-tokens", 1000)
    before = {path: path.read_bytes() for path in out.iterdir()}
    argv = (many, "--out", out, "--encoding", "bytes")
    line = error_of(capsys, tokenize_text.main, *argv)
    assert "shards named text, bytes tokens: use --overwrite" in line
    line = error_of(capsys, tokenize_text.main, *argv, "--name", "other", "--overwrite")
    assert "holds another data set (text): use another --out" in line
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff")
    error_of(capsys, tokenize_text.main, bad, *argv, "--overwrite")
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    tokenize(out, many, "--val-fraction", 0, "--overwrite")
    assert sorted(path.name for path in out.iterdir()) == ["dataset.json", "text_train_000001.bin"]
    (out / "text_train_000001.bin").unlink()
    (out / "dataset.json").write_text('{"of": "somebody"}')
    assert "dataset.json is not of this tool" in error_of(capsys, tokenize_text.main, *argv)


def test_a_kill_between_two_names_leaves_nothing_that_passes(tmp_path, many, monkeypatch, capsys):
    """At each place where a new data set replaces an old one; the next command goes on there."""
    argv = (many, "--encoding", "bytes", "--shard-tokens", 2000, "--val-fraction")
    for name, fraction in (("old", 0.7), ("new", 0.5)):
        tokenize(tmp_path / name, *argv, fraction)
    old, new = data_set(tmp_path / "old"), data_set(tmp_path / "new")
    publish, seen = tokenize_text.publish, []

    def killed(whole, out):
        with monkeypatch.context() as patch:
            for owner, name in ((Path, "unlink"), (os, "replace"), (Path, "rmdir")):
                real = getattr(owner, name)

                def call(*args, real=real):
                    if next(calls) >= moment:
                        raise KeyboardInterrupt
                    return real(*args)

                patch.setattr(owner, name, call)
            publish(whole, out)

    for moment in range(99):
        out, calls = tmp_path / str(moment), itertools.count()
        shutil.copytree(tmp_path / "old", out)
        monkeypatch.setattr(tokenize_text, "publish", killed)
        try:
            tokenize(out, *argv, 0.5, "--overwrite")
            break
        except KeyboardInterrupt:
            seen.append(data_set(out))
        monkeypatch.setattr(tokenize_text, "publish", publish)
        line = error_of(capsys, tokenize_text.main, *argv, 0.5, "--out", out)
        assert "already holds" in line and data_set(out) == new
    assert seen[0] == old and seen[-1] == new and seen.count(None) == len(seen) - 2 > 5


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_tokenization_leaves_nothing(tmp_path, many, monkeypatch, number, status):
    def interrupted(*_):
        assert len(list(tmp_path.glob("out/.tokenizing/new/*"))) > 2
        signal.raise_signal(number)

    monkeypatch.setattr(tokenize_text.Progress, "add", interrupted)
    argv = [str(many), "--shard-tokens", "1000", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as end:
        shards.run(lambda: tokenize_text.main([*argv, "--encoding", "bytes"]))
    assert end.value.code == status and not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_killed_tokenizations(tmp_path):
    """SIGKILL at eight moments, over an old data set and a killed one's remains."""
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text("\n<|endoftext|>\n".join(f"document {n} " * 200 for n in range(4000)))
    argv = path, "--out", out, "--encoding", "bytes", "--shard-tokens", 1_000_000
    argv = [sys.executable, TOOLS / "tokenize_text.py", *map(str, argv)]
    start = time.monotonic()
    subprocess.run([*argv, "--val-fraction", "0.1"], check=True)
    seconds, old = time.monotonic() - start, data_set(out)
    for moment in np.linspace(0.3, 1.05, 8):
        process = subprocess.Popen([*argv, "--overwrite"])
        time.sleep(moment * seconds)
        process.kill()
        process.wait()
        found = data_set(out)
        assert found in (None, old) or found["documents"] != old["documents"]
    subprocess.run([*argv, "--overwrite"], check=True)
    assert data_set(out)["documents"] != old["documents"] and not list(out.glob(".*"))


def test_a_file_that_vanishes(tmp_path, many, capsys, monkeypatch):
    late = tmp_path / "late.txt"
    late.write_text("")
    monkeypatch.setattr(tokenize_text, "text_encoding", lambda _: late.unlink())
    line = error_of(capsys, tokenize_text.main, late, many, "--out", tmp_path)
    assert "late.txt: cannot be read (No such file" in line
    late.write_text("text " * 100)
    monkeypatch.setattr(tokenize_text, "text_encoding", lambda _: shards.byte_bpe())
    monkeypatch.setattr(tokenize_text, "LINE_BYTES", 10)
    monkeypatch.setattr(tokenize_text, "BATCH_CHARS", 10)
    monkeypatch.setattr(shards, "PIECE_CHARS", 10)
    monkeypatch.setattr(tokenize_text.Progress, "add", lambda *_: late.write_text("short"))
    line = error_of(capsys, tokenize_text.main, late, many, "--out", tmp_path)
    assert "late.txt: has changed while it was read" in line


def test_two_at_a_time(tmp_path, many, capsys):
    work = tmp_path / "out" / ".tokenizing"
    write_shard(work / "new" / "text_train_000007.bin", np.ones(5, np.uint16))  # a killed one's
    code = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.lockf(f, fcntl.LOCK_EX);"
    argv = [sys.executable, "-c", code + "print(flush=True); input()", work / "lock"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, **pipes) as other:
        other.stdout.readline()
        argv = many, "--out", tmp_path / "out", "--encoding", "bytes"
        assert "another process writes" in error_of(capsys, tokenize_text.main, *argv)
        assert (work / "new").exists()
        other.communicate(b"\n")
    tokenize(tmp_path / "out", many)


def test_vocabulary_that_cannot_be_had(tmp_path, many, capsys, monkeypatch):
    def offline(_):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    argv = (many, "--out", tmp_path)
    assert "TIKTOKEN_CACHE_DIR" in error_of(capsys, tokenize_text.main, *argv)


def test_as_a_command(tmp_path, many):
    def command(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE):
        argv = [sys.executable, TOOLS / "tokenize_text.py", *argv, "--encoding", "bytes"]
        env = os.environ | {"JAX_PLATFORMS": "nosuch"}  # data tools have no use for one
        return subprocess.run(argv, cwd=tmp_path, env=env, stdout=stdout, stderr=stderr, text=True)

    done = command(many, "--out", "out")
    assert done.returncode == 0 and "400 documents" in done.stderr
    assert done.stdout.startswith("train: ") and "\nval: " in done.stdout
    done = command(many, "--out", "out")
    assert done.returncode == 2 and done.stderr.startswith("error: out already holds 2 shards")
    assert done.stderr.count("\n") == 1
    with open("/dev/full", "w") as full:
        done = command(many, "--out", "new", stdout=full, stderr=full)
        assert done.returncode == 0 and data_set(tmp_path / "new") == data_set(tmp_path / "out")
        assert command(many, "--out", "new", stdout=full, stderr=full).returncode == 2


def test_copies_of_what_becomes_validation_are_left_out_of_training(tmp_path, capsys):
    """Where validation is the end of the text: also a copy of the document that is cut there."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefgh "), 4000)) for _ in range(6)]
    source = tmp_path / "twice.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 2))
    tokenize_text.main([str(source), "--out", str(tmp_path / "out"), "--encoding", "bytes"])
    train, val = (
        b"".join(open_shard(path).astype("u1").tobytes() for path in sorted(paths))
        for paths in ((tmp_path / "out").glob(f"*_{split}_*.bin") for split in ("train", "val"))
    )
    assert len(val) >= 2000 and val[1:1000] not in train
    assert "training documents are left out, as validation has the same" in capsys.readouterr().out
    source.write_text((json.dumps({"text": "the same words"}) + "\n") * 2000)
    with pytest.raises(shards.UserError, match="copies of each other: nothing is left to train"):
        tokenize_text.main([str(source), "--out", str(tmp_path / "no"), "--encoding", "bytes"])
