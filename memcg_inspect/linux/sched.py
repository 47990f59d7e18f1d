# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Tasks and the obj_cgroups they have cached
------------------------------------------

Mirrors ``task_struct`` of :linux:`include/linux/sched.h`.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object, Program, container_of
from drgn.helpers.linux.pid import pid_task

from memcg_inspect.linux.layout import constant, has_member, per_program
from memcg_inspect.linux.list import OnFault, idr_entries, list_entries
from memcg_inspect.linux.mmzone import possible_nodes
from memcg_inspect.model import Coverage, TaskCharge

__all__ = ("caches_objcg", "find_tasks", "read_tasks")

#: ``CURRENT_OBJCG_UPDATE_FLAG``: what is cached is stale, but may hold a reference.
OBJCG_UPDATE_FLAG = 1
#: ``TASK_NEW``: forked, not yet run.
TASK_NEW = 0x800
#: ``PF_KTHREAD``.
PF_KTHREAD = 0x00200000


@per_program
def caches_objcg(prog: Program) -> bool:
    """
    Whether tasks cache an obj_cgroup (6.8), or one for each node (the per-node series).
    """
    return has_member(prog, "struct task_struct", "objcg") or has_member(
        prog, "struct task_struct", "objcgs"
    )


def find_tasks(prog: Program, on_fault: OnFault) -> list[Object]:
    """
    Find all tasks, by their ids; where that is broken, by the list of processes, too.

    :param on_fault: called for each part of either that cannot be read, if both are broken
    :return: ``struct task_struct *`` objects
    """
    faults: list[FaultError] = []
    tasks: dict[int, Object] = {}
    kind = int(prog["PIDTYPE_PID"].value_())
    for pid in idr_entries("struct pid", prog["init_pid_ns"].idr, faults.append):
        try:
            task = pid_task(pid, kind)
        except FaultError as error:
            faults.append(error)
            continue
        if task:
            tasks[task.value_()] = task
    if faults:
        more: list[FaultError] = []
        for task in _processes(prog, more.append):
            tasks.setdefault(task.value_(), task)
        for fault in faults if more else []:
            on_fault(fault)
    return list(tasks.values())


def _processes(prog: Program, on_fault: OnFault) -> Iterator[Object]:
    head = prog["init_task"].tasks.address_of_()
    for leader in list_entries("struct task_struct", head, "tasks", on_fault):
        yield leader
        try:
            threads = leader.signal.thread_head.address_of_()
        except FaultError as error:
            on_fault(error)
            continue
        yield from list_entries("struct task_struct", threads, "thread_node", on_fault)


def read_tasks(prog: Program, coverage: Coverage) -> Iterator[TaskCharge]:
    """Walk all tasks."""
    subsys = constant(prog, "memory_cgrp_id") or 0

    def missed(error: FaultError) -> None:
        coverage.miss("task", error.address, str(error))

    for task in find_tasks(prog, missed):
        try:
            yield _task(task, subsys)
            coverage.read += 1
        except FaultError as error:
            coverage.miss("task", error.address, str(error))


def _task(task: Object, subsys: int) -> TaskCharge:
    css = task.cgroups.subsys[subsys].read_()
    objcgs, stale = _objcgs(task)
    if int(task.member_("__state")) & TASK_NEW:
        # Until cgroup_post_fork() it has its parent's pointer, without a reference.
        objcgs, stale = (), True
    return TaskCharge(
        address=task.value_(),
        pid=int(task.pid),
        comm=task.comm.string_().decode(errors="backslashreplace"),
        memcg=container_of(css, "struct mem_cgroup", "css").value_(),
        objcgs=objcgs,
        stale=stale,
        is_user=bool(task.mm) and not int(task.flags) & PF_KTHREAD,
        tgid=int(task.tgid),
    )


def _objcgs(task: Object) -> tuple[tuple[int, ...], bool]:
    members = task.type_.type
    if members.has_member("objcgs"):
        value = task.objcgs.value_()
        array = value & ~OBJCG_UPDATE_FLAG
        stale = bool(value & OBJCG_UPDATE_FLAG)
        if not array:
            return (), stale
        prog = task.prog_
        objcgs = Object(prog, "struct obj_cgroup **", array)
        return tuple(int(objcgs[nid].value_()) for nid in possible_nodes(prog)), stale
    if members.has_member("objcg"):
        value = task.objcg.value_()
        return (value & ~OBJCG_UPDATE_FLAG,), bool(value & OBJCG_UPDATE_FLAG)
    return (), False
