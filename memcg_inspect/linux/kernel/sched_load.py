# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Tasks that have work left
-------------------------

A task that is on no CPU may have left something half done in the kernel if it was preempted, or if
it waits without being interruptible. The runqueues (``struct rq`` of
:linux:`kernel/sched/sched.h`) count such tasks, and list most of those that were preempted. So they
tell how many there are among tasks that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from drgn import FaultError, Object, sizeof
from drgn.helpers.linux.percpu import per_cpu

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.linux.lib.list import list_entries
from memcg_inspect.linux.mm.mmzone import online_cpus, possible_cpus

__all__ = ("unread_at_work",)


def unread_at_work(image: Image, known: Iterable[Object], unread: Collection[int]) -> int | None:
    """
    Return how many tasks that cannot be read were preempted, or waited without being interruptible.

    :param known: all tasks that can be read, ``struct task_struct *``
    :param unread: those of the others whose addresses are known, without those that a CPU ran
    :return: ``None`` if the kernel does not list them (CONFIG_SMP=n)
    :raises drgn.FaultError: if the runqueues cannot be read
    :raises UnknownKernelError: if this kernel has other runqueues
    """
    if not has_member(image, "struct rq", "cfs_tasks"):
        return None
    known = list(known)
    queued = _queued(image)
    is_fair = image.symbol("fair_sched_class").address

    def sleeps(task: Object) -> bool:
        return not task.on_rq and bool(task.sched_contributes_to_load)

    def is_other(task: Object) -> bool:
        return bool(task.on_rq) and task.sched_class.value_() != is_fair

    asleep = _asleep(image) - _count(known, sleeps)
    others = _others(image) - _count(known, is_other)
    return sum(address in queued for address in unread) + max(asleep, 0) + max(others, 0)


def _count(tasks: Iterable[Object], counts: Callable[[Object], bool]) -> int:
    total = 0
    for task in tasks:
        try:
            total += counts(task)
        except FaultError:
            continue  # a part of it is missing: it is not known either
    return total


def _queued(image: Image) -> set[int]:
    """Return the tasks of the fair class on all queues, also those that cannot be read."""
    found: set[int] = set()
    for cpu in online_cpus(image):
        head = per_cpu(image.object("runqueues"), cpu).cfs_tasks.address_of_()
        entries = list_entries(
            image, "struct task_struct", head, "se.group_node", lambda error: None
        )
        found.update(task.value_() for task in entries)
    return found


def _asleep(image: Image) -> int:
    """Return the number of tasks that wait without being interruptible, ``nr_uninterruptible``."""
    # A CPU where a task wakes up subtracts it, so that only the sum says anything.
    total, size = 0, 0
    for cpu in possible_cpus(image):
        member = per_cpu(image.object("runqueues"), cpu).nr_uninterruptible
        total, size = total + int(member), sizeof(member)
    total %= 1 << 8 * size
    return total - (total >> 8 * size - 1 << 8 * size)


def _others(image: Image) -> int:
    """Return the number of tasks of other classes than the fair one that could run."""
    # h_nr_running up to 6.13.
    name = "h_nr_queued" if has_member(image, "struct cfs_rq", "h_nr_queued") else "h_nr_running"
    total = 0
    for cpu in online_cpus(image):
        rq = per_cpu(image.object("runqueues"), cpu)
        total += int(rq.nr_running) - int(rq.cfs.member_(name))
    return total
