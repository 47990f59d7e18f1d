# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Tasks
-----

Mirrors ``struct task_struct`` of :linux:`include/linux/sched.h`: the memcg of a task, the
obj_cgroup that it caches for its allocations (``current_obj_cgroup()`` of
:linux:`mm/memcontrol.c`), and its address space.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from drgn import FaultError, Object, container_of, offsetof, sizeof
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import pid_task

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import array_length, constant, has_member, member_type
from memcg_inspect.image.strings import text
from memcg_inspect.linux.lib.list import OnFault, idr_entries, list_entries
from memcg_inspect.linux.mm.mmzone import possible_cpus, possible_nodes
from memcg_inspect.model import Coverage
from memcg_inspect.model_tasks import TaskCharge

__all__ = (
    "Thread",
    "caches_objcg",
    "find_tasks",
    "find_tasks_and_dead",
    "has_mm",
    "queued_tasks",
    "read_task",
    "read_tasks",
    "read_threads",
    "task_of_stack",
)

_TASK = "struct task_struct"
#: ``CURRENT_OBJCG_UPDATE_FLAG``: the cached obj_cgroup is stale, but a reference is still held.
OBJCG_UPDATE_FLAG = 1
#: ``TASK_NEW``: the task is being forked and has not run yet.
TASK_NEW = 0x800
#: ``PF_KTHREAD``.
PF_KTHREAD = 0x00200000


@per_image
def caches_objcg(image: Image) -> bool:
    """
    Return whether tasks cache an obj_cgroup, ``current_obj_cgroup()``.

    They do since 6.7; with the series that accounts kernel memory per node, one for each node.
    """
    return has_member(image, "struct task_struct", "objcg") or has_member(
        image, "struct task_struct", "objcgs"
    )


def find_tasks(image: Image, on_fault: OnFault) -> list[Object]:
    """
    Find all tasks.

    They are found through ``init_pid_ns``, and if that is damaged, also through
    ``init_task.tasks``.

    :param on_fault: called for each unreadable part of ``init_pid_ns``, if the list is damaged, too
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


def find_tasks_and_dead(image: Image, on_fault: OnFault) -> list[Object]:
    """
    Find all tasks, and the dead ones that have not left the kernel yet.

    ``release_task()`` takes the PID from a thread in ``exit_notify()``. After that, ``do_exit()``
    uncharges its stack, and may be preempted there. It is on the queue of a CPU
    (:linux:`kernel/sched/sched.h`, ``rq->cfs_tasks``) until it stops for good.

    :param on_fault: called for what is unreadable
    :return: ``struct task_struct *`` objects
    """
    tasks = {task.value_(): task for task in find_tasks(image, on_fault)}
    # The queues of a running kernel change while they are read. It is read several times.
    faults: list[FaultError] = []
    if has_member(image, "struct rq", "cfs_tasks"):  # CONFIG_SMP
        for task in queued_tasks(image, faults.append):
            tasks.setdefault(task.value_(), task)
    for fault in () if image.is_moving else faults:
        on_fault(fault)
    return list(tasks.values())


def queued_tasks(image: Image, on_fault: OnFault) -> Iterator[Object]:
    """
    Iterate over the tasks of the fair class on the queues of all CPUs (CONFIG_SMP).

    :param on_fault: called for each queue that is broken
    :return: ``struct task_struct *``. One that cannot be read can be among them.
    """
    for cpu in possible_cpus(image):
        head = per_cpu(image.object("runqueues"), cpu).cfs_tasks.address_of_()
        yield from list_entries(image, _TASK, head, "se.group_node", on_fault)


def _processes(image: Image, on_fault: OnFault) -> Iterator[Object]:
    head = image.object("init_task").tasks.address_of_()
    for leader in list_entries(image, _TASK, head, "tasks", on_fault):
        yield leader
        try:
            threads = leader.signal.thread_head.address_of_()
        except FaultError as error:
            on_fault(error)
            continue
        yield from list_entries(image, _TASK, threads, "thread_node", on_fault)


def read_tasks(image: Image, coverage: Coverage) -> Iterator[TaskCharge]:
    """
    Iterate over all tasks.

    :param coverage: counts the tasks that were read, and those that are unreadable
    """
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
    :raises drgn.FaultError: if the task cannot be read
    """
    task = image.pointer("struct task_struct *", address)
    return _task(image, task, constant(image, "memory_cgrp_id") or 0)


def task_of_stack(image: Image, address: int, coverage: Coverage) -> int | None:
    """
    Return the task that a kernel stack belongs to. All tasks are read.

    :param address: ``task_struct.stack``, the lowest address of the stack
    :param coverage: counts the tasks that were read, and those that are unreadable
    :return: ``struct task_struct *``; ``None`` if there is none
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
    css_set = task.cgroups.read_()
    css = css_set.subsys[subsys].read_()
    objcgs, stale = _objcgs(image, task)
    state = int(task.member_("__state"))
    if state & TASK_NEW:
        # Until cgroup_post_fork(), task->objcg is a copy of the parent's pointer. It holds no
        # reference.
        objcgs, stale = (), True
    return TaskCharge(
        address=task.value_(),
        pid=int(task.pid),
        # task.comm.string_() takes ten times as long.
        comm=text(task.comm.to_bytes_()),
        memcg=container_of(css, "struct mem_cgroup", "css").value_(),
        objcgs=objcgs,
        stale=stale,
        is_user=bool(task.mm) and not int(task.flags) & PF_KTHREAD,
        tgid=int(task.tgid),
        active_memcg=int(task.active_memcg.value_()),
        is_migrating=_is_migrating(image, task, css_set),
        is_runnable=not state,
    )


def _is_migrating(image: Image, task: Object, css_set: Object) -> bool:
    """
    Return whether a task is on ``css_set->mg_tasks``.

    ``cgroup_migrate_execute()`` moves tasks there, then calls ``mem_cgroup_attach()``, which marks
    the cached obj_cgroup as stale, and at last moves them to ``css_set->tasks``.
    """
    head, link = css_set.mg_tasks, int(task.cg_list.address_of_().value_())
    if head.next.value_() == head.address_:
        return False
    faults: list[FaultError] = []
    tasks = list_entries(image, "struct task_struct", head.address_of_(), "cg_list", faults.append)
    return any(int(other.cg_list.address_of_().value_()) == link for other in tasks)


def _objcgs(image: Image, task: Object) -> tuple[tuple[int, ...], bool]:
    """Return the cached ``struct obj_cgroup *``, and whether they are stale."""
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
    One task, with what ``rss_stat`` needs.

    :ivar address: ``struct task_struct *``
    :ivar pid: thread ID
    :ivar tgid: process ID
    :ivar comm: name; bytes that are not UTF-8 are escaped
    :ivar mm: ``struct mm_struct *``; 0 for none
    :ivar of_kernel: whether it is a kernel thread (``PF_KTHREAD``). A kernel thread uses an ``mm``
        only between ``kthread_use_mm()`` and ``kthread_unuse_mm()``
    :ivar memcg: ``struct mem_cgroup *``; ``None`` if it is unreadable
    :ivar rss: changes that it has not added to ``mm->rss_stat`` yet, in pages, by ``MM_FILEPAGES``
        etc.; empty since 6.2
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
    """
    Read all tasks, with one read for each.

    :param coverage: counts the tasks that were read, and what is unreadable
    """
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
    Return whether a task has an ``mm``. On a live kernel, a task may exit between two reads.

    :param task: ``struct task_struct *``
    :param mm: ``struct mm_struct *``
    :return: ``False`` also if the task cannot be read
    """
    try:
        return image.memory.word(task + offsetof(image.type("struct task_struct"), "mm")) == mm
    except FaultError:
        return False


class _ThreadLayout:
    """Offsets of the members of ``struct task_struct`` that make a :class:`Thread`."""

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
        offsets = {name: offsetof(type_, name) for name in names}
        self._start = min(offsets.values())
        ends = (offsets[name] + sizeof(member_type(type_, name)) for name in names)
        self._size = max(ends) - self._start
        self._offsets = {name: offset - self._start for name, offset in offsets.items()}
        self._comm = sizeof(member_type(type_, "comm"))
        self._memory = image.memory

    def read(self, task: int, memcgs: _CssSets) -> Thread:
        memory, offsets = self._memory, self._offsets
        data = memory.read(task + self._start, self._size)

        def integer(offset: int) -> int:
            return int.from_bytes(data[offset : offset + 4], memory.order, signed=True)

        rss: tuple[int, ...] = ()
        if self._has_rss:
            first = offsets["rss_stat"] + self._rss
            rss = tuple(integer(first + 4 * i) for i in range(self._counters))
        comm = data[offsets["comm"] : offsets["comm"] + self._comm]
        return Thread(
            address=task,
            pid=integer(offsets["pid"]),
            tgid=integer(offsets["tgid"]),
            comm=text(comm),
            mm=memory.word_at(data, offsets["mm"]),
            of_kernel=bool(integer(offsets["flags"]) & PF_KTHREAD),
            memcg=memcgs.memcg(memory.word_at(data, offsets["cgroups"])),
            rss=rss,
        )


class _CssSets:
    """Memcgs of ``struct css_set``, each read once: many tasks share one."""

    def __init__(self, image: Image, coverage: Coverage) -> None:
        self._image = image
        self._coverage = coverage
        self._subsys = constant(image, "memory_cgrp_id") or 0
        self._found: dict[int, int | None] = {}

    def memcg(self, css_set: int) -> int | None:
        if css_set not in self._found:
            try:
                subsys = self._image.pointer("struct css_set *", css_set).subsys
                css = subsys[self._subsys].read_()
                memcg = container_of(css, "struct mem_cgroup", "css").value_()
            except FaultError as error:
                self._coverage.miss("memcg of a task", error.address, str(error))
                memcg = None
            self._found[css_set] = memcg
        return self._found[css_set]
