"""What the tools in this folder share: writing token shards, encoding documents, ending politely.

A shard is 256 little-endian int32 header words (magic, version, token count, zeros) and that many
little-endian uint16 tokens. Reading one is `open_shard` of train_gpt.py.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where train_gpt.py is
from train_gpt import (
    BYTE_BPE_PATTERN,
    HEADER_BYTES,
    MERGES,
    SHARD_MAGIC,
    SHARD_VERSION,
    Parser,
    UserError,
    byte_bpe,
    open_shard,
    text_encoding,
)

__all__ = [
    "BYTE_BPE_PATTERN",
    "HEADER_BYTES",
    "MERGES",
    "Parser",
    "UserError",
    "byte_bpe",
    "encode_documents",
    "open_shard",
    "run",
    "sha1",
    "shard_path",
    "text_encoding",
    "write_shard",
]


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
