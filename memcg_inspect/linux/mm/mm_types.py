# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The struct page of all page frames
----------------------------------

Mirrors ``struct page`` of :linux:`include/linux/mm_types.h`, the page types and flags of
:linux:`include/linux/page-flags.h`, and ``memcg_data`` of :linux:`include/linux/memcontrol.h`.

The memory map is read in pieces of :data:`~memcg_inspect.image.memory.PIECE` bytes. The same byte
of all pages of a piece is compared at once, to find slabs and pages charged as kernel memory. Pages
charged as user memory are only counted.

What differs between kernel releases:

- the order of a compound page is in ``page[1].flags`` since commit ebc1baf5c9b4 ("mm: free up a
  word in the first tail page") (in v6.6);
- a page type is an inverted bit. Since 6.11 all such bits are in the highest byte, and there is one
  bit of ``PAGE_TYPE_BASE``. Since commit 4ffca5a96678 ("mm: support only one page_type per page")
  (in v6.12), a page type is that byte;
- slabs are marked by a page flag, since commit 46df8e73a4a3 ("mm: free up PG_slab") (in v6.10) by a
  page type;
- since commit f1cf8d2f36dc ("mm: memcontrol: eliminate the problem of dying memory cgroup for LRU
  folios") (in v7.1), ``memcg_data`` of user pages refers to an obj_cgroup, before to the memcg.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import compress, repeat
from typing import NamedTuple

from drgn import FaultError, offsetof, sizeof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import constant, has_member
from memcg_inspect.image.memory import PIECE, Memory
from memcg_inspect.linux.mm.mm_types_columns import FlagColumn, Marker, PageColumns, positions
from memcg_inspect.linux.mm.mm_types_orders import (
    BlockKinds,
    WhyNot,
    WrongOrder,
    compound_orders,
    why_not_block,
)
from memcg_inspect.linux.mm.mm_types_slabs import SlabPages
from memcg_inspect.linux.mm.mmzone import (
    MemMap,
    PageRange,
    mem_map,
    page_ranges,
    split_ranges,
)
from memcg_inspect.linux.mm.page_flags import FlagBits, page_flags
from memcg_inspect.model import ImageError

__all__ = (
    "LRU_FLAGS",
    "KmemPage",
    "LruFlags",
    "LruPages",
    "PageLayout",
    "PagePiece",
    "RawPiece",
    "first_tail_offset",
    "page_layout",
    "page_type_base",
    "pages_per_piece",
    "scan_pages",
    "scan_range",
    "type_markers",
)

#: All bits that any kernel has used for flags, ``__NR_MEMCG_DATA_FLAGS - 1`` or more.
MEMCG_DATA_FLAGS = 7
#: ``MEMCG_DATA_OBJEXTS``, before 6.10 ``MEMCG_DATA_OBJCGS``.
MEMCG_DATA_OBJEXTS = 1
#: ``MEMCG_DATA_KMEM``.
MEMCG_DATA_KMEM = 2

#: ``PG_table`` and ``PAGE_TYPE_BASE``, macros until commit ff202303c398 ("mm: convert page type
#: macros to enum") (in v6.10).
PG_TABLE = 0x200
PAGE_TYPE_BASE = 0xF0000000


class LruFlags(NamedTuple):
    """
    The page flags that determine the LRU list of a folio.

    :ivar on_list: ``PG_lru``
    :ivar active: ``PG_active``
    :ivar unevictable: ``PG_unevictable``
    :ivar swapbacked: ``PG_swapbacked``
    :ivar generation: generation of the multi-gen LRU plus one; 0 if the folio is on none of its
        lists
    """

    on_list: bool
    active: bool
    unevictable: bool
    swapbacked: bool
    generation: int


class PageLayout(NamedTuple):
    """
    The layout of ``struct page``.

    :ivar info: offset of ``compound_info`` (before 7.1 ``compound_head``)
    :ivar has_fake_heads: whether ``info`` of a tail is the address of the head plus one, and
        tails of a hugetlb page with optimized vmemmap can look like heads (before 7.1)
    :ivar memcg_data: offset of ``memcg_data``
    :ivar page_type: offset of ``page_type``
    :ivar refcount: offset of ``_refcount``
    :ivar order: offset in ``page[1]`` of the order of a compound page, one byte
    :ivar head: marks heads of compound pages, and fake heads
    :ivar tail: marks tails of compound pages
    :ivar slab: marks slabs, on their first page only
    :ivar kmem: marks pages with ``MEMCG_DATA_KMEM``
    :ivar lru: marks pages whose ``memcg_data`` has no flag
    :ivar large_kmalloc: marks large kmallocs, on their first page only
    :ivar table: marks page tables, on their first page only
    :ivar on_lru: marks pages on LRU lists
    :ivar lru_flags: the bits of :class:`LruFlags`
    :ivar zone: the bits of the zone
    """

    info: int
    has_fake_heads: bool
    memcg_data: int
    page_type: int
    refcount: int
    order: int
    head: Marker
    tail: Marker
    slab: tuple[Marker, ...]
    kmem: Marker
    lru: Marker
    large_kmalloc: Marker | None
    table: tuple[Marker, ...]
    on_lru: Marker
    lru_flags: FlagColumn
    zone: FlagColumn

    @property
    def has_large_kmalloc(self) -> bool:
        """Whether large kmallocs have a page type of their own."""
        return self.large_kmalloc is not None


class KmemPage(NamedTuple):
    """
    A page, or compound page, with ``MEMCG_DATA_KMEM``.

    :ivar page: ``struct page *``
    :ivar nid: node
    :ivar order: order of the compound page; 0 for other pages
    :ivar compound: whether it is a compound page. A block of higher order that is not compound is
        charged through its first page: nothing stores its order
    :ivar type: page type: ``"table"``, ``"large_kmalloc"``, or ``""`` for none
    :ivar objcg: ``struct obj_cgroup *`` that pays
    :ivar has_refs: whether its refcount is not 0
    """

    page: int
    nid: int
    order: int
    compound: bool
    type: str
    objcg: int
    has_refs: bool = True


class LruPages(NamedTuple):
    """
    User pages and page cache of one payer, node, zone and LRU list.

    :ivar nid: node
    :ivar payer: ``struct obj_cgroup *``, up to 7.0 ``struct mem_cgroup *``; 0 for pages on
        LRU lists that are not charged
    :ivar zone: value of ``enum zone_type``
    :ivar flags: flags that determine the LRU list
    :ivar folios: number of folios
    :ivar pages: number of pages
    """

    nid: int
    payer: int
    zone: int
    flags: LruFlags
    folios: int
    pages: int


class RawPiece(NamedTuple):
    """
    The bytes of one piece of the memory map.

    :ivar page: ``struct page *`` of the first page
    :ivar columns: columns of the pages
    :ivar nids: the node of all pages, or a list with the node of each
    :ivar orders: orders of compound pages by index of the head
    """

    page: int
    columns: PageColumns
    nids: int | list[int]
    orders: dict[int, int]

    @property
    def data(self) -> bytes:
        """The bytes: an array of ``struct page``."""
        return self.columns.data

    def nid(self, i: int) -> int:
        """Return the node of the page at an index."""
        return _at(self.nids, i)

    def tails(self, tail: Marker) -> int:
        """
        Return the pages that are not the first of a compound page, as a column of bits.

        :param tail: marks tails. Those of a hugetlb page can look like heads all the same
        """
        found, count = self.columns.of(tail), self.columns.count
        for i, order in self.orders.items():
            number = min(1 << order, count - i) - 1
            found |= int.from_bytes(b"\1" * number, "little") << 8 * (i + 1)
        return found


class PagePiece(NamedTuple):
    """
    The contents of one piece of the memory map.

    :ivar pages: number of pages read
    :ivar slabs: slabs that begin in the piece
    :ivar kmem: pages and compound pages with ``MEMCG_DATA_KMEM`` that begin in the piece
    :ivar lru: user pages and page cache, counted
    :ivar large_kmalloc: pages of large kmallocs by node, charged or not, on kernels that mark them
    :ivar tables: pages of page tables by node, charged or not
    :ivar unreadable: address of the piece if it could not be read; else ``None``
    :ivar raw: ``None`` if it could not be read
    :ivar wrong: compound pages whose orders cannot be right
    """

    pages: int
    slabs: SlabPages
    kmem: list[KmemPage]
    lru: list[LruPages]
    large_kmalloc: Counter[int]
    tables: Counter[int]
    unreadable: int | None
    raw: RawPiece | None = None
    wrong: tuple[WrongOrder, ...] = ()


@per_image
def page_layout(image: Image) -> PageLayout:
    """
    Find the layout of ``struct page``.

    :raises ImageError: if the kernel does not charge pages to memcgs, or its layout is unknown
    """
    memory, page = image.memory, image.type("struct page")
    if not page.has_member("memcg_data"):
        raise ImageError("struct page has no memcg_data: this kernel does not account to memcgs")
    flags, memcg_data = offsetof(page, "flags"), offsetof(page, "memcg_data")
    page_type = offsetof(page, "page_type") if page.has_member("page_type") else None
    if page_type is None:
        raise ImageError("struct page has no page_type: this kernel is too old to be read")
    # Commit d50569612c29 ("mm: rename the 'compound_head' field in the 'struct page' to
    # 'compound_info'") (in v7.1). Bit 0 marks a tail in both. The same series removed fake heads.
    info = offsetof(page, "compound_info" if page.has_member("compound_info") else "compound_head")
    low = memory.byte_of_word(memcg_data, 0)
    bits = page_flags(image)
    listed = [bits.lru, bits.active, bits.unevictable, bits.swapbacked]
    if bits.generation is not None:
        listed.append(bits.generation)
    return PageLayout(
        info=info,
        has_fake_heads=not page.has_member("compound_info"),
        memcg_data=memcg_data,
        page_type=page_type,
        refcount=offsetof(page, "_refcount"),
        order=_order_offset(image, memory, flags),
        head=_flag(image, memory, flags, "PG_head"),
        tail=Marker(memory.byte_of_word(info, 0), 1, 1),
        slab=_slab_markers(image, memory, flags, page_type),
        kmem=Marker(low, MEMCG_DATA_KMEM, MEMCG_DATA_KMEM),
        lru=Marker(low, MEMCG_DATA_FLAGS, 0),
        large_kmalloc=_large_kmalloc_marker(image, memory, page_type),
        table=type_markers(image, memory, page_type, "table", PG_TABLE),
        on_lru=_flag(image, memory, flags, "PG_lru"),
        lru_flags=_flag_column(memory, flags, listed),
        zone=_flag_column(memory, flags, [bits.zone]),
    )


def _flag(image: Image, memory: Memory, flags: int, name: str) -> Marker:
    bit = constant(image, name)
    if bit is None:
        raise ImageError(f"enum pageflags has no {name}: this kernel cannot be read")
    return Marker(memory.byte_of_word(flags, bit // 8), 1 << bit % 8, 1 << bit % 8)


def _flag_column(memory: Memory, flags: int, parts: Iterable[FlagBits]) -> FlagColumn:
    # The parts are packed in the byte, the first one lowest.
    tables = [bytearray(256) for _ in range(memory.word_size)]
    at = 0
    for part in parts:
        for bit in range(part.shift, part.shift + part.width):
            for byte in range(256):
                tables[bit // 8][byte] |= (byte >> bit % 8 & 1) << at
            at += 1
    used = ((memory.byte_of_word(flags, n), bytes(t)) for n, t in enumerate(tables) if any(t))
    return FlagColumn(tuple(used))


#: The flags for each value of a byte of :attr:`PageLayout.lru_flags`.
LRU_FLAGS = tuple(
    LruFlags(bool(b & 1), bool(b & 2), bool(b & 4), bool(b & 8), b >> 4) for b in range(256)
)


def page_type_base(image: Image) -> int:
    """Return ``PAGE_TYPE_BASE``: bits of ``page_type`` that are set if the page has a type."""
    return constant(image, "PAGE_TYPE_BASE") or PAGE_TYPE_BASE


def type_markers(
    image: Image, memory: Memory, page_type: int, name: str, bit: int
) -> tuple[Marker, ...]:
    """
    Return the tests of a page type.

    :param page_type: offset of ``page_type`` in ``struct page``
    :param bit: the type's bit, where it is an inverted bit and no enumerator
    """
    places = range(page_type, page_type + 4)
    places = places if memory.order == "little" else places[::-1]
    value = constant(image, f"PGTY_{name}")
    if value is not None:
        return (Marker(places[3], 0xFF, value),)
    # PageType(): (page_type & (PAGE_TYPE_BASE | bit)) == PAGE_TYPE_BASE
    base = page_type_base(image)
    masks = (base | (constant(image, f"PG_{name}") or bit)).to_bytes(4, "little")
    values = base.to_bytes(4, "little")
    parts = zip(places, masks, values, strict=True)
    return tuple(Marker(*part) for part in parts if part[1])


def _slab_markers(image: Image, memory: Memory, flags: int, page_type: int) -> tuple[Marker, ...]:
    bit = constant(image, "PG_slab")
    is_flag = bit is not None and bit < 8 * memory.word_size
    if is_flag or constant(image, "PGTY_slab", "PG_slab") is None:
        return (_flag(image, memory, flags, "PG_slab"),)
    return type_markers(image, memory, page_type, "slab", 0)


def _large_kmalloc_marker(image: Image, memory: Memory, page_type: int) -> Marker | None:
    if constant(image, "PGTY_large_kmalloc") is None:
        return None
    return type_markers(image, memory, page_type, "large_kmalloc", 0)[0]


def _order_offset(image: Image, memory: Memory, flags: int) -> int:
    # Commit ebc1baf5c9b4 ("mm: free up a word in the first tail page") (in v6.6) moved the
    # order into the low byte of page[1].flags.
    offset = first_tail_offset(image, "compound_order", "_folio_order")
    return memory.byte_of_word(flags, 0) if offset is None else offset


def first_tail_offset(image: Image, of_page: str, of_folio: str) -> int | None:
    """
    Return the offset of a member in the second page of a compound page; ``None`` if there is none.

    Commit 1c5509be58f6 ("mm: remove 'First tail page' members from struct page") (in v6.3) left
    these members to ``struct folio``.

    :param of_page: name of the member of ``struct page``
    :param of_folio: name of the member of ``struct folio``
    """
    page = image.type("struct page")
    if has_member(image, "struct page", of_page):
        return int(offsetof(page, of_page))
    if has_member(image, "struct folio", of_folio):
        return int(offsetof(image.type("struct folio"), of_folio) % sizeof(page))
    return None


def scan_pages(image: Image) -> Iterator[PagePiece]:
    """
    Read the ``struct page`` of every valid page frame once, and report progress.

    A piece that cannot be read has ``unreadable`` set. If the walk is cancelled, the next piece
    has it set, and is the last one.
    """
    ranges, progress = page_ranges(image), image.progress
    total, done = sum(end - start for start, end in ranges) or 1, 0
    for part in split_ranges(ranges, pages_per_piece(image)):
        progress.report("pages", done / total)
        yield from scan_range(image, part)
        if progress.stop:
            return
        done += part.end - part.start


def scan_range(image: Image, part: PageRange, why_not: WhyNot | None = None) -> Iterator[PagePiece]:
    """
    Read the ``struct page`` of a range of page frames.

    A compound page, or a slab, belongs to the range that has its head. A piece that cannot be
    read has ``unreadable`` set. If the walk is cancelled, the next piece has it set, and is the
    last one.

    :param part: valid page frames. It begins and ends at even page frames, or where valid page
        frames begin and end: the order of a compound page is in its second page.
    :param why_not: returns why the compound page with a head (``struct page *``) cannot have an
        order, or ``None``. The pages of one that cannot are single pages. The default is
        :func:`~memcg_inspect.linux.mm.mm_types_orders.why_not_block()`
    """
    memory, frames = image.memory, mem_map(image)
    scan = _Scan(memory, frames, page_layout(image), why_not)
    base, size = frames.page(part.start), (part.end - part.start) * frames.size
    for offset, data in memory.pieces(base, size, 2 * frames.size):
        address, is_cancelled = base + offset, image.progress.stop
        if data is None or is_cancelled:
            none = SlabPages(address, PageColumns(b"", frames.size), [], 0, {})
            yield PagePiece(0, none, [], [], Counter(), Counter(), address)
        else:
            if not offset:
                scan.begin(address, data)
            yield scan.piece(address, data)
        if is_cancelled:
            return


def pages_per_piece(image: Image) -> int:
    """Return the number of page frames in each piece of a range, except in the last one."""
    return 2 * (PIECE // (2 * mem_map(image).size))


def page_nids(memory: Memory, frames: MemMap, columns: PageColumns) -> int | list[int]:
    """
    Return the nodes of the pages of a piece of the memory map.

    :return: the node if all pages have the same; else a list with the node of each
    """
    if not frames.node_mask:
        return 0
    first = frames.nid(memory.word_at(columns.data, frames.flags))
    low, size = frames.node_shift, memory.word_size
    for n in range(low // 8, size):
        mask = 0xFF if 8 * n >= low else 0xFF << low % 8 & 0xFF
        column = columns.byte(memory.byte_of_word(frames.flags, n))
        if mask != 0xFF:
            column = column.translate(bytes(byte & mask for byte in range(256)))
        if column != column[:1] * len(column):
            flags = memory.words(columns.data, frames.flags, frames.size)
            return [frames.nid(word) for word in flags]
    return first


class _Scan:
    """Finds pages in the pieces of a range, and remembers where the last compound page ends."""

    def __init__(
        self,
        memory: Memory,
        frames: MemMap,
        layout: PageLayout,
        why_not: WhyNot | None,
    ) -> None:
        self._why_not = why_not or (lambda head, order: why_not_block(frames.pfn(head), order))
        self.memory = memory
        self.frames = frames
        self.layout = layout
        self._covered = 0  # address of the first struct page after the last compound page

    def begin(self, address: int, data: bytes) -> None:
        """Find the end of the compound page that the first piece of a range begins in, if any."""
        size, layout = self.frames.size, self.layout
        if not layout.has_fake_heads or len(data) < 2 * size:
            return
        # The second page of two is never a fake head: page_fixed_fake_head().
        info = self.memory.word_at(data, size + layout.info)
        head = info - 1
        if not info & 1 or head >= address:
            return
        try:
            order = self.memory.read(head + size + layout.order, 1)[0]
        except FaultError:
            return  # the order is unknown, as for any compound page whose head is missing
        if self._why_not(head, order) is None:
            self._covered = head + (size << order)

    def piece(self, address: int, data: bytes) -> PagePiece:
        layout, columns = self.layout, PageColumns(data, self.frames.size)
        count = columns.count
        nids = page_nids(self.memory, self.frames, columns)
        head, alone = columns.of(layout.head), columns.everything & ~columns.of(layout.tail)
        slab = columns.all_of(layout.slab) & alone
        kmem = columns.of(layout.kmem) & alone & ~slab
        user = columns.of(layout.lru) & alone & ~slab
        charged = columns.not_zero(layout.memcg_data, self.memory.word_size)
        kinds, wrong = BlockKinds(columns, slab, kmem, charged & alone), list[WrongOrder]()
        orders = self._orders(address, columns, head & alone, nids, kinds, wrong)
        slabs = SlabPages(address, columns, list(positions(slab, count)), nids, orders)
        of_kernel = [
            self._kmem(address, data, i, _at(nids, i), orders) for i in positions(kmem, count)
        ]
        lru = list(self._lru(columns, user, head, orders))
        large: Counter[int] = Counter()
        if layout.large_kmalloc is not None:
            large_kmalloc = columns.of(layout.large_kmalloc) & alone
            large = _pages_by_node(positions(large_kmalloc, count), nids, orders)
        table = columns.all_of(layout.table) & alone & ~slab
        tables = _pages_by_node(positions(table, count), nids, orders)
        raw = RawPiece(address, columns, nids, orders)
        return PagePiece(count, slabs, of_kernel, lru, large, tables, None, raw, tuple(wrong))

    def _orders(
        self,
        address: int,
        columns: PageColumns,
        heads: int,
        nids: int | list[int],
        kinds: BlockKinds,
        wrong: list[WrongOrder],
    ) -> dict[int, int]:
        size = self.frames.size

        def why_not(i: int, order: int, tails: bytes) -> str | None:
            return self._why_not(address + i * size, order) or kinds.why_not(i, order, tails)

        def on_wrong(i: int, order: int, why: str) -> None:
            wrong.append(WrongOrder(address + i * size, _at(nids, i), order, why, kinds.of(i)))

        covered = max(0, (self._covered - address) // size)
        tail, order = self.layout.tail, self.layout.order
        orders = dict(compound_orders(columns, tail, order, heads, covered, why_not, on_wrong))
        if orders:
            last = next(reversed(orders))
            self._covered = address + last * size + (size << orders[last])
        return orders

    def _kmem(
        self, address: int, data: bytes, i: int, nid: int, orders: dict[int, int]
    ) -> KmemPage:
        size, layout = self.frames.size, self.layout
        raw = data[i * size : (i + 1) * size]
        word = self.memory.word_at(raw, layout.memcg_data)
        return KmemPage(
            page=address + i * size,
            nid=nid,
            order=orders.get(i, 0),
            compound=i in orders,
            type=self._type_name(raw),
            objcg=word & ~MEMCG_DATA_FLAGS,
            has_refs=any(raw[layout.refcount : layout.refcount + 4]),
        )

    def _type_name(self, raw: bytes) -> str:
        layout = self.layout
        if all(marker.is_set(raw) for marker in layout.table):
            return "table"
        is_large = layout.large_kmalloc is not None and layout.large_kmalloc.is_set(raw)
        return "large_kmalloc" if is_large else ""

    def _lru(
        self, columns: PageColumns, user: int, head: int, orders: dict[int, int]
    ) -> Iterator[LruPages]:
        # Most pages without flags in memcg_data are free.
        layout, data, count = self.layout, columns.data, columns.count
        charged = columns.not_zero(layout.memcg_data, self.memory.word_size)
        user &= charged | columns.of(layout.on_lru)
        single = user & ~head
        if single.bit_count() < count // 8:
            places = self._places(self._take(data, positions(single, count)))
        else:
            places = compress(self._places(columns), single.to_bytes(count, "little"))
        yield from _alike(places, 0)
        heads: defaultdict[int, list[int]] = defaultdict(list)
        for i in positions(user & head, count):
            if i in orders:
                heads[orders[i]].append(i)
        for order, some in heads.items():
            yield from _alike(self._places(self._take(data, some)), order)

    def _take(self, data: bytes, pages: Iterable[int]) -> PageColumns:
        size = self.frames.size
        return PageColumns(b"".join([data[i * size : (i + 1) * size] for i in pages]), size)

    def _places(self, columns: PageColumns) -> Iterator[tuple[int, int, int, int]]:
        """Return the payer, the flags, the zone and the node of each page."""
        layout = self.layout
        words = self.memory.words(columns.data, layout.memcg_data, columns.size)
        flags, zones = columns.flags(layout.lru_flags), columns.flags(layout.zone)
        nids = page_nids(self.memory, self.frames, columns)
        return zip(words, flags, zones, repeat(nids) if isinstance(nids, int) else nids)  # noqa: B905


def _alike(places: Iterable[tuple[int, int, int, int]], order: int) -> Iterator[LruPages]:
    for (word, flag, zone, nid), folios in Counter(places).items():
        yield LruPages(nid, word, zone, LRU_FLAGS[flag], folios, folios << order)


def _pages_by_node(
    first: Iterable[int], nids: int | list[int], orders: dict[int, int]
) -> Counter[int]:
    """
    Return the pages of some blocks by node.

    :param first: indexes of the first pages of the blocks
    """
    pages: Counter[int] = Counter()
    for i in first:
        pages[_at(nids, i)] += 1 << orders.get(i, 0)
    return pages


def _at(nids: int | list[int], i: int) -> int:
    return nids if isinstance(nids, int) else nids[i]
