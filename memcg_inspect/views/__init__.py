# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Views
-----

Each module answers one question about an image with tables, and declares it as ``VIEW``. The
front ends make a subcommand of each module in :data:`NAMES`.
"""

from __future__ import annotations

from importlib import import_module

from memcg_inspect.tables import Column, columns_of
from memcg_inspect.views.view import View

__all__ = ("NAMES", "tables", "view_of", "views")

#: Modules of this package, in the order of ``--help``.
NAMES = (
    "overview",
    "pages",
    "slabinfo",
    "percpu",
    "usage",
    "stat",
    "stock",
    "tasks",
    "dying",
    "rss",
    "drift",
    "allocinfo",
    "who",
)


def view_of(name: str) -> View:
    """Return the view with a name, one of :data:`NAMES`."""
    view: View = import_module(f"{__name__}.{name}").VIEW
    return view


def views() -> tuple[View, ...]:
    """Return all views."""
    return tuple(map(view_of, NAMES))


def tables(name: str) -> tuple[tuple[Column, ...], ...]:
    """
    Return the columns of each table of a view.

    Columns that exist once for each node are named ``node_N``.
    """
    return tuple(columns_of(record, keys=("N",)) for record in view_of(name).records)
