# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Nodes, sections and page frames
-------------------------------

Mirrors :linux:`include/linux/mmzone.h` and the node in the page flags
(:linux:`include/linux/page-flags-layout.h`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from drgn import FaultError, Object, offsetof, sizeof
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.mm import for_each_valid_page_range, page_to_virt
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.nodemask import nr_node_ids

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import array_length
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.model import ImageError

__all__ = (
    "MemMap",
    "PageRange",
    "mem_map",
    "online_nodes",
    "page_ranges",
    "possible_cpus",
    "possible_nodes",
    "split_ranges",
)


class MemMap(NamedTuple):
    """
    The layout of the memory map, ``struct page[]``.

    :ivar base: address of the ``struct page`` of page frame 0
    :ivar size: ``sizeof(struct page)``
    :ivar page_shift: ``PAGE_SHIFT``
    :ivar flags: offset of the flags word in ``struct page``
    :ivar node_shift: bits below the node id in the flags word
    :ivar node_mask: ``NODES_MASK``; 0 where the kernel has one node only
    :ivar direct_map: address of page frame 0 in the direct map
    """

    base: int
    size: int
    page_shift: int
    flags: int
    node_shift: int
    node_mask: int
    direct_map: int

    @property
    def page_size(self) -> int:
        """``PAGE_SIZE``, in bytes."""
        return 1 << self.page_shift

    def page(self, pfn: int) -> int:
        """Return the address of the ``struct page`` of a page frame."""
        return self.base + pfn * self.size

    def pfn(self, page: int) -> int:
        """Return the page frame number of a ``struct page *``."""
        return (page - self.base) // self.size

    def virt(self, page: int) -> int:
        """Return the address of a page's memory in the direct map, ``page_to_virt()``."""
        return self.direct_map + (self.pfn(page) << self.page_shift)

    def virt_to_page(self, address: int) -> int:
        """Return the ``struct page *`` of an address in the direct map."""
        return self.page(address - self.direct_map >> self.page_shift)

    def nid(self, flags: int) -> int:
        """Return the node in a flags word, ``page_to_nid()``."""
        return flags >> self.node_shift & self.node_mask


class PageRange(NamedTuple):
    """
    A range of page frames with contiguous ``struct page``.

    :ivar start: first page frame number
    :ivar end: last page frame number plus 1
    """

    start: int
    end: int


@per_image
def mem_map(image: Image) -> MemMap:
    """
    Find the layout of the memory map.

    The array ``node_data`` has ``1 << NODES_SHIFT`` elements. The node is in the highest bits of
    the flags word: with ``CONFIG_SPARSEMEM_VMEMMAP``, no section number is above it.

    :raises ImageError: if the memory model is neither ``SPARSEMEM_VMEMMAP`` nor ``FLATMEM``
    """
    memory = image.memory
    page = image.type("struct page")
    try:
        base = int(image.object("vmemmap").value_())
    except UnknownKernelError:
        try:
            base = int(image.object("mem_map").value_())
        except UnknownKernelError:
            raise ImageError(
                "this kernel has neither vmemmap nor mem_map (SPARSEMEM without "
                "CONFIG_SPARSEMEM_VMEMMAP); its page frames cannot be walked"
            ) from None
    try:
        nodes = array_length(image.object("node_data").type_)
    except UnknownKernelError:
        nodes = 1  # CONFIG_NUMA=n
    width = max(nodes - 1, 0).bit_length()
    found = MemMap(
        base=base,
        size=sizeof(page),
        page_shift=int(image.object("PAGE_SHIFT").value_()),
        flags=offsetof(page, "flags"),
        node_shift=8 * memory.word_size - width,
        node_mask=(1 << width) - 1,
        direct_map=int(page_to_virt(Object(image.prog, "struct page *", base)).value_()),
    )
    _check_node_bits(image, found)
    return found


def _check_node_bits(image: Image, found: MemMap) -> None:
    # The first page frame of a node must name that node.
    memory = image.memory
    for pgdat in for_each_online_pgdat(image.prog):
        pfn, present = int(pgdat.node_start_pfn), int(pgdat.node_present_pages)
        if not present:
            continue
        try:
            flags = memory.word(found.page(pfn) + found.flags)
        except FaultError:
            continue
        if found.nid(flags) != int(pgdat.node_id):
            raise ImageError(
                f"the page flags of page frame {pfn:#x} name node {found.nid(flags)}, its "
                f"pglist_data node {int(pgdat.node_id)}: this layout of page flags is not known"
            )


def page_ranges(image: Image) -> list[PageRange]:
    """Return the ranges of valid page frames, in ascending order."""
    return [PageRange(start, end) for start, end, _ in for_each_valid_page_range(image.prog)]


def split_ranges(ranges: Iterable[PageRange], pages: int) -> Iterator[PageRange]:
    """
    Split ranges of page frames.

    :param pages: page frames in each part, except the last one of each range
    """
    for start, end in ranges:
        for first in range(start, end, pages):
            yield PageRange(first, min(first + pages, end))


@per_image
def possible_nodes(image: Image) -> range:
    """Return ``[0, nr_node_ids)``, the length of ``memcg->nodeinfo``."""
    return range(nr_node_ids(image.prog))


@per_image
def online_nodes(image: Image) -> tuple[int, ...]:
    """Return the nodes that are online."""
    return tuple(int(pgdat.node_id) for pgdat in for_each_online_pgdat(image.prog))


@per_image
def possible_cpus(image: Image) -> tuple[int, ...]:
    """Return the CPUs in ``cpu_possible_mask``."""
    return tuple(for_each_possible_cpu(image.prog))
