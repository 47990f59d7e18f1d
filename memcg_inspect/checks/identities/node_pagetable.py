# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``node_pagetable``
---------------------------

For each node, charged or not: ``NR_PAGETABLE`` of the node is the pages on it that have the type of
page tables (``PG_table``, ``PGTY_table``). ``__pagetable_ctor()`` sets the type and counts the
pages. Page tables that early boot made have no type and are not counted.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import COUNTING, PAGES, PAGETABLE, HalfDone, pattern
from memcg_inspect.checks.node_pages import node_page_rows, why_not_known
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "node_pagetable_rows")

ITEM = "NR_PAGETABLE"


def node_pagetable_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the pages of page tables with the counters of nodes."""
    return node_page_rows(snapshot, "node_pagetable", ITEM, "table")


def _items(snapshot: Snapshot) -> tuple[str, ...]:
    return (ITEM,)


CHECK = Check(
    name="node_pagetable",
    counter="`NR_PAGETABLE` of the node",
    unit="pages",
    found="all pages of page tables, charged or not",
    sources=("table",),
    places=("vm_stat", "cpu"),
    rows=node_pagetable_rows,
    node_items=_items,
    not_kept=why_not_known,
    of_whole_nodes=True,
    half_done=HalfDone(
        pattern(PAGES, r"exit_mm|mmput|tlb_"),
        lambda snapshot: 2,
        of_nodes=True,
        only_in=pattern(PAGETABLE),
        only_at=pattern(COUNTING),
    ),
)
