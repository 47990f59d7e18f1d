# SPDX-License-Identifier: LGPL-2.1-or-later
"""What memcgs and their descendants are charged for, by what it is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from memcg_inspect.checks.identities.sock import sock_pages
from memcg_inspect.checks.identities.usage import charged_in_advance
from memcg_inspect.checks.ledger import Entry
from memcg_inspect.checks.snapshot import OBJECTS, Snapshot
from memcg_inspect.model import NUMA_NO_NODE

__all__ = ("KINDS", "charges_of_subtrees")

#: What memory is charged for, in the order of the output.
KINDS = (
    "user",
    "slab",
    "percpu",
    "zswap",
    "kernel_stack",
    "pagetables",
    "vmalloc",
    "other",
    "unused",
    "sock",
    "stock",
)
#: Kernel memory in pages, by detail of the ledger. All other details are ``other``.
_PAGES = {
    "large_kmalloc": "slab",
    "stack": "kernel_stack",
    "table": "pagetables",
    "vmalloc": "vmalloc",
}

#: Memcg, node and kind.
Cell = tuple[int, int, str]


def charges_of_subtrees(snapshot: Snapshot) -> Mapping[Cell, int]:
    """
    Add up what is charged to each memcg and its descendants.

    :return: bytes by memcg, node (``NUMA_NO_NODE`` if it has none) and one of :data:`KINDS`
    """
    found: defaultdict[Cell, int] = defaultdict(int)
    for (memcg, nid, kind), size in _own(snapshot).items():
        for above in snapshot.ancestors(memcg):
            found[above, nid, kind] += size
    return found


def _own(snapshot: Snapshot) -> Counter[Cell]:
    """Return what is charged to each memcg that was not removed, without its descendants."""
    page, own = snapshot.image.page_size, Counter[Cell]()
    for entry, amount in snapshot.ledger:
        payer, kind = snapshot.payer(entry.payer), _kind(entry)
        if payer is not None and kind is not None:
            own[payer, entry.nid, kind] += amount.bytes
    for address, found in snapshot.objcg_bytes.items():
        payer, objcg = snapshot.payer(address), snapshot.objcgs[address]
        if payer is not None and not objcg.is_root:
            # Whole pages are charged for objects. What no object uses is in the stock of a CPU, or
            # in the obj_cgroup.
            rest = sum(found.values()) - sum(found[kind] for kind in OBJECTS)
            own[payer, NUMA_NO_NODE, "unused"] += rest
    # cgroup v1 charges sockets to a page counter of their own (memcg->tcpmem).
    if snapshot.features.default_hierarchy:
        for memcg, pages in sock_pages(snapshot).items():
            own[memcg, NUMA_NO_NODE, "sock"] += pages * page
    for memcg, pages in charged_in_advance(snapshot).items():
        own[memcg, NUMA_NO_NODE, "stock"] += pages * page
    return own


def _kind(entry: Entry) -> str | None:
    if entry.kind == "kmem":
        return _PAGES.get(entry.detail, "other")
    return {"lru": "user", "slab": "slab", "percpu": "percpu", "zswap": "zswap"}.get(entry.kind)
