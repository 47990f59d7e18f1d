# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables of powerpc
----------------------

Mirrors :linux:`arch/powerpc/include/asm/book3s/64/pgtable.h` for the page tables of processes.
Entries are big-endian on all kernels. How many a table has depends on whether the MMU is in radix
or in hash mode, which the kernel finds out at boot. Several tables may share a page.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from drgn import FaultError, Object

from memcg_inspect.image.image import Image
from memcg_inspect.image.memory import Memory
from memcg_inspect.linux.arch.pgtable import Entry, UserGeometry, vmcoreinfo_number
from memcg_inspect.model import ImageError

__all__ = ("PowerpcGeometry", "powerpc_geometry", "table_bits")

#: ``_PAGE_PRESENT``, ``_PAGE_PTE`` (not a table), ``_PAGE_INVALID`` (present all the same),
#: ``_PAGE_SPECIAL``.
_PRESENT, _PTE, _INVALID, _SPECIAL = 1 << 63, 1 << 62, 1 << 61, 0x400
#: ``PTE_RPN_MASK`` ends below this bit, ``_PAGE_PA_MAX``.
_ADDRESS_BITS = 53
#: ``PMD_MASKED_BITS``: bits of an entry that are not the address of a table.
_MASKED = 0xC0000000000000FF
_SWAP_TYPES = 0x1F
_LEVELS = 4
#: The most bits of the number of entries of a table, ``RADIX_PGD_INDEX_SIZE``.
_MOST_BITS = 13
#: ``MAX_PHYSMEM_BITS`` with pages of 64 KiB, and with smaller ones.
_PHYSMEM_BITS, _LARGE_PAGE = {True: 51, False: 46}, 16


class PowerpcGeometry(UserGeometry):
    """
    Format of the page tables of processes.

    :param page_shift: ``PAGE_SHIFT``
    :param bits: bits of the number of entries of a table, by its level; the first one is of PTEs
    :param physical_bits: ``MAX_PHYSMEM_BITS``
    """

    def __init__(self, page_shift: int, bits: Sequence[int], physical_bits: int) -> None:
        self.page_shift = page_shift
        self._bits = bits
        self.swap_pfn_mask = (1 << physical_bits - page_shift) - 1
        self._mask = (1 << _ADDRESS_BITS) - (1 << page_shift)

    def levels_of(self, mm: Object) -> int:
        """Return the number of levels, the same for all processes."""
        return _LEVELS

    def length(self, level: int, is_top: bool) -> int:
        """Return the number of entries of a table. All map user space: the kernel has its own."""
        return 1 << self._bits[level - 1]

    def shift(self, level: int) -> int:
        """Return the number of bits of an address that an entry leaves open."""
        return self.page_shift + sum(self._bits[: level - 1])

    def words(self, memory: Memory, data: bytes) -> list[int]:
        """Return the entries of a table, which are big-endian."""
        return list(struct.unpack(f">{len(data) // 8}Q", data))

    def plain_pfns(self, entries: Sequence[int]) -> list[int]:
        """Return the page frame numbers of PTEs that are present and not special."""
        plain = _PRESENT | _PTE
        return [
            (entry & self._mask) >> self.page_shift
            for entry in entries
            if entry & (plain | _SPECIAL) == plain
        ]

    def other_entries(self, entries: Sequence[int]) -> Iterator[Entry]:
        """Return the other PTEs that are not empty, ``!pte_none()``."""
        plain = _PRESENT | _PTE
        for entry in entries:
            # In hash mode, an empty entry may have bits of the hash table.
            if entry & _PTE and entry & (plain | _SPECIAL) != plain:
                yield self._page(entry, 1)

    def entry(self, entry: int, level: int) -> Entry | None:
        """
        Return an entry of a table above those of PTEs.

        :param level: level of its table
        :return: ``None`` if the entry is empty
        """
        if entry & _PTE:
            return self._page(entry, self.pages_of(level))
        address = entry & ~_MASKED
        if not address:
            return None
        page = 1 << self.page_shift
        return Entry("table", address >> self.page_shift, offset=address % page)

    def _page(self, entry: int, pages: int) -> Entry:
        pfn = (entry & self._mask) >> self.page_shift
        if not entry & (_PRESENT | _INVALID):
            return Entry("swap", type=entry & _SWAP_TYPES, offset=pfn)
        return Entry("special" if entry & _SPECIAL else "page", pfn & -pages)


def table_bits(image: Image, name: str) -> int:
    """
    Return the bits of the number of entries of a table.

    :param name: symbol of the variable
    :raises ImageError: if it cannot be read, or cannot be right
    """
    try:
        bits = image.memory.word(image.symbol(name).address)
    except FaultError as error:
        raise ImageError(f"{name} cannot be read: {error}") from None
    if not 0 < bits <= _MOST_BITS:
        raise ImageError(f"{name} cannot be {bits}")
    return bits


def powerpc_geometry(image: Image) -> PowerpcGeometry:
    """
    Return the format of the page tables of processes.

    :raises ImageError: if it cannot be read
    """
    page_shift = int(image.object("PAGE_SHIFT").value_())
    bits = [table_bits(image, f"__{level}_index_size") for level in ("pte", "pmd", "pud", "pgd")]
    physical = _PHYSMEM_BITS[page_shift >= _LARGE_PAGE]
    return PowerpcGeometry(page_shift, bits, vmcoreinfo_number(image, "MAX_PHYSMEM_BITS", physical))
