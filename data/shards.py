"""Read text files in any encoding, encode them as tokens, and write token shards.

A shard is 256 little-endian int32 header words (magic, version, token count, zeros), followed by
the tokens as little-endian uint16. open_shard in train_gpt.py reads it.
"""

import codecs
import contextlib
import gzip
import io
import itertools
import json
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # folder of train_gpt.py
from train_gpt import HEADER_BYTES, MERGES, SHARD_MAGIC, SHARD_VERSION, UserError, require, tell

BYTE_BPE_PATTERN = (
    r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"  # merges stay inside these
)
LINE_START = re.compile(r"\S\n(?=\S)")
PIECE = 200_000  # characters per call of tiktoken
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, because it begins with the mark of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
OTHER_FORMATS = {  # first bytes of a file: (its format, advice)
    b"\x1f\x8b": ("gzip", "rename it to end in .gz"),
    b"%PDF-": ("PDF", "extract its text first"),
    b"PK\3\4": ("zip (or .docx, .epub, .odt)", "extract its text first"),
}
ASCII = bytes(range(128))


@contextlib.contextmanager
def opened(path: Path, mode: str = "rb", **options) -> Iterator:
    """Open a file, decompressed if its name ends in .gz. Raise UserError if it cannot be read."""
    try:
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, mode, **options) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def detect_encoding(file, name) -> str:
    """Return the encoding of an open text file; warn if the file is not valid UTF-8.

    UTF-16 and UTF-32 need a byte order mark. A file is UTF-8 if at least 95% of its non-ASCII bytes
    are valid, otherwise cp1252, which has all printable characters of Latin-1. Read it with
    errors="replace". Raise UserError if the file is not text."""
    head = file.read(8)
    file.seek(0)
    for magic, (other_format, fix) in OTHER_FORMATS.items():
        require(not head.startswith(magic), f"{name} is a {other_format} file, not text: {fix}")
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return encoding
    no_text = f"{name}: not text, it has zero bytes (UTF-16 needs a byte order mark)"
    non_ascii = invalid = 0
    bad_lines = []
    for number, line in enumerate(file, 1):
        require(b"\0" not in line, no_text)
        if line.isascii():
            continue
        non_ascii += len(line.translate(None, ASCII))
        text = line.decode(errors="replace")
        replaced = text.count("\ufffd") - line.count("\ufffd".encode())
        if replaced:
            invalid += replaced
            bad_lines.append(number)
    if not bad_lines:
        return "utf-8-sig"
    encoding, result = "utf-8-sig", "invalid bytes are replaced by U+FFFD"
    if invalid > 0.05 * non_ascii:
        result = f"read as cp1252; if that is wrong: iconv -f ENCODING -t utf-8 {name}"
        encoding = "cp1252"
    first = ", ".join(map(str, bad_lines[:5])) + ", ..." * (len(bad_lines) > 5)
    lines = f"{len(bad_lines):,} of {number:,} lines are not UTF-8 ({first})"
    tell(f"warning: {name}: {lines}: {result}", sys.stderr)
    return encoding


def decoded(file, name) -> str:
    """Return the text of an open file (see detect_encoding)."""
    encoding = detect_encoding(file, name)
    file.seek(0)
    return io.TextIOWrapper(file, encoding, "replace").read()


def write_whole(path: Path, *parts) -> None:
    """Write `parts` (bytes or arrays) to `path`; if this fails, the old file stays."""
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=path.parent) as work:
        with open(Path(work, path.name), "wb") as file:
            file.writelines(parts)
        os.replace(file.name, path)


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write uint16 tokens (at least one) as a shard (see write_whole)."""
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    write_whole(path, header, tokens.astype("<u2"))


def byte_bpe(merges=()) -> tiktoken.Encoding:
    """Return a byte-level BPE encoding: ids 0 to 255 are bytes, then `merges`, then <|endoftext|>.

    Without merges it is the encoding "bytes"."""
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {merged: 256 + i for i, merged in enumerate(merges)}
    special = {"<|endoftext|>": len(ranks)}
    return tiktoken.Encoding(
        "byte_bpe", pat_str=BYTE_BPE_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


def text_encoding(name: str, folder: Path | None = None) -> tiktoken.Encoding:
    """Return the encoding "gpt2", "bytes", or "bpe" with the merges.json in `folder`.

    Raise UserError if merges.json is missing or damaged, if GPT-2's ranks can be neither found nor
    downloaded, or for "ids": tokens of the user's tokenizer."""
    require(
        name != "ids", "encoding=ids: only your tokenizer knows text of such tokens: name shards"
    )
    if name == "bytes":
        return byte_bpe()
    if name == "bpe":
        path = folder / MERGES
        try:
            return byte_bpe([bytes.fromhex(x) for x in json.loads(path.read_text())])
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path} cannot be used ({error}): make the data again") from None
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # the first use downloads the ranks with requests
        fix = "connect to the network once, or set TIKTOKEN_CACHE_DIR to a folder that has it"
        failure = f"tiktoken cannot load the GPT-2 encoding ({type(error).__name__})"
        raise UserError(f"{failure}: {fix}") from None


def pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces. They end with a line that is followed by text, as no token crosses
    such a place. Without one a piece has PIECE characters: tiktoken fails on a million blanks."""
    start = 0
    while len(text) > start + PIECE:
        line = LINE_START.search(text, start + PIECE // 4, start + PIECE)
        end = line.end() if line else start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def encode_documents(encoding: tiktoken.Encoding, texts: list[str]) -> list[np.ndarray]:
    """Return one uint16 array per text: <|endoftext|>, then the tokens of the text."""

    def encode(piece: str) -> np.ndarray:
        return np.array(encoding.encode_ordinary(piece), np.uint16)

    cut = [list(pieces(text)) for text in texts]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = pool.map(encode, itertools.chain(*cut))
        bos = np.array([encoding.eot_token], np.uint16)
        return [np.concatenate([bos, *itertools.islice(parts, len(own))]) for own in cut]
