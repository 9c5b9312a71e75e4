"""What turns text into token shards: encodings, and writing shards.

A shard is 256 little-endian int32 header words (magic, version, token count, zeros) and that many
little-endian uint16 tokens. Reading one is `open_shard` of train_gpt.py. Only this file imports
tiktoken.
"""

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is
from train_gpt import HEADER_BYTES, MERGES, SHARD_MAGIC, SHARD_VERSION, UserError

BYTE_BPE_PATTERN = r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"  # no merge crosses these
LINE_BEGINS = re.compile(r"\S\n(?=\S)")
PIECE = 200_000  # characters that are encoded at a time


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
    cannot be used, or GPT-2's ranks can neither be found nor downloaded."""
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
