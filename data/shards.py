"""What turns text into token shards and back: encodings, writing shards, ending politely.

A shard is 256 little-endian int32 header words (magic, version, token count, zeros) and that many
little-endian uint16 tokens. Reading one is `open_shard` of train_gpt.py. Only this file imports
tiktoken.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is
from train_gpt import (
    HEADER_BYTES,
    MERGES,
    SHARD_MAGIC,
    SHARD_VERSION,
    Parser,
    UserError,
    open_shard,
)

__all__ = [
    "BYTE_BPE_PATTERN",
    "HEADER_BYTES",
    "MERGES",
    "Parser",
    "UserError",
    "byte_bpe",
    "decode",
    "encode_documents",
    "open_shard",
    "run",
    "sha1",
    "shard_path",
    "text_encoding",
    "write_shard",
]

BYTE_BPE_PATTERN = r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"  # no merge crosses these


def shard_path(folder: Path, name: str, split: str, number: int) -> Path:
    """FOLDER/NAME_SPLIT_000123.bin, where train_gpt.py looks for the shards of `split`."""
    return folder / f"{name}_{split}_{number:06d}.bin"


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write `tokens` (uint16, at least one) so that `path` is a whole shard or does not appear.

    Makes the folder if need be; UserError if the disk is full or the folder cannot be written.
    """
    if tokens.dtype != np.uint16 or tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"{path}: {tokens.dtype} {tokens.shape} is not a row of uint16 tokens")
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(header.data)
            file.write(np.ascontiguousarray(tokens, "<u2").data)
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the name without the bytes
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        if temporary.exists():
            temporary.unlink()


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
    batch = encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
    return [np.array([encoding.eot_token, *tokens], np.uint16) for tokens in batch]


def run(main: Callable[[], None]) -> None:
    """Call `main`; end with one line on stderr and status 2 on an error, 130 on Ctrl-C."""
    try:
        main()
    except (UserError, OSError) as error:
        print("error:", *str(error).split(), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
