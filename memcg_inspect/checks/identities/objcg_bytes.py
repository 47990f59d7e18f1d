# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``objcg_bytes``
------------------------

For each obj_cgroup: ``obj_cgroup_charge()`` charges whole pages and hands out bytes of them. So the
bytes of its objects, the bytes in object stocks, and ``nr_charged_bytes`` add up to whole pages.
This needs no counter.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Charges, Check
from memcg_inspect.checks.half_done import OBJCG, OBJECT_KINDS, HalfDone, pattern, stock_bytes
from memcg_inspect.checks.rows import Missing, RowKey, make_row
from memcg_inspect.checks.snapshot import OBJECTS, Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "objcg_rows")


def objcg_rows(snapshot: Snapshot) -> list[Row]:
    """Check that the bytes of each obj_cgroup add up to whole pages."""
    missing, page = _missing(snapshot), snapshot.image.page_size
    rows = []
    for address, found in snapshot.objcg_bytes.items():
        objcg = snapshot.objcgs[address]
        if objcg.is_root:
            continue  # never charged
        # Compare with the nearest number of pages, so that the difference is as small as possible.
        whole = (sum(found.values()) + page // 2) // page * page
        key = RowKey(
            "objcg_bytes",
            "bytes of whole pages",
            "bytes",
            snapshot.payer(address),
            objcg.nid,
            address,
        )
        rows.append(make_row(key, found, {"whole_pages": whole}, missing))
    return rows


def _missing(snapshot: Snapshot) -> Missing | None:
    for kind in OBJECTS:
        if snapshot.ledger.may_miss(kind):
            return Missing(f"{kind} memory is not all in the image", either_way=True)
    if not snapshot.complete("stock"):
        return Missing("object stocks are not all in the image", either_way=True)
    return None


def _sentence(row: Row) -> str:
    difference = row.off
    off = "short of" if difference > 0 else "beyond"
    return (
        f"the bytes charged to obj_cgroup {row.objcg:#x} are {abs(difference):,} {off} whole pages"
    )


CHECK = Check(
    name="objcg_bytes",
    counter="none: whole pages",
    unit="bytes",
    found="bytes of objects, and the unused rest of their pages, for each `obj_cgroup`",
    sources=("slab", "percpu", "zswap", "stock", "nr_charged_bytes"),
    places=("whole_pages",),
    rows=objcg_rows,
    by_node_rule=True,
    half_done=HalfDone(
        pattern(OBJCG),
        # Rows differ from the nearest number of pages.
        lambda snapshot: snapshot.image.page_size // 2,
        kinds=OBJECT_KINDS,
        amounts=stock_bytes,
        unpaid=True,
        modulo=True,
    ),
    charges=Charges(OBJECTS, modulo_page=True),
    sentence=_sentence,
)
