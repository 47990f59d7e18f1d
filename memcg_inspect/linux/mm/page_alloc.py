# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Blocks of pages that are not compound
-------------------------------------

Mirrors ``prep_new_page()``, ``free_frozen_page_commit()`` (``free_unref_page_commit()`` on older
kernels) and ``add_page_to_zone_llist()`` of :linux:`mm/page_alloc.c`.

A block of pages that was allocated without ``__GFP_COMP`` stores its order nowhere. Only its first
page has a refcount, and is charged. Its other pages are *bare*: they have no refcount and no type,
belong to no compound page, and are not charged. A free page can be bare, too:

- inside a block in a buddy list. The first page of that block has the type ``buddy``;
- in a block on a list of a CPU (``struct per_cpu_pages``), of compaction or of free page reporting.
  The first page is linked in the list;
- in a block on ``zone->trylock_free_pages``, if a lock could not be taken.
"""

from __future__ import annotations

from collections.abc import Callable

from drgn import FaultError, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, has_member, member_type
from memcg_inspect.linux.mm.debug import page_at, page_behind
from memcg_inspect.linux.mm.mm_types import page_layout
from memcg_inspect.linux.mm.mm_types_columns import Marker
from memcg_inspect.linux.mm.mmzone import mem_map, online_pgdats, page_ranges

__all__ = ("BlockReader", "bare_markers")

#: Each byte of ``page_type`` of a page without a type.
_NO_TYPE = 0xFF
#: More pages than a list of free pages has. A longer list is not followed.
_MOST_LINKS = 1 << 20


def bare_markers(image: Image) -> tuple[Marker, ...]:
    """Return tests of ``struct page`` that are all true for a page without refcount and type."""
    page = image.type("struct page")
    return (
        *(Marker(offsetof(page, "_refcount") + n, 0xFF, 0) for n in range(4)),
        *(Marker(offsetof(page, "page_type") + n, 0xFF, _NO_TYPE) for n in range(4)),
    )


class BlockReader:
    """Finder of the orders of blocks of pages that are not compound."""

    def __init__(
        self,
        image: Image,
        begins: Callable[[int], bool] | None = None,
        miss: Callable[[int, str], None] | None = None,
    ) -> None:
        """
        :param begins: returns whether it is known otherwise that a block begins at a ``struct
            page *``
        :param miss: called with a ``struct page *`` and the reason if it cannot be told whether a
            block begins there. Then one is assumed to begin, so a block may be larger than its
            order says. Also called with an address in a list of free pages that is broken.
        """
        self._image = image
        self._memory, self._frames, self._layout = image.memory, mem_map(image), page_layout(image)
        self._bare = bare_markers(image)
        self._known, self._miss = begins, miss
        page = image.type("struct page")
        # Commit bf75f200569d ("mm/page_alloc: add page->buddy_list and page->pcp_list") (in v6.0).
        self._link = offsetof(page, "pcp_list" if page.has_member("pcp_list") else "lru")
        links = image.type("struct list_head")
        self._next, self._prev = offsetof(links, "next"), offsetof(links, "prev")
        # NR_PAGE_ORDERS, before commit 5e0a760b4441 ("mm, treewide: rename MAX_ORDER to
        # MAX_PAGE_ORDER") (in v6.8) MAX_ORDER.
        self._orders = array_length(member_type(image.type("struct zone"), "free_area"))
        self._end = max((self._frames.page(part.end) for part in page_ranges(image)), default=0)
        self._trylock: set[int] | None = None

    def order(self, first: int) -> int:
        """
        Return the order of a block of pages that is not compound.

        Blocks are aligned to their size. So the block that has the page ``2^n`` pages after the
        first one begins there, or has both. The order is the smallest ``n`` for which another block
        begins there.

        :param first: ``struct page *`` of the first page, which is allocated
        """
        pfn = self._frames.pfn(first)
        for order in range(self._orders - 1):
            other = first + (self._frames.size << order)
            if pfn >> order & 1 or self._begins(other):
                return order
        return self._orders - 1

    def _begins(self, page: int) -> bool:
        """Return whether a page is the first of a block, free blocks included."""
        try:
            raw = self._memory.read(page, self._frames.size)
        except FaultError:
            return True  # the end of the memory map
        layout = self._layout
        if not all(marker.is_set(raw) for marker in self._bare) or layout.head.is_set(raw):
            return True
        if layout.tail.is_set(raw) or self._memory.word_at(raw, layout.memcg_data):
            return True
        return self._is_on_list(page) or (self._known is not None and self._known(page))

    def _is_on_list(self, page: int) -> bool:
        """
        Return whether a page is on a list.

        ``list_del()`` leaves pointers that lead to no list (``LIST_POISON1``). The same is true of
        most old contents of the ``struct page``. So the neighbours must point back, and the list
        must have a head, which is not in a ``struct page``.
        """
        if page in self._trylock_free_pages():
            return True
        link, word = page + self._link, self._word
        try:
            if word(word(link + self._prev) + self._next) != link:
                return False
            following = word(link + self._next)
            if word(following + self._prev) != link:
                return False
            seen: set[int] = set()
            while following not in seen and len(seen) < _MOST_LINKS:
                if following == link:
                    return False
                if not self._frames.base <= following < self._end:
                    return True
                seen.add(following)
                following = word(following + self._next)
        except FaultError as error:
            places = page_at(self._image, error.address), page_behind(self._image, error.address)
            if places == (None, None):
                return False  # no memory of this machine has that address
            if self._miss is not None:
                self._miss(page, str(error))
        return True

    def _word(self, address: int) -> int:
        """
        Read a word.

        :raises drgn.FaultError: with this address. That of drgn may be the physical address
        """
        try:
            return self._memory.word(address)
        except FaultError as error:
            raise FaultError(str(error), address) from error

    def _trylock_free_pages(self) -> set[int]:
        if self._trylock is None:
            self._trylock = self._read_trylock_free_pages()
        return self._trylock

    def _read_trylock_free_pages(self) -> set[int]:
        # Commit 8c57b687e833 ("mm, bpf: Introduce free_pages_nolock()") (in v6.15). pcp_llist,
        # which links these pages, is in a union with pcp_list.
        found: set[int] = set()
        if not has_member(self._image, "struct zone", "trylock_free_pages"):
            return found
        for pgdat in online_pgdats(self._image):
            zones = pgdat.node_zones
            for i in range(array_length(zones.type_)):
                try:
                    link = zones[i].trylock_free_pages.first.value_()
                    while link:
                        if link - self._link in found or len(found) == _MOST_LINKS:
                            raise FaultError("the list does not end", link)
                        found.add(link - self._link)
                        link = self._memory.word(link)
                except FaultError as error:
                    if self._miss is not None:
                        self._miss(error.address, str(error))
        return found
