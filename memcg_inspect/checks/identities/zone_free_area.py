# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``zone_free_area``
---------------------------

For each zone of each node, and each order: ``free_area[order].nr_free`` blocks are in the buddy
lists of that order. That is, so many pages have the type of such blocks, and the order in
``page->private`` (``buddy_order()``). ``__add_to_free_list()`` and ``__del_page_from_free_list()``
change list and number together, also of isolated blocks.

A page with that type and an order that no list has is in a row of its own, which claims nothing.
"""

from __future__ import annotations

import re

from memcg_inspect.checks.check import Check, Explained
from memcg_inspect.checks.rows import RowKey, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.zone_pages import being_changed, places_of, why_not_all
from memcg_inspect.report import Row

__all__ = ("CHECK", "zone_free_area_rows")

#: The order in the name of a row.
_ORDER = re.compile(r"\[(\d+)\]$")


def zone_free_area_rows(snapshot: Snapshot) -> list[Row]:
    """Compare free blocks with the lengths of their lists, in pages, where either is not zero."""
    zones = snapshot.zones
    missing, rows = missing_if(why_not_all(snapshot)), []
    for nid, number in places_of(zones, ((nid, number) for nid, number, _ in zones.free)):
        zone = zones.zones.get((nid, number))
        listed = () if zone is None else zone.free_blocks
        found = {o: n for (*at, o), n in zones.free.items() if (*at,) == (nid, number)}
        for order in sorted({*range(len(listed)), *found}):
            claimed = None
            if zone is not None:
                claimed = {"nr_free": listed[order] << order if order < len(listed) else 0}
            item = f"free_area[{zones.name(number)}][{order}]"
            blocks = {"free": found.get(order, 0) << order}
            unread = "the zone is not in the image, or has no pages"
            key = RowKey("zone_free_area", item, "pages", nid=nid)
            rows.append(make_row(key, blocks, claimed, missing, unread=unread))
    return [row for row in rows if not row.is_zero]


def _explain(snapshot: Snapshot, row: Row) -> Explained | None:
    # The list, the number of its blocks and the type of the page change one after the other, for
    # one block at a time.
    order = _ORDER.search(row.item)
    is_one = order is not None and abs(row.off) == 1 << int(order[1])
    return being_changed(snapshot, row) if is_one else None


def _not_kept(snapshot: Snapshot) -> str | None:
    return None if snapshot.zones.zones else "the zones of this kernel are not known"


CHECK = Check(
    name="zone_free_area",
    counter="`free_area[].nr_free` of the zone, by order",
    unit="pages",
    found=(
        "pages of free blocks, by node, zone and order. Orders that are 0 on both sides have no row"
    ),
    sources=("free",),
    places=("nr_free",),
    rows=zone_free_area_rows,
    not_kept=_not_kept,
    of_whole_nodes=True,
    explain=_explain,
)
