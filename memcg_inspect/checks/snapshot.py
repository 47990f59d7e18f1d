# SPDX-License-Identifier: LGPL-2.1-or-later
"""The result of collection, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from memcg_inspect.checks.counters import Counters, CounterValue
from memcg_inspect.checks.ledger import Amount, ChargeKind, Ledger
from memcg_inspect.checks.profile import Profile
from memcg_inspect.checks.sockets import SockUsage
from memcg_inspect.model import (
    ChargeStock,
    Coverage,
    CssRefs,
    FreedPage,
    ImageInfo,
    LruLists,
    Memcg,
    Nodes,
    NodeStat,
    NodeUse,
    Objcg,
    ObjcgSet,
    ObjStock,
    PercpuUsage,
    PerNodeCharges,
    Running,
    SlabUsage,
    StackRef,
    Vectors,
)
from memcg_inspect.model_counters import LocalStat, Unfolded
from memcg_inspect.model_freeing import Transient
from memcg_inspect.model_hugetlb import Hugetlb
from memcg_inspect.model_kernel import Features, Limits, Moving
from memcg_inspect.model_pages import UserPages, Zones
from memcg_inspect.model_tasks import ActiveMemcg, CachedStackPage, TaskCharge

__all__ = ("OBJECTS", "Snapshot")

#: Kinds of charges that are bytes, not pages.
OBJECTS: tuple[ChargeKind, ...] = ("slab", "percpu", "zswap")


@dataclass(frozen=True)
class Snapshot:
    """
    The contents of an image that the checks need.

    Mappings by memcg and by obj_cgroup have their addresses as keys, ``struct mem_cgroup *`` and
    ``struct obj_cgroup *``.

    :ivar image: the image that was read
    :ivar features: what the kernel supports
    :ivar memcgs: all memcgs, parents first
    :ivar objcgs: all obj_cgroups
    :ivar objcg_sets: sets of obj_cgroups, by ``struct obj_cgroup_set *``
    :ivar ledger: all charges
    :ivar counters: the counters of memcgs
    :ivar limits: the most that one operation charges
    :ivar local: local counters (``state_local``) by memcg and node, ``None`` for the memcg itself,
        and by item; only of nodes with memory. Counters of which both are 0 are left out
    :ivar unfolded: changes of counters that are not folded yet, by memcg
    :ivar csses_since: by memcg, how many ``struct cgroup_subsys_state`` were made after it; memcgs
        for which it is not known are left out
    :ivar stocks: per-CPU stocks of bytes, ``struct obj_stock_pcp``
    :ivar charge_stocks: per-CPU stocks of pages, ``struct memcg_stock_pcp``
    :ivar usage: page counters by memcg, in pages, including descendants
    :ivar references: references to obj_cgroups that are not charges, by holder, then by
        obj_cgroup
    :ivar unknown_holders: what may hold more references to obj_cgroups of the same memcg, by
        obj_cgroup
    :ivar css: references to memcgs, by memcg. The root has none.
    :ivar css_holders: holders of references to memcgs that are not in *css*, by kind, then by
        memcg. Those that hold them for a moment are there only for memcgs whose rows differ.
    :ivar css_stacks: tasks whose stacks point to a memcg, by memcg. Only for memcgs with other
        references than were found
    :ivar css_others: why there may be holders of references to memcgs that are not read
    :ivar swap_entries: number of swap entries that are charged to each memcg. Memcgs whose IDs
        could not be read are left out
    :ivar page_counters: page counters other than ``memory`` by (memcg, member), in pages, including
        descendants
    :ivar swap_ids: number of swap entries by the ID that they record (``memcg->id.id``)
    :ivar transients: objects that are being freed and can hold a reference, by obj_cgroup; with 0,
        all released memcgs that were not freed
    :ivar unlisted_zswap: zswap entries in the trees that are on no LRU list, and not in the
        ledger, ``struct zswap_entry *``
    :ivar moving: what a task that moves to another memcg takes along; ``None`` if there is none
    :ivar running: what each CPU and each task that waits in the kernel was doing. Empty if nothing
        differs or is under way. On a running kernel, only tasks, in the last samples
    :ivar per_node: for :mod:`memcg_inspect.checks.pernode`; ``None`` on kernels that do not
        account kernel memory by node
    :ivar tasks: the memcg of each task, and the obj_cgroups that it caches
    :ivar active_memcgs: memcgs that are charged instead of a task's own
    :ivar cached_stacks: pages of cached kernel stacks; ``None`` if the kernel caches none
    :ivar vectors: vectors of obj_cgroups outside their slabs, by node of the slab
    :ivar sockets: sockets whose protocols account memory, by the memcg that they are charged to
    :ivar zones: zones, and the pages that they count
    :ivar lru: pages on LRU lists, and the sizes of the lists; ``None`` if they are unknown
    :ivar user_pages: pages that count in counters of user pages
    :ivar hugetlb: cgroups of the hugetlb controller, and the huge pages charged to them
    :ivar slab_usage: slab memory by node and cache, charged or not
    :ivar percpu_usage: percpu memory by node, charged or not
    :ivar freed: free pages that are still charged as kernel memory
    :ivar large_kmalloc: pages of large kmallocs by node, charged or not
    :ivar node_pages: pages of page tables, vmalloc areas and kernel stacks, charged or not, by use
        and node
    :ivar all_nodes: what the kernel keeps for all nodes together
    :ivar node_stats: counters of nodes by (node, item)
    :ivar profile: references to call sites; ``None`` if they were not read
    :ivar coverage: how much could be read, by subject
    :ivar unreadable: memcgs whose obj_cgroups could not all be read, including the obj_cgroups of
        the removed memcgs that they pay for
    """

    image: ImageInfo
    features: Features
    memcgs: Mapping[int, Memcg]
    objcgs: Mapping[int, Objcg]
    ledger: Ledger
    counters: Counters
    limits: Limits
    local: Mapping[tuple[int, int | None], Mapping[str, LocalStat]] = field(default_factory=dict)
    unfolded: Mapping[int, Unfolded] = field(default_factory=dict)
    csses_since: Mapping[int, int] = field(default_factory=dict)
    stocks: Sequence[ObjStock] = ()
    charge_stocks: Sequence[ChargeStock] = ()
    usage: Mapping[int, int] = field(default_factory=dict)
    references: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    unknown_holders: Mapping[int, str] = field(default_factory=dict)
    objcg_sets: Mapping[int, ObjcgSet] = field(default_factory=dict)
    css: Mapping[int, CssRefs] = field(default_factory=dict)
    css_holders: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    css_stacks: Mapping[int, Sequence[StackRef]] = field(default_factory=dict)
    css_others: str | None = None
    swap_entries: Mapping[int, int] = field(default_factory=dict)
    page_counters: Mapping[tuple[int, str], int] = field(default_factory=dict)
    swap_ids: Mapping[int, int] = field(default_factory=dict)
    transients: Mapping[int, Sequence[Transient]] = field(default_factory=dict)
    unlisted_zswap: Sequence[int] = ()
    moving: Moving | None = None
    running: Sequence[Running] = ()
    per_node: PerNodeCharges | None = None
    tasks: Sequence[TaskCharge] = ()
    active_memcgs: Sequence[ActiveMemcg] = ()
    cached_stacks: Sequence[CachedStackPage] | None = None
    vectors: Mapping[int, Vectors] = field(default_factory=dict)
    sockets: Mapping[int, SockUsage] = field(default_factory=dict)
    zones: Zones = Zones()
    lru: LruLists | None = None
    user_pages: UserPages = UserPages()
    hugetlb: Hugetlb = Hugetlb()
    slab_usage: tuple[SlabUsage, ...] = ()
    percpu_usage: tuple[PercpuUsage, ...] = ()
    freed: Sequence[FreedPage] = ()
    large_kmalloc: Mapping[int, int] = field(default_factory=dict)
    node_pages: Mapping[tuple[NodeUse, int], int] = field(default_factory=dict)
    all_nodes: Nodes = Nodes()
    node_stats: Mapping[tuple[int, str], NodeStat] = field(default_factory=dict)
    profile: Profile | None = None
    coverage: Mapping[str, Coverage] = field(default_factory=dict)
    unreadable: frozenset[int] = frozenset()

    @cached_property
    def _orphans(self) -> frozenset[tuple[ChargeKind, str, int]]:
        # An obj_cgroup that could not be read may belong to any memcg, and so may its charges. A
        # charge to a memcg that could not be read is known to be below a memcg in Counters.partial.
        if self.complete("memcgs", "objcgs"):
            return frozenset()
        to_memcgs = ("sock",) if self.features.lru_holds_objcg else ("sock", "lru")
        return frozenset(
            (entry.kind, entry.detail, entry.nid)
            for entry, _ in self.ledger
            if entry.payer not in self.objcgs and entry.kind not in to_memcgs
        )

    def why_missing(
        self, kind: ChargeKind, detail: str | None = None, nid: int | None = None
    ) -> str | None:
        """
        Return why charges of a kind may be missing from the charges of a memcg.

        :param detail: ``None`` for any
        :param nid: ``None`` for any
        :return: ``None`` if none is missing
        """
        if self.ledger.may_miss(kind, detail, nid):
            return f"{kind} memory is not all in the image"
        for orphan_kind, orphan_detail, orphan_nid in self._orphans:
            if (
                kind == orphan_kind
                and detail in (None, orphan_detail)
                and nid in (None, orphan_nid)
            ):
                return f"{kind} memory is charged to obj_cgroups that are not in the image"
        return None

    def why_objects_missing(self, memcg: int) -> str | None:
        """Return why charges of objects may be missing; ``None`` if none is."""
        for kind in OBJECTS:
            missing = self.why_missing(kind)
            if missing is not None:
                return missing
        if not self.complete("stock"):
            return "object stocks are not all in the image"
        return "its obj_cgroups are not all in the image" if memcg in self.unreadable else None

    @cached_property
    def objcg_bytes(self) -> Mapping[int, dict[str, int]]:
        """Bytes charged to each obj_cgroup, by kind of charge or stock."""
        found: dict[int, dict[str, int]] = {
            address: dict.fromkeys(OBJECTS, 0)
            | {"stock": 0, "nr_charged_bytes": objcg.nr_charged_bytes}
            for address, objcg in self.objcgs.items()
        }
        for entry, amount in self.ledger:
            if entry.kind in OBJECTS and entry.payer in found:
                found[entry.payer][entry.kind] += amount.bytes
        for stock in self.stocks:
            if stock.objcg in found:
                found[stock.objcg]["stock"] += stock.nr_bytes
        return found

    def unread(self, memcg: int) -> str:
        """Return why the own counter of a memcg is unknown."""
        if memcg in self.counters.partial:
            return "memcgs below this one, which its counter includes, are not all in the image"
        return "its counter, or that of a memcg below it, is not in the image"

    def complete(self, *subjects: str) -> bool:
        """Return whether everything could be read, by the coverage of some subjects."""
        return not any(self.coverage[s].unreadable for s in subjects if s in self.coverage)

    def payer(self, address: int) -> int | None:
        """
        Return the memcg whose counters include a charge today.

        :param address: ``struct obj_cgroup *`` or ``struct mem_cgroup *``
        :return: ``struct mem_cgroup *``; ``None`` if the address is neither
        """
        objcg = self.objcgs.get(address)
        memcg = self.memcgs.get(address if objcg is None else objcg.memcg)
        return None if memcg is None else memcg.payer

    def ancestors(self, memcg: int | None) -> Iterator[int]:
        """Return a memcg that was not removed, and its ancestors; none for ``None``."""
        while memcg is not None:
            yield memcg
            above = self.memcgs[memcg].parent
            memcg = None if above is None else self.memcgs[above].payer

    def live(self) -> list[Memcg]:
        """Return the memcgs that were not removed, parents first."""
        return [m for m in self.memcgs.values() if m.payer == m.address]

    def by_memcg(self, kind: ChargeKind, detail: str | None = None) -> Mapping[int, Amount]:
        """Return the charges of a kind by memcg."""
        found: defaultdict[int, Amount] = defaultdict(lambda: Amount(0, 0))
        for (memcg, _), amount in self.by_node(kind, detail).items():
            found[memcg] = found[memcg].plus(amount)
        return found

    def by_node(
        self, kind: ChargeKind, detail: str | None = None
    ) -> Mapping[tuple[int, int], Amount]:
        """Return the charges of a kind by (memcg, backing node)."""
        found: defaultdict[tuple[int, int], Amount] = defaultdict(lambda: Amount(0, 0))
        for entry, amount in self.ledger:
            if entry.kind == kind and detail in (None, entry.detail):
                payer = self.payer(entry.payer)
                if payer is not None:
                    found[payer, entry.nid] = found[payer, entry.nid].plus(amount)
        return found

    @cached_property
    def sockets_by_payer(self) -> Mapping[int, SockUsage]:
        """The sockets whose protocols account memory, by the memcg whose counter has them."""
        found: dict[int, SockUsage] = {}
        for address, usage in self.sockets.items():
            payer = self.payer(address)
            if payer is not None:
                found[payer] = found.get(payer, SockUsage(0)).plus(usage)
        return found

    def own(self, memcg: int, item: str, nid: int | None = None) -> dict[str, int] | None:
        """Return a counter of a memcg itself, in the parts that rows show; ``None`` if unknown."""
        claim = self.counters.own(memcg, item, nid)
        return None if claim is None else split(claim)

    def folded(self, memcg: int, item: str, nid: int | None = None) -> int | None:
        """Return a counter as ``memory.stat`` shows it without a flush; ``None`` if unknown."""
        stat = self.counters.stat(memcg, item, nid)
        return None if stat is None else stat.state


def split(claim: CounterValue) -> dict[str, int]:
    """Return the parts of a counter with the names that rows use."""
    return {"folded": claim.folded, "pending_cpu": claim.pending}
