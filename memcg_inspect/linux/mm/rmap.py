# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Mapped pages
------------

Mirrors how ``__folio_add_rmap()`` and ``__folio_remove_rmap()`` of :linux:`mm/rmap.c` count in
``NR_ANON_MAPPED``, ``NR_FILE_MAPPED`` and ``NR_ANON_THPS``. What a folio adds to the first two is

- without other pages: 1 if its ``_mapcount`` is not below 0;
- with other pages, and mapped as a whole by some entry of a PMD or PUD (``_entire_mapcount`` is not
  below 0, up to 6.1 ``compound_mapcount``): all of its pages;
- else: the pages whose ``_mapcount`` is not below 0.

``page_type`` shares its place with ``_mapcount``. All types are below 0 there.

With ``CONFIG_NO_PAGE_MAPCOUNT``, which came in 6.15, pages of large folios have no ``_mapcount``:
all pages of a folio count if ``_large_mapcount`` is not below 0. No type tells whether a kernel was
built like this. Other kernels never leave a folio that has a mapping without a page that has.

Up to 6.1, pages of a folio that is mapped as a whole may be mapped by PTEs, too. With
``PG_double_map``, they count once. Without it, which only the migration of such a folio leaves,
``NR_ANON_MAPPED`` counts them twice.
"""

from __future__ import annotations

from typing import NamedTuple

from drgn import FaultError, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.linux.mm.mm_types import RawPiece, page_layout
from memcg_inspect.linux.mm.mm_types_columns import Marker, PageColumns
from memcg_inspect.linux.mm.mmzone import mem_map

__all__ = ("Mapped", "MapcountReader")

#: The sign of a byte: the highest of an ``atomic_t`` that is below 0.
_SIGN = 0x80


class Mapped(NamedTuple):
    """
    How a large folio is mapped.

    :ivar pages: number of its pages that count as mapped
    :ivar entire: whether some entry maps it as a whole
    """

    pages: int
    entire: bool


class MapcountReader:
    """Reader of the mapcounts of pages and folios."""

    def __init__(self, image: Image) -> None:
        self._memory, self._frames = image.memory, mem_map(image)
        # _mapcount is at the place of page_type.
        self._mapped = self._not_negative(page_layout(image).page_type)
        self._entire = self._entire_mapcount(image)
        # Commit 05c5323b2a34 ("mm: track mapcount of large folios in single value") (in v6.10).
        has_large = has_member(image, "struct folio", "_large_mapcount")
        folio = image.type("struct folio") if has_large else None
        self._large = None if folio is None else offsetof(folio, "_large_mapcount")

    def _not_negative(self, offset: int) -> Marker:
        """Return the test whether an ``atomic_t`` is not below 0."""
        high = offset + 3 if self._memory.order == "little" else offset
        return Marker(high, _SIGN, 0)

    def _entire_mapcount(self, image: Image) -> int:
        # A member of struct page up to 6.2.
        if has_member(image, "struct folio", "_entire_mapcount"):
            return int(offsetof(image.type("struct folio"), "_entire_mapcount"))
        page = image.type("struct page")
        return int(sizeof(page) + offsetof(page, "compound_mapcount"))

    def mapped(self, columns: PageColumns) -> int:
        """Return which pages have a mapcount that is not below 0, as a column of bits."""
        return columns.of(self._mapped)

    def folio(self, raw: RawPiece, i: int, order: int, mapped: bytes) -> Mapped:
        """
        Return how a compound page of a piece is mapped.

        :param i: index of its first page
        :param order: its order
        :param mapped: the column of the piece, as bytes
        :raises drgn.FaultError: if it ends in another piece, and that cannot be read
        """
        pages, size = 1 << order, self._frames.size
        if self._is_counted(raw, i, self._entire, pages):
            return Mapped(pages, True)
        found = mapped.count(1, i, i + pages)
        beyond = i + pages - len(mapped)
        if beyond > 0:
            found += self._count(raw.page + len(raw.data), beyond * size)
        if not found and self._large is not None and self._is_counted(raw, i, self._large, pages):
            found = pages
        return Mapped(found, False)

    def _is_counted(self, raw: RawPiece, i: int, offset: int, pages: int) -> bool:
        """Return whether an ``atomic_t`` of a ``struct folio`` is not below 0."""
        at = i * self._frames.size + self._not_negative(offset).offset
        if offset >= pages * self._frames.size:
            return False  # on 32 bits it is in page[2], which a folio of two pages does not have
        if at < len(raw.data):
            return raw.data[at] < _SIGN
        # Its order is in page[1], so the piece may end before page[2].
        return self._memory.read(raw.page + at, 1)[0] < _SIGN

    def _count(self, page: int, size: int) -> int:
        try:
            data = self._memory.read(page, size)
        except FaultError as error:
            raise FaultError(f"rest of a folio: {error}", page) from error
        return self.mapped(PageColumns(data, self._frames.size)).bit_count()
