# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The inventory of a range of page frames
---------------------------------------

An :class:`InventoryPart` is plain data: it can be pickled, so that another process can read the
range.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from memcg_inspect.collect.page_owners import Share
from memcg_inspect.collect.slab_owners import SlabOwners
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.model import Coverage
from memcg_inspect.model_pages import KINDS, NEVER, NOBODY, UNUSED, Place

__all__ = ("BarePage", "Head", "InventoryPart")


class Head(NamedTuple):
    """
    The page before pages that nothing marks.

    :ivar place: what it is
    :ivar owner: who was charged for it
    """

    place: Place
    owner: int


class BarePage(NamedTuple):
    """
    A page that nothing marks, and that has no reference.

    :ivar nid: node
    :ivar zone: value of ``enum zone_type``
    :ivar link: first word of ``page->lru``
    """

    nid: int
    zone: int
    link: int


@dataclass
class InventoryPart:
    """
    The page frames of a range.

    An owner is what ``memcg_data`` points to, ``struct obj_cgroup *`` or ``struct mem_cgroup *``,
    or one of the payers of :mod:`memcg_inspect.model_pages` that are no memcgs.

    :ivar part: the range
    :ivar page_size: bytes of a page
    :ivar pages: number of page frames, by what they are
    :ivar bytes: bytes of these pages, by what they are and their owner
    :ivar holes: page frames that are no memory, by node and zone
    :ivar conflicts: page frame number, and the two kinds that claim it
    :ivar coverage: what could be read, by subject
    :ivar unmarked: first page frames of blocks that nothing marks, by what they are and their owner
    :ivar bare: pages that may be free, or belong to the block before them, by page frame
    :ivar heads: pages before those, which may begin a block that is not compound, by page frame
    :ivar last: the last page of the range, if it may begin such a block
    :ivar in_slabs: owners of pages that are found in slabs
    :ivar unnamed: why the name of a cache could not be read, by ``struct kmem_cache *``
    """

    part: PageRange
    page_size: int
    pages: Counter[Place] = field(default_factory=Counter)
    bytes: Counter[tuple[Place, int]] = field(default_factory=Counter)
    holes: Counter[tuple[int, int]] = field(default_factory=Counter)
    conflicts: list[tuple[int, str, str]] = field(default_factory=list)
    coverage: defaultdict[str, Coverage] = field(default_factory=lambda: defaultdict(Coverage))
    unmarked: dict[tuple[Place, int], array[int]] = field(default_factory=dict)
    bare: dict[int, BarePage] = field(default_factory=dict)
    heads: dict[int, Head] = field(default_factory=dict)
    last: Head | None = None
    in_slabs: SlabOwners = field(default_factory=SlabOwners)
    unnamed: dict[int, str] = field(default_factory=dict)

    def count(self, place: Place, pages: int, owner: int) -> None:
        """Add whole pages."""
        self.pages[place] += pages
        self.bytes[place, owner] += pages * self.page_size

    def count_shared(self, place: Place, pages: int, share: Share, times: int = 1) -> None:
        """
        Add pages that are used in part.

        :param pages: number of pages that the share is of
        :param times: how often
        """
        self.pages[place] += pages * times
        unpaid = share.used
        for objcg, paid in share.paid:
            self.bytes[place, objcg] += paid * times
            unpaid -= paid
        nobody = NOBODY if KINDS[place.kind].is_charged else NEVER
        self.bytes[place, nobody] += unpaid * times
        self.bytes[place, UNUSED] += (pages * self.page_size - share.used) * times

    def keep_unmarked(self, place: Place, owner: int, pfn: int) -> None:
        """Keep the first page of a block whose use is to be found."""
        self.unmarked.setdefault((place, owner), array("Q")).append(pfn)

    def merge(self, other: InventoryPart) -> None:
        """Add the next range: one that begins where this one ends, or after a gap."""
        if other.part.start == self.part.end and self.last and other.part.start in other.bare:
            self.heads[self.part.end - 1] = self.last
        self.part = PageRange(self.part.start, other.part.end)
        self.last = other.last
        self.pages.update(other.pages)
        self.bytes.update(other.bytes)
        self.holes.update(other.holes)
        self.conflicts += other.conflicts
        for subject, coverage in other.coverage.items():
            self.coverage[subject].add(coverage)
        for key, pfns in other.unmarked.items():
            self.unmarked.setdefault(key, array("Q")).extend(pfns)
        self.bare |= other.bare
        self.heads |= other.heads
        self.in_slabs.merge(other.in_slabs)
        self.unnamed |= other.unnamed
