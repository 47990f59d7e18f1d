# SPDX-License-Identifier: LGPL-2.1-or-later
"""What tasks charge, and the kernel stacks that wait for a task."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("ActiveMemcg", "CachedStackPage", "TaskCharge")


class TaskCharge(NamedTuple):
    """
    The memcg of a task, and the obj_cgroup that it has cached.

    :ivar address: ``struct task_struct *``
    :ivar pid: thread ID
    :ivar comm: name of the task
    :ivar memcg: ``struct mem_cgroup *``
    :ivar objcgs: ``task->objcg``: one ``struct obj_cgroup *``, or one for each node
    :ivar stale: whether CURRENT_OBJCG_UPDATE_FLAG is set
    :ivar is_user: whether it has an mm
    :ivar tgid: pid of its thread group leader
    :ivar active_memcg: ``struct mem_cgroup *`` that is charged instead of its own; 0 for none
    :ivar is_migrating: whether it is being moved to its memcg (``cgroup_migrate_execute()``)
    :ivar is_runnable: whether it runs, or waits for a CPU (``TASK_RUNNING``)
    """

    address: int
    pid: int
    comm: str
    memcg: int
    objcgs: tuple[int, ...]
    stale: bool
    is_user: bool
    tgid: int = 0
    active_memcg: int = 0
    is_migrating: bool = False
    is_runnable: bool = False


class CachedStackPage(NamedTuple):
    """
    One page of a kernel stack that a CPU keeps for a new task.

    :ivar cpu: the CPU
    :ivar page: ``struct page *``
    :ivar nid: node of the page
    :ivar objcg: ``struct obj_cgroup *`` that it is charged to; 0 for none
    """

    cpu: int
    page: int
    nid: int
    objcg: int


class ActiveMemcg(NamedTuple):
    """
    A memcg that is charged instead of a task's own (``set_active_memcg()``).

    :ivar memcg: ``struct mem_cgroup *``
    :ivar name: name and PID of the task, or ``CPU`` and its number for ``int_active_memcg``
    :ivar task: ``struct task_struct *``; ``None`` for a CPU
    :ivar owner: ``struct mem_cgroup *`` of the task; ``None`` for a CPU
    :ivar function: the function on the stack that set it; ``None`` if there is none
    :ivar why_unknown: why it is not known whether there is one; ``None`` if it is known
    """

    memcg: int
    name: str
    task: int | None
    owner: int | None
    function: str | None
    why_unknown: str | None
