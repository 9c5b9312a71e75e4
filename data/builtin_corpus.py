"""Built-in demo corpus: text that comes with Python, so nothing is downloaded.

    python data/builtin_corpus.py [FOLDER]

Four kinds of text: the language reference in `pydoc_data.topics`, docstrings and block comments of
the standard library (sources are parsed, never imported), and docstrings of C modules. Paragraphs
that came before are left out, so that validation text is not in the training text. Tokens are
byte-level BPE with merges learned here, from the training documents only. The same Python always
gives the same files, others give slightly different ones: compare losses only within one version.
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

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from shards import BYTE_BPE_PATTERN, byte_bpe, encode_documents, write_shard, write_whole

# Importing shards has put the folder of train_gpt.py on the path.
from train_gpt import MERGES, Parser, need, report_errors, tell

DEFAULT_FOLDER = Path(__file__).resolve().parent / "builtin"
VAL_BYTES = 300_000  # of text for validation, at least
MIN_DOCUMENT_CHARS = 200  # what is left of a module or topic is no document below this
DOCUMENT_CHARS = 4000  # a module that says more than this is cut, between entries
VOCAB = 2048  # tokens: 256 bytes, the merges, <|endoftext|>
MIN_COMMENT_WORDS = 8  # shorter block comments are mostly labels and commented-out lines
MIN_REPEAT_CHARS = 80  # "For example:" may come again, a whole paragraph may not

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "pydoc_data"}
# Test suites and applications, which many Linux packages leave out.
SKIPPED_FOLDERS |= {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
# Importing these has no side effects, no .py file repeats their docstrings, and programs do not
# replace their functions (which is why sys, with its hooks, is not here).
C_MODULES = """
    _codecs _collections _curses _socket _ssl _thread array atexit binascii builtins cmath
    faulthandler gc itertools marshal math mmap nt posix pyexpat resource select time unicodedata
    zlib
""".split()

Entry = tuple[str, str]  # a piece of a document: a heading (a line, or "") and the text below it


def docstring_entries(node: ast.AST, name: str, signature: str = "") -> Iterator[tuple[int, Entry]]:
    """(line number, docstring under its qualified name and signature), in source order."""
    if text := ast.get_docstring(node):
        yield node.body[0].lineno, (f"{name}{signature}\n", text)
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_class = isinstance(child, ast.ClassDef)
            own = ", ".join(map(ast.unparse, child.bases if is_class else [child.args]))
            own = "" if is_class and not own else f"({own})"
            yield from docstring_entries(child, f"{name}.{child.name}", own)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below `node`; several times faster than ast.walk, which visits expressions."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from statements(child)


def comment_entries(source: str, tree: ast.Module) -> Iterator[tuple[int, Entry]]:
    """(line number, block of consecutive whole-line comments), in source order."""
    inside = set()  # lines of simple statements: what begins with "#" there may be in a string
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
    """One document for each .py file under `root`: docstrings and comments in source order."""
    paths, documents = [], []
    for folder, names, files in os.walk(root):
        names[:] = {*names} - SKIPPED_FOLDERS  # site-packages may hold 100,000 files
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
    """Docstrings of a C module (or of a class in it, name MODULE.CLASS) and of what it defines."""
    if isinstance(text := owner.__doc__, str) and text.strip():
        signature = getattr(owner, "__text_signature__", None) or ""
        yield name + signature.replace("$", "") + "\n", inspect.cleandoc(text)
    if isinstance(owner, type | ModuleType):
        for key, child in sorted(vars(owner).items()):
            is_own_class = isinstance(child, type) and child.__module__ == name.split(".")[0]
            if inspect.isroutine(child) or is_own_class:
                yield from c_entries(child, f"{name}.{key}")


def without_repeats(documents: Iterable[list[Entry]]) -> Iterator[str]:
    """The documents as text, less paragraphs and entries that came before. Long ones are cut after
    DOCUMENT_CHARS or more, between entries; a short rest is dropped."""
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
    """The documents in the order of their SHA-1; UserError if this Python has no sources."""
    library = Path(sysconfig.get_path("stdlib"))
    cure = "use a full CPython, or text of your own with data/tokenize_text.py"
    lacks = f"no Python sources in {library}: this installation is zipped or stripped, {cure}"
    need((library / "pydoc_data" / "topics.py").exists(), lacks)
    from pydoc_data.topics import topics

    # Longest first: some topics contain others.
    texts = sorted(topics.values(), key=lambda text: (-len(text), text))
    found = [[("", text.strip())] for text in texts]
    for name in C_MODULES:
        with contextlib.suppress(ImportError):  # not built here, or of another platform
            found.append([*c_entries(importlib.import_module(name), name)])
    found += module_documents(library)
    texts = (text.encode("utf-8", "replace").decode() for text in without_repeats(found))
    return sorted(texts, key=lambda text: hashlib.sha1(text.encode()).digest())


def learn_merges(texts: Iterable[str], count: int) -> list[bytes]:
    """The `count` merges of byte-pair encoding (Sennrich et al. 2016) that `texts` call for. Again
    and again the most frequent pair of neighbouring tokens (of several, the first in the order of
    their bytes) becomes a token. Pairs are counted in distinct words, weighted by how often each
    occurs, and only those around merged ones anew. A token is one character here, so that a merge
    is str.replace. The heap holds outdated counts too: one is used only if it is still true."""
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
        # Two pairs can make the same token.
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
    """Write a training and a validation shard and merges.json, and say what they hold. Takes about
    five seconds. The first documents in SHA-1 order are for validation."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    documents = collect()
    sizes = np.cumsum([len(text.encode()) for text in documents])
    count = int(np.searchsorted(sizes, VAL_BYTES)) + 1  # the first to reach that
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
    gc.disable()  # or half the time goes into looking for cycles among the nodes of syntax trees
    sys.exit(report_errors(main))
