# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``active_memcg``
-------------------------

A memcg that is charged instead of a task's own (``task->active_memcg``, ``int_active_memcg`` of a
CPU) was set by a function that is on the stack, and it was not freed. It may be a removed one:
fsnotify groups, loop devices, BPF maps and folios hold references to removed memcgs.

A pointer to a memcg that was freed is always a fault. Other pointers are unverifiable if the stack
cannot be read, or if a function that sets the pointer may be on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from memcg_inspect.checks.check import Check, Proof
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import counted
from memcg_inspect.model_tasks import ActiveMemcg
from memcg_inspect.report import Evidence, Row

__all__ = ("CHECK", "active_memcg_rows")

BY_TASK, BY_CPU = "task->active_memcg", "int_active_memcg"


def active_memcg_rows(snapshot: Snapshot) -> list[Row]:
    """Count the tasks of each memcg, and the CPUs, that may charge another memcg now."""
    totals: Counter[int] = Counter()
    for task in snapshot.tasks:
        payer = snapshot.payer(task.memcg)
        if payer is not None:
            totals[payer] += 1
    rows = [
        _row(snapshot, RowKey("active_memcg", BY_TASK, "references", memcg), "tasks", total)
        for memcg, total in totals.items()
    ]
    cpus = snapshot.image.cpus
    return [*rows, _row(snapshot, RowKey("active_memcg", BY_CPU, "references"), "cpus", cpus)]


def _row(snapshot: Snapshot, key: RowKey, what: str, total: int) -> Row:
    active = _of(snapshot, key.memcg)
    wrong = _wrong(snapshot, active)
    row = make_row(key, {what: total - len(wrong)}, {what: total})
    reason = None if snapshot.complete("tasks") else "tasks are not all in the image"
    for one in active:
        if one.why_unknown is not None:
            reason = f"active_memcg of {one.name} is set: {one.why_unknown}"
        elif one not in wrong and one.memcg not in snapshot.memcgs:
            reason = f"active_memcg of {one.name} is a memcg that is not in the image"
    if row.status == "exact" and reason is not None:
        row = replace(row, status="unverifiable", reason=reason)
    return row


def _of(snapshot: Snapshot, memcg: int | None) -> list[ActiveMemcg]:
    """Return those of the tasks of a memcg; of CPUs for ``None``."""
    return [
        active
        for active in snapshot.active_memcgs
        if (active.owner is None) == (memcg is None)
        and (active.owner is None or snapshot.payer(active.owner) == memcg)
    ]


def _wrong(snapshot: Snapshot, active: Iterable[ActiveMemcg]) -> Sequence[ActiveMemcg]:
    return [
        one
        for one in active
        if _is_freed(snapshot, one) or (one.function is None and one.why_unknown is None)
    ]


def _is_freed(snapshot: Snapshot, active: ActiveMemcg) -> bool:
    return active.memcg not in snapshot.memcgs and snapshot.complete("memcgs")


def _prove(snapshot: Snapshot, row: Row) -> Proof:
    wrong = _wrong(snapshot, _of(snapshot, row.memcg))
    freed = [one for one in wrong if _is_freed(snapshot, one)]
    who = counted(len(wrong), "CPUs" if row.memcg is None else "tasks")
    what = f"{who} would charge another memcg, and no function on the stack set it"
    if freed:
        what = f"{who} would charge another memcg; {len(freed)} of these memcgs were freed"
    return Proof(
        "freed-active-memcg" if freed else "stale-active-memcg",
        what,
        tuple(
            Evidence(
                address=one.memcg if one.task is None else one.task,
                kind="CPU" if one.task is None else "task",
                memcg=one.memcg if one.memcg in snapshot.memcgs else None,
                note=f"{one.name}, active_memcg {one.memcg:#x}",
            )
            for one in wrong
        ),
    )


CHECK = Check(
    name="active_memcg",
    counter="none: all tasks and CPUs",
    unit="references",
    found=(
        "tasks that charge their own memcg, or one that a function on their stack set and that was "
        "not freed; and CPUs, since an interrupt can charge another memcg, too"
    ),
    sources=("tasks", "cpus"),
    places=("tasks", "cpus"),
    rows=active_memcg_rows,
    prove=_prove,
)
