# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``zone_lru`` must name."""

from __future__ import annotations

from memcg_inspect.checks.identities.zone_lru import zone_lru_rows
from memcg_inspect.checks.zone_pages import counters_of, zone_of
from support.planting import Fault, NoVictim, Planter, Subject
from support.zones import object_of


def vm_stat(subject: Subject, size: int) -> Fault:
    """Change the counter of the longest list."""
    rows = zone_lru_rows(subject.snapshot)
    row = max(rows, key=lambda row: row.found["lru"], default=None)
    zone = None if row is None else zone_of(subject.snapshot.zones, row)
    if row is None or zone is None:
        raise NoVictim("no zone has pages on a list")
    counter = object_of(subject, zone).vm_stat[subject.prog[counters_of(row.item)[0]]]
    return Fault((subject.add(counter, size),), (), {("?", row.nid, row.item, size)})


PLANTERS = (Planter("the counter of a zone", vm_stat, (3, -1, 4_000)),)
