# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The blocks of pages of a range
------------------------------

A block has ``2^order`` pages, begins at a multiple of its size, and is in no other block. What
``struct page`` says of its order can be damaged. On a running kernel, a block can be split, and its
pages used again, while they are read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.hugetlb import most_compound_order
from memcg_inspect.linux.mm.internal import ZonePageReader
from memcg_inspect.linux.mm.mmzone import PageRange, mem_map
from memcg_inspect.model import Coverage

__all__ = ("BlockOrders", "OpenBlock", "disjoint")


class OpenBlock(NamedTuple):
    """
    The last block of a piece of the memory map, which may reach into the next one.

    :ivar end: the page frame after it
    :ivar code: code of its kind
    :ivar is_counted: whether all of it is counted with its first page
    """

    end: int
    code: int
    is_counted: bool = True


def disjoint(blocks: Mapping[int, int], covered: int) -> tuple[dict[int, int], list[int]]:
    """
    Leave out blocks that begin inside another one.

    :param blocks: order of each block, by its first page
    :param covered: the page after a block that begins earlier
    :return: the other blocks, in ascending order; first pages of those that were left out
    """
    kept: dict[int, int] = {}
    inside = []
    for first in sorted(blocks):
        if first < covered:
            inside.append(first)
        else:
            kept[first] = blocks[first]
            covered = first + (1 << blocks[first])
    return kept, inside


class BlockOrders:
    """Tells whether blocks of pages can have the orders that they say."""

    def __init__(self, image: Image, ranges: Sequence[tuple[int, int]]) -> None:
        """:param ranges: page frames that are memory, in ascending order"""
        self._frames, self._is_moving = mem_map(image), image.is_moving
        self._most, self._most_marked = most_compound_order(image), ZonePageReader(image).most_order
        self._ranges, self._starts = ranges, [start for start, _ in ranges]
        self._part, self._coverage = PageRange(0, 0), Coverage()
        self._memory = (0, 0)

    def begin(self, part: PageRange, coverage: Coverage) -> None:
        """
        Begin a range of page frames.

        :param coverage: counts blocks of the range whose orders are damaged. On a running kernel,
            a block can be gone when its order is read
        """
        self._part, self._coverage = part, coverage

    def can_be(self, page: int, order: int, within: bool = True) -> bool:
        """
        Return whether a block can have an order, as :meth:`why_not` says. Count one that cannot.
        """
        why = self.why_not(page, order, within)
        if why is not None:
            self.miss(page, f"it is {order}, and {why}")
        return why is None

    def miss(self, page: int, reason: str) -> None:
        """
        Count a block whose order is damaged.

        :param page: ``struct page *`` of its first page
        """
        pfn = self._frames.pfn(page)
        # What is no memory has any order. The range before has told of a block that is said to
        # reach into this one.
        if self._is_memory(pfn) and not self._is_moving and pfn >= self._part.start:
            self._coverage.miss("order of a block", page, reason)

    def why_not(self, page: int, order: int, within: bool = True) -> str | None:
        """
        Return why a block cannot have an order; ``None`` if it can.

        :param page: ``struct page *`` of its first page
        :param within: whether all of its pages must be in the range, and be memory. If not, it is
            a block of the buddy allocator whose pages count one by one
        """
        pfn = self._frames.pfn(page)
        if not self._is_memory(pfn):
            return "its first page frame is no memory"
        return self._why_not(pfn, order, within)

    def _is_memory(self, pfn: int) -> bool:
        # Most blocks are in the same range of memory as the one before.
        if not self._memory[0] <= pfn < self._memory[1]:
            number = bisect_right(self._starts, pfn) - 1
            self._memory = self._ranges[number] if number >= 0 else (0, 0)
        return pfn < self._memory[1]

    def _why_not(self, pfn: int, order: int, within: bool) -> str | None:
        most = self._most if within else self._most_marked
        if order > most:
            return f"no block is larger than {most}"
        size = 1 << order
        if pfn & size - 1:
            return f"page frame {pfn:#x} is no multiple of its size"
        if within and pfn + size > self._part.end:
            return "the page frames end before"
        if within and pfn + size > self._memory[1]:
            return "not all of its page frames are memory"
        return None
