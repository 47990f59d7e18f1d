# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``node_stack``
-----------------------

For each node, charged or not: ``NR_KERNEL_STACK_KB`` of the node is the pages on it of the kernel
stacks of all tasks, kernel threads and idle tasks included. That of the boot CPU's idle task is
part of the kernel, and not counted. See ``account_kernel_stack()``.

A stack is counted from ``dup_task_struct()`` until ``exit_task_stack_account()``. Stacks that are
kept for new tasks (``cached_stacks``) are not counted. A stack that is charged is counted. One that
is not charged, and that belongs to no task that runs, may be counted or not: its task is being
forked or exits, or RCU is about to free it.
"""

from __future__ import annotations

from dataclasses import replace

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import STACK, HalfDone, pattern
from memcg_inspect.checks.identities.kernel_stack import stacks_are_objects
from memcg_inspect.checks.node_pages import node_page_rows, why_not_known
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "node_stack_rows")

ITEM = "NR_KERNEL_STACK_KB"


def node_stack_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the pages of kernel stacks with the counters of nodes."""
    rows = node_page_rows(snapshot, "node_stack", ITEM, "stack")
    return [_or_of_no_task(snapshot, row) for row in rows]


def _or_of_no_task(snapshot: Snapshot, row: Row) -> Row:
    pages = snapshot.node_pages.get(("unknown stack", row.nid or 0), 0)
    most = pages * snapshot.image.page_size // 1024
    if row.status != "differs" or not 0 < row.off <= most:
        return row
    reason = f"{most} KiB of stacks belong to no task that runs, and may be counted or not"
    return replace(row, status="unverifiable", reason=reason)


def _not_kept(snapshot: Snapshot) -> str | None:
    return stacks_are_objects(snapshot) or why_not_known(snapshot)


def _items(snapshot: Snapshot) -> tuple[str, ...]:
    return (ITEM,)


CHECK = Check(
    name="node_stack",
    counter="`NR_KERNEL_STACK_KB` of the node",
    unit="KiB",
    found="pages of the kernel stacks of all tasks, charged or not",
    sources=("stack",),
    places=("vm_stat", "cpu"),
    rows=node_stack_rows,
    node_items=_items,
    not_kept=_not_kept,
    half_done=HalfDone(
        pattern(STACK), lambda snapshot: snapshot.limits.stack // 1024, of_nodes=True
    ),
)
