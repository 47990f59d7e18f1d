# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``node_vmalloc``
-------------------------

For each node, charged or not: ``NR_VMALLOC`` of the node is the pages on it of all vmalloc areas,
kernel stacks included. Before Linux 7.1 the kernel has one counter for all nodes,
``nr_vmalloc_pages``. See ``vm_area_alloc_pages()``.

The pages of the areas of percpu memory, and of the call sites of modules, are not allocated by
vmalloc() and not counted.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import VMALLOC, HalfDone, block_pages, pattern
from memcg_inspect.checks.node_pages import node_page_rows, why_not_all_pages
from memcg_inspect.checks.partial_areas import explain_areas, most_of_areas
from memcg_inspect.checks.rows import RowKey, doubted, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "node_vmalloc_rows")

BY_NODE, TOTAL = "NR_VMALLOC", "nr_vmalloc_pages"
_RESTORED = (
    "the kernel before this one handed over memory: pages of its vmalloc areas are not counted"
)


def node_vmalloc_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the pages of vmalloc areas with the counters of nodes, or with that of all nodes."""
    if snapshot.all_nodes.vmalloc_pages is None:
        rows = node_page_rows(snapshot, "node_vmalloc", BY_NODE, "vmalloc")
    else:
        pages = sum(n for (use, _), n in snapshot.node_pages.items() if use == "vmalloc")
        why = why_not_all_pages(snapshot, "vmalloc")
        key = RowKey("node_vmalloc", TOTAL, "pages")
        claimed = {"nr_vmalloc_pages": snapshot.all_nodes.vmalloc_pages}
        rows = [make_row(key, {"vmalloc": pages}, claimed, missing_if(why))]
    restored = _RESTORED if snapshot.all_nodes.vmalloc_restored else None
    return [doubted(row, missing_if(restored, either_way=True)) for row in rows]


def _items(snapshot: Snapshot) -> tuple[str, ...]:
    return (BY_NODE,)


def _not_kept(snapshot: Snapshot) -> str | None:
    if snapshot.all_nodes.vmalloc_pages is None and BY_NODE not in snapshot.features.node_items:
        return "the number of vmalloc pages of this kernel is not known"
    return None


CHECK = Check(
    name="node_vmalloc",
    counter="`NR_VMALLOC` of the node, or `nr_vmalloc_pages`",
    unit="pages",
    found="all pages of vmalloc areas, kernel stacks included, charged or not",
    sources=("vmalloc",),
    places=("vm_stat", "cpu", "nr_vmalloc_pages"),
    rows=node_vmalloc_rows,
    node_items=_items,
    not_kept=_not_kept,
    explain=explain_areas,
    half_done=HalfDone(pattern(VMALLOC), block_pages, of_nodes=True, areas=most_of_areas),
)
