"""Turn text into token shards; train_gpt.py runs this for the texts on its command line.

    python data/tokenize_text.py TEXT ... [--out DIR] [--encoding bytes] [--val TEXT ...]

A TEXT is a file or a folder of files: .txt or .md, with a line <|endoftext|> between documents, or
.jsonl, with one JSON object per line and a document under its key "text" (lines with null are
skipped); all may end in .gz. A file without a suffix is read as .txt if it is named itself. In
folders, links are followed, and hidden files, runs and tokens are skipped. Of files with the same
contents only one is read. Text is UTF-8, UTF-16 with a byte order mark, or cp1252 (with a warning).
Each document is encoded separately and begins with <|endoftext|>.

--val names texts for validation; they are never trained on. Without it, files are for validation
if their names contain `val`, `valid` or `validation` (or `test`), and other names contain `train`.
Otherwise validation uses the last tenth of all tokens (at most 10.5 M).

DIR must be new. It gets the shards and dataset.json, which describes the tokens. The default is
TEXT.tokens/HASH, next to the first text or, if that folder is read-only, in ~/.cache/train_gpt (or
$XDG_CACHE_HOME/train_gpt). HASH depends on the contents of all texts.

--for PRESET [--set ...] prints JSON: PRESET, its settings for these tokens, and a description of
the validation data. TEXT may then be a DIR. PRESET may also be the folder of a run, which gives the
encoding of the texts.
"""

import hashlib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
import shards

import train_gpt as T  # importing shards has put its folder on the path
from train_gpt import DESCRIPTION, MERGES, Config, TokenStream, UserError, override, require, tell

MARKER = "<|endoftext|>"
RUN = "run.json"  # in the folder of every run
SUFFIXES = ".txt", ".md", ".jsonl"
SHARD_TOKENS = 100_000_000
SHORT = 100_000_000  # bytes of text; less is too little for the 50,000 tokens of gpt2
VAL_TOKENS = 10_500_000  # the preset `speedrun` validates on 10,485,760
BATCH_CHARS = 50_000_000  # characters that are encoded between two lines of progress
PART = re.compile(r"(?<![a-z])(train|val|test)(?:ing|id|idation)?(?![a-z])")
LAST_TENTH = "the last tenth of all (--val TEXT names another)"


# ---- Which files are read ------------------------------------------------------------------------


def kind(path: Path) -> str:
    """Return the suffix that gives the format of a file, without .gz."""
    return Path(path.stem if path.suffix.lower() == ".gz" else path).suffix.lower()


def texts_in(folder: Path) -> list[Path]:
    """Return the text files in `folder` and its subfolders, sorted; warn about unreadable folders.

    Skips hidden names, tokens, runs, and folders that were visited before: links can form loops."""

    def warn(error):
        tell(f"warning: {error.filename} cannot be read ({error.strerror}): skipped", sys.stderr)

    texts = []
    visited = {*folder.resolve().parents}
    for place, folders, files in os.walk(folder, onerror=warn, followlinks=True):
        here = Path(place)
        if here.resolve() in visited or here.suffix == ".tokens" or RUN in files:
            folders.clear()  # os.walk does not enter them
            continue
        visited.add(here.resolve())
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [here / name for name in files if not name.startswith(".")]
        texts += [path for path in paths if kind(path) in SUFFIXES and path.is_file()]
    return sorted(texts)


def files_of(texts: list[Path]) -> dict[Path, list[Path]]:
    """Return text -> its files, for texts that are files or folders.

    Skips names without text, with a warning, if another name has text: FOLDER/* may include runs
    and pictures. Raise UserError if a text does not exist, or if no name has text."""
    formats = 'name .txt or .md, or .jsonl with lines {"text": ...}, or a folder of them; '
    formats += "each may be a .gz"
    found = {}
    skipped = []
    for text in texts:
        require(text.exists(), f"{text}: there is no such text: {formats}")
        files = [text] if kind(text) in ("", *SUFFIXES) else []
        if text.is_dir():
            files = texts_in(text)
        if files:
            found[text] = files
        else:
            skipped.append(str(text))
    no_text = f"{', '.join(skipped)}: no text"
    require(found, f"{no_text}: {formats}")
    if skipped:
        tell(f"warning: {no_text}: skipped", sys.stderr)
    return found


def summary(files: list[Path]) -> str:
    """Return the name of the first file, and the number of others."""
    others = f" and {len(files) - 1} more" if files[1:] else ""
    return files[0].name + others


def split(files: list[Path], val: list[Path]) -> tuple[list[Path], list[Path], str]:
    """Return (files for training, files for validation, description of the validation data).

    The last word train, val or test in a file's path (below the folder with all files) gives its
    part: train/a.txt, stories-valid.txt. If some files are for training, the files for validation
    or test are not trained on. Validates on `val` or, if that is empty, on these files."""
    parts = {"train": [], "val": [], "test": [], "": []}
    base = os.path.commonpath([os.path.abspath(file.parent) for file in files])
    for file in files:
        words = PART.findall(os.path.relpath(file, base).lower())
        parts[words[-1] if words else ""].append(file)
    validation = summary(val) if val else LAST_TENTH
    others = {*parts["val"], *parts["test"]}
    if parts["train"] and others:
        if not val:
            val = parts["val"] or parts["test"]
            validation = f"{summary(val)}, by name"
        files = [path for path in files if path not in others]
        if left_out := sorted(others - {*val}):
            validation += f" ({summary(left_out)} is left out)"
    return files, val, validation


class File(NamedTuple):
    """A text file."""

    path: Path
    encoding: str
    contents: str  # SHA-256 of the decompressed file
    size: int  # bytes of the decompressed file


def examine(paths: list[Path]) -> list[File]:
    """Return the Files, except copies of earlier ones; warn about copies.

    Raise UserError if a file cannot be read or is not text."""
    kept = {}
    copies = []
    for path in dict.fromkeys(paths):
        with shards.opened(path) as file:
            encoding = shards.detect_encoding(file, path)
            file.seek(0)
            contents = hashlib.file_digest(file, "sha256").hexdigest()
            new = File(path, encoding, contents, file.tell())
        if kept.setdefault(contents, new) is not new:
            copies.append(path)
    if copies:
        reason = "other texts, or the validation data, have the same contents"
        tell(f"warning: skipped, because {reason}: {summary(copies)}", sys.stderr)
    return [*kept.values()]


# ---- From text to tokens -------------------------------------------------------------------------


def documents(path: Path, encoding: str) -> Iterator[str]:
    """Yield the documents of one file. Raise UserError if a line of a .jsonl is not valid; warn if
    the text in a line is not a string."""
    lines = []
    skipped = 0
    with shards.opened(path, "rt", encoding=encoding, errors="replace") as file:
        for number, line in enumerate(file, 1):
            if kind(path) == ".jsonl":
                try:
                    text = json.loads(line)["text"] if line.strip() else ""
                except (ValueError, TypeError, LookupError, RecursionError):
                    reason = 'not a JSON object with a string under the key "text"'
                    raise UserError(f"{path}, line {number}: {reason}") from None
                if isinstance(text, str):
                    yield text
                else:
                    skipped += 1
            elif line.rstrip("\n") == MARKER:
                yield "".join(lines)
                lines = []
            else:
                lines.append(line)
    yield "".join(lines)
    if skipped:
        reason = f'{skipped:,} of {number:,} lines have no string under "text"'
        tell(f"warning: {path}: {reason}: skipped", sys.stderr)


def tokenize(encoding, files: list[File]) -> np.ndarray:
    """Return the uint16 tokens of all documents. Raise UserError if the files are empty."""
    tokens = bytearray()
    characters = 0

    def batch_of(text: str) -> int:
        nonlocal characters
        characters += len(text)
        return characters // BATCH_CHARS

    by_file = (documents(file.path, file.encoding) for file in files)
    texts = (text for of_file in by_file for text in of_file if text)
    for number, batch in itertools.groupby(texts, batch_of):
        for document in shards.encode_documents(encoding, [*batch]):
            tokens += document.tobytes()
        if number:
            tell(f"{len(tokens) // 2:,} tokens", sys.stderr)
    require(tokens, f"no text in {', '.join(str(file.path) for file in files)}")
    return np.frombuffer(tokens, np.uint16)


def described(folder: Path) -> tuple[dict, TokenStream, TokenStream]:
    """Return (encoding, real_tokens and bos of the tokens in `folder`; both streams).

    Raise UserError if a file is missing or incomplete."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        about = {key: description[key] for key in ("encoding", "real_tokens", "bos")}
        streams = [TokenStream(folder, part, about["bos"]) for part in ("train", "val")]
        counts = [len(stream) for stream in streams]
        require(description.get("tokens", counts) == counts, "shards are missing")
        return about, *streams
    except (OSError, ValueError, LookupError, TypeError, UserError) as error:
        reason, _, _ = str(error).partition(": delete it")
        damaged = f"{folder / DESCRIPTION} or a shard is damaged ({reason})"
        fix = "name the text instead of this folder, to make the tokens again"
        raise UserError(f"{damaged}: {fix}") from None


def write(folder: Path, train: np.ndarray, val: np.ndarray, about: dict, merges: str) -> None:
    """Write description, merges and shards.

    The description comes first: it has the number of tokens, so `described` refuses the folder if
    writing is interrupted. Two processes may write the same folder, with the same contents."""
    folder.mkdir(parents=True, exist_ok=True)
    about |= {"tokens": [len(train), len(val)]}
    shards.write_whole(folder / DESCRIPTION, json.dumps(about).encode())
    if merges:
        shards.write_whole(folder / MERGES, merges.encode())
    for number, start in enumerate(range(0, len(train), SHARD_TOKENS), 1):
        path = folder / f"text_train_{number:06d}.bin"
        shards.write_shard(path, train[start : start + SHARD_TOKENS])
    shards.write_shard(folder / "text_val_000000.bin", val)


def tokens_of(args, run: Config | None) -> tuple[Path, str]:
    """Return (folder with the tokens of the texts, description of the validation data).

    Makes the tokens if they do not exist. A `run` gives the encoding; args.preset is its folder."""
    if args.out:
        require(not args.out.exists(), f"--out {args.out} exists: pass another directory")
    texts = files_of(args.texts)
    of_val = files_of(args.val) if args.val else {}
    paths = [*itertools.chain(*texts.values())], [*itertools.chain(*of_val.values())]
    train_paths, val_paths, validation = split(*paths)
    # In this order, a copy of a text for validation is skipped in training.
    files = examine(val_paths + train_paths)
    held = {*val_paths}
    val = [file for file in files if file.path in held]
    train = [file for file in files if file.path not in held]
    require(train, f"validation on {validation} leaves nothing to train on")

    size = sum(file.size for file in files)
    name = "bytes" if args.preset == "tiny" or size < SHORT else "gpt2"
    name = values_of(args.set).get("encoding", args.encoding or name)
    if run:
        name = run.encoding
    merges = Path(args.preset, MERGES).read_text() if name == "bpe" else ""
    formats = [(kind(file.path), file.encoding, file.contents) for file in files]
    all_inputs = f"{name} {merges} {len(val)} {formats}"
    digest = hashlib.sha256(all_inputs.encode()).hexdigest()
    first = Path(os.path.abspath(next(iter(texts))))
    places = [place for place in (first.parent, T.user_cache()) if place]
    folders = [place / f"{first.name}.tokens" / digest[:16] for place in places]
    if args.out:
        folders = [args.out.resolve()]
    for folder in folders:
        with suppress(UserError):
            described(folder)
            return folder, validation
    folder = next(filter(T.can_write, folders), None)
    failure = f"tokens cannot be written to {' or '.join(map(str, folders))}"
    fix = "make them with data/tokenize_text.py TEXT --out DIR, and name DIR as --data"
    require(folder, f"{failure}: {fix}")

    encoding = shards.text_encoding(name, Path(args.preset))
    bos = encoding.eot_token
    tell(f"making tokens of {size:,} bytes of text: {name}", sys.stderr)
    tokens = tokenize(encoding, train)
    if val:
        val_tokens = tokenize(encoding, val)
    else:
        count = min(len(tokens) // 10, VAL_TOKENS)
        require(count, f"{len(tokens)} tokens are too few for training and validation")
        tokens, val_tokens = tokens[:-count], tokens[-count:]
        if val_tokens[0] != bos:  # it begins inside a document
            val_tokens = np.insert(val_tokens, 0, bos)
    about = {"encoding": name, "real_tokens": encoding.n_vocab, "bos": bos}
    write(folder, tokens, val_tokens, about, merges)
    counts = f"{len(tokens):,} tokens for training, {len(val_tokens):,} for validation"
    tell(f"{args.out or folder}: {counts}", sys.stderr if args.preset else None)
    return folder, validation


# ---- Settings for a run on these tokens ----------------------------------------------------------


def values_of(items: list[str]) -> dict[str, str]:
    """Return key -> value of settings KEY=VALUE."""
    return dict(item.partition("=")[::2] for item in items)


def epochs_needed(cfg: Config, train: TokenStream, most: int) -> int:
    """Return how many epochs through the training tokens a run needs; 0 if more than `most`."""
    fewest = cfg.tokens_after(cfg.steps) // len(train) + 1
    for number in range(fewest, min(2 * fewest, most) + 1):  # ends of cut documents are not read
        with suppress(UserError):
            stream = TokenStream(train.paths[0].parent, "train", cfg.bos, number, cfg.seed)
            T.cursor_after(cfg, stream, cfg.steps)
            return number
    return 0


def settings_for_epochs(cfg: Config, epochs: int, steps: int, keep_ngrams: bool) -> list[str]:
    """Return the settings for a text that is read `epochs` times (see "Own text" in NOTES.md).

    - Validation runs eight times, and the best model is kept if it has at most 10 GB. LARGE presets
      and runs that continue another get only this.
    - Weight decay is multiplied by 2 * epochs, for matrices from ten epochs on by epochs^2 / 5. The
      limits are 178 for matrices, the largest factor that was tried, and 16 for other parameters:
      at 32, an update of a table would remove more than a whole weight, and weights would diverge.
    - Averages extend over the same share of the steps as in the preset.
    - The n-gram table memorizes the text. So half of its rows are dropped in each step, and from
      four epochs on the run has no table, unless `keep_ngrams`."""
    if epochs == 1:
        return []
    items = [f"val_every={-(-steps // 8)}"]
    if 4 * sum(map(math.prod, T.shapes_of(cfg).values())) <= 10e9:
        items.append("keep_best=1")
    if cfg is not T.PRESETS.get(cfg.preset) or cfg.preset in T.LARGE:
        return items
    for_matrices = min(max(2 * epochs, epochs**2 / 5), 178)
    for_others = min(2 * epochs, 16)
    items.append(f"decay_anvil={for_matrices * cfg.decay_anvil:.4g}")
    items.append(f"decay_adam={for_others * cfg.decay_adam:.4g}")
    for name in ("tail", "tail_average"):
        items.append(f"{name}={getattr(cfg, name) * steps // cfg.steps}")
    if cfg.ngram_rows and (keep_ngrams or epochs < 4):
        items.append("ngram_drop=0.5")
    elif cfg.ngram_rows:
        items += T.IDEAS["ngrams"].split()
    return items


def settings_for_validation(cfg: Config, tokens: int, given: list[str], validation: str) -> dict:
    """Return settings of `cfg` for `tokens` validation tokens: rows are shorter if needed.

    Raise UserError if the tokens do not fill a batch, or if the `given` val_tokens are more."""
    if tokens > cfg.val_tokens:
        return {}
    rows = cfg.val_batch // cfg.val_row
    needed = 2 * rows
    if "val_tokens" in values_of(given):
        needed = max(needed, T.with_settings(cfg, given).val_tokens)
    few = f"validation on {validation} has too few tokens for {cfg.preset}"
    few = f"{few}: take more text, a longer --val, or fewer val_tokens"
    require(tokens > needed, f"{few} ({tokens:,} tokens, {needed + 1:,} are needed)")
    row = min(cfg.val_row, (tokens - 1) // rows)
    if row > 128:
        row -= row % 128  # attention on accelerators needs multiples of 128
    batch = rows * row
    return {"val_row": row, "val_batch": batch, "val_tokens": (tokens - 1) // batch * batch}


def settings(cfg: Config, folder: Path, given: list[str], validation: str) -> list[str]:
    """Return settings of `cfg` for the tokens in `folder`; the `given` settings override them.

    Raise UserError if the tokens are too few.

    A text is read as often as the steps need: by LARGE presets at most four times, which is about
    as good as new tokens (Muennighoff et al. 2023). If that (or the given `epochs`) is not enough,
    the run has fewer steps, for LARGE presets not fewer than a fourth."""
    about, train, val = described(folder)
    fixed = values_of(given)
    for key in fixed.keys() & about.keys():
        same = fixed[key] == str(about[key])
        require(same, f"tokens in {folder} have {key}={about[key]}, not {fixed[key]}")
    wanted = about | {"vocab": -(-about["real_tokens"] // 128) * 128, "target": 0.0}
    if wanted["vocab"] != cfg.vocab:  # candidates are ids of another vocabulary
        wanted |= {f"stages.{i}.candidates": (0,) for i in range(len(cfg.stages))}
    wanted |= settings_for_validation(cfg, len(val), given, validation)

    items = [f"{key}={value}" for key, value in wanted.items()]
    full = override(cfg, items + given)
    large = cfg.preset in T.LARGE
    most, tries = (4, 28) if large else (2**31, 100)
    if "epochs" in fixed:
        most = full.epochs
    if "steps" in fixed:
        tries = 1
    for n in range(tries):
        steps = int(full.steps * 0.95**n)
        extension = min(full.extension, -(-steps // 8))
        shorter = [*items, f"steps={steps}", f"extension={extension}"]
        with suppress(UserError):  # fewer steps than the stages need
            if number := epochs_needed(override(cfg, shorter + given), train, most):
                more = settings_for_epochs(cfg, number, steps, "ngram_rows" in fixed)
                more = [item for item in more if item.partition("=")[0] not in fixed]
                return [*shorter, f"epochs={number}", *more]
    if {"steps", "epochs"} <= fixed.keys():  # train_gpt.py reports for how many steps they last
        return shorter
    tiny = "tiny, or " if large else ""
    needed = full.tokens_after(steps) // most
    caps = [stage.doc_cap for stage in full.stages]
    if len(train) > needed and any(caps):
        count = sum(len(train.documents(i).starts) for i in range(len(train.shards)))
        few = f"{cfg.preset} reads at most {max(caps):,} tokens of each of {count:,} documents"
        whole = " ".join(f"stages.{i}.doc_cap=0" for i, cap in enumerate(caps) if cap)
        fix = f"take {tiny}more documents (a line {MARKER} ends one), or read all of each by"
        raise UserError(f"{folder}: {few}: {fix} --set {whole}")
    few = f"{folder} has too few tokens for {cfg.preset}: take {tiny}more text"
    raise UserError(f"{few} ({len(train):,} tokens of some {needed:,} are there)")


def main(argv: list[str] | None = None) -> None:
    parser = T.Parser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument

    def path(text):  # shells do not expand ~ in --out=~/tokens
        return Path(text).expanduser()

    some = {"nargs": "+", "type": path, "metavar": "TEXT"}
    add("texts", **some, help=f"files or folders: {', '.join(SUFFIXES)}")
    add("--out", type=path, metavar="DIR", help="a new folder for the shards")
    default = f"default: bytes for tiny and below {SHORT // 1_000_000} MB, otherwise gpt2"
    add("--encoding", choices=("gpt2", "bytes"), help=default)
    add("--val", **some, default=[], help="texts for validation")
    add("--for", dest="preset", default="", metavar="PRESET", help="print settings for PRESET")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of that run")
    args = parser.parse_args(argv)
    run = None
    if args.preset and args.preset not in T.PRESETS:
        facts = json.loads(Path(args.preset, RUN).read_text())
        run = T.typed(Config, facts["config"])
    cfg = run or T.PRESETS.get(args.preset)
    folder, validation = args.texts[0], "its shards"
    if args.texts[1:] or not (folder / DESCRIPTION).exists():
        try:
            folder, validation = tokens_of(args, run)
        except MemoryError:
            fix = "use less text, or make them on a larger machine with --out DIR"
            raise UserError(f"out of memory while making tokens: {fix}") from None
    else:
        require(not args.val, f"{folder} has its validation: --val goes with a text")
    if cfg:
        items = [f"data={folder}", *settings(cfg, folder, args.set, validation)]
        print(json.dumps([args.preset, items, validation]))


if __name__ == "__main__":
    sys.exit(T.report_errors(main))
