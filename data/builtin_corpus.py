"""Built-in demo corpus: English that every CPython installation carries, so nothing is downloaded.

    python data/builtin_corpus.py [--out DIR]

Four kinds of text: the language reference in `pydoc_data.topics`, the docstrings and the block
comments of the standard library's sources (parsed, never imported), and the docstrings of C modules
that have no source. A topic is a document; so is everything that one module says about itself.
Tokens are bytes, and 256 stands before every document. The same Python installation always gives
the same shards; another version gives slightly different ones, so compare losses only within one.
"""

import argparse
import ast
import gzip
import hashlib
import importlib
import inspect
import lzma
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent))  # for those who import this file
from shards import UserError, byte_encoding, encode_documents, run, shard_path, write_shard

NAME = "builtin"
DEFAULT_OUT = Path(__file__).resolve().parent / NAME
VAL_FRACTION, VAL_MIN_BYTES = 0.05, 300_000
MIN_DOCUMENT_BYTES = 200  # what is left of a module or topic is no document below this
MIN_COMMENT_WORDS = 8  # shorter block comments are mostly labels and commented-out lines
MIN_REPEAT_CHARS = 80  # "For example:" may come again, a whole paragraph may not

# Test suites and bundled applications; many Linux packages leave them out, too.
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data"}
SKIPPED_FOLDERS |= {"site-packages", "dist-packages"}
# Importing these has no side effects, and no .py file repeats their docstrings.
C_MODULES = """
    _codecs _collections _curses _socket _ssl _thread array atexit binascii builtins cmath faulthandler
    gc itertools marshal math mmap nt posix pyexpat resource select sys time unicodedata zlib
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
        raise UserError("this Python has no pydoc_data.topics; use a full CPython installation")
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


def comment_entries(source: str, tree: ast.Module) -> Iterator[tuple[int, Entry]]:
    """(line number, block of consecutive whole-line comments), in source order."""
    in_string = set()  # lines of multi-line strings: a "#" there starts no comment
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno > node.lineno:
            in_string.update(range(node.lineno, node.end_lineno + 1))
    block: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        line = line.strip()
        if line.startswith("#") and number not in in_string:
            block.append(line.lstrip("#").removeprefix(" "))
        elif block:
            text = "\n".join(block).strip("\n")
            if len(re.findall(r"[A-Za-z]{2,}", text)) >= MIN_COMMENT_WORDS:
                yield number - len(block), Entry("comments", "", text)
            block = []


def source_documents(stdlib: Path) -> list[list[Entry]]:
    """One document per .py file of the standard library in `stdlib`: docstrings and comments."""
    documents = []
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if SKIPPED_FOLDERS.isdisjoint(parts):
            source = path.read_bytes()
            tree = ast.parse(source, str(path))
            module = ".".join(parts).removesuffix(".__init__")
            entries = [*docstring_entries(module, tree), *comment_entries(source.decode("utf-8", "replace"), tree)]
            documents.append([entry for _, entry in sorted(entries)])
    return documents


def c_module_documents() -> list[list[Entry]]:
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
