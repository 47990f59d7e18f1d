# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Tasks that have work left
-------------------------

A task that is on no CPU may have left something half done in the kernel if it was preempted, or if
it waits in uninterruptible sleep. The runqueues (``struct rq`` of :linux:`kernel/sched/sched.h`)
count such tasks, and list those of the fair class that were preempted. So they tell how many there
are among tasks that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from drgn import FaultError, Object, sizeof
from drgn.helpers.linux.percpu import per_cpu

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.linux.kernel.sched import TASK_NEW, queued_tasks
from memcg_inspect.linux.mm.mmzone import possible_cpus

__all__ = ("unread_at_work",)

#: ``TASK_ON_RQ_QUEUED`` of kernel/sched/sched.h.
_QUEUED = 1
#: What is read of runqueues and tasks, by structure.
_MEMBERS = {
    "struct rq": ("cfs_tasks", "nr_running", "nr_uninterruptible"),
    "struct task_struct": ("on_rq", "sched_class", "sched_contributes_to_load"),
}


def unread_at_work(image: Image, known: Iterable[Object], unread: Collection[int]) -> int | None:
    """
    Return how many tasks that cannot be read were preempted, or waited in uninterruptible sleep.

    :param known: all tasks that can be read, ``struct task_struct *``
    :param unread: those of the others whose addresses are known, without those that a CPU ran
    :return: ``None`` if the runqueues do not tell: without CONFIG_SMP, with CONFIG_PREEMPT_RT, or
        while real-time tasks are throttled
    :raises drgn.FaultError: if the runqueues cannot be read
    :raises UnknownKernelError: if this kernel has no runqueues of that name
    """
    if not all(has_member(image, of, member) for of in _MEMBERS for member in _MEMBERS[of]):
        return None
    # A task that waits for a lock that PREEMPT_RT lets sleep (TASK_RTLOCK_WAIT) is not counted.
    if has_member(image, "struct task_struct", "softirq_disable_cnt") or _is_throttled(image):
        return None
    known, faults = list(known), list[FaultError]()
    queued = {task.value_() for task in queued_tasks(image, faults.append)}
    fair = image.symbol("fair_sched_class").address

    def sleeps(task: Object) -> bool:
        # A child has a copy of its parent's bit until it runs.
        is_new = int(task.member_("__state")) & TASK_NEW
        return not task.on_rq and not is_new and bool(task.sched_contributes_to_load)

    def is_fair(task: Object) -> bool:
        return int(task.on_rq) == _QUEUED and task.sched_class.value_() == fair

    def is_other(task: Object) -> bool:
        is_counted = int(task.on_rq) == _QUEUED and not task.dl.dl_throttled
        return is_counted and task.sched_class.value_() != fair

    certain = len(queued & set(unread))
    running, running_fair = _running(image)
    if faults:  # more tasks may be on a list that is broken
        certain = max(certain, running_fair - _count(known, is_fair))
    asleep = _asleep(image) - _count(known, sleeps)
    others = running - running_fair - _count(known, is_other)
    return certain + max(asleep, 0) + max(others, 0)


def _count(tasks: Iterable[Object], counts: Callable[[Object], bool]) -> int:
    total = 0
    for task in tasks:
        try:
            total += counts(task)
        except FaultError:
            continue  # a part of it is missing: it is not known either
    return total


def _is_throttled(image: Image) -> bool:
    """Return whether real-time tasks could run, and may not: ``nr_running`` does not count them."""
    if not has_member(image, "struct rt_rq", "rt_throttled"):  # since 6.12 with RT_GROUP_SCHED only
        return False
    runqueues = image.object("runqueues")
    return any(per_cpu(runqueues, cpu).rt.rt_throttled for cpu in possible_cpus(image))


def _asleep(image: Image) -> int:
    """Return the number of tasks in uninterruptible sleep, ``nr_uninterruptible``."""
    # A CPU where a task wakes up subtracts it, so that only the sum says anything.
    total, size = 0, 0
    for cpu in possible_cpus(image):
        member = per_cpu(image.object("runqueues"), cpu).nr_uninterruptible
        total, size = total + int(member), sizeof(member)
    total %= 1 << 8 * size
    return total - (total >> 8 * size - 1 << 8 * size)


def _running(image: Image) -> tuple[int, int]:
    """Return the number of tasks that could run, and that of those of the fair class."""
    # h_nr_running up to 6.13.
    name = "h_nr_queued" if has_member(image, "struct cfs_rq", "h_nr_queued") else "h_nr_running"
    total = fair = 0
    for cpu in possible_cpus(image):
        rq = per_cpu(image.object("runqueues"), cpu)
        total, fair = total + int(rq.nr_running), fair + int(rq.cfs.member_(name))
    return total, fair
