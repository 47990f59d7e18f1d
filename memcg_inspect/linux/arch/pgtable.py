# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables
-----------

What the page tables of all architectures have in common: a tree of tables with entries of 8 bytes.
Mirrors :linux:`include/linux/pgtable.h` and :linux:`include/linux/swapops.h`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from drgn import Object

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.memory import Memory
from memcg_inspect.model import ImageError

__all__ = ("ENTRY_SHIFT", "Entry", "Geometry", "UserGeometry", "vmcoreinfo_number")

#: Bits of the size of an entry in bytes.
ENTRY_SHIFT = 3


class Entry(NamedTuple):
    """
    One entry of a page table.

    :ivar kind: ``table`` for a lower table, ``page`` for a page or a huge page, ``special`` for a
        page that ``vm_normal_page()`` hides, ``swap`` for any entry that is not present
    :ivar pfn: page frame number of the table, or of the first page
    :ivar type: ``swp_type()`` of a swap entry
    :ivar offset: ``swp_offset()`` of a swap entry; of a table, where it begins in its page, in
        bytes
    """

    kind: str
    pfn: int = 0
    type: int = 0
    offset: int = 0


class UserGeometry(ABC):
    """
    Format of the page tables of processes, which depends on the boot.

    :ivar page_shift: ``PAGE_SHIFT``
    :ivar swap_pfn_mask: ``SWP_PFN_MASK``: bits of ``swp_offset()`` that are a page frame number
    :ivar uncounted: tables that are not at the top and that ``pgtables_bytes`` may not have
    """

    page_shift: int
    swap_pfn_mask: int
    uncounted: int = 0

    @abstractmethod
    def levels_of(self, mm: Object) -> int:
        """
        Return the number of levels of the tables of a process.

        :param mm: ``struct mm_struct *``
        :raises drgn.FaultError: if it cannot be read
        """

    @abstractmethod
    def length(self, level: int, is_top: bool) -> int:
        """
        Return the number of entries of a table that map user space, from the first on.

        :param level: 1 for a table of PTEs
        """

    @abstractmethod
    def shift(self, level: int) -> int:
        """
        Return the number of bits of an address that an entry leaves open.

        :param level: level of its table, 1 for a table of PTEs
        """

    def pages_of(self, level: int) -> int:
        """
        Return the number of pages that an entry maps.

        :param level: level of its table, 1 for a table of PTEs
        """
        return 1 << self.shift(level) - self.page_shift

    def words(self, memory: Memory, data: bytes) -> list[int]:
        """Return the entries of a table."""
        return memory.words(data)

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


class Geometry(UserGeometry):
    """
    Format of the page tables of the kernel and of processes: each is a page, but for the one at the
    top, which may have fewer entries.

    :ivar levels: number of levels
    :ivar entries: number of entries of a table, those at the top excepted
    :ivar top: number of entries of a table at the top
    :ivar user: number of entries of a table at the top that map user space, from the first on
    :ivar kernel: number of its first entry that maps the kernel. The last one maps the end of the
        address space.
    """

    levels: int
    entries: int
    top: int
    user: int
    kernel: int

    def levels_of(self, mm: Object) -> int:
        """Return the number of levels, the same for all processes."""
        return self.levels

    def length(self, level: int, is_top: bool) -> int:
        """Return the number of entries of a table that map user space."""
        return self.user if is_top else self.entries

    def shift(self, level: int) -> int:
        """
        Return the number of bits of an address that an entry leaves open.

        :param level: level of its table, 1 for a table of PTEs
        """
        return self.page_shift + (self.page_shift - ENTRY_SHIFT) * (level - 1)

    def kernel_base(self) -> int:
        """Return the address that the first entry of the kernel's table at the top maps."""
        return (1 << 64) - (self.top << self.shift(self.levels))

    @abstractmethod
    def is_valid(self, entry: int) -> bool:
        """Return whether the processor uses an entry."""


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
