# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``reparenting`` must name."""

from __future__ import annotations

from support.planting import Fault, NoVictim, Planter, Subject


def left_behind(subject: Subject, _: int) -> Fault:
    """Give an obj_cgroup that a removed memcg left to its parent back to it."""
    memcgs, objcgs = subject.snapshot.memcgs, subject.snapshot.objcgs
    for memcg in memcgs.values():
        if not memcg.offline or memcgs[memcg.payer].parent is None:
            continue
        if not subject.may_change(memcg.path):
            continue
        for objcg in objcgs.values():
            if objcg.memcg == memcg.payer and not objcg.is_root:
                thing = subject.object("struct obj_cgroup *", objcg.address)
                return Fault(
                    (subject.put(thing.memcg, memcg.address),),
                    (memcg.path,),
                    {(memcg.path, objcg.nid, "objcg->memcg", -1)},
                )
    raise NoVictim("no removed memcg has a parent with obj_cgroups")


PLANTERS = (Planter("the memcg of an obj_cgroup", left_behind),)
