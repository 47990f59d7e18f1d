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
from memcg_inspect.model import Running
from memcg_inspect.report import Row

__all__ = ("CHECK", "stack_rows", "stacks_are_objects")

ITEM = "NR_KERNEL_STACK_KB"


def stack_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the pages of kernel stacks with their counter, by memcg and node."""
    return rows_by_node(snapshot, RowKey("kernel_stack", ITEM, "KiB"), "stack", 1024, areas=True)


def _pages_of_stack(snapshot: Snapshot, cpu: Running) -> range:
    """Return the KiB of the pages of a stack: account_kernel_stack() counts page by page."""
    page, stack = snapshot.image.page_size // 1024, snapshot.limits.stack // 1024
    return range(page, stack + 1, page)


def stacks_are_objects(snapshot: Snapshot) -> str | None:
    """
    Return why stacks are not found if they are smaller than a page.

    Without ``CONFIG_VMAP_STACK``, they are then objects of the slab cache ``thread_stack``
    (:linux:`kernel/fork.c`), and the identity ``slab`` covers their memory.
    """
    if 0 < snapshot.limits.stack < snapshot.image.page_size:
        return "kernel stacks are slab objects, since they are smaller than a page"
    return None


CHECK = Check(
    name="kernel_stack",
    counter="`NR_KERNEL_STACK_KB`, by node",
    unit="KiB",
    found="pages of kernel stacks",
    sources=("stack",),
    places=("folded", "pending_cpu"),
    rows=stack_rows,
    items=(ITEM,),
    not_kept=stacks_are_objects,
    half_done=HalfDone(
        pattern(STACK, FLUSH),
        lambda snapshot: snapshot.limits.stack // 1024,
        amounts=_pages_of_stack,
    ),
    charges=Charges(("kmem",)),
)
