# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``references`` must name."""

from __future__ import annotations

from support.planting import Fault, Planter, Subject


def count(subject: Subject, size: int) -> Fault:
    """Let an obj_cgroup have other references than were found."""
    path, _ = subject.largest("slab")
    address = subject.objcg(path)
    objcg = subject.object("struct obj_cgroup *", address)
    nid = subject.snapshot.objcgs[address].nid
    return Fault(
        (subject.add(objcg.refcnt.data.count, size),),
        (path,),
        {(path, nid, "refcnt", size)},
    )


PLANTERS = (Planter("the reference count of an obj_cgroup", count, (2, 1, -1, 5_000, -5_000)),)
