# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Objects of zsmalloc
-------------------

Mirrors :linux:`mm/zsmalloc.c`: the pages that hold an object.
"""

from __future__ import annotations

from functools import lru_cache

from drgn import FaultError, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import bit_field, has_member, has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.memory import Blocks
from memcg_inspect.linux.arch.pgtable import vmcoreinfo_number
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.zpool import ZswapPart

__all__ = ("ZsmallocObjects",)

#: Values of ``MAX_POSSIBLE_PHYSMEM_BITS`` on 64-bit machines that define it: x86-64 and arm64;
#: x86-64 built without 5-level page tables (up to 6.16); arm64 with 48 bits. On others, it is
#: ``MAX_PHYSMEM_BITS``.
MAX_POSSIBLE_PHYSMEM_BITS = (52, 46, 48)
#: ``OBJ_ALLOCATED_TAG``, set in the word before each object that holds its handle.
OBJ_ALLOCATED_TAG = 1
#: The largest ``CONFIG_ZSMALLOC_CHAIN_SIZE``.
ZSMALLOC_CHAIN_SIZE = 16
#: Pages whose zspage and node are kept.
_MOST_PAGES = 1 << 14


class ZsmallocObjects:
    """Finder of objects by their handle, ``zs_obj_read_begin()``."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self.memory = image.memory
        self.frames = mem_map(image)
        # A handle points to a location: a page frame number in the high bits, the index of the
        # object in the low bits. The shift follows from the macro MAX_POSSIBLE_PHYSMEM_BITS. All
        # known values are tried until the header of an object names its handle.
        physical = vmcoreinfo_number(image, "MAX_PHYSMEM_BITS", MAX_POSSIBLE_PHYSMEM_BITS[0])
        known = dict.fromkeys((*MAX_POSSIBLE_PHYSMEM_BITS, physical))
        shifts = [64 - (bits - self.frames.page_shift) for bits in known]
        self._shifts = tuple(shifts)
        self._shift = shifts[0]
        page = image.type("struct page")
        # struct zpdesc overlays struct page since 6.14. The members have the same offsets.
        if has_type(image, "struct zpdesc"):
            desc = image.type("struct zpdesc")
            self._owner, self._next = offsetof(desc, "zspage"), offsetof(desc, "next")
        else:
            self._owner, self._next = offsetof(page, "private"), offsetof(page, "index")
        self._class = bit_field(image, "struct zspage", "class")
        has_zpdesc = has_member(image, "struct zspage", "first_zpdesc")
        self._first = "first_zpdesc" if has_zpdesc else "first_page"
        # Many objects are in one page, and their handles in one slab.
        self._near = image.memory if image.is_moving else Blocks(image.memory)
        keep = lru_cache(0 if image.is_moving else _MOST_PAGES)
        self._zspage, self._nid = keep(self._read_zspage), keep(self._read_nid)

    def parts(self, handle: int, skip: int, length: int) -> list[ZswapPart]:
        """
        Return the location of the data of an object.

        :param skip: bytes of the object before the data
        :param length: bytes of the data
        :raises drgn.FaultError: if a structure of zsmalloc cannot be read
        :raises ValueError: if the handle is not that of a zsmalloc object
        """
        for shift in self._shifts:
            self._shift = shift
            try:
                parts = self._parts(handle, skip, length)
            except (FaultError, UnknownKernelError, ValueError):
                if shift == self._shifts[-1]:
                    raise
                continue
            self._shifts = (shift,)  # do not try the others again
            return parts
        raise ValueError("the handle does not lead to an object")

    def _parts(self, handle: int, skip: int, length: int) -> list[ZswapPart]:
        location = self._near.word(handle)
        page = self.frames.page(location >> self._shift)
        size, pages = self._zspage(self._near.word(page + self._owner))
        start = self._offset(location, handle, page, size, pages) + skip
        parts: list[ZswapPart] = []
        end, page_size = start + length, self.frames.page_size
        while start < end:
            if start // page_size >= len(pages):
                raise ValueError("the object is longer than its zspage")
            page_end = min(end, (start // page_size + 1) * page_size)
            data_page = pages[start // page_size]
            parts.append(
                ZswapPart(data_page, self._nid(data_page), start % page_size, page_end - start)
            )
            start = page_end
        return parts

    def _read_nid(self, page: int) -> int:
        return self.frames.nid(self.memory.word(page + self.frames.flags))

    def _read_zspage(self, address: int) -> tuple[int, list[int]]:
        """
        Return the objects' size and the pages of a zspage.

        :param address: ``struct zspage *``
        :return: size in bytes, ``struct page *`` of all pages
        """
        zspage = self.image.pointer("struct zspage *", address)
        raw = self.memory.read(address, sizeof(self.image.type("struct zspage")))
        size_class = zspage.pool.size_class[self._class.get(raw)]
        pages, number = [zspage.member_(self._first).value_()], int(size_class.pages_per_zspage)
        if not 0 < number <= ZSMALLOC_CHAIN_SIZE:
            raise FaultError(f"a zspage of {number} pages", size_class.value_())
        for _ in range(number - 1):
            pages.append(self.memory.word(pages[-1] + self._next))
        return int(size_class.size), pages

    def _offset(self, location: int, handle: int, page: int, size: int, pages: list[int]) -> int:
        """
        Return the offset of an object in its zspage, in bytes, without its header.

        The low bits of a location differ between releases:

        - up to 6.8: the index, and ``OBJ_TAG_BITS`` below it: 1, in 6.2 to 6.4 with zpool 2;
        - 6.9 to 7.2: the index;
        - 7.3: the size class, and the index below it.

        All are tried: the header of the right object names the handle. Objects that are a whole
        page (``ZsHugePage()``) have no header, and are alone in their zspage.
        """
        if len(pages) == 1 and size == self.frames.page_size:
            return 0
        low = location & (1 << self._shift) - 1
        first = pages.index(page) * self.frames.page_size
        for index in (low, low >> 1, low >> 2, low & 0x7FFF):
            offset = index * size
            if offset // self.frames.page_size != first // self.frames.page_size:
                continue
            header = self._near.word(self.frames.virt(page) + offset % self.frames.page_size)
            if header & ~OBJ_ALLOCATED_TAG == handle:
                return offset + self.memory.word_size
        raise ValueError("the header of the object does not have its handle")
