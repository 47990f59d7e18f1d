# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Owners of page frames
---------------------

The ``struct page`` of many pages of the kernel does not show their use. Their owners are read, and
claim them. No page may have two owners.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.arch.page_tables import is_text_address
from memcg_inspect.linux.block.bio_integrity import integrity_pages
from memcg_inspect.linux.block.blk_mq import request_blocks
from memcg_inspect.linux.kernel.dma.pool import atomic_pools
from memcg_inspect.linux.kernel.dma.swiotlb import swiotlb_pools
from memcg_inspect.linux.kernel.resource import memory_resources
from memcg_inspect.linux.kernel.trace.ftrace import ftrace_blocks
from memcg_inspect.linux.kernel.trace.trace_sched_switch import saved_cmdlines
from memcg_inspect.linux.mm.huge_memory import huge_zero_pages
from memcg_inspect.linux.mm.init_mm import KernelTables, user_tables
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mmzone import mem_map, memory_map_end, page_ranges
from memcg_inspect.linux.mm.page_ext import page_ext_tables
from memcg_inspect.linux.mm.percpu import PcpuChunk, PercpuReader
from memcg_inspect.linux.mm.slab_common import kvfree_rcu_pages
from memcg_inspect.linux.mm.vmalloc import block_users, thread_size, vm_areas
from memcg_inspect.linux.mm.zswap import ZswapReader
from memcg_inspect.model import Coverage

__all__ = ("Claim", "Owners", "Share")

#: The most page frames of two claims that are kept as conflicts.
_MOST_CONFLICTS = 1000


class Share(NamedTuple):
    """
    How much of a page is used, and who pays.

    :ivar used: bytes in use
    :ivar paid: bytes by ``struct obj_cgroup *`` that pays
    """

    used: int
    paid: tuple[tuple[int, int], ...]


class Claim(NamedTuple):
    """
    Page frames that an owner has.

    :ivar start: first page frame
    :ivar end: page frame after the last one
    :ivar kind: key of :data:`memcg_inspect.model_pages.KINDS`
    :ivar caller: function that made them
    :ivar share: how much of each page is used; ``None`` if its ``memcg_data`` tells who pays
    :ivar block: first page frame of the block, if it is one that is not compound. Its
        ``memcg_data`` tells who pays for all pages; the others have none
    """

    start: int
    end: int
    kind: str
    caller: str | None = None
    share: Share | None = None
    block: int | None = None


class Owners:
    """
    The owners of page frames.

    :ivar claims: all claims, in ascending order. None of them overlap.
    :ivar conflicts: page frames that two owners claim, with both kinds
    :ivar regions: page frames by kind, first and after the last: what is reserved there is of
        that kind
    :ivar shares: how much of pages of zsmalloc is used, by page frame
    """

    def __init__(self, image: Image, coverage: defaultdict[str, Coverage]) -> None:
        self._image, self._frames, self._coverage = image, mem_map(image), coverage
        self._end = memory_map_end(image)
        self._symbols: dict[int, str] = {}
        self.conflicts: list[tuple[int, str, str]] = []
        self.shares: dict[int, Share] = {}
        tables = KernelTables(image, coverage["kernel_pagetables"])
        found: list[Claim] = []
        for read in (
            *(self._areas, self._stacks, self._user_tables, self._page_ext, self._kfence),
            *(self._huge_zero, self._pools, self._trace, self._compressed),
            lambda: _joined("kernel_pagetables", ((pfn, 1) for pfn in tables.pfns)),
            lambda: self._memory_map(tables),
            lambda: self._percpu(tables),
        ):
            found += self._as_far_as_readable(read)
        self.claims = self._sorted(found)
        self._ends = [claim.end for claim in self.claims]
        self.regions = list(self._regions())

    def within(self, start: int, end: int) -> Iterator[Claim]:
        """Yield the claims of page frames in a range, cut to it."""
        for number in range(bisect_left(self._ends, start + 1), len(self.claims)):
            claim = self.claims[number]
            if claim.start >= end:
                return
            yield claim._replace(start=max(claim.start, start), end=min(claim.end, end))

    def _as_far_as_readable(self, read: Callable[[], Iterable[Claim]]) -> Iterator[Claim]:
        """Yield claims. If they cannot all be read, the rest of the pages have no known owner."""
        try:
            yield from read()
        except FaultError as error:
            self._coverage["owners"].miss("owner of pages", error.address, str(error))

    def _sorted(self, found: Iterable[Claim]) -> list[Claim]:
        claims: list[Claim] = []
        for claim in sorted(map(self._within_memory, found), key=lambda claim: claim[:2]):
            last = claims[-1] if claims else None
            if last is not None and claim.start < last.end:
                both = range(claim.start, min(claim.end, last.end))
                self.conflicts += ((pfn, last.kind, claim.kind) for pfn in both[:_MOST_CONFLICTS])
                if claim.end <= last.end:
                    continue
                claim = claim._replace(start=last.end)
            if claim.start < claim.end:
                claims.append(claim)
        return claims

    def _within_memory(self, claim: Claim) -> Claim:
        """Return the part of a claim that is in the memory map. Nothing owns what is beyond it."""
        start, end = (min(max(pfn, 0), self._end) for pfn in (claim.start, claim.end))
        end = max(start, end)
        if (start, end) != (claim.start, claim.end):
            reason = f"{claim.kind} of page frames {claim.start:#x} to {claim.end:#x}"
            self._coverage["owners"].miss("owner of pages", self._frames.page(start), reason)
        return claim._replace(start=start, end=end)

    def _areas(self) -> Iterator[Claim]:
        """Yield the pages of vmalloc areas: stacks, modules, and all others."""
        groups: defaultdict[tuple[str, str | None], list[int]] = defaultdict(list)
        for area in vm_areas(self._image, self._coverage["vmalloc"], self._coverage["stacks"]):
            is_text = is_text_address(self._image, area.address)
            kind = "stack" if area.is_stack else "text" if is_text else "vmalloc"
            caller = None if area.is_stack else self._caller(area.caller)
            groups[kind, caller] += map(self._frames.pfn, area.pages)
        for (kind, caller), pfns in groups.items():
            yield from _joined(kind, ((pfn, 1) for pfn in pfns), caller)

    def _caller(self, address: int) -> str:
        if address not in self._symbols:
            try:
                self._symbols[address] = self._image.symbol(address).name
            except UnknownKernelError:
                self._symbols[address] = f"{address:#x}"
        return self._symbols[address]

    def _stacks(self) -> Iterator[Claim]:
        """Yield the stacks that are blocks of pages."""
        blocks = block_users(self._image, self._coverage["stacks"])
        if blocks:
            pages = thread_size(self._image) >> self._frames.page_shift
            for page in blocks:
                pfn = self._frames.pfn(page)
                yield Claim(pfn, pfn + pages, "stack", block=pfn)

    def _user_tables(self) -> Iterator[Claim]:
        tables = set(user_tables(self._image, self._coverage["pgd_list"]))
        return _joined("pagetables", ((pfn, 1) for pfn in tables))

    def _page_ext(self) -> Iterator[Claim]:
        runs = []
        for start, size in page_ext_tables(self._image, self._coverage["page_ext"]):
            first = self._frames.pfn(self._frames.virt_to_page(start))
            runs.append((first, -(-size >> self._frames.page_shift)))
        return _joined("page_ext", runs)

    def _kfence(self) -> Iterator[Claim]:
        pages = kfence_pages(self._image)
        if pages:
            yield Claim(self._frames.pfn(pages[0]), self._frames.pfn(pages[-1]) + 1, "kfence")

    def _huge_zero(self) -> Iterator[Claim]:
        pages = huge_zero_pages(self._image, self._coverage["huge_zero"])
        if pages:
            yield Claim(pages.start, pages.stop, "huge_zero")

    def _pools(self) -> Iterator[Claim]:
        shift = self._frames.page_shift
        for start, end in atomic_pools(self._image, self._coverage["dma_pools"]):
            yield Claim(start >> shift, end >> shift, "dma_pool")
        for page, order in integrity_pages(self._image, self._coverage["mempools"]):
            pfn = self._frames.pfn(page)
            yield Claim(pfn, pfn + (1 << order), "mempool")
        for page, order in request_blocks(self._image, self._coverage["blk_mq"]):
            pfn = self._frames.pfn(page)
            yield Claim(pfn, pfn + (1 << order), "blk_mq")
        for address in kvfree_rcu_pages(self._image, self._coverage["kvfree_rcu"]):
            pfn = self._frames.pfn(self._frames.virt_to_page(address))
            yield Claim(pfn, pfn + 1, "kvfree_rcu")

    def _trace(self) -> Iterator[Claim]:
        for address, order in ftrace_blocks(self._image, self._coverage["ftrace"]):
            pfn = self._frames.pfn(self._frames.virt_to_page(address))
            yield Claim(pfn, pfn + (1 << order), "trace")
        for address in saved_cmdlines(self._image, self._coverage["ftrace"]):
            pfn = self._frames.pfn(self._frames.virt_to_page(address))
            yield Claim(pfn, pfn + 1, "trace")

    def _memory_map(self, tables: KernelTables) -> Iterator[Claim]:
        if not tables.can_read:
            return
        # Page frames may begin far above 0, and other things lie before their memory map then.
        size = self._frames.page_size
        first = min((part.start for part in page_ranges(self._image)), default=self._end)
        start = self._frames.page(first) // size * size
        end = self._frames.page(self._end)
        frames = tables.frames(start, end - start)
        yield from _joined("memmap", {run for pfns in frames for run in _runs(pfns)})

    def _percpu(self, tables: KernelTables) -> Iterator[Claim]:
        reader = PercpuReader(self._image)
        size = self._frames.page_size
        units = reader.unit_offsets()
        first = self._image.object("pcpu_first_chunk").value_()
        for address in reader.static_pages():
            for offset in units:
                for pfn in _each(tables, address + offset, size):
                    yield Claim(pfn, pfn + 1, "percpu_first")
        for chunk in reader.chunks(place=False):
            kind = "percpu_first" if chunk.address == first else "percpu"
            populated = reader.populated(chunk)
            for number, share in enumerate(self._percpu_shares(reader, chunk)):
                if not populated >> number & 1:
                    continue
                for offset in units:
                    address = chunk.base + number * size + offset
                    for pfn in _each(tables, address % (1 << 64), size):
                        yield Claim(pfn, pfn + 1, kind, share=share)
        self._coverage["percpu"].add(reader.coverage)

    def _percpu_shares(self, reader: PercpuReader, chunk: PcpuChunk) -> list[Share]:
        """Return how much of each page of the units of a chunk is used."""
        size = self._frames.page_size
        paid: list[Counter[int]] = [Counter() for _ in range(chunk.nr_pages)]
        for alloc in reader.charged(chunk):
            start, end = alloc.offset, alloc.offset + alloc.size
            while start < end:
                number = start // size
                part = min(end, (number + 1) * size) - start
                paid[number][alloc.objcg] += part
                start += part
        return [
            Share(reader.used(chunk, number), tuple(paid[number].items()))
            for number in range(chunk.nr_pages)
        ]

    def _compressed(self) -> Iterator[Claim]:
        """Yield nothing: zsmalloc marks its pages. Note who pays for what is in them."""
        reader = ZswapReader(self._image)
        paid: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for entry in reader.entries():
            if not entry.length:
                continue
            for part in reader.parts(entry) or ():
                if entry.objcg and entry.listed:
                    paid[self._frames.pfn(part.page)][entry.objcg] += part.length
        size = self._frames.page_size
        for pfn, bytes_ in paid.items():
            self.shares[pfn] = Share(size, tuple(bytes_.items()))
        self._coverage["zswap"].add(reader.coverage)
        return iter(())

    def _regions(self) -> Iterator[tuple[int, int, str]]:
        shift = self._frames.page_shift
        kernel: list[int] = []
        try:
            for resource in memory_resources(self._image):
                if resource.name.startswith("Crash kernel"):
                    yield resource.start >> shift, -(-resource.end >> shift), "crash_kernel"
                elif resource.in_ram and resource.name.startswith("Kernel "):
                    kernel += [resource.start, resource.end]
        except FaultError as error:
            self._coverage["resources"].miss("iomem_resource", error.address, str(error))
        if kernel:
            yield min(kernel) >> shift, -(-max(kernel) >> shift), "image"
        for start, end in swiotlb_pools(self._image, self._coverage["swiotlb"]):
            yield start >> shift, -(-end >> shift), "swiotlb"


def _each(tables: KernelTables, start: int, size: int) -> Iterator[int]:
    """Return the page frames behind a range of kernel addresses."""
    return chain.from_iterable(tables.frames(start, size))


def _runs(pfns: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return the first page frame and the number of those that are mapped together."""
    if isinstance(pfns, range):
        yield pfns.start, len(pfns)
    else:
        yield from ((pfn, 1) for pfn in pfns)


def _joined(
    kind: str, runs: Iterable[tuple[int, int]], caller: str | None = None
) -> Iterator[Claim]:
    """
    Join page frames that are next to each other.

    :param runs: first page frame, number of page frames. They may overlap, and the same run may be
        there more than once.
    """
    start = end = 0
    for first, count in sorted(runs):
        if first <= end and start != end:
            end = max(end, first + count)
            continue
        if start != end:
            yield Claim(start, end, kind, caller)
        start, end = first, first + count
    if start != end:
        yield Claim(start, end, kind, caller)
