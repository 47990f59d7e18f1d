# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables of x86-64
---------------------

Mirrors :linux:`arch/x86/include/asm/pgtable.h`, ``pgtable_64.h`` and ``pgtable_types.h`` for the
entries of page tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from drgn import Architecture

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.model import ImageError

__all__ = (
    "ENTRIES",
    "Entry",
    "Geometry",
    "has_pti",
    "is_text_address",
    "page_table_geometry",
)

#: ``PTRS_PER_PTE``. The first half of the top-level table maps user space.
ENTRIES = 512
TABLE_SHIFT = 9
PAGE_SHIFT = 12

_PRESENT = 1 << 0
_PSE = 1 << 7
#: ``_PAGE_PROTNONE``: a page is mapped, but every access faults.
_PROTNONE = 1 << 8
#: ``_PAGE_SPECIAL``: ``vm_normal_page()`` returns ``NULL``.
_SPECIAL = 1 << 9
#: ``_PAGE_KNL_ERRATUM_MASK``: the accessed and dirty bits, which some CPUs set in empty entries.
_ERRATUM = 0x60
#: ``__PHYSICAL_MASK_SHIFT``.
_PHYSICAL_BITS = 52
_ALL = (1 << 64) - 1
#: ``__START_KERNEL_map``.
_START_KERNEL_MAP = 0xFFFFFFFF80000000
#: ``SWP_TYPE_BITS`` and ``SWP_OFFSET_SHIFT``.
_SWAP_TYPE_BITS, _SWAP_OFFSET_SHIFT = 5, 14
#: ``MAX_PHYSMEM_BITS``, by the number of levels.
_PHYSMEM_BITS = {4: 46, 5: 52}


#: ``X86_FEATURE_PTI`` (:linux:`arch/x86/include/asm/cpufeatures.h`): word and bit of
#: ``x86_capability``.
_PTI = (7, 11)


class Entry(NamedTuple):
    """
    One entry of a page table.

    :ivar kind: ``table`` for a lower table, ``page`` for a page or a huge page, ``special`` for a
        page that ``vm_normal_page()`` hides, ``swap`` for any entry that is not present
    :ivar pfn: page frame number of the table, or of the first page
    :ivar type: ``swp_type()`` of a swap entry
    :ivar offset: ``swp_offset()`` of a swap entry
    """

    kind: str
    pfn: int = 0
    type: int = 0
    offset: int = 0


class Geometry(NamedTuple):
    """
    Format of the page tables, which depends on the boot.

    :ivar levels: number of levels, 4 or 5
    :ivar mask: bits of an entry that are the physical address, ``PTE_PFN_MASK``
    """

    levels: int
    mask: int

    @property
    def swap_pfn_mask(self) -> int:
        """``SWP_PFN_MASK``: bits of ``swp_offset()`` that are a page frame number."""
        return (1 << _PHYSMEM_BITS[self.levels] - PAGE_SHIFT) - 1

    def pages_of(self, level: int) -> int:
        """
        Return the number of pages that an entry maps.

        :param level: level of its table, 1 for a table of PTEs
        """
        return 1 << TABLE_SHIFT * (level - 1)

    def plain_pfns(self, entries: Sequence[int]) -> list[int]:
        """Return the page frame numbers of PTEs that are present and not special."""
        mask = self.mask
        return [
            (entry & mask) >> PAGE_SHIFT
            for entry in entries
            if entry & (_PRESENT | _SPECIAL) == _PRESENT
        ]

    def other_entries(self, entries: Sequence[int]) -> Iterator[Entry]:
        """Return the other PTEs that are not empty, ``!pte_none()``."""
        for entry in entries:
            if entry & (_PRESENT | _SPECIAL) != _PRESENT and entry & ~_ERRATUM:
                yield self._page(entry, 1)

    def entry(self, entry: int, level: int) -> Entry | None:
        """
        Return an entry of a table above those of PTEs.

        :param level: level of its table
        :return: ``None`` if the entry is empty
        """
        if not entry & ~_ERRATUM:
            return None
        if entry & _PRESENT and not entry & _PSE:
            return Entry("table", (entry & self.mask) >> PAGE_SHIFT)
        return self._page(entry, self.pages_of(level))

    def _page(self, entry: int, pages: int) -> Entry:
        # pte_present(). pmd_present() tests _PAGE_PSE as well: while a huge page is split, that is
        # the only one of these bits that stays set.
        present = _PRESENT | _PROTNONE | (_PSE if pages > 1 else 0)
        if not entry & present:
            offset = (~entry & _ALL) << _SWAP_TYPE_BITS & _ALL
            return Entry(
                "swap", type=entry >> 64 - _SWAP_TYPE_BITS, offset=offset >> _SWAP_OFFSET_SHIFT
            )
        # protnone_mask(): the address is inverted in entries without _PAGE_PRESENT (L1TF).
        address = (entry if entry & _PRESENT else ~entry) & self.mask
        pfn = (address >> PAGE_SHIFT) & -pages
        return Entry("special" if entry & _SPECIAL else "page", pfn)


def has_pti(image: Image) -> bool:
    """
    Return whether processes have page tables of their own for user space (PTI).

    :raises drgn.FaultError: if the features of the CPU cannot be read
    """
    try:
        words = image.object("boot_cpu_data").x86_capability
    except UnknownKernelError:
        return False
    word, bit = _PTI
    return bool(int(words[word]) >> bit & 1)


def is_text_address(image: Image, address: int) -> bool:
    """
    Return whether an address is where code can be: that of the kernel, of modules, and of BPF.

    :return: always ``False`` on machines other than x86-64
    """
    platform = image.prog.platform
    is_x86 = platform is not None and platform.arch == Architecture.X86_64
    return is_x86 and address >= _START_KERNEL_MAP


@per_image
def page_table_geometry(image: Image) -> Geometry:
    """
    Return the format of the page tables of the image.

    :raises ImageError: if the machine is not x86-64
    """
    platform = image.prog.platform
    if platform is None or platform.arch != Architecture.X86_64:
        name = "unknown" if platform is None else platform.arch.name
        raise ImageError(f"page tables are read on x86-64 only, and this machine is {name}")
    numbers = dict(
        re.findall(
            r"^NUMBER\((\w+)\)=(-?\w+)$",
            image.object("VMCOREINFO").string_().decode(errors="replace"),
            re.MULTILINE,
        )
    )
    # The bit that marks encrypted memory (SME) is not a part of the address.
    encrypted = _number(numbers, "sme_mask")
    mask = (1 << _PHYSICAL_BITS) - (1 << PAGE_SHIFT)
    return Geometry(5 if _number(numbers, "pgtable_l5_enabled") else 4, mask & ~encrypted)


def _number(numbers: Mapping[str, str], name: str) -> int:
    text = numbers.get(name, "0")
    try:
        return int(text, 0)
    except ValueError:
        raise ImageError(f"VMCOREINFO is damaged: NUMBER({name})={text}") from None
