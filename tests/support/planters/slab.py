# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``slab`` must name."""

from __future__ import annotations

from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import SlabReader
from support.counter_planter import counter
from support.planting import Fault, NoVictim, Planter, Subject

ITEM = "NR_SLAB_UNRECLAIMABLE_B"


def owner(subject: Subject, _: int) -> Fault:
    """Charge an object to another memcg."""
    path, nid = subject.largest("slab", "unreclaimable")
    thief, slabs = subject.other(path, nid), SlabReader(subject.image)
    for piece in scan_pages(subject.image):
        for slab in filter(None, map(slabs.slab, piece.slabs)):
            if slab.nid != nid or slab.cache.reclaimable:
                continue
            for thing in slabs.charged_objects(slab):
                if subject.path(thing.objcg) == path:
                    size = slab.cache.charge
                    return Fault(
                        (subject.put(thing.element, subject.objcg(thief, nid)),),
                        (path, thief),
                        {(path, nid, ITEM, size), (thief, nid, ITEM, -size)},
                    )
    raise NoVictim(f"{path} has no unreclaimable objects on node {nid}")


PLANTERS = (
    counter("slab", "unreclaimable", (ITEM,), (64, 1, -4_096, 1_000_003)),
    counter("slab", "reclaimable", ("NR_SLAB_RECLAIMABLE_B",), (-1, 504, 1_000_003)),
    Planter("owner of an object", owner),
)
