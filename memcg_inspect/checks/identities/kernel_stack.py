# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``kernel_stack``
-------------------------

For each memcg and node: ``NR_KERNEL_STACK_KB`` is the pages of its kernel stacks on the node.
See ``account_kernel_stack()``.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Charges, Check
from memcg_inspect.checks.half_done import FLUSH, STACK, HalfDone, pattern
from memcg_inspect.checks.kernel_pages import rows_by_node
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "stack_rows")

ITEM = "NR_KERNEL_STACK_KB"


def stack_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the pages of kernel stacks with their counter, by memcg and node."""
    return rows_by_node(snapshot, RowKey("kernel_stack", ITEM, "KiB"), "stack", 1024, areas=True)


CHECK = Check(
    name="kernel_stack",
    counter="`NR_KERNEL_STACK_KB`, by node",
    unit="KiB",
    found="pages of kernel stacks",
    sources=("stack",),
    places=("folded", "pending_cpu"),
    rows=stack_rows,
    items=(ITEM,),
    # Twice THREAD_SIZE with KASAN, which is 32 KiB.
    half_done=HalfDone(pattern(STACK, FLUSH), lambda snapshot: 64),
    charges=Charges("kmem"),
)
