"""What turns text into token shards and back: encodings, writing shards, ending politely.

A shard is 256 little-endian int32 header words (magic, version, token count, zeros) and that many
little-endian uint16 tokens. Reading one is `open_shard` of train_gpt.py. Only this file imports
tiktoken.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is
from train_gpt import (
    DESCRIPTION,
    HEADER_BYTES,
    MERGES,
    SHARD_MAGIC,
    SHARD_VERSION,
    Parser,
    UserError,
    claim,
    data_sets,
    make_folder,
    open_shard,
    tell,
)

__all__ = [
    "BYTE_BPE_PATTERN",
    "DESCRIPTION",
    "HEADER_BYTES",
    "MERGES",
    "PIECE_CHARS",
    "Parser",
    "UserError",
    "byte_bpe",
    "claim",
    "decode",
    "encode_documents",
    "folder_name",
    "make_folder",
    "open_shard",
    "pieces",
    "run",
    "sha1",
    "shard_path",
    "shards_in",
    "tell",
    "text_encoding",
    "write_shard",
    "write_whole",
]

BYTE_BPE_PATTERN = r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"  # no merge crosses these

# Up to the last place where a text may be cut before it is encoded. Neither this pattern nor that
# of GPT-2 has words with a space behind anything else, or with punctuation behind a letter or
# digit; no word depends on what is before it, and only runs of spaces on what follows.
UP_TO_A_CUT = re.compile(r"(?s).*(?:(?<=\S)(?=[ \t\r\n])|(?<=[A-Za-z0-9])(?=[!-/:-@\[-`{-~]))")
PIECE_CHARS = 2**18  # of text, encoded at once


def shard_path(folder: Path, name: str, split: str, number: int) -> Path:
    """FOLDER/NAME_SPLIT_000123.bin, where train_gpt.py looks for the shards of `split`."""
    return folder / f"{name}_{split}_{number:06d}.bin"


def shards_in(folder: Path, name: str, option: str) -> list[Path]:
    """The shards of this name in `folder`, which `option` gave; UserError if others are there too.

    The trainer takes all shards of a folder for one data set.
    """
    found = data_sets(folder)
    if others := {*found.values()} - {name}:
        others = ", ".join(sorted(others))
        raise UserError(f"{folder} holds another data set ({others}): use another {option}")
    return sorted(found)


def folder_name(text: str) -> Path:
    """A folder on the command line; a variable that is not set must not mean the current one."""
    if not text:
        raise argparse.ArgumentTypeError("is empty, name a folder")
    return Path(text)


def write_whole(path: Path, *parts) -> str:
    """Write `parts` (bytes or buffers) so that `path` has all of them or does not appear.

    Makes the folder if need be. SHA-256 of the file in hex; UserError if the disk is full or the
    folder cannot be written.
    """
    temporary, digest = path.with_name(f"{path.name}.{os.getpid()}.tmp"), hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the name without the bytes
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        if temporary.exists():
            temporary.unlink()
    return digest.hexdigest()


def write_shard(path: Path, *arrays: np.ndarray) -> str:
    """Write the tokens of `arrays` (uint16, at least one token) as a shard: see write_whole."""
    count = sum(map(len, arrays))
    for tokens in arrays:
        if tokens.dtype != np.uint16 or tokens.ndim != 1 or not count:
            raise ValueError(f"{path}: {tokens.dtype} {tokens.shape} is not a row of uint16 tokens")
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, count
    return write_whole(path, header, *(np.ascontiguousarray(x, "<u2") for x in arrays))


def sha1(text: str) -> bytes:
    """SHA-1 of the text: an order of documents that depends on nothing but themselves."""
    return hashlib.sha1(text.encode("utf-8", "surrogatepass")).digest()


def byte_bpe(merges=()):
    """A tiktoken Encoding: ids 0-255 are the bytes, then `merges` in order, last <|endoftext|>.

    Without merges it is the encoding "bytes", in which every token is one byte.
    """
    import tiktoken

    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {merged: 256 + i for i, merged in enumerate(merges)}
    return tiktoken.Encoding(
        name="byte_bpe",
        pat_str=BYTE_BPE_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": len(ranks)},
    )


def text_encoding(name: str, folder: Path | None = None):
    """The tiktoken Encoding gpt2, bytes, or bpe, whose merges.json is in `folder`.

    For the trainer token_bytes of train_gpt.py does this; sources of older records come here.
    UserError if the merges cannot be used, or GPT-2's ranks can neither be found nor downloaded.
    """
    if name == "bytes":
        return byte_bpe()
    if name == "bpe":
        try:
            merges = json.loads((folder / MERGES).read_text())
            if not isinstance(merges, list):
                raise ValueError("no list of merges")
            merges = [bytes.fromhex(text) for text in merges]
            if len({*merges}) < len(merges) or min(map(len, merges), default=2) < 2:
                raise ValueError("a merge twice, or of less than two bytes")
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{folder / MERGES} cannot be used ({error}): make the data again"
            ) from None
        return byte_bpe(merges)
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # it downloads its ranks on first use, through requests
        raise UserError(
            f"tiktoken cannot load the GPT-2 encoding ({type(error).__name__}): "
            "connect to the network once, or set TIKTOKEN_CACHE_DIR to a folder that has it"
        ) from None


def decode(encoding, tokens) -> str:
    """The text of `tokens`; ids beyond the tiktoken Encoding's, a table's padding, have none."""
    return encoding.decode([int(x) for x in tokens if x < encoding.n_vocab])


def encode_documents(encoding, texts: list[str]) -> list[np.ndarray]:
    """One uint16 array per text: <|endoftext|>, then the tokens of the text alone."""

    def encode(text: str) -> np.ndarray:
        return np.array([encoding.eot_token, *encoding.encode_ordinary(text)], np.uint16)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(encode, texts))


def pieces(encoding, chunks: Iterable[str | None]) -> Iterator[tuple[str, bool]]:
    """(text, whether its document ends here), from documents in chunks, with None behind each.

    Pieces have about PIECE_CHARS characters, and the tokens of a document's pieces are those of the
    document; empty ones are left out. A text without a place to cut, such as a hundred megabytes
    of one letter, stays whole.
    """
    held, size, wanted, begun = [], 0, PIECE_CHARS, False
    for chunk in chunks:
        held.append(chunk or "")
        size += len(held[-1])
        if chunk is None:
            if size or begun:
                yield "".join(held), True
            held, size, wanted, begun = [], 0, PIECE_CHARS, False
        elif size >= wanted:
            text = "".join(held)
            if encoding.n_vocab == 257:  # bytes do not merge
                cut = len(text)
            else:
                cut = found.end() if (found := UP_TO_A_CUT.match(text)) else 0
            if cut:
                begun = True
                yield text[:cut], False
            held, size = [text[cut:]], len(text) - cut
            wanted = max(PIECE_CHARS, 2 * size)  # or a text without cuts would take quadratic time


def run(main: Callable[[], None]) -> None:
    """Call `main`; end with one line on stderr and status 2 on an error, 130 on Ctrl-C.

    SIGTERM and a closed terminal end it like Ctrl-C, with 143 and 129.
    """

    def end(number, frame):
        raise KeyboardInterrupt(number)

    names = [n for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n)]  # Windows has no SIGHUP
    before = {n: signal.getsignal(n) for n in (getattr(signal, name) for name in names)}
    before = {n: old for n, old in before.items() if old == signal.SIG_DFL}  # nohup ignores SIGHUP
    try:
        for number in before:
            signal.signal(number, end)
        main()
    except (UserError, OSError) as error:
        tell(" ".join(["error:", *str(error).split()]), sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        tell("interrupted", sys.stderr)
        sys.exit(128 + (*interrupt.args, signal.SIGINT)[0])
    finally:
        for number, old in before.items():
            signal.signal(number, old)
