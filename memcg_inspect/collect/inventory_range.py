# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The kinds of the page frames of a range
---------------------------------------

What the ``struct page`` of a page says comes first, then what its owner says. Pages that are
reserved, or typed as a page table, may have an owner that tells more. Any other page that is marked
in one way and claimed in another is a conflict.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping
from itertools import compress

from drgn import FaultError

from memcg_inspect.collect.inventory_blocks import BlockOrders, OpenBlock, disjoint
from memcg_inspect.collect.inventory_part import BarePage, Head, InventoryPart
from memcg_inspect.collect.page_owners import Claim, Owners, Share
from memcg_inspect.collect.slab_owners import SlabOwnerReader
from memcg_inspect.image.image import Image
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.fs.proc_page import MarkReader, Marks
from memcg_inspect.linux.kernel.resource import system_ram
from memcg_inspect.linux.mm.mm_types import (
    LRU_FLAGS,
    MEMCG_DATA_FLAGS,
    LruFlags,
    PagePiece,
    RawPiece,
    page_layout,
    scan_range,
)
from memcg_inspect.linux.mm.mm_types_columns import positions
from memcg_inspect.linux.mm.mmzone import PageRange, mem_map, memory_map_end
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.model import Coverage
from memcg_inspect.model_pages import KINDS, NEVER, NOBODY, UNUSED, Place

__all__ = ("RangeInventory",)

#: A code for each kind, from 1. 0 is for pages that nothing marks.
_NAMES = ("", *KINDS)
_CODES = {name: code for code, name in enumerate(_NAMES)}
#: The code of page frames that are no memory.
_HOLE = 255
#: Kinds that an owner may take a page from, by the kind that it claims.
_FINER = {
    "pagetables": ("reserved", "pagetables"),
    "kernel_pagetables": ("reserved", "pagetables"),
    "kfence": ("reserved", "slab"),
    "page_ext": ("reserved",),
    "memmap": ("reserved", "memmap"),
    "percpu_first": ("reserved",),
}
#: Kinds whose blocks of pages need not be compound, so that only the first page is marked.
_BLOCKS = frozenset({"unknown", "kmem", "pagetables", "kernel_pagetables", "trace"})
#: Kinds of pages that nothing marks. ``memcg_data`` tells who pays for those of ``kmem``.
_UNMARKED = ("kmem", "unknown")
_USER = frozenset({"anon", "file", "shmem", "secretmem", "user"})
#: Kinds of single pages that ``memcg_data`` names the payer of.
_PAID = frozenset(name for name, kind in KINDS.items() if kind.is_charged)


class RangeInventory:
    """
    A function from a range of page frames to an :class:`InventoryPart`.

    No block of pages may reach from one range into the next. An instance serves one thread.

    :param memcgs: ``struct mem_cgroup *`` of all memcgs
    :param coverage: counts what is read before the page frames
    """

    def __init__(
        self,
        image: Image,
        owners: Owners,
        memcgs: Container[int],
        coverage: defaultdict[str, Coverage],
    ) -> None:
        self._image, self.memory, self.frames = image, image.memory, mem_map(image)
        self.owners, self.marks, self.layout = owners, MarkReader(image), page_layout(image)
        self.slabs = SlabReader(image)
        self.in_slabs = SlabOwnerReader(image, self.slabs, memcgs, coverage["sock"])
        self.translate = bytes(
            _CODES[self.marks.kinds[code]] if code < len(self.marks.kinds) else 0
            for code in range(256)
        )
        ranges = self._memory_ranges(coverage)
        self.holes, self.orders = _Complement(ranges), BlockOrders(image, ranges)
        self.is_moving = image.is_moving

    def _memory_ranges(self, coverage: Mapping[str, Coverage]) -> list[tuple[int, int]]:
        """Return the page frames that are no holes; all, if the tree of resources is unreadable."""
        try:
            return system_ram(self._image, self.frames.page_shift)
        except FaultError as error:
            coverage["resources"].miss("iomem_resource", error.address, str(error))
            return [(0, memory_map_end(self._image))]

    def __call__(self, part: PageRange) -> InventoryPart:
        """Read a range."""
        found = InventoryPart(part, self.frames.page_size)
        self.slabs.coverage = found.coverage["slab"]
        self.orders.begin(part, found.coverage["pages"])
        before = None
        for piece in scan_range(self._image, part, self.orders.why_not):
            found.coverage["pages"].read += piece.pages
            for wrong in piece.wrong:
                self.orders.miss(wrong.page, wrong.reason)
            if piece.raw is None:
                why = STOPPED if self._image.progress.stop else "not in the image"
                found.coverage["pages"].miss("struct pages", piece.unreadable or 0, why)
                continue
            before = _Piece(self, found, piece, piece.raw, before)
            before.add()
        found.last = before.last() if before is not None and before.end == part.end else None
        found.unnamed |= self.slabs.unnamed
        return found


class _Complement:
    """Ranges that are not among some ranges."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self._ranges = ranges

    def within(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range that are in none of the ranges."""
        for first, last in self._ranges:
            if last <= start:
                continue
            if first >= end:
                break
            if start < first:
                yield start, first
            start = last
        if start < end:
            yield start, end


class _Piece:
    """
    The pages of one piece of the memory map.

    :ivar end: page frame after the last one
    :ivar open: the last block of pages
    """

    def __init__(
        self,
        reader: RangeInventory,
        found: InventoryPart,
        piece: PagePiece,
        raw: RawPiece,
        before: _Piece | None,
    ) -> None:
        """:param before: the piece before it that could be read"""
        self._reader, self._found, self._piece, self._raw = reader, found, piece, raw
        self._frames = reader.frames
        self._first = self._frames.pfn(raw.page)
        self._count = len(raw.data) // self._frames.size
        self.end = self._first + self._count
        self.open: OpenBlock = OpenBlock(0, 0) if before is None else before.open
        is_next = before is not None and before.end == self._first
        self._before = before.last() if before is not None and is_next else None
        self._marks: Marks = reader.marks.read(raw)
        self._words = reader.marks.payers(raw)
        self._kinds = bytearray(self._marks.codes.translate(reader.translate))
        # 1: counted, or to be counted, with the block that the page is in; 2: claimed by its owner.
        self._done = bytearray(self._count)
        # Pages at the start that are in a block of the piece before, and the first pages of the
        # compound pages that begin here.
        self._rest, self._heads = 0, list[int]()
        zones = raw.columns.flags(reader.layout.zone)
        nids = raw.nids
        is_one = isinstance(nids, int) and zones == zones[:1] * self._count
        self._zone: tuple[int, int] | None = None
        self._zones: list[tuple[int, int]] = []
        if is_one and isinstance(nids, int):
            self._zone = (nids, zones[0])
        else:
            every = [nids] * self._count if isinstance(nids, int) else nids
            self._zones = list(zip(every, zones, strict=True))

    def _at(self, i: int) -> tuple[int, int]:
        return self._zones[i] if self._zone is None else self._zone

    def add(self) -> None:
        """Count all pages."""
        blocks = self._spread()
        self._mark_holes()
        self._apply_claims()
        self._refine_reserved()
        self._add_slabs(blocks)
        self._add_blocks(blocks)
        self._add_singles()
        self._add_unmarked()

    def last(self) -> Head | None:
        """Return the last page, if it may begin a block that is not compound."""
        return self._head(self._count - 1)

    def _spread(self) -> dict[int, int]:
        """
        Give all pages of a block the kind of its first page.

        :return: the blocks that are counted as a whole. Pages of others count one by one, as far as
            they are there: guard pages, and those that are not accepted
        """
        first, count = self._first, self._count
        self._rest = rest = min(max(self.open.end - first, 0), count)
        if rest:
            self._kinds[:rest] = bytes([self.open.code]) * rest
            self._done[:rest] = bytes([self.open.is_counted]) * rest
        free = self._possible(self._marks.free)
        whole = self._raw.orders | free
        blocks, inside = disjoint(self._possible(self._marks.marked, within=False) | whole, rest)
        self._miss_blocks(inside)
        self._heads = [i for i in blocks if i in self._raw.orders and i not in free]
        for i, order in blocks.items():
            code = _CODES["free"] if i in free else self._kinds[i]
            stop = min(i + (1 << order), count)
            self._kinds[i:stop] = bytes([code]) * (stop - i)
            self._done[i:stop] = bytes([i in whole]) * (stop - i)
            if i + (1 << order) > count:
                self.open = OpenBlock(first + i + (1 << order), code, i in whole)
        return {i: order for i, order in blocks.items() if i in whole}

    def _possible(self, blocks: Mapping[int, int], within: bool = True) -> dict[int, int]:
        """Return the blocks whose orders can be right."""
        can_be = self._reader.orders.can_be
        return {i: order for i, order in blocks.items() if can_be(self._address(i), order, within)}

    def _miss_blocks(self, inside: list[int]) -> None:
        """Note blocks that begin inside another one. A running kernel may do so meanwhile."""
        for i in [] if self._reader.is_moving else inside:
            reason = "it begins inside another one"
            self._found.coverage["pages"].miss("block of pages", self._address(i), reason)

    def _address(self, i: int) -> int:
        """Return the ``struct page *`` of a page."""
        return self._raw.page + i * self._frames.size

    def _mark_holes(self) -> None:
        first = self._first
        for start, end in self._reader.holes.within(first, self.end):
            start, end = start - first, end - first
            self._kinds[start:end] = bytes([_HOLE]) * (end - start)
            self._done[start:end] = b"\1" * (end - start)
            if self._zone is not None:
                self._found.holes[self._zone] += end - start
            else:
                self._found.holes.update(self._zones[start:end])

    def _apply_claims(self) -> None:
        first, count = self._first, self._count
        for claim in self._reader.owners.within(first, self.end):
            code = _CODES[claim.kind]
            end = claim.end - first
            start = self._after_tails(claim.start - first, end, code)
            if start == end:
                continue
            allowed = {0, code, *(_CODES[k] for k in _FINER.get(claim.kind, ()))}
            stop = end
            if self._kinds[end - 1] in allowed:
                # Who has the first page of a block has all of it.
                stop = max(end, self._block(end - 1).stop)
            end = min(stop, count)
            for a, b in self._runs(claim.kind, start, end, allowed):
                self._kinds[a:b] = bytes([code]) * (b - a)
                self._done[a:b] = b"\2" * (b - a)
                beyond = stop - end if b == end else 0
                self._count_claim(claim, a, b, beyond)
                if beyond:
                    self.open = OpenBlock(first + stop, code)

    def _block(self, i: int) -> range:
        """Return the pages of the compound page that a page is in, some of other pieces, too."""
        if i < self._rest:
            return range(-1, self._rest)
        number = bisect_right(self._heads, i) - 1
        if number >= 0:
            head = self._heads[number]
            block = range(head, head + (1 << self._raw.orders[head]))
            if i in block:
                return block
        return range(i, i + 1)

    def _after_tails(self, start: int, end: int, code: int) -> int:
        """
        Leave out pages of a block whose first page is not claimed with them.

        They were counted with the first page, or will be. If that is of another kind, they are
        conflicts.

        :param start: the first page that is claimed
        :param end: the page after the last one
        :param code: what they are claimed for
        :return: the first page behind the block, *end* at most
        """
        block = self._block(start)
        if block.start == start:
            return start
        after = min(block.stop, end)
        for i in range(start, after):
            if self._kinds[i] != code:
                self._conflict(i, _NAMES[code])
        return after

    def _conflict(self, i: int, claimed: str) -> None:
        """
        Note that a page is marked in one way, and claimed in another.

        A page with an error of the hardware can stay with its owner: ``memory_failure()`` leaves
        pages of the kernel alone (``MF_IGNORED``). What is no memory has no mark.
        """
        if self._kinds[i] not in (_HOLE, _CODES["hwpoison"]):
            self._found.conflicts.append((self._first + i, self._name(i), claimed))

    def _name(self, i: int) -> str:
        """Return the kind of a page."""
        is_kmem = self._marks.kmem >> 8 * i & 1
        return _NAMES[self._kinds[i]] or ("kmem" if is_kmem else "unknown")

    def _runs(
        self, kind: str, start: int, end: int, allowed: set[int]
    ) -> Iterator[tuple[int, int]]:
        """Yield the runs of pages that a claim may take. Note the others as conflicts."""
        kinds = self._kinds
        if set(kinds[start:end]) <= allowed:
            yield start, end
            return
        for i in range(start, end):
            if kinds[i] in allowed:
                yield i, i + 1
            else:
                self._conflict(i, kind)

    def _count_claim(self, claim: Claim, start: int, end: int, beyond: int) -> None:
        """
        Count pages that an owner has.

        :param beyond: number of pages of the last block that are in the next pieces
        """
        is_charged = KINDS[claim.kind].is_charged
        if claim.share is not None or not is_charged:
            zones = Counter({self._zone: end - start}) if self._zone else None
            zones = zones or Counter(self._zones[start:end])
            zones[self._at(end - 1)] += beyond
            for (nid, zone), pages in zones.items():
                place = Place(nid, zone, claim.kind, None, None, claim.caller)
                if claim.share is None:
                    self._found.count(place, pages, NEVER)
                else:
                    self._found.count_shared(place, 1, claim.share, pages)
            return
        if claim.block is None:
            words = self._payers(start, end)
        else:
            words = [self._payer_of_block(claim.block)] * (end - start)
        claimed = list(zip(self._all_zones()[start:end], words, strict=True))
        counts = Counter(claimed)
        counts[claimed[-1]] += beyond
        for ((nid, zone), word), number in counts.items():
            place = Place(nid, zone, claim.kind, None, None, claim.caller)
            self._found.count(place, number, _owner(word))

    def _payers(self, start: int, end: int) -> list[int]:
        """Return the ``memcg_data`` of pages. The first page of a block names who pays for it."""
        words, heads = self._words[start:end], self._heads
        for head in heads[bisect_left(heads, self._block(start).start) : bisect_left(heads, end)]:
            a, b = max(head, start), min(self._block(head).stop, end)
            words[a - start : b - start] = [self._words[head]] * (b - a)
        return words

    def _payer_of_block(self, pfn: int) -> int:
        """
        Return the ``memcg_data`` of a page, which may be in another piece.

        :return: 0, so that nobody is taken to pay, if it cannot be read
        """
        if self._first <= pfn < self.end:
            return self._words[pfn - self._first]
        page = self._frames.page(pfn)
        try:
            return self._reader.memory.word(page + self._reader.layout.memcg_data)
        except FaultError as error:
            self._found.coverage["owners"].miss("payer of a block", page, str(error))
            return 0

    def _refine_reserved(self) -> None:
        first, reserved = self._first, _CODES["reserved"]
        for start, end, kind in self._reader.owners.regions:
            a, b = max(start - first, 0), min(end - first, self._count)
            if a < b:
                table = bytes(_CODES[kind] if c == reserved else c for c in range(256))
                self._kinds[a:b] = self._kinds[a:b].translate(table)

    def _index(self, page: int) -> int:
        return (page - self._raw.page) // self._frames.size

    def _add_slabs(self, blocks: Container[int]) -> None:
        reader = self._reader
        for page in self._piece.slabs:
            i = self._index(page.page)
            is_first = i in blocks or not self._done[i]
            if not is_first or self._done[i] == 2 or self._kinds[i] != _CODES["slab"]:
                continue
            nid, zone = self._at(i)
            self._done[i] = max(self._done[i], 1)
            # A slab of several pages whose order is damaged: it is not known what is in it.
            is_broken = i not in blocks and reader.layout.head.is_set(page.raw)
            pages, slab = 1 << page.order, None if is_broken else reader.slabs.slab(page)
            if slab is None:
                self._found.count(Place(nid, zone, "slab"), pages, NOBODY)
                continue
            size = slab.cache.size
            paid = tuple((o, n * size) for o, n in (slab.charged or {}).items())
            reader.in_slabs.add(slab, self._found.in_slabs, self._found.coverage)
            place = Place(nid, zone, "slab", page.order, slab.cache.name)
            used = max(slab.inuse * size, sum(b for _, b in paid))
            self._found.count_shared(place, pages, Share(used, paid))

    def _add_blocks(self, blocks: dict[int, int]) -> None:
        reader = self._reader
        for i, order in blocks.items():
            code = self._kinds[i]
            if self._done[i] == 2 or code in (_HOLE, _CODES["slab"]):
                continue
            nid, zone = self._at(i)
            kind, payer = _NAMES[code], NEVER
            if kind == "free":
                payer = UNUSED
            elif not kind:
                is_kmem = self._marks.kmem >> 8 * i & 1
                kind = "kmem" if is_kmem else "unknown"
                payer = _owner(self._words[i]) if is_kmem else NEVER
            elif kind in _PAID:
                payer = _owner(self._words[i])
            lru = self._list_of(self._marks.lru[i], self._marks.mlocked[i], kind)
            share = reader.owners.shares.get(self._first + i) if kind == "zsmalloc" else None
            place = Place(nid, zone, kind, order, None, None, lru)
            if kind in _UNMARKED:
                self._found.keep_unmarked(place, payer, self._first + i)
            elif share is not None:
                self._found.count_shared(place, 1 << order, share)
            else:
                self._found.count(place, 1 << order, payer)

    def _add_singles(self) -> None:
        """Count the pages that are marked, and in no block."""
        reader = self._reader
        free = self._done.translate(bytes(byte == 0 for byte in range(256)))
        paid = bytes(0 < c < len(_NAMES) and _NAMES[c] in _PAID for c in range(256))
        others = bytes(0 < c < len(_NAMES) and _NAMES[c] not in _PAID for c in range(256))
        chosen = _both(self._kinds.translate(others), free)
        zones: Iterator[tuple[int, int]] = compress(self._all_zones(), chosen)
        for (code, (nid, zone)), pages in Counter(
            zip(compress(self._kinds, chosen), zones, strict=True)
        ).items():
            kind = _NAMES[code]
            payer = UNUSED if KINDS[kind].group == "free" else NEVER
            self._found.count(Place(nid, zone, kind), pages, payer)
        chosen = _both(self._kinds.translate(paid), free)
        shares = reader.owners.shares
        if shares:
            for i in positions(int.from_bytes(chosen, "little"), self._count):
                share = shares.get(self._first + i)
                if share is not None and self._kinds[i] == _CODES["zsmalloc"]:
                    self._found.count_shared(Place(*self._at(i), "zsmalloc"), 1, share)
                    self._done[i] = 1
            free = self._done.translate(bytes(byte == 0 for byte in range(256)))
            chosen = _both(chosen, free)
        marks = self._marks
        columns = (self._kinds, self._words, marks.lru, marks.mlocked, self._all_zones())
        together = zip(*(compress(column, chosen) for column in columns), strict=True)
        for (code, word, flags, mlocked, (nid, zone)), pages in Counter(together).items():
            kind = _NAMES[code]
            lru = self._list_of(flags, mlocked, kind)
            place = Place(nid, zone, kind, 0 if kind in _USER else None, None, None, lru)
            self._found.count(place, pages, _owner(word))

    def _list_of(self, flags: int, mlocked: int, kind: str) -> str | None:
        """Return the LRU list of user pages."""
        if kind not in _USER:
            return None
        return "mlocked" if mlocked else _list_of(LRU_FLAGS[flags])

    def _all_zones(self) -> list[tuple[int, int]]:
        return self._zones if self._zone is None else [self._zone] * self._count

    def _add_unmarked(self) -> None:
        """Count the pages that nothing marks and nobody claims; keep those that are bare."""
        found, first = self._found, self._first
        everything = int.from_bytes(b"\1" * self._count, "little")
        done = int.from_bytes(self._done.translate(bytes(b != 0 for b in range(256))), "little")
        marked = int.from_bytes(self._kinds.translate(bytes(b != 0 for b in range(256))), "little")
        rest = everything & ~done & ~marked
        bare = self._marks.bare & rest
        for i in positions(rest & ~bare & self._marks.kmem, self._count):
            place = Place(*self._at(i), "kmem", 0)
            found.keep_unmarked(place, _owner(self._words[i]), first + i)
        for i in positions(rest & ~bare & ~self._marks.kmem, self._count):
            found.keep_unmarked(Place(*self._at(i), "unknown", 0), NEVER, first + i)
        links = self._reader.marks.links(self._raw) if bare else []
        for i in positions(bare, self._count):
            found.bare[first + i] = BarePage(*self._at(i), links[i])
        for i in positions(bare & ~(bare << 8), self._count):
            head = self._head(i - 1) if i else self._before
            if head is not None:
                found.heads[first + i - 1] = head

    def _head(self, i: int) -> Head | None:
        """Return a page that may begin a block that is not compound."""
        if self._done[i] == 1 or self._kinds[i] == _HOLE or i in self._raw.orders:
            return None
        if self._marks.bare >> 8 * i & 1 and not self._kinds[i]:
            return None
        kind = self._name(i)
        if kind not in _BLOCKS:
            return None
        order = 0 if kind in _UNMARKED else None
        payer = _owner(self._words[i]) if KINDS[kind].is_charged else NEVER
        return Head(Place(*self._at(i), kind, order), payer)


def _owner(word: int) -> int:
    """Return who was charged, by ``memcg_data``; :data:`NOBODY` if nobody was."""
    return word & ~MEMCG_DATA_FLAGS


def _both(first: bytes | bytearray, second: bytes | bytearray) -> bytes:
    """Return the bytes, all 0 or 1, that are 1 in both."""
    both = int.from_bytes(first, "little") & int.from_bytes(second, "little")
    return both.to_bytes(len(first), "little")


def _list_of(flags: LruFlags) -> str:
    """Return the LRU list of a folio, or ``none``."""
    if not flags.on_list:
        return "none"
    if flags.unevictable:
        return "unevictable"
    if flags.generation:
        return "multi-gen"
    return "active" if flags.active else "inactive"
