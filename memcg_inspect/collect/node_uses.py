# SPDX-License-Identifier: LGPL-2.1-or-later
"""The pages of vmalloc areas and kernel stacks that nodes count, charged or not."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mm_types import RawPiece
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.vmalloc import StackUser, VmArea, block_users, thread_size
from memcg_inspect.model import Coverage, NodeUse

__all__ = ("NodeUses",)

#: How a node counts a stack, by its user. Cached stacks are not counted.
_STACKS: dict[StackUser, NodeUse] = {"task": "stack", "unknown": "unknown stack"}


class NodeUses:
    """
    Adds up the pages of vmalloc areas and kernel stacks by node.

    The pages are known from their areas, and their nodes when the pass reads the pages.

    :param areas: all areas that vmalloc() made
    :param coverage: counts the tasks whose stacks are unreadable
    """

    def __init__(self, image: Image, areas: Sequence[VmArea], coverage: Coverage) -> None:
        frames = mem_map(image)
        self._size = frames.size
        blocks = block_users(image, coverage)
        # Pages of a stack that is one block of pages; each is on the node of the first.
        self._block = thread_size(image) >> frames.page_shift if blocks else 1
        self._pages: dict[NodeUse, array[int]] = {
            "vmalloc": _sorted(page for area in areas if area.is_counted for page in area.pages)
        }
        for user, use in _STACKS.items():
            pages = [page for area in areas if area.user == user for page in area.pages]
            pages += [page for page, by in blocks.items() if by == user]
            self._pages[use] = _sorted(pages)

    def of(self, piece: RawPiece) -> Counter[tuple[NodeUse, int]]:
        """Return the pages in a piece of the memory map, by use and node."""
        found: Counter[tuple[NodeUse, int]] = Counter()
        for use, pages in self._pages.items():
            start = bisect_left(pages, piece.page)
            stop = bisect_left(pages, piece.page + len(piece.data), start)
            weight = 1 if use == "vmalloc" else self._block
            if isinstance(piece.nids, int):
                found[use, piece.nids] += weight * (stop - start)
                continue
            for page in pages[start:stop]:
                found[use, piece.nid((page - piece.page) // self._size)] += weight
        return found


def _sorted(pages: Iterable[int]) -> array[int]:
    return array("Q", sorted(pages))
