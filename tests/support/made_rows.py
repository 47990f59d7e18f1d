# SPDX-License-Identifier: LGPL-2.1-or-later
"""Rows made by hand, for tests of what one fault does to rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memcg_inspect.checks.diagnosis.cause import Hypothesis
from memcg_inspect.checks.diagnosis.differences import Differences, Signature, View
from memcg_inspect.checks.diagnosis.registry import CAUSES
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Unit

#: A row in short: identity, item, and then memcg, node and obj_cgroup, if it has these.
Short = tuple[Any, ...]

_REFERENCES = (
    *("references", "css_refs", "id_refs", "objcg_lists", "task_objcg", "reparenting", "released"),
    "sock_bytes",
)


def key(identity: str, item: str, *where: Any) -> RowKey:
    """Return the key of a row, with the unit that the report gives its item."""
    unit: Unit = "pages"
    if identity in _REFERENCES:
        unit = "references"
    elif identity in ("objcg_bytes", "alloc_tags") or item.endswith("_B"):
        unit = "bytes"
    elif item.endswith("_KB"):
        unit = "KiB"
    return RowKey(identity, item, unit, *where)


def view(snapshot: Snapshot, off: Mapping[Short, int], exact: Iterable[Short] = ()) -> View:
    """Return rows that differ by an amount, which are findings, and rows that do not."""
    amounts = {key(*short): amount for short, amount in off.items()}
    amounts.update({key(*short): 0 for short in exact})
    rows = [
        make_row(k, {"found": 1 << 40}, {"folded": (1 << 40) + amount})
        for k, amount in amounts.items()
    ]
    made = Differences(snapshot, rows, {k for k, amount in amounts.items() if amount})
    return View(made, made.differing())


def exact(snapshot: Snapshot, *rows: Short) -> Differences:
    """Return rows that do not differ."""
    return view(snapshot, {}, rows).differences


def options(
    snapshot: Snapshot, off: Mapping[Short, int], exact: Iterable[Short] = ()
) -> list[Hypothesis]:
    """Return all faults that explain the first of some rows that differ."""
    rows = view(snapshot, off, exact)
    first, amount = next(iter(off.items()))
    return [
        option
        for cause in CAUSES
        if first[0] in cause.rows
        for option in cause.options(rows, key(*first), amount)
    ]


def shown(signature: Signature) -> dict[Short, int]:
    """Return what a signature adds to rows, by the row in short."""
    found = {}
    for row, amount in signature.rows.items():
        short = [row.identity, row.item, row.memcg, row.nid, row.objcg]
        while short[-1] is None:
            short.pop()
        assert row == key(*short)
        found[tuple(short)] = amount
    return {short: amount for short, amount in found.items() if amount}
