# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``zone_totals`` must name."""

from __future__ import annotations

from support.planting import Fault, Planter, Subject

ITEM = "NR_ZONE_WRITE_PENDING"


def total(subject: Subject, size: int) -> Fault:
    """Change the total of all zones, of a counter that nothing else compares."""
    counter = subject.prog["vm_zone_stat"][subject.prog[ITEM]]
    return Fault((subject.add(counter, size),), (), {("?", None, ITEM, size)})


PLANTERS = (Planter("the total of a counter", total, (1, 4_000)),)
