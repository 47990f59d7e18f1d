# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables of x86-64
---------------------

Mirrors :linux:`arch/x86/include/asm/pgtable.h`, ``pgtable_64.h`` and ``pgtable_types.h`` for the
entries of page tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.arch.pgtable import Entry, Geometry, vmcoreinfo_number

__all__ = ("X86Geometry", "has_pti", "is_text_address", "x86_geometry")

#: ``PTRS_PER_PTE`` and ``PAGE_SHIFT``.
_ENTRIES = 512
_PAGE_SHIFT = 12

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


class X86Geometry(Geometry):
    """
    Format of the page tables.

    :param levels: number of levels, 4 or 5
    :param encrypted: bits of an entry that mark encrypted memory, ``sme_me_mask``
    """

    page_shift = _PAGE_SHIFT
    entries = top = _ENTRIES
    # One table at the top maps user space and the kernel.
    user = kernel = _ENTRIES // 2

    def __init__(self, levels: int, encrypted: int) -> None:
        self.levels = levels
        self.swap_pfn_mask = (1 << _PHYSMEM_BITS[levels] - _PAGE_SHIFT) - 1
        # PTE_PFN_MASK
        self._mask = (1 << _PHYSICAL_BITS) - (1 << _PAGE_SHIFT) & ~encrypted

    def is_valid(self, entry: int) -> bool:
        """Return whether the processor uses an entry."""
        return bool(entry & _PRESENT)

    def plain_pfns(self, entries: Sequence[int]) -> list[int]:
        """Return the page frame numbers of PTEs that are present and not special."""
        mask = self._mask
        return [
            (entry & mask) >> _PAGE_SHIFT
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
            return Entry("table", (entry & self._mask) >> _PAGE_SHIFT)
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
        address = (entry if entry & _PRESENT else ~entry) & self._mask
        pfn = (address >> _PAGE_SHIFT) & -pages
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


def is_text_address(address: int) -> bool:
    """Return whether an address is where code can be: the kernel, modules, and BPF programs."""
    return address >= _START_KERNEL_MAP


def x86_geometry(image: Image) -> X86Geometry:
    """
    Return the format of the page tables of the image.

    :raises ImageError: if VMCOREINFO is damaged
    """
    # The bit that marks encrypted memory (SME) is not a part of the address.
    encrypted = vmcoreinfo_number(image, "sme_mask", 0)
    return X86Geometry(5 if vmcoreinfo_number(image, "pgtable_l5_enabled", 0) else 4, encrypted)
