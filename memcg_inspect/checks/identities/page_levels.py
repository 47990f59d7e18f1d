# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``page_levels``
------------------------

For each memcg: every counter that the kernel also keeps by node, other than those of slabs, is the
sum of the same counter of its nodes. ``__mod_memcg_lruvec_state()`` changes both. ``levels``
compares those of slabs.

A memcg has counters for all possible nodes. A flush visits the nodes in ``N_MEMORY`` only. So
changes on a node that has lost its memory are not folded, and are lost when the memcg is freed.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import LEVELS
from memcg_inspect.checks.identities.levels import level_row
from memcg_inspect.checks.identities.slab import ITEMS
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Unit
from memcg_inspect.report import Row

__all__ = ("CHECK", "page_level_rows", "unit_of")


def unit_of(item: str) -> Unit:
    """
    Return the unit of a counter of memcgs.

    :param item: enumerator. Counters of events are in pages, too
    """
    if item.endswith("_B"):
        return "bytes"
    return "KiB" if item.endswith("_KB") else "pages"


def page_level_rows(snapshot: Snapshot) -> list[Row]:
    """Compare each counter of each memcg with the sum of its nodes', where either is not zero."""
    rows, items, counters = [], _items(snapshot), snapshot.counters
    read = {i for i in items if all(counters.has(i, nid) for nid in (None, *counters.nids))}
    for memcg in snapshot.live():
        rows += [
            level_row(snapshot, RowKey("page_levels", item, unit_of(item), memcg.address))
            for item in items
            if item not in read or counters.is_active(memcg.address, item)
        ]
    return [row for row in rows if not row.is_zero]


def _items(snapshot: Snapshot) -> Sequence[str]:
    slab = ITEMS.values()
    return [item for item in snapshot.features.lruvec_items if item not in slab]


def _not_kept(snapshot: Snapshot) -> str | None:
    return None if _items(snapshot) else "this kernel keeps no other counter by memcg and node"


CHECK = Check(
    name="page_levels",
    counter="every other counter of the memcg that is also kept by node",
    unit="KiB, pages",
    found="the same counters of its nodes. Counters that are 0 on both sides have no row",
    sources=("nodes",),
    places=("folded", "pending_cpu"),
    rows=page_level_rows,
    not_kept=_not_kept,
    counters_only=True,
    half_done=LEVELS,
)
