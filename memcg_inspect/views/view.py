# SPDX-License-Identifier: LGPL-2.1-or-later
"""The declaration of a view, from which front ends make its command."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from memcg_inspect.image.image import Image
from memcg_inspect.image.progress import interrupted_reason
from memcg_inspect.tables import Answer, NotRead

__all__ = ("Argument", "View", "interrupted")


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
    :ivar help: one line, for the list of commands
    :ivar description: first sentences of its ``--help``
    :ivar run: takes the image and the parsed arguments; raises ``ImageError`` or ``UsageError``
        if it cannot answer
    :ivar records: classes of the rows of its tables
    :ivar arguments: arguments that only this view has
    :ivar choices: which of ``memcg``, ``node``, ``sort`` and ``fields`` apply to it
    :ivar incomplete: meaning of exit status 3
    """

    name: str
    help: str
    description: str
    run: Callable[[Image, Namespace], Answer]
    records: tuple[type, ...]
    arguments: tuple[Argument, ...] = ()
    choices: tuple[str, ...] = ("memcg", "node", "sort", "fields")
    incomplete: str = "something could not be read"


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
