# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``zone_free``
----------------------

For each zone of each node: ``NR_FREE_PAGES`` is the pages of the blocks that have the type of pages
in buddy lists (``PG_buddy``, ``PGTY_buddy``). See ``account_freepages()`` (6.10), before
``__mod_zone_freepage_state()``. Pages that CPUs keep (``per_cpu_pages``), guard pages of
``debug_pagealloc``, poisoned pages and those that were given back to the hypervisor have another
type or none, and are not counted.

Exceptions:

- free pages of isolated blocks (``MIGRATE_ISOLATE``) have the type, and are not counted;
- pages that the guest has not accepted yet have another type, and are counted
  (``__free_unaccepted()``);
- before 6.10, a block that was isolated while a larger free block was in its place can be counted
  for the wrong type of block. So a row of a zone that has isolated blocks is ``unverifiable`` if it
  differs.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check, Explained
from memcg_inspect.checks.half_done import ZONE_COUNTERS
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.zone_pages import (
    being_changed,
    free_pages,
    places_of,
    why_not_known,
    zone_of,
    zone_row,
)
from memcg_inspect.report import Row

__all__ = ("CHECK", "zone_free_rows")

ITEM = "NR_FREE_PAGES"


def zone_free_rows(snapshot: Snapshot) -> list[Row]:
    """Compare free pages with the counters of zones, where either is not zero."""
    zones, rows = snapshot.zones, []
    for place in places_of(zones, ((nid, number) for nid, number, _ in zones.free)):
        zone = zones.zones.get(place)
        found = {"free": 0} if zone is None else free_pages(zones, zone)
        rows.append(zone_row(snapshot, "zone_free", [ITEM], place, found))
    return [row for row in rows if not row.is_zero]


def _explain(snapshot: Snapshot, row: Row) -> Explained | None:
    zone = zone_of(snapshot.zones, row)
    if zone is not None and zone.isolates:
        return Explained("unverifiable", "blocks of the zone are isolated")
    return being_changed(snapshot, row)


CHECK = Check(
    name="zone_free",
    counter="`NR_FREE_PAGES` of the zone",
    unit="pages",
    found=(
        "pages of free blocks, by node and zone, without those of isolated blocks, and with pages "
        "that are not accepted yet. Zones that are 0 on both sides have no row"
    ),
    sources=("free", "isolated", "unaccepted"),
    places=("vm_stat", "cpu"),
    rows=zone_free_rows,
    zone_items=(ITEM,),
    not_kept=why_not_known(ITEM),
    of_whole_nodes=True,
    half_done=ZONE_COUNTERS,
    explain=_explain,
)
