"""Turn text into token shards for train_gpt.py.

    python data/tokenize_text.py web.jsonl.gz wiki.txt.xz --out data/mine
    python data/tokenize_text.py train_*.txt --val heldout.txt --out data/mine --encoding bytes

Inputs are .txt or .md files, in which a line that holds only the document marker separates
documents (no marker: the file is one document), and .jsonl files with one object per line; each may
be compressed (.gz, .xz). They are streamed: a document must fit in memory, a file need not.
Every document is encoded on its own, with <|endoftext|> in front, and lies in one shard.
"""

import codecs
import gzip
import json
import lzma
import re
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from shards import (
    Parser,
    UserError,
    encode_documents,
    run,
    sha1,
    shard_path,
    text_encoding,
    write_shard,
)

OPENERS = {".gz": gzip.open, ".xz": lzma.open}
TEXT_SUFFIXES, JSON_SUFFIX = (".txt", ".md"), ".jsonl"
BATCH_CHARS = 8_000_000  # of text that is encoded at once, shared out to all cores
FIRST_NUMBER = {"train": 1, "val": 0}  # as in the FineWeb shards
MAX_SHARD_TOKENS = 2**31 - 1  # the header's count is an int32


# ------------------------------------------------------------------------------------------------
# Files -> documents
# ------------------------------------------------------------------------------------------------


def content_suffix(path: Path) -> str:
    """The suffix that tells what is in the file, below a possible .gz or .xz."""
    return (path.with_suffix("") if path.suffix in OPENERS else path).suffix


def check_inputs(paths: Iterable[Path]) -> None:
    """UserError unless every path is a file of a known kind; asked before any work is done."""
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        if content_suffix(path) not in (*TEXT_SUFFIXES, JSON_SUFFIX):
            known = ", ".join((*TEXT_SUFFIXES, JSON_SUFFIX))
            raise UserError(f"{path}: unknown kind, use {known}, possibly with .gz or .xz behind")


def read_documents(path: Path, marker: str, text_key: str) -> Iterator[str]:
    """The documents of one file; UserError names the file, and where possible the line."""
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            if content_suffix(path) == JSON_SUFFIX:
                yield from json_documents(path, file, text_key)
            else:
                yield from text_documents(path, file, marker)
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        kind = path.suffix.removeprefix(".")
        raise UserError(f"{path}: damaged, or not {kind} at all ({error})") from None


def text_documents(path: Path, file: BinaryIO, marker: str) -> Iterator[str]:
    """What stands between the marker lines; the newline before a marker belongs to no document."""
    lines, first = [], 1
    for number, line in enumerate(file, 1):
        if line.rstrip(b"\r\n") == marker.encode():
            yield decode(path, first, b"".join(lines))
            lines, first = [], number + 1
        else:
            lines.append(line)
    yield decode(path, first, b"".join(lines))


def json_documents(path: Path, file: BinaryIO, text_key: str) -> Iterator[str]:
    """The string under `text_key` of each line's object; blank lines are passed over."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(decode(path, number, line))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
            keys = ", ".join(record) if isinstance(record, dict) else "none, not an object"
            raise UserError(
                f"{path}, line {number}: no text under the key {text_key!r}, use --text-key "
                f"(keys: {keys})"
            )
        yield record[text_key]


def decode(path: Path, first_line: int, raw: bytes) -> str:
    """UTF-8 text without byte order mark and last newline; UserError names the line."""
    raw = raw.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").removesuffix(b"\r")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        raise UserError(f"{path}, line {line}: not UTF-8 ({error.reason})") from None


def batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Lists of documents of about BATCH_CHARS characters in all; empty documents are left out."""
    batch, size = [], 0
    for text in filter(None, documents):
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def split_of(text: str, val_fraction: float) -> str:
    """`train` or `val`, by the text's SHA-1 alone: files and their order do not matter."""
    # The last bytes, for a corpus may itself be what another SHA-1 split has left.
    return "val" if int.from_bytes(sha1(text)[-8:], "big") < val_fraction * 2**64 else "train"


# ------------------------------------------------------------------------------------------------
# Documents -> shards
# ------------------------------------------------------------------------------------------------


class ShardWriter:
    """The shards of one split; holds the tokens of at most one shard and one document."""

    def __init__(self, folder: Path, name: str, split: str, shard_tokens: int):
        self.folder, self.name, self.split = folder, name, split
        self.shard_tokens = shard_tokens
        self.paths: list[Path] = []
        self.documents = self.tokens = 0  # in all
        self.pending: list[np.ndarray] = []
        self.pending_tokens = 0

    def add(self, tokens: np.ndarray) -> None:
        """Take one document (uint16, BOS first), which begins a new shard if it does not fit."""
        if self.pending_tokens + len(tokens) > self.shard_tokens:
            self.flush()
        self.pending.append(tokens)
        self.pending_tokens += len(tokens)
        self.documents += 1
        self.tokens += len(tokens)

    def flush(self) -> None:
        """Write what is pending as the next shard."""
        if self.pending:
            number = FIRST_NUMBER[self.split] + len(self.paths)
            path = shard_path(self.folder, self.name, self.split, number)
            write_shard(path, np.concatenate(self.pending))
            self.paths.append(path)
            self.pending, self.pending_tokens = [], 0


class Progress:
    """A line on stderr every two seconds: documents, tokens, speed."""

    def __init__(self):
        self.documents = self.tokens = self.chars = 0
        self.start = self.last = time.monotonic()

    def add(self, texts: list[str], arrays: list[np.ndarray]) -> None:
        """Count a batch, and report if it is time to."""
        self.documents += len(texts)
        self.tokens += sum(map(len, arrays))
        self.chars += sum(map(len, texts))
        if time.monotonic() - self.last >= 2:
            self.report()

    def report(self) -> None:
        """Print the line now; MB are millions of characters."""
        self.last = time.monotonic()
        seconds = self.last - self.start
        print(
            f"{self.documents:,} documents, {self.tokens:,} tokens, {seconds:.0f} s, "
            f"{self.chars / 1e6 / seconds:.1f} MB/s, {self.tokens / seconds:,.0f} tokens/s",
            file=sys.stderr,
        )


def existing_shards(folder: Path, name: str) -> list[Path]:
    """The shards of this name, which another run wrote."""
    pattern = re.compile(re.escape(name) + r"_(train|val)_\d+\.bin")
    return [p for p in folder.glob("*.bin") if pattern.fullmatch(p.name)]


def tokenize(
    sources: list[tuple[Path, str | None]],
    writers: dict[str, ShardWriter],
    encoding,
    val_fraction: float,
    marker: str,
    text_key: str,
) -> None:
    """Write the documents of all `sources`: (file, its split, or None to split by SHA-1).

    UserError, and no shards at all, if a file cannot be read or a split would be left empty.
    """
    progress = Progress()
    try:
        for path, split in sources:
            for texts in batches(read_documents(path, marker, text_key)):
                arrays = encode_documents(encoding, texts)
                for text, tokens in zip(texts, arrays, strict=True):
                    writers[split or split_of(text, val_fraction)].add(tokens)
                progress.add(texts, arrays)
        if not progress.documents:
            raise UserError("no documents: the files hold no text")
        for split, writer in writers.items():
            if not writer.documents:
                raise UserError(
                    f"none of the {progress.documents} documents is for {split}: change "
                    "--val-fraction (0 for no validation), or name files with --val"
                )
            writer.flush()
    except BaseException:  # Ctrl-C as well: half of a data set must not pass for all of it
        for path in [path for writer in writers.values() for path in writer.paths]:
            path.unlink()
        raise
    progress.report()


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None):
    """The command line as a namespace; UserError if a value makes no sense."""
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help=".txt, .md, .jsonl; also .gz, .xz")
    add("--out", required=True, type=Path, metavar="DIR", help="where the shards go")
    add("--name", default="text", help="shards are NAME_train_000001.bin and so on")
    add("--encoding", choices=("gpt2", "bytes"), default="gpt2")
    split = parser.add_mutually_exclusive_group()
    split.add_argument(
        "--val",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="validation files; all of FILE... is then for training",
    )
    split.add_argument(
        "--val-fraction",
        type=float,
        default=0.01,
        metavar="X",
        help="share of documents for validation, by SHA-1; default 0.01",
    )
    add(
        "--shard-tokens",
        type=int,
        default=100_000_000,
        metavar="N",
        help="largest shard, unless one document is larger; default 100000000",
    )
    add("--doc-marker", default="<|endoftext|>", help="line between documents of a text file")
    add("--text-key", default="text", help="key of the text in a .jsonl object")
    add("--overwrite", action="store_true", help="delete shards of this name first")
    args = parser.parse_args(argv)
    if not 0 <= args.val_fraction < 1:
        raise UserError(f"--val-fraction {args.val_fraction}: use 0 to less than 1")
    if not 1 <= args.shard_tokens <= MAX_SHARD_TOKENS:
        raise UserError(f"--shard-tokens {args.shard_tokens}: use 1 to {MAX_SHARD_TOKENS}")
    if not re.fullmatch(r"[\w.-]+", args.name):
        raise UserError(f"--name {args.name}: use letters, digits, '_', '-' and '.'")
    return args


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    check_inputs([*args.files, *args.val])
    old = existing_shards(args.out, args.name)
    if old and not args.overwrite:
        raise UserError(
            f"{args.out} already holds {len(old)} shards named {args.name}: "
            "use --overwrite, another --name or another --out"
        )
    encoding = text_encoding(args.encoding)
    aside = {path: path.rename(path.with_name(f"{path.name}.old")) for path in old}
    sources = [(path, "train" if args.val else None) for path in args.files]
    sources += [(path, "val") for path in args.val]
    splits = ("train", "val") if args.val or args.val_fraction else ("train",)
    writers = {s: ShardWriter(args.out, args.name, s, args.shard_tokens) for s in splits}
    try:
        tokenize(sources, writers, encoding, args.val_fraction, args.doc_marker, args.text_key)
    except BaseException:  # what was there before comes back
        for path, kept in aside.items():
            kept.rename(path)
        raise
    for kept in aside.values():
        kept.unlink()
    for split, writer in writers.items():
        print(
            f"{split}: {writer.documents:,} documents, {writer.tokens:,} tokens, "
            f"{len(writer.paths)} of {args.out}/{args.name}_{split}_*.bin"
        )


if __name__ == "__main__":
    run(main)
