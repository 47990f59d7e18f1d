# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``pagetable``
----------------------

For each memcg and node: ``NR_PAGETABLE`` is the pages of its page tables on the node. The
levels that are counted are those whose pages have the type of page tables (``PG_table``,
``PGTY_table``). See ``pagetable_pte_ctor()``.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Charges, Check
from memcg_inspect.checks.half_done import COUNTING, FLUSH, PAGES, PAGETABLE, HalfDone, pattern
from memcg_inspect.checks.kernel_pages import rows_by_node
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "pagetable_rows")

ITEM = "NR_PAGETABLE"


def pagetable_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the pages of page tables with their counter, by memcg and node."""
    page_size = snapshot.image.page_size
    return rows_by_node(snapshot, RowKey("pagetable", ITEM, "pages"), "table", page_size)


CHECK = Check(
    name="pagetable",
    counter="`NR_PAGETABLE`, by node",
    unit="pages",
    found="pages of page tables",
    sources=("table",),
    places=("folded", "pending_cpu"),
    rows=pagetable_rows,
    items=(ITEM,),
    half_done=HalfDone(
        pattern(PAGES, r"exit_mm|mmput|tlb_", FLUSH),
        lambda snapshot: 2,
        only_in=pattern(PAGETABLE),
        only_at=pattern(COUNTING),
    ),
    charges=Charges(("kmem",)),
)
