# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``active_memcg`` must name."""

from __future__ import annotations

from drgn import Object
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.linux.mm.mmzone import mem_map
from support.free_pages import free_page
from support.planting import Fault, NoVictim, Planter, Subject


def stale(subject: Subject, _: int) -> Fault:
    """Let a task charge another memcg, as if a function had not set the old value again."""
    return _of_task(subject, subject.paths[subject.other(subject.victims()[0])])


def freed(subject: Subject, _: int) -> Fault:
    """Let a task charge a memcg in memory that is free."""
    return _of_task(subject, mem_map(subject.image).virt(free_page(subject.prog, other_than=-1)))


def _of_task(subject: Subject, memcg: int) -> Fault:
    victims = set(subject.victims())
    for task in subject.snapshot.tasks:
        path = subject.path(task.memcg)
        if path in victims and not task.active_memcg:
            struct = subject.object("struct task_struct *", task.address)
            return Fault(
                (subject.put(struct.active_memcg, memcg),),
                (path,),
                {(path, None, "task->active_memcg", 1)},
            )
    raise NoVictim("no task is in a memcg")


def interrupt(subject: Subject, _: int) -> Fault:
    """Let the interrupts of the first CPU charge a memcg."""
    return interrupt_of(subject, 0)


def interrupt_of(subject: Subject, cpu: int) -> Fault:
    """Let the interrupts of a CPU charge a memcg."""
    pointer = per_cpu_ptr(subject.prog["int_active_memcg"].address_of_(), cpu)
    path = subject.victims()[0]
    memcg: Object = subject.memcg(path)
    return Fault(
        (subject.put(pointer[0], memcg.value_()),),
        (path,),
        {("?", None, "int_active_memcg", 1)},
    )


PLANTERS = (
    Planter("the memcg that a task charges instead of its own", stale),
    Planter("a freed memcg that a task charges instead of its own", freed),
    Planter("the memcg that interrupts charge", interrupt),
)
