# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``node_totals``
------------------------

For each counter of nodes: the total of all nodes, ``vm_node_stat[]``, which ``/proc/vmstat`` shows,
is the sum of ``vm_stat`` of the nodes. ``node_page_state_add()`` adds to both. What CPUs have not
added yet is in neither.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import NODE_TOTALS
from memcg_inspect.checks.rows import RowKey, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Unit
from memcg_inspect.report import Row

__all__ = ("CHECK", "node_total_rows", "node_unit")


def node_unit(item: str) -> Unit:
    """Return the unit of a counter of nodes: they count slab memory in pages."""
    return "KiB" if item.endswith("_KB") else "pages"


def node_total_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the total of each counter of nodes with the nodes', where either is not zero."""
    why = None if snapshot.complete("node_stats") else "counters of nodes are not in the image"
    sums = dict.fromkeys(snapshot.all_nodes.totals, 0)
    for (_, item), stat in snapshot.node_stats.items():
        if item in sums:
            sums[item] += stat.folded
    rows = (
        make_row(
            RowKey("node_totals", item, node_unit(item)),
            {"nodes": sums[item]},
            {"vm_node_stat": total},
            missing_if(why, either_way=True),
        )
        for item, total in snapshot.all_nodes.totals.items()
    )
    return [row for row in rows if not row.is_zero]


def _not_kept(snapshot: Snapshot) -> str | None:
    return (
        None if snapshot.all_nodes.totals else "the counters of nodes of this kernel are not known"
    )


CHECK = Check(
    name="node_totals",
    counter="`vm_node_stat[]`: every counter of nodes",
    unit="KiB, pages",
    found="`vm_stat` of the nodes. Counters that are 0 on both sides have no row",
    sources=("nodes",),
    places=("vm_node_stat",),
    rows=node_total_rows,
    not_kept=_not_kept,
    counters_only=True,
    half_done=NODE_TOTALS,
)
