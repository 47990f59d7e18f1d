# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The blocks of pages of a range
------------------------------

A block has ``2^order`` pages, begins at a multiple of its size, and is in no other block. What
``struct page`` says of its order can be damaged. On a running kernel, a block can be split, and its
pages used again, while they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ("OpenBlock", "disjoint")


class OpenBlock(NamedTuple):
    """
    The last block of a piece of the memory map, which may reach into the next one.

    :ivar end: the page frame after it
    :ivar code: code of its kind
    """

    end: int
    code: int


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
