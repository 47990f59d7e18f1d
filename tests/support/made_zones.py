# SPDX-License-Identifier: LGPL-2.1-or-later
"""A node with one zone, made by hand, and its counters."""

from __future__ import annotations

from typing import Any

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import NodeStat, Running
from memcg_inspect.model_pages import Zone, Zones
from support.made import snapshot

ANON = ("NR_ZONE_INACTIVE_ANON", "NR_ZONE_ACTIVE_ANON")

#: Free are 3 single pages and 2 blocks of 4, of which one is isolated; 2 pages are not accepted.
STATS = {
    "NR_FREE_PAGES": NodeStat(10, -1),
    "NR_ZONE_INACTIVE_ANON": NodeStat(20, 3),
    "NR_ZONE_ACTIVE_ANON": NodeStat(7, 0),
    "NR_ZONE_INACTIVE_FILE": NodeStat(0, 0),
    "NR_ZONE_ACTIVE_FILE": NodeStat(0, 0),
    "NR_ZONE_UNEVICTABLE": NodeStat(6, -1),
    "NR_MLOCK": NodeStat(4, 1),
    "NR_ZSPAGES": NodeStat(9, 0),
    "NR_UNACCEPTED": NodeStat(2, 0),
}
ZONE = Zone(1, 2, "Normal", 900, 800, (3, 0, 2), 4, False, STATS, False)


def made(zone: Zone = ZONE, running: tuple[Running, ...] = (), **more: Any) -> Snapshot:
    """Node 1 has one zone with pages."""
    totals = {item: stat.folded for item, stat in zone.stats.items()}
    zones = Zones(
        **{
            "zones": {(1, 2): zone},
            "names": {0: "ZONE_DMA", 1: "ZONE_DMA32", 2: "ZONE_NORMAL"},
            "totals": totals,
            "sums": totals,
            "free": {(1, 2, 0): 3, (1, 2, 2): 2},
            "pages": {
                ("mlocked", 1, 2): 5,
                ("zsmalloc", 1, 2): 9,
                ("unaccepted", 1, 2): 2,
            },
            "marks": frozenset(("mlocked", "zsmalloc", "unaccepted")),
            "listed": {(1, 2, ANON[0]): 23, (1, 2, ANON[1]): 7, (1, 2, "NR_ZONE_UNEVICTABLE"): 5},
            **more,
        }
    )
    return snapshot(zones=zones, running=running)


def with_stat(item: str, amount: int, **more: Any) -> Zone:
    stats = {**STATS, item: STATS[item]._replace(folded=STATS[item].folded + amount)}
    return ZONE._replace(stats=stats, **more)
