# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``task_objcg``
-----------------------

For each memcg: the obj_cgroups that its tasks have cached in ``task->objcg`` belong to the memcg,
or the pointer has ``CURRENT_OBJCG_UPDATE_FLAG`` set.

Two legal states look different. ``cgroup_migrate_execute()`` moves a task to another memcg some
time before ``mem_cgroup_attach()`` sets the flag; meanwhile the task is on a list of its
``css_set``. And ``current_objcg_update()`` clears the pointer before it sets a new one. It does not
sleep, so a task that sleeps has a pointer. With ``cgroup.memory=nokmem`` there is none to cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from memcg_inspect.checks.check import Check, Proof
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Objcg, counted
from memcg_inspect.model_tasks import TaskCharge
from memcg_inspect.report import Evidence, Row

__all__ = ("CHECK", "may_be_cached", "task_rows")


def task_rows(snapshot: Snapshot) -> list[Row]:
    """Count the tasks of each memcg whose cached obj_cgroups are those of the memcg."""
    total: Counter[int] = Counter()
    wrong: Counter[int] = Counter()
    unknown: set[int] = set()
    for task in snapshot.tasks:
        payer = snapshot.payer(task.memcg)
        if payer is None:
            continue
        total[payer] += 1
        wrong[payer] += _is_wrong(snapshot, task)
        if any(objcg and objcg not in snapshot.objcgs for objcg in task.objcgs):
            unknown.add(payer)
    no_tasks = None if snapshot.complete("tasks") else "tasks are not all in the image"
    rows = []
    for memcg, number in total.items():
        row = make_row(
            RowKey("task_objcg", "task->objcg", "references", memcg),
            {"tasks": number - wrong[memcg]},
            {"tasks": number},
        )
        no_objcgs = "obj_cgroups are not all in the image" if memcg in unknown else None
        reason = no_tasks or no_objcgs
        if reason is not None and row.status == "exact":
            row = replace(row, status="unverifiable", reason=reason)
        rows.append(row)
    return rows


def _is_wrong(snapshot: Snapshot, task: TaskCharge) -> bool:
    """Return whether a task would charge a memcg that it is not in."""
    payer = snapshot.payer(task.memcg)
    root = next(iter(snapshot.memcgs))
    for objcg in task.objcgs:
        if objcg and objcg not in snapshot.objcgs and not task.stale:
            # It may be an obj_cgroup that could not be read.
            return snapshot.complete("memcgs", "objcgs")
        cached = snapshot.payer(objcg) if objcg else None
        if not may_be_cached(task, payer, cached, root, snapshot.objcgs.values()):
            return True
    return False


def may_be_cached(
    task: TaskCharge,
    payer: int | None,
    cached: int | None,
    root: int,
    objcgs: Iterable[Objcg],
) -> bool:
    """
    Return whether a task may have cached an obj_cgroup.

    :param payer: ``struct mem_cgroup *`` that pays for the memcg that the task is in
    :param cached: ``struct mem_cgroup *`` that pays for the cached obj_cgroup; ``None`` if none is
        cached
    :param root: ``struct mem_cgroup *`` of the root
    :param objcgs: all obj_cgroups
    """
    if task.stale or task.is_migrating:
        return True  # current_objcg_update() replaces it before it is used
    if cached is None:
        if not task.is_user or payer == root or task.is_runnable:
            return True
        # With cgroup.memory=nokmem memcg_online_kmem() makes no obj_cgroups, so that
        # current_objcg_update() has none to cache.
        return all(objcg.memcg == root for objcg in objcgs)
    return cached == payer


def _prove(snapshot: Snapshot, row: Row) -> Proof:
    wrong = [
        task
        for task in snapshot.tasks
        if snapshot.payer(task.memcg) == row.memcg and _is_wrong(snapshot, task)
    ]
    return Proof(
        "stale-task-objcg",
        f"{counted(len(wrong), 'tasks')} of this memcg cached an obj_cgroup of another memcg",
        tuple(
            Evidence(
                address=task.address,
                kind="task",
                objcg=next((objcg for objcg in task.objcgs if objcg), None),
                memcg=row.memcg,
                note=f"{task.comm} ({task.pid})",
            )
            for task in wrong
        ),
    )


def _not_kept(snapshot: Snapshot) -> str | None:
    return None if snapshot.features.caches_objcg else "tasks of this kernel cache no obj_cgroup"


CHECK = Check(
    name="task_objcg",
    counter="none: all tasks",
    unit="references",
    found=(
        "tasks whose cached `obj_cgroup` belongs to the memcg that they are in, or is marked stale"
    ),
    sources=("tasks",),
    places=("tasks",),
    rows=task_rows,
    not_kept=_not_kept,
    prove=_prove,
)
