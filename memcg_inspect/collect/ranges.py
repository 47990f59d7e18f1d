# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The pass over all page frames
-----------------------------

:class:`RangeCollector` is a function from a range of page frames to a
:class:`~memcg_inspect.collect.partial.Partial`. :func:`collect_ranges` applies it to all ranges and
merges the results. Processes that are forked share the ranges (:attr:`Image.jobs
<memcg_inspect.image.image.Image.jobs>`), or the ``map()`` of a :class:`concurrent.futures.Executor`
is used. Processes that are not forked each make a :class:`RangeCollector` from the same
:class:`PassContext` and from an :class:`~memcg_inspect.image.image.Image` of their own
(:mod:`memcg_inspect.collect.elsewhere`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar

from drgn import FaultError

from memcg_inspect.checks.ledger import Entry, Ledger
from memcg_inspect.checks.sockets import SockRemainder, UnknownSock
from memcg_inspect.collect.call_sites import CallSiteCounter
from memcg_inspect.collect.page_uses import CompoundOwners, PageUses
from memcg_inspect.collect.partial import Partial, merged
from memcg_inspect.collect.released import ReleasedReader
from memcg_inspect.collect.slab_cells import SlabCells
from memcg_inspect.collect.unlisted_maps import UnlistedMaps
from memcg_inspect.image.image import Image
from memcg_inspect.image.processes import available_cores, forked_map
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.fs.notify import GroupReader
from memcg_inspect.linux.mm.debug import is_kmalloc_page, read_page
from memcg_inspect.linux.mm.filemap import UserPageReader
from memcg_inspect.linux.mm.hugetlb_cgroup import HugetlbChargeReader
from memcg_inspect.linux.mm.internal import ZonePageReader
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mm_types import (
    KmemPage,
    LruPages,
    PagePiece,
    page_layout,
    pages_per_piece,
    scan_range,
)
from memcg_inspect.linux.mm.mm_types_slabs import SlabPage
from memcg_inspect.linux.mm.mmzone import PageRange, mem_map, page_ranges, split_ranges
from memcg_inspect.linux.mm.page_alloc import BlockReader
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabReader
from memcg_inspect.linux.mm.slab_groups import SlabGroup, SlabGroupReader
from memcg_inspect.linux.net.sock import Protocol, Sock, SockReader
from memcg_inspect.model import NUMA_NO_NODE, Coverage, FreedPage

__all__ = (
    "Mapper",
    "PassContext",
    "RangeCollector",
    "collect_ranges",
    "jobs_of",
    "page_parts",
    "walk_ranges",
)

#: Pieces of the memory map in one range. With a ``struct page`` of 64 bytes and pages of 4 KiB,
#: a range is 4 GiB of memory.
PIECES_PER_RANGE = 64

#: Pages with vectors that are kept.
_MOST_PAGES = 1 << 16
#: Ranges for each process: one that is done early can take more of them.
_PARTS_PER_JOB = 8
#: Bytes of memory that one process reads as fast as several do, which have to be started.
_SMALL = 4 << 30

T = TypeVar("T")

#: Applies a function to page ranges, like ``map()``.
Mapper = Callable[[Callable[[PageRange], Partial], Iterable[PageRange]], Iterable[Partial]]


@dataclass(frozen=True)
class PassContext:
    """
    Data that the pass over page frames depends on. It can be pickled.

    :ivar memcgs: all ``struct mem_cgroup *``
    :ivar uses: uses of charged pages
    :ivar protocols: protocols of sockets by ``struct kmem_cache *``
    :ivar call_sites: whether to read references to call sites
    :ivar cells: if given, slabs and large kmallocs are added to it, too. Then the pass must be in
        this process
    """

    memcgs: Set[int]
    uses: PageUses
    protocols: Mapping[int, Protocol] = field(default_factory=dict)
    call_sites: bool = False
    cells: SlabCells | None = None


class RangeCollector:
    """
    Collects the charges in a range of page frames.

    Caches and layouts are read once for each instance. An instance serves one thread.
    """

    def __init__(self, image: Image, context: PassContext) -> None:
        self._image = image
        self._context = context
        self._frames = mem_map(image)
        self._page_size = self._frames.page_size
        self._kfence = kfence_pages(image)
        self._slabs = SlabReader(image)
        self._socks = SockReader(image, self._slabs, context.protocols)
        # Only kernels that do not mark large kmallocs need the owners of other compound pages.
        marked = page_layout(image).has_large_kmalloc
        self._owners = None if marked else CompoundOwners(image, self._slabs)
        self._notify = GroupReader(image, self._slabs)
        self._released = ReleasedReader(image, self._slabs, context.memcgs)
        self._maps = UnlistedMaps(image, self._slabs)
        self._zones = ZonePageReader(image)
        self._users = UserPageReader(image)
        self._hugetlb = HugetlbChargeReader(image)
        self._vector_pages: dict[int, tuple[int, bool]] = {}
        self._blocks = BlockReader(image, miss=self._miss_list)
        self._ledger = Ledger()
        self._pages = Coverage()
        self._sites = CallSiteCounter(image) if context.call_sites else None
        self._cells = context.cells
        self._groups = SlabGroupReader(image, self._slabs, self._is_alone)

    def __call__(self, part: PageRange) -> Partial:
        """
        Collect one range.

        A compound page, or a slab, belongs to the range that has its head.

        :param part: see :func:`~memcg_inspect.linux.mm.mm_types.scan_range`
        """
        partial = Partial(part.start)
        self._ledger = partial.ledger
        self._pages = partial.coverage["pages"]
        self._slabs.coverage = partial.coverage["slab"]
        self._socks.coverage = partial.coverage["sock"]
        self._socks.queues = partial.coverage["sock_queues"]
        self._socks.others = partial.coverage["other_socks"]
        self._notify.coverage = partial.coverage["notify"]
        self._users.coverage = partial.coverage["user_pages"]
        self._released.coverage = partial.coverage["released"]
        self._maps.coverage = partial.coverage["bpf"]
        # On a running kernel, these lists change while they are read.
        for fault in () if self._image.is_moving else self._released.faults:
            partial.coverage["css"].miss("work items", fault.address, str(fault))
        if self._maps.fault is not None:
            fault = self._maps.fault
            partial.coverage["bpf"].miss("types of BPF maps", fault.address, str(fault))
        for piece in scan_range(self._image, part):
            self._count_piece(partial, piece)
            if self._sites is not None:
                self._sites.add_pages(partial, piece)
            groups, others = self._groups.read(piece.slabs)
            for group in groups:
                self._add_group(partial, group)
            for page in others:
                self._add_slab_page(partial, page)
            for kmem in piece.kmem:
                self._add_kmem(partial, kmem)
            for lru in piece.lru:
                self._add_lru(partial, lru)
        if self._socks.coverage.unreadable:
            partial.ledger.note_missing("sock")
        partial.unnamed |= self._slabs.unnamed
        return partial

    def _count_piece(self, partial: Partial, piece: PagePiece) -> None:
        self._pages.read += piece.pages
        partial.large_kmalloc += piece.large_kmalloc
        if self._cells is not None:
            self._cells.add_all_large(piece)
        for nid, pages in piece.tables.items():
            partial.node_pages["table", nid] += pages
        if piece.raw is not None:
            partial.node_pages += self._context.uses.on_nodes.of(piece.raw)
            self._zones.add(piece.raw, partial.zone_free, partial.zone_pages)
            partial.user_pages += self._users.read(piece.raw)
            for charge, pages in self._hugetlb.read(piece.raw):
                partial.hugetlb[charge] += pages
        if piece.unreadable is not None:
            why = STOPPED if self._image.progress.stop else "not in the image"
            self._pages.miss("struct pages", piece.unreadable, why)
            partial.ledger.note_missing_pages()
            self._miss_files(partial, piece.unreadable, why)
        for wrong in piece.wrong:
            self._pages.miss("order of a compound page", wrong.page, wrong.reason)
            partial.ledger.note_missing_pages(wrong.nid, wrong.kind)
            self._miss_files(partial, wrong.page, wrong.reason)

    def _miss_files(self, partial: Partial, address: int, reason: str) -> None:
        """Count files that can own compound pages, which then pass for large kmallocs."""
        if self._owners is not None:
            partial.coverage["compound"].miss("files", address, reason)

    def _is_alone(self, cache: SlabCache) -> bool:
        """Return whether somebody wants to see each slab of a cache, or each of its objects."""
        if self._cells is not None or self._sites is not None:
            return True
        readers = (self._released, self._maps, self._socks, self._notify)
        if any(reader.may_read(cache) for reader in readers):
            return True
        return self._owners is not None and self._owners.may_read(cache)

    def _add_group(self, partial: Partial, group: SlabGroup) -> None:
        _add_charged(partial, group.cache, group.nid, group.charged)
        partial.slabs.add_group(group)
        self._add_vectors(partial, group.nid, group.outside)

    def _add_slab_page(self, partial: Partial, page: SlabPage) -> None:
        slab = self._slabs.slab(page)
        if slab is None:
            partial.coverage["slab_pages"].miss("slab", page.page, "its cache is not known")
            partial.ledger.note_missing("slab", None, page.nid)
            partial.ledger.note_missing("sock")  # the slab can be one of sockets
            self._miss_files(partial, page.page, "the cache of a slab is not known")
            return
        self._add_slab(partial, slab)
        partial.slabs.add(slab, slab.page in self._kfence)
        if self._cells is not None:
            self._cells.add(slab)
        if self._sites is not None:
            self._sites.add_slab(partial, slab, self._slabs)
        partial.transients.update(self._released.read(slab))
        partial.transients.update(self._maps.read(slab))
        if self._owners is not None:
            try:
                partial.files |= self._owners.files(slab)
            except FaultError as error:
                self._miss_files(partial, error.address, str(error))
        partial.released.update(self._released.children(slab))
        for sock in self._socks.read(slab, self._context.memcgs):
            self._add_sock(partial, sock)
        for group in self._notify.read(slab, self._context.memcgs):
            partial.groups[group.memcg] += 1

    def _add_slab(self, partial: Partial, slab: Slab) -> None:
        if slab.charged is None:
            partial.ledger.note_missing("slab", _detail(slab.cache), slab.nid)
        _add_charged(partial, slab.cache, slab.nid, slab.charged or {})
        if slab.vector is not None and self._slabs.vector_page(slab) is not None:
            self._add_vectors(partial, slab.nid, [(slab.page, slab.vector.address)])

    def _add_vectors(self, partial: Partial, of: int, vectors: Sequence[tuple[int, int]]) -> None:
        """
        Add vectors that are not inside their slabs.

        :param of: node of the slabs
        :param vectors: ``struct slab *`` and address of the vector
        """
        shift = self._frames.page_shift
        dangling: dict[int, int] = {}
        # Many vectors are in one page.
        for number, count in Counter([vector >> shift for _, vector in vectors]).items():
            found = self._vector_pages.get(number)
            if found is None:
                if len(self._vector_pages) >= _MOST_PAGES:
                    self._vector_pages.clear()
                page = self._frames.virt_to_page(number << shift)
                found = self._vector_pages[number] = self._vector_page(page)
            nid, is_of_allocator = found
            if nid == NUMA_NO_NODE:
                continue  # its struct page is not in the image, which the coverage of pages tells
            partial.vectors[of] += count
            if not is_of_allocator:
                dangling[number] = nid
            elif nid != of:
                partial.vectors_elsewhere[of] += count
        for slab, vector in vectors if dangling else ():
            page_nid = dangling.get(vector >> shift)
            if page_nid is None:
                continue
            # The vectors of kfence's own pages are in its metadata, which kmalloc() has not
            # returned.
            if slab not in self._kfence:
                partial.vectors_dangling.add((of, vector, page_nid, slab))
            elif page_nid != of:
                partial.vectors_elsewhere[of] += 1

    def _vector_page(self, page: int) -> tuple[int, bool]:
        """Return the node of a page, and whether vectors can be on it."""
        # alloc_slab_obj_exts() allocates the vector with kmalloc_nolock() or kcalloc_node().
        # Either can return an object of kfence. Its pages are not all marked as slabs.
        is_of_allocator = page in self._kfence or is_kmalloc_page(self._image, page)
        return self._slabs.page_nid(page), is_of_allocator

    def _add_sock(self, partial: Partial, sock: Sock) -> None:
        entry = Entry(sock.memcg, "sock", sock.protocol, NUMA_NO_NODE)
        partial.ledger.add(entry, sock.charged, 1)
        if not sock.accounts:
            return
        partial.sockets[sock.memcg] += 1
        if sock.unknown is not None:
            reason, either_way = sock.unknown
            unknown = UnknownSock(reason, either_way, sock.remainder != 0)
            partial.unknown_socks.add((sock.memcg, unknown))
        elif sock.remainder:
            remainder = SockRemainder(sock.address, sock.protocol, sock.remainder)
            partial.sock_remainders.add((sock.memcg, remainder))

    def _add_kmem(self, partial: Partial, kmem: KmemPage) -> None:
        # Large kmallocs have a type, and no refcount.
        if not kmem.has_refs and not kmem.type and self._is_free(kmem.page):
            partial.freed.add(FreedPage(kmem.page, kmem.objcg, kmem.nid))
            detail, pages = "other", 1
        else:
            detail, pages = self._context.uses.of(kmem, self._blocks)
        entry = Entry(kmem.objcg, "kmem", detail, kmem.nid)
        if self._context.uses.may_be_of_others(kmem):
            partial.compound[kmem.page] = entry, pages * self._page_size
        elif detail == "other" and self._image.is_moving:
            partial.unplaced[kmem.page] = entry, pages * self._page_size
        else:
            partial.ledger.add(entry, pages * self._page_size, 1)
            if self._cells is not None and detail == "large_kmalloc":
                self._cells.add_large(kmem, pages)

    def _is_free(self, page: int) -> bool:
        """Return whether a page is in a block of the buddy allocator, which is not allocated."""
        if self._image.is_moving:
            return False  # it may have been freed since it was read
        try:
            return read_page(self._image, page).type == "buddy"
        except FaultError:
            return False

    def _miss_list(self, page: int, reason: str) -> None:
        # The block before that page may be larger, and on its node.
        self._pages.miss("list of free pages", page, reason)
        self._ledger.note_missing("kmem")

    def _add_lru(self, partial: Partial, lru: LruPages) -> None:
        if lru.payer:
            entry = Entry(lru.payer, "lru", "lru", lru.nid)
            partial.ledger.add(entry, lru.pages * self._page_size, lru.folios)
        if lru.flags.on_list:
            partial.lru[lru.payer, lru.nid, lru.zone, lru.flags] += lru.pages


def _detail(cache: SlabCache) -> str:
    return "reclaimable" if cache.reclaimable else "unreclaimable"


def _add_charged(partial: Partial, cache: SlabCache, nid: int, charged: Mapping[int, int]) -> None:
    """
    Add charged objects of a cache.

    :param charged: their number by ``struct obj_cgroup *``
    """
    detail = _detail(cache)
    for objcg, count in charged.items():
        partial.ledger.add(Entry(objcg, "slab", detail, nid), count * cache.charge, count)


def jobs_of(image: Image) -> int:
    """
    Return the number of processes that read the pages of an image.

    A running kernel is read by one: others would take memory of the machine, between the step that
    reads its counters and the one that reads its pages.
    """
    if image.is_moving:
        return 1
    if image.pool is not None:
        return image.pool.workers
    if image.jobs is not None:
        return image.jobs
    pages = sum(part.end - part.start for part in page_ranges(image))
    is_large = pages * mem_map(image).page_size > _SMALL
    return available_cores() if is_large else 1


def collect_ranges(
    image: Image,
    context: PassContext,
    run: Mapper | None = None,
    parts: Sequence[PageRange] | None = None,
) -> Partial:
    """
    Collect all valid page frames, and report progress.

    :param run: applies the collector to the ranges: ``map()``, or the ``map()`` of an executor; if
        not given, as many processes as the image says
    :param parts: ranges that together are all valid page frames; if not given, ranges of
        :data:`PIECES_PER_RANGE` pieces, or less so that no process has to wait for another
    """
    return merged([Partial(), *walk_ranges(image, RangeCollector(image, context), run, parts)])


def walk_ranges(
    image: Image,
    read: Callable[[PageRange], T],
    run: Callable[[Callable[[PageRange], T], Iterable[PageRange]], Iterable[T]] | None = None,
    parts: Sequence[PageRange] | None = None,
) -> Iterator[T]:
    """
    Read all valid page frames, and report progress.

    :param read: reads a range. Its result must be such that it can be pickled
    :param run: see :func:`collect_ranges`
    :param parts: see :func:`collect_ranges`
    :return: the results of the ranges, in their order
    """
    if run is None:
        jobs = jobs_of(image)
        run = map if jobs == 1 else forked_map(image, jobs)
    if parts is None:
        parts = page_parts(image)
    return _with_progress(image, run(read, parts), len(parts))


def page_parts(image: Image) -> list[PageRange]:
    """Return the ranges that the processes of an image share."""
    jobs, ranges, piece = jobs_of(image), page_ranges(image), pages_per_piece(image)
    pieces = PIECES_PER_RANGE
    if jobs > 1:
        total = sum(part.end - part.start for part in ranges) // piece
        pieces = max(1, min(pieces, total // (_PARTS_PER_JOB * jobs)))
    return list(split_ranges(ranges, pieces * piece))


def _with_progress(image: Image, partials: Iterable[T], total: int) -> Iterator[T]:
    done = 0
    for done, partial in enumerate(partials, 1):
        image.progress.report("pages", done / total)
        yield partial
    # A StopIteration in the collector ends map() as if that had been the last range.
    if done != total:
        raise RuntimeError(f"{done} of {total} ranges of page frames were collected")
