# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``vmalloc``
--------------------

For each memcg and node: ``NR_VMALLOC`` is the number of pages of its vmalloc areas on the node, not
counting kernel stacks. Before Linux 7.1 the counter is ``MEMCG_VMALLOC``, which is not kept by
node. See ``__vmalloc_area_node()``.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Charges, Check
from memcg_inspect.checks.half_done import FLUSH, VMALLOC, HalfDone, block_pages, pattern
from memcg_inspect.checks.kernel_pages import gone_pages, missing_areas, rows_by_node
from memcg_inspect.checks.ledger import GONE
from memcg_inspect.checks.partial_areas import explain_areas, most_of_areas
from memcg_inspect.checks.rows import RowKey, counter_row, doubted
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "vmalloc_rows")

BY_NODE, BY_MEMCG = "NR_VMALLOC", "MEMCG_VMALLOC"


def vmalloc_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the pages of vmalloc areas with their counter, by memcg and, since 7.1, by node."""
    page_size = snapshot.image.page_size
    if BY_NODE in snapshot.features.items:
        key = RowKey("vmalloc", BY_NODE, "pages")
        return rows_by_node(snapshot, key, "vmalloc", page_size, areas=True)
    found, gone = (snapshot.by_memcg("kmem", detail) for detail in ("vmalloc", GONE))
    missing = missing_areas(snapshot, "vmalloc", None)
    rows = []
    for memcg in snapshot.live():
        row = counter_row(
            snapshot,
            RowKey("vmalloc", BY_MEMCG, "pages", memcg.address),
            {"vmalloc": found[memcg.address].bytes // page_size},
            missing,
        )
        rows.append(doubted(row, gone_pages(row, gone[memcg.address].bytes // page_size)))
    return rows


CHECK = Check(
    name="vmalloc",
    counter="`NR_VMALLOC`, by node, or `MEMCG_VMALLOC`",
    unit="pages",
    found="pages of vmalloc areas, except stacks",
    sources=("vmalloc",),
    places=("folded", "pending_cpu"),
    rows=vmalloc_rows,
    items=(BY_NODE, BY_MEMCG),
    explain=explain_areas,
    half_done=HalfDone(pattern(VMALLOC, FLUSH), block_pages, areas=most_of_areas),
    charges=Charges(("kmem",)),
)
