# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``zone_free_area`` must name."""

from __future__ import annotations

from support.planting import Fault, Planter, Subject
from support.zones import object_of, order_in_use, zone_in_use


def nr_free(subject: Subject, size: int) -> Fault:
    """Change the number of free blocks of a zone, of the smallest order that has enough."""
    blocks = max(0, -size)
    zone = zone_in_use(subject, blocks)
    order = order_in_use(zone, blocks)
    name = f"free_area[{subject.snapshot.zones.name(zone.number)}][{order}]"
    write = subject.add(object_of(subject, zone).free_area[order].nr_free, size)
    return Fault((write,), (), {("?", zone.nid, name, size << order)})


PLANTERS = (Planter("the number of free blocks", nr_free, (1, -1, 4_000)),)
