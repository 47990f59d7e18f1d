# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Collecting a snapshot
---------------------

:func:`collect` reads an image with the readers of :mod:`memcg_inspect.linux` and returns a
:class:`~memcg_inspect.checks.snapshot.Snapshot`. The memory map is read by
:mod:`memcg_inspect.collect.ranges`; everything else is small and read here.
"""

from __future__ import annotations

from collections import Counter

from drgn import FaultError, Object

from memcg_inspect.checks.profile import Profile
from memcg_inspect.checks.registry import items_read
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect.call_sites import CallSites
from memcg_inspect.collect.clock import Clock
from memcg_inspect.collect.counters import read_counters
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.collect.page_uses import PageUses
from memcg_inspect.collect.partial import Partial
from memcg_inspect.collect.percpu import add_percpu, percpu_usage
from memcg_inspect.collect.pernode import PerNode
from memcg_inspect.collect.ranges import Mapper, PassContext, collect_ranges
from memcg_inspect.collect.zswap import add_zswap
from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_type
from memcg_inspect.image.missing import as_image_errors
from memcg_inspect.linux.kernel.bpf import bpf_objcgs
from memcg_inspect.linux.kernel.sched import caches_objcg, read_tasks
from memcg_inspect.linux.mm.alloc_tag import why_not_profiled
from memcg_inspect.linux.mm.memcontrol import (
    has_node_objcgs,
    memory_usage,
    nodeinfo,
    on_default_hierarchy,
    read_memcgs,
    read_objcgs,
    recover_objcgs,
)
from memcg_inspect.linux.mm.memcontrol_stock import read_charge_stocks, read_obj_stocks
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.mm.mm_inline import LruReader
from memcg_inspect.linux.mm.mm_types import page_layout
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.pernode import accounts_by_node
from memcg_inspect.linux.mm.vmstat import read_node_stats
from memcg_inspect.linux.mm.zswap import ZswapReader
from memcg_inspect.linux.net.sock import socket_caches
from memcg_inspect.model import (
    Coverage,
    Features,
    LruLists,
    Memcg,
    Objcg,
    PercpuUsage,
    TaskCharge,
)

__all__ = ("collect",)

#: The counters of nodes that identities are about.
NODE_ITEMS = ("NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B")


def collect(
    image: Image, clock: Clock | None = None, call_sites: bool = True, run: Mapper = map
) -> Snapshot:
    """
    Read everything that is checked, except what CPUs were doing.

    :param call_sites: whether to read what refers to call sites, if anything does
    :param run: see :func:`~memcg_inspect.collect.ranges.collect_ranges`
    :raises ImageError: if this kernel does not charge kernel memory to memcgs, or its layout is
        unknown
    """
    with as_image_errors():
        return _Collector(image, clock or Clock(image.progress), call_sites, run).collect()


class _Collector:
    """
    Reads an image part by part.

    :ivar total: sums, coverage and evidence of the parts read so far
    """

    def __init__(self, image: Image, clock: Clock, call_sites: bool, run: Mapper) -> None:
        self.image = image
        self.clock = clock
        self.run = run
        self.total = Partial()
        self.ledger, self.coverage = self.total.ledger, self.total.coverage
        self.references: dict[str, Counter[int]] = {}
        self.percpu_usage: tuple[PercpuUsage, ...] = ()
        self.per_node: PerNode | None = None
        self.profile: Profile | None = None
        self.call_sites: CallSites | None = None
        if call_sites:
            self.profile = Profile(why_not_profiled(image))
            if self.profile.why_not is None:
                self.call_sites = CallSites(image, self.coverage)
                self.profile = self.call_sites.profile

    def collect(self) -> Snapshot:
        image, coverage, measure = self.image, self.coverage, self.clock.measure
        with measure("memcgs"):
            info = image_info(image)
            memcgs = read_memcgs(image, coverage["memcgs"], coverage["names"])
            unreadable: set[int] = set()
            objcgs = read_objcgs(image, memcgs, coverage["objcgs"], unreadable)
        with measure("counters"):
            reader = StatReader(image, items_read())
            counters = read_counters(image, reader, memcgs, coverage["counters"])
            usage = self._usage(memcgs)
            lists = LruReader(image, coverage["lru"])
            sizes = lists.sizes(self._lruvecs(memcgs))
            coverage["lru_walks"] = lists.walks
            node_stats = read_node_stats(image, NODE_ITEMS, coverage["node_stats"])
            stocks = read_obj_stocks(image, coverage["stock"])
            charge_stocks = read_charge_stocks(image, coverage["charge_stock"])
        with measure("tasks"):
            tasks = self._tasks()
            self.references["bpf"] = Counter(bpf_objcgs(image, coverage["bpf"]))
        with measure("vmalloc"):
            uses = self._page_uses()
        with measure("pages"):
            self._pages(uses, memcgs)
        with measure("percpu"):
            self._percpu(objcgs)
        with measure("zswap"):
            self._zswap(objcgs)
        if coverage["memcgs"].unreadable or coverage["objcgs"].unreadable:
            with measure("memcgs"):
                objcgs |= self._recover(memcgs, objcgs, [stock.objcg for stock in stocks])
        if self.call_sites:
            self.call_sites.finish(coverage)
        return Snapshot(
            image=info,
            features=_features(image, reader),
            memcgs=memcgs,
            objcgs=objcgs,
            ledger=self.ledger,
            counters=counters,
            stocks=stocks,
            charge_stocks=charge_stocks,
            usage=usage,
            references=self.references,
            transients=self.total.transients_by_objcg(),
            per_node=None if self.per_node is None else self.per_node.charges(),
            tasks=tasks,
            vectors=self.total.vectors_by_node(),
            slab_usage=self.total.slabs.usage(),
            percpu_usage=self.percpu_usage,
            large_kmalloc=self.total.large_kmalloc,
            node_stats=node_stats,
            lru=LruLists(self._lists(lists), sizes, lists.by_generation),
            profile=self.profile,
            coverage=dict(coverage),
            unreadable=frozenset(memcgs[memcg].payer for memcg in unreadable),
        )

    def _recover(
        self, memcgs: dict[int, Memcg], objcgs: dict[int, Objcg], stocks: list[int]
    ) -> dict[int, Objcg]:
        """Read the obj_cgroups that only charges lead to, because lists are broken."""
        on_lru = has_node_objcgs(self.image)
        known = {0, *memcgs, *objcgs}
        not_objcgs = ("sock",) if on_lru else ("sock", "lru")
        wanted = {entry.payer for entry, _ in self.ledger if entry.kind not in not_objcgs}
        wanted |= {*stocks, *(o for held in self.references.values() for o in held)}
        is_whole = not self.coverage["memcgs"].unreadable
        return recover_objcgs(self.image, memcgs, is_whole, wanted - known, self.coverage["objcgs"])

    def _lruvecs(self, memcgs: dict[int, Memcg]) -> dict[tuple[int, int], Object]:
        lruvecs = {}

        def missed(error: FaultError) -> None:
            self.coverage["lru"].miss("nodes of a memcg", error.address, str(error))

        for address in memcgs:
            memcg = Object(self.image.prog, "struct mem_cgroup *", address)
            for nid, pn in nodeinfo(self.image, memcg, missed):
                lruvecs[address, nid] = pn
        return lruvecs

    def _usage(self, memcgs: dict[int, Memcg]) -> dict[int, int]:
        usage = {}
        for address in memcgs:
            try:
                memcg = Object(self.image.prog, "struct mem_cgroup *", address)
                usage[address] = memory_usage(memcg)
            except FaultError as error:
                self.coverage["counters"].miss("page counter", error.address, str(error))
        return usage

    def _tasks(self) -> list[TaskCharge]:
        tasks = list(read_tasks(self.image, self.coverage["tasks"]))
        self.references["task"] = Counter(o for task in tasks for o in task.objcgs if o)
        return tasks

    def _page_uses(self) -> PageUses:
        uses = PageUses(self.image, self.coverage)
        if uses.are_blocks and self.coverage["stacks"].unreadable:
            self.ledger.note_missing("kmem", "stack")
        if self.coverage["page_tables"].unreadable:
            self.ledger.note_missing("kmem", "other")
        return uses

    def _pages(self, uses: PageUses, memcgs: dict[int, Memcg]) -> None:
        """Read all page frames."""
        coverage = Coverage()
        protocols = socket_caches(self.image, coverage)
        if coverage.unreadable:
            self.ledger.note_missing("sock")
        context = PassContext(
            memcgs=frozenset(memcgs),
            uses=uses,
            protocols=protocols,
            call_sites=self.call_sites is not None,
            free_pages=self.call_sites.free_pages if self.call_sites else None,
        )
        found = collect_ranges(self.image, context, self.run)
        self.total.merge(found)
        self.coverage["sock"].add(coverage)
        for address, reason in found.unnamed.items():
            self.coverage["names"].miss("name of a kmem_cache", address, reason)
        if self.call_sites:
            self.call_sites.add(found)

    def _lists(self, lists: LruReader) -> Counter[tuple[int, int, str]]:
        """Return the pages on LRU lists, by payer, node and list."""
        on_lists: Counter[tuple[int, int, str]] = Counter()
        for (payer, nid, zone, flags), pages in self.total.lru.items():
            on_lists[payer, nid, lists.item(zone, flags)] += pages
        return on_lists

    def _percpu(self, objcgs: dict[int, Objcg]) -> None:
        reader = PercpuReader(self.image)
        seen = self.call_sites.percpu(reader) if self.call_sites else None
        if accounts_by_node(self.image):
            is_whole = not self.coverage["objcgs"].unreadable
            if not is_whole:
                self._recover_for_percpu(objcgs)
            self.per_node = PerNode(objcgs, is_whole)
        add_percpu(self.ledger, reader, self.per_node, seen)
        self.percpu_usage = percpu_usage(self.ledger, reader)
        self.coverage["percpu"] = reader.coverage
        self.coverage["percpu_nodes"] = reader.placement

    def _recover_for_percpu(self, objcgs: dict[int, Objcg]) -> None:
        """Find the obj_cgroups of allocations, which tell those of other nodes, beforehand."""
        reader = PercpuReader(self.image)
        found = (a.objcg for chunk in reader.chunks() for a in reader.charged(chunk))
        wanted = set(found) - objcgs.keys()
        memcgs = {objcg.memcg for objcg in objcgs.values()}
        objcgs |= recover_objcgs(self.image, memcgs, False, wanted, self.coverage["objcgs"])

    def _zswap(self, objcgs: dict[int, Objcg]) -> None:
        reader = ZswapReader(self.image)
        charged = on_default_hierarchy(self.image)
        self.references["zswap"] = add_zswap(self.ledger, reader, objcgs, self.per_node, charged)
        self.coverage["zswap"], self.coverage["zswap_nodes"] = reader.coverage, reader.placement


def _features(image: Image, reader: StatReader) -> Features:
    return Features(
        items=frozenset(reader.slots),
        # User pages were given obj_cgroups together with the obj_cgroups of nodes (7.2).
        lru_holds_objcg=has_node_objcgs(image),
        default_hierarchy=on_default_hierarchy(image),
        caches_objcg=caches_objcg(image),
        large_kmalloc_type=page_layout(image).has_large_kmalloc,
        zswap=has_type(image, "struct zswap_entry"),
    )
