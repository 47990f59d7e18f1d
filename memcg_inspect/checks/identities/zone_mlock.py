# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``zone_mlock``
-----------------------

For each zone of each node: ``NR_MLOCK`` is the pages of the folios with ``PG_mlocked``.
``mlock_folio()``, ``mlock_new_folio()`` and ``__munlock_folio()`` change the flag and the counter
together, whatever is in the batch of the CPU (``mlock_fbatch``). ``free_pages_prepare()``, before
6.12 ``__page_cache_release()`` and ``release_pages()``, do so for folios that are freed with the
flag.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import MLOCK, HalfDone, block_pages, pattern
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.zone_pages import places_of, why_not_known, zone_row
from memcg_inspect.report import Row

__all__ = ("CHECK", "zone_mlock_rows")

ITEM = "NR_MLOCK"


def zone_mlock_rows(snapshot: Snapshot) -> list[Row]:
    """Compare mlocked folios with the counters of zones."""
    pages = snapshot.zones.pages
    places = places_of(snapshot.zones, ((n, z) for use, n, z in pages if use == "mlocked"))
    return [
        zone_row(
            snapshot, "zone_mlock", [ITEM], place, {"mlocked": pages.get(("mlocked", *place), 0)}
        )
        for place in places
    ]


def _not_kept(snapshot: Snapshot) -> str | None:
    reason = why_not_known(ITEM)(snapshot)
    if reason is None and "mlocked" not in snapshot.zones.marks:
        return "this kernel has no PG_mlocked"
    return reason


CHECK = Check(
    name="zone_mlock",
    counter="`NR_MLOCK` of the zone",
    unit="pages",
    found=("folios with `PG_mlocked`, by node and zone"),
    sources=("mlocked",),
    places=("vm_stat", "cpu"),
    rows=zone_mlock_rows,
    zone_items=(ITEM,),
    not_kept=_not_kept,
    half_done=HalfDone(pattern(MLOCK), block_pages, of_zones=True),
)
