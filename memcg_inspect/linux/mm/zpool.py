# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Allocators of compressed pages
------------------------------

Mirrors :linux:`mm/zpool.c`, :linux:`mm/zbud.c` and :linux:`mm/z3fold.c`. Up to 6.17 zswap has its
memory from one of several allocators, which ``struct zpool`` refers to. zbud and z3fold, removed in
6.15, store two or three objects in a page. An object of theirs is on one page.
"""

from __future__ import annotations

from typing import NamedTuple

from drgn import Object, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import bit_field, has_type
from memcg_inspect.image.strings import Strings
from memcg_inspect.linux.mm.mmzone import mem_map

__all__ = ("Allocator", "ZpoolReader", "ZswapPart")

#: ``NCHUNKS_ORDER`` of z3fold. A page has that many chunks.
NCHUNKS_ORDER = 6
#: ``BUDDY_MASK`` and ``BUDDY_SHIFT`` of z3fold.
BUDDY_MASK, BUDDY_SHIFT = 3, 2
#: ``1 << PAGE_HEADLESS`` in a handle of z3fold: the object is the whole page.
HEADLESS = 1


class ZswapPart(NamedTuple):
    """
    The part of the data of an entry that is on one page.

    :ivar page: ``struct page *``
    :ivar nid: node of the page
    :ivar offset: offset of the part in the page, in bytes
    :ivar length: bytes of the part
    """

    page: int
    nid: int
    offset: int
    length: int


class Allocator(NamedTuple):
    """
    The allocator of a ``struct zswap_pool``.

    :ivar type: its name: ``zsmalloc``, ``zbud`` or ``z3fold``
    :ivar header: bytes that zswap stores before its data: ``struct zswap_header`` (up to 6.4), if
        the allocator can evict objects
    """

    type: str
    header: int = 0


class ZpoolReader:
    """Reader of the allocators, and finder of the objects of zbud and z3fold."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self.memory = image.memory
        self.frames = mem_map(image)
        self._names = Strings(image.memory)
        self._known: dict[int, Allocator] = {}
        self._has_zpool = has_type(image, "struct zpool")

    def allocator(self, pool: int) -> Allocator:
        """
        Return the allocator of a pool.

        :param pool: ``struct zswap_pool *``
        :raises drgn.FaultError: if the pool cannot be read
        """
        if not self._has_zpool:
            return Allocator("zsmalloc")
        found = self._known.get(pool)
        if found is None:
            found = self._read(self.image.pointer("struct zswap_pool *", pool))
            self._known[pool] = found
        return found

    def _read(self, pool: Object) -> Allocator:
        # 6.6 to 6.10 have several zpools of one type.
        several = pool.type_.type.has_member("zpools")
        driver = (pool.zpools[0] if several else pool.zpool).driver.read_()
        header = 0
        # zpool_evictable()
        if has_type(self.image, "struct zswap_header") and driver.shrink:
            header = sizeof(self.image.type("struct zswap_header"))
        return Allocator(self._names.at(driver.member_("type").value_()), header)

    def zbud(self, handle: int, length: int) -> ZswapPart:
        """
        Return the location of an object of zbud. Its handle is its address.

        :param length: bytes of the object
        :raises drgn.FaultError: if the ``struct page`` cannot be read
        :raises ValueError: if the handle is not that of an object
        """
        return self._part(handle, handle % self.frames.page_size, length)

    def z3fold(self, handle: int, length: int) -> ZswapPart:
        """
        Return the location of an object of z3fold, ``z3fold_map()``.

        :param length: bytes of the object
        :raises drgn.FaultError: if the slot or the ``struct z3fold_header`` cannot be read
        :raises ValueError: if the handle is not that of an object
        """
        page_size = self.frames.page_size
        if handle & HEADLESS:
            return self._part(handle, 0, length)
        slot = self.memory.word(handle)
        name, start = "struct z3fold_header", slot - slot % page_size
        header = sizeof(self.image.type(name))
        data, chunk = self.memory.read(start, header), page_size >> NCHUNKS_ORDER
        buddy = slot - bit_field(self.image, name, "first_num").get(data) & BUDDY_MASK
        offset = {
            1: -(-header // chunk) * chunk,
            2: bit_field(self.image, name, "start_middle").get(data) * chunk,
            3: page_size - (slot % page_size >> BUDDY_SHIFT) * chunk,
        }.get(buddy, 0)
        if offset < header:
            raise ValueError("the slot of the handle does not lead to an object")
        return self._part(start, offset, length)

    def _part(self, address: int, offset: int, length: int) -> ZswapPart:
        page = self.frames.virt_to_page(address)
        if address < self.frames.direct_map or offset + length > self.frames.page_size:
            raise ValueError("the handle does not lead to an object")
        nid = self.frames.nid(self.memory.word(page + self.frames.flags))
        return ZswapPart(page, nid, offset, length)
