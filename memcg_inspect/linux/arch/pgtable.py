# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables
-----------

What the page tables of all architectures have in common: a tree of tables of one page each, with
entries of 8 bytes, and a table at the top that may have fewer entries. Mirrors
:linux:`include/linux/pgtable.h` and :linux:`include/linux/swapops.h`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.model import ImageError

__all__ = ("Entry", "Geometry", "vmcoreinfo_number")

#: Bits of the size of an entry in bytes.
_ENTRY_SHIFT = 3


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


class Geometry(ABC):
    """
    Format of the page tables, which depends on the boot.

    :ivar page_shift: ``PAGE_SHIFT``
    :ivar levels: number of levels
    :ivar entries: number of entries of a table, those at the top excepted
    :ivar top: number of entries of a table at the top
    :ivar user: number of entries of a table at the top that map user space, from the first on
    :ivar kernel: number of its first entry that maps the kernel. The last one maps the end of the
        address space.
    :ivar swap_pfn_mask: ``SWP_PFN_MASK``: bits of ``swp_offset()`` that are a page frame number
    """

    page_shift: int
    levels: int
    entries: int
    top: int
    user: int
    kernel: int
    swap_pfn_mask: int

    def shift(self, level: int) -> int:
        """
        Return the number of bits of an address that an entry leaves open.

        :param level: level of its table, 1 for a table of PTEs
        """
        return self.page_shift + (self.page_shift - _ENTRY_SHIFT) * (level - 1)

    def pages_of(self, level: int) -> int:
        """
        Return the number of pages that an entry maps.

        :param level: level of its table, 1 for a table of PTEs
        """
        return 1 << self.shift(level) - self.page_shift

    def kernel_base(self) -> int:
        """Return the address that the first entry of the kernel's table at the top maps."""
        return (1 << 64) - (self.top << self.shift(self.levels))

    @abstractmethod
    def is_valid(self, entry: int) -> bool:
        """Return whether the processor uses an entry."""

    @abstractmethod
    def plain_pfns(self, entries: Sequence[int]) -> list[int]:
        """Return the page frame numbers of PTEs that are present and not special."""

    @abstractmethod
    def other_entries(self, entries: Sequence[int]) -> Iterator[Entry]:
        """Return the other PTEs that are not empty, ``!pte_none()``."""

    @abstractmethod
    def entry(self, entry: int, level: int) -> Entry | None:
        """
        Return an entry of a table above those of PTEs.

        :param level: level of its table
        :return: ``None`` if the entry is empty
        """


@per_image
def _vmcoreinfo(image: Image) -> dict[str, str]:
    try:
        text = image.object("VMCOREINFO").string_().decode(errors="replace")
    except UnknownKernelError:
        return {}
    found = {}
    for line in text.splitlines():
        name, sign, value = line.partition("=")
        if sign and name.startswith("NUMBER("):
            found[name.removeprefix("NUMBER(").removesuffix(")")] = value
    return found


def vmcoreinfo_number(image: Image, name: str, missing: int | None = None) -> int:
    """
    Return a number of VMCOREINFO.

    :param missing: what to return if VMCOREINFO does not have it
    :raises ImageError: if it is no number, or missing
    """
    text = _vmcoreinfo(image).get(name)
    if text is None:
        if missing is None:
            raise ImageError(f"VMCOREINFO has no NUMBER({name}), so page tables cannot be read")
        return missing
    try:
        return int(text, 0)
    except ValueError:
        raise ImageError(f"VMCOREINFO is damaged: NUMBER({name})={text}") from None
