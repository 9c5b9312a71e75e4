"""Built-in demo corpus: text that comes with Python, so nothing is downloaded.

    python data/builtin_corpus.py [--out DIR]

Four kinds of text: the language reference in `pydoc_data.topics`, docstrings and block comments of
the standard library (sources are parsed, never imported), and docstrings of C modules. A topic is a
document; so is every few thousand characters of what one module says about itself. Paragraphs that
came before are left out, so that validation text is not in the training text.

Tokens are byte-level BPE with merges learned here, from the training documents only; they go into
merges.json beside the shards. The same Python always gives the same files; others give slightly
different ones, so compare losses only within one version.
"""

import ast
import heapq
import importlib
import inspect
import json
import platform
import re
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # train_gpt.py runs this from elsewhere
from shards import (
    BYTE_BPE_PATTERN,
    MERGES,
    Parser,
    UserError,
    byte_bpe,
    encode_documents,
    folder_name,
    make_folder,
    run,
    sha1,
    shard_path,
    shards_in,
    tell,
    write_shard,
    write_whole,
)

NAME = "builtin"
DEFAULT_OUT = Path(__file__).resolve().parent / NAME
VAL_FRACTION, VAL_MIN_BYTES = 0.05, 300_000
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


class Entry(NamedTuple):
    """One piece of a document: its kind (for the statistics), a heading or "", and the text."""

    kind: str
    heading: str
    text: str


def topic_documents() -> list[list[Entry]]:
    """One document per topic of the language reference.

    Longest first: some topics contain others, and what is repeated is dropped later.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "this Python has no pydoc_data.topics; use a full CPython installation"
        ) from None
    texts = sorted(topics.values(), key=lambda text: (-len(text), text))
    return [[Entry("topics", "", text.strip())] for text in texts]


def docstring_entries(module: str, tree: ast.Module) -> Iterator[tuple[int, Entry]]:
    """(line number, docstring under its qualified name and signature), in source order."""

    def visit(node: ast.AST, name: str, signature: str) -> Iterator[tuple[int, Entry]]:
        if text := ast.get_docstring(node):
            yield node.body[0].lineno, Entry("docstrings", name + signature, text)
        for child in node.body:
            if isinstance(child, ast.ClassDef):
                bases = ", ".join(map(ast.unparse, child.bases))
                yield from visit(child, f"{name}.{child.name}", f"({bases})" if bases else "")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(child, f"{name}.{child.name}", f"({ast.unparse(child.args)})")

    yield from visit(tree, module, "")


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
                yield number - len(block), Entry("comments", "", text)
            block = []


def module_documents(root: Path) -> list[list[Entry]]:
    """One document per .py file under `root`: its docstrings and comments in source order."""
    documents = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.isdisjoint(parts):
            source = path.read_bytes()
            tree = ast.parse(source, str(path))
            module = ".".join(parts).removesuffix(".__init__")
            docstrings = docstring_entries(module, tree)
            comments = comment_entries(source.decode("utf-8", "replace"), tree)
            documents.append([entry for _, entry in sorted([*docstrings, *comments])])
    return documents


def c_documents() -> list[list[Entry]]:
    """One document per C module that this platform has: docstrings of functions and classes."""

    def visit(owner: object, name: str) -> Iterator[Entry]:
        if isinstance(text := owner.__doc__, str) and text.strip():
            signature = getattr(owner, "__text_signature__", None) or ""
            yield Entry("C docstrings", name + signature.replace("$", ""), inspect.cleandoc(text))
        if isinstance(owner, type | ModuleType):
            for key, child in sorted(vars(owner).items()):
                is_own_class = isinstance(child, type) and child.__module__ == module.__name__
                if inspect.isroutine(child) or is_own_class:
                    yield from visit(child, f"{name}.{key}")

    documents = []
    for name in C_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # not built here, or of another platform
            continue
        documents.append(list(visit(module, name)))
    return documents


def without_repeats(documents: Iterable[list[Entry]]) -> Iterator[list[Entry]]:
    """The documents less paragraphs and entries that came before, cut to size."""
    seen = set()
    for document in documents:
        kept = []
        for kind, heading, text in document:
            paragraphs = []
            for paragraph in text.split("\n\n"):
                key = " ".join(paragraph.split())
                may_repeat = len(key) < MIN_REPEAT_CHARS and paragraph != text
                if may_repeat or key not in seen:
                    paragraphs.append(paragraph)
                seen.add(key)
            if paragraphs:
                kept.append(Entry(kind, heading, "\n\n".join(paragraphs)))
        yield from cut(kept)


def cut(entries: list[Entry]) -> Iterator[list[Entry]]:
    """The entries of one module in documents of DOCUMENT_CHARS or more; a short rest is dropped."""
    document, size = [], 0
    for entry in entries:
        document.append(entry)
        size += len(entry.text)
        if size >= DOCUMENT_CHARS:
            yield document
            document, size = [], 0
    if size >= MIN_DOCUMENT_CHARS:
        yield document


def render(entry: Entry) -> str:
    """The entry as text: the heading on a line of its own; what is not Unicode becomes "?"."""
    text = f"{entry.heading}\n{entry.text}\n" if entry.heading else f"{entry.text}\n"
    return text.encode("utf-8", "replace").decode()


def collect() -> tuple[list[str], dict[str, int]]:
    """(documents in SHA-1 order, bytes of each kind of text); UserError if there are no sources."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    library = module_documents(stdlib)
    if not library:
        raise UserError(
            f"no Python sources in {stdlib}: this installation is zipped or stripped, use a full "
            "CPython, or text of your own with data/tokenize_text.py"
        )
    kinds: Counter[str] = Counter()
    documents = []
    for entries in without_repeats([*topic_documents(), *c_documents(), *library]):
        for entry in entries:
            kinds[entry.kind] += len(render(entry).encode())
        documents.append("\n".join(map(render, entries)))
    return sorted(documents, key=sha1), dict(kinds)


def learn_merges(texts: Iterable[str], count: int) -> list[bytes]:
    """The `count` merges of byte-pair encoding (Sennrich et al. 2016) that `texts` call for.

    Again and again the most frequent pair of neighbouring tokens becomes a token. Pairs are counted
    in distinct words, weighted by how often each occurs, and only words with the merged pair are
    counted anew. The heap holds outdated counts too: one is used only if it is still true.
    """
    frequency: Counter[str] = Counter()
    for text in texts:
        frequency.update(re.findall(BYTE_BPE_PATTERN, text))
    words = [[bytes([byte]) for byte in word.encode()] for word in frequency]
    weights = list(frequency.values())
    counts, where = Counter(), defaultdict(set)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            counts[pair] += weights[index]
            where[pair].add(index)
    heap = [(-n, pair) for pair, n in counts.items()]
    heapq.heapify(heap)
    merges: list[bytes] = []
    while len(merges) < count:
        negative, pair = heapq.heappop(heap)
        if -negative != counts[pair]:
            continue
        merged = pair[0] + pair[1]
        if merged not in merges:  # two pairs can make the same token
            merges.append(merged)
        changed = set()
        for index in where.pop(pair):
            old, new = words[index], []
            for token in old:
                if new and (new[-1], token) == pair:
                    new[-1] = merged
                else:
                    new.append(token)
            for word, sign in ((old, -1), (new, 1)):
                for other in pairwise(word):
                    counts[other] += sign * weights[index]
                    changed.add(other)
                    if sign > 0:
                        where[other].add(index)
            words[index] = new
        for other in changed - {pair}:
            if counts[other] > 0:
                heapq.heappush(heap, (-counts[other], other))
    return merges


def build(out_dir: Path) -> dict:
    """Write a training and a validation shard and merges.json to `out_dir`; counts as a dict.

    Takes about ten seconds. The first documents in SHA-1 order are for validation.
    """
    out_dir = Path(out_dir)
    documents, kinds = collect()
    sizes = [len(text.encode()) for text in documents]
    wanted = max(VAL_MIN_BYTES, VAL_FRACTION * sum(sizes))
    count = int(np.searchsorted(np.cumsum(sizes), wanted)) + 1  # the first to reach what is wanted
    merges = learn_merges(documents[count:], VOCAB - 257)
    arrays = encode_documents(byte_bpe(merges), documents)
    val, train = np.concatenate(arrays[:count]), np.concatenate(arrays[count:])
    write_whole(out_dir / MERGES, json.dumps([merged.hex() for merged in merges]).encode())
    write_shard(shard_path(out_dir, NAME, "val", 0), val)
    write_shard(shard_path(out_dir, NAME, "train", 1), train)
    return {
        "documents": len(documents),
        "val_documents": count,
        "bytes": sum(sizes),
        "val_bytes": sum(sizes[:count]),
        "bytes_by_kind": kinds,
        "train_tokens": len(train),
        "val_tokens": len(val),
    }


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out", type=folder_name, default=DEFAULT_OUT, help="default: data/builtin"
    )
    args = parser.parse_args(argv)
    make_folder(args.out, "--out")
    shards_in(args.out, NAME, "--out")
    made = build(args.out)
    kinds = ", ".join(f"{kind} {size:,}" for kind, size in made["bytes_by_kind"].items())
    tell(f"{args.out}: from Python {platform.python_version()}")
    tell(f"  {made['documents']} documents, {made['bytes']:,} bytes: {kinds}")
    tell(f"  train: {made['train_tokens']:,} tokens")
    tell(f"  val: {made['val_tokens']:,} tokens, {made['val_bytes']:,} bytes")


if __name__ == "__main__":
    run(main)
