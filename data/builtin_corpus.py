"""Built-in demo corpus: text that comes with Python, so nothing is downloaded.

    python data/builtin_corpus.py [FOLDER]

The text consists of the language reference in `pydoc_data.topics`, docstrings and block comments of
the standard library (sources are parsed, never imported), and docstrings of C modules. Repeated
paragraphs are dropped, so validation text is not in the training text. Tokens are byte-level BPE;
the merges are learned from the training documents only. A version of Python always makes the same
files, but other versions make different files: compare losses only within one version.
"""

import ast
import contextlib
import gc
import hashlib
import heapq
import importlib
import inspect
import json
import os
import platform
import re
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
from shards import BYTE_BPE_PATTERN, byte_bpe, encode_documents, write_shard, write_whole

from train_gpt import MERGES, Parser, report_errors, require, tell  # shards has set the path

DEFAULT_FOLDER = Path(__file__).resolve().parent / "builtin"
VAL_BYTES = 300_000  # smallest size of the validation text
MIN_DOCUMENT_CHARS = 200  # shorter documents are dropped
DOCUMENT_CHARS = 4000  # a longer module becomes several documents, split between entries
VOCAB = 2048  # 256 bytes, the merges, and <|endoftext|>
MIN_COMMENT_WORDS = 8  # shorter block comments are mostly labels and commented-out lines
MIN_REPEAT_CHARS = 80  # shorter paragraphs, such as "For example:", may be repeated

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "pydoc_data"}
# Many Linux packages do not include these test suites and applications.
SKIPPED_FOLDERS |= {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
# Importing these modules has no side effects, no .py file repeats their docstrings, and programs do
# not replace their functions (programs do replace the hooks in sys).
C_MODULES = """
    _codecs _collections _curses _socket _ssl _thread array atexit binascii builtins cmath
    faulthandler gc itertools marshal math mmap nt posix pyexpat resource select time unicodedata
    zlib
""".split()

Entry = tuple[str, str]  # part of a document: (heading, one line or ""; text)


def docstring_entries(node: ast.AST, name: str, signature: str = "") -> Iterator[tuple[int, Entry]]:
    """Yield (line number, (qualified name and signature, docstring)), in source order."""
    if text := ast.get_docstring(node):
        yield node.body[0].lineno, (f"{name}{signature}\n", text)
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_class = isinstance(child, ast.ClassDef)
            own = ", ".join(map(ast.unparse, child.bases if is_class else [child.args]))
            own = "" if is_class and not own else f"({own})"
            yield from docstring_entries(child, f"{name}.{child.name}", own)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below `node`; faster than ast.walk, which also visits expressions."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from statements(child)


def comment_entries(source: str, tree: ast.Module) -> Iterator[tuple[int, Entry]]:
    """Yield (line number, block of consecutive whole-line comments), in source order."""
    inside = set()  # lines of simple statements, where "#" may be in a multi-line string
    for node in statements(tree):
        if not hasattr(node, "body"):
            inside.update(range(node.lineno, node.end_lineno + 1))
    block: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        line = line.strip()
        if line.startswith("#") and number not in inside:
            block.append(line.lstrip("#").removeprefix(" "))
        elif block:
            text = "\n".join(block).strip("\n")
            if len(re.findall(r"[A-Za-z]{2,}", text)) >= MIN_COMMENT_WORDS:
                yield number - len(block), ("", text)
            block = []


def module_documents(root: Path) -> list[list[Entry]]:
    """Return one document per .py file under `root`: docstrings and comments in source order."""
    paths, documents = [], []
    for folder, names, files in os.walk(root):
        names[:] = {*names} - SKIPPED_FOLDERS  # site-packages can have 100,000 files
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(paths):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.isdisjoint(parts):
            source = path.read_bytes()
            tree = ast.parse(source, str(path))
            docstrings = docstring_entries(tree, ".".join(parts).removesuffix(".__init__"))
            comments = comment_entries(source.decode("utf-8", "replace"), tree)
            documents.append([entry for _, entry in sorted([*docstrings, *comments])])
    return documents


def c_entries(owner: object, name: str) -> Iterator[Entry]:
    """Yield the docstrings of a C module, or of a class MODULE.CLASS, and of its members."""
    if isinstance(text := owner.__doc__, str) and text.strip():
        signature = getattr(owner, "__text_signature__", None) or ""
        yield name + signature.replace("$", "") + "\n", inspect.cleandoc(text)
    if isinstance(owner, type | ModuleType):
        for key, child in sorted(vars(owner).items()):
            is_own_class = isinstance(child, type) and child.__module__ == name.split(".")[0]
            if inspect.isroutine(child) or is_own_class:
                yield from c_entries(child, f"{name}.{key}")


def without_repeats(documents: Iterable[list[Entry]]) -> Iterator[str]:
    """Yield the documents as text, without paragraphs and entries that occurred earlier. Split a
    document when it has DOCUMENT_CHARS; drop a short remainder."""
    seen = set()
    for document in documents:
        kept, size = [], 0
        for heading, text in document:
            paragraphs = []
            for paragraph in text.split("\n\n"):
                key = " ".join(paragraph.split())
                may_repeat = len(key) < MIN_REPEAT_CHARS and paragraph != text
                if may_repeat or key not in seen:
                    paragraphs.append(paragraph)
                seen.add(key)
            if paragraphs:
                text = "\n\n".join(paragraphs)
                kept.append(f"{heading}{text}\n")
                size += len(text)
            if size >= DOCUMENT_CHARS:
                yield "\n".join(kept)
                kept, size = [], 0
        if size >= MIN_DOCUMENT_CHARS:
            yield "\n".join(kept)


def collect() -> list[str]:
    """Return the documents, sorted by SHA-1. Raise UserError if this Python has no sources."""
    library = Path(sysconfig.get_path("stdlib"))
    fix = "use a full CPython, or text of your own with data/tokenize_text.py"
    missing = f"no Python sources in {library}: this installation is zipped or stripped: {fix}"
    require((library / "pydoc_data" / "topics.py").exists(), missing)
    from pydoc_data.topics import topics

    # Longest first: some topics contain others.
    texts = sorted(topics.values(), key=lambda text: (-len(text), text))
    found = [[("", text.strip())] for text in texts]
    for name in C_MODULES:
        with contextlib.suppress(ImportError):  # not built, or for another platform
            found.append([*c_entries(importlib.import_module(name), name)])
    found += module_documents(library)
    texts = (text.encode("utf-8", "replace").decode() for text in without_repeats(found))
    return sorted(texts, key=lambda text: hashlib.sha1(text.encode()).digest())


def learn_merges(texts: Iterable[str], count: int) -> list[bytes]:
    """Return `count` merges of byte-pair encoding (Sennrich et al. 2016), learned from `texts`.

    Each merge turns the most frequent pair of adjacent tokens into a new token; of several pairs,
    the first in byte order. Pairs are counted in distinct words, weighted by the frequency of the
    word, and recounted only next to a merge. A token is one character here, so a merge is
    str.replace. The heap also contains outdated counts, which are skipped."""
    frequency = Counter()
    for text in texts:
        frequency.update(re.findall(BYTE_BPE_PATTERN, text))
    words = [word.encode().decode("latin-1") for word in frequency]
    weights = list(frequency.values())
    token_of = {chr(byte): bytes([byte]) for byte in range(256)}
    character_of = {token: character for character, token in token_of.items()}
    counts, where = Counter(), defaultdict(set)
    for index, word in enumerate(words):
        for pair in map("".join, pairwise(word)):
            counts[pair] += weights[index]
            where[pair].add(index)

    def entry(pair: str) -> tuple:
        return -counts[pair], token_of[pair[0]], token_of[pair[1]], pair

    heap = [entry(pair) for pair in counts]
    heapq.heapify(heap)
    while len(token_of) < 256 + count:
        negative, first, second, pair = heapq.heappop(heap)
        if -negative != counts[pair]:
            continue
        # Two pairs can give the same token.
        merged = character_of.setdefault(first + second, chr(len(token_of)))
        token_of[merged] = first + second
        changed = set()
        for index in where.pop(pair):
            if pair not in (word := words[index]):
                continue
            words[index] = word.replace(pair, merged)
            near = word[max(word.index(pair) - 1, 0) : word.rindex(pair) + 3]
            for text, sign in ((near, -1), (near.replace(pair, merged), 1)):
                for other in map("".join, pairwise(text)):
                    counts[other] += sign * weights[index]
                    where[other].add(index)
                    changed.add(other)
        for other in changed:
            if counts[other] > 0:
                heapq.heappush(heap, entry(other))
    return [*token_of.values()][256:]


def main(argv: list[str] | None = None) -> None:
    """Write a training shard, a validation shard (the first documents) and merges.json. Takes about
    five seconds."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    documents = collect()
    sizes = np.cumsum([len(text.encode()) for text in documents])
    count = int(np.searchsorted(sizes, VAL_BYTES)) + 1  # of validation documents
    merges = learn_merges(documents[count:], VOCAB - 257)
    arrays = encode_documents(byte_bpe(merges), documents)
    val, train = np.concatenate(arrays[:count]), np.concatenate(arrays[count:])
    write_whole(folder / MERGES, json.dumps([merged.hex() for merged in merges]).encode())
    write_shard(folder / "builtin_val_000000.bin", val)
    write_shard(folder / "builtin_train_000001.bin", train)
    text = f"{len(documents)} documents of Python {platform.python_version()}, {sizes[-1]:,} bytes"
    tokens = f"{len(train):,} tokens for training, {len(val):,} for validation"
    tell(f"{folder}: {text}: {tokens}")


if __name__ == "__main__":
    gc.disable()  # it would take half of the time, to search syntax trees for cycles
    sys.exit(report_errors(main))
