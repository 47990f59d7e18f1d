# SPDX-License-Identifier: LGPL-2.1-or-later
"""
zswap
-----

Mirrors ``struct zswap_entry`` of :linux:`mm/zswap.c`, and :linux:`mm/zsmalloc.c` for the pages that
hold the compressed data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from drgn import FaultError, Object, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import bit_field, has_member, has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import list_entries, rbtree_entries
from memcg_inspect.linux.lib.xarray import xa_entries
from memcg_inspect.linux.mm.mm_types import MEMCG_DATA_FLAGS
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import NUMA_NO_NODE, Coverage

__all__ = ("ZswapEntry", "ZswapPart", "ZswapReader", "zswap_cursors")

#: Values of ``MAX_POSSIBLE_PHYSMEM_BITS`` on 64-bit machines: x86-64 and arm64; x86-64 built
#: without 5-level page tables (up to 6.16); arm64 with 48 bits.
MAX_POSSIBLE_PHYSMEM_BITS = (52, 46, 48)
#: ``OBJ_ALLOCATED_TAG``, set in the word before each object that holds its handle.
OBJ_ALLOCATED_TAG = 1


#: ``ZSWAP_ADDRESS_SPACE_PAGES``: pages of a swap device that one tree is for.
ZSWAP_ADDRESS_SPACE_PAGES = 1 << 14
#: The largest ``CONFIG_ZSMALLOC_CHAIN_SIZE``.
ZSMALLOC_CHAIN_SIZE = 16


class ZswapEntry(NamedTuple):
    """
    One ``struct zswap_entry``.

    :ivar address: ``struct zswap_entry *``
    :ivar length: bytes of compressed data; that many bytes are charged
    :ivar handle: zsmalloc handle of the data
    :ivar objcg: ``struct obj_cgroup *``; 0 if no memcg pays
    :ivar beyond: bytes at the end of the data that the obj_cgroup of another node pays for
        (per-node series)
    :ivar beyond_nid: node of that obj_cgroup
    """

    address: int
    length: int
    handle: int
    objcg: int
    beyond: int = 0
    beyond_nid: int = NUMA_NO_NODE


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


class ZswapReader:
    """
    Reader of the zswap entries of all swap devices.

    :ivar coverage: counts the entries that were read, and parts of the trees that are unreadable
    :ivar placement: counts the entries whose data was found, and those whose data was not
    :ivar has_zswap: whether the kernel has zswap
    :ivar entry_size: ``sizeof(struct zswap_entry)``, in bytes; 0 without zswap
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self.memory = image.memory
        self.coverage = Coverage()
        self.placement = Coverage()
        self.has_zswap = has_type(image, "struct zswap_entry")
        self.entry_size = 0
        if not self.has_zswap:
            return
        entry = image.type("struct zswap_entry")
        self.entry_size = sizeof(entry)
        self._length = offsetof(entry, "length")
        self._handle = offsetof(entry, "handle")
        self._objcg = offsetof(entry, "objcg")
        # The project's own fixtures/patches/7.3-pernode/0009: an entry may be on two nodes.
        self._split = [
            bit_field(image, "struct zswap_entry", member)
            for member in ("beyond", "beyond_nid")
            if entry.has_member(member)
        ]
        self._locations = _Locations(image)

    def entries(self) -> Iterator[ZswapEntry]:
        """Iterate over all entries."""
        if not self.has_zswap:
            return
        for address in self.addresses():
            try:
                yield self.entry(address)
            except FaultError as error:
                self.coverage.miss("zswap entry", address, str(error))
                continue
            self.coverage.read += 1

    def entry(self, address: int) -> ZswapEntry:
        """
        Read one entry. The kernel must have zswap.

        :param address: ``struct zswap_entry *``
        :raises drgn.FaultError: if the entry cannot be read
        """
        data = self.memory.read(address, self.entry_size)
        length = int.from_bytes(data[self._length : self._length + 4], self.memory.order)
        split = [field.get(data) for field in self._split]
        if not split or not 0 < split[0] < length:
            split = []
        handle = self.memory.word_at(data, self._handle)
        objcg = self.memory.word_at(data, self._objcg) & ~MEMCG_DATA_FLAGS
        return ZswapEntry(address, length, handle, objcg, *split)

    def addresses(self) -> Iterator[int]:
        """Iterate over the addresses of all entries, ``struct zswap_entry *``."""

        def missed(error: FaultError) -> None:
            self.coverage.miss("tree of zswap entries", error.address, str(error))

        try:
            trees = self.image.object("zswap_trees").read_()
        except UnknownKernelError:
            return
        for swap_type, tree in enumerate(trees):
            if not tree:
                continue
            try:
                if tree.type_.type.unaliased().type_name() == "struct xarray":
                    # Commit 796c2c23e14e ("zswap: replace RB tree with xarray") (in v6.10).
                    for i in range(self._number_of_trees(swap_type)):
                        try:
                            yield from xa_entries(self.image, tree[i], missed)
                        except FaultError as error:
                            missed(error)
                else:
                    for entry in rbtree_entries(
                        self.image,
                        "struct zswap_entry",
                        tree.rbroot.address_of_(),
                        "rbnode",
                        missed,
                    ):
                        yield entry.value_()
            except FaultError as error:
                missed(error)

    def _number_of_trees(self, swap_type: int) -> int:
        """
        Return the number of XArrays of a swap device, ``zswap_swapon()``.

        :raises drgn.FaultError: if they are too many for its size
        """
        number = int(self.image.object("nr_zswap_trees")[swap_type])
        device = self.image.object("swap_info")[swap_type].read_()
        if not device or number > -(-int(device.max) // ZSWAP_ADDRESS_SPACE_PAGES):
            raise FaultError(f"{number} trees of zswap entries", device.value_())
        return number

    def nodes(self, entry: ZswapEntry) -> dict[int, int]:
        """
        Return the bytes of the data of an entry, by the node of the page they are on.

        :return: all bytes are on ``NUMA_NO_NODE`` if the data was not found
        """
        if not entry.length:
            return {}
        parts = self.parts(entry)
        if parts is None:
            return {NUMA_NO_NODE: entry.length}
        nodes: dict[int, int] = {}
        for part in parts:
            nodes[part.nid] = nodes.get(part.nid, 0) + part.length
        return nodes

    def parts(self, entry: ZswapEntry) -> list[ZswapPart] | None:
        """
        Return the location of the data of an entry.

        :return: ``None`` if it was not found, which :attr:`placement` counts
        """
        try:
            parts = self._locations.parts(entry)
            self.placement.read += 1
            return parts
        except (FaultError, UnknownKernelError, ValueError) as error:
            self.placement.miss("data of a zswap entry", entry.address, str(error))
            return None

    def owner(self, page: int, offset: int) -> ZswapEntry | None:
        """
        Find the entry whose data includes a byte of a page.

        All entries are read: nothing refers from the data to its entry.

        :param page: ``struct page *``
        :param offset: offset in the page, in bytes
        :return: ``None`` if there is none
        """
        for entry in self.entries():
            for part in self.parts(entry) or () if entry.length else ():
                if part.page == page and part.offset <= offset < part.offset + part.length:
                    return entry
        return None


def zswap_cursors(image: Image) -> list[int]:
    """
    Return the memcgs whose entries zswap writes back next. Each cursor holds a reference.

    ``shrink_worker()`` leaves a cursor where it ends. ``zswap_memcg_offline_cleanup()`` moves it
    away from a memcg that is removed.

    :return: ``struct mem_cgroup *``
    :raises drgn.FaultError: if a cursor cannot be read
    """
    try:
        return [image.object("zswap_next_shrink").value_()]
    except UnknownKernelError:
        pass
    # Each pool had a cursor in 6.8 to 6.10. Before, there was none.
    if not has_member(image, "struct zswap_pool", "next_shrink"):
        return []
    faults: list[FaultError] = []
    head = image.object("zswap_pools").address_of_()
    pools = list_entries(image, "struct zswap_pool", head, "list", faults.append)
    found = [pool.next_shrink.value_() for pool in pools]
    if faults:
        raise faults[0]
    return found


class _Locations:
    """Finder of zsmalloc objects by handle, ``zs_obj_read_begin()``."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self.memory = image.memory
        self.frames = mem_map(image)
        # A handle points to a location: a page frame number in the high bits, the index of the
        # object in the low bits. The shift follows from the macro MAX_POSSIBLE_PHYSMEM_BITS. All
        # known values are tried until the header of an object names its handle.
        shifts = [64 - (bits - self.frames.page_shift) for bits in MAX_POSSIBLE_PHYSMEM_BITS]
        self._shifts = tuple(shifts)
        self._shift = shifts[0]
        page = image.type("struct page")
        # struct zpdesc overlays struct page since 6.14. The members have the same offsets.
        if has_type(image, "struct zpdesc"):
            desc = image.type("struct zpdesc")
            self._zspage, self._next = offsetof(desc, "zspage"), offsetof(desc, "next")
        else:
            self._zspage, self._next = offsetof(page, "private"), offsetof(page, "index")
        self._class = bit_field(image, "struct zspage", "class")
        self._first = (
            "first_zpdesc" if has_member(image, "struct zspage", "first_zpdesc") else ("first_page")
        )
        self._zspages: dict[int, tuple[int, list[int]]] = {}

    def parts(self, entry: ZswapEntry) -> list[ZswapPart]:
        """
        Return the location of the data of an entry.

        :raises drgn.FaultError: if a structure of zsmalloc cannot be read
        :raises ValueError: if the handle is not that of a zsmalloc object
        """
        for shift in self._shifts:
            self._shift = shift
            try:
                parts = self._parts(entry)
            except (FaultError, UnknownKernelError, ValueError):
                if shift == self._shifts[-1]:
                    raise
                continue
            self._shifts = (shift,)  # do not try the others again
            return parts
        raise ValueError("the handle does not lead to an object")

    def _parts(self, entry: ZswapEntry) -> list[ZswapPart]:
        location = self.memory.word(entry.handle)
        page = self.frames.page(location >> self._shift)
        size, pages = self._pages_of(page)
        offset = self._offset(location, entry, page, size, pages)
        parts: list[ZswapPart] = []
        start, end, page_size = offset, offset + entry.length, self.frames.page_size
        while start < end:
            if start // page_size >= len(pages):
                raise ValueError("the object is longer than its zspage")
            page_end = min(end, (start // page_size + 1) * page_size)
            data_page = pages[start // page_size]
            nid = self.frames.nid(self.memory.word(data_page + self.frames.flags))
            parts.append(ZswapPart(data_page, nid, start % page_size, page_end - start))
            start = page_end
        return parts

    def _pages_of(self, page: int) -> tuple[int, list[int]]:
        """
        Return the objects' size and the pages of the ``struct zspage`` that a page belongs to.

        :param page: ``struct page *``
        :return: size in bytes, ``struct page *`` of all pages
        """
        address = self.memory.word(page + self._zspage)
        known = self._zspages.get(address)
        if known is not None:
            return known
        zspage = Object(self.image.prog, "struct zspage *", address)
        raw = self.memory.read(address, sizeof(self.image.type("struct zspage")))
        size_class = zspage.pool.size_class[self._class.get(raw)]
        pages, number = [zspage.member_(self._first).value_()], int(size_class.pages_per_zspage)
        if not 0 < number <= ZSMALLOC_CHAIN_SIZE:
            raise FaultError(f"a zspage of {number} pages", size_class.value_())
        for _ in range(number - 1):
            pages.append(self.memory.word(pages[-1] + self._next))
        known = self._zspages[address] = (int(size_class.size), pages)
        return known

    def _offset(
        self, location: int, entry: ZswapEntry, page: int, size: int, pages: list[int]
    ) -> int:
        """
        Return the offset of the data in its zspage, in bytes.

        The low bits of a location differ between releases:

        - 6.1: the index, and ``OBJ_TAG_BITS`` below it;
        - 6.12 to 7.2: the index;
        - 7.3: the size class, and the index below it.

        All are tried: the header of the right object names the handle. Objects that are a whole
        page (``ZsHugePage()``) have no header, and are alone in their zspage.
        """
        if len(pages) == 1 and size == self.frames.page_size:
            return 0
        low = location & (1 << self._shift) - 1
        first = pages.index(page) * self.frames.page_size
        for index in (low, low >> 1, low & 0x7FFF):
            offset = index * size
            if offset // self.frames.page_size != first // self.frames.page_size:
                continue
            header = self._word_at(page, offset % self.frames.page_size)
            if header & ~OBJ_ALLOCATED_TAG == entry.handle:
                return offset + self.memory.word_size
        raise ValueError("the header of the object does not have its handle")

    def _word_at(self, page: int, offset: int) -> int:
        pfn = self.frames.pfn(page)
        data = self.image.prog.read((pfn << self.frames.page_shift) + offset, 8, True)
        return int.from_bytes(data, self.memory.order)
