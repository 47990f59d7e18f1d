# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The orders of compound pages
----------------------------

A compound page has its order in the ``struct page`` of its second page, in the byte that
``folio_order()`` of :linux:`include/linux/mm.h` reads. What an order says of other pages is
checked: the ``struct page`` of each of them marks it as a tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from memcg_inspect.linux.mm.mm_types_columns import Marker, PageColumns, positions

__all__ = (
    "MOST_ORDER",
    "BlockKind",
    "BlockKinds",
    "WhyNot",
    "WrongOrder",
    "compound_orders",
    "why_not_block",
)

#: No architecture has larger compound pages: those of hugetlb.
MOST_ORDER = 30

#: What charges a compound page: a slab, other kernel memory, or user memory.
BlockKind = Literal["slab", "kmem", "lru"]

#: Returns why a compound page cannot have an order; ``None`` if it can. It takes the index or the
#: ``struct page *`` of the head, and the order.
WhyNot = Callable[[int, int], str | None]


class WrongOrder(NamedTuple):
    """
    A compound page that cannot have the order that it says. It passes for a single page.

    :ivar page: ``struct page *`` of its head
    :ivar nid: node of its head
    :ivar order: what it says
    :ivar why: why it cannot be so
    :ivar kind: what charges its pages; ``None`` if they are not charged
    """

    page: int
    nid: int
    order: int
    why: str
    kind: BlockKind | None

    @property
    def reason(self) -> str:
        """Why its pages are not known."""
        return f"it is {self.order}, and {self.why}"


def why_not_block(pfn: int, order: int) -> str | None:
    """
    Return why no compound page of an order begins at a page frame.

    Those of the buddy allocator, of ``alloc_contig_range()`` and memblock (gigantic pages), and of
    ``memmap_init_compound()`` (device memory) all begin at a multiple of their size.

    :return: ``None`` if one can
    """
    if order <= MOST_ORDER and not pfn & (1 << order) - 1:
        return None
    return "no compound page of this size can begin here"


class BlockKinds:
    """What charges the pages of a piece of the memory map."""

    _KINDS: tuple[BlockKind | None, ...] = (None, "slab", "kmem", None, "lru")

    def __init__(self, columns: PageColumns, slab: int, kmem: int, charged: int) -> None:
        """
        :param slab: column of slabs
        :param kmem: column of other pages that are charged as kernel memory
        :param charged: column of pages that are charged
        """
        codes = slab | kmem << 1 | (charged & ~slab & ~kmem) << 2
        self._codes = codes.to_bytes(columns.count, "little")

    def of(self, i: int) -> BlockKind | None:
        """Return what charges the page at an index."""
        return self._KINDS[self._codes[i]]

    def why_not(self, i: int, order: int, tails: bytes) -> str | None:
        """
        Return why the compound page with the head at an index cannot have an order.

        Only those that are charged are looked at. Others may be being made or freed:
        ``prep_compound_page()`` writes the order last, ``free_pages_prepare()`` clears it first.

        :param tails: a byte for each page of the piece, 1 if it is a tail
        :return: ``None`` if it can, as far as the piece tells
        """
        kind, size = self.of(i), 1 << order
        if kind is None:
            return None
        if i + size < len(tails) and tails[i + size]:
            return "the page after it is a tail"
        # Where its second half begins, another compound page can begin, and none that began earlier
        # can have a tail. A folio that is being split has fewer tails: __split_huge_page().
        half = i + size // 2
        if kind != "lru" and i < half < len(tails) and not tails[half]:
            return "its second half begins with no tail"
        return None


def compound_orders(
    columns: PageColumns,
    tail: Marker,
    order_at: int,
    heads: int,
    covered: int = 0,
    why_not: Callable[[int, int, bytes], str | None] | None = None,
    on_wrong: Callable[[int, int, str], None] = lambda i, order, why: None,
) -> Iterator[tuple[int, int]]:
    """
    Find the compound pages that begin in a piece of the memory map.

    Fake heads are left out: a head inside a compound page that began earlier. So are heads whose
    second page is no tail. What is where the order should be is something else:
    ``__split_folio_to_order()`` writes flags there before it clears ``PG_head``.

    :param tail: marks tails
    :param order_at: offset in the second ``struct page`` of the byte that is the order
    :param heads: column of pages that look like heads
    :param covered: index of the first page that no earlier compound page contains
    :param why_not: returns why the compound page with the head at an index cannot have an order, or
        ``None``. It takes a byte for each page, too, which is 1 for tails. Any order is possible if
        this is not given
    :param on_wrong: called with the index and the order of those that are left out, and why
    :return: index of the head, order
    """
    count, size = columns.count, columns.size
    tails = columns.of(tail).to_bytes(count, "little")
    for i in positions(heads, count):
        if i < covered or i + 1 == count:
            continue
        order = columns.data[(i + 1) * size + order_at]
        why = "its second page is no tail"
        if tails[i + 1]:
            found = None if why_not is None else why_not(i, order, tails)
            if found is None:
                covered = i + (1 << order)
                yield i, order
                continue
            why = found
        on_wrong(i, order, why)
