# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Nodes of percpu pages
---------------------

Mirrors ``pcpu_chunk_page()`` of :linux:`mm/percpu-vm.c`, which is ``vmalloc_to_page()``. A machine
has a page for each possible CPU and each page of a unit, so the page tables are read a table at a
time, and the memory map a block at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.linux.mm.init_mm import KernelTables, kernel_page
from memcg_inspect.linux.mm.mm_types import page_nids
from memcg_inspect.linux.mm.mm_types_columns import PageColumns
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import NUMA_NO_NODE, Coverage

__all__ = ("PcpuPages",)

#: ``struct page`` that are read together, and how many such blocks are kept: 16 MiB of memory.
_BLOCK, _MOST_BLOCKS = 512, 4096


def _no_nids(image: Image) -> dict[int, int]:
    return {}


class PcpuPages:
    """
    Reader of the nodes of pages that are mapped into the address space of the kernel.

    :ivar coverage: counts the pages whose node was found, and those whose node was not
    """

    def __init__(self, image: Image) -> None:
        self.coverage = Coverage()
        self._image, self._memory, self._frames = image, image.memory, mem_map(image)
        self._nids: dict[int, int] = {}
        #: Those that were found with others, or by earlier readers of a session.
        self._known = image.keep(_no_nids)
        #: The nodes of the page frames of a block, if they are on several; ``None`` if unreadable.
        self._blocks: OrderedDict[int, list[int] | None] = OrderedDict()
        #: The node of the blocks that are on one.
        self._on_one: dict[int, int] = {}

    def nid(self, address: int) -> int:
        """
        Return the node of one page.

        :param address: any address in it
        :return: ``NUMA_NO_NODE`` if it is not found
        """
        number = self._in_kernel(address) >> self._frames.page_shift
        nid = self._nids.get(number)
        if nid is None:
            nid = self._nids[number] = self._one(number)
        return nid

    def _in_kernel(self, address: int) -> int:
        """Return an address that was computed as in C, where it wraps around."""
        return untagged(self._image, address % (1 << 8 * self._memory.word_size))

    def _one(self, number: int) -> int:
        nid = self._known.get(number)
        if nid is None:
            address = number << self._frames.page_shift
            try:
                page = kernel_page(self._image, address)
                nid = self._frames.nid(self._memory.word(page + self._frames.flags))
            except FaultError as error:
                self.coverage.miss("node of a percpu page", address, str(error))
                return NUMA_NO_NODE
            self._known[number] = nid
        self.coverage.read += 1
        return nid

    def nids(self, start: int, count: int) -> list[int]:
        """
        Return the nodes of pages that follow each other.

        :param start: address of the first
        :return: a node for each; ``NUMA_NO_NODE`` for those that are not found
        """
        shift = self._frames.page_shift
        nids = [] if self._image.is_moving else self._together(start, count << shift)
        if len(nids) == count and NUMA_NO_NODE not in nids:
            self.coverage.read += count
            return nids
        return [self.nid(start + (number << shift)) for number in range(count)]

    def expect(self, start: int, count: int) -> None:
        """Find together the nodes of pages that are asked for one by one later."""
        if self._image.is_moving:
            return
        shift = self._frames.page_shift
        first = self._in_kernel(start) >> shift
        nids = self._together(start, count << shift)
        if len(nids) == count:
            found = zip(range(first, first + count), nids, strict=True)
            self._known |= {number: nid for number, nid in found if nid != NUMA_NO_NODE}

    def _together(self, start: int, size: int) -> list[int]:
        """Return the nodes of pages as far as they are mapped, as :meth:`nids()` does."""
        tables, found = self._tables, list[int]()
        if tables is None:
            return found
        for pfns in tables.frames(self._in_kernel(start), size):
            try:
                # Almost all blocks are on one node.
                found += [self._on_one[pfn // _BLOCK] for pfn in pfns]
            except KeyError:
                found += map(self._of_frame, pfns)
        return found

    @cached_property
    def _tables(self) -> KernelTables | None:
        try:
            tables = KernelTables(self._image, Coverage())
        except FaultError:
            return None
        return tables if tables.can_read else None

    def _of_frame(self, pfn: int) -> int:
        number, at = divmod(pfn, _BLOCK)
        if number in self._on_one:
            return self._on_one[number]
        if number not in self._blocks:
            nids = self._block(number)
            if isinstance(nids, int):
                self._on_one[number] = nids
                return nids
            self._blocks[number] = nids
            if len(self._blocks) > _MOST_BLOCKS:
                self._blocks.popitem(last=False)
        found = self._blocks[number]
        return NUMA_NO_NODE if found is None else found[at]

    def _block(self, number: int) -> int | list[int] | None:
        """Return the nodes of page frames: one if all are on it, ``None`` if unreadable."""
        start, size = self._frames.page(number * _BLOCK), self._frames.size * _BLOCK
        try:
            data = self._memory.read(start, size)
            return page_nids(self._memory, self._frames, PageColumns(data, self._frames.size))
        except FaultError:
            return None
