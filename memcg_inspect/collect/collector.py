# SPDX-License-Identifier: LGPL-2.1-or-later
"""
One pass over an image
----------------------

Drives the readers of :mod:`memcg_inspect.linux` and fills the ledger and the counters of
:mod:`memcg_inspect.checks`; then has them judged.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from drgn import FaultError, Object

from memcg_inspect.checks.ledger import Entry, Ledger
from memcg_inspect.checks.profile import Profile
from memcg_inspect.checks.registry import items_read
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect.call_sites import CallSites
from memcg_inspect.collect.counters import read_counters
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.collect.page_uses import PageUses
from memcg_inspect.collect.percpu import add_percpu, percpu_usage
from memcg_inspect.collect.pernode import PerNode
from memcg_inspect.collect.released import ReleasedReader
from memcg_inspect.collect.zswap import add_zswap
from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_type
from memcg_inspect.image.missing import as_image_errors
from memcg_inspect.image.progress import STOPPED, Progress
from memcg_inspect.linux.kernel.bpf import bpf_objcgs
from memcg_inspect.linux.kernel.sched import caches_objcg, read_tasks
from memcg_inspect.linux.mm.alloc_tag import why_not_profiled
from memcg_inspect.linux.mm.kfence import kfence_pages
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
from memcg_inspect.linux.mm.mm_types import KmemPage, PagePiece, page_layout, scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.pernode import accounts_by_node
from memcg_inspect.linux.mm.slab import Slab, SlabReader, SlabTally
from memcg_inspect.linux.mm.vmstat import read_node_stats
from memcg_inspect.linux.mm.zswap import ZswapReader
from memcg_inspect.linux.net.sock import SockReader
from memcg_inspect.model import (
    NUMA_NO_NODE,
    Coverage,
    Features,
    LruLists,
    Memcg,
    Objcg,
    PercpuUsage,
    TaskCharge,
    Transient,
    Vectors,
)

__all__ = ("Clock", "collect")

#: The counters of nodes that identities are about.
NODE_ITEMS = ("NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B")


class Clock:
    """
    Seconds spent, by what they were spent on.

    :ivar progress: who is told what is done now
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.progress = progress or Progress()

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Add the time of a block."""
        start = time.perf_counter()
        self.progress.tell(what, 0.0)
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start


def collect(image: Image, clock: Clock | None = None, call_sites: bool = True) -> Snapshot:
    """
    Read everything that is to be judged, but what CPUs were doing.

    :param call_sites: whether to look at what refers to call sites, if anything does
    :raises ImageError: if this kernel does not charge kernel memory to memcgs, or keeps its
        charges in a way that is not known here
    """
    with as_image_errors():
        return _Collector(image, clock or Clock(), call_sites).collect()


class _Collector:
    """Fills one snapshot."""

    def __init__(self, image: Image, clock: Clock, call_sites: bool) -> None:
        self.image = image
        self.clock = clock
        self.coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
        self.ledger = Ledger()
        self.references: dict[str, Counter[int]] = {}
        self.transients: defaultdict[int, list[Transient]] = defaultdict(list)
        self.vectors: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}
        self.slab_usage = SlabTally(image)
        self.percpu_usage: tuple[PercpuUsage, ...] = ()
        self.large_kmalloc: Counter[int] = Counter()
        self.per_node: PerNode | None = None
        self.profile = Profile(why_not_profiled(image)) if call_sites else None
        self.call_sites: CallSites | None = None
        if self.profile is not None and self.profile.why_not is None:
            self.call_sites = CallSites(image, self.profile, self.coverage)

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
            pages = self._pages(uses, memcgs, lists)
        with measure("percpu"):
            self._percpu(objcgs)
        with measure("zswap"):
            self._zswap(objcgs)
        if coverage["memcgs"].unreadable or coverage["objcgs"].unreadable:
            with measure("memcgs"):
                objcgs |= self._recover(memcgs, objcgs, [stock.objcg for stock in stocks])
        per_node = self.per_node
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
            transients=dict(self.transients),
            per_node=None if per_node is None else per_node.charges(),
            tasks=tasks,
            vectors={
                nid: Vectors(total, tuple(elsewhere))
                for nid, (total, elsewhere) in self.vectors.items()
            },
            slab_usage=self.slab_usage.usage(),
            percpu_usage=self.percpu_usage,
            large_kmalloc=self.large_kmalloc,
            node_stats=node_stats,
            lru=LruLists(pages, sizes, lists.by_generation),
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

    def _pages(
        self, uses: PageUses, memcgs: dict[int, Memcg], lists: LruReader
    ) -> Counter[tuple[int, int, str]]:
        """
        Go over all pages.

        :return: pages on LRU lists, by payer, node and list
        """
        on_lists: Counter[tuple[int, int, str]] = Counter()
        slabs = SlabReader(self.image, self.coverage["names"])
        socks = SockReader(self.image, slabs)
        released = ReleasedReader(self.image, slabs, memcgs)
        sites = self.call_sites
        for piece in scan_pages(self.image):
            self._piece(piece)
            if sites:
                sites.piece(piece)
            for page in piece.slabs:
                slab = slabs.slab(page)
                if slab is None:
                    self.coverage["slab_pages"].miss("slab", page.page, "its cache is not known")
                    self.ledger.note_missing("slab", None, page.nid)
                    self.ledger.note_missing("sock")  # it may be one of sockets
                    continue
                self._slab(slab, slabs)
                self.slab_usage.add(slab)
                if sites:
                    sites.slab(slab, slabs)
                for objcg, transient in released.read(slab):
                    self.transients[objcg].append(transient)
                for sock in socks.read(slab, memcgs):
                    entry = Entry(sock.memcg, "sock", sock.protocol, NUMA_NO_NODE)
                    self.ledger.add(entry, sock.charged, 1)
            for kmem in piece.kmem:
                self._kmem(kmem, uses)
            for lru in piece.lru:
                size = lru.pages * mem_map(self.image).page_size
                if lru.payer:
                    self.ledger.add(Entry(lru.payer, "lru", "lru", lru.nid), size, lru.folios)
                if lru.flags.on_list:
                    on_lists[lru.payer, lru.nid, lists.item(lru.zone, lru.flags)] += lru.pages
        self.coverage["slab"], self.coverage["sock"] = slabs.coverage, socks.coverage
        if socks.coverage.unreadable:
            self.ledger.note_missing("sock")
        return on_lists

    def _piece(self, piece: PagePiece) -> None:
        self.coverage["pages"].read += piece.pages
        self.large_kmalloc += piece.large_kmalloc
        if piece.unreadable is not None:
            why = STOPPED if self.clock.progress.stop else "not in the image"
            self.coverage["pages"].miss("struct pages", piece.unreadable, why)
            for kind in ("slab", "kmem", "lru", "sock"):
                self.ledger.note_missing(kind)

    def _slab(self, slab: Slab, slabs: SlabReader) -> None:
        detail = "reclaimable" if slab.cache.reclaimable else "unreclaimable"
        if slab.charged is None:
            self.ledger.note_missing("slab", detail, slab.nid)
        for objcg, count in (slab.charged or {}).items():
            entry = Entry(objcg, "slab", detail, slab.nid)
            self.ledger.add(entry, count * slab.cache.charge, count)
        page = slabs.vector_page(slab)
        if page is not None and slab.vector is not None:
            total, elsewhere = self.vectors.get(slab.nid, (0, []))
            nid = slabs.page_nid(page)
            # A vector is an object, and kfence may have given it out, from whatever node.
            if nid not in (slab.nid, NUMA_NO_NODE) and page not in kfence_pages(self.image):
                elsewhere.append((slab.vector.address, nid, slab.page))
            self.vectors[slab.nid] = total + 1, elsewhere

    def _kmem(self, kmem: KmemPage, uses: PageUses) -> None:
        detail, pages = uses.of(kmem)
        entry = Entry(kmem.objcg, "kmem", detail, kmem.nid)
        self.ledger.add(entry, pages * mem_map(self.image).page_size, 1)

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
