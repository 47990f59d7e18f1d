# SPDX-License-Identifier: LGPL-2.1-or-later
"""How a question is asked, whatever the face."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drgn import Program

from memcg_inspect.tables import Answer

__all__ = ("Argument", "View")


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
    A question.

    :ivar name: of the command
    :ivar help: one line
    :ivar description: more of it
    :ivar run: takes the program and the arguments; raises ``ImageError`` or ``UsageError`` for
        what cannot be answered
    :ivar choices: which of ``memcg``, ``node``, ``sort`` and ``fields`` make sense
    """

    name: str
    help: str
    description: str
    run: Callable[[Program, Namespace], Answer]
    arguments: tuple[Argument, ...] = ()
    choices: tuple[str, ...] = ("memcg", "node", "sort", "fields")
