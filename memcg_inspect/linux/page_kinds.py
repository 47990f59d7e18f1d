# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Which counter of a process a page is in
---------------------------------------

Mirrors ``mm_counter()`` of :linux:`include/linux/mm.h`, for many page frames at once: what
counts for a page and its node are found for a piece of the memory map in one go, and kept.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from drgn import Program, offsetof

from memcg_inspect.linux.layout import constant
from memcg_inspect.linux.memory import memory_of
from memcg_inspect.linux.mmzone import mem_map, page_ranges
from memcg_inspect.linux.page_flags import page_flags
from memcg_inspect.linux.pages import Marker, compound_orders, page_layout, page_nids

__all__ = ("PageKind", "PageKinds")

#: ``FOLIO_MAPPING_ANON`` (before 6.16 ``PAGE_MAPPING_ANON``).
_MAPPING_ANON = 1
#: Page frames looked at together, so many that no compound page reaches beyond them on a machine
#: with pages of 4 KiB (``MAX_PAGE_ORDER``); gigantic ones of hugetlb do, which nobody asks for.
_SHIFT = 10
_FILE, _ANON, _SHMEM, _MISSING = range(4)
_ITEMS = {_FILE: "file", _ANON: "anon", _SHMEM: "shmem", _MISSING: None}
#: Bits of a class below the node: the kind, and whether the page is a device's.
_DEVICE, _NODE = 4, 3


class PageKind(NamedTuple):
    """
    :ivar item: as in :data:`memcg_inspect.linux.rss.ITEMS`; ``None`` if there is no
        ``struct page`` in the image
    :ivar device: whether the page is memory of a device (``ZONE_DEVICE``)
    """

    item: str | None
    nid: int
    device: bool


class PageKinds:
    """Tells the kinds of page frames."""

    def __init__(self, prog: Program) -> None:
        self._memory, self._frames, self._layout = memory_of(prog), mem_map(prog), page_layout(prog)
        mapping = offsetof(prog.type("struct page"), "mapping")
        byte = self._memory.byte_of_word(mapping, 0)
        self._anon = Marker(byte, _MAPPING_ANON, _MAPPING_ANON)
        bit = page_flags(prog).swapbacked.shift
        byte = self._memory.byte_of_word(self._frames.flags, bit // 8)
        self._swapbacked = Marker(byte, 1 << bit % 8, 1 << bit % 8)
        device = constant(prog, "ZONE_DEVICE")
        self._device = bytes((byte == device) * _DEVICE for byte in range(256))
        self._end = max((end for _, end in page_ranges(prog)), default=0)
        self._pieces: dict[int, array[int]] = {}

    def forget(self) -> None:
        """Look at every page again: on a live kernel it becomes another one."""
        self._pieces.clear()

    def count(self, pfns: Iterable[int]) -> Counter[PageKind]:
        """Count page frames by kind."""
        found: Counter[int] = Counter()
        pieces, low = self._pieces, (1 << _SHIFT) - 1
        for pfn in pfns:
            piece = pieces.get(pfn >> _SHIFT)
            if piece is None:
                if pfn >= self._end:
                    found[_MISSING] += 1
                    continue
                piece = pieces[pfn >> _SHIFT] = self._read(pfn >> _SHIFT)
            found[piece[pfn & low]] += 1
        return Counter({_kind(class_): number for class_, number in found.items()})

    def of(self, pfn: int) -> PageKind:
        """Return the kind of one page frame."""
        return next(iter(self.count([pfn])))

    def _read(self, number: int) -> array[int]:
        size, length = self._frames.size, self._frames.size << _SHIFT
        # A compound page reaches across what is missing: all is looked at together.
        data, missing, end = bytearray(length), [], 0
        for offset, part in self._memory.pieces(
            self._frames.page(number << _SHIFT), length, 2 * size
        ):
            if part is not None:
                data[offset : offset + len(part)] = part
                missing.append((end // size, offset // size))
                end = offset + len(part)
        missing.append((end // size, 1 << _SHIFT))
        classes = self._classes(bytes(data))
        for first, last in missing:
            classes[first:last] = [_MISSING] * (last - first)
        return array("H", classes)

    def _classes(self, data: bytes) -> list[int]:
        size, layout = self._frames.size, self._layout
        count = len(data) // size
        anon = self._anon.column(data, size)
        shmem = self._swapbacked.column(data, size) & ~anon
        zones = layout.zone.column(data, size).translate(self._device)
        kinds = anon * _ANON | shmem * _SHMEM | int.from_bytes(zones, "little")
        # A tail is what its head is.
        tails = layout.tail.column(data, size)
        column = bytearray((kinds | tails * _MISSING).to_bytes(count, "little"))
        heads = layout.head.column(data, size) & ~tails
        for i, order in compound_orders(layout, size, data, heads):
            end = min(i + (1 << order), count)
            column[i:end] = bytes([column[i]]) * (end - i)
        nids = page_nids(self._memory, self._frames, data)
        if isinstance(nids, int):
            return [kind | nids << _NODE for kind in column]
        return [kind | nid << _NODE for kind, nid in zip(column, nids, strict=True)]


def _kind(class_: int) -> PageKind:
    return PageKind(_ITEMS[class_ & 3], class_ >> _NODE, bool(class_ & _DEVICE))
