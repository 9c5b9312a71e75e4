"""Built-in demo corpus: text that comes with Python and NumPy, so nothing is downloaded.

    python data/builtin_corpus.py [--out DIR]

Four kinds of text: the language reference in `pydoc_data.topics`, docstrings and block comments of
the standard library and of NumPy (sources are parsed, never imported), and docstrings of C modules.
A topic is a document; so is all that one module says about itself. Paragraphs that came before are
left out, so that validation text is not in the training text. Tokens are bytes, and 256 stands
before every document. The same versions always give the same shards; others give slightly
different ones, so compare losses only within one installation.
"""

import ast
import gzip
import importlib
import inspect
import lzma
import math
import platform
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # train_gpt.py runs this from elsewhere
from shards import (
    Parser,
    UserError,
    encode_documents,
    load_encoding,
    run,
    sha1,
    shard_path,
    write_shard,
)

NAME = "builtin"
DEFAULT_OUT = Path(__file__).resolve().parent / NAME
VAL_FRACTION, VAL_MIN_BYTES = 0.05, 300_000
MIN_DOCUMENT_CHARS = 200  # what is left of a module or topic is no document below this
MIN_COMMENT_WORDS = 8  # shorter block comments are mostly labels and commented-out lines
MIN_REPEAT_CHARS = 80  # "For example:" may come again, a whole paragraph may not

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "pydoc_data"}
# Test suites and applications, which many Linux packages leave out.
SKIPPED_FOLDERS |= {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
# Six modules of NumPy with one text, but for the name of the polynomial: no fair validation text.
SKIPPED_FOLDERS |= {"polynomial"}
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


def module_documents(root: Path, package: str = "") -> list[list[Entry]]:
    """One document per .py file under `root`: its docstrings and comments in source order."""
    documents = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.isdisjoint(parts):
            source = path.read_bytes()
            tree = ast.parse(source, str(path))
            module = ".".join(filter(None, [package, *parts])).removesuffix(".__init__")
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
    """The documents less paragraphs and entries that came before; short documents are dropped."""
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
        if sum(len(entry.text) for entry in kept) >= MIN_DOCUMENT_CHARS:
            yield kept


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
    numpy = module_documents(Path(np.__file__).parent, "numpy")
    kinds: Counter[str] = Counter()
    documents = []
    for entries in without_repeats([*topic_documents(), *c_documents(), *library, *numpy]):
        for entry in entries:
            kinds[entry.kind] += len(render(entry).encode())
        documents.append("\n".join(map(render, entries)))
    return sorted(documents, key=sha1), dict(kinds)


def build(out_dir: Path) -> dict:
    """Write one training and one validation shard to `out_dir`; the counts as a dict.

    Takes some seconds. The first documents in SHA-1 order are for validation.
    """
    documents, kinds = collect()
    sizes = [len(text.encode()) for text in documents]
    wanted = max(VAL_MIN_BYTES, VAL_FRACTION * sum(sizes))
    count = int(np.searchsorted(np.cumsum(sizes), wanted)) + 1  # the first to reach what is wanted
    arrays = encode_documents(load_encoding("bytes"), documents)
    val, train = np.concatenate(arrays[:count]), np.concatenate(arrays[count:])
    write_shard(shard_path(Path(out_dir), NAME, "val", 0), val)
    write_shard(shard_path(Path(out_dir), NAME, "train", 1), train)
    val_text = "".join(documents[:count]).encode()
    return {
        "documents": len(documents),
        "val_documents": count,
        "bytes": sum(sizes),
        "val_bytes": len(val_text),
        "bytes_by_kind": kinds,
        "train_tokens": len(train),
        "val_tokens": len(val),
        "gzip_bits_per_byte": 8 * len(gzip.compress(val_text, 9)) / len(val_text),
        "xz_bits_per_byte": 8 * len(lzma.compress(val_text, preset=9)) / len(val_text),
    }


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: data/builtin")
    args = parser.parse_args(argv)
    made = build(args.out)
    print(f"{args.out}: Python {platform.python_version()}, NumPy {np.__version__}")
    kinds = ", ".join(f"{kind} {size:,}" for kind, size in made["bytes_by_kind"].items())
    print(f"  {made['documents']} documents, {made['bytes']:,} bytes: {kinds}")
    print(f"  train: {made['train_tokens']:,} tokens; val: {made['val_tokens']:,} tokens")
    for packer in ("gzip", "xz"):
        bits = made[f"{packer}_bits_per_byte"]
        nats = bits * math.log(2)
        print(f"  {packer} -9 on the validation text: {bits:.3f} bits, {nats:.3f} nats per byte")


if __name__ == "__main__":
    run(main)
