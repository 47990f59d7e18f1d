# SPDX-License-Identifier: LGPL-2.1-or-later
"""What memcgs and their descendants are charged for, by what it is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from memcg_inspect.checks.identities.sock import sock_pages
from memcg_inspect.checks.identities.usage import charged_in_advance, usage_rows
from memcg_inspect.checks.kernel_pages import missing_areas
from memcg_inspect.checks.ledger import ChargeKind, Entry
from memcg_inspect.checks.snapshot import OBJECTS, Snapshot
from memcg_inspect.model import NUMA_NO_NODE
from memcg_inspect.tables import NotRead

__all__ = ("KINDS", "Subtrees", "charges_of_subtrees")

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

#: Kinds that the ledger has by the same or another name.
_LEDGER: dict[str, ChargeKind] = {
    "user": "lru",
    "slab": "slab",
    "percpu": "percpu",
    "zswap": "zswap",
    "sock": "sock",
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


class Subtrees:
    """
    What memcgs and their descendants are charged for, and what may be missing from it.

    :ivar charges: see :func:`charges_of_subtrees`
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.charges = charges_of_subtrees(snapshot)
        self._partial = self._with_ancestors(snapshot.counters.partial)
        self._without_objcgs = self._with_ancestors(snapshot.unreadable)

    def _with_ancestors(self, memcgs: Iterable[int]) -> frozenset[int]:
        found: set[int] = set()
        for memcg in memcgs:
            found.update(self._snapshot.ancestors(self._snapshot.payer(memcg)))
        return frozenset(found)

    def why_missing(self, memcg: int, kind: str, nid: int | None = None) -> str | None:
        """
        Return why an amount may not be what a memcg and its descendants are charged for.

        :param kind: one of :data:`KINDS`
        :param nid: ``None`` for all nodes
        :return: ``None`` if everything was read
        """
        if memcg in self._partial:
            return "memcgs below this one are not all in the image"
        if kind == "unused":
            return self._why_unused_missing(memcg)
        if kind == "stock":
            is_whole = self._snapshot.complete("charge_stock")
            return None if is_whole else "charge stocks are not all in the image"
        if kind in _LEDGER:
            why = self._snapshot.why_missing(_LEDGER[kind], None, nid)
            return why or (self._why_large_missing(nid) if kind == "slab" else None)
        if kind == "pagetables":
            return self._snapshot.why_missing("kmem", "table", nid)
        # Pages of an area that is not known pass for other pages.
        missing = missing_areas(self._snapshot, "stack" if kind == "kernel_stack" else kind, nid)
        if missing is None and kind == "other":
            return self._snapshot.why_missing("kmem", None, nid)
        return None if missing is None else missing.reason

    def _why_unused_missing(self, memcg: int) -> str | None:
        for kind in OBJECTS:
            why = self._snapshot.why_missing(kind)
            if why is not None:
                return why
        if not self._snapshot.complete("stock"):
            return "object stocks are not all in the image"
        is_unread = memcg in self._without_objcgs
        return "its obj_cgroups are not all in the image" if is_unread else None

    def _why_large_missing(self, nid: int | None) -> str | None:
        """Return why large kmallocs may be missing, or what is none may be among them."""
        marked = self._snapshot.features.large_kmalloc_type
        if not marked and not self._snapshot.complete("compound"):
            return "other users of compound pages are not all in the image"
        return self._snapshot.why_missing("kmem", "large_kmalloc", nid)

    def not_found(self) -> Mapping[int, int | NotRead]:
        """
        Return the bytes of ``memory.current`` that were not found, by memcg.

        The root has no ``memory.current``, and is left out.
        """
        snapshot, left = self._snapshot, dict[int, int | NotRead]()
        for row in usage_rows(snapshot):
            unread = row.difference is None or row.status == "unverifiable"
            reason = NotRead(row.reason or "a page counter is not in the image")
            own = reason if unread else row.off * snapshot.image.page_size
            for above in snapshot.ancestors(row.memcg):
                if snapshot.memcgs[above].parent is None:
                    continue
                before = left.get(above, 0)
                if isinstance(before, int):
                    left[above] = own if isinstance(own, NotRead) else before + own
        return left
