# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``zone_zspages``
-------------------------

For each zone of each node: ``NR_ZSPAGES`` is the pages that have the type of pages of zsmalloc
(``PGTY_zsmalloc``). ``alloc_zspage()`` sets the type and counts the page. A page keeps the type
until it is freed. ``zs_page_migrate()`` moves the count with the contents.

Before 6.11, these pages have no type, and the identity is not kept.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import ZSMALLOC, HalfDone, pattern
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.zone_pages import places_of, why_not_known, zone_row
from memcg_inspect.report import Row

__all__ = ("CHECK", "zone_zspages_rows")

ITEM = "NR_ZSPAGES"
#: ``COMPACT_CLUSTER_MAX``: a task that migrates pages isolates as many. They are not freed then.
_MOST = 32


def zone_zspages_rows(snapshot: Snapshot) -> list[Row]:
    """Compare pages of zsmalloc with the counters of zones."""
    pages = snapshot.zones.pages
    places = places_of(snapshot.zones, ((n, z) for use, n, z in pages if use == "zsmalloc"))
    return [
        zone_row(
            snapshot,
            "zone_zspages",
            [ITEM],
            place,
            {"zsmalloc": pages.get(("zsmalloc", *place), 0)},
        )
        for place in places
    ]


def _not_kept(snapshot: Snapshot) -> str | None:
    reason = why_not_known(ITEM)(snapshot)
    if reason is None and "zsmalloc" not in snapshot.zones.marks:
        return "this kernel does not mark pages of zsmalloc (before 6.11)"
    return reason


CHECK = Check(
    name="zone_zspages",
    counter="`NR_ZSPAGES` of the zone",
    unit="pages",
    found="pages of zsmalloc, by node and zone",
    sources=("zsmalloc",),
    places=("vm_stat", "cpu"),
    rows=zone_zspages_rows,
    zone_items=(ITEM,),
    not_kept=_not_kept,
    half_done=HalfDone(pattern(ZSMALLOC), lambda snapshot: _MOST, of_zones=True),
)
