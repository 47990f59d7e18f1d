# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What struct page says of its page
---------------------------------

Mirrors ``stable_page_flags()`` of :linux:`fs/proc/page.c` (``/proc/kpageflags``), for all pages of
a piece of the memory map at once. What no mark tells is left to the owners of pages.

What differs between kernel releases:

- for pages of hugetlb, see :class:`~memcg_inspect.linux.mm.hugetlb.HugetlbPages`;
- pages of zsmalloc have a page type since commit 43d746dc49bb ("mm/zsmalloc: use a proper page
  type") (in v6.11). Before, ``page->mapping`` names ``zsmalloc_mops``.

Files of secret memory (:linux:`mm/secretmem.c`) have address space operations of their own.
"""

from __future__ import annotations

from typing import NamedTuple

from drgn import FaultError, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import constant
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.hugetlb import HugetlbPages
from memcg_inspect.linux.mm.internal import ZonePageReader, page_type_markers
from memcg_inspect.linux.mm.mm_types import RawPiece, page_layout
from memcg_inspect.linux.mm.mm_types_columns import FlagColumn, Marker, PageColumns, positions
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.page_alloc import bare_markers
from memcg_inspect.linux.mm.page_flags import page_flags

__all__ = ("UNMARKED", "MarkReader", "Marks")

#: Page types by the kind of their pages. ``buddy`` pages are found by themselves.
_TYPES = {
    "offline": "offline",
    "table": "pagetables",
    "guard": "guard",
    "hugetlb": "hugetlb",
    "zsmalloc": "zsmalloc",
    "unaccepted": "unaccepted",
    "large_kmalloc": "large_kmalloc",
}
#: ``PAGE_MAPPING_ANON`` and ``PAGE_MAPPING_MOVABLE``.
_ANON, _MOVABLE = 1, 2
#: ``PP_SIGNATURE`` without ``POISON_POINTER_DELTA``, and the bits that are always those.
_PP_SIGNATURE, _PP_MASK = 0x40, 0x7C
#: The upper 16 bits of ``POISON_POINTER_DELTA`` (``CONFIG_ILLEGAL_POINTER_VALUE``).
_POISON = 0xDEAD

#: The code of pages that no mark tells the kind of.
UNMARKED = 0


class Marks(NamedTuple):
    """
    What the pages of a piece say of themselves.

    The columns are integers with a byte of 0 or 1 for each page, the first in the lowest byte.

    :ivar codes: a byte for each page: the index of its kind in :attr:`MarkReader.kinds`, or
        :data:`UNMARKED`. Only that of the first page of a block has a meaning
    :ivar free: order of each free block that begins in the piece, by index
    :ivar marked: order of each other block that begins in the piece and whose first page alone is
        marked, by index
    :ivar tails: pages that are not the first of a compound page
    :ivar bare: pages without refcount and type, charged to nobody, and in no compound page
    :ivar kmem: pages that are charged as kernel memory
    :ivar lru: flags that determine the LRU list, a byte for each page:
        :data:`memcg_inspect.linux.mm.mm_types.LRU_FLAGS`
    :ivar mlocked: a byte of 0 or 1 for each page: locked by a process, and so on the list of
        unevictable pages
    """

    codes: bytearray
    free: dict[int, int]
    marked: dict[int, int]
    tails: int
    bare: int
    kmem: int
    lru: bytes
    mlocked: bytes


class MarkReader:
    """
    Finder of the marks of pages.

    :ivar kinds: kinds by code
    """

    def __init__(self, image: Image) -> None:
        self._memory, self._frames, self._layout = image.memory, mem_map(image), page_layout(image)
        layout = self._layout
        page = image.type("struct page")
        self._mapping = offsetof(page, "mapping")
        self._bare = bare_markers(image)
        self._link = offsetof(page, "lru")
        self._zones = ZonePageReader(image)
        types = {kind: page_type_markers(image, name) for name, kind in _TYPES.items()}
        self._types = {kind: markers for kind, markers in types.items() if markers}
        self._hugetlb = HugetlbPages(image)
        self._zsmalloc = self._zsmalloc_mapping(image)
        self._reserved = self._flag(image, "PG_reserved")
        self._hwpoison = self._flag(image, "PG_hwpoison")  # CONFIG_MEMORY_FAILURE
        # PageVmemmapSelfHosted(), of memory that was added with its own memory map.
        self._self_hosted = self._flag(image, "PG_vmemmap_self_hosted")
        self._pool = self._pool_markers(image)
        bit = page_flags(image).swapbacked.shift
        self._swapbacked = Marker(self._byte(bit), 1 << bit % 8, 1 << bit % 8)
        low = self._memory.byte_of_word(self._mapping, 0)
        self._anon = Marker(low, _ANON, _ANON)
        self._movable = Marker(low, _ANON | _MOVABLE, _MOVABLE)
        marked = [*self._types, "slab", "reserved", "hwpoison", "memmap"]
        marked += [
            "page_pool",
            "anon",
            "shmem",
            "file",
            "user",
            "hugetlb",
            "hugetlb_free",
            "zsmalloc",
            "secretmem",
        ]
        self.kinds: tuple[str, ...] = ("", *dict.fromkeys(marked))
        self._code = {kind: code for code, kind in enumerate(self.kinds)}
        self._lru: FlagColumn = layout.lru_flags
        self._mlocked = self._flag(image, "PG_mlocked")  # CONFIG_MMU
        self._unevictable = self._flag(image, "PG_unevictable")
        self._secret = _operations(image, "secretmem_aops")
        self._operations = offsetof(image.type("struct address_space"), "a_ops")
        #: Whether mappings are of secret memory, by ``page->mapping``.
        self._secret_mappings: dict[int, bool] = {}

    def _byte(self, bit: int) -> int:
        return self._memory.byte_of_word(self._frames.flags, bit // 8)

    def _flag(self, image: Image, name: str) -> Marker | None:
        bit = constant(image, name)
        return None if bit is None else Marker(self._byte(bit), 1 << bit % 8, 1 << bit % 8)

    def _pool_markers(self, image: Image) -> tuple[Marker, ...]:
        """Return the tests of ``page->pp_magic``, ``page_pool_page_is_pp()``."""
        page, memory = image.type("struct page"), self._memory
        if not page.has_member("pp_magic") or memory.word_size < 8:
            return ()
        # Between the signature and POISON_POINTER_DELTA there may be an index (since 6.16).
        at = offsetof(page, "pp_magic")
        return (
            Marker(memory.byte_of_word(at, 0), _PP_MASK, _PP_SIGNATURE),
            Marker(memory.byte_of_word(at, 6), 0xFF, _POISON & 0xFF),
            Marker(memory.byte_of_word(at, 7), 0xFF, _POISON >> 8),
        )

    def _zsmalloc_mapping(self, image: Image) -> int | None:
        if "zsmalloc" in self._types:
            return None
        try:
            return int(image.symbol("zsmalloc_mops").address) | _MOVABLE
        except UnknownKernelError:
            return None

    def read(self, raw: RawPiece) -> Marks:
        """Find the marks of a piece of the memory map."""
        layout, columns = self._layout, raw.columns
        count = columns.count
        tails = raw.tails(layout.tail)
        alone = columns.everything & ~tails
        codes, known = 0, 0
        slabs = columns.all_of(layout.slab) & alone
        for kind, markers in self._types.items():
            column = columns.all_of(markers) & alone & ~slabs & ~known
            codes += column * self._code[kind]
            known |= column
        codes += slabs * self._code["slab"]
        kmem = columns.of(layout.kmem) & alone & ~slabs
        known |= slabs
        for kind, pages in self._reserved_pages(columns).items():
            column = pages & alone & ~known
            codes += column * self._code[kind]
            known |= column
        pool = columns.all_of(self._pool) & alone & ~known & ~kmem
        pool &= self._references(columns)
        codes += pool * self._code["page_pool"]
        known |= pool
        users, found = self._users(columns, alone & ~known & ~kmem)
        codes += users
        known |= found
        bare = columns.all_of(self._bare) & alone & ~known
        bare &= ~kmem & ~columns.of(layout.head)
        found_codes = bytearray(codes.to_bytes(count, "little"))
        self._set_others(raw, found_codes, alone)
        unlisted = alone & ~columns.of(layout.on_lru)
        unevictable = _flagged(self._unevictable, columns) & alone
        if self._secret:
            self._set_secret(raw, found_codes, unlisted | unevictable)
        return Marks(
            codes=found_codes,
            free=self._free(raw, alone, count),
            marked=self._zones.marked_orders(raw, alone),
            tails=tails,
            bare=bare,
            kmem=kmem,
            lru=columns.flags(self._lru),
            mlocked=(_flagged(self._mlocked, columns) & unevictable & ~unlisted).to_bytes(
                count, "little"
            ),
        )

    def _reserved_pages(self, columns: PageColumns) -> dict[str, int]:
        """Return pages that are reserved, and those that are poisoned, the most special first."""
        flags = {
            "hwpoison": self._hwpoison,
            "memmap": self._self_hosted,
            "reserved": self._reserved,
        }
        found = {kind: _flagged(flag, columns) for kind, flag in flags.items()}
        found["memmap"] &= found["reserved"]
        return found

    def _users(self, columns: PageColumns, rest: int) -> tuple[int, int]:
        """
        Find user pages, which are mapped by processes, or belong to files.

        :param rest: pages that can be
        :return: the codes of their kinds, and the pages
        """
        layout, word = self._layout, self._memory.word_size
        anon = columns.of(self._anon)
        charged = columns.of(layout.lru) & columns.not_zero(layout.memcg_data, word)
        listed = columns.of(layout.on_lru)
        used = self._references(columns)
        users = rest & used & (anon | charged | listed)
        mapped = columns.not_zero(self._mapping, word) & users
        anon &= users
        mapped &= ~anon
        shmem = mapped & columns.of(self._swapbacked)
        kinds = {
            "anon": anon,
            "shmem": shmem,
            "file": mapped & ~shmem,
            "user": users & ~anon & ~mapped,
        }
        return sum(column * self._code[kind] for kind, column in kinds.items()), users

    def _references(self, columns: PageColumns) -> int:
        return columns.not_zero(self._layout.refcount, 4)

    def _set_others(self, raw: RawPiece, codes: bytearray, alone: int) -> None:
        """Set the codes of hugetlb pages, and of pages of zsmalloc on kernels without that type."""
        size, code = self._frames.size, self._code
        for i, order in raw.orders.items():
            if order > 0 and self._hugetlb.begins(raw.data, i):
                at = i * size + self._layout.refcount
                codes[i] = code["hugetlb" if any(raw.data[at : at + 4]) else "hugetlb_free"]
        if self._zsmalloc is not None:
            movable = raw.columns.of(self._movable) & alone
            for i in positions(movable, len(codes)):
                word = self._memory.word_at(raw.data, i * size + self._mapping)
                if codes[i] == UNMARKED and word == self._zsmalloc:
                    codes[i] = code["zsmalloc"]

    def _set_secret(self, raw: RawPiece, codes: bytearray, candidates: int) -> None:
        """
        Set the codes of secret memory.

        :param candidates: pages that are unevictable, or on no list
        """
        file, known = self._code["file"], self._secret_mappings
        for i in positions(candidates, len(codes)):
            if codes[i] != file:
                continue
            mapping = self._memory.word_at(raw.data, i * self._frames.size + self._mapping)
            is_secret = known.get(mapping)
            if is_secret is None:
                is_secret = known[mapping] = self._is_secret(mapping)
            if is_secret:
                codes[i] = self._code["secretmem"]

    def _is_secret(self, mapping: int) -> bool:
        try:
            return self._memory.word(mapping + self._operations) == self._secret
        except FaultError:
            return False

    def _free(self, raw: RawPiece, alone: int, count: int) -> dict[int, int]:
        first, orders = self._zones.free_orders(raw, alone)
        found = zip(positions(first, count), orders, strict=True)
        return {i: order for i, order in found if order <= self._zones.most_order}

    def payers(self, raw: RawPiece) -> list[int]:
        """Return ``memcg_data`` of each page of a piece."""
        return self._memory.words(raw.data, self._layout.memcg_data, self._frames.size)

    def links(self, raw: RawPiece) -> list[int]:
        """Return the first word of ``page->lru`` of each page of a piece."""
        return self._memory.words(raw.data, self._link, self._frames.size)


def _flagged(flag: Marker | None, columns: PageColumns) -> int:
    return columns.of(flag) if flag is not None else 0


def _operations(image: Image, name: str) -> int:
    """Return the address of a variable of the kernel; 0 if there is none."""
    try:
        return int(image.symbol(name).address)
    except UnknownKernelError:
        return 0
