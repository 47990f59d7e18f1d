# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Extensions of struct page
-------------------------

Mirrors ``init_section_page_ext()`` of :linux:`mm/page_ext.c`: each section has a table.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError
from drgn.helpers.linux.mm import in_direct_map
from drgn.helpers.linux.mmzone import pfn_to_section, pfn_to_section_nr, section_nr_to_pfn

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges
from memcg_inspect.linux.mm.pgalloc_tag import PAGE_EXT_INVALID
from memcg_inspect.model import Coverage

__all__ = ("page_ext_tables",)


def page_ext_tables(image: Image, coverage: Coverage) -> Iterator[tuple[int, int]]:
    """
    Yield the tables that are in the direct map. Others are vmalloc areas.

    :param coverage: counts the tables, and sections that are unreadable
    :return: address, size in bytes
    :raises drgn.FaultError: if the size of an extension cannot be read, or cannot be right
    """
    if not has_member(image, "struct mem_section", "page_ext"):
        return
    try:
        size = image.object("page_ext_size")
        each = int(size)
    except UnknownKernelError:
        return
    if each > mem_map(image).page_size:
        # The tables would be larger than the memory that they are about.
        raise FaultError(f"page_ext_size is {each} bytes", size.address_ or 0)
    for start, end in page_ranges(image):
        while start < end:
            try:
                after = int(section_nr_to_pfn(image.prog, pfn_to_section_nr(image.prog, start) + 1))
                first = after - (1 << _section_order(image))
                # The address is biased: it is that of page frame 0.
                table = int(pfn_to_section(image.prog, start).page_ext.value_())
            except FaultError as error:
                coverage.miss("page_ext of a section", error.address, str(error))
                return
            address = (table + each * first) % (1 << 8 * image.memory.word_size)
            if table and not table & PAGE_EXT_INVALID and in_direct_map(image.prog, address):
                coverage.read += 1
                yield address, each * (after - first)
            start = after


def _section_order(image: Image) -> int:
    """Return ``PFN_SECTION_SHIFT``."""
    return int(image.object("SECTION_SIZE_BITS")) - int(image.object("PAGE_SHIFT"))
