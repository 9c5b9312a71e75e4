"""Turn text into token shards for train_gpt.py.

    python data/tokenize_text.py FILE ... --out DIR [--encoding bytes] [--val FILE ...] [--anew]

A file is .txt or .md, in which a line <|endoftext|> separates documents (without one, the file is
one document), or .jsonl, in which every line is an object with a document under the key "text".
Every document is encoded on its own, with <|endoftext|> in front. Validation is the last tenth of
all tokens (10.5 M at most), unless --val names files for it.

DIR is new, or with --anew what this tool has made before. It appears with all of its files at once:
the shards, and dataset.json, which says what their tokens are, and what every preset must --set to
train on them, and has the date of the newest FILE. Until then the tokens are in memory, two bytes
for each.
"""

import contextlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from shards import encode_documents, text_encoding, work_folder, write_shard

# Importing shards has put the folder of train_gpt.py on the path.
from train_gpt import (
    DESCRIPTION,
    PRESETS,
    Parser,
    TokenStream,
    UserError,
    cursor_after,
    override,
    report_errors,
    tell,
)

MARKER = "<|endoftext|>"
SUFFIXES = ".txt", ".md", ".jsonl"
SHARD_TOKENS = 100_000_000
SHORT = 100_000_000  # bytes of text that are too few for the 50,000 words of gpt2
VAL_TOKENS = 10_500_000  # the preset `speedrun` validates on 10,485,760
BATCH_DOCUMENTS = 10_000  # are encoded between two lines of progress, on all cores


def documents(path: Path) -> Iterator[str]:
    """The documents of one file; UserError if it cannot be read as what its name says."""
    lines = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if path.suffix.lower() == ".jsonl":
                    yield text_of(line, f"{path}, line {number}")
                elif line.rstrip("\n") == MARKER:
                    yield "".join(lines)
                    lines = []
                else:
                    lines.append(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason})") from None
    yield "".join(lines)


def text_of(line: str, place: str) -> str:
    """The document in a line of a .jsonl, "" for a blank one; UserError if there is none."""
    try:
        text = json.loads(line)["text"] if line.strip() else ""
    except (ValueError, TypeError, LookupError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise UserError(f'{place}: no JSON object with a string under the key "text"')
    return text


def tokenize(encoding, paths: Iterable[Path]) -> np.ndarray:
    """All documents of the files, one after the other, as uint16; UserError if there are none."""
    texts = filter(None, itertools.chain.from_iterable(map(documents, paths)))
    tokens = bytearray()
    while batch := list(itertools.islice(texts, BATCH_DOCUMENTS)):
        for document in encode_documents(encoding, batch):
            tokens += document.tobytes()
        tell(f"{len(tokens) // 2:,} tokens", sys.stderr)
    if not tokens:
        raise UserError(f"no text in {', '.join(map(str, paths))}")
    return np.frombuffer(tokens, np.uint16)


def split(tokens: np.ndarray, bos: int) -> tuple[np.ndarray, np.ndarray]:
    """(training, validation): the end of the tokens, after a BOS where it cuts a document."""
    size = min(len(tokens) // 10, VAL_TOKENS)
    if not size:
        raise UserError(f"{len(tokens)} tokens are too few for training and validation")
    val = tokens[-size:]
    return tokens[:-size], val if val[0] == bos else np.insert(val, 0, bos)


def check(out: Path, anew: bool, paths: list[Path]) -> None:
    """UserError unless `out` is new, or `anew` and ours, and every one of the files is another, of
    a known kind."""
    for path in paths:
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(f"{path}: unknown kind of file, use {', '.join(SUFFIXES)}")
        if not path.is_file():
            raise UserError(f"{path}: there is no such file")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("a file is named twice: name it once, for training or for validation")
    inside = any(out in path.resolve().parents for path in paths)
    if out.exists() and (inside or not anew or not (out / DESCRIPTION).exists()):
        raise UserError(f"--out {out} is there already: name another folder, or delete it")


def settings(name: str, folder: Path, own: dict) -> list[str]:
    """What the preset `name` must --set to train on the shards in `folder`: their vocabulary `own`,
    no target, no more steps and validation than there are tokens. []: they are too few."""
    cfg = PRESETS[name]
    own = {**own, "vocab": -(-own["real_tokens"] // 128) * 128, "target": 0.0}
    if own["vocab"] != cfg.vocab:  # candidates are of another one
        own |= {f"stages.{i}.candidates": (0,) for i in range(len(cfg.stages))}
    train, val = (TokenStream(folder, split, own["bos"]) for split in ("train", "val"))
    rows = cfg.val_batch // cfg.val_row
    row = min(cfg.val_row, (len(val) - 1) // rows)
    row -= row % 128 if row > 128 else 0  # attention takes blocks of that on accelerators
    if row and len(val) <= cfg.val_tokens:
        own |= {"val_row": row, "val_batch": rows * row}
        own["val_tokens"] = (len(val) - 1) // (rows * row) * rows * row
    for steps in (int(cfg.steps * 0.95**n) for n in range(100)):
        own |= {"steps": steps, "extension": min(cfg.extension, -(-steps // 8))}
        items = [f"{key}={value}" for key, value in own.items()]
        with contextlib.suppress(UserError):
            fitted = override(cfg, items)
            if fitted.tokens_after(steps) < len(train):
                cursor_after(fitted, train, steps)
                return items
    return []


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help=f"files: {', '.join(SUFFIXES)}")
    add("--out", required=True, type=Path, metavar="DIR", help="a new folder for the shards")
    short = f"default: bytes below {SHORT // 1_000_000} MB, else gpt2"
    add("--encoding", choices=("gpt2", "bytes"), help=short)
    add("--val", nargs="+", type=Path, default=[], metavar="FILE", help="files for validation")
    add("--anew", action="store_true", help="replace DIR, if this tool has made it")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    check(out, args.anew, args.files + args.val)
    size = sum(path.stat().st_size for path in args.files)
    date = max(path.stat().st_mtime_ns for path in args.files)  # before they are read
    name = args.encoding or ("bytes" if size < SHORT else "gpt2")
    encoding = text_encoding(name)
    bos = encoding.eot_token
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.val:
        train = tokenize(encoding, args.files)
        val = tokenize(encoding, args.val)
    else:
        train, val = split(tokenize(encoding, args.files), bos)
    with work_folder(out.parent, ".tokenizing-") as work:
        folder = work / "whole"
        folder.mkdir()
        for number, at in enumerate(range(0, len(train), SHARD_TOKENS), 1):
            path = folder / f"text_train_{number:06d}.bin"
            write_shard(path, train[at : at + SHARD_TOKENS])
        write_shard(folder / "text_val_000000.bin", val)
        about = {"encoding": name, "real_tokens": encoding.n_vocab, "bos": bos}
        about["settings"] = {name: settings(name, folder, about) for name in PRESETS}
        (folder / DESCRIPTION).write_text(json.dumps(about))
        os.utime(folder / DESCRIPTION, ns=(date, date))
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)
    enough = ", ".join(name for name, own in about["settings"].items() if own) or "no preset"
    tokens = f"{len(train):,} tokens for training, {len(val):,} for validation"
    tell(f"{args.out}: {tokens}, enough for {enough}")


if __name__ == "__main__":
    sys.exit(report_errors(main))
