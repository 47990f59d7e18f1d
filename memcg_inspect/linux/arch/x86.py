# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Entries of page tables on x86-64
--------------------------------

Mirrors :linux:`arch/x86/include/asm/pgtable.h`, ``pgtable_64.h`` and ``pgtable_types.h``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from drgn import Architecture, FaultError

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import list_entries
from memcg_inspect.model import Coverage, ImageError

__all__ = (
    "ENTRIES",
    "Entry",
    "Geometry",
    "hidden_pgd_pages",
    "page_table_geometry",
)

#: Entries of a table; the first half of the top-most one is of user space.
ENTRIES = 512
TABLE_SHIFT = 9
PAGE_SHIFT = 12

_PRESENT = 1 << 0
_PSE = 1 << 7
#: ``_PAGE_PROTNONE``: there, but not to be touched.
_PROTNONE = 1 << 8
#: ``_PAGE_SPECIAL``: ``vm_normal_page()`` knows nothing of it.
_SPECIAL = 1 << 9
#: ``_PAGE_KNL_ERRATUM_MASK``: the accessed and dirty bits, which some CPUs set in empty entries.
_ERRATUM = 0x60
#: ``__PHYSICAL_MASK_SHIFT``.
_PHYSICAL_BITS = 52
_ALL = (1 << 64) - 1
#: ``SWP_TYPE_BITS`` and ``SWP_OFFSET_SHIFT``.
_SWAP_TYPE_BITS, _SWAP_OFFSET_SHIFT = 5, 14
#: ``MAX_PHYSMEM_BITS``, by the number of levels.
_PHYSMEM_BITS = {4: 46, 5: 52}


class Entry(NamedTuple):
    """
    What an entry says that is neither empty nor a plain page.

    :ivar kind: ``table``; ``page``, one or a huge one; ``special``; ``swap``, for anything that
        is not there
    :ivar pfn: of the table or of the first page
    :ivar type: ``swp_type()``
    :ivar offset: ``swp_offset()``
    """

    kind: str
    pfn: int = 0
    type: int = 0
    offset: int = 0


class Geometry(NamedTuple):
    """
    What depends on how the machine was booted.

    :ivar levels: of page tables
    :ivar mask: bits of an entry that are a physical address
    """

    levels: int
    mask: int

    @property
    def swap_pfn_mask(self) -> int:
        """``SWP_PFN_MASK`` (6.1): the bits of an offset that are a page frame number."""
        return (1 << _PHYSMEM_BITS[self.levels] - PAGE_SHIFT) - 1

    def pages_of(self, level: int) -> int:
        """Return for how many pages an entry is, at a level: 1 for the lowest tables."""
        return 1 << TABLE_SHIFT * (level - 1)

    def plain_pfns(self, entries: Sequence[int]) -> list[int]:
        """Return the page frames of the plain entries of a lowest table."""
        mask = self.mask
        return [
            (entry & mask) >> PAGE_SHIFT
            for entry in entries
            if entry & (_PRESENT | _SPECIAL) == _PRESENT
        ]

    def other_entries(self, entries: Sequence[int]) -> Iterator[Entry]:
        """Walk all other entries of a lowest table that are not empty."""
        for entry in entries:
            if entry & (_PRESENT | _SPECIAL) != _PRESENT and entry & ~_ERRATUM:
                yield self._page(entry, 1)

    def entry(self, entry: int, level: int) -> Entry | None:
        """Return what an entry of a higher table says, or ``None`` if it is empty."""
        if not entry & ~_ERRATUM:
            return None
        if entry & _PRESENT and not entry & _PSE:
            return Entry("table", (entry & self.mask) >> PAGE_SHIFT)
        return self._page(entry, self.pages_of(level))

    def _page(self, entry: int, pages: int) -> Entry:
        # pmd_present(): a huge page that is being split has lost its other bits for a moment.
        there = _PRESENT | _PROTNONE | (_PSE if pages > 1 else 0)
        if not entry & there:
            offset = (~entry & _ALL) << _SWAP_TYPE_BITS & _ALL
            return Entry(
                "swap", type=entry >> 64 - _SWAP_TYPE_BITS, offset=offset >> _SWAP_OFFSET_SHIFT
            )
        # protnone_mask(): against L1TF, the address is inverted in what is not present.
        address = (entry if entry & _PRESENT else ~entry) & self.mask
        pfn = (address >> PAGE_SHIFT) & -pages
        return Entry("special" if entry & _SPECIAL else "page", pfn)


@per_image
def page_table_geometry(image: Image) -> Geometry:
    """
    Find the geometry of page tables.

    :raises ImageError: if they are not those of x86-64
    """
    platform = image.prog.platform
    if platform is None or platform.arch != Architecture.X86_64:
        name = "unknown" if platform is None else platform.arch.name
        raise ImageError(f"page tables are read on x86-64 only, and this machine is {name}")
    numbers = dict(
        re.findall(
            r"^NUMBER\((\w+)\)=(-?\w+)$",
            image.object("VMCOREINFO").string_().decode(),
            re.MULTILINE,
        )
    )
    # The bit that marks encrypted memory is no part of an address.
    encrypted = int(numbers.get("sme_mask", "0"), 0)
    mask = (1 << _PHYSICAL_BITS) - (1 << PAGE_SHIFT)
    return Geometry(5 if int(numbers.get("pgtable_l5_enabled", "0"), 0) else 4, mask & ~encrypted)


def hidden_pgd_pages(image: Image, coverage: Coverage) -> set[int]:
    """
    Return the first pages of PGDs whose second page no field records.

    On x86 a kernel built with page-table isolation allocated PGDs as blocks of two pages,
    whether the CPU needs it or not. Newer kernels take a second page only if it does, and
    give PGDs a page type and, as compound pages, their order: such pages tell it themselves.

    :return: ``struct page *`` addresses
    """
    pages: set[int] = set()
    try:
        head = image.object("pgd_list").address_of_()  # x86 has it, no other architecture does
        image.symbol("__pti_set_user_pgtbl")  # built with page-table isolation
    except UnknownKernelError:
        return pages
    # struct ptdesc overlays struct page since 6.6.
    if has_type(image, "struct ptdesc"):
        link = ("struct ptdesc", "pt_list")
    else:
        link = ("struct page", "lru")

    def missed(error: FaultError) -> None:
        coverage.miss("list of page tables", error.address, str(error))

    for page in list_entries(link[0], head, link[1], missed):
        pages.add(page.value_())
        coverage.read += 1
    return pages
