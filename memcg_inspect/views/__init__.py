# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The questions people ask
------------------------

Each module answers one, with tables. ``VIEW`` in it says how it is asked. The faces make
subcommands and drgn commands of :data:`NAMES`.
"""

from __future__ import annotations

from importlib import import_module

from memcg_inspect.tables import Column
from memcg_inspect.views.view import View

__all__ = ("NAMES", "columns", "views")

#: Modules of this package, in the order in which they are listed for people.
NAMES = (
    "slabinfo",
    "percpu",
    "stat",
    "stock",
    "tasks",
    "dying",
    "rss",
    "drift",
    "allocinfo",
    "who",
)


def views() -> tuple[View, ...]:
    """Return all views."""
    found: list[View] = []
    for name in NAMES:
        found.append(import_module(f"{__name__}.{name}").VIEW)
    return tuple(found)


def columns(name: str) -> tuple[Column, ...]:
    """Return the columns of all tables of a view."""
    found: list[Column] = []
    for value in vars(import_module(f"{__name__}.{name}")).values():
        if isinstance(value, tuple) and value and all(isinstance(c, Column) for c in value):
            found += value
    return tuple(found)
