"""The tools in data/: shards are written whole or not at all, and every error is one line."""

import errno
import hashlib
import os
import random
import re
import shutil
import signal
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
import tiktoken
import tokenize_text
from shards import UserError, decode, open_shard, shard_path, text_encoding, write_shard
from tiktoken_ext.openai_public import r50k_pat_str

import train_gpt

TOOLS = Path(tokenize_text.__file__).parent


def error_of(capsys, main, *argv) -> str:
    """The one line on stderr with which `main` ends; checks that it is one and the status 2."""
    capsys.readouterr()  # what came before
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
    sha256 = write_shard(path, tokens[:1], tokens[1:])
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
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
        (signal.SIGTERM, 143, "interrupted\n"),
        (signal.SIGHUP, 129, "interrupted\n"),
    ],
)
def test_run_ends_with_one_line(capsys, monkeypatch, error, status, line):
    def main():
        if isinstance(error, signal.Signals):
            signal.raise_signal(error)
        raise error

    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)  # under nohup, too
    with pytest.raises(SystemExit) as end:
        shards.run(main)
    assert end.value.code == status
    assert capsys.readouterr().err == (line or f"error: {error}\n")


def test_text_comes_back_from_its_tokens_without_what_is_no_token():
    encoding = shards.byte_bpe([b"th", b"the"])
    ids = encoding.encode_ordinary("the other Gr\u00fc\u00dfe")
    assert ids[0] == 257 and encoding.eot_token == 258 == encoding.n_vocab - 1
    assert decode(encoding, np.array([259, *ids, 2000])) == "the other Gr\u00fc\u00dfe"


def merging(pattern: str) -> tiktoken.Encoding:
    """An encoding of many merges across everything, so that tokens tell where words end."""
    some = [bytes([byte]) for byte in " \n\ta9.'s\u00e9\u00a0\u3000".encode()]
    pairs = [a + b for a in some for b in some]
    merges = dict.fromkeys([*pairs, *(a + b for a in pairs for b in some)])
    ranks = {bytes([i]): i for i in range(256)} | {x: 256 + i for i, x in enumerate(merges)}
    special = {"<|endoftext|>": len(ranks)}
    return tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


@pytest.mark.parametrize("pattern", [shards.BYTE_BPE_PATTERN, r50k_pat_str, "bytes"])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(monkeypatch, pattern):
    encoding = shards.byte_bpe() if pattern == "bytes" else merging(pattern)
    monkeypatch.setattr(shards, "PIECE_CHARS", 3)
    rng, count = random.Random(0), 0
    alphabet = [*" \n\t\r.'_a9\u00e9\u0301\u4e2d\u3002\U0001f600", "\r\n", "'s", "'ll", "don't "]
    alphabet += [*"\x1f\x85\u00a0\u3000\u200b\ud800", *" \n" * 3, *"as9."]
    for _ in range(1000):
        text = "".join(rng.choice(alphabet) * rng.choice((1, 1, 2, 5)) for _ in range(20))
        cuts = [0, *sorted(rng.choices(range(len(text)), k=rng.randrange(12))), len(text)]
        parts = [*shards.pieces(encoding, [*(text[a:b] for a, b in pairwise(cuts)), None])]
        assert [ends for _, ends in parts] == [False] * (len(parts) - 1) + [True]
        encoded = shards.encode_documents(encoding, [text, *(part for part, _ in parts)])
        assert np.concatenate([x[1:] for x in encoded[1:]]).tolist() == encoded[0][1:].tolist()
        count += len(parts)
    assert count > 3 * 1000
    assert [*shards.pieces(encoding, ["", None, None, "a", None])] == [("a", True)]


def test_a_folder_holds_one_data_set(tmp_path, capsys):
    write_shard(tmp_path / "mine_train_000001.bin", np.ones(5, np.uint16))
    before = [*tmp_path.iterdir()]
    for main, option in ((builtin_corpus.main, "--out"), (cached_fineweb10B.main, "--dir")):
        line = error_of(capsys, main, option, tmp_path)
        assert f"holds another data set (mine): use another {option}" in line
        assert "Not a directory" in error_of(capsys, main, option, before[0] / "x")
        assert "name a folder" in error_of(capsys, main, option, "")
    assert [*tmp_path.iterdir()] == before


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
    assert "no Python sources" in line and not list((tmp_path / "out").iterdir())


def test_builtin_on_a_full_disk_names_the_file(tmp_path, capsys, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(builtin_corpus, "collect", lambda: (["x" * 200_000] * 3, {}))
    monkeypatch.setattr(builtin_corpus, "VOCAB", 260)
    monkeypatch.setattr(os, "fsync", full)
    line = error_of(capsys, builtin_corpus.main, "--out", tmp_path)
    assert f"{tmp_path}/merges.json: cannot be written (No space left" in line


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
