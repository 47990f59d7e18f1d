# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages that zones count
----------------------

Mirrors ``buddy_order()`` of :linux:`mm/internal.h`, and the marks of pages that counters of zones
count: page types, and the flag ``PG_mlocked``.

Page types are enumerators since commit ff202303c398 ("mm: convert page type macros to enum") (in
v6.10). The type of pages of zsmalloc came with commit 43d746dc49bb ("mm/zsmalloc: use a proper page
type") (in v6.11), that of pages that are not accepted yet in 6.12.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import compress, repeat

from drgn import offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, constant, member_type
from memcg_inspect.linux.mm.mm_types import RawPiece, page_layout, type_markers
from memcg_inspect.linux.mm.mm_types_columns import Marker, positions
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model_pages import ZoneUse

__all__ = ("ZonePageReader", "page_type_markers", "zone_uses")

#: ``PG_buddy`` etc. while they were macros (up to 6.9). 0: the kernel has no such type.
_MACROS = {"buddy": 0x80, "offline": 0x100, "table": 0x200, "guard": 0x400}
#: Page types of pages that counters of zones count.
_TYPES: tuple[ZoneUse, ...] = ("zsmalloc", "unaccepted")


def page_type_markers(image: Image, name: str) -> tuple[Marker, ...]:
    """
    Return the tests of a page type.

    :return: empty if the kernel has no such type
    """
    macro = _MACROS.get(name, 0)
    if constant(image, f"PGTY_{name}") is None:
        bit = constant(image, f"PG_{name}")
        # Before, the same name was that of a page flag, whose number is smaller than these bits.
        is_bit = bit is not None and bit >= min(_MACROS.values())
        if not is_bit and (not macro or constant(image, "PGTY_buddy") is not None):
            return ()
    return type_markers(image, image.memory, page_layout(image).page_type, name, macro)


def _has_type(raw: bytes, markers: tuple[Marker, ...]) -> bool:
    """Return whether a page has a type, that the kernel may not know."""
    return bool(markers) and all(marker.is_set(raw) for marker in markers)


def zone_uses(image: Image) -> frozenset[ZoneUse]:
    """Return the uses of pages that zones count and that this kernel marks."""
    return frozenset(ZonePageReader(image).markers)


class ZonePageReader:
    """
    Counter of free blocks, and of pages that zones count, by zone.

    :ivar markers: tests of the first page of a block, by use; only those that the kernel has
    """

    def __init__(self, image: Image) -> None:
        self._memory, self._frames, self._layout = image.memory, mem_map(image), page_layout(image)
        self._private = offsetof(image.type("struct page"), "private")
        # NR_PAGE_ORDERS, before commit 5e0a760b4441 ("mm, treewide: rename MAX_ORDER to
        # MAX_PAGE_ORDER") (in v6.8) MAX_ORDER.
        self._orders = array_length(member_type(image.type("struct zone"), "free_area"))
        self._buddy = page_type_markers(image, "buddy")
        self._guard = page_type_markers(image, "guard")
        types = {use: page_type_markers(image, use) for use in _TYPES}
        self.markers: dict[ZoneUse, tuple[Marker, ...]] = {u: m for u, m in types.items() if m}
        bit = constant(image, "PG_mlocked")  # CONFIG_MMU
        if bit is not None:
            at = self._memory.byte_of_word(self._frames.flags, bit // 8)
            self.markers["mlocked"] = (Marker(at, 1 << bit % 8, 1 << bit % 8),)

    def free_orders(self, raw: RawPiece, alone: int) -> tuple[int, list[int]]:
        """
        Find the free blocks that begin in a piece of the memory map.

        :param alone: column of pages that are no tails of compound pages
        :return: column of their first pages, and the order of each, ``buddy_order()``; one that
            cannot be right is :attr:`most_order` plus one
        """
        found = raw.columns.all_of(self._buddy) & alone
        return found, self._orders_of(raw, found)

    def _orders_of(self, raw: RawPiece, first: int) -> list[int]:
        """Return what first pages of blocks that are not compound say as their orders."""
        data, size = raw.data, raw.columns.size
        return [
            min(self._memory.word_at(data, i * size + self._private), self._orders)
            for i in positions(first, raw.columns.count)
        ]

    def marked_orders(self, raw: RawPiece, alone: int) -> dict[int, int]:
        """
        Find the other blocks that begin in a piece and whose first page alone has a type.

        - ``__free_unaccepted()`` marks blocks of the largest order that are not accepted yet (since
          6.12; before, they have no mark);
        - ``set_page_guard()`` marks guard pages (``debug_guardpage_minorder``), and keeps their
          order as that of free blocks.

        :param alone: column of pages that are no tails of compound pages
        :return: their orders, by index; one that cannot be right is :attr:`most_order` plus one
        """
        count = raw.columns.count
        unaccepted = raw.columns.all_of(self.markers.get("unaccepted", ())) & alone
        found = dict.fromkeys(positions(unaccepted, count), self.most_order)
        guards = raw.columns.all_of(self._guard) & alone
        found.update(zip(positions(guards, count), self._orders_of(raw, guards), strict=True))
        return found

    def first_page(self, pfn: int) -> int:
        """
        Return the first page frame of the block of :meth:`marked_orders()` that a page is in.

        :return: the page frame itself if it is in none
        :raises drgn.FaultError: if a page that may be the first one cannot be read
        """
        for order in range(1, self._orders):
            first = pfn >> order << order
            raw = self._memory.read(self._frames.page(first), self._frames.size)
            if _has_type(raw, self.markers.get("unaccepted", ())):
                most = self.most_order
            elif _has_type(raw, self._guard):
                most = min(self._memory.word_at(raw, self._private), self.most_order)
            else:
                continue
            if order <= most:
                return first
        return pfn

    @property
    def most_order(self) -> int:
        """``MAX_PAGE_ORDER``."""
        return self._orders - 1

    def add(
        self,
        raw: RawPiece,
        free: Counter[tuple[int, int, int]],
        pages: Counter[tuple[ZoneUse, int, int]],
    ) -> None:
        """
        Count the pages of a piece of the memory map.

        :param free: number of free blocks by node, zone and order. Blocks of no valid order are of
            order :attr:`most_order` plus one
        :param pages: number of pages by use, node and zone
        """
        columns = raw.columns
        alone = columns.everything & ~columns.of(self._layout.tail)
        zones = columns.flags(self._layout.zone)

        def chosen(column: int) -> Iterator[tuple[int, int]]:
            """Return node and zone of the pages that a column marks."""
            marks = column.to_bytes(columns.count, "little")
            if isinstance(raw.nids, int):
                return zip(repeat(raw.nids), compress(zones, marks))  # noqa: B905  one is endless
            return zip(compress(raw.nids, marks), compress(zones, marks), strict=True)

        buddies, orders = self.free_orders(raw, alone)
        for ((nid, zone), order), blocks in Counter(
            zip(chosen(buddies), orders, strict=True)
        ).items():
            free[nid, zone, order] += blocks
        for use, markers in self.markers.items():
            column = columns.all_of(markers) & alone & ~buddies
            if not column:
                continue
            each = 1 << self.most_order if use == "unaccepted" else 1
            for (nid, zone), blocks in Counter(chosen(column)).items():
                pages[use, nid, zone] += blocks * each
            marks = column.to_bytes(columns.count, "little")
            for i, order in raw.orders.items():
                if marks[i]:
                    pages[use, raw.nid(i), zones[i]] += (1 << order) - 1
