# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``objcg_bytes`` must name."""

from __future__ import annotations

from support.planting import Fault, Planter, Subject


def left_over(subject: Subject, size: int) -> Fault:
    """Let an obj_cgroup have bytes left of its pages that make no whole page."""
    path, _ = subject.largest("slab")
    address = subject.objcg(path)
    objcg = subject.object("struct obj_cgroup *", address)
    nid = subject.snapshot.objcgs[address].nid
    return Fault(
        (subject.add(objcg.nr_charged_bytes, size),),
        (path,),
        {(path, nid, "bytes of whole pages", -size)},
    )


PLANTERS = (Planter("bytes left of whole pages", left_over, (24, 1, 2_000)),)
