# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Tasks, and the obj_cgroups they have cached
-------------------------------------------

Mirrors ``task_struct`` of :linux:`include/linux/sched.h`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from drgn import FaultError, Object, container_of, offsetof, sizeof
from drgn.helpers.linux.pid import pid_task

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import array_length, constant, has_member, member_type
from memcg_inspect.image.strings import text
from memcg_inspect.linux.lib.list import OnFault, idr_entries, list_entries
from memcg_inspect.linux.mm.mmzone import possible_nodes
from memcg_inspect.model import Coverage, TaskCharge

__all__ = (
    "Thread",
    "caches_objcg",
    "find_tasks",
    "has_mm",
    "read_task",
    "read_tasks",
    "read_threads",
    "task_of_stack",
)

#: ``CURRENT_OBJCG_UPDATE_FLAG``: what is cached is stale, but may hold a reference.
OBJCG_UPDATE_FLAG = 1
#: ``TASK_NEW``: forked, not yet run.
TASK_NEW = 0x800
#: ``PF_KTHREAD``.
PF_KTHREAD = 0x00200000


@per_image
def caches_objcg(image: Image) -> bool:
    """
    Whether tasks cache an obj_cgroup (6.8), or one for each node (the per-node series).
    """
    return has_member(image, "struct task_struct", "objcg") or has_member(
        image, "struct task_struct", "objcgs"
    )


def find_tasks(image: Image, on_fault: OnFault) -> list[Object]:
    """
    Find all tasks, by their ids; where that is broken, by the list of processes, too.

    :param on_fault: called for each part of either that cannot be read, if both are broken
    :return: ``struct task_struct *`` objects
    """
    faults: list[FaultError] = []
    tasks: dict[int, Object] = {}
    kind = int(image.object("PIDTYPE_PID").value_())
    for pid in idr_entries(image, "struct pid", image.object("init_pid_ns").idr, faults.append):
        try:
            task = pid_task(pid, kind)
        except FaultError as error:
            faults.append(error)
            continue
        if task:
            tasks[task.value_()] = task
    if faults:
        more: list[FaultError] = []
        for task in _processes(image, more.append):
            tasks.setdefault(task.value_(), task)
        for fault in faults if more else []:
            on_fault(fault)
    return list(tasks.values())


def _processes(image: Image, on_fault: OnFault) -> Iterator[Object]:
    head = image.object("init_task").tasks.address_of_()
    for leader in list_entries(image, "struct task_struct", head, "tasks", on_fault):
        yield leader
        try:
            threads = leader.signal.thread_head.address_of_()
        except FaultError as error:
            on_fault(error)
            continue
        yield from list_entries(image, "struct task_struct", threads, "thread_node", on_fault)


def read_tasks(image: Image, coverage: Coverage) -> Iterator[TaskCharge]:
    """Walk all tasks."""
    subsys = constant(image, "memory_cgrp_id") or 0

    def missed(error: FaultError) -> None:
        coverage.miss("task", error.address, str(error))

    for task in find_tasks(image, missed):
        try:
            yield _task(image, task, subsys)
            coverage.read += 1
        except FaultError as error:
            coverage.miss("task", error.address, str(error))


def read_task(image: Image, address: int) -> TaskCharge:
    """
    Read one task.

    :param address: ``struct task_struct *``
    :raises drgn.FaultError: if it cannot be read
    """
    task = Object(image.prog, "struct task_struct *", address)
    return _task(image, task, constant(image, "memory_cgrp_id") or 0)


def task_of_stack(image: Image, address: int, coverage: Coverage) -> int | None:
    """
    Return the task that has a stack. Walks all tasks.

    :param address: of the lowest byte of the stack
    :return: ``struct task_struct *``; ``None`` if none has it
    """

    def missed(error: FaultError) -> None:
        coverage.miss("task", error.address, str(error))

    for task in find_tasks(image, missed):
        try:
            if task.stack.value_() == address:
                return int(task.value_())
            coverage.read += 1
        except FaultError as error:
            missed(error)
    return None


def _task(image: Image, task: Object, subsys: int) -> TaskCharge:
    css = task.cgroups.subsys[subsys].read_()
    objcgs, stale = _objcgs(image, task)
    if int(task.member_("__state")) & TASK_NEW:
        # Until cgroup_post_fork() it has its parent's pointer, without a reference.
        objcgs, stale = (), True
    return TaskCharge(
        address=task.value_(),
        pid=int(task.pid),
        # string_() takes ten times as long.
        comm=text(task.comm.to_bytes_()),
        memcg=container_of(css, "struct mem_cgroup", "css").value_(),
        objcgs=objcgs,
        stale=stale,
        is_user=bool(task.mm) and not int(task.flags) & PF_KTHREAD,
        tgid=int(task.tgid),
    )


def _objcgs(image: Image, task: Object) -> tuple[tuple[int, ...], bool]:
    members = task.type_.type
    if members.has_member("objcgs"):
        value = task.objcgs.value_()
        array = value & ~OBJCG_UPDATE_FLAG
        stale = bool(value & OBJCG_UPDATE_FLAG)
        if not array:
            return (), stale
        objcgs = Object(image.prog, "struct obj_cgroup **", array)
        nids = possible_nodes(image)
        return tuple(int(objcgs[nid].value_()) for nid in nids), stale
    if members.has_member("objcg"):
        value = task.objcg.value_()
        return (value & ~OBJCG_UPDATE_FLAG,), bool(value & OBJCG_UPDATE_FLAG)
    return (), False


class Thread(NamedTuple):
    """
    A task, as far as all of them are read at once.

    :ivar address: ``struct task_struct *``
    :ivar tgid: of its process
    :ivar mm: ``struct mm_struct *`` of what it has mapped, 0 for none
    :ivar of_kernel: whether it is a thread of the kernel: those have an ``mm`` only for a while
    :ivar memcg: ``struct mem_cgroup *``; ``None`` if it could not be read
    :ivar rss: what it has counted for its ``mm`` and not handed in (6.1 and older)
    """

    address: int
    pid: int
    tgid: int
    comm: str
    mm: int
    of_kernel: bool
    memcg: int | None
    rss: tuple[int, ...]


def read_threads(image: Image, coverage: Coverage) -> list[Thread]:
    """Read all tasks, with one read for each."""
    layout, threads, memcgs = _ThreadLayout(image), [], _CssSets(image, coverage)

    def missed(error: FaultError) -> None:
        coverage.miss("task", error.address, str(error))

    for task in find_tasks(image, missed):
        try:
            threads.append(layout.read(task.value_(), memcgs))
            coverage.read += 1
        except FaultError as error:
            missed(error)
    return threads


def has_mm(image: Image, task: int, mm: int) -> bool:
    """
    Return whether a task still has its ``mm``; on a live kernel it may have ended.

    :param task: ``struct task_struct *``
    :param mm: ``struct mm_struct *``
    """
    try:
        return image.memory.word(task + offsetof(image.type("struct task_struct"), "mm")) == mm
    except FaultError:
        return False


class _ThreadLayout:
    """Where the members are that make a :class:`Thread`."""

    def __init__(self, image: Image) -> None:
        type_ = image.type("struct task_struct")
        names = ["pid", "tgid", "flags", "comm", "mm", "cgroups"]
        # SPLIT_RSS_COUNTING, until commit f1a7941243c1 ("mm: convert mm's rss stats into
        # percpu_counter") (in v6.2).
        self._has_rss = type_.has_member("rss_stat")
        if self._has_rss:
            names.append("rss_stat")
            cached = member_type(type_, "rss_stat")
            self._rss = offsetof(cached, "count")
            self._counters = array_length(member_type(cached, "count"))
        at = {name: offsetof(type_, name) for name in names}
        self._start = min(at.values())
        ends = (at[name] + sizeof(member_type(type_, name)) for name in names)
        self._size = max(ends) - self._start
        self._at = {name: offset - self._start for name, offset in at.items()}
        self._comm = sizeof(member_type(type_, "comm"))
        self._memory = image.memory

    def read(self, task: int, memcgs: _CssSets) -> Thread:
        memory, at = self._memory, self._at
        data = memory.read(task + self._start, self._size)

        def integer(offset: int) -> int:
            return int.from_bytes(data[offset : offset + 4], memory.order, signed=True)

        rss: tuple[int, ...] = ()
        if self._has_rss:
            first = at["rss_stat"] + self._rss
            rss = tuple(integer(first + 4 * i) for i in range(self._counters))
        name = data[at["comm"] : at["comm"] + self._comm].split(b"\0")[0]
        return Thread(
            address=task,
            pid=integer(at["pid"]),
            tgid=integer(at["tgid"]),
            comm=name.decode(errors="backslashreplace"),
            mm=memory.word_at(data, at["mm"]),
            of_kernel=bool(integer(at["flags"]) & PF_KTHREAD),
            memcg=memcgs.memcg(memory.word_at(data, at["cgroups"])),
            rss=rss,
        )


class _CssSets:
    """The memcgs of ``struct css_set``, of which there are fewer than tasks."""

    def __init__(self, image: Image, coverage: Coverage) -> None:
        self._image = image
        self._coverage = coverage
        self._subsys = constant(image, "memory_cgrp_id") or 0
        self._found: dict[int, int | None] = {}

    def memcg(self, css_set: int) -> int | None:
        if css_set not in self._found:
            try:
                subsys = Object(self._image.prog, "struct css_set *", css_set).subsys
                css = subsys[self._subsys].read_()
                memcg = container_of(css, "struct mem_cgroup", "css").value_()
            except FaultError as error:
                self._coverage.miss("memcg of a task", error.address, str(error))
                memcg = None
            self._found[css_set] = memcg
        return self._found[css_set]
