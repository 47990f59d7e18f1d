# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``zone_totals``
------------------------

For each counter of zones: the total of all zones, ``vm_zone_stat[]``, which ``/proc/vmstat`` shows,
is the sum of ``vm_stat`` of the zones. ``zone_page_state_add()`` adds to both. What CPUs have not
added yet is in neither.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import ZONE_COUNTERS
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "zone_total_rows")


def zone_total_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the total of each counter of zones with the zones', where either is not zero."""
    zones = snapshot.zones
    rows = (
        make_row(
            RowKey("zone_totals", item, "pages"),
            {"zones": zones.sums[item]},
            {"vm_zone_stat": total},
        )
        for item, total in zones.totals.items()
    )
    return [row for row in rows if not row.is_zero]


def _not_kept(snapshot: Snapshot) -> str | None:
    if snapshot.zones.totals:
        return None
    return "the counters of zones of this kernel are not known"


CHECK = Check(
    name="zone_totals",
    counter="`vm_zone_stat[]`: every counter of zones",
    unit="pages",
    found="`vm_stat` of all zones. Counters that are 0 on both sides have no row",
    sources=("zones",),
    places=("vm_zone_stat",),
    rows=zone_total_rows,
    not_kept=_not_kept,
    counters_only=True,
    half_done=ZONE_COUNTERS,
)
