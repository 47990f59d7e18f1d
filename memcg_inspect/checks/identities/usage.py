# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``usage``
------------------

For each memcg except the root: its page counter is the sum of its user pages and page cache, its
kernel memory, the memory of its sockets, and the pages that CPUs have charged in advance
(``memcg_stock``). A page counter includes the descendants of the memcg. Those of the children are
subtracted before the comparison.
"""

from __future__ import annotations

from collections import Counter

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import (
    CHARGING,
    HUGETLB,
    LRU,
    OBJCG,
    OBJECT_KINDS,
    PAGES,
    SOCK,
    STACK,
    VMALLOC,
    HalfDone,
    batch_pages,
    charge_batches,
    folio_pages,
    pattern,
)
from memcg_inspect.checks.identities.kmem import kmem_pages, why_kmem_missing
from memcg_inspect.checks.identities.sock import sock_doubt, sock_pages
from memcg_inspect.checks.moving_charges import being_moved
from memcg_inspect.checks.page_counters import own_usage, page_counter_row
from memcg_inspect.checks.rows import RowKey, doubted, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "charged_in_advance", "usage_rows")


def usage_rows(snapshot: Snapshot) -> list[Row]:
    """Compare everything a memcg is charged for with its page counter."""
    page_size, lru, sock = snapshot.image.page_size, snapshot.by_memcg("lru"), sock_pages(snapshot)
    kmem, own, stock = (
        kmem_pages(snapshot),
        own_usage(snapshot, snapshot.usage),
        charged_in_advance(snapshot),
    )
    rows = []
    for memcg in snapshot.live():
        if memcg.parent is None:
            continue  # the root's pages are not charged to it
        address = memcg.address
        found = {"lru": lru[address].bytes // page_size, "kmem": sum(kmem[address].values())}
        if snapshot.features.default_hierarchy:
            # cgroup v1 charges sockets to a page counter of their own (memcg->tcpmem).
            found["sock"] = sock[address]
        found["stock"] = stock[address]
        row = page_counter_row(
            snapshot,
            RowKey("usage", "memory.usage", "pages", address),
            found,
            own[address],
            snapshot.usage,
            missing_if(_why_missing(snapshot, address)),
        )
        if "sock" in found:
            row = doubted(row, sock_doubt(snapshot, address))
        rows.append(row)
    return rows


def charged_in_advance(snapshot: Snapshot) -> Counter[int]:
    """Return the pages that CPUs have charged in advance, by memcg that pays."""
    stock: Counter[int] = Counter()
    for charge in snapshot.charge_stocks:
        payer = snapshot.payer(charge.memcg)
        if payer is not None:
            stock[payer] += charge.nr_pages
    return stock


def _why_missing(snapshot: Snapshot, memcg: int) -> str | None:
    why = why_kmem_missing(snapshot, memcg) or snapshot.why_missing("lru")
    if why is None and snapshot.features.default_hierarchy:
        why = snapshot.why_missing("sock")
    if why is None and not snapshot.complete("charge_stock"):
        why = "charge stocks are not all in the image"
    if why is None and not snapshot.complete("moving"):
        why = "what a task moves to another memcg is not in the image"
    return why


CHECK = Check(
    name="usage",
    counter="the page counter behind `memory.current`",
    unit="pages",
    found=(
        "user pages and page cache, kernel memory, sockets, and pages that CPUs have charged in"
        " advance"
    ),
    sources=("lru", "kmem", "sock", "stock"),
    places=("page_counter",),
    rows=usage_rows,
    page_counters=("memory",),
    of_subtrees=True,
    explain=being_moved,
    half_done=HalfDone(
        pattern(OBJCG, PAGES, STACK, VMALLOC, LRU, SOCK, HUGETLB),
        batch_pages,
        folios=folio_pages,
        vmalloc=True,
        kinds=(*OBJECT_KINDS, "kmem", "folio", "batch"),
        amounts=charge_batches,
        unpaid=True,
        only_in=pattern(CHARGING, HUGETLB),
        shows_in=("MEMCG_KMEM", "NR_KMEM"),
    ),
)
