# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``slab``
-----------------

For each memcg, node and kind of slab memory:

    own(m, n, item) + changes of it in object stocks
        = sum of ``s->size + sizeof(void *)`` over the charged objects in slabs on n
        + (unreclaimable only) sum of the large kmallocs on n

A large kmalloc is whole pages. ``__memcg_kmem_charge_page()`` charges no pointer for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from memcg_inspect.checks.check import Charges, Check
from memcg_inspect.checks.half_done import (
    FLUSH,
    SLAB,
    HalfDone,
    block_pages,
    largest_object,
    pattern,
    slab_amounts,
)
from memcg_inspect.checks.rows import Missing, RowKey, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "ITEMS", "slab_rows")

#: The counter of each kind of slab memory.
ITEMS = {
    "reclaimable": "NR_SLAB_RECLAIMABLE_B",
    "unreclaimable": "NR_SLAB_UNRECLAIMABLE_B",
}

_OWNERS = "owners of compound pages, which tell them from large kmallocs, are not in the image"

Cell = tuple[int, int, str]


def slab_rows(snapshot: Snapshot) -> list[Row]:
    """Compare slab objects and large kmallocs with their counters, by memcg, node and item."""
    found, stock = _found(snapshot), _in_stock(snapshot)
    no_stock = None if stock is not None else "object stocks are not all in the image"
    missing = {
        (nid, detail): _missing(snapshot, detail, nid)
        for nid in snapshot.image.nodes
        for detail in ITEMS
    }
    rows = []
    for memcg in snapshot.live():
        for nid in snapshot.image.nodes:
            for detail, item in ITEMS.items():
                cell = (memcg.address, nid, detail)
                claimed = snapshot.own(memcg.address, item, nid)
                if claimed is not None and stock is not None:
                    claimed["stock"] = stock.get(cell, 0)
                rows.append(
                    make_row(
                        RowKey("slab", item, "bytes", memcg.address, nid),
                        found.get(cell, {"slab": 0}),
                        None if stock is None else claimed,
                        missing[nid, detail],
                        unread=no_stock or snapshot.unread(memcg.address),
                        hierarchy=snapshot.folded(memcg.address, item, nid),
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


def _in_stock(snapshot: Snapshot) -> Mapping[Cell, int] | None:
    """Return the bytes that object stocks hold; ``None`` if one could not be read."""
    if not snapshot.complete("stock"):
        return None
    cells: defaultdict[Cell, int] = defaultdict(int)
    for stock in snapshot.stocks:
        payer = snapshot.payer(stock.objcg)
        if payer is not None and stock.nid is not None:
            cells[payer, stock.nid, "reclaimable"] += stock.reclaimable
            cells[payer, stock.nid, "unreclaimable"] += stock.unreclaimable
    return cells


def _missing(snapshot: Snapshot, detail: str, nid: int) -> Missing | None:
    marked = snapshot.features.large_kmalloc_type
    if detail == "unreclaimable" and not marked and not snapshot.complete("compound"):
        # Before PGTY_large_kmalloc (v6.15), other compound pages may pass for large kmallocs.
        return Missing(_OWNERS, either_way=True)
    if snapshot.ledger.may_miss("slab", detail, nid):
        return Missing("objcgs of slabs on this node are not in the image")
    why = snapshot.why_missing("slab", detail, nid)
    if why is None and detail == "unreclaimable":
        why = snapshot.why_missing("kmem", "large_kmalloc", nid)
    return missing_if(why)


CHECK = Check(
    name="slab",
    counter="`NR_SLAB_RECLAIMABLE_B`, `NR_SLAB_UNRECLAIMABLE_B`, by node",
    unit="bytes",
    found="slab objects and large kmallocs",
    sources=("slab", "large_kmalloc"),
    places=("folded", "pending_cpu", "stock"),
    rows=slab_rows,
    items=tuple(ITEMS.values()),
    half_done=HalfDone(
        pattern(SLAB, FLUSH),
        largest_object,
        folios=block_pages,
        details=tuple((item, detail) for detail, item in ITEMS.items()),
        kinds=("object", "cache", "kmem"),
        amounts=slab_amounts,
        unpaid=True,
    ),
    charges=Charges(("slab",), {item: detail for detail, item in ITEMS.items()}),
)
