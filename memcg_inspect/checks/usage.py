# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identities ``sock`` and ``usage``
---------------------------------

``sock``: ``MEMCG_SOCK`` of each memcg is what its sockets have charged.

``usage``: the page counter of each memcg but the root is its user pages and page cache, its
kernel memory, its sockets, and what CPUs have charged in advance. A page counter includes
the memcg's descendants, so what is compared is what is its own.
"""

from __future__ import annotations

from collections import Counter

from memcg_inspect.checks.kmem import kmem_pages, why_kmem_missing
from memcg_inspect.checks.rows import make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Row

__all__ = ("sock_rows", "usage_rows")


def sock_rows(snapshot: Snapshot) -> list[Row]:
    """Hold the memory of sockets against ``MEMCG_SOCK``, by memcg."""
    found = snapshot.by_memcg("sock")
    missing = snapshot.why_missing("sock")
    return [
        make_row(
            "sock",
            memcg=memcg.address,
            nid=None,
            item="MEMCG_SOCK",
            unit="pages",
            found={"sock": -(-found[memcg.address].bytes // snapshot.image.page_size)},
            claimed=snapshot.own(memcg.address, "MEMCG_SOCK"),
            missing=missing,
            unread=snapshot.unread(memcg.address),
            hierarchy=snapshot.folded(memcg.address, "MEMCG_SOCK"),
        )
        for memcg in snapshot.live()
    ]


def usage_rows(snapshot: Snapshot) -> list[Row]:
    """Hold everything a memcg is charged for against its page counter."""
    page_size, has_sock = snapshot.image.page_size, snapshot.features.default_hierarchy
    lru, sock = snapshot.by_memcg("lru"), snapshot.by_memcg("sock")
    kmem, own = kmem_pages(snapshot), _own_usage(snapshot)
    stock: Counter[int] = Counter()
    for charge in snapshot.charge_stocks:
        payer = snapshot.payer(charge.memcg)
        if payer is not None:
            stock[payer] += charge.nr_pages
    rows = []
    for memcg in snapshot.live():
        if memcg.parent is None:
            continue  # the root's pages are not charged to it
        usage = own.get(memcg.address)
        rows.append(
            make_row(
                "usage",
                memcg=memcg.address,
                nid=None,
                item="memory.usage",
                unit="pages",
                found={
                    "lru": lru[memcg.address].bytes // page_size,
                    "kmem": sum(kmem[memcg.address].values()),
                    # cgroup v1 has a page counter for sockets alone
                    **({"sock": -(-sock[memcg.address].bytes // page_size)} if has_sock else {}),
                    "stock": stock[memcg.address],
                },
                claimed=None if usage is None else {"page_counter": usage},
                missing=_why_missing(snapshot, memcg.address),
                unread=snapshot.unread(memcg.address),
                hierarchy=snapshot.usage.get(memcg.address),
            )
        )
    return rows


def _own_usage(snapshot: Snapshot) -> dict[int, int | None]:
    own: dict[int, int | None] = {m.address: snapshot.usage.get(m.address) for m in snapshot.live()}
    for memcg in snapshot.live():
        if memcg.parent is None:
            continue
        above, usage = snapshot.memcgs[memcg.parent].payer, snapshot.usage.get(memcg.address)
        whole = own[above]
        own[above] = None if whole is None or usage is None else whole - usage
    return own | dict.fromkeys(snapshot.counters.partial)


def _why_missing(snapshot: Snapshot, memcg: int) -> str | None:
    missing = why_kmem_missing(snapshot, memcg) or snapshot.why_missing("lru")
    if missing is None and snapshot.features.default_hierarchy:
        missing = snapshot.why_missing("sock")
    if missing is None and not snapshot.complete("charge_stock"):
        missing = "charge stocks are not all in the image"
    return missing
