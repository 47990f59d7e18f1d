# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``zone_free_area`` must name."""

from __future__ import annotations

from support.planting import Fault, Planter, Subject
from support.zones import object_of, zone_in_use


def nr_free(subject: Subject, size: int) -> Fault:
    """Change the number of single free pages of a zone."""
    zone = zone_in_use(subject, max(0, -size))
    name = f"free_area[{subject.snapshot.zones.name(zone.number)}][0]"
    write = subject.add(object_of(subject, zone).free_area[0].nr_free, size)
    return Fault((write,), (), {("?", zone.nid, name, size)})


PLANTERS = (Planter("the number of free blocks", nr_free, (1, -1, 4_000)),)
