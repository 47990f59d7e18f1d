# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``zone_lru``
---------------------

For each zone of each node: ``NR_ZONE_INACTIVE_ANON``, ``NR_ZONE_ACTIVE_ANON`` and so on are the
folios with ``PG_lru`` whose flags name the list, of all memcgs. ``update_lru_size()`` changes the
counter of the lruvec, of the node and of the zone under the lock of the lruvec.

A folio on a list of the multi-gen LRU is counted as active if it is in one of the two youngest
generations of its lruvec. So if there are any, active and inactive pages are compared together.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import LRU, HalfDone, folio_pages, pattern
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.zone_pages import places_of, why_not_known, zone_row
from memcg_inspect.report import Row

__all__ = ("CHECK", "zone_lru_rows")

_BY_TYPE = (
    ("NR_ZONE_INACTIVE_ANON", "NR_ZONE_ACTIVE_ANON"),
    ("NR_ZONE_INACTIVE_FILE", "NR_ZONE_ACTIVE_FILE"),
)
_UNEVICTABLE = "NR_ZONE_UNEVICTABLE"
_ITEMS = (*_BY_TYPE[0], *_BY_TYPE[1], _UNEVICTABLE)


def zone_lru_rows(snapshot: Snapshot) -> list[Row]:
    """Compare folios on LRU lists with the counters of zones, where either is not zero."""
    zones = snapshot.zones
    lists: list[tuple[str, ...]] = [(_UNEVICTABLE,)]
    for items in _BY_TYPE:
        lists += [items] if zones.has_generations else [(item,) for item in items]
    rows = (
        zone_row(
            snapshot,
            "zone_lru",
            items,
            place,
            {"lru": sum(zones.listed.get((*place, item), 0) for item in items)},
        )
        for place in places_of(zones, ((nid, number) for nid, number, _ in zones.listed))
        for items in lists
    )
    return [row for row in rows if not row.is_zero]


CHECK = Check(
    name="zone_lru",
    counter=(
        "`NR_ZONE_INACTIVE_ANON`, `NR_ZONE_ACTIVE_ANON`, `NR_ZONE_INACTIVE_FILE`, "
        "`NR_ZONE_ACTIVE_FILE`, `NR_ZONE_UNEVICTABLE` of the zone"
    ),
    unit="pages",
    found=(
        "folios with `PG_lru`, by node, zone and list; on the multi-gen LRU active and inactive "
        "ones together. Lists that are empty on both sides have no row"
    ),
    sources=("lru",),
    places=("vm_stat", "cpu"),
    rows=zone_lru_rows,
    zone_items=_ITEMS,
    not_kept=why_not_known(*_ITEMS),
    of_whole_nodes=True,
    half_done=HalfDone(
        pattern(LRU),
        # See the identity ``lru``.
        lambda snapshot: snapshot.limits.folio_batch + 1,
        folios=folio_pages,
        kinds=["folio"],
        rows=4,
        of_zones=True,
    ),
)
