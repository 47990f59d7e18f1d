# SPDX-License-Identifier: LGPL-2.1-or-later
"""Small changes to the source, made by chance from a seed: mutants, which tests should notice.

mutmut 3 changes functions only, and most bounds and rules of an identity are in a record at the
level of the module. Cosmic Ray runs one command for every mutant, in place. Neither takes a sample
from a seed, and all mutants would take days.
"""

import ast
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

#: What takes the place of an operator.
_OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
#: Fields of nodes with types or with names, where a change says nothing.
_SKIPPED = {"annotation", "returns", "decorator_list", "bases"}


class Mutant(NamedTuple):
    """A change of one place in a file.

    :ivar line: number of the line in which the place begins
    :ivar start: index of its first byte in the file
    """

    path: str
    line: int
    start: int
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.path}:{self.line}: {_short(before)} -> {_short(after)}"

    def key(self, source: str) -> str:
        """Return what names the mutant in later versions of the file, too."""
        line = source.splitlines()[self.line - 1].strip()
        return f"{self.path}: {line} | {' '.join(self.after.split())}"

    def applied(self, source: str) -> str:
        """Return the source of the file with the change."""
        raw = source.encode()
        end = self.start + len(self.before.encode())
        return (raw[: self.start] + self.after.encode() + raw[end:]).decode()


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}"


def mutants(path: str, source: str) -> Iterator[Mutant]:
    """Return all mutants of a file."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for place, after in _changes(ast.parse(source)):
        start = starts[place.lineno - 1] + place.col_offset
        end = starts[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0)
        before = source.encode()[start:end].decode()
        yield Mutant(path, place.lineno, start, before, after)


def _changes(node: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Return places, and what takes the place of each."""
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom) or _is_names(node):
        return
    if isinstance(node, ast.stmt | ast.expr):
        yield from ((node, after) for after in _instead(node))
    if isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.Name | ast.Call):
        yield node.test, f"(not {ast.unparse(node.test)})"
    for field, value in ast.iter_fields(node):
        if field in _SKIPPED:
            continue
        for below in value if isinstance(value, list) else [value]:
            if isinstance(below, ast.AST) and not _is_text(below) and not _is_type(node, below):
                yield from _changes(below)


def _instead(node: ast.AST) -> Iterator[str]:
    """Return what can take the place of an expression or a statement."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OTHER:
        ops = [_OTHER[type(node.ops[0])](), *node.ops[1:]]
        yield f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
    elif isinstance(node, ast.BoolOp) and type(node.op) in _OTHER:
        yield f"({ast.unparse(ast.BoolOp(_OTHER[type(node.op)](), node.values))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
        yield f"({ast.unparse(ast.BinOp(node.left, _OTHER[type(node.op)](), node.right))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield str(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
        yield f"({'XX' + node.value!r})"
    elif isinstance(node, ast.Return):
        # False and None are the same to most callers.
        if node.value is not None and ast.unparse(node.value) not in ("None", "False"):
            yield "return None"
    elif isinstance(node, ast.Expr | ast.AugAssign):
        yield "pass"
    elif isinstance(node, ast.IfExp):
        yield f"({ast.unparse(node.body)})"
        yield f"({ast.unparse(node.orelse)})"
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        for part in node.generators:
            for n, condition in enumerate(part.ifs):
                part.ifs[n] = ast.Constant(True)
                text = ast.unparse(node)
                part.ifs[n] = condition
                yield text


def _is_text(node: ast.AST) -> bool:
    """Return whether a node is a docstring, or another string that is a statement."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_type(node: ast.AST, below: ast.AST) -> bool:
    """Return whether a node is the 0 of ``x or 0``, which tells mypy that it is a number."""
    is_or = isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)
    return is_or and isinstance(below, ast.Constant) and below.value == 0


def _is_names(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def sample(root: Path, folders: Iterable[str], seed: int) -> list[Mutant]:
    """Return all mutants of some folders in an order that depends on the seed alone."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    found = [m for p in paths for m in mutants(str(p.relative_to(root)), p.read_text())]
    # Texts would be half of all. Each third of them is enough.
    chosen = [m for n, m in enumerate(found) if not m.after.startswith("('XX") or n % 3 == 0]
    random.Random(seed).shuffle(chosen)
    return chosen
