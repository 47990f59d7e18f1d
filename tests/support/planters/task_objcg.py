# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``task_objcg`` must name."""

from __future__ import annotations

from support.planting import Fault, NoVictim, Planter, Subject


def cache(subject: Subject, _: int) -> Fault:
    """Let a task cache the obj_cgroup of another memcg."""
    victims = set(subject.victims())
    for task in subject.snapshot.tasks:
        path = subject.path(task.memcg)
        if task.is_user and not task.stale and any(task.objcgs) and path in victims:
            thief = subject.other(path)
            struct = subject.object("struct task_struct *", task.address)
            if subject.snapshot.image.accounting == "kmem-per-node":
                nid = next(nid for nid, objcg in enumerate(task.objcgs) if objcg)
                # Bit 0 is a flag, which task.stale says is clear.
                array = subject.object("struct obj_cgroup **", struct.objcgs.value_())
                write = subject.put(array[nid], subject.objcg(thief, nid))
            else:
                write = subject.put(struct.objcg, subject.objcg(thief))
            return Fault(
                (write,),
                (path, thief),
                {(path, None, "task->objcg", 1)},
            )
    raise NoVictim("no task caches an obj_cgroup")


PLANTERS = (Planter("the obj_cgroup that a task caches", cache),)
