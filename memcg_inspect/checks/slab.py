# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``slab``
-----------------

For each memcg, node and kind of slab memory:

    own(m, n, item) + what the object stocks hold of it
        = sum of ``s->size + sizeof(void *)`` over the charged objects in slabs on n
        + (unreclaimable only) sum of the large kmallocs on n

Large kmallocs are whole pages and carry no pointer beside them, so they count as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from memcg_inspect.checks.rows import make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Row

__all__ = ("ITEMS", "slab_rows")

#: The counter of each kind of slab memory.
ITEMS = {
    "reclaimable": "NR_SLAB_RECLAIMABLE_B",
    "unreclaimable": "NR_SLAB_UNRECLAIMABLE_B",
}

_OWNERS = "owners of compound pages, which may be large kmallocs or not, are not in the image"

Cell = tuple[int, int, str]


def slab_rows(snapshot: Snapshot) -> list[Row]:
    """Hold the slab objects against the slab counters, by memcg, node and kind."""
    # What marks no large kmallocs lets other compound pages pass for them.
    guessed = not snapshot.features.large_kmalloc_type and not snapshot.complete("compound")
    no_stock = None if snapshot.complete("stock") else "object stocks are not all in the image"
    found, stock = _found(snapshot), _in_stock(snapshot)
    rows = []
    for memcg in snapshot.live():
        for nid in snapshot.image.nodes:
            for detail, item in ITEMS.items():
                cell = (memcg.address, nid, detail)
                claim = snapshot.counters.own(memcg.address, item, nid)
                stat = snapshot.counters.stat(memcg.address, item, nid)
                rows.append(
                    make_row(
                        "slab",
                        memcg=memcg.address,
                        nid=nid,
                        item=item,
                        unit="bytes",
                        found=found.get(cell, {"slab": 0}),
                        claimed=None
                        if claim is None or not snapshot.complete("stock")
                        else {
                            "folded": claim.folded,
                            "pending_cpu": claim.pending,
                            "stock": stock.get(cell, 0),
                        },
                        missing=_OWNERS
                        if guessed and detail == "unreclaimable"
                        else _why_missing(snapshot, detail, nid),
                        missing_hides_both=guessed and detail == "unreclaimable",
                        unread=no_stock or snapshot.unread(memcg.address),
                        hierarchy=stat.state if stat is not None else None,
                    )
                )
    return rows


def _found(snapshot: Snapshot) -> Mapping[Cell, dict[str, int]]:
    cells: defaultdict[Cell, dict[str, int]] = defaultdict(lambda: {"slab": 0})
    for entry, amount in snapshot.ledger:
        payer = snapshot.payer(entry.payer)
        if payer is None:
            continue
        if entry.kind == "slab":
            cells[payer, entry.nid, entry.detail]["slab"] += amount.bytes
        elif entry.kind == "kmem" and entry.detail == "large_kmalloc":
            cell = cells[payer, entry.nid, "unreclaimable"]
            cell["large_kmalloc"] = cell.get("large_kmalloc", 0) + amount.bytes
    return cells


def _in_stock(snapshot: Snapshot) -> Mapping[Cell, int]:
    cells: defaultdict[Cell, int] = defaultdict(int)
    for stock in snapshot.stocks:
        payer = snapshot.payer(stock.objcg)
        if payer is not None and stock.nid is not None:
            cells[payer, stock.nid, "reclaimable"] += stock.reclaimable
            cells[payer, stock.nid, "unreclaimable"] += stock.unreclaimable
    return cells


def _why_missing(snapshot: Snapshot, detail: str, nid: int) -> str | None:
    if snapshot.ledger.may_miss("slab", detail, nid):
        return "objcgs of slabs on this node are not in the image"
    missing = snapshot.why_missing("slab", detail, nid)
    if missing is None and detail == "unreclaimable":
        missing = snapshot.why_missing("kmem", "large_kmalloc", nid)
    return missing
