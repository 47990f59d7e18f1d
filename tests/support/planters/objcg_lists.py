# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``objcg_lists`` must name."""

from __future__ import annotations

from collections import Counter

from memcg_inspect.model import Objcg, ObjcgPlace
from support.planting import Fault, Named, NoVictim, Planter, Subject, Write

ITEM = "objcg_list"


def misplaced(subject: Subject, *places: ObjcgPlace) -> set[Named]:
    """Return what must be named if an obj_cgroup is wrong at these places."""
    cells = Counter((subject.snapshot.memcgs[p.memcg].path, p.nid) for p in places)
    return {(path, nid, ITEM, number) for (path, nid), number in cells.items()}


def owner(subject: Subject, _: int) -> Fault:
    """Make an obj_cgroup that a memcg uses another memcg's."""
    path = subject.largest("slab")[0]
    thief, address = subject.other(path), subject.objcg(path)
    objcg = subject.snapshot.objcgs[address]
    write = subject.put(subject.object("struct obj_cgroup *", address).memcg, subject.paths[thief])
    return Fault((write,), (path, thief), misplaced(subject, *objcg.places))


def node(subject: Subject, _: int) -> Fault:
    """Make an obj_cgroup say that it is of another node."""
    path, _nid = subject.largest("slab")
    address = subject.objcg(path)
    objcg = subject.snapshot.objcgs[address]
    thing = subject.object("struct obj_cgroup *", address)
    if not thing.type_.type.has_member("nid"):
        raise NoVictim("obj_cgroups of this kernel do not say their node")
    nid = next(n for n in subject.snapshot.image.nodes if n != objcg.nid)
    return Fault((subject.put(thing.nid, nid),), (path,), misplaced(subject, *objcg.places))


def listed(subject: Subject) -> tuple[Objcg, ObjcgPlace, ObjcgPlace]:
    """Return an obj_cgroup on the list of a memcg, and the removed memcg that refers to it."""
    for objcg in subject.snapshot.objcgs.values():
        on_list = [p for p in objcg.places if p.member == "objcg_list" and p.nid is not None]
        first = [p for p in objcg.places if p.member == "orig_objcg"]
        if on_list and first and subject.may_change(subject.path(first[0].memcg)):
            return objcg, on_list[0], first[0]
    raise NoVictim("no obj_cgroup of a removed memcg is on the list of a node")


def list_of_another_node(subject: Subject, _: int) -> Fault:
    """Move an obj_cgroup of a removed memcg to the list of another node."""
    objcg, place, first = listed(subject)
    nid = next(n for n in subject.snapshot.image.nodes if n != place.nid)
    thing = subject.object("struct obj_cgroup *", objcg.address)
    head = subject.object("struct mem_cgroup *", place.memcg).nodeinfo[nid].objcg_list
    link, before, after = thing.list, thing.list.prev.read_(), thing.list.next.read_()
    second = head.next.read_()
    writes: list[Write] = [
        subject.put(before.next, after.value_()),
        subject.put(after.prev, before.value_()),
        subject.put(link.prev, head.address_of_().value_()),
        subject.put(link.next, second.value_()),
        subject.put(second.prev, link.address_of_().value_()),
        subject.put(head.next, link.address_of_().value_()),
    ]
    # Without objcg->nid, the list is found first, and the removed memcg does not agree with it.
    says_node = thing.type_.type.has_member("nid")
    wrong = place._replace(nid=nid) if says_node else first
    paths = tuple(subject.snapshot.memcgs[p.memcg].path for p in (place, first))
    return Fault(tuple(writes), paths, misplaced(subject, wrong))


PLANTERS = (
    Planter("the memcg of an obj_cgroup in use", owner),
    Planter("the node of an obj_cgroup", node),
    Planter("the list that an obj_cgroup is on", list_of_another_node),
)
