"""The tools in data/: shards are written whole or not at all, and every error is one line."""

import errno
import gzip
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import types
from collections import Counter
from itertools import pairwise
from pathlib import Path

import builtin_corpus  # conftest.py has put data/ on the path
import cached_fineweb10B
import numpy as np
import pytest
import shards
import tokenize_text
from shards import UserError, decode, open_shard, shard_path, text_encoding, write_shard

import train_gpt

TOOLS = Path(tokenize_text.__file__).parent
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


def error_of(capsys, main, *argv) -> str:
    """The one line on stderr with which `main` ends; checks that it is one and the status 2."""
    with pytest.raises(SystemExit) as end:
        shards.run(lambda: main([str(arg) for arg in argv]))
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1
    return line


# ------------------------------------------------------------------------------------------------
# shards.py
# ------------------------------------------------------------------------------------------------


def test_shard_round_trip(tmp_path):
    path = shard_path(tmp_path / "new", "x", "train", 7)
    assert path.name == "x_train_000007.bin"
    tokens = np.array([50256, 0, 65535, 3], np.uint16)
    write_shard(path, tokens)
    np.testing.assert_array_equal(open_shard(path), tokens)
    header = np.fromfile(path, "<i4", 256)
    assert header[:3].tolist() == [20240520, 1, 4] and not header[3:].any()
    assert path.stat().st_size == 1024 + 2 * 4


@pytest.mark.parametrize("tokens", [np.arange(3), np.zeros(0, np.uint16)])
def test_shard_must_be_some_uint16_tokens(tmp_path, tokens):
    with pytest.raises(ValueError, match="uint16"):
        write_shard(tmp_path / "x.bin", tokens)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize(
    "crash, seen",
    [(OSError(errno.ENOSPC, "No space left on device"), UserError), (KeyboardInterrupt(), None)],
)
def test_crash_while_writing_leaves_what_was_there(tmp_path, monkeypatch, function, crash, seen):
    def crashes(*_):
        raise crash

    old, new = tmp_path / "x_train_000001.bin", tmp_path / "x_train_000002.bin"
    write_shard(old, np.ones(5, np.uint16))
    monkeypatch.setattr(os, function, crashes)
    for path in (old, new):
        with pytest.raises(seen or type(crash)):
            write_shard(path, np.zeros(9, np.uint16))
    assert list(tmp_path.iterdir()) == [old]
    assert open_shard(old).tolist() == [1] * 5


@pytest.mark.parametrize(
    "error, status, line",
    [
        (UserError("no\nnews"), 2, "error: no news\n"),
        (PermissionError(13, "Permission denied", "/x"), 2, None),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_run_ends_with_one_line(capsys, error, status, line):
    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        shards.run(main)
    assert end.value.code == status
    assert capsys.readouterr().err == (line or f"error: {error}\n")


def test_text_comes_back_from_its_tokens_without_what_is_no_token():
    encoding = shards.byte_bpe([b"th", b"the"])
    ids = encoding.encode_ordinary("the other Gr\u00fc\u00dfe")
    assert ids[0] == 257 and encoding.eot_token == 258 == encoding.n_vocab - 1
    assert decode(encoding, np.array([259, *ids, 2000])) == "the other Gr\u00fc\u00dfe"


@pytest.mark.parametrize(
    "content, says",
    [
        (None, "No such file"),
        (b"\xff\x00", "decode"),
        (b"[", "Expecting value"),
        (b'{"a": 1}', "no list of merges"),
        (b"[1]", "must be str"),
        (b'["xy"]', "non-hexadecimal"),
        (b'["7468", "7468"]', "a merge twice"),
        (b'["74"]', "of less than two bytes"),
    ],
)
def test_merges_that_cannot_be_used_are_named_in_one_line(tmp_path, content, says):
    if content is not None:
        (tmp_path / "merges.json").write_bytes(content)
    with pytest.raises(UserError) as error:
        text_encoding("bpe", tmp_path)
    line = str(error.value)
    assert line.startswith(f"{tmp_path}/merges.json cannot be used (") and says in line
    assert line.endswith("): make the data again")


# ------------------------------------------------------------------------------------------------
# tokenize_text.py
# ------------------------------------------------------------------------------------------------

TEXTS = ["one\ntwo\n", "Grüße <|endoftext|> inside", "three"]
AS_TEXT = (
    "one\ntwo\n\n<|endoftext|>\nGrüße <|endoftext|> inside\n<|endoftext|>\n<|endoftext|>\nthree\n"
)
AS_JSON = "\n\n".join(json.dumps({"id": 1, "text": text}) for text in [*TEXTS, ""])
COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def tokenize(out: Path, *argv) -> tuple[list[str], list[str]]:
    """Run the tool with the byte encoding; (training documents, validation documents)."""
    tokenize_text.main([*map(str, argv), "--out", str(out), "--encoding", "bytes"])
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


def test_windows_text_file_with_byte_order_mark(tmp_path):
    path = tmp_path / "a.md"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n---\r\nthree")
    train, _ = tokenize(tmp_path / "out", path, "--val-fraction", 0, "--doc-marker=---")
    assert train == ["one\r\ntwo", "three"]


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


def test_explicit_validation_file(tmp_path, many):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("only this")
    train, val = tokenize(tmp_path / "out", many, "--val", held_out)
    assert len(train) == 400 and val == ["only this"]


def test_documents_are_not_cut_at_the_end_of_a_shard(tmp_path):
    path = tmp_path / "a.txt"
    sizes = [3, 4, 9, 30, 1, 2]  # with BOS: 4 + 5, 10, 31 alone as it is too large, 2 + 3
    path.write_text("\n<|endoftext|>\n".join("x" * size for size in sizes))
    out = tmp_path / "out"
    train, _ = tokenize(out, path, "--val-fraction", 0, "--shard-tokens", 10, "--name", "n")
    assert [len(text) for text in train] == sizes
    found = {p.name: len(open_shard(p)) for p in out.iterdir()}
    assert found == {f"n_train_{n:06d}.bin": size for n, size in enumerate([9, 10, 31, 5], 1)}


def test_validation_shards_begin_at_zero(tmp_path, many):
    tokenize(tmp_path / "out", many, "--val-fraction", 0.5)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["text_train_000001.bin", "text_val_000000.bin"]


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.parquet", b"x", "unknown kind"),
        ("a.txt.zst", b"x", "unknown kind"),
        ("a.txt.xz", b"plain text", "damaged, or not xz"),
        ("a.txt.gz", b"plain text", "damaged, or not gz"),
        ("a.txt.xz", lzma.compress(os.urandom(999))[:500], "damaged, or not xz"),
        ("a.txt.gz", gzip.compress(os.urandom(999))[:500], "damaged, or not gz"),
        ("a.txt", b"fine\n<|endoftext|>\nfine\nbad \xff\n", "line 4: not UTF-8"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "\xff"}\n', "line 2: not UTF-8"),
        ("a.jsonl", b'{"text": "fine"}\n\n{"text": \n', "line 3: not JSON"),
        ("a.jsonl", b'{"text": "fine"}\n{"body": "x", "id": 1}\n', "line 2: no text under"),
        ("a.jsonl", b'{"text": 1}\n', "line 1: no text under the key 'text'"),
        ("a.jsonl", b'["text"]\n', "not an object"),
        ("a.txt", b"\n<|endoftext|>\n", "no documents"),
        ("a.txt", b"x", "documents is for val"),
    ],
)
def test_bad_input_files(tmp_path, capsys, name, content, says):
    path, out = tmp_path / name, tmp_path / "out"
    path.write_bytes(content)
    argv = (path, "--out", out, "--encoding", "bytes", "--shard-tokens", 1)
    line = error_of(capsys, tokenize_text.main, *argv)
    assert says in line
    assert name in line or "documents" in says
    assert not list(out.glob("*"))  # nor what was written before the error


@pytest.mark.parametrize(
    "argv, says",
    [
        (["missing.txt"], "missing.txt: no such file"),
        (["many.jsonl", "--val", "missing.txt"], "missing.txt: no such file"),
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
    assert says in error_of(capsys, tokenize_text.main, *argv, "--out", "out")


def test_old_shards_are_kept_unless_told(tmp_path, many, capsys):
    out = tmp_path / "out"
    tokenize(out, many, "--val-fraction", 0, "--shard-tokens", 1000)
    other = out / "other_train_000001.bin"
    write_shard(other, np.full(1, BOS, np.uint16))
    before = {path: path.read_bytes() for path in out.iterdir()}
    argv = (many, "--out", out, "--encoding", "bytes")
    capsys.readouterr()
    assert "--overwrite" in error_of(capsys, tokenize_text.main, *argv)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    tokenize(out, many, "--val-fraction", 0, "--overwrite")
    assert sorted(out.iterdir()) == [other, out / "text_train_000001.bin"]


def test_vocabulary_that_cannot_be_had(tmp_path, many, capsys, monkeypatch):
    def offline(_):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    argv = (many, "--out", tmp_path)
    assert "TIKTOKEN_CACHE_DIR" in error_of(capsys, tokenize_text.main, *argv)


def test_as_a_command(tmp_path, many):
    def command(*argv):
        argv = [sys.executable, TOOLS / "tokenize_text.py", *argv, "--encoding", "bytes"]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)

    done = command(many, "--out", "out")
    assert done.returncode == 0 and "400 documents" in done.stderr
    assert done.stdout.startswith("train: ") and "\nval: " in done.stdout
    done = command(many, "--out", "out")
    assert done.returncode == 2 and done.stderr.startswith("error: out already holds 2 shards")
    assert done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------------
# builtin_corpus.py
# ------------------------------------------------------------------------------------------------


WHOLE = pytest.param("whole", marks=pytest.mark.slow)  # 15 seconds


@pytest.fixture(scope="module", params=["three modules", WHOLE])
def builtin(request, tmp_path_factory):
    """(folder, counts) of the corpus: of three modules, or of the whole standard library."""
    folder, library = tmp_path_factory.mktemp("corpus"), tmp_path_factory.mktemp("library")
    stdlib = Path(sysconfig.get_path("stdlib"))
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "whole":
            for name in ("_pydecimal.py", "argparse.py", "typing.py"):
                shutil.copy(stdlib / name, library)
            patch.setattr(sysconfig, "get_path", lambda _: str(library))
        return folder, builtin_corpus.build(folder)


@pytest.fixture(scope="module")
def texts(builtin):
    """Split -> decoded documents of the corpus."""
    encoding = text_encoding("bpe", builtin[0])
    assert encoding.n_vocab == encoding.eot_token + 1 == builtin_corpus.VOCAB
    found = {}
    for split, number in (("train", 1), ("val", 0)):
        tokens = open_shard(shard_path(builtin[0], "builtin", split, number))
        assert len(tokens) == builtin[1][f"{split}_tokens"] and tokens[0] == encoding.eot_token
        pieces = np.split(tokens, np.flatnonzero(tokens == encoding.eot_token))[1:]
        found[split] = encoding.decode_batch([piece[1:].tolist() for piece in pieces])
    return found


def test_builtin_files(builtin, texts):
    folder, counts = builtin
    names = ["builtin_train_000001.bin", "builtin_val_000000.bin", "merges.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    train, val = texts["train"], texts["val"]
    assert len(train) + len(val) == counts["documents"] == len({*train, *val})
    assert counts["val_documents"] == len(val) > 50
    assert counts["val_bytes"] == sum(len(text.encode()) for text in val) >= 300_000
    assert counts["bytes"] == counts["val_bytes"] + sum(len(text.encode()) for text in train)


@pytest.mark.parametrize("builtin", [WHOLE], indirect=True)
def test_builtin_is_enough_for_tiny(builtin):
    cfg = train_gpt.PRESETS["tiny"]
    streams = [train_gpt.TokenStream(builtin[0], split, cfg.bos) for split in ("train", "val")]
    train_gpt.check_tokens(cfg, *streams)


def slow_merges(texts: list[str], count: int) -> list[bytes]:
    """Byte-pair encoding by counting everything again for every merge."""
    words = [
        [bytes([byte]) for byte in word.encode()]
        for text in texts
        for word in re.findall(shards.BYTE_BPE_PATTERN, text)
    ]
    merges = []
    while len(merges) < count:
        counts = Counter(pair for word in words for pair in pairwise(word))
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        if (merged := pair[0] + pair[1]) not in merges:
            merges.append(merged)
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == pair:
                    word[at : at + 2] = [merged]
                at += 1
    return merges


def test_merges_are_those_of_plain_counting():
    texts = [
        "aaaa aaab banana bandana",
        "  indented\n\n    more  \n",
        "na\u00efve 1234 12 123!",
    ] * 3
    assert builtin_corpus.learn_merges(texts, 25) == slow_merges(texts, 25)


@pytest.mark.parametrize("builtin", [WHOLE], indirect=True)
def test_builtin_is_the_same_in_another_process(builtin, tmp_path):
    folder, counts = builtin
    argv = [sys.executable, builtin_corpus.__file__, "--out", tmp_path]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0 and f"{counts['documents']} documents" in done.stdout
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_builtin_validation_paragraphs_are_not_in_training(texts):
    def paragraphs(split):
        parts = (part.strip() for text in texts[split] for part in text.split("\n\n"))
        return {part for part in parts if len(part) > 300}

    assert len(paragraphs("val")) > 50 and not paragraphs("val") & paragraphs("train")


SOURCE = '''"""About the module."""
# A comment of eight words or more is kept, as this one.
# It has two lines.
TEXT = """
# This is no comment, however many words it has, but a string.
"""


class A(Base):
    """About the class."""

    def f(self, x: int = 1):  # short
        """About the module."""

    async def g(self, *args):
        """About the method.

        More.
        """
'''


def test_builtin_text_of_a_module(tmp_path):
    folder = tmp_path / "package"
    (folder / "tests").mkdir(parents=True)
    (folder / "__init__.py").write_text(SOURCE)
    (folder / "tests" / "a.py").write_text(SOURCE)
    (entries,) = builtin_corpus.module_documents(tmp_path)
    assert [tuple(entry) for entry in entries] == [
        ("docstrings", "package", "About the module."),
        (
            "comments",
            "",
            "A comment of eight words or more is kept, as this one.\nIt has two lines.",
        ),
        ("docstrings", "package.A(Base)", "About the class."),
        ("docstrings", "package.A.f(self, x: int=1)", "About the module."),
        ("docstrings", "package.A.g(self, *args)", "About the method.\n\nMore."),
    ]


def test_builtin_repeats_are_left_out():
    entry = builtin_corpus.Entry
    long, short = "a long paragraph " * 20, "a short one"
    first = [entry("k", "h", long), entry("k", "h", short)]
    second = [entry("k", "h", short), entry("k", "h", f"{short}\n\nnew {long}\n\n{long}")]
    kept = list(builtin_corpus.without_repeats([first, second, first]))
    assert kept == [first, [entry("k", "h", f"{short}\n\nnew {long}")]]


def test_builtin_modules_are_cut_between_entries():
    entries = [builtin_corpus.Entry("k", "", text * 1500) for text in "abcdefg"]
    pieces = list(builtin_corpus.cut(entries))
    assert pieces == [entries[:3], entries[3:6], entries[6:]]
    assert list(builtin_corpus.cut([builtin_corpus.Entry("k", "", "too short")])) == []


def test_builtin_without_sources(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "python.zip"))
    line = error_of(capsys, builtin_corpus.main, "--out", tmp_path / "out")
    assert "no Python sources" in line and not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------
# cached_fineweb10B.py
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for huggingface_hub with shards of 50 tokens; `hub.asked` lists the downloads."""
    remote = tmp_path / "remote"
    for path in cached_fineweb10B.shard_paths(remote, 4):
        write_shard(path, np.arange(50, dtype=np.uint16))

    def hf_hub_download(repo, name, *, repo_type, local_dir):
        assert (repo, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
        module.asked.append(name)
        if module.error:
            raise module.error
        content = (remote / name).read_bytes()
        (Path(local_dir) / name).write_bytes(content[: -10 if module.truncate else None])

    module = types.ModuleType("huggingface_hub")
    module.hf_hub_download, module.asked = hf_hub_download, []
    module.error, module.truncate = None, False
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setattr(cached_fineweb10B, "SHARD_BYTES", 1124)
    return module


def train_name(number: int) -> str:
    return f"fineweb_train_{number:06d}.bin"


def test_download_what_is_missing(tmp_path, hub, capsys, monkeypatch):
    folder = tmp_path / "new" / "fineweb10B"
    cached_fineweb10B.main(["2", "--dir", str(folder)])
    assert hub.asked == ["fineweb_val_000000.bin", train_name(1), train_name(2)]
    assert {path.name for path in folder.iterdir()} == set(hub.asked)
    assert "3 shards, 150 tokens" in capsys.readouterr().out

    hub.asked.clear()
    cached_fineweb10B.main(["3", "--dir", str(folder)])
    assert hub.asked == [train_name(3)]

    hub.asked.clear()
    with open(folder / train_name(2), "r+b") as file:
        file.truncate(1100)
    cached_fineweb10B.main(["3", "--dir", str(folder)])
    assert hub.asked == [train_name(2)]
    assert len(open_shard(folder / train_name(2))) == 50

    # Nothing is missing: neither the library nor the network is needed.
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    cached_fineweb10B.main(["3", "--dir", str(folder)])


@pytest.mark.parametrize("count", ["0", "104", "nine"])
def test_download_count(tmp_path, hub, capsys, count):
    assert "N" in error_of(capsys, cached_fineweb10B.main, count, "--dir", tmp_path)
    assert not hub.asked


def test_download_default_is_nine_shards(tmp_path, hub):
    hub.error = ConnectionError("stop")
    with pytest.raises(UserError):
        cached_fineweb10B.main(["--dir", str(tmp_path)])
    assert len(cached_fineweb10B.shard_paths(tmp_path, 9)) == 10


@pytest.mark.parametrize(
    "error, says",
    [
        (ConnectionError("offline\nreally"), "check the network"),
        (ValueError("of some HTTP library"), "check the network"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk full"),
        (RuntimeError("xet: No space left on device (os error 28)"), "disk full"),
    ],
)
def test_download_fails(tmp_path, hub, capsys, error, says):
    hub.error = error
    assert says in error_of(capsys, cached_fineweb10B.main, "1", "--dir", tmp_path)
    assert len(hub.asked) == 1


def test_download_that_arrives_damaged_does_not_stay(tmp_path, hub, capsys):
    hub.truncate = True
    folder = tmp_path / "new"
    assert "arrived damaged" in error_of(capsys, cached_fineweb10B.main, "1", "--dir", folder)
    assert not list(folder.iterdir())


def test_download_without_library_or_room(tmp_path, hub, capsys, monkeypatch):
    argv = ("1", "--dir", tmp_path)
    monkeypatch.setattr(cached_fineweb10B, "SHARD_BYTES", 10**18)
    assert "GB free" in error_of(capsys, cached_fineweb10B.main, *argv)
    monkeypatch.setattr(cached_fineweb10B, "SHARD_BYTES", 1124)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in error_of(capsys, cached_fineweb10B.main, *argv)
