"""Turn text into token shards for train_gpt.py.

    python data/tokenize_text.py web.jsonl.gz wiki.txt.xz --out data/mine
    python data/tokenize_text.py train_*.txt --val heldout.txt --out data/mine --encoding bytes

Inputs are .txt or .md files, in which a line that holds only the document marker separates
documents (no marker: the file is one document), and .jsonl files with one object per line; each may
be compressed (.gz, .xz). They are streamed: the tokens of a document must fit in memory, a file
need not.
Every document is encoded on its own, with <|endoftext|> in front, and lies in one shard.

A folder holds one data set, which dataset.json describes to the trainer. Everything is written in
DIR/.tokenizing and takes its names at the end, so that half of a data set never passes for all.
"""

import codecs
import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from shards import (
    DESCRIPTION,
    PIECE_CHARS,
    Parser,
    UserError,
    claim,
    encode_documents,
    folder_name,
    make_folder,
    open_shard,
    pieces,
    run,
    shard_path,
    shards_in,
    tell,
    text_encoding,
    write_shard,
    write_whole,
)

OPENERS = {".gz": gzip.open, ".xz": lzma.open}
TEXT_SUFFIXES, JSON_SUFFIX = (".txt", ".md"), ".jsonl"
BATCH_CHARS = 8_000_000  # of text that is encoded at once, shared out to all cores
LINE_BYTES = 2**20  # a longer line of a text file is read in parts
MAX_SPACES = 999_998  # in a row; beyond, the regular expressions of tiktoken panic
MIN_TOKENS = 100  # of a text that is to be cut into training and validation
MIN_VAL_TOKENS = 2000  # that are cut off for validation, if that is a tenth or less
FIRST_NUMBER = {"train": 1, "val": 0}  # as in the FineWeb shards
MAX_SHARD_TOKENS = 2**31 - 1  # the header's count is an int32


# ------------------------------------------------------------------------------------------------
# Files -> documents
# ------------------------------------------------------------------------------------------------


def content_suffix(path: Path) -> str:
    """The suffix that tells what is in the file, below a possible .gz or .xz."""
    return (path.with_suffix("") if path.suffix.lower() in OPENERS else path).suffix.lower()


def check_inputs(paths: Iterable[Path]) -> None:
    """UserError unless each path is another file of a known kind; asked before any work is done."""
    seen = {}
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        if not path.is_file():
            kind = "is a folder, name the files in it" if path.is_dir() else "is not a file"
            raise UserError(f"{path}: {kind}")
        if content_suffix(path) not in (*TEXT_SUFFIXES, JSON_SUFFIX):
            known = ", ".join((*TEXT_SUFFIXES, JSON_SUFFIX))
            raise UserError(f"{path}: unknown kind, use {known}, possibly with .gz or .xz behind")
        first = seen.setdefault((stat.st_dev, stat.st_ino), path)
        if first is not path:
            also = "given twice" if first == path else f"the same file as {first}"
            raise UserError(f"{path}: {also}, name it once, for training or for validation")


def read_documents(path: Path, marker: str, text_key: str) -> Iterator[str | None]:
    """The documents of one file in chunks, with None behind each document.

    UserError names the file, and where possible the line.
    """
    try:
        with OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
            before = os.fstat(file.fileno())
            if content_suffix(path) == JSON_SUFFIX:
                yield from json_documents(path, file, text_key)
            else:
                yield from text_documents(path, file, os.fsencode(marker))
            after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise UserError(f"{path}: has changed while it was read: tokenize it again")
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        kind = path.suffix.removeprefix(".")
        raise UserError(f"{path}: damaged, or not {kind} at all ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def text_documents(path: Path, file: BinaryIO, marker: bytes) -> Iterator[str | None]:
    """What stands between the marker lines, without byte order marks in front.

    The newline before a marker, or at the end of the file, belongs to no document.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    number, begins_line, begins_document, newline = 0, True, True, ""
    try:
        for line in iter(lambda: file.readline(LINE_BYTES), b""):
            number += begins_line
            bare = line.removeprefix(codecs.BOM_UTF8) if begins_line else line
            is_marker = begins_line and bare.rstrip(b"\r\n") == marker
            begins_line = line.endswith(b"\n")
            if is_marker:
                yield None
                newline = ""
            else:
                text = newline + decoder.decode(bare if begins_document else line)
                chunk = text.removesuffix("\n").removesuffix("\r")
                newline = text[len(chunk) :]
                yield chunk
            begins_document = is_marker
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: not UTF-8 ({error.reason})") from None
    yield None


def json_documents(path: Path, file: BinaryIO, text_key: str) -> Iterator[str | None]:
    """The string under `text_key` of each line's object; blank lines are passed over."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            # Integers as floats: Python makes none of more than 4,300 digits.
            record = json.loads(line.removeprefix(codecs.BOM_UTF8).decode(), parse_int=float)
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, line {number}: not UTF-8 ({error.reason})") from None
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error.msg})") from None
        except RecursionError:
            raise UserError(f"{path}, line {number}: JSON that is nested too deeply") from None
        text = record.get(text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            keys = ", ".join([*record][:20]) if isinstance(record, dict) else "none, not an object"
            raise UserError(
                f"{path}, line {number}: no text under the key {text_key!r}, use --text-key "
                f"(keys: {keys})"
            )
        del line, record  # of a document of 200 MB
        yield from (text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS))
        yield None


def batches(texts: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Lists of pieces of documents of about BATCH_CHARS characters in all."""
    batch, size = [], 0
    for piece in texts:
        batch.append(piece)
        size += len(piece[0]) + 1
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def split_of(digest: bytes, val_fraction: float) -> str:
    """`train` or `val`, by the text's SHA-1 alone: files and their order do not matter."""
    # The last bytes, for a corpus may itself be what another SHA-1 split has left.
    return "val" if int.from_bytes(digest[-8:], "big") < val_fraction * 2**64 else "train"


# ------------------------------------------------------------------------------------------------
# Documents -> shards
# ------------------------------------------------------------------------------------------------


class ShardWriter:
    """The shards of one split, FOLDER/ID0 and so on; holds the tokens of one and a document's."""

    def __init__(self, folder: Path, id: str, shard_tokens: int):
        self.folder, self.id, self.shard_tokens = folder, id, shard_tokens
        self.hashes: dict[Path, str] = {}  # SHA-256 of the shards that are written
        self.documents = self.tokens = 0  # in all
        self.pending: list[np.ndarray] = []
        self.pending_tokens = 0

    def add(self, *arrays: np.ndarray) -> None:
        """Take one document (uint16, BOS first), which begins a new shard if it does not fit."""
        size = sum(map(len, arrays))
        if self.pending_tokens + size > self.shard_tokens:
            self.flush()
        self.pending += arrays
        self.pending_tokens += size
        self.documents += 1
        self.tokens += size

    def flush(self) -> None:
        """Write what is pending as the next shard."""
        if self.pending:
            path = self.folder / f"{self.id}{len(self.hashes)}"
            self.hashes[path] = write_shard(path, *self.pending)
            self.pending, self.pending_tokens = [], 0


class Progress:
    """A line on stderr every two seconds: documents, tokens, speed."""

    def __init__(self):
        self.documents = self.tokens = self.chars = 0
        self.start = self.last = time.monotonic()

    def add(self, batch: list[tuple[str, bool]], arrays: list[np.ndarray]) -> None:
        """Count a batch, and report if it is time to."""
        self.documents += sum(ends for _, ends in batch)
        self.tokens += sum(map(len, arrays)) - sum(not ends for _, ends in batch)  # one BOS each
        self.chars += sum(len(text) for text, _ in batch)
        if time.monotonic() - self.last >= 2:
            self.report()

    def report(self) -> None:
        """Print the line now; MB are millions of characters."""
        self.last = time.monotonic()
        seconds = self.last - self.start
        tell(
            f"{self.documents:,} documents, {self.tokens:,} tokens, {seconds:.0f} s, "
            f"{self.chars / 1e6 / seconds:.1f} MB/s, {self.tokens / seconds:,.0f} tokens/s",
            sys.stderr,
        )


def tokenize(
    sources: list[tuple[Path, str | None]],
    writers: dict[str, ShardWriter],
    encoding,
    val_fraction: float,
    marker: str,
    text_key: str,
) -> None:
    """Write the documents of all `sources`: (file, its split, or None to split by SHA-1).

    Validation files come first: their documents are left out of training. UserError if a file
    cannot be read or a split would be left empty.
    """
    progress, held_out, left_out = Progress(), set(), 0
    for path, given in sources:
        digest, arrays = hashlib.sha1(), []
        for batch in batches(pieces(encoding, read_documents(path, marker, text_key))):
            for text, _ in batch:
                runs = re.findall(r"\s+", text) if len(text) > MAX_SPACES else ()
                if any(len(run) > MAX_SPACES for run in runs):
                    raise UserError(f"{path}: over {MAX_SPACES:,} spaces in a row: shorten them")
            encoded = encode_documents(encoding, [text for text, _ in batch])
            for (text, ends), tokens in zip(batch, encoded, strict=True):
                digest.update(text.encode("utf-8", "surrogatepass"))
                arrays.append(tokens[bool(arrays) :])  # one BOS, in front of the first piece
                if not ends:
                    continue
                found = digest.digest()
                if given == "val":
                    held_out.add(found)
                if given == "train" and found in held_out:
                    left_out += 1
                else:
                    writers[given or split_of(found, val_fraction)].add(*arrays)
                digest, arrays = hashlib.sha1(), []
            progress.add(batch, encoded)
    if left_out:
        tell(f"{left_out:,} training documents are left out, as validation has the same")
    for writer in writers.values():
        writer.flush()
    if not progress.documents:
        raise UserError("no documents: the files hold no text")
    for split, writer in writers.items():
        if given and not writer.documents:
            raise UserError(f"no documents for {split}: its files hold no text of their own")
    if val_fraction and not all(writer.documents for writer in writers.values()):
        split_by_tokens(writers, val_fraction, encoding.eot_token)
    progress.report()


def split_by_tokens(writers: dict[str, ShardWriter], val_fraction: float, bos: int) -> None:
    """Make the end of the largest shard validation, where documents are too few to choose from.

    A document that is cut is one in both splits. All shards must be written.
    """
    if not writers["train"].documents:
        writers["train"], writers["val"] = writers["val"], writers["train"]
    train, val = writers["train"], writers["val"]
    if train.tokens < MIN_TOKENS:
        raise UserError(
            f"{train.tokens} tokens are too few for training and validation: take more text, or "
            "--val-fraction 0 for no validation"
        )
    path = max(reversed(train.hashes), key=lambda path: path.stat().st_size)
    tokens = open_shard(path)
    size = max(int(val_fraction * train.tokens), MIN_VAL_TOKENS)
    size = min(size, train.tokens // 10, len(tokens) // 2)
    end, is_cut = np.array(tokens[-size:]), tokens[-size] != bos
    train.hashes[path] = write_shard(path, tokens[:-size])
    val.add(tokens[: int(is_cut)], end)  # the shard's first token is BOS
    val.flush()
    begun = int(np.sum(end == bos))
    train.tokens, train.documents = train.tokens - size, train.documents - begun
    val.documents = begun + int(is_cut)
    tell(f"too few documents to choose from: validation is the end of the text, {size:,} tokens")
    drop_copies(train, np.split(end, np.flatnonzero(end == bos)), bos)


def drop_copies(train: ShardWriter, pieces: list[np.ndarray], bos: int) -> None:
    """Leave out of the training shards what validation has too: its documents, which `pieces` are,
    and those that end with the first of them, the end of one that was cut (perhaps empty)."""
    cut, *whole = (piece.tobytes() for piece in pieces)
    known, left_out = {*whole}, 0
    for path in [*train.hashes]:
        tokens = np.array(open_shard(path))
        documents = np.split(tokens, np.flatnonzero(tokens == bos)[1:])
        kept = [x for x in documents if not is_copy(x.tobytes(), cut, known)]
        if len(kept) < len(documents):
            left_out += len(documents) - len(kept)
            train.tokens -= len(tokens) - sum(map(len, kept))
            if not kept or train.tokens < MIN_TOKENS:
                raise UserError("the documents are copies of each other: nothing is left to train")
            train.hashes[path] = write_shard(path, *kept)
    train.documents -= left_out
    if left_out:
        tell(f"{left_out:,} training documents are left out, as validation has the same")


def is_copy(document: bytes, cut: bytes, known: set[bytes]) -> bool:
    """Whether validation has this document, or the end of it."""
    return document in known or bool(cut and document.endswith(cut))


def publish(whole: Path, out: Path) -> None:
    """Replace the data set in `out` by the one in `whole`, file by file.

    Begun again after a kill at any place, it ends the same. Until it has ended there are no
    validation shards, or files are missing that dataset.json names.
    """
    at = whole if (whole / DESCRIPTION).exists() else out
    about = json.loads((at / DESCRIPTION).read_text())
    waiting = {path.name for path in whole.iterdir()}
    for path in reversed(shards_in(out, about["name"], "--out")):
        if path.name in waiting or path.name not in about["sha256"]:
            path.unlink()
    for name in sorted(waiting, key=lambda name: (name != DESCRIPTION, name)):  # validation last
        os.replace(whole / name, out / name)
    whole.rmdir()


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None):
    """The command line as a namespace; UserError if a value makes no sense."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help=".txt, .md, .jsonl; also .gz, .xz")
    add("--out", required=True, type=folder_name, metavar="DIR", help="where the shards go")
    add("--name", default="text", help="shards are NAME_train_000001.bin and so on")
    add("--encoding", choices=("gpt2", "bytes"), default="gpt2")
    split = parser.add_mutually_exclusive_group()
    split.add_argument(
        "--val",
        nargs="+",
        action="extend",
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
        help="share of documents for validation, by SHA-1; default 0.01, 0 for none",
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
    add("--overwrite", action="store_true", help="replace the shards of this name")
    argv = [*(sys.argv[1:] if argv is None else argv)]
    for at in range(len(argv) - 2, -1, -1):  # or "---" would be an option itself
        if argv[at] in ("--doc-marker", "--text-key"):
            argv[at : at + 2] = [f"{argv[at]}={argv[at + 1]}"]
    args = parser.parse_args(argv)
    if not 0 <= args.val_fraction < 1:
        raise UserError(f"--val-fraction {args.val_fraction}: use 0 to less than 1")
    if not 1 <= args.shard_tokens <= MAX_SHARD_TOKENS:
        raise UserError(f"--shard-tokens {args.shard_tokens}: use 1 to {MAX_SHARD_TOKENS}")
    if not re.fullmatch(r"[\w.-]{1,60}", args.name):  # of 255 bytes that a file system takes
        raise UserError(f"--name {args.name}: use up to 60 letters, digits, '_', '-' and '.'")
    if re.search(r"[\r\n]", args.doc_marker):
        raise UserError("--doc-marker: use one line, without its end")
    return args


def check_folder(out: Path, name: str, overwrite: bool) -> None:
    """UserError if files in `out` are in the way."""
    old, description = shards_in(out, name, "--out"), out / DESCRIPTION
    about = {}
    if description.exists():
        try:
            about = json.loads(description.read_text())
            about["real_tokens"], about["encoding"]
        except (OSError, ValueError, TypeError, LookupError):
            raise UserError(f"{description} is not of this tool: use another --out") from None
    if old and not overwrite:
        kind = f", {about['encoding']} tokens" if about else ""
        raise UserError(
            f"{out} already holds {len(old)} shards named {name}{kind}: use --overwrite, or "
            "another --out"
        )


def write_new(args, folder: Path, encoding) -> dict:
    """Write the whole data set that `args` ask for to `folder`; its description."""
    sources = [(path, "val") for path in args.val]
    sources += [(path, "train" if args.val else None) for path in args.files]
    writers = {split: ShardWriter(folder, split, args.shard_tokens) for split in FIRST_NUMBER}
    val_fraction = 0.0 if args.val else args.val_fraction
    tokenize(sources, writers, encoding, val_fraction, args.doc_marker, args.text_key)
    hashes = {}
    for split, writer in writers.items():
        for number, (path, sha256) in enumerate(writer.hashes.items(), FIRST_NUMBER[split]):
            final = shard_path(folder, args.name, split, number)
            os.rename(path, final)
            hashes[final.name] = sha256
    about = {
        "name": args.name,
        "encoding": args.encoding,
        "real_tokens": encoding.n_vocab,
        "bos": encoding.eot_token,
        "doc_marker": args.doc_marker,
        "sha256": hashes,
        "documents": {split: writer.documents for split, writer in writers.items()},
        "tokens": {split: writer.tokens for split, writer in writers.items()},
    }
    write_whole(folder / DESCRIPTION, json.dumps(about, indent=1).encode())
    return about


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    check_inputs([*args.val, *args.files])
    encoding = text_encoding(args.encoding)
    make_folder(args.out, "--out")
    work = args.out / ".tokenizing"
    make_folder(work, "--out")
    new, whole = work / "new", work / "whole"
    with claim(work, "lock"):
        try:
            if whole.exists():  # killed while it gave names
                publish(whole, args.out)
            shutil.rmtree(new, ignore_errors=True)
            check_folder(args.out, args.name, args.overwrite)
            made = write_new(args, new, encoding)
            os.rename(new, whole)
        finally:
            if whole.exists():
                publish(whole, args.out)
            shutil.rmtree(work, ignore_errors=True)
    for split, tokens in made["tokens"].items():
        if tokens:
            tell(
                f"{split}: {made['documents'][split]:,} documents, {tokens:,} tokens in "
                f"{args.out}/{args.name}_{split}_*.bin"
            )


if __name__ == "__main__":
    run(main)
