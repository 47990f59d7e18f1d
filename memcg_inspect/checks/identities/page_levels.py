# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``page_levels``
------------------------

For each memcg: its counters of kernel stacks, page tables and vmalloc areas are the sums of the
same counters of its nodes. ``__mod_memcg_lruvec_state()`` changes both.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import FLUSH, HUGE, PAGES, STACK, VMALLOC, HalfDone, pattern
from memcg_inspect.checks.identities import kernel_stack, kmem, pagetable, vmalloc
from memcg_inspect.checks.identities.levels import level_row
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Unit
from memcg_inspect.report import Row

__all__ = ("CHECK", "page_level_rows")

#: Counters that the kernel keeps by node, and their units.
UNITS: dict[str, Unit] = {
    kernel_stack.ITEM: "KiB",
    pagetable.ITEM: "pages",
    vmalloc.BY_NODE: "pages",
    kmem.BY_NODE: "pages",
}


def page_level_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the counters of kernel pages of each memcg with the sums of its nodes'."""
    return [
        level_row(snapshot, RowKey("page_levels", item, unit, memcg.address))
        for memcg in snapshot.live()
        for item, unit in UNITS.items()
        if item in snapshot.features.items
    ]


CHECK = Check(
    name="page_levels",
    counter="the memcg's own `NR_KERNEL_STACK_KB`, `NR_PAGETABLE`, `NR_VMALLOC`, `NR_KMEM`",
    unit="KiB, pages",
    found="the same counters of its nodes",
    sources=("nodes",),
    places=("folded", "pending_cpu"),
    rows=page_level_rows,
    items=tuple(UNITS),
    counters_only=True,
    half_done=HalfDone(pattern(PAGES, STACK, VMALLOC, FLUSH), lambda snapshot: 2 * HUGE),
)
