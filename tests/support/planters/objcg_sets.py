# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``objcg_sets`` must name."""

from __future__ import annotations

from drgn import Object

from support.planting import Fault, NoVictim, Planter, Subject


def set_of(subject: Subject, path: str) -> Object:
    """Return the ``struct obj_cgroup_set`` of a memcg."""
    memcg = subject.paths[path]
    for objcg in subject.snapshot.objcgs.values():
        if objcg.memcg == memcg and objcg.memcg_refs and objcg.set:
            return subject.object("struct obj_cgroup_set *", objcg.set)
    raise NoVictim("no obj_cgroup has a set")


def count(subject: Subject, size: int) -> Fault:
    """Let a set have other references than entries."""
    path = subject.victims()[0]
    found = set_of(subject, path)
    write = subject.add(found.refcnt, size)
    return Fault((write,), (path,), {(path, None, "set->refcnt", size)})


def lost(subject: Subject, size: int) -> Fault:
    """Let a set lose an entry whose obj_cgroup is not released."""
    path = subject.victims()[0]
    found = set_of(subject, path)
    return Fault((subject.put(found.objcgs[1], 0),), (path,), {(path, None, "set->refcnt", 1)})


def swapped(subject: Subject, size: int) -> Fault:
    """Let two entries of a set be those of each other's node."""
    path = subject.victims()[0]
    found = set_of(subject, path)
    writes = (
        subject.put(found.objcgs[0], found.objcgs[1].value_()),
        subject.put(found.objcgs[1], found.objcgs[0].value_()),
    )
    return Fault(writes, (path,), {(path, None, "set->refcnt", 2)})


PLANTERS = (
    Planter("the reference count of a set of obj_cgroups", count, (1, -1, 5_000)),
    Planter("an entry of a set of obj_cgroups", lost),
    Planter("two entries of a set of obj_cgroups", swapped),
)
