# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables of s390
-------------------

Mirrors :linux:`arch/s390/include/asm/pgtable.h` for the page tables of processes. A table of PTEs
has 256 entries, and two of them may share a page. All other tables have 2,048 entries. A process
gets more levels when it needs more addresses: its ``asce`` has the type of its table at the top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drgn import Object

from memcg_inspect.image.image import Image
from memcg_inspect.linux.arch.pgtable import Entry, UserGeometry, vmcoreinfo_number

__all__ = ("PTE_BITS", "S390Geometry", "s390_geometry")

_PAGE_SHIFT = 12
_PAGE = 1 << _PAGE_SHIFT
#: ``PTRS_PER_PTE`` and ``_CRST_ENTRIES``, in bits.
PTE_BITS, _CRST_BITS = 8, 11
#: ``_ASCE_TYPE_MASK`` begins at this bit; a segment table, of level 2, has type 0.
_ASCE_TYPE_SHIFT, _ASCE_TYPES, _SEGMENT_LEVEL = 2, 3, 2
#: Bits of a PTE: ``_PAGE_PROTECT``, ``_PAGE_PRESENT``, ``_PAGE_SPECIAL``.
_PROTECT, _PRESENT, _SPECIAL = 0x200, 0x001, 0x040
#: ``__SWP_TYPE_SHIFT``, ``__SWP_TYPE_MASK``, ``__SWP_OFFSET_SHIFT``.
_SWAP_TYPE_SHIFT, _SWAP_TYPES, _SWAP_OFFSET_SHIFT = 2, 0x1F, 12
#: Bits of the entries of other tables: ``_SEGMENT_ENTRY_INVALID``, ``_SEGMENT_ENTRY_LARGE`` and
#: ``_SEGMENT_ENTRY_COMM``, which marks swap entries.
_ENTRY_INVALID, _ENTRY_LARGE, _ENTRY_COMM = 0x20, 0x400, 0x10
#: ``__SWP_TYPE_SHIFT_RSTE``.
_RSTE_TYPE_SHIFT = 5
#: ``_SEGMENT_ENTRY_ORIGIN`` and ``_REGION_ENTRY_ORIGIN``: alignment of the table in bytes.
_PTES_ALIGN, _CRST_ALIGN = 0x800, 0x1000
#: Levels of tables whose entries can map huge pages: segments and regions of 2 GiB.
_HUGE_LEVELS = (2, 3)
#: ``CONFIG_MAX_PHYSMEM_BITS`` of Debian's kernels.
_PHYSMEM_BITS = 46


class S390Geometry(UserGeometry):
    """
    Format of the page tables of processes.

    :param physical_bits: ``MAX_PHYSMEM_BITS``
    """

    page_shift = _PAGE_SHIFT
    # crst_table_upgrade() puts tables above the one that was at the top.
    uncounted = 2

    def __init__(self, physical_bits: int) -> None:
        self.swap_pfn_mask = (1 << physical_bits - _PAGE_SHIFT) - 1

    def levels_of(self, mm: Object) -> int:
        """Return the number of levels, from ``mm->context.asce``."""
        return (int(mm.context.asce) >> _ASCE_TYPE_SHIFT & _ASCE_TYPES) + _SEGMENT_LEVEL

    def length(self, level: int, is_top: bool) -> int:
        """Return the number of entries of a table. All map user space: the kernel has its own."""
        return 1 << (PTE_BITS if level == 1 else _CRST_BITS)

    def shift(self, level: int) -> int:
        """Return the number of bits of an address that an entry leaves open."""
        return _PAGE_SHIFT if level == 1 else _PAGE_SHIFT + PTE_BITS + _CRST_BITS * (level - 2)

    def plain_pfns(self, entries: Sequence[int]) -> list[int]:
        """Return the page frame numbers of PTEs that are present and not special."""
        return [
            entry >> _PAGE_SHIFT for entry in entries if entry & (_PRESENT | _SPECIAL) == _PRESENT
        ]

    def other_entries(self, entries: Sequence[int]) -> Iterator[Entry]:
        """Return the other PTEs that are not empty, ``!pte_none()``."""
        for entry in entries:
            if entry & (_PRESENT | _SPECIAL) == _PRESENT | _SPECIAL:
                yield Entry("special", entry >> _PAGE_SHIFT)
            elif entry & (_PROTECT | _PRESENT) == _PROTECT:  # pte_swap()
                kind = entry >> _SWAP_TYPE_SHIFT & _SWAP_TYPES
                yield Entry("swap", type=kind, offset=entry >> _SWAP_OFFSET_SHIFT)

    def entry(self, entry: int, level: int) -> Entry | None:
        """
        Return an entry of a table above those of PTEs.

        :param level: level of its table
        :return: ``None`` if the entry is empty
        """
        if level in _HUGE_LEVELS and entry & _ENTRY_LARGE:
            return Entry("page", entry >> _PAGE_SHIFT & -self.pages_of(level))
        if entry & _ENTRY_INVALID:
            if not entry & _ENTRY_COMM:
                return None
            kind = entry >> _RSTE_TYPE_SHIFT & _SWAP_TYPES
            return Entry("swap", type=kind, offset=entry >> _SWAP_OFFSET_SHIFT)
        address = entry & -(_PTES_ALIGN if level == _SEGMENT_LEVEL else _CRST_ALIGN)
        return Entry("table", address >> _PAGE_SHIFT, offset=address % _PAGE)


def s390_geometry(image: Image) -> S390Geometry:
    """
    Return the format of the page tables of processes.

    :raises ImageError: if VMCOREINFO is damaged
    """
    return S390Geometry(vmcoreinfo_number(image, "MAX_PHYSMEM_BITS", _PHYSMEM_BITS))
