# SPDX-License-Identifier: LGPL-2.1-or-later
"""Hashes of source files that do not change with their comments.

The cache is keyed by what shapes an image. A comment or a docstring does not, so rewriting
one must not make every image anew.
"""

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

# A string or character literal of C is matched first, so that no comment begins inside one.
_C_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


def _python(text: str) -> Iterator[str]:
    lines = text.splitlines()
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return (line for number, line in enumerate(lines, 1) if number not in docstrings)


def _c(text: str) -> Iterator[str]:
    def shortened(match: re.Match[str]) -> str:
        return " " if match[0].startswith("/") else match[0]

    yield from _C_TOKEN.sub(shortened, text).splitlines()


def _shell(text: str) -> Iterator[str]:
    lines = text.splitlines()
    return (line for line in lines if line.startswith("#!") or not line.lstrip().startswith("#"))


def code(path: Path) -> str:
    """Return a Python, C or shell file without comments, docstrings and empty lines.

    The result is the same in every version of Python. Other files are returned as they are.
    """
    text = path.read_text()
    if path.suffix == ".py":
        lines = _python(text)
    elif path.suffix in (".c", ".h"):
        lines = _c(text)
    elif path.suffix == ".sh" or text.startswith("#!"):
        lines = _shell(text)
    else:
        return text
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


def code_hash(*roots: Path) -> str:
    """Return one hash over names and code of files, and of all files below folders."""
    digest = hashlib.sha256()
    for root in roots:
        paths = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
        for path in paths:
            name = path.name if path == root else str(path.relative_to(root))
            digest.update(f"{name}\0{code(path)}\0".encode())
    return digest.hexdigest()
