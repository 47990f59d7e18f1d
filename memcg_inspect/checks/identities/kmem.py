# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``kmem``
-----------------

For each memcg, all kernel memory: pages with ``MEMCG_DATA_KMEM``, and the pages that objects
are charged from:

    own(m, MEMCG_KMEM) = kmem pages + (slab + percpu + zswap + stock + nr_charged_bytes) / PAGE_SIZE

On a kernel that accounts by node the counter is ``NR_KMEM``, by memcg and node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import (
    CHARGING,
    FLUSH,
    OBJCG,
    OBJECT_KINDS,
    PAGES,
    STACK,
    VMALLOC,
    HalfDone,
    block_pages,
    largest_kmem,
    pattern,
    stock_pages,
)
from memcg_inspect.checks.ledger import Amount
from memcg_inspect.checks.rows import RowKey, counter_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "HALF_DONE", "kmem_pages", "kmem_rows", "why_kmem_missing")

BY_MEMCG, BY_NODE = "MEMCG_KMEM", "NR_KMEM"


def kmem_pages(snapshot: Snapshot) -> Mapping[int, dict[str, int]]:
    """Return all kernel memory found, in pages, by memcg and then by source."""
    page_size = snapshot.image.page_size
    objects: defaultdict[int | None, int] = defaultdict(int)
    for address, found in snapshot.objcg_bytes.items():
        objects[snapshot.payer(address)] += sum(found.values())
    pages = snapshot.by_memcg("kmem")
    return {
        memcg.address: {
            "kmem_pages": pages[memcg.address].bytes // page_size,
            # If these are not whole pages, ``objcg_bytes`` differs and names the obj_cgroup.
            "objects": round(objects[memcg.address] / page_size),
        }
        for memcg in snapshot.live()
    }


def why_kmem_missing(snapshot: Snapshot, memcg: int) -> str | None:
    """Return why kernel memory of a memcg may be missing from what was found."""
    return snapshot.why_missing("kmem") or snapshot.why_objects_missing(memcg)


def kmem_rows(snapshot: Snapshot) -> list[Row]:
    """Compare all kernel memory with its counter, by memcg, and by node if the counter is."""
    if BY_NODE in snapshot.features.items:
        return [
            _kmem_row(snapshot, RowKey("kmem", BY_NODE, "pages", memcg, nid), found)
            for (memcg, nid), found in _pages_by_node(snapshot).items()
        ]
    return [
        _kmem_row(snapshot, RowKey("kmem", BY_MEMCG, "pages", memcg), found)
        for memcg, found in kmem_pages(snapshot).items()
    ]


def _kmem_row(snapshot: Snapshot, key: RowKey, found: Mapping[str, int]) -> Row:
    return counter_row(snapshot, key, found, missing_if(why_kmem_missing(snapshot, key.memcg or 0)))


def _pages_by_node(snapshot: Snapshot) -> dict[tuple[int, int], dict[str, int]]:
    """
    Return all kernel memory found, in pages, by memcg and node, and then by source.

    Pages are added up by their node, and objects by the node of the obj_cgroup that pays. On a
    kernel that accounts by node, that is also the node of the objects.
    """
    page_size = snapshot.image.page_size
    pages = snapshot.by_node("kmem")
    objects: defaultdict[tuple[int | None, int | None], int] = defaultdict(int)
    for address, found in snapshot.objcg_bytes.items():
        objects[snapshot.payer(address), snapshot.objcgs[address].nid] += sum(found.values())
    cells = [(m.address, nid) for m in snapshot.live() for nid in snapshot.image.nodes]
    return {
        cell: {
            "kmem_pages": pages.get(cell, Amount(0, 0)).bytes // page_size,
            "objects": round(objects[cell] / page_size),
        }
        for cell in cells
    }


HALF_DONE = HalfDone(
    pattern(OBJCG, PAGES, STACK, VMALLOC, FLUSH),
    largest_kmem,
    folios=block_pages,
    vmalloc=True,
    in_pages=True,
    kinds=(*OBJECT_KINDS, "kmem", "folio", "batch"),
    amounts=stock_pages,
    unpaid=True,
    only_in=pattern(CHARGING),
    shows_in=("memory.usage",),
)

CHECK = Check(
    name="kmem",
    counter="`MEMCG_KMEM`, or `NR_KMEM` by node",
    unit="pages",
    found="pages charged as kernel memory, and the whole pages that objects are charged from",
    sources=("kmem_pages", "objects"),
    places=("folded", "pending_cpu"),
    rows=kmem_rows,
    items=(BY_MEMCG, BY_NODE),
    by_node_rule=True,
    half_done=HALF_DONE,
)
