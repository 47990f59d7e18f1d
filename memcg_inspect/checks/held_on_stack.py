# SPDX-License-Identifier: LGPL-2.1-or-later
"""
References that tasks hold for a moment
---------------------------------------

A task in the kernel can hold references to a memcg that only its stack shows, and it can be between
the steps of taking or dropping one. Its stack or registers then point to the memcg, and its stack
to a function that does such things. That explains a row of that memcg. If a stack points to the
memcg without such a function, a reference cannot be told from a pointer that was left there, and
the row is unverifiable. So it is if the registers of a task that was running are not known, as in a
QEMU guest that is stopped: the only pointer may be in one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from memcg_inspect.checks.rows import Missing
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import StackRef, counted
from memcg_inspect.report import Row

__all__ = ("doubt_of", "held_on_stack")

#: Functions that take references to memcgs, or call those that do. Parts of names.
_HOLDS = re.compile(
    r"mem_cgroup|memcg|obj_cgroup|objcg|try_charge|css_|cgroup_|lru_gen|shrink_|reclaim|wb_|zswap"
    r"|^(__)?sk_(free|destruct)$|^sock_diag_broadcast_destroy"
)

#: Returns the most references to one memcg that a task holds.
Most = Callable[[StackRef], int]


def held_on_stack(snapshot: Snapshot, row: Row, most: Most) -> str | None:
    """Return which tasks explain a row that differs; ``None`` if they do not."""
    tasks = [task for task in _tasks(snapshot, row) if _function(task) is not None]
    if not _covers(tasks, row, most):
        return None
    return "; ".join(
        f"at most {counted(most(task), row.unit)} of {_name(task)}, in {_function(task)}"
        for task in tasks
    )


def doubt_of(snapshot: Snapshot, row: Row, most: Most) -> Missing | None:
    """Return why references to the memcg of a row may not have been found."""
    if row.status != "differs" or held_on_stack(snapshot, row, most) is not None:
        return None
    tasks = _tasks(snapshot, row)
    if _covers(tasks, row, most):
        names = ", ".join(map(_name, tasks))
        why = f"{names} may hold references to the memcg: a stack or register may point to it"
        return Missing(why, either_way=True)
    return None if snapshot.css_others is None else Missing(snapshot.css_others)


def _tasks(snapshot: Snapshot, row: Row) -> Sequence[StackRef]:
    return snapshot.css_stacks.get(row.memcg or 0, ())


def _covers(tasks: Sequence[StackRef], row: Row, most: Most) -> bool:
    return bool(tasks) and abs(row.off) <= sum(map(most, tasks))


def _function(task: StackRef) -> str | None:
    return next((function for function in task.functions if _HOLDS.search(function)), None)


def _name(task: StackRef) -> str:
    where = "" if task.cpu is None else f" on CPU {task.cpu}"
    return f"{task.comm} ({task.pid}){where}"
