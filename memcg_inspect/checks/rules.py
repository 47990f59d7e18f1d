# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identities that are rules
-------------------------

``placement``: a vector of obj_cgroups lies on the node of its slab.

``reparenting``: a memcg that was taken offline has left all its obj_cgroups to its parent.

``task_objcg``: what a task has cached belongs to the memcg it is in, unless it carries the
update flag.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcg_inspect.checks.rows import make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Objcg, Row, TaskCharge

__all__ = (
    "is_task_wrong",
    "left_behind",
    "may_be_cached",
    "placement_rows",
    "reparent_rows",
    "task_rows",
)


def placement_rows(snapshot: Snapshot) -> list[Row]:
    """Count the vectors outside their slabs that are on the slab's node."""
    rows = []
    for nid, vectors in sorted(snapshot.vectors.items()):
        rows.append(
            make_row(
                "placement",
                memcg=None,
                nid=nid,
                item="obj_exts",
                unit="references",
                found={"on_node": vectors.total - len(vectors.elsewhere)},
                claimed={"vectors": vectors.total},
            )
        )
        if rows[-1].status == "exact" and snapshot.ledger.may_miss("slab", None, nid):
            rows[-1] = _unverifiable(rows[-1], "slabs on this node are not all in the image")
    return rows


def _unverifiable(row: Row, reason: str) -> Row:
    return Row(**{**vars(row), "status": "unverifiable", "reason": reason})


def left_behind(snapshot: Snapshot, memcg: int) -> list[Objcg]:
    """Return the obj_cgroups that still belong to a memcg."""
    return [objcg for objcg in snapshot.objcgs.values() if objcg.memcg == memcg]


def reparent_rows(snapshot: Snapshot) -> list[Row]:
    """Count the obj_cgroups that memcgs taken offline still have: none."""
    rows = []
    for memcg in snapshot.memcgs.values():
        if not memcg.offline:
            continue
        nodes = [objcg.nid for objcg in left_behind(snapshot, memcg.address)]
        for nid in dict.fromkeys(nodes) or [None]:
            rows.append(
                make_row(
                    "reparenting",
                    memcg=memcg.address,
                    nid=nid,
                    item="objcg->memcg",
                    unit="references",
                    found={"left_behind": nodes.count(nid) if nodes else 0},
                    claimed={"allowed": 0},
                )
            )
    return rows


def task_rows(snapshot: Snapshot) -> list[Row]:
    """Count the tasks of each memcg whose cached obj_cgroups are those of the memcg."""
    total: dict[int, int] = {}
    right: dict[int, int] = {}
    unknown: set[int] = set()
    for task in snapshot.tasks:
        payer = snapshot.payer(task.memcg)
        if payer is not None:
            total[payer] = total.get(payer, 0) + 1
            right[payer] = right.get(payer, 0) + (not is_task_wrong(snapshot, task))
            if any(objcg and objcg not in snapshot.objcgs for objcg in task.objcgs):
                unknown.add(payer)
    return list(_task_rows(snapshot, total, right, unknown))


def _task_rows(
    snapshot: Snapshot, total: dict[int, int], right: dict[int, int], unknown: set[int]
) -> Iterator[Row]:
    missing = None if snapshot.complete("tasks") else "tasks are not all in the image"
    for memcg, number in total.items():
        row = make_row(
            "task_objcg",
            memcg=memcg,
            nid=None,
            item="task->objcg",
            unit="references",
            found={"tasks": right[memcg]},
            claimed={"tasks": number},
        )
        reason = missing or ("obj_cgroups are not all in the image" if memcg in unknown else None)
        yield _unverifiable(row, reason) if reason and row.status == "exact" else row


def is_task_wrong(snapshot: Snapshot, task: TaskCharge) -> bool:
    """Return whether a task would charge a memcg that it is not in."""
    payer = snapshot.payer(task.memcg)
    root = next(iter(snapshot.memcgs))
    for objcg in task.objcgs:
        if objcg and objcg not in snapshot.objcgs and not task.stale:
            return snapshot.complete("memcgs", "objcgs")  # or else it may be any
        if not may_be_cached(task, payer, snapshot.payer(objcg) if objcg else None, root):
            return True
    return False


def may_be_cached(task: TaskCharge, payer: int | None, cached: int | None, root: int) -> bool:
    """
    Return whether a task may have cached an obj_cgroup.

    :param payer: ``struct mem_cgroup *`` that pays for the memcg that the task is in
    :param cached: that which pays for the cached obj_cgroup; ``None`` if none is cached
    :param root: the root's
    """
    if task.stale:
        return True  # looked up anew before it is used
    if cached is None:
        return not task.is_user or payer == root
    return cached == payer
