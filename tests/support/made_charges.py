# SPDX-License-Identifier: LGPL-2.1-or-later
"""A snapshot made by hand, in which every identity holds."""

from __future__ import annotations

from typing import Any

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import ChargeStock, Objcg, ObjStock, Stat
from support.made import (
    DEAD,
    OBJCG_A,
    OBJCG_B,
    OBJCG_DEAD,
    ROOT,
    A,
    B,
    family,
    features,
    ledger,
    snapshot,
)

PAGE = 4096

CHARGES = {
    # 3 stacks of 4 pages on node 0, 1 on node 1; a page table; 5 pages of vmalloc; 2 others
    (OBJCG_A, "kmem", "stack", 0): (12 * PAGE, 12),
    (OBJCG_A, "kmem", "stack", 1): (4 * PAGE, 4),
    (OBJCG_A, "kmem", "table", 1): (PAGE, 1),
    (OBJCG_A, "kmem", "vmalloc", 0): (5 * PAGE, 5),
    (OBJCG_DEAD, "kmem", "other", 0): (2 * PAGE, 1),
    # 1000 + 500 + 200 bytes, 300 in a stock and 2096 left over: 4096, one page
    (OBJCG_A, "slab", "reclaimable", 0): (1000, 5),
    (OBJCG_A, "percpu", "data", 0): (400, 1),
    (OBJCG_A, "percpu", "metadata", 1): (100, 0),
    (OBJCG_A, "zswap", "compressed", 1): (200, 1),
    # two entries, one of which did not compress: 4096 + 1096, and 3000 left over: two pages
    (OBJCG_B, "zswap", "compressed", 0): (1096, 1),
    (OBJCG_B, "zswap", "incompressible", 0): (PAGE, 1),
    # user pages
    (OBJCG_B, "lru", "lru", 0): (10 * PAGE, 7),
    (OBJCG_DEAD, "lru", "lru", 1): (3 * PAGE, 3),
    # sockets are charged to memcgs
    (B, "sock", "TCP", -1): (6 * PAGE, 2),
    (DEAD, "sock", "UDP", -1): (PAGE, 1),
}

OBJCGS = {
    # 12 + 4 + 1 + 5 pages, 5 objects, 1 percpu allocation, 1 entry, 1 stock, 2 tasks, 1 of the
    # memcg's own
    OBJCG_A: Objcg(OBJCG_A, A, 0, False, 2096, refs=33, memcg_refs=1),
    # 2 entries, 7 folios, 1 of the memcg's own
    OBJCG_B: Objcg(OBJCG_B, B, 0, False, 3000, refs=10, memcg_refs=1),
    # 1 compound page, 3 folios
    OBJCG_DEAD: Objcg(OBJCG_DEAD, A, 0, False, 0, refs=4, memcg_refs=0),
}

STOCKS = [ObjStock(0, 0, OBJCG_A, 300, None, 0, 0, False)]


def own(**values: int) -> dict[str, Stat]:
    """Return counters that have just been folded: nothing is pending."""
    return {name: Stat(value, 0, 0) for name, value in values.items()}


# /a: 22 pages and 2 of the removed memcg, 1 page of objects; /a/b: 2 pages of objects. The root has
# no charges besides these.
_WHOLE_TREE = own(
    MEMCG_KMEM=27,
    MEMCG_PERCPU_B=500,
    MEMCG_ZSWAP_B=5392,
    MEMCG_ZSWAPPED=3,
    MEMCG_ZSWAP_INCOMP=1,
    MEMCG_SOCK=7,
    MEMCG_VMALLOC=5,
)
MEMCG_STATS = {
    ROOT: _WHOLE_TREE,
    A: _WHOLE_TREE,
    B: own(
        MEMCG_KMEM=2,
        MEMCG_PERCPU_B=0,
        MEMCG_ZSWAP_B=5192,
        MEMCG_ZSWAPPED=2,
        MEMCG_ZSWAP_INCOMP=1,
        MEMCG_SOCK=6,
        MEMCG_VMALLOC=0,
    ),
}
MEMCG_STATS[DEAD] = dict.fromkeys(MEMCG_STATS[B], Stat(0, 0, 0))

NODE_ITEMS = ("NR_KERNEL_STACK_KB", "NR_PAGETABLE", "NR_VMALLOC")


def lruvec_stats() -> dict[tuple[int, int], dict[str, Stat]]:
    """Return the node counters of ``CHARGES``: all are of ``/a``, and so of ``/``, too."""
    made = {
        (memcg, nid): dict.fromkeys(NODE_ITEMS, Stat(0, 0, 0))
        for memcg in family()
        for nid in (0, 1)
    }
    for memcg in (ROOT, A):
        # 12 pages of 4 KiB; 4 pages
        made[memcg, 0] = own(NR_KERNEL_STACK_KB=48, NR_PAGETABLE=0, NR_VMALLOC=5)
        made[memcg, 1] = own(NR_KERNEL_STACK_KB=16, NR_PAGETABLE=1, NR_VMALLOC=0)
    return made


def image(**other: Any) -> Snapshot:
    """Return the snapshot, with some parts replaced."""
    what: dict[str, Any] = {
        "charges": ledger(CHARGES),
        "objcgs": OBJCGS,
        "memcg_stats": MEMCG_STATS,
        "lruvec_stats": lruvec_stats(),
        "stocks": STOCKS,
        "references": {"task": {OBJCG_A: 2}},
        "features": features(*MEMCG_STATS[B], *NODE_ITEMS),
        # /a: 3 user pages, 25 of kernel memory, 1 of sockets, 8 in stock. /a/b: 10, 2, 6, 0.
        "usage": {ROOT: 999, A: 3 + 25 + 1 + 8 + 18, B: 10 + 2 + 6, DEAD: 12345},
        "charge_stocks": [ChargeStock(0, A, 5), ChargeStock(1, DEAD, 3), ChargeStock(1, 0xBAD, 9)],
        **other,
    }
    return snapshot(**what)
