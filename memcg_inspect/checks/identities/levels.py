# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``levels``
-------------------

For each memcg: its counter of slab memory is the sum of the same counter of its nodes.
``__mod_memcg_lruvec_state()`` changes both.
"""

from __future__ import annotations

from collections.abc import Iterable

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import (
    FLUSH,
    LEVEL,
    HalfDone,
    block_pages,
    largest_object,
    pattern,
    slab_amounts,
)
from memcg_inspect.checks.identities.slab import ITEMS
from memcg_inspect.checks.rows import RowKey, doubted, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "level_row", "level_rows", "unsteady", "why_not_flushed")


def level_row(snapshot: Snapshot, key: RowKey) -> Row:
    """Compare a memcg's counter with the sum of the same counter of its nodes."""
    memcg, nids = key.memcg or 0, snapshot.counters.nids
    parts = [snapshot.counters.own(memcg, key.item, nid) for nid in nids]
    row = make_row(
        key,
        {"nodes": sum(sum(part) for part in parts if part is not None)},
        None if None in parts else snapshot.own(memcg, key.item),
        unread=snapshot.unread(memcg),
        hierarchy=snapshot.folded(memcg, key.item),
    )
    return doubted(row, missing_if(why_not_flushed(snapshot, key.item, nids), either_way=True))


def why_not_flushed(snapshot: Snapshot, item: str, nids: Iterable[int]) -> str | None:
    """
    Return why counters of nodes may have lost changes.

    ``mem_cgroup_css_rstat_flush()`` visits the nodes in ``N_MEMORY``. Changes on a node that has
    lost its memory are lost when the memcg is freed, for good: also if the node gets memory again.
    """
    counters, nodes = snapshot.counters, snapshot.all_nodes
    for nid in nids:
        has_memory = nodes.with_memory is None or nid in nodes.with_memory
        if has_memory and nid not in nodes.unsteady:
            continue
        stats = (counters.stat(memcg, item, nid) for memcg in snapshot.memcgs)
        if any(stat is None or any(stat) for stat in stats):
            if not has_memory:
                return f"node {nid} has counters but no memory: the kernel does not flush them"
            return unsteady(nid)
    return None


def unsteady(nid: int) -> str:
    """Return why the counters of a node may have lost changes although it has memory."""
    return f"node {nid} may have had no memory for a time: the kernel did not flush its counters"


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
    half_done=HalfDone(
        # Those of obj_cgroups call __mod_memcg_lruvec_state(), or it is inlined in them.
        pattern(LEVEL, r"mod_objcg_|(account|drain|refill)_obj_stock", FLUSH),
        largest_object,
        folios=block_pages,
        kinds=("object", "cache", "kmem"),
        amounts=slab_amounts,
        unpaid=True,
    ),
)
