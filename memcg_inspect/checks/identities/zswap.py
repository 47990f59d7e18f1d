# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``zswap``
------------------

For each memcg: ``MEMCG_ZSWAP_B`` is the compressed length of its zswap entries, ``MEMCG_ZSWAPPED``
their number, and ``MEMCG_ZSWAP_INCOMP`` (7.1) the number of entries that could not be compressed.
See ``obj_cgroup_charge_zswap()``.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Charges, Check
from memcg_inspect.checks.half_done import FLUSH, HalfDone, pattern
from memcg_inspect.checks.rows import RowKey, counter_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Unit
from memcg_inspect.report import Row

__all__ = ("CHECK", "zswap_rows")

LENGTH, ENTRIES, INCOMPRESSIBLE = "MEMCG_ZSWAP_B", "MEMCG_ZSWAPPED", "MEMCG_ZSWAP_INCOMP"
_DETAILS = ("compressed", "incompressible")
UNITS: dict[str, Unit] = {LENGTH: "bytes", ENTRIES: "pages", INCOMPRESSIBLE: "pages"}


def zswap_rows(snapshot: Snapshot) -> list[Row]:
    """Compare zswap entries with their counters, by memcg."""
    entries = snapshot.by_memcg("zswap")
    incompressible = snapshot.by_memcg("zswap", "incompressible")
    missing = missing_if(snapshot.why_missing("zswap"))
    rows = []
    for item, unit in UNITS.items():
        if item not in snapshot.features.items:
            continue
        for memcg in snapshot.live():
            amount = (incompressible if item == INCOMPRESSIBLE else entries)[memcg.address]
            found = {"zswap": amount.bytes if item == LENGTH else amount.charges}
            rows.append(
                counter_row(snapshot, RowKey("zswap", item, unit, memcg.address), found, missing)
            )
    return rows


def _not_kept(snapshot: Snapshot) -> str | None:
    if not snapshot.features.default_hierarchy:
        return "zswap is charged on cgroup v2 only"
    return None if snapshot.features.zswap else "this kernel was built without zswap"


CHECK = Check(
    name="zswap",
    counter="`MEMCG_ZSWAP_B`, `MEMCG_ZSWAPPED`, `MEMCG_ZSWAP_INCOMP`",
    unit="bytes, pages",
    found="compressed length and number of zswap entries",
    sources=("zswap",),
    places=("folded", "pending_cpu"),
    rows=zswap_rows,
    items=tuple(UNITS),
    not_kept=_not_kept,
    half_done=HalfDone(
        pattern(r"zswap|zs_|swap_|shrink_memcg_cb", FLUSH),
        lambda snapshot: snapshot.image.page_size,
        # zswap_store() and zswap_entry_free() charge and uncharge one entry after the other, and
        # need it afterwards.
        entries=1,
        of_held=True,
        kinds=["zswap"],
        details=(
            *((item, detail) for item in (LENGTH, ENTRIES) for detail in _DETAILS),
            (INCOMPRESSIBLE, "incompressible"),
        ),
    ),
    charges=Charges(("zswap",)),
)
