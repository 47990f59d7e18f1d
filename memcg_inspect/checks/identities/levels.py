# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``levels``
-------------------

For each memcg: its counter of slab memory is the sum of the same counter of its nodes.
``__mod_memcg_lruvec_state()`` changes both.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import FLUSH, SLAB, HalfDone, largest_object, pattern
from memcg_inspect.checks.identities.slab import ITEMS
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "level_row", "level_rows")


def level_row(snapshot: Snapshot, key: RowKey) -> Row:
    """Compare a memcg's counter with the sum of the same counter of its nodes."""
    memcg = key.memcg or 0
    parts = [snapshot.counters.own(memcg, key.item, nid) for nid in snapshot.image.nodes]
    return make_row(
        key,
        {"nodes": sum(sum(part) for part in parts if part is not None)},
        None if None in parts else snapshot.own(memcg, key.item),
        unread=snapshot.unread(memcg),
        hierarchy=snapshot.folded(memcg, key.item),
    )


def level_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the slab counters of each memcg with the sums of its nodes'."""
    return [
        level_row(snapshot, RowKey("levels", item, "bytes", memcg.address))
        for memcg in snapshot.live()
        for item in ITEMS.values()
    ]


CHECK = Check(
    name="levels",
    counter="the memcg's own slab counters",
    unit="bytes",
    found="the same counters of its nodes",
    sources=("nodes",),
    places=("folded", "pending_cpu"),
    rows=level_rows,
    items=tuple(ITEMS.values()),
    counters_only=True,
    half_done=HalfDone(pattern(SLAB, FLUSH), largest_object),
)
