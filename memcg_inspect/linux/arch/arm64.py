# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables of arm64
--------------------

Mirrors :linux:`arch/arm64/include/asm/pgtable.h`, ``pgtable-hwdef.h`` and ``pgtable-prot.h`` for
the entries of page tables.

The kernel chooses the size of a page when it is built. How many bits an address has is known at
boot (``TCR_EL1.T1SZ``, ``vabits_actual``): kernels for 52 bits run on processors that have fewer.
With pages of 4 and 16 KiB, they then use one level less. With pages of 64 KiB they use the last
entries of a table for 52 bits.

The layout of entries that are not valid changed with commit 55564814a838 ("arm64/mm: Move
PTE_PRESENT_INVALID to overlay PTE_NG") (in v6.10). No type tells it. The enumerators of page types
came with the same release, commit ff202303c398 ("mm: convert page type macros to enum").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import constant
from memcg_inspect.linux.arch.pgtable import Entry, Geometry, vmcoreinfo_number
from memcg_inspect.model import ImageError

__all__ = ("Arm64Geometry", "arm64_geometry", "is_module_address")

#: ``PTE_VALID``, ``PTE_TYPE_MASK`` and the type of an entry that points to a table.
_VALID, _TYPE_MASK, _TABLE = 1, 3, 3
#: ``PTE_SPECIAL``: ``vm_normal_page()`` returns ``NULL``.
_SPECIAL = 1 << 56
#: ``PTE_ADDR_LOW`` ends below this bit.
_ADDRESS_BITS = 50
#: Sizes of pages in bits, and the bits of an address that are enough for any of them.
_PAGE_SHIFTS = (12, 14, 16)
_LARGEST_PAGE = 16
_LEAST_BITS, _MOST_BITS, _LARGE_BITS = 36, 52, 48
#: Addresses end here.
_END = 1 << 64


class _Invalid(NamedTuple):
    """
    Layout of entries that are not valid.

    :ivar present: bits of which one is set if the entry is present all the same, as that of a page
        without access (``PTE_PROT_NONE``)
    :ivar present_huge: the same in tables above those of PTEs
    :ivar type: lowest bit of ``swp_type()``, which has 5 bits
    :ivar offset: lowest bit of ``swp_offset()``, which has 50 bits
    """

    present: int
    present_huge: int
    type: int
    offset: int


#: Up to 6.9: ``PTE_PROT_NONE`` and ``PMD_PRESENT_INVALID``.
_OLD = _Invalid(1 << 58, 1 << 58 | 1 << 59, 3, 8)
#: Since 6.10: ``PTE_PRESENT_INVALID``, which is ``PTE_NG``.
_NEW = _Invalid(1 << 11, 1 << 11, 6, 12)
_SWAP_TYPES, _SWAP_OFFSETS = (1 << 5) - 1, (1 << 50) - 1


class Arm64Geometry(Geometry):
    """
    Format of the page tables.

    :param page_shift: ``PAGE_SHIFT``
    :param bits: bits of an address that the tables translate
    :param is_large: whether bits of the physical address above the 48th are in use
    :param physical_bits: ``MAX_PHYSMEM_BITS``
    :param has_new_layout: whether the layout of entries that are not valid is that of 6.10
    """

    def __init__(
        self,
        page_shift: int,
        bits: int,
        is_large: bool,
        physical_bits: int,
        has_new_layout: bool,
    ) -> None:
        self.page_shift = page_shift
        table_bits = page_shift - 3
        self.levels = -(-(bits - page_shift) // table_bits)
        self.entries = 1 << table_bits
        self.top = self.user = 1 << bits - self.shift(self.levels)
        # The kernel has a table at the top of its own, TTBR1_EL1.
        self.kernel = 0
        self.swap_pfn_mask = (1 << physical_bits - page_shift) - 1
        # PTE_ADDR_LOW and PTE_ADDR_HIGH: bits 48 to 51 are in bits 12 to 15 if pages have 64 KiB,
        # else bits 50 and 51 are in bits 8 and 9, which are PTE_SHARED without LPA2.
        self._low = (1 << _ADDRESS_BITS) - (1 << page_shift)
        self._high, self._high_shift = 0, 0
        if page_shift == _LARGEST_PAGE:
            self._low = (1 << _LARGE_BITS) - (1 << page_shift)
            self._high, self._high_shift = 0xF << 12, 36
        elif is_large:
            self._high, self._high_shift = 0x3 << 8, 42
        self._invalid = _NEW if has_new_layout else _OLD

    def _pfn(self, entry: int) -> int:
        address = entry & self._low | (entry & self._high) << self._high_shift
        return address >> self.page_shift

    def is_valid(self, entry: int) -> bool:
        """Return whether the processor uses an entry."""
        return bool(entry & _VALID)

    def plain_pfns(self, entries: Sequence[int]) -> list[int]:
        """Return the page frame numbers of PTEs that are present and not special."""
        return [self._pfn(entry) for entry in entries if entry & (_VALID | _SPECIAL) == _VALID]

    def other_entries(self, entries: Sequence[int]) -> Iterator[Entry]:
        """Return the other PTEs that are not empty, ``!pte_none()``."""
        for entry in entries:
            if entry and entry & (_VALID | _SPECIAL) != _VALID:
                yield self._page(entry, 1)

    def entry(self, entry: int, level: int) -> Entry | None:
        """
        Return an entry of a table above those of PTEs.

        :param level: level of its table
        :return: ``None`` if the entry is empty
        """
        if not entry:
            return None
        if entry & _TYPE_MASK == _TABLE:
            return Entry("table", self._pfn(entry))
        return self._page(entry, self.pages_of(level))

    def _page(self, entry: int, pages: int) -> Entry:
        layout = self._invalid
        present = layout.present if pages == 1 else layout.present_huge
        if not entry & (_VALID | present):
            return Entry(
                "swap",
                type=entry >> layout.type & _SWAP_TYPES,
                offset=entry >> layout.offset & _SWAP_OFFSETS,
            )
        return Entry("special" if entry & _SPECIAL else "page", self._pfn(entry) & -pages)


def arm64_geometry(image: Image) -> Arm64Geometry:
    """
    Return the format of the page tables of the image.

    :raises ImageError: if VMCOREINFO does not tell it
    """
    page_shift = int(image.object("PAGE_SHIFT").value_())
    built = vmcoreinfo_number(image, "VA_BITS")
    actual = 64 - vmcoreinfo_number(image, "TCR_EL1_T1SZ")
    physical = vmcoreinfo_number(image, "MAX_PHYSMEM_BITS")
    if (
        page_shift not in _PAGE_SHIFTS
        or not _LEAST_BITS <= actual <= built <= _MOST_BITS
        or not page_shift < physical <= _MOST_BITS
    ):
        raise ImageError(
            f"VMCOREINFO is damaged: pages of {1 << page_shift} bytes, virtual addresses of "
            f"{actual} bits (VA_BITS={built}) and physical ones of {physical} bits"
        )
    bits = built if page_shift == _LARGEST_PAGE else actual
    has_new_layout = constant(image, "PGTY_buddy", "PG_buddy") is not None
    return Arm64Geometry(page_shift, bits, actual > _LARGE_BITS, physical, has_new_layout)


def is_module_address(image: Image, address: int) -> bool:
    """
    Return whether an address is where modules are loaded.

    BPF programs are elsewhere in the range of vmalloc.
    """
    try:
        start = vmcoreinfo_number(image, "MODULES_VADDR", 0)
        return start <= address < vmcoreinfo_number(image, "MODULES_END", 0) <= _END
    except ImageError:
        return False
