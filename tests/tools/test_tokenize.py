"""data/tokenize_text.py: the trainer reads the text of the files, or one line names the error."""

import errno
import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import shards
import tiktoken
import tokenize_text  # conftest.py has put data/ on the path
from conftest import mostly_slow

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
    """Run the tool; return training and validation tokens, read as the trainer reads them."""
    tokenize_text.main([*map(str, argv), "--out", str(out), "--encoding", encoding])
    bos = {"bytes": 256, "gpt2": 50256}[encoding]
    about = json.loads((out / T.DESCRIPTION).read_text())
    streams = [T.TokenStream(out, split, bos) for split in ("train", "val")]
    own = {"encoding": encoding, "real_tokens": bos + 1, "bos": bos}
    assert about == own | {"tokens": [len(stream) for stream in streams]}
    return tuple(stream.read(0, len(stream)).tolist() for stream in streams)


def of_bytes(texts: list[str]) -> list[int]:
    """Return the expected tokens of documents: 256, then their bytes."""
    return [token for text in texts for token in (BOS, *text.encode())]


@pytest.mark.parametrize("name", FILES)
def test_tokens_are_the_bytes_of_the_documents(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name].encode())
    held = jsonl(tmp_path / "val.jsonl", ["only this"])
    train, val = tokenize(tmp_path / "new" / "out", path, "--val", held)
    assert train == of_bytes(TEXTS) and val == of_bytes(["only this"])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="needs GPT-2's ranks")
def test_gpt2_tokens_equal_the_tokens_of_whole_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_text, "BATCH_CHARS", 2000)
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


def test_a_long_text_is_split_into_several_shards_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_text, "SHARD_TOKENS", 15_000)
    files = [jsonl(tmp_path / f"{n}.jsonl", WORDS[n : n + 50]) for n in (0, 50)]
    train, _ = tokenize(tmp_path / "out", *files, "--val", jsonl(tmp_path / "val.jsonl", ["x"]))
    assert train == of_bytes(WORDS) and 15_000 < len(train) < 30_000
    names = ["text_train_000001.bin", "text_train_000002.bin", "text_val_000000.bin"]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.bin")) == names


KINDS = r'name .txt or .md, or .jsonl with lines {"text": ...}, or a folder of them; each may be'


@pytest.mark.parametrize("name, content, says", [
    ("a.pdf", b"x", f"a.pdf: no text: {KINDS}"),
    ("a.txt", None, f"a.txt: there is no such text: {KINDS}"),
    ("a.txt", b"", "no text in .*a.txt"),
    ("a.txt", b"<|endoftext|>\n<|endoftext|>\n", "no text in .*a.txt"),
    ("a.txt", b"12345678", "9 tokens are too few for training and validation"),
    ("a.txt", b"\x89PNG\0\0", "a.txt: not text, it has zero bytes"),
    ("a.txt", "UTF-16 without a mark".encode("utf-16-le"), "zero bytes .UTF-16 needs a byte"),
    ("a.txt", gzip.compress(b"text" * 99, mtime=0),
     "a.txt is a gzip file, not text: rename it to end in .gz"),
    ("a.txt", b"%PDF-1.7\n1 0 obj\n" * 9, "a.txt is a PDF file, not text: extract its text first"),
    ("a.md", b"PK\3\4 no zeros" * 9, "a.md is a zip .* file, not text: extract its text"),
    ("a.txt.gz", b"plain", "a.txt.gz cannot be read: Not a gzipped file"),
    ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:20],
     "a.txt.gz cannot be read: Compressed file end"),
    ("a.jsonl", b'{"text": "fine"}\n{"text": \n', "a.jsonl, line 2: not a JSON object with a"),
    ("a.jsonl", b'{"text": "fine"}\n{"body": "x"}\n', "line 2: not a JSON object with a string"),
    ("a.jsonl", b'{"text": 1}\n', "no text in .*a.jsonl"),
    ("a.jsonl", b"[" * 200_000, "line 1: not a JSON object"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_named_and_nothing_is_written(tmp_path, name, content, says):
    path, out = tmp_path / name, tmp_path / "out"
    if content is not None:
        path.write_bytes(content)
    before = [*tmp_path.iterdir()]
    with pytest.raises(T.UserError, match=says):
        tokenize(out, path)
    assert [*tmp_path.iterdir()] == before
    with pytest.raises(T.UserError, match=says):
        tokenize_text.main([str(path), "--encoding", "bytes"])
    assert [*tmp_path.iterdir()] == before


ODD = "naïve café\n" * 40
QUOTES = "Windows\n“It’s 5 €” – " * 20
RAIN = "水の山に雨。\n" * 50
CAFE = "Un café à Orléans.\n" * 50


@pytest.mark.parametrize("content, text, warns", [
    (ODD.encode("utf-16"), ODD, ""),  # Notepad's "Unicode"
    (b"\xfe\xff" + ODD.encode("utf-16-be"), ODD, ""),
    (ODD.encode("utf-32"), ODD, ""),
    (b"fine\n\n" + ODD.encode("latin-1"), "fine\n\n" + ODD,
     "40 of 42 lines are not UTF-8 (3, 4, 5, 6, 7, ...): read as cp1252; if that is wrong: iconv "
     "-f ENCODING -t utf-8 "),
    (QUOTES.encode("cp1252"), QUOTES, "20 of 21 lines are not UTF-8 (2, 3, 4, 5, 6, ...): read as"),
    (b"\x80\x81\x82", "€\ufffd‚", "(1): read as cp1252"),  # cp1252 does not define 0x81
    ((ODD + "日").encode()[:-1], ODD + "\ufffd",  # the file ends inside a character
     "1 of 41 lines are not UTF-8 (41): invalid bytes are replaced by U+FFFD"),
    (RAIN.encode() + b"\xff\n" + RAIN.encode(), RAIN + "\ufffd\n" + RAIN,
     "1 of 101 lines are not UTF-8 (51): invalid bytes are replaced by U+FFFD"),
    (CAFE.encode() + b"caf\xe9\n" * 9, CAFE + "caf\ufffd\n" * 9,
     "9 of 59 lines are not UTF-8 (51, 52, 53, 54, 55, ...): invalid bytes are replaced"),
    ("水の山".encode() * 9 + b"\xff" + "雨".encode(), "水の山" * 9 + "\ufffd雨",  # a single line
     "1 of 1 lines are not UTF-8 (1): invalid bytes are replaced by U+FFFD"),
    (b"fine \xc3\xa9\n" + CAFE.encode("cp1252"), "fine Ã©\n" + CAFE,
     "50 of 51 lines are not UTF-8 (2, 3, 4, 5, 6, ...): read as cp1252"),
    (ODD.encode().replace(b"\n", b"\r\n"), ODD, ""),
])  # fmt: skip
def test_text_of_any_encoding_is_read(tmp_path, capsys, content, text, warns):
    for name, data in (("a.txt", content), ("b.md.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(data)
        held_out = jsonl(tmp_path / "val.jsonl", ["only this"])
        train, _ = tokenize(tmp_path / f"{name}.out", tmp_path / name, "--val", held_out)
        assert bytes(train[1:]).decode() == text
        err = capsys.readouterr().err
        assert f"{name}: " in err and warns in err or not warns
        assert ("warning" in err) == bool(warns)


def test_a_home_folder_is_found_in_an_option(tmp_path, monkeypatch):
    """Shells do not expand ~ in --out=~/tokens."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("Roses are red. " * 900)
    tokenize_text.main([str(tmp_path / "a.txt"), "--out=~/tokens"])
    assert (tmp_path / "tokens" / T.DESCRIPTION).exists()


def test_a_val_tokens_larger_than_the_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("Roses are red. " * 9000)
    (tmp_path / "b.txt").write_text("Violets. " * 60)
    words = [str(tmp_path / "a.txt"), "--val", str(tmp_path / "b.txt"), "--for", "tiny"]
    reason = (
        r"validation on b.txt has too few tokens for tiny: .* fewer val_tokens \(541 tokens, 4,097"
    )
    with pytest.raises(T.UserError, match=reason):
        tokenize_text.main([*words, "--set", "val_tokens=4096"])
    (tmp_path / "b.txt").write_text("Violets.")
    with pytest.raises(T.UserError, match=r"\(9 tokens, 17 are needed\)"):
        tokenize_text.main([*words, "--set", "val_tokens=4"])


def test_a_folder_is_its_texts_in_order_without_hidden_names(tmp_path):
    folder = tmp_path / "many"
    (folder / "in/.git").mkdir(parents=True)
    for name in ("b.txt", "in/a.md", "._b.txt", "in/.git/x.txt", "c.png"):
        (folder / name).write_text(name * 9)
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "last"}'))
    held_out = jsonl(tmp_path / "val.jsonl", ["only this"])
    train, _ = tokenize(tmp_path / "out", folder, "--val", held_out)
    assert train == of_bytes(["b.txt" * 9, "last", "in/a.md" * 9])


def test_files_that_systems_add_to_folders_are_skipped(tmp_path, capsys):
    """A folder from a Mac's archive, by its name and by FOLDER/*, before and after tokenizing."""
    folder = tmp_path / "mac"
    (folder / "__MACOSX").mkdir(parents=True)
    (folder / "a.txt").write_text("a" * 900)
    for name in ("._a.txt", ".DS_Store", "Thumbs.db", "Desktop.ini", "__MACOSX/._a.txt"):
        (folder / name).write_bytes(b"\0\1\2")
    shown = sorted(path for path in folder.iterdir() if path.name[0] != ".")
    for number, texts in enumerate(([folder], shown)):
        assert sum(map(len, tokenize(tmp_path / f"out{number}", *texts))) == 901 + 1
    names = ", ".join(f"{folder}/{name}" for name in ("Desktop.ini", "Thumbs.db", "__MACOSX"))
    assert f"warning: {names}: no text: skipped\n" in capsys.readouterr().err
    made, _ = place_of(capsys, *shown)
    assert made.parent == folder / "a.txt.tokens"
    assert place_of(capsys, *shown, made.parent)[0] == made
    with pytest.raises(T.UserError, match="Thumbs.db: no text: name .txt"):
        tokenize(tmp_path / "none", folder / "Thumbs.db")


def test_runs_and_tokens_inside_a_folder_of_texts_are_skipped(tmp_path, monkeypatch, capsys):
    """After `train_gpt.py .` and `train_gpt.py *`, with any --out."""
    folder = tmp_path / "t"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.txt", "sub/b.txt"):
        (folder / name).write_text(f"Roses are {name}. " * 900)
    monkeypatch.chdir(folder)
    made = [place_of(capsys, "."), place_of(capsys, "a.txt", "sub")]
    for run in ("logs/1", "sub/out/deep/2", "3"):
        (folder / run / "checkpoints").mkdir(parents=True)
        for name in ("run.json", "log.txt", "metrics.jsonl", "checkpoints/notes.txt"):
            (folder / run / name).write_text("{}")
    (folder / "sub/c.txt.tokens").mkdir()
    (folder / "sub/c.txt.tokens/d.txt").write_text("no text")
    assert place_of(capsys, ".") == place_of(capsys, "../t") == made[0]
    assert sorted(path.name for path in Path().iterdir())[-3:] == ["a.txt.tokens", "logs", "sub"]
    assert place_of(capsys, *sorted(os.listdir())[1:]) == made[1]
    with pytest.raises(T.UserError, match="logs: no text"):
        place_of(capsys, "logs")
    with pytest.raises(T.UserError, match="logs/1: no text"):
        place_of(capsys, "logs/1")


def test_links_to_folders_are_followed_once(tmp_path):
    """Links may lead to a parent, or to a folder with other links."""
    real, folder = tmp_path / "real", tmp_path / "t"
    (real / "deep").mkdir(parents=True)
    (folder / "own").mkdir(parents=True)
    for path in (real / "a.txt", real / "deep/b.txt", folder / "own/c.txt", tmp_path / "out.txt"):
        path.write_text(path.name)
    for link, to in (
        (folder / "books", real),
        (folder / "again", real),
        (folder / "a", folder / "own"),
        (folder / "up", tmp_path),
        (real / "deep/back", real),
        (real / "home", folder),
        (folder / "gone", tmp_path / "none"),
        (folder / "file.txt", tmp_path / "out.txt"),
    ):
        link.symlink_to(to)
    files = tokenize_text.texts_in(folder)
    names = "a/c.txt", "again/a.txt", "again/deep/b.txt", "file.txt"
    assert files == [folder / name for name in names]


def test_a_folder_that_cannot_be_read_is_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scandir = os.scandir

    def denied(path):
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    assert tokenize_text.texts_in(tmp_path) == [tmp_path / "a.txt"]
    warning = f"warning: {tmp_path / 'closed'} cannot be read (Permission denied): skipped\n"
    assert capsys.readouterr().err == warning


def test_a_file_without_a_suffix_is_text_if_it_is_named(tmp_path):
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "enwik8").write_text("named " * 50)
    (folder / "a.txt").write_text("with a suffix")
    (folder / "val.gz").write_bytes(gzip.compress(b"validation"))
    train, val = tokenize(tmp_path / "out", folder / "enwik8", "--val", folder / "val.gz")
    assert (train, val) == (of_bytes(["named " * 50]), of_bytes(["validation"]))
    assert tokenize_text.texts_in(folder) == [folder / "a.txt"]


def test_a_link_is_read_as_its_own_name_has_it(tmp_path):
    """In the cache of the Hugging Face Hub, all files are links to files named by hash."""
    (tmp_path / "0a1b").write_bytes(gzip.compress(b'{"text": "linked"}\n'))
    (tmp_path / "a.jsonl.gz").symlink_to("0a1b")
    held = jsonl(tmp_path / "val.jsonl", ["only this"])
    assert tokenize(tmp_path / "out", tmp_path / "a.jsonl.gz", "--val", held)[0] == of_bytes(
        ["linked"]
    )


def test_of_equal_texts_only_one_is_read(tmp_path, capsys):
    """Otherwise a copy of a training text could be validation text."""
    folder = tmp_path / "t"
    folder.mkdir()
    for name in ("book.txt", "copy.md", "val.txt", "empty.txt", "empty2.txt"):
        (folder / name).write_text("" if "empty" in name else "Roses are red. " * 50)
    (folder / "val.txt").write_text("Violets are blue. " * 50)
    for name in ("book.txt", "val.txt"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
    train, val = tokenize(tmp_path / "out", folder)
    assert len(train) + len(val) == 751 + 901 + 1  # a document is cut, which adds a BOS
    copies = "or the validation data, have the same contents: book.txt.gz and 3 more"
    assert f"{copies}\n" in capsys.readouterr().err
    train, val = tokenize(tmp_path / "apart", folder, "--val", folder / "val.txt")
    assert (len(train), len(val)) == (751, 901)  # without the copy val.txt.gz


def test_entries_without_a_text_are_skipped_and_counted(tmp_path, capsys):
    texts = ["first", None, 7, ["x"], float("nan"), "last"]
    path = jsonl(tmp_path / "a.jsonl", texts)
    held = jsonl(tmp_path / "val.jsonl", ["only this"])
    train, _ = tokenize(tmp_path / "out", path, "--val", held)
    assert train == of_bytes(["first", "last"])
    line = 'a.jsonl: 4 of 6 lines have no string under "text": skipped'
    assert f"{line}\n" in capsys.readouterr().err
    with pytest.raises(T.UserError, match="no text in .*b.jsonl"):
        tokenize(tmp_path / "none", jsonl(tmp_path / "b.jsonl", [None, 3]), "--val", held)


@pytest.mark.parametrize("names, held, left", [
    ("train.txt val.txt", "val.txt", ""),
    ("stories-train.txt stories-valid.txt", "stories-valid.txt", ""),
    ("Train.md VALIDATION.md", "VALIDATION.md", ""),
    ("train/a.txt train/b.txt validation/a.txt", "validation/a.txt", ""),
    ("train.txt test.txt", "test.txt", ""),
    ("train.txt val.txt test.txt notes.md", "val.txt", "test.txt"),
    ("train-1.txt train-2.txt val-1.txt val-2.txt", "val-1.txt val-2.txt", ""),
    ("book.txt val.txt", "", ""),  # no name contains train
    ("training/a.txt training/b.txt", "", ""),
    ("latest.txt interval.txt train.txt", "", ""),  # "test" and "val" are not separate words
])  # fmt: skip
def test_file_names_can_select_the_validation_text(tmp_path, capsys, names, held, left):
    """In a folder, or named one by one; the name of the folder itself does not count."""
    folder = tmp_path / "test of val"
    names = names.split()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"<{name}>" * 20)
    paths = sorted(folder / name for name in names)
    for number, texts in enumerate(([folder], paths)):
        files, apart, said = tokenize_text.split(
            sum(tokenize_text.files_of(texts).values(), []), []
        )
        assert apart == [folder / name for name in held.split()]
        others = {*held.split(), *left.split()}
        assert files == [path for path in paths if str(path.relative_to(folder)) not in others]
        assert said.startswith(apart[0].name if held else "the last tenth of all")
        assert (left or "left out") in said or not left
        train, val = tokenize(tmp_path / f"out{number}", *texts)
        texts_of = [f"<{path.relative_to(folder)}>" * 20 for path in files]
        assert (train if held else train + val)[: len(train)] == of_bytes(texts_of)[: len(train)]
        assert not held or val == of_bytes([f"<{name}>" * 20 for name in held.split()])


def test_validation_text_is_not_trained_on(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(name * 50)
    train, val = tokenize(tmp_path / "out", folder, "--val", folder / "b.txt")
    assert (train, val) == (of_bytes(["a" * 50, "c" * 50]), of_bytes(["b" * 50]))
    (tmp_path / "copy.txt").write_text("b" * 50)
    for held in (tmp_path / "copy.txt", folder / "../texts/b.txt"):
        args = folder, folder / "b.txt", "--val", held
        assert tokenize(tmp_path / f"out of {held.name}", *args) == (train, val)
    for texts, val, says in [
        ([folder], [folder], "validation on a.txt and 2 more leaves nothing to train on"),
        ([folder / "b.txt"], [folder], "validation on a.txt and 2 more leaves nothing to train on"),
        ([folder], [tmp_path / "none.txt"], "none.txt: there is no such text"),
    ]:
        with pytest.raises(T.UserError, match=says):
            tokenize(tmp_path / "bad", *texts, "--val", *val)


def test_files_named_val_are_not_trained_on_if_other_texts_validate(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("train", "valid", "test"):
        (folder / f"{name}.txt").write_text(name * 20)
    other = tmp_path / "other.txt"
    other.write_text("o" * 50)
    for val, left in ((other, "test.txt and 1 more"), (folder / "test.txt", "valid.txt")):
        files, held, said = tokenize_text.split(tokenize_text.texts_in(folder), [val])
        assert [path.name for path in files] == ["train.txt"] and held == [val]
        assert said.endswith(f"({left} is left out)")


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_pieces_of_a_text_have_the_tokens_of_the_full_text(monkeypatch, name):
    if name == "gpt2" and "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("needs GPT-2's ranks")
    encoding = shards.text_encoding(name)
    rng = np.random.default_rng(0)
    words = ["a", " the", "\n", "\n\n", "  ", "'s", "日本", "\t", "x1", "\n", " ...", "\r\n", "\n "]
    text = "".join(rng.choice(words, 20_000))
    want = encoding.encode_ordinary(text)
    monkeypatch.setattr(shards, "PIECE", 2000)
    assert len([*shards.pieces(text)]) > 20
    (tokens,) = shards.encode_documents(encoding, [text])
    assert tokens.tolist() == [encoding.eot_token, *want]


def test_a_line_too_long_for_tiktoken_is_split():
    for text in ("a" + " " * 1_500_000 + "b", "\n" * 1_500_000, "x" * 1_500_000):
        (tokens,) = shards.encode_documents(shards.byte_bpe(), [text])
        assert bytes(tokens[1:].tolist()).decode() == text


# ---- Folders of tokens, and the settings of a preset --------------------------------------------


def place_of(capsys, *argv) -> tuple[Path, list[str]]:
    """Return the folder of the tokens, and the other settings for `tiny`."""
    tokenize_text.main([*map(str, argv), "--for", "tiny"])
    data, *items = json.loads(capsys.readouterr().out)[1]
    return Path(data.removeprefix("data=")), items


def test_tokens_belong_to_contents(tmp_path, capsys, monkeypatch):
    """Dates do not matter. Older tokens stay, for runs that are resumed."""
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("Roses are red. " * 900)
    b.write_text("Violets. " * 900)
    red, items = place_of(capsys, a)
    assert red.parent == tmp_path / "a.txt.tokens" and "encoding=bytes" in items
    os.utime(a, (1, 1))
    monkeypatch.setattr(tokenize_text, "tokenize", None)
    assert place_of(capsys, a) == (red, items)
    monkeypatch.undo()
    before = a.stat()
    a.write_text("Roses are rot. " * 900)
    os.utime(a, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert place_of(capsys, a)[0] not in (red, tmp_path) and red.exists()
    both, swapped = place_of(capsys, a, b)[0], place_of(capsys, b, a)[0]
    assert both.name != swapped.name and both.parent == red.parent


@pytest.mark.parametrize("damage", [
    lambda folder: (folder / "text_train_000001.bin").write_bytes(b"cut"),
    lambda folder: (folder / "text_train_000002.bin").unlink(),  # the last one
    lambda folder: (folder / "text_val_000000.bin").unlink(),
    lambda folder: (folder / T.DESCRIPTION).write_text("{}"),
    lambda folder: (folder / T.DESCRIPTION).unlink(),
])  # fmt: skip
def test_incomplete_tokens_are_made_again(tmp_path, capsys, monkeypatch, damage):
    monkeypatch.setattr(tokenize_text, "SHARD_TOKENS", 10_000)
    text = tmp_path / "a.txt"
    text.write_text("Roses are red. " * 900)
    made, items = place_of(capsys, text)
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    damage(made)
    if (made / T.DESCRIPTION).exists():
        with pytest.raises(
            T.UserError, match="or a shard is damaged .*: name the text instead of this"
        ):
            place_of(capsys, made)
    assert place_of(capsys, text) == (made, items)
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before


def test_tokens_of_a_text_on_a_read_only_disk_are_in_the_cache(tmp_path, capsys, monkeypatch):
    text = tmp_path / "disk/a.txt"
    text.parent.mkdir()
    text.write_text("Roses are red. " * 900)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "disk/a.txt.tokens").write_text("this file acts as a read-only disk")
    made, _ = place_of(capsys, text)
    assert made.parent == tmp_path / "home/.cache/train_gpt/a.txt.tokens"
    (tmp_path / "lost").write_text("not a folder")
    monkeypatch.setenv("HOME", str(tmp_path / "lost"))
    cannot = "cannot be written to .*: make them with .* --out DIR"
    with pytest.raises(T.UserError, match=cannot):
        place_of(capsys, text)
    monkeypatch.setattr(T, "user_cache", lambda: None)
    with pytest.raises(T.UserError, match=cannot):
        place_of(capsys, text)


def test_an_out_of_memory_error_has_advice_about_text(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("Roses are red. " * 900)

    def tokenize(*_):
        raise MemoryError

    monkeypatch.setattr(tokenize_text, "tokenize", tokenize)
    with pytest.raises(T.UserError, match="^out of memory while making tokens: use less text, or"):
        tokenize_text.main([str(tmp_path / "a.txt"), "--for", "tiny"])


def test_tokens_are_written_where_folders_cannot_be_renamed(tmp_path, capsys, monkeypatch):
    """Buckets that are mounted with gcsfuse can rename files only."""
    text = tmp_path / "bucket/a.txt"
    text.parent.mkdir()
    text.write_text("Roses are red. " * 900)
    rename = os.rename

    def refuse(source, target, **options):
        if os.path.isdir(source):
            raise OSError(errno.ENOTSUP, "Operation not supported")
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", refuse)
    made, _ = place_of(capsys, text)
    assert made.parent == tmp_path / "bucket/a.txt.tokens"
    monkeypatch.setattr(tokenize_text, "tokenize", None)
    assert place_of(capsys, text)[0] == made


@pytest.mark.parametrize("written", [0, 1, 2])
def test_interrupted_tokens_are_not_used_and_made_again(tmp_path, capsys, monkeypatch, written):
    """After some files were written: description, training shard, validation shard."""
    text = tmp_path / "a.txt"
    text.write_text("Roses are red. " * 900)
    replaced = []
    replace_file = os.replace

    def interrupted(source, target):
        if len(replaced) == written:
            raise KeyboardInterrupt
        replace_file(source, target)
        replaced.append(target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        place_of(capsys, text)
    (left,) = (tmp_path / "a.txt.tokens").iterdir()
    assert {*left.iterdir()} == {*replaced}
    monkeypatch.undo()
    if written:
        with pytest.raises(T.UserError, match="or a shard is damaged"):
            place_of(capsys, left)
    made, _ = place_of(capsys, text)
    assert made == left and len([*made.iterdir()]) == 3


def test_two_processes_may_make_the_same_tokens(tmp_path, capsys, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("Roses are red. " * 900)
    real = tokenize_text.tokenize

    def overtaken(*args):
        monkeypatch.setattr(tokenize_text, "tokenize", real)
        place_of(capsys, text)
        return real(*args)

    monkeypatch.setattr(tokenize_text, "tokenize", overtaken)
    made, _ = place_of(capsys, text)
    assert T.TokenStream(made, "train", BOS).read(1, 5).tolist() == [*b"Roses"]
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_a_small_text_is_read_until_the_steps_are_done(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("0123456789" * 3500)
    folder, items = place_of(capsys, tmp_path / "a.txt")
    assert {"steps=440", "epochs=15", "val_every=55"} < {*items}
    cfg = T.override(T.PRESETS["tiny"], items)
    stream = T.TokenStream(folder, "train", BOS, 2)
    assert stream.read(len(stream) // 2 - 3, 10).tolist() == [
        *stream.shards[0][-3:],
        *stream.shards[0][:7],
    ]
    streams = [T.TokenStream(folder, split, BOS, 15) for split in ("train", "val")]
    assert [*T.check_tokens(cfg, *streams)] == ["text_train_000001.bin", "text_val_000000.bin"]
    _, items = place_of(capsys, tmp_path / "a.txt", "--set", "epochs=2")
    assert "epochs=2" in items and 50 < int(dict(x.split("=") for x in items)["steps"]) < 62
    _, items = place_of(capsys, tmp_path / "a.txt", "--set", "steps=5")
    assert {"steps=5", "epochs=1"} < {*items}


def test_a_validation_text_that_is_too_short_is_named(tmp_path, capsys):
    for name in ("a.txt", "train.txt"):
        (tmp_path / name).write_text("Roses are red. " * 900)
    for name in ("b.txt", "val.txt"):
        (tmp_path / name).write_text("Violets.")
    short = r"has too few tokens for tiny: take more text, .* \(9 tokens, 17 are needed\)"
    for argv, held in (
        (["a.txt", "--val", "b.txt"], "b.txt"),
        (["train.txt", "val.txt"], "val.txt"),
    ):
        argv = [str(tmp_path / word) if word.endswith("txt") else word for word in argv]
        with pytest.raises(T.UserError, match=f"^validation on {held}.* {short}"):
            place_of(capsys, *argv)
    (tmp_path / "c.txt").write_text("x" * 100)
    with pytest.raises(T.UserError, match="has too few tokens for tiny: take more text"):
        place_of(capsys, tmp_path / "c.txt")


@pytest.mark.parametrize("given, recipe", [
    ([], "keep_best=1 decay_anvil=101.2 decay_adam=0.08 ngram_rows=0 layers.*.ngram=0"),
    (["ngram_rows=1024"], "keep_best=1 decay_anvil=101.2 decay_adam=0.08 ngram_drop=0.5"),
    (["epochs=2"], "keep_best=1 decay_anvil=9 decay_adam=0.02 ngram_drop=0.5"),
    (["epochs=1"], ""),
])  # fmt: skip
def test_settings_follow_the_epochs_and_can_be_overridden(tmp_path, capsys, given, recipe):
    (tmp_path / "a.txt").write_text("0123456789" * 3500)
    _, items = place_of(capsys, tmp_path / "a.txt", "--set", *given)
    names = "keep_best", "decay_anvil", "decay_adam", "ngram_rows", "layers.*.ngram", "ngram_drop"
    assert [x for x in items if x.split("=")[0] in names] == recipe.split()
    cfg = T.override(T.PRESETS["tiny"], items + given)
    wanted = 0 if "ngram_rows=0" in items else 1024 if "ngram_rows=1024" in given else 262_144
    assert cfg.ngram_rows == wanted
    averaged = [110 * cfg.steps // 440, 92 * cfg.steps // 440]  # the share of the preset
    assert cfg.epochs == 1 or [cfg.tail, cfg.tail_average] == averaged


@pytest.mark.parametrize("epochs", [2, 6, 10, 30, 1000])
def test_no_update_removes_more_than_a_weight(epochs):
    """Otherwise weights change their sign in each update and grow: tables did so in 30 epochs."""
    tiny = T.PRESETS["tiny"]
    cfg = T.override(tiny, tokenize_text.settings_for_epochs(tiny, epochs, tiny.steps, False))
    summed = max(cfg.table_every) / min(cfg.table_every)
    rate = max(T.schedule(cfg).hyper.lr)
    for name, row in T.param_specs(cfg).items():
        share = (rate * row.lr) ** 2 * row.decay * max(row.lr_factors, default=1)
        assert share * (summed if row.updated_by == "tables" else 1) < 1.01, name


def test_large_presets_and_continued_runs_keep_their_decay_and_their_tables():
    speedrun = T.PRESETS["speedrun"]
    assert tokenize_text.settings_for_epochs(speedrun, 4, 80, False) == ["val_every=10"]
    run = replace(T.PRESETS["tiny"], steps=80)
    assert tokenize_text.settings_for_epochs(run, 9, 80, False) == ["val_every=10", "keep_best=1"]


LINE = b"0123456789abcde " * 99 + b"0123456789abcde\n"


def settings_of(capsys, text, preset, *argv) -> list[str]:
    """Return the settings for `preset`."""
    tokenize_text.main([str(text), "--for", preset, *argv])
    name, items, _ = json.loads(capsys.readouterr().out)
    assert name == preset
    return items


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for texts; their tokens are made once for all presets."""
    return tmp_path_factory.mktemp("texts")


@pytest.mark.parametrize("large", mostly_slow(["speedrun", "pointer"], {"speedrun"}))
def test_a_text_too_small_or_with_too_few_documents_for_speedrun_is_refused(
    folder, capsys, monkeypatch, large
):
    monkeypatch.setitem(T.PRESETS, large, replace(T.PRESETS[large], steps=60, extension=2))
    small, one = folder / "small.txt", folder / "one.txt"
    small.write_text("0123456789" * 3500)
    assert "epochs=15" in settings_of(capsys, small, "tiny")
    few = f"too few tokens for {large}: take tiny, or more text"
    few += r" \(31,501 tokens of some 491,520 are there\)"
    with pytest.raises(T.UserError, match=few):
        settings_of(capsys, small, large)
    one.write_bytes(LINE * 4000)
    few = "at most 3,072 tokens of each of 1 documents: take tiny, or more documents .* by"
    whole = [f"stages.{i}.doc_cap=0" for i in range(5)]
    with pytest.raises(T.UserError, match=f"{large} reads {few} --set {' '.join(whole)}$"):
        settings_of(capsys, one, large)
    with pytest.raises(T.UserError, match=f"{few} --set {' '.join(whole[1:])}$"):
        settings_of(capsys, one, large, "--set", whole[0])  # only the other settings are named
    assert "epochs=1" in settings_of(capsys, one, "tiny")
    settings_of(capsys, one, large, "--set", *whole)
    one.write_bytes((LINE + b"<|endoftext|>\n") * 2000)
    items = settings_of(capsys, one, large)
    assert "encoding=bytes" in items
    assert settings_of(capsys, one, "tiny")[0] == items[0]
    monkeypatch.setattr(tokenize_text, "SHORT", 1000)  # tiny uses bytes for every text
    assert "encoding=bytes" in settings_of(capsys, one, "tiny")
    with pytest.raises(T.UserError, match="have encoding=bytes, not gpt2"):
        settings_of(capsys, items[0].removeprefix("data="), "tiny", "--set", "encoding=gpt2")
    steps, times = (int(dict(x.split("=") for x in items)[key]) for key in ("steps", "epochs"))
    assert 20 < steps < 60 and times == 4


def test_wrong_arguments_are_refused_before_tokens_are_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = jsonl(Path("a.jsonl"), WORDS)
    monkeypatch.setattr(tokenize_text, "documents", None)  # nothing is encoded
    Path("full").mkdir()
    shards.write_shard(Path("full", "mine_train_000001.bin"), np.ones(5, np.uint16))
    for argv, says in [
        (["a.jsonl", "--val", "./a.jsonl"], "validation on a.jsonl leaves nothing to train on"),
        (["a.jsonl", "--val", "b.txt"], "b.txt: there is no such text"),
        (["a.jsonl", "--out", ""], "--out .* exists: pass another directory"),
        (["a.jsonl", "--out", "full"], "--out .*full exists: pass another directory"),
        (["a.jsonl", "--out", "a.jsonl"], "--out .*a.jsonl exists: pass another directory"),
        (["a.jsonl", "--out", "a.jsonl/x"], "tokens cannot be written to .*a.jsonl/x: make"),
        (["a.jsonl", "--encoding", "gpt5"], "invalid choice: 'gpt5'"),
        (["a.jsonl", "--for", "tiny", "speedrun"], "unrecognized arguments: speedrun"),
        ([], "required: TEXT"),
    ]:
        with pytest.raises(T.UserError, match=says):
            tokenize_text.main(["--out", "out", "--encoding", "bytes", *argv])
        assert sorted(Path().iterdir()) == [path, Path("full")]
    assert [path.name for path in Path("full").iterdir()] == ["mine_train_000001.bin"]


def test_as_a_command(tmp_path, capsys, monkeypatch):
    path, words = jsonl(tmp_path / "a.jsonl", WORDS), ("--out", "a.tokens", "--encoding", "bytes")
    argv = [sys.executable, tokenize_text.__file__, "a.jsonl", *words]
    env = os.environ | {"JAX_PLATFORMS": "nosuch"}  # it does not use devices
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
    total = len(of_bytes(WORDS))
    assert done.returncode == 0 and "making tokens of " in done.stderr
    assert done.stdout.startswith(f"a.tokens: {total - total // 10:,} tokens for training, ")
    monkeypatch.chdir(tmp_path)
    assert T.report_errors(lambda: tokenize_text.main([str(path), *words])) == 2
    line = "--out a.tokens exists: pass another directory"
    assert capsys.readouterr() == ("", f"error: {line}\n")
