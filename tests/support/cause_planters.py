# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Planters of faults that change several counters and pointers at once.

No identity is about such a fault: several show it. ``named`` is what the diagnosis must say. Each
planter chooses one of all objects that fit, always the same one for the same memcg.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from drgn import Object
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.linux.mm.memcg_data import kernel_payers
from memcg_inspect.linux.mm.memcontrol_stock import obj_stock_name
from memcg_inspect.linux.mm.mm_types import MEMCG_DATA_KMEM, page_layout, scan_pages
from memcg_inspect.linux.mm.percpu import PcpuArea, PercpuReader
from memcg_inspect.linux.mm.slab import SlabObject, SlabReader
from memcg_inspect.linux.mm.zswap import ZswapEntry, ZswapReader
from support.kernel_steps import Steps
from support.planting import Fault, NoVictim, Planter, Subject

__all__ = ("CAUSES", "PERCPU", "each_percpu_size")

ITEMS = {True: "NR_SLAB_RECLAIMABLE_B", False: "NR_SLAB_UNRECLAIMABLE_B"}


class Target(NamedTuple):
    """
    Something that is charged.

    :ivar pointer: where the pointer to its obj_cgroup is
    :ivar flags: flags in that word
    :ivar objcg: ``struct obj_cgroup *``
    :ivar path: memcg that pays
    :ivar nid: node that a diagnosis names
    :ivar size: bytes
    """

    pointer: int
    flags: int
    objcg: int
    path: str
    nid: int | None
    size: int


T = TypeVar("T")


class OfAllocation(Protocol):
    """Plants a fault of one percpu allocation, which is charged with so many bytes."""

    def __call__(self, subject: Subject, number: int, /, area: PcpuArea, size: int) -> Fault: ...


def chosen(path: str, some: list[T]) -> T:
    """Return one of these, always the same one for the same memcg."""
    if not some:
        raise NoVictim(f"{path} has nothing of that kind")
    return random.Random(path).choice(some)


def slab_objects(subject: Subject, path: str, nid: int) -> Iterator[SlabObject]:
    reader = SlabReader(subject.image)
    for piece in scan_pages(subject.image):
        for slab in filter(None, map(reader.slab, piece.slabs)):
            if slab.nid == nid and slab.charged:
                for thing in reader.charged_objects(slab):
                    if subject.path(thing.objcg) == path:
                        yield thing


def slab_object(subject: Subject) -> SlabObject:
    path, nid = subject.largest("slab")
    return chosen(path, list(slab_objects(subject, path, nid)))


def of_slab(subject: Subject) -> Target:
    thing = slab_object(subject)
    size, slab = thing.slab.cache.charge, thing.slab
    return Target(thing.element, 0, thing.objcg, subject.path(thing.objcg), slab.nid, size)


def allocations(subject: Subject, path: str) -> dict[int, list[PcpuArea]]:
    """Return the percpu allocations of a memcg by the bytes that each is charged with."""
    reader, found = PercpuReader(subject.image), defaultdict[int, list[PcpuArea]](list)
    for chunk in reader.chunks():
        for area in reader.charged(chunk):
            if subject.path(area.objcg) == path:
                found[reader.charge(area)].append(area)
    return found


def of_percpu(subject: Subject) -> Target:
    path, _ = subject.largest("percpu", "data")
    some = [(a, size) for size, areas in allocations(subject, path).items() for a in areas]
    area, size = chosen(path, some)
    return Target(area.element, 0, area.objcg, path, None, size)


def each_percpu_size(subject: Subject, plant: OfAllocation) -> list[Planter]:
    """Return planters of faults of one percpu allocation of each size."""
    path, _ = subject.largest("percpu", "data")
    return [
        Planter(f"an allocation of {size} bytes", partial(plant, area=areas[-1], size=size))
        for size, areas in sorted(allocations(subject, path).items())
    ]


def target_of(subject: Subject, area: PcpuArea, size: int) -> Target:
    return Target(area.element, 0, area.objcg, subject.path(area.objcg), None, size)


def percpu_lost(subject: Subject, _: int, area: PcpuArea, size: int) -> Fault:
    """Clear the pointer to the owner of a percpu allocation."""
    what = target_of(subject, area, size)
    return lost(lambda _: what)(subject, 0)


def percpu_moved(subject: Subject, _: int, area: PcpuArea, size: int) -> Fault:
    """Change the pointer to the owner of a percpu allocation."""
    what = target_of(subject, area, size)
    return moved(lambda _: what)(subject, 0)


def percpu_recharged(
    subject: Subject, _: int, area: PcpuArea, size: int, times: int, references: int
) -> Fault:
    """Charge a percpu allocation once more, or once less, and count it so."""
    reader, steps, what = (
        PercpuReader(subject.image),
        Steps(subject),
        target_of(subject, area, size),
    )
    siblings = subject.snapshot.objcgs[area.objcg].siblings
    if siblings:
        of_nodes = reader.data_nodes(area) + reader.metadata_nodes(area)
        parts = {siblings[nid]: part for nid, part in of_nodes.items()}
    else:
        parts = {area.objcg: size}
    for objcg, part in parts.items():
        nid = subject.snapshot.objcgs[objcg].nid
        steps.charge_bytes(objcg, times * part, 0 if nid is None else nid)
        steps.refer(objcg, references)
    steps.count(what.path, "MEMCG_PERCPU_B", times * size)
    return fault(steps, what)


def of_zswap(subject: Subject) -> Target:
    path, _ = subject.largest("zswap")
    entries = ZswapReader(subject.image).entries()
    entry: ZswapEntry = chosen(path, [e for e in entries if e.objcg and _pays(subject, e, path)])
    struct = subject.object("struct zswap_entry *", entry.address)
    return Target(struct.objcg.address_, 0, entry.objcg, path, None, entry.length)


def _pays(subject: Subject, entry: ZswapEntry, path: str) -> bool:
    return subject.path(entry.objcg) == path and not entry.beyond


def of_stack(subject: Subject) -> Target:
    """Return one page of the stack of a task."""
    victims = set(subject.victims())
    for task in subject.snapshot.tasks:
        area = subject.object("struct task_struct *", task.address).stack_vm_area.read_()
        pages = [area.pages[i].value_() for i in range(int(area.nr_pages))] if area else []
        for page, (objcg, nid) in kernel_payers(subject.image, pages).items():
            if objcg and subject.path(objcg) in victims:
                pointer = page + page_layout(subject.image).memcg_data
                size = subject.snapshot.image.page_size
                path = subject.path(objcg)
                return Target(pointer, MEMCG_DATA_KMEM, objcg, path, nid, size)
    raise NoVictim("no task with a charged stack is in a victim")


def fault(steps: Steps, what: Target, *paths: str) -> Fault:
    """Return a fault of one charge."""
    named = {(what.path, what.nid, "", what.size)}
    return Fault(steps.writes(), (what.path, *paths), named)


Pick = Callable[[Subject], Target]


def lost(pick: Pick) -> Callable[[Subject, int], Fault]:
    """Return a function that clears the pointer to the owner of something."""

    def plant(subject: Subject, _: int) -> Fault:
        what = pick(subject)
        written = fault(Steps(subject), what)
        return written._replace(writes=(subject.put(what.pointer, 0),))

    return plant


def moved(pick: Pick) -> Callable[[Subject, int], Fault]:
    """Return a function that changes the pointer to the owner of something."""

    def plant(subject: Subject, _: int) -> Fault:
        what = pick(subject)
        nid = subject.snapshot.objcgs[what.objcg].nid
        thief = subject.other(what.path, nid)
        word = subject.objcg(thief, nid) | what.flags
        written = fault(Steps(subject), what, thief)
        return written._replace(writes=(subject.put(what.pointer, word),))

    return plant


def poisoned(subject: Subject, _: int) -> Fault:
    """Overwrite the pointer to the owner of an object, as when memory is freed."""
    what = of_slab(subject)
    written = fault(Steps(subject), what)
    return written._replace(writes=(subject.put(what.pointer, 0x6B6B6B6B6B6B6B68),))


def recharged(times: int, references: int) -> Callable[[Subject, int], Fault]:
    """Return a function that charges a slab object once more, or once less, and counts it so."""

    def plant(subject: Subject, _: int) -> Fault:
        thing, steps = slab_object(subject), Steps(subject)
        what = of_slab(subject)
        item, nid = ITEMS[thing.slab.cache.reclaimable], thing.slab.nid
        steps.charge_bytes(what.objcg, times * what.size, nid)
        steps.count(what.path, item, times * what.size, nid)
        if references:
            steps.refer(what.objcg, references)
        return fault(steps, what)

    return plant


def page_charged_twice(subject: Subject, _: int) -> Fault:
    """Charge a page that is no object once more."""
    what, steps = of_stack(subject), Steps(subject)
    steps.charge_pages(what.path, 1, what.nid or 0)
    return fault(steps, what)


def on_another_node(subject: Subject, _: int) -> Fault:
    """Count a slab object on another node than its own."""
    thing, what = slab_object(subject), of_slab(subject)
    item, nid = ITEMS[thing.slab.cache.reclaimable], thing.slab.nid
    other = next(n for n in subject.snapshot.image.nodes if n != nid)
    steps = Steps(subject)
    steps.count(what.path, item, -what.size, nid)
    steps.count(what.path, item, what.size, other)
    return fault(steps, what)


def as_another_item(subject: Subject, _: int) -> Fault:
    """Count a reclaimable slab object as unreclaimable, or the other way round."""
    thing, what = slab_object(subject), of_slab(subject)
    nid, steps = thing.slab.nid, Steps(subject)
    steps.count(what.path, ITEMS[thing.slab.cache.reclaimable], -what.size, nid)
    steps.count(what.path, ITEMS[not thing.slab.cache.reclaimable], what.size, nid)
    return fault(steps, what)


#: What one CPU changed: by node, and of the whole memcg only.
CHANGED = {"NR_SLAB_RECLAIMABLE_B": 2_400, "NR_SLAB_UNRECLAIMABLE_B": 5_016, "NR_FILE_PAGES": 3}
CHANGED_OF_MEMCG = {"MEMCG_PERCPU_B": 1_104, "MEMCG_SOCK": 5}


def flushed(subject: Subject, times: int) -> Fault:
    """Let a flush drop what a CPU changed, or add it twice."""
    path, nid = subject.largest("slab")
    steps = Steps(subject)
    for item, amount in CHANGED.items():
        steps.fold(path, item, times * amount, nid)
    for item, amount in CHANGED_OF_MEMCG.items():
        steps.fold(path, item, times * amount)
    return Fault(steps.writes(), (path,), {(path, None, "", None)})


def handed_up(subject: Subject, times: int) -> Fault:
    """Let a flush drop what a child handed up to its parent, or add it twice."""
    path, nid = subject.largest("slab")
    above, steps = path.rpartition("/")[0] or "/", Steps(subject)
    if not subject.may_change(above):
        raise NoVictim(f"{above} has another fault")
    for item, amount in CHANGED.items():
        steps.fold_of_child(above, item, times * amount, nid)
    for item, amount in CHANGED_OF_MEMCG.items():
        steps.fold_of_child(above, item, times * amount)
    return Fault(steps.writes(), (path, above), {(above, None, "", None)})


def in_object_stock(subject: Subject, size: int) -> Fault:
    """Change the slab bytes that a CPU has in its stock of objects."""
    victims = set(subject.victims())
    for stock in subject.snapshot.stocks:
        path = subject.path(stock.objcg)
        if path in victims and stock.nid is not None:
            name = obj_stock_name(subject.image)
            pcp: Object = per_cpu_ptr(subject.prog[name].address_of_(), stock.cpu)
            write = subject.add(pcp.nr_slab_unreclaimable_b, size)
            return Fault((write,), (path,), {(path, stock.nid, "", size)})
    raise NoVictim("no CPU has slab bytes of a victim in its stock")


def overwritten(subject: Subject, number: int) -> Fault:
    """Overwrite neighbouring counters of a CPU, as if freed memory had been poisoned."""
    path, nid = subject.largest("slab")
    percpu = subject.memcg(path).nodeinfo[nid].lruvec_stats_percpu
    counters = per_cpu_ptr(percpu, 1).state
    writes = tuple(subject.put(counters[n], 0x6B6B6B6B) for n in range(number))
    word = len(writes[0].data)
    amounts = {(path, nid, "", size * word) for size in range(3, number + 1)}
    return Fault(writes, (path,), amounts)


#: By cause: what must be the first diagnosis.
CAUSES: dict[str, tuple[Planter, ...]] = {
    "object-owner": (
        Planter("owner of a page", moved(of_stack)),
        Planter("owner of a zswap entry", moved(of_zswap)),
        Planter("owner of any object", moved(of_slab)),
        Planter("no owner, but poison", poisoned),
    ),
    "still-charged": (
        Planter("no owner of an object", lost(of_slab)),
        Planter("no owner of an allocation", lost(of_percpu)),
        Planter("no owner of a zswap entry", lost(of_zswap)),
        Planter("no owner of a page", lost(of_stack)),
    ),
    "charged-twice": (
        Planter("an object charged twice", recharged(1, 0)),
        Planter("a page charged twice", page_charged_twice),
    ),
    "not-counted": (
        Planter("an object not charged", recharged(-1, 0)),
        Planter("an object not charged, and without a reference", recharged(-1, -1)),
    ),
    "wrong-node": (Planter("an object counted on another node", on_another_node),),
    "wrong-item": (Planter("an object counted as another item", as_another_item),),
    "flush": (
        Planter("a CPU's part in a flush", flushed, (-1, 1)),
        Planter("a child's part in a flush", handed_up, (-1, 1)),
    ),
    # No row tells the stock of a CPU from its counters, so the stock is named beside this one.
    "counted-wrong": (Planter("slab bytes in a stock", in_object_stock, (64, -8)),),
    "overwritten": (Planter("counters that were overwritten", overwritten, (6, 5)),),
}

#: By cause: what plants it into one percpu allocation.
PERCPU: dict[str, OfAllocation] = {
    "still-charged": percpu_lost,
    "object-owner": percpu_moved,
    "charged-twice": partial(percpu_recharged, times=1, references=0),
    "not-counted": partial(percpu_recharged, times=-1, references=0),
}
