# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Compressed pages in zswap
-------------------------

Mirrors :linux:`mm/zswap.c` and, for the node that holds the data, :linux:`mm/zsmalloc.c`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from drgn import FaultError, Object, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import bit_field, has_member, has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import rbtree_entries
from memcg_inspect.linux.lib.xarray import xa_entries
from memcg_inspect.linux.mm.mm_types import MEMCG_DATA_FLAGS
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import NUMA_NO_NODE, Coverage

__all__ = ("ZswapEntry", "ZswapPart", "ZswapReader")

#: Physical address bits that zsmalloc's object locations have room for on 64-bit machines,
#: ``MAX_POSSIBLE_PHYSMEM_BITS``: x86-64 and arm64; x86-64 without 5-level page tables (before
#: they were always built, in 6.17); arm64 with 48 bits.
MAX_POSSIBLE_PHYSMEM_BITS = (52, 46, 48)
#: ``OBJ_ALLOCATED_TAG`` in the handle that stands before each object.
OBJ_ALLOCATED_TAG = 1


class ZswapEntry(NamedTuple):
    """
    One ``struct zswap_entry``.

    :ivar length: bytes of compressed data, which is what is charged
    :ivar objcg: 0 if no memcg pays
    :ivar beyond: bytes at the end of the data that the obj_cgroup of another node pays for
    :ivar beyond_nid: of which node
    """

    address: int
    length: int
    handle: int
    objcg: int
    beyond: int = 0
    beyond_nid: int = NUMA_NO_NODE


class ZswapPart(NamedTuple):
    """
    A part of an entry's data, on one page.

    :ivar page: ``struct page *``
    :ivar offset: bytes into the page
    """

    page: int
    nid: int
    offset: int
    length: int


class ZswapReader:
    """
    Reads the entries of all swap devices.

    :ivar coverage: entries read, and parts of the trees that could not be read
    :ivar entry_size: ``sizeof(struct zswap_entry)``, 0 in kernels without zswap
    :ivar placement: entries whose data was found on pages, and those whose was not
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
        """Walk all entries."""
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
        Read one entry, on a kernel that has zswap.

        :param address: ``struct zswap_entry *``
        :raises drgn.FaultError: if it cannot be read
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
        """Walk the addresses of all entries, ``struct zswap_entry *``."""

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
                    for i in range(int(self.image.object("nr_zswap_trees")[swap_type])):
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

    def nodes(self, entry: ZswapEntry) -> dict[int, int]:
        """Return the bytes of an entry's data by the node of the page that holds them."""
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
        """Return where an entry's data is; ``None`` if it was not found, which is counted."""
        try:
            parts = self._locations.parts(entry)
            self.placement.read += 1
            return parts
        except (FaultError, UnknownKernelError, ValueError) as error:
            self.placement.miss("data of a zswap entry", entry.address, str(error))
            return None

    def owner(self, page: int, offset: int) -> ZswapEntry | None:
        """
        Find the entry whose data is at a place. Walks all entries: nothing leads from the data
        to what it is of.

        :param page: ``struct page *``
        :param offset: bytes into the page
        """
        for entry in self.entries():
            for part in self.parts(entry) or () if entry.length else ():
                if part.page == page and part.offset <= offset < part.offset + part.length:
                    return entry
        return None


class _Locations:
    """Finds the pages behind zsmalloc handles."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self.memory = image.memory
        self.frames = mem_map(image)
        # A location is a page frame number above an index. Where it begins follows from
        # MAX_POSSIBLE_PHYSMEM_BITS, a macro; the first object that names its handle tells.
        shifts = [64 - (bits - self.frames.page_shift) for bits in MAX_POSSIBLE_PHYSMEM_BITS]
        self._shifts = tuple(shifts)
        self._shift = shifts[0]
        page = image.type("struct page")
        # struct zpdesc overlays struct page since 6.14; the members have kept their places.
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
        """:raises ValueError: if the handle leads to no zsmalloc object"""
        for shift in self._shifts:
            self._shift = shift
            try:
                parts = self._parts(entry)
            except (FaultError, UnknownKernelError, ValueError):
                if shift == self._shifts[-1]:
                    raise
                continue
            self._shifts = (shift,)  # known from now on
            return parts
        raise ValueError("no object is there")

    def _parts(self, entry: ZswapEntry) -> list[ZswapPart]:
        location = self.memory.word(entry.handle)
        page = self.frames.page(location >> self._shift)
        size, pages = self._pages_of(page)
        offset = self._offset(location, entry, page, size, pages)
        parts: list[ZswapPart] = []
        at, end, page_size = offset, offset + entry.length, self.frames.page_size
        while at < end:
            if at // page_size >= len(pages):
                raise ValueError("the object is longer than its zspage")
            upto = min(end, (at // page_size + 1) * page_size)
            held = pages[at // page_size]
            nid = self.frames.nid(self.memory.word(held + self.frames.flags))
            parts.append(ZswapPart(held, nid, at % page_size, upto - at))
            at = upto
        return parts

    def _pages_of(self, page: int) -> tuple[int, list[int]]:
        """Size of the objects, and the pages, of the zspage that a page belongs to."""
        address = self.memory.word(page + self._zspage)
        known = self._zspages.get(address)
        if known is not None:
            return known
        zspage = Object(self.image.prog, "struct zspage *", address)
        raw = self.memory.read(address, sizeof(self.image.type("struct zspage")))
        size_class = zspage.pool.size_class[self._class.get(raw)]
        pages = [zspage.member_(self._first).value_()]
        for _ in range(int(size_class.pages_per_zspage) - 1):
            pages.append(self.memory.word(pages[-1] + self._next))
        known = self._zspages[address] = (int(size_class.size), pages)
        return known

    def _offset(
        self, location: int, entry: ZswapEntry, page: int, size: int, pages: list[int]
    ) -> int:
        """
        Where the data begins in the zspage.

        The index in the location has been shifted by a tag (6.1), alone (6.12, 7.2) and below
        the size class (7.3); the right one is the one at which the object's header names the
        handle. Objects of one whole page have no header.
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
        raise ValueError("the object does not name its handle")

    def _word_at(self, page: int, offset: int) -> int:
        pfn = self.frames.pfn(page)
        data = self.image.prog.read((pfn << self.frames.page_shift) + offset, 8, True)
        return int.from_bytes(data, self.memory.order)
