# SPDX-License-Identifier: LGPL-2.1-or-later
"""The declaration of a view, from which front ends make its command."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from memcg_inspect.image.image import Image
from memcg_inspect.image.progress import interrupted_reason
from memcg_inspect.tables import Answer, NotRead

__all__ = ("ONE_MEMCG", "Argument", "View", "by_argument", "interrupted", "narrowed_by", "named")

#: Help of an argument that names one memcg.
ONE_MEMCG = "a path, a shell pattern that one path matches, or an address"


@dataclass(frozen=True)
class Argument:
    """
    An argument of the command, for ``ArgumentParser.add_argument``.

    :ivar flags: a name, or options
    """

    flags: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class View:
    """
    A command that answers one question with tables.

    :ivar name: name of the command
    :ivar description: first sentences of its ``--help``
    :ivar run: takes the image and the parsed arguments; raises ``ImageError`` or ``UsageError``
        if it cannot answer
    :ivar records: classes of the rows of its tables
    :ivar arguments: arguments that only this view has
    :ivar choices: which of ``memcg`` (with ``--subtree``), ``node``, ``sort``, ``fields`` and
        ``top`` apply to it
    :ivar incomplete: meaning of exit status 3
    :ivar compares: whether its ranked tables can be compared with earlier ones
    """

    name: str
    description: str
    run: Callable[[Image, Namespace], Answer]
    records: tuple[type, ...]
    arguments: tuple[Argument, ...] = ()
    choices: tuple[str, ...] = ("memcg", "node", "sort", "fields")
    incomplete: str = "something could not be read"
    compares: bool = True


def by_argument(dimensions: Iterable[str]) -> Argument:
    """
    Return the argument ``--by`` of a view that sums up.

    :param dimensions: what it can sum up by
    """
    known = tuple(dimensions)

    def parsed(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    help = f"sum up by any of {', '.join(known)}"
    return Argument(("--by",), {"type": parsed, "metavar": "WHAT,...", "help": help})


def named(dimensions: Sequence[str]) -> str:
    """Return the dimensions that a table is by, for its title: ``memcg, cache and node``."""
    *first, last = dimensions
    return f"{', '.join(first)} and {last}" if first else last


def narrowed_by(args: Namespace) -> Sequence[str]:
    """
    Return the dimensions whose rows the user chooses.

    Sums over memcgs have no memcg, so a view that sums up keeps these dimensions apart.
    """
    return [name for name in ("memcg", "node") if getattr(args, name)]


def interrupted(answer: Answer) -> Answer:
    """Return the answer of a view that was interrupted: that is why values were not read."""
    tables = tuple(replace(t, rows=[_said(row) for row in t.rows]) for t in answer.tables)
    return replace(answer, tables=tables)


def _said(row: Any) -> Any:
    values = {declared.name: getattr(row, declared.name) for declared in fields(row)}
    unread = {
        name: NotRead(interrupted_reason(value.reason))
        for name, value in values.items()
        if isinstance(value, NotRead)
    }
    return replace(row, **unread) if unread else row
