# SPDX-License-Identifier: LGPL-2.1-or-later
"""
User pages by state
-------------------

Mirrors what :linux:`mm/filemap.c` (``filemap_unaccount_folio()``) and other parts of the kernel
count in the counters of user pages, by memcg and node (``lruvec_stat_mod_folio()``). A folio counts
in

- ``NR_FILE_PAGES`` while it is in the page cache, which is when it has a mapping that is not that
  of anonymous memory. Folios of hugetlb do not count. A folio of the swap cache counts for its node
  only;
- ``NR_SHMEM``, too, if it has ``PG_swapbacked``;
- ``NR_SHMEM_THPS`` or ``NR_FILE_THPS``, too, if it has as many pages as a PMD maps, or more;
- ``NR_SWAPCACHE`` while it has ``PG_swapcache`` and ``PG_swapbacked``: ``folio_test_swapcache()``;
- ``NR_WRITEBACK`` while it has ``PG_writeback``: ``__folio_start_writeback()``;
- ``NR_FILE_DIRTY`` while it is in the page cache, has ``PG_dirty``, and is of a file system that
  writes back: ``folio_account_dirtied()``;
- ``NR_ANON_MAPPED``, ``NR_FILE_MAPPED``, ``NR_ANON_THPS``: see
  :mod:`memcg_inspect.linux.mm.rmap`. Kernel memory that is mapped counts in ``NR_FILE_MAPPED``;
- ``NR_HUGETLB`` while it is a folio of hugetlb that is charged: ``alloc_hugetlb_folio()``. Since
  commit 05d4532b5364 ("memcg/hugetlb: add hugeTLB counters to memcg") (in v6.14).

These are all counted in pages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from itertools import compress, repeat
from typing import NamedTuple

from drgn import FaultError, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import constant
from memcg_inspect.linux.arch.page_tables import huge_page_order
from memcg_inspect.linux.mm.backing_dev import MappingReader
from memcg_inspect.linux.mm.hugetlb import HugetlbPages
from memcg_inspect.linux.mm.mm_types import MEMCG_DATA_FLAGS, RawPiece, page_layout
from memcg_inspect.linux.mm.mm_types_columns import Marker, positions
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.rmap import MapcountReader
from memcg_inspect.model import Coverage, ImageError

__all__ = ("PagesByItem", "UserPageReader")

#: ``PAGE_MAPPING_ANON`` and ``PAGE_MAPPING_MOVABLE`` in the lowest byte of ``page->mapping``.
_ANON, _FLAGS = 1, 3
#: Bits of the state of a page.
_IS_ANON, _CACHED, _SWAPBACKED, _WRITEBACK, _SWAPCACHE, _MAPPED = (1 << n for n in range(6))
#: If fewer pages than one in so many are of use, they are picked one by one.
_SPARSE = 8

#: Pages by payer (``struct obj_cgroup *``; of user pages up to 7.0 ``struct mem_cgroup *``), node
#: and item.
PagesByItem = Counter[tuple[int, int, str]]


def _items(state: int) -> tuple[str, ...]:
    """Return the counters that a page counts in, except those of huge pages and dirty pages."""
    found = []
    if state & _CACHED:
        found.append("NR_FILE_PAGES")
        if state & _SWAPBACKED:
            found.append("NR_SHMEM")
    if state & _SWAPCACHE and state & _SWAPBACKED:
        found.append("NR_SWAPCACHE")
    if state & _WRITEBACK:
        found.append("NR_WRITEBACK")
    if state & _MAPPED:
        found.append("NR_ANON_MAPPED" if state & _IS_ANON else "NR_FILE_MAPPED")
    return tuple(found)


_ITEMS = tuple(_items(state) for state in range(1 << 6))


class _Columns(NamedTuple):
    """
    The pages of a piece, as integers with a byte of 0 or 1 for each page.

    :ivar number: number of pages
    :ivar user: user pages that are charged, of folios the first page only
    :ivar kmem: pages that are charged as kernel memory, likewise
    :ivar head: pages of these that are the first of a compound page
    :ivar mapped: pages whose mapcount is not below 0
    :ivar states: a byte for each page
    :ivar dirty: pages in the page cache that are dirty, except those of shmem
    """

    number: int
    user: int
    kmem: int
    head: int
    mapped: int
    states: bytes
    dirty: int


class _Chosen(NamedTuple):
    """
    Some pages of a piece.

    :ivar pages: a column of them
    :ivar number: number of pages of the piece
    :ivar words: ``memcg_data`` of all pages
    :ivar nids: the node of all pages, or a list with the node of each
    """

    pages: int
    number: int
    words: list[int]
    nids: int | list[int]

    def rows(self, values: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """
        Return ``memcg_data``, a value, and the node of each page.

        :param values: the values of all pages
        """
        nids = repeat(self.nids, self.number) if isinstance(self.nids, int) else self.nids
        if self.pages.bit_count() >= self.number // _SPARSE:
            rows = zip(self.words, values, nids, strict=True)
            yield from compress(rows, self.pages.to_bytes(self.number, "little"))
            return
        for i in positions(self.pages, self.number):
            nid = self.nids if isinstance(self.nids, int) else self.nids[i]
            yield self.words[i], values[i], nid


class UserPageReader:
    """
    Adds up the user pages in each state.

    :ivar coverage: counts what is unreadable
    """

    def __init__(self, image: Image) -> None:
        self.coverage = Coverage()
        self._memory, self._frames, self._layout = image.memory, mem_map(image), page_layout(image)
        page, memory = image.type("struct page"), image.memory
        self._mapping = offsetof(page, "mapping")
        low = memory.byte_of_word(self._mapping, 0)
        self._anon = Marker(low, _ANON, _ANON)
        self._flagged = Marker(low, _FLAGS, 0)
        self._swapbacked = self._flag(image, "PG_swapbacked")
        self._dirty = self._flag(image, "PG_dirty")
        self._writeback = self._flag(image, "PG_writeback")
        # PG_owner_priv_1. Without CONFIG_SWAP, the counter is not kept.
        self._swapcache = self._flag(image, "PG_swapcache")
        self._mapcounts = MapcountReader(image)
        self._hugetlb = HugetlbPages(image)
        self._mappings = MappingReader(image)
        self._pmd_pages = 1 << huge_page_order(image)  # HPAGE_PMD_NR

    def _flag(self, image: Image, name: str) -> Marker:
        bit = constant(image, name)
        if bit is None:
            raise ImageError(f"enum pageflags has no {name}: this kernel cannot be read")
        return Marker(
            self._memory.byte_of_word(self._frames.flags, bit // 8), 1 << bit % 8, 1 << bit % 8
        )

    def read(self, raw: RawPiece) -> PagesByItem:
        """Add up the pages of a piece of the memory map."""
        found, columns = PagesByItem(), self._columns(raw)
        if columns is None:
            return found
        if not columns.user and not columns.kmem & (columns.mapped | columns.head):
            return found
        words = self._memory.words(raw.data, self._layout.memcg_data, self._frames.size)
        mappings: list[int] = []
        if columns.dirty:
            mappings = self._memory.words(raw.data, self._mapping, self._frames.size)
        hugetlb = self._hugetlb_heads(raw, columns)
        for i in hugetlb:
            found[words[i] & ~MEMCG_DATA_FLAGS, raw.nid(i), "NR_HUGETLB"] += 1 << raw.orders[i]
        for order, pages in self._folios(raw, columns, hugetlb).items():
            chosen = _Chosen(pages, columns.number, words, raw.nids)
            self._add_states(found, chosen, columns.states, order)
            if columns.dirty & pages:
                dirty = chosen._replace(pages=columns.dirty & pages)
                self._add_dirty(found, dirty, mappings, order)
        self._add_mapped(found, raw, columns, words, hugetlb)
        return found

    def _hugetlb_heads(self, raw: RawPiece, columns: _Columns) -> Set[int]:
        """Return the indexes of the first pages of charged folios of hugetlb."""
        heads = positions((columns.user | columns.kmem) & columns.head, columns.number)
        return {i for i in heads if i in raw.orders and self._hugetlb.begins(raw.data, i)}

    def _folios(self, raw: RawPiece, columns: _Columns, hugetlb: Set[int]) -> dict[int, int]:
        """Return columns of the first pages of other user folios by the order of the folio."""
        folios: defaultdict[int, bytearray] = defaultdict(lambda: bytearray(columns.number))
        for i in positions(columns.user & columns.head, columns.number):
            if i in raw.orders and i not in hugetlb:
                folios[raw.orders[i]][i] = 1
        found = {order: int.from_bytes(pages, "little") for order, pages in folios.items()}
        return {0: columns.user & ~columns.head, **found}

    def _add_states(self, found: PagesByItem, chosen: _Chosen, states: bytes, order: int) -> None:
        is_huge = order > 0 and 1 << order >= self._pmd_pages
        # The mapcount of the first page of a folio does not tell that of the folio.
        known = ~(_MAPPED if order else 0)
        for (word, state, nid), number in Counter(chosen.rows(states)).items():
            pages = number << order
            for item in _ITEMS[state & known]:
                found[word, nid, item] += pages
            if is_huge and state & _CACHED:
                item = "NR_SHMEM_THPS" if state & _SWAPBACKED else "NR_FILE_THPS"
                found[word, nid, item] += pages

    def _add_dirty(
        self, found: PagesByItem, chosen: _Chosen, mappings: list[int], order: int
    ) -> None:
        for (word, mapping, nid), number in Counter(chosen.rows(mappings)).items():
            try:
                writes_back = self._mappings.can_writeback(mapping)
            except FaultError as error:
                self.coverage.miss("file of a dirty page", error.address, str(error))
                continue
            if writes_back:
                found[word, nid, "NR_FILE_DIRTY"] += number << order

    def _add_mapped(
        self,
        found: PagesByItem,
        raw: RawPiece,
        columns: _Columns,
        words: list[int],
        hugetlb: Set[int],
    ) -> None:
        """Add the mapped pages of large folios, and of kernel memory."""
        for i in positions(columns.kmem & columns.mapped & ~columns.head, columns.number):
            found[words[i] & ~MEMCG_DATA_FLAGS, raw.nid(i), "NR_FILE_MAPPED"] += 1
        mapped = columns.mapped.to_bytes(columns.number, "little")
        for i in positions((columns.user | columns.kmem) & columns.head, columns.number):
            if i not in raw.orders or i in hugetlb:
                continue
            try:
                pages, entire = self._mapcounts.folio(raw, i, raw.orders[i], mapped)
            except FaultError as error:
                self.coverage.miss("pages of a folio", error.address, str(error))
                continue
            if not pages:
                continue
            payer, nid = words[i] & ~MEMCG_DATA_FLAGS, raw.nid(i)
            if columns.states[i] & _IS_ANON:
                found[payer, nid, "NR_ANON_MAPPED"] += pages
                found[payer, nid, "NR_ANON_THPS"] += pages if entire else 0
            else:
                found[payer, nid, "NR_FILE_MAPPED"] += pages

    def _columns(self, raw: RawPiece) -> _Columns | None:
        """Return the columns of a piece; ``None`` if it has no charged pages."""
        layout, piece, word = self._layout, raw.columns, self._memory.word_size
        count = piece.count
        charged = piece.not_zero(layout.memcg_data, word)
        if not charged:
            return None
        charged &= ~raw.tails(layout.tail)
        cached = piece.not_zero(self._mapping, word) & piece.of(self._flagged)
        swapbacked = piece.of(self._swapbacked)
        mapped = self._mapcounts.mapped(piece)
        parts = (
            piece.of(self._anon),
            cached,
            swapbacked,
            piece.of(self._writeback),
            piece.of(self._swapcache),
            mapped,
        )
        states = sum(column << n for n, column in enumerate(parts))
        user = piece.of(layout.lru) & charged
        return _Columns(
            number=count,
            user=user,
            kmem=piece.of(layout.kmem) & charged,
            head=piece.of(layout.head),
            mapped=mapped,
            states=states.to_bytes(count, "little"),
            dirty=piece.of(self._dirty) & user & cached & ~swapbacked,
        )
