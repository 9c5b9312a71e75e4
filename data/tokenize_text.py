"""Turn text into token shards for train_gpt.py, which calls this for what its --data names.

    python data/tokenize_text.py TEXT ... [--out DIR] [--encoding bytes] [--val TEXT ...]

A TEXT is a file, or a folder of files: .txt or .md, in which a line <|endoftext|> separates
documents, or .jsonl, in which every line is an object with a document under the key "text" (if that
is no string, null say, the line is passed over); or one of these with .gz behind it. A file that is
named itself needs no suffix. In folders, runs and tokens are skipped, and links are followed. Of
files with the same contents only the first is read. Files are UTF-8, or UTF-16 with its mark; a
file that is mostly neither is read as cp1252 or Latin-1, with a warning. Every document is encoded
on its own, with <|endoftext|> in front.

Validation is on the texts that --val names, of which nothing is trained on. Without it, where names
have the word `train` and others `val`, `valid` or `validation`, else `test`, it is on these others;
and where they do not, on the last tenth of all tokens (10.5 M at most).

DIR is new, and appears with all of its files at once: the shards, and dataset.json, which says what
their tokens are. Without --out they lie in TEXT.tokens/HASH beside the (first) text, or where that
cannot be written in ~/.cache/train_gpt (or $XDG_CACHE_HOME/train_gpt); the hash is that of the
contents of all texts.

--for PRESET ... [--set ...] prints as JSON the first with enough text, what that must --set, and
what validation is on; TEXT may then be a DIR, too. For a run to --start from, RUN_DIR for PRESET,
texts get its encoding.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from shards import encode_documents, encoding_of, opened, text_encoding, work_folder, write_shard

import train_gpt as T  # importing shards has put its folder on the path
from train_gpt import DESCRIPTION, MERGES, Config, TokenStream, UserError, need, override, tell

MARKER = "<|endoftext|>"
RUN = "run.json"  # is in the folder of each run
WRITE_ELSEWHERE = "make them with data/tokenize_text.py TEXT --out DIR, and name DIR as --data"
SUFFIXES = ".txt", ".md", ".jsonl"
# What systems and archives leave beside texts; FOLDER/* names that, too.
LEFT_BESIDE = re.compile(r"\._.*|\.DS_Store|__MACOSX|Thumbs\.db|desktop\.ini|@eaDir", re.IGNORECASE)
SHARD_TOKENS = 100_000_000
SHORT = 100_000_000  # bytes of text that are too few for the 50,000 words of gpt2
LAST_TENTH = "the last tenth of all (--val TEXT names another)"
OF_FOLDER = "its shards"
VAL_TOKENS = 10_500_000  # the preset `speedrun` validates on 10,485,760
BATCH_CHARS = 50_000_000  # are encoded between two lines of progress, on all cores
# Times as much decay as a preset has, at most: of matrices what was tried, of others with what an
# update of tables takes all of a weight (with twice that they grow without end).
MOST_DECAY = {"decay_anvil": 178, "decay_adam": 16}
BY_HEART = 4  # passes from which on a table of n-grams costs loss, though rows are left out
PASSES = 4  # of LARGE presets through a text: about as good as new tokens (Muennighoff et al. 2023)


def kind(path: Path) -> str:
    """The suffix that says how a file is read, without .gz."""
    return Path(path.stem if path.suffix.lower() == ".gz" else path).suffix.lower()


def texts_in(folder: Path) -> list[Path]:
    """The files in `folder` and below it that have one of SUFFIXES, sorted. Skips hidden files and
    folders, names that match LEFT_BESIDE, folders of tokens and folders of runs. Follows links to
    folders, but reads no folder twice. Warns if a folder cannot be read."""

    def warn(error):
        unreadable = f"{error.filename} cannot be read ({error.strerror}): skipped"
        tell(f"warning: {unreadable}", sys.stderr)

    def is_skipped(name):
        return name.startswith(".") or LEFT_BESIDE.fullmatch(name)

    texts = []
    seen = {*folder.resolve().parents}
    to_walk = [folder]
    for top in to_walk:  # first `folder`, then the links that were found
        for place, folders, files in os.walk(top, onerror=warn):
            here = Path(place)
            folders[:] = sorted(name for name in folders if not is_skipped(name))
            if here.resolve() in seen or here.suffix == ".tokens" or RUN in files:
                folders.clear()
                continue
            seen.add(here.resolve())
            to_walk += [here / name for name in folders if (here / name).is_symlink()]
            paths = [here / name for name in files if not is_skipped(name)]
            texts += [path for path in paths if kind(path) in SUFFIXES and path.is_file()]
    return sorted(texts)


def files_of(texts: list[Path]) -> list[Path]:
    """The files of texts, which are files or folders. UserError if a text has none."""
    files = []
    for text in texts:
        of_text = [text] if text.is_file() and kind(text) in ("", *SUFFIXES) else []
        if text.is_dir():
            of_text = texts_in(text)
        lacking = "no text" if text.exists() else "there is no such text"
        cure = 'name .txt or .md, or .jsonl with lines {"text": ...}, or a folder of them'
        need(of_text, f"{text}: {lacking}: {cure}; each may be a .gz")
        files += of_text
    return files


def parts_of(files: list[Path]) -> dict[str, list[Path]]:
    """The files of each part of a data set: train, val, test, or "". The last word in a file's path
    below the folder of all says it: train/a.txt, stories-valid.txt."""
    parts = {"train": [], "val": [], "test": [], "": []}
    base = os.path.commonpath([os.path.abspath(file.parent) for file in files])
    for file in files:
        below = os.path.relpath(file, base).lower()
        words = re.findall(r"(?<![a-z])(train|val|test)(?:ing|id|idation)?(?![a-z])", below)
        parts[words[-1] if words else ""].append(file)
    return parts


def named(files: list[Path]) -> str:
    """The first of these files, and how many more there are."""
    return files[0].name + (f" and {len(files) - 1} more" if files[1:] else "")


def split(texts: list[Path], val: list[Path]) -> tuple[list[Path], list[Path], str]:
    """(files to train on, files to validate on, what validation is on): as `texts` and `val` name
    them; where `val` is empty, by their names. What names say is for validation or test is never
    trained on where others say train. UserError if a file would be in both."""
    files = files_of(texts)
    held = []
    validation = LAST_TENTH
    parts = parts_of(files)
    kind = "val" if parts["val"] else "test"
    by_name = parts["train"] and parts[kind]
    if val:
        held = files_of(val)
        validation = named(held)
    elif by_name:
        held = parts[kind]
        validation = f"{named(held)}, by name"
    if by_name:
        of_others = parts["val"] + parts["test"]
        files = [path for path in files if path not in of_others]
        known = {path.resolve() for path in held}
        if left := [path for path in of_others if path.resolve() not in known]:
            validation += f" ({named(left)} is left out)"
    apart = {path.resolve() for path in held} - {path.resolve() for path in texts}
    files = [path for path in files if path.resolve() not in apart]
    need(files, f"validation on {validation} leaves nothing to train on")
    for path, count in Counter(path.resolve() for path in files + held).items():
        need(count == 1, f"{path} is named twice: name it once, for training or for validation")
    return files, held, validation


def meant(texts: list[Path]) -> list[Path]:
    """Several `texts` without the names that FOLDER/* adds: names that match LEFT_BESIDE, folders
    of tokens, and folders that have runs but no text."""
    if len(texts) == 1:
        return texts

    def is_meant(text):
        is_ours = text.is_dir() and (text.suffix == ".tokens" or any(text.rglob(RUN)))
        return not LEFT_BESIDE.fullmatch(text.name) and not (is_ours and not texts_in(text))

    return [text for text in texts if is_meant(text)] or texts


class File(NamedTuple):
    """A file of a text."""

    path: Path
    contents: str  # hash of the decompressed contents
    digest: str  # hash of the decompressed contents and of how they are read
    size: int  # of the decompressed contents, in bytes
    encoding: str


def examine(path: Path) -> File:
    """The File at `path`. UserError if it cannot be read or is not text."""
    contents = hashlib.sha256()
    digest = hashlib.sha256(kind(path).encode())

    def see(block):
        contents.update(block)
        digest.update(block)

    with opened(path) as file:
        encoding = encoding_of(file, path, see)
        size = file.tell()
    return File(path, contents.hexdigest(), digest.hexdigest(), size, encoding)


def without_copies(files: list[Path]) -> list[File]:
    """The files, except those with the same contents as an earlier file. Warns if there are any."""
    kept = {}
    copies = []
    for file in map(examine, files):
        if kept.setdefault(file.contents if file.size else file.path, file) is not file:
            copies.append(file.path)
    if copies:
        tell(f"warning: skipped copies of other texts: {named(copies)}", sys.stderr)
    return [*kept.values()]


def documents(path: Path, encoding: str) -> Iterator[str]:
    """The documents of one file; UserError if a line of it is not what its name says. How many
    lines of a .jsonl had no text is said."""
    lines = []
    lacking = 0
    is_jsonl = kind(path) == ".jsonl"
    with opened(path, "rt", encoding=encoding, errors="replace") as file:
        for number, line in enumerate(file, 1):
            if is_jsonl:
                text = text_of(line, f"{path}, line {number}")
                if isinstance(text, str):
                    yield text
                else:
                    lacking += 1
                    last = number
            elif line.rstrip("\n") == MARKER:
                yield "".join(lines)
                lines = []
            else:
                lines.append(line)
    yield "".join(lines)
    if lacking:
        none = f'{lacking:,} of {number:,} lines have no string under "text"'
        tell(f"warning: {path}: {none} and were passed over, the last in line {last}", sys.stderr)


def text_of(line: str, place: str):
    """What a line of a .jsonl has as its text, "" for a blank one; UserError if it has nothing."""
    try:
        return json.loads(line)["text"] if line.strip() else ""
    except (ValueError, TypeError, LookupError, RecursionError):
        reason = f'{place}: no JSON object with a string under the key "text"'
        raise UserError(reason) from None


def tokenize(encoding, files: list[File], texts: list[Path]) -> np.ndarray:
    """All documents of the files of these texts, one after the other, as uint16. UserError if there
    are none."""
    tokens = bytearray()
    seen = 0

    def batch_of(text: str) -> int:
        nonlocal seen
        seen += len(text)
        return seen // BATCH_CHARS

    of_files = (documents(file.path, file.encoding) for file in files)
    documents_of_all = (text for of_file in of_files for text in of_file if text)
    for number, batch in itertools.groupby(documents_of_all, batch_of):
        for document in encode_documents(encoding, [*batch]):
            tokens += document.tobytes()
        if number:
            tell(f"{len(tokens) // 2:,} tokens", sys.stderr)
    need(tokens, f"no text in {', '.join(map(str, texts))}")
    return np.frombuffer(tokens, np.uint16)


def places(text: Path, digest: str) -> list[Path]:
    """The folders where the tokens of these contents can be, in order of preference: beside the
    text, then in the user's cache if there is one."""
    text = Path(os.path.abspath(text))
    folders = [folder for folder in (text.parent, T.user_cache()) if folder]
    return [folder / f"{text.name}.tokens" / digest[:16] for folder in folders]


def described(folder: Path) -> tuple[dict, TokenStream, TokenStream]:
    """What the tokens in `folder` are, and both streams; UserError if these are not whole."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        about = {key: description[key] for key in ("encoding", "real_tokens", "bos")}
        train = TokenStream(folder, "train", about["bos"])
        val = TokenStream(folder, "val", about["bos"])
        counts = [len(train), len(val)]
        need(description.get("tokens", counts) == counts, "shards are missing")
        return about, train, val
    except (OSError, ValueError, LookupError, TypeError, UserError) as error:
        reason, _, _ = str(error).partition(": delete it")
        odd = f"{folder / DESCRIPTION} or a shard ({reason})"
        raise UserError(f"{odd}: name the text in place of this folder, to make it anew") from None


def write(out: Path, train: np.ndarray, val: np.ndarray, about: dict, merges: str) -> None:
    """Make the folder `out` with all of its files at once."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with work_folder(out.parent, ".tokenizing-") as work:
        folder = work / "whole"
        folder.mkdir()
        for number, at in enumerate(range(0, len(train), SHARD_TOKENS), 1):
            path = folder / f"text_train_{number:06d}.bin"
            write_shard(path, train[at : at + SHARD_TOKENS])
        write_shard(folder / "text_val_000000.bin", val)
        if merges:
            (folder / MERGES).write_text(merges)
        about |= {"tokens": [len(train), len(val)]}
        (folder / DESCRIPTION).write_text(json.dumps(about))
        try:
            folder.rename(out)
        except OSError:
            if not (out / DESCRIPTION).exists():  # else another process was faster
                raise


def write_first(outs: list[Path], *parts) -> Path:
    """Call `write` for each of these folders until one succeeds. Returns that folder. UserError if
    all of them fail."""
    for number, out in enumerate(outs, 1):
        try:
            write(out, *parts)
            return out
        except OSError as error:
            cannot = f"tokens cannot be written to {out} ({error})"
            need(outs[number:], f"{cannot}: {WRITE_ELSEWHERE}")
            tell(f"warning: {cannot}: they go to {outs[number]}", sys.stderr)


def tokens_of(args, cfg: Config | None, run: Path) -> tuple[Path, str]:
    """(The folder with the tokens of the texts, made if need be: of a `run` with `cfg`, if any; and
    what validation is on.)"""
    files, held, validation = split(args.texts, args.val)
    if args.out:
        exists = f"--out {args.out} is there already: name another folder, or delete it"
        need(not args.out.exists(), exists)
        args.out.parent.mkdir(parents=True, exist_ok=True)
    files = without_copies(files)
    held = without_copies(held)
    of_train = {file.contents for file in files if file.size}
    for file in held:
        same = f"{file.path} has the contents of a text to train on: it cannot validate that"
        need(file.contents not in of_train, same)
    size = sum(file.size for file in files + held)
    name = "bytes" if args.presets == ["tiny"] or size < SHORT else "gpt2"
    name = values_of(args.set).get("encoding", args.encoding) or name
    if cfg:
        name = cfg.encoding
    merges = (run / MERGES).read_text() if name == "bpe" else ""
    digests = tuple(file.digest for file in files + held)
    digest = hashlib.sha256(f"{name} {merges} {len(files)} {digests}".encode()).hexdigest()
    outs = [args.out.resolve()] if args.out else places(args.texts[0], digest)
    for out in outs:
        with contextlib.suppress(UserError):
            described(out)
            return out, validation
    usable = [out for out in outs if T.can_write(out)]
    cannot = f"tokens cannot be written to {' nor to '.join(map(str, outs))}"
    need(usable, f"{cannot}: {WRITE_ELSEWHERE}")
    for out in usable:
        shutil.rmtree(out, ignore_errors=True)  # what is not whole
    encoding = text_encoding(name, run)
    bos = encoding.eot_token
    tell(f"making tokens of {size:,} bytes of text: {name}", sys.stderr)
    train = tokenize(encoding, files, args.texts)
    if held:
        val = tokenize(encoding, held, [file.path for file in held])
    else:
        size = min(len(train) // 10, VAL_TOKENS)
        need(size, f"{len(train)} tokens are too few for training and validation")
        train, val = train[:-size], train[-size:]
        val = val if val[0] == bos else np.insert(val, 0, bos)  # it may begin within a document
    about = {"encoding": name, "real_tokens": encoding.n_vocab, "bos": bos}
    out = write_first(usable, train, val, about, merges)
    tokens = f"{len(train):,} tokens for training, {len(val):,} for validation"
    tell(f"{args.out or out}: {tokens}", sys.stderr if args.presets else None)
    return out, validation


def values_of(items: list[str]) -> dict[str, str]:
    """key -> value of what is --set."""
    return dict(item.partition("=")[::2] for item in items)


def items_of(values: dict) -> list[str]:
    """What is to be --set for these values."""
    return [f"{key}={value}" for key, value in values.items()]


def passes(cfg: Config, folder: Path, most: int) -> int:
    """How often a run must read the training tokens; 0: more than `most` times."""
    size = len(TokenStream(folder, "train", cfg.bos))
    least = cfg.tokens_after(cfg.steps) // size + 1
    for number in range(least, min(2 * least, most) + 1):  # what is cut off documents is not read
        with contextlib.suppress(UserError):
            stream = TokenStream(folder, "train", cfg.bos, number, cfg.seed)
            T.cursor_after(cfg, stream, cfg.steps)
            return number
    return 0


def for_passes(cfg: Config, number: int, steps: int, ngrams: bool) -> list[str]:
    """What a run must --set that reads its tokens `number` times (records/NOTES.md, Own text: how
    each was found). Its weights decay 2 * `number` times as much as the preset's, those of matrices
    from ten passes on a fifth of its square, up to MOST_DECAY. The table of n-grams would learn the
    text by heart: a step leaves out half of its rows, and from BY_HEART passes on there is none,
    unless these `ngrams` are asked for. Averages are over the preset's share of the steps. Large
    presets, and a run that is gone on with, keep what they have. The best model is kept beside the
    last if it has at most 10 GB."""
    if number == 1:
        return []
    items = [f"val_every={-(-steps // 8)}"]
    if 4 * sum(map(math.prod, T.shapes_of(cfg).values())) <= 10e9:
        items.append("keep_best=1")
    if cfg is not T.PRESETS.get(cfg.preset) or cfg.preset in T.LARGE:
        return items
    factors = {"decay_anvil": max(2 * number, number**2 / 5), "decay_adam": 2 * number}
    for name, factor in factors.items():
        decay = min(factor, MOST_DECAY[name]) * getattr(cfg, name)
        items.append(f"{name}={decay:.4g}")
    for name in ("tail", "tail_average"):
        items.append(f"{name}={getattr(cfg, name) * steps // cfg.steps}")
    if cfg.ngram_rows and (ngrams or number < BY_HEART):
        items.append("ngram_drop=0.5")
    elif cfg.ngram_rows:
        items += T.IDEAS["ngrams"].split()
    return items


def settings(cfg: Config, folder: Path, given: list[str], validation: str) -> tuple[list[str], str]:
    """(what `cfg` must --set before what is `given` to train on the tokens in `folder`; or [], then
    why not). Where passes through them are few, PASSES of LARGE presets or those that are given,
    steps become fewer, of LARGE ones not below a fourth. `validation` says what it is on."""
    about, train, val = described(folder)
    wanted = about | {"vocab": -(-about["real_tokens"] // 128) * 128, "target": 0.0}
    fixed = values_of(given)
    for key in fixed.keys() & about.keys():
        differs = f"tokens in {folder} have {key}={about[key]}, not {fixed[key]}"
        need(fixed[key] == str(about[key]), differs)
    if wanted["vocab"] != cfg.vocab:  # candidates are of another one
        wanted |= {f"stages.{i}.candidates": (0,) for i in range(len(cfg.stages))}
    large = cfg.preset in T.LARGE
    tiny = "tiny, " if large else ""
    other = "tiny, or more text" if large else "more text"
    short = f"{folder} has too few tokens for {cfg.preset}: take {other}"
    rows = cfg.val_batch // cfg.val_row
    row = min(cfg.val_row, (len(val) - 1) // rows)
    row -= row % 128 if row > 128 else 0  # attention takes blocks of that on accelerators
    if len(val) <= cfg.val_tokens:
        if row < 2 and validation not in (LAST_TENTH, OF_FOLDER):
            few = f"{len(val):,} tokens are too few, {cfg.preset} needs {2 * rows + 1:,}"
            return [], f"validation on {validation}: {few}: name a longer --val"
        if row < 2:
            return [], short
        asked = T.with_settings(cfg, given).val_tokens if "val_tokens" in fixed else 0
        few = f"{len(val):,} tokens, too few for val_tokens={asked}: lower that, or name more text"
        need(asked < len(val), f"validation on {validation} has {few}")
        batch = rows * row
        wanted |= {"val_row": row, "val_batch": batch}
        wanted["val_tokens"] = (len(val) - 1) // batch * batch
    full = override(cfg, items_of(wanted) + given)
    most = PASSES if large else 2**31
    if "passes" in fixed:
        most = full.passes
    tries = 28 if large else 100
    if "steps" in fixed:
        tries = 1
    for n in range(tries):
        steps = int(full.steps * 0.95**n)
        wanted |= {"steps": steps, "extension": min(full.extension, -(-steps // 8))}
        items = items_of(wanted)
        with contextlib.suppress(UserError):  # too few steps for the stages
            if number := passes(override(cfg, items + given), folder, most):
                items.append(f"passes={number}")
                more = for_passes(cfg, number, steps, "ngram_rows" in fixed)
                items += [item for item in more if item.partition("=")[0] not in fixed]
                return items, ""
    if {"steps", "passes"} <= fixed.keys():  # train_gpt.py says for how many steps the tokens last
        return items, ""
    stages = enumerate(full.stages)
    caps = {f"stages.{i}.doc_cap=0": stage.doc_cap for i, stage in stages if stage.doc_cap}
    if most * len(train) > full.tokens_after(steps) and caps:
        count = sum(len(train.documents(i).starts) for i in range(len(train.shards)))
        few = f"{cfg.preset} reads at most {max(caps.values()):,} tokens of each of {count:,}"
        cure = f"take {tiny}more of them (a line {MARKER} ends one), or whole ones by"
        return [], f"{folder}: {few} documents: {cure} --set {' '.join(caps)}"
    needed = full.tokens_after(steps) // most
    return [], f"{short} ({len(train):,} tokens of some {needed:,} are there)"


def main(argv: list[str] | None = None) -> None:
    parser = T.Parser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    some = {"nargs": "+", "type": Path, "metavar": "TEXT"}
    add("texts", **some, help=f"files or folders: {', '.join(SUFFIXES)}")
    add("--out", type=Path, metavar="DIR", help="a new folder for the shards")
    short = f"default: bytes for tiny and below {SHORT // 1_000_000} MB, else gpt2"
    add("--encoding", choices=("gpt2", "bytes"), help=short)
    add("--val", **some, default=[], help="texts for validation")
    add("--for", nargs="+", dest="presets", default=[], metavar="PRESET", help="print its --set")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="what is set besides")
    args = parser.parse_args(argv)
    args.texts = meant(args.texts)
    args.val = meant(args.val)
    name = args.presets[0] if args.presets else ""
    run, cfg = Path(name), None
    if name and name not in T.PRESETS:
        cfg = T.typed(Config, json.loads((run / "run.json").read_text())["config"])
    if args.presets:  # refuse a typo before tokens are made
        T.with_settings(cfg or T.PRESETS[name], args.set)
    folder, validation = args.texts[0], OF_FOLDER
    if args.texts[1:] or not (folder / DESCRIPTION).exists():
        try:
            folder, validation = tokens_of(args, cfg, run)
        except MemoryError:
            raise UserError(f"out of memory while making tokens: {T.LESS_TEXT}") from None
    else:
        need(not args.val, f"{folder} has its validation: --val goes with a text")
    for name in args.presets:
        items, why = settings(cfg or T.PRESETS[name], folder, args.set, validation)
        if items:
            print(json.dumps([name, [f"data={folder}", *items], validation]))
            break
        need(name != args.presets[-1], why)
        tell(f"{why}; it gets the model of {args.presets[-1]}", sys.stderr)


if __name__ == "__main__":
    sys.exit(T.report_errors(main))
