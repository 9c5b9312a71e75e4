"""What turns text into token shards: reading text, encodings, and writing shards.

A shard is 256 little-endian int32 header words (magic, version, token count, zeros) and that many
little-endian uint16 tokens. Reading one is `open_shard` of train_gpt.py.
"""

import codecs
import contextlib
import gzip
import io
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is
# Windows has no fcntl: train_gpt.py says so in a line.
from train_gpt import HEADER_BYTES, MERGES, SHARD_MAGIC, SHARD_VERSION, UserError, fcntl, need, tell

BYTE_BPE_PATTERN = r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"  # no merge crosses these
LINE_BEGINS = re.compile(r"\S\n(?=\S)")
PIECE = 200_000  # characters that are encoded at a time
WIDE = {"utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)}  # begins as UTF-16's mark does
WIDE |= {"utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)}
OTHER_FORMATS = {  # what a file begins with: (its format, what to do with it)
    b"\x1f\x8b": ("gzip", "rename it to end in .gz"),
    b"%PDF-": ("PDF", "extract its text first"),
    b"PK\3\4": ("zip (or .docx, .epub, .odt)", "extract its text first"),
    b"\x28\xb5\x2f\xfd": ("zstd", "decompress it first"),
    b"\xfd7zXZ": ("xz", "decompress it first"),
    b"BZh91AY": ("bzip2", "decompress it first"),
}
SAME = bytes([*range(0x80), *range(0xA0, 0x100)])  # in Latin-1 and cp1252, which has quotes besides


@contextlib.contextmanager
def opened(path: Path, mode: str = "rb", **how) -> Iterator:
    """The file, unpacked if it is a .gz; UserError if it cannot be read."""
    try:
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, mode, **how) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def encoding_of(file, name, see=lambda block: None) -> str:
    """The encoding of an open text file: UTF-16 or UTF-32 if it begins with a byte order mark;
    UTF-8 if nearly all characters beyond ASCII are valid UTF-8; else cp1252, or Latin-1 if the file
    has bytes that cp1252 does not define. Warns of invalid lines. UserError if it is not text.
    `see` gets all bytes of the file, then a tag for ways of reading it that were added later,
    so that a hash of all of these changes when a text is read differently."""
    head = file.read(8)
    for magic, (what, cure) in OTHER_FORMATS.items():
        need(not head.startswith(magic), f"{name} is a {what} file, not text: {cure}")
    wide = next((name for name, marks in WIDE.items() if head.startswith(marks)), "")
    file.seek(0)
    is_valid = True
    odd = set()
    while block := b"".join(file.readlines(2**24)):
        see(block)
        zeros = f"{name}: no text, but bytes of zero (UTF-16 needs its mark)"
        need(wide or b"\0" not in block, zeros)
        odd |= {*block.translate(None, SAME)}
        try:
            if is_valid and not wide:
                block.decode()
        except UnicodeDecodeError as error:
            is_valid = error.reason == "unexpected end of data"  # a last character that is cut off
    if is_valid:
        return wide or "utf-8-sig"
    valid, invalid, lines = count_characters(file)
    if valid > 10 * invalid:
        see(b"invalid bytes are replaced")
        which = ", ".join(f"{line:,}" for line in lines[:5]) + ", ..." * (len(lines) > 5)
        damage = f"lines with invalid UTF-8: {len(lines):,} ({which})"
        tell(f"warning: {name}: {damage}: invalid bytes are replaced by U+FFFD", sys.stderr)
        return "utf-8-sig"
    found = "cp1252" if odd and not odd & {*b"\x81\x8d\x8f\x90\x9d"} else "Latin-1"
    see(b"cp1252" * (found == "cp1252"))  # Latin-1 is the older one
    mixed = " (other lines are: is it a mixture?)" if valid > invalid / 10 else ""
    read = f"not UTF-8{mixed}: read as {found}; if it is not: iconv -f ENCODING -t utf-8 {name}"
    tell(f"warning: {name}, line {lines[0]}: {read}", sys.stderr)
    return found


def count_characters(file) -> tuple[int, int, list[int]]:
    """(Count of characters beyond ASCII that are valid UTF-8, count of invalid ones, numbers of the
    lines that have these)."""
    file.seek(0)
    valid = invalid = 0
    lines = []
    for number, line in enumerate(file, 1):
        if line.isascii():
            continue
        text = line.decode(errors="replace")
        wrong = text.count("\ufffd") - line.count("\ufffd".encode())
        valid += sum(character > "\x7f" for character in text) - wrong
        invalid += wrong
        if wrong:
            lines.append(number)
    return valid, invalid, lines


def decoded(file, name) -> str:
    """What a text file that is open holds, in any of these encodings."""
    how = encoding_of(file, name)
    file.seek(0)
    return io.TextIOWrapper(file, how, "replace").read()


@contextlib.contextmanager
def locked(folder: Path | str, how: int = 0) -> Iterator[bool]:
    """Lock `folder` as long as this lasts and the process lives; False if that cannot be done."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
        got = True
    except OSError:  # another process has it, or the file system knows no locks
        got = False
    try:
        yield got
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def work_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A temporary folder in `parent`; those that killed processes have left there are removed. A
    living process has a lock on its folder. Until it has that, it has one on `parent`."""
    with contextlib.ExitStack() as stack:
        with locked(parent):
            for old in parent.glob(f"{prefix}*"):
                with contextlib.suppress(OSError), locked(old, fcntl.LOCK_NB) as dead:
                    if dead:
                        shutil.rmtree(old)
            work = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=parent))
            stack.enter_context(locked(work))
        yield Path(work)


def write_whole(path: Path, *parts) -> None:
    """Write `parts` (bytes or arrays) so that `path` has all of them, or is as it was."""
    with work_folder(path.parent, ".writing-") as work:
        with open(work / path.name, "wb") as file:
            file.writelines(parts)
        os.replace(work / path.name, path)


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write tokens (uint16, at least one) as a shard: see write_whole."""
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    write_whole(path, header, tokens.astype("<u2"))


def byte_bpe(merges=()) -> tiktoken.Encoding:
    """An encoding: ids 0-255 are the bytes, then `merges` in order, last <|endoftext|>. Without
    merges it is the encoding "bytes", in which every token is one byte."""
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {merged: 256 + i for i, merged in enumerate(merges)}
    how = {"mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": len(ranks)}}
    return tiktoken.Encoding("byte_bpe", pat_str=BYTE_BPE_PATTERN, **how)


def text_encoding(name: str, folder: Path | None = None) -> tiktoken.Encoding:
    """The encoding gpt2, bytes, or bpe, whose merges.json is in `folder`. UserError if the merges
    cannot be used, if GPT-2's ranks can neither be found nor downloaded, or for ids of an own
    tokenizer."""
    need(name != "ids", "encoding=ids: only your tokenizer knows text of such tokens: name shards")
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
    except Exception as error:  # it downloads its ranks on first use, through requests
        cure = "connect to the network once, or set TIKTOKEN_CACHE_DIR to a folder that has it"
        fails = f"tiktoken cannot load the GPT-2 encoding ({type(error).__name__})"
        raise UserError(f"{fails}: {cure}") from None


def pieces(text: str) -> Iterator[str]:
    """A text in pieces: cut where a line begins behind a line of text, as no token goes on there.
    If such a place is far, it is cut anywhere: a million blanks are too much for tiktoken."""
    start = 0
    while len(text) > start + PIECE:
        line = LINE_BEGINS.search(text, start + PIECE // 4, start + PIECE)
        end = line.end() if line else start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def encode_documents(encoding: tiktoken.Encoding, texts: list[str]) -> list[np.ndarray]:
    """One uint16 array for each text: <|endoftext|>, then the tokens of the text alone."""

    def encode(piece: str) -> np.ndarray:
        return np.array(encoding.encode_ordinary(piece), np.uint16)

    cut = [list(pieces(text)) for text in texts]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = pool.map(encode, itertools.chain(*cut))
        bos = np.array([encoding.eot_token], np.uint16)
        return [np.concatenate([bos, *itertools.islice(parts, len(of))]) for of in cut]
