# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The inventory of all page frames
--------------------------------

Each page frame is of one kind. What its ``struct page`` says comes first, then what its owner says.
Pages that are reserved, or typed as a page table, may have an owner that tells more. Any other page
that is marked in one way and claimed in another is a conflict.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator
from itertools import compress
from typing import NamedTuple

from drgn import FaultError, offsetof

from memcg_inspect.collect.page_owners import Claim, Owners, Share
from memcg_inspect.collect.site import SiteFinder
from memcg_inspect.collect.unmarked_owners import UnmarkedOwners
from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, member_type
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
    positions,
    scan_pages,
)
from memcg_inspect.linux.mm.mmzone import mem_map, memory_map_end
from memcg_inspect.linux.mm.show_mem import FreeList, counted_memmap, free_lists, read_zones
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.model import Coverage
from memcg_inspect.model_pages import (
    KINDS,
    NEVER,
    NOBODY,
    UNKNOWN_PAYER,
    UNUSED,
    Inventory,
    Place,
)

__all__ = ("read_inventory",)

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
#: More blocks than all lists of free pages of CPUs can have.
_MOST_LINKS = 1 << 26


class _Head(NamedTuple):
    """
    The page before pages that nothing marks.

    :ivar place: what it is
    :ivar payer: who pays for it
    """

    place: Place
    payer: int


def read_inventory(
    image: Image,
    memcgs: Container[int],
    payer: Callable[[int], int | None],
    coverage: defaultdict[str, Coverage],
) -> Inventory:
    """
    Read all page frames.

    :param memcgs: ``struct mem_cgroup *`` of all memcgs
    :param payer: returns the memcg that pays, ``struct mem_cgroup *``, for a ``struct obj_cgroup
        *`` or ``struct mem_cgroup *``
    :param coverage: counts what was read, by subject
    """
    reader = _Reader(image, memcgs, payer, coverage)
    for piece in scan_pages(image):
        reader.add(piece)
    reader.finish()
    return reader.inventory


class _Reader:
    def __init__(
        self,
        image: Image,
        memcgs: Container[int],
        payer: Callable[[int], int | None],
        coverage: defaultdict[str, Coverage],
    ) -> None:
        self._image, self._memory, self._frames = image, image.memory, mem_map(image)
        self._payer, self.coverage = payer, coverage
        self._payers: dict[int, int] = {0: NOBODY}
        self.owners = Owners(image, coverage)
        self.marks, self.layout = MarkReader(image), page_layout(image)
        self.slabs = SlabReader(image, coverage["names"])
        self._sites = SiteFinder(image)
        self._late = UnmarkedOwners(image, self.slabs, memcgs, coverage)
        #: First page frames of blocks that nothing marks.
        self.unmarked: defaultdict[tuple[Place, int], array[int]] = defaultdict(lambda: array("Q"))
        #: Orders of those of them that are not compound, and are no single pages.
        self._orders_found: dict[int, int] = {}
        self.translate = bytes(
            _CODES[self.marks.kinds[code]] if code < len(self.marks.kinds) else 0
            for code in range(256)
        )
        self.holes = _Complement(self._memory_ranges())
        self._orders = array_length(member_type(image.type("struct zone"), "free_area"))
        self.inventory = Inventory(zones=read_zones(image, coverage["zones"]))
        self.inventory.conflicts += self.owners.conflicts
        try:
            self.inventory.memmap = counted_memmap(image)
        except FaultError as error:
            coverage["zones"].miss("nr_memmap_pages", error.address, str(error))
        #: Pages without marks: the zone, and the first link.
        self.bare: dict[int, tuple[int, int, int]] = {}
        self.heads: dict[int, _Head] = {}
        #: The block that the last piece ended in: the page frame after it, and its code.
        self.open: tuple[int, int] = (0, 0)
        self.last: tuple[int, _Head | None] = (-1, None)

    def _memory_ranges(self) -> list[tuple[int, int]]:
        """Return the page frames that are no holes; all, if the tree of resources is unreadable."""
        try:
            return system_ram(self._image, self._frames.page_shift)
        except FaultError as error:
            self.coverage["resources"].miss("iomem_resource", error.address, str(error))
            return [(0, memory_map_end(self._image))]

    def add(self, piece: PagePiece) -> None:
        """Add a piece of the memory map."""
        self.coverage["pages"].read += piece.pages
        if piece.raw is None:
            why = STOPPED if self._image.progress.stop else "not in the image"
            self.coverage["pages"].miss("struct pages", piece.unreadable or 0, why)
            return
        _Piece(self, piece, piece.raw).add()

    def payer(self, word: int) -> int:
        """Return who pays, by ``memcg_data``."""
        address = word & ~MEMCG_DATA_FLAGS
        found = self._payers.get(address)
        if found is None:
            found = self._payers[address] = self._payer(address) or UNKNOWN_PAYER
        return found

    def count(self, place: Place, pages: int, payer: int) -> None:
        """Add whole pages."""
        self.inventory.pages[place] += pages
        self.inventory.bytes[place, payer] += pages << self._frames.page_shift

    def count_shared(self, place: Place, pages: int, share: Share, times: int = 1) -> None:
        """
        Add pages that are used in part.

        :param pages: number of pages that the share is of
        :param times: how often
        """
        inventory, size = self.inventory, pages << self._frames.page_shift
        inventory.pages[place] += pages * times
        unpaid = share.used
        for objcg, paid in share.paid:
            inventory.bytes[place, self.payer(objcg)] += paid * times
            unpaid -= paid
        nobody = NOBODY if KINDS[place.kind].is_charged else NEVER
        inventory.bytes[place, nobody] += unpaid * times
        inventory.bytes[place, UNUSED] += (size - share.used) * times

    def find_owners(self, slab: Slab) -> None:
        """Note the sockets and files in a slab."""
        self._late.add(slab)

    def _add_unmarked(self) -> None:
        """Count the blocks that nothing marks, by their owners."""
        owners = self._late.find()
        wanted: dict[int, dict[int, str]] = {
            order: {pfn >> order << order: kind for pfn, kind in owners.items()}
            for order in range(self._orders)
        }
        for (place, payer), blocks in self.unmarked.items():
            found: Counter[tuple[int, str, str | None]] = Counter()
            for pfn in blocks:
                order = self._orders_found.get(pfn, place.order or 0)
                kind = wanted[order].get(pfn, place.kind) if order < self._orders else place.kind
                # Who pays for a page of a kind that is never charged cannot be told.
                is_other = payer != NEVER and not KINDS[kind].is_charged
                kind = place.kind if is_other else kind
                found[order, kind, self._site(pfn) if kind == "unknown" else None] += 1
            for (order, kind, site), number in found.items():
                paid_by = NOBODY if payer == NEVER and KINDS[kind].is_charged else payer
                is_of = place._replace(kind=kind, order=order, caller=site)
                self.count(is_of, number << order, paid_by)

    def _site(self, pfn: int) -> str | None:
        """Return the line of code that allocated a block, on kernels that profile allocations."""
        if self._sites.why_not:
            return None
        site = self._sites.of_page(self._frames.page(pfn))
        return site.place if site is not None else None

    def finish(self) -> None:
        """Add the pages that nothing marks: free pages of CPUs, and parts of blocks."""
        for found in free_lists(self._image, self.coverage["free_lists"]):
            try:
                self._add_free(found)
            except FaultError as error:
                self.coverage["free_lists"].miss("free pages", error.address, str(error))
        for first in sorted(self.heads):
            self._add_block(first, self.heads[first])
        self._add_unmarked()
        self.coverage["call_sites"].add(self._sites.coverage)
        for nid, zone, _ in self.bare.values():
            self.count(Place(nid, zone, "unknown", 0), 1, NEVER)
        self.bare.clear()
        for number, before, claimed in self.inventory.conflicts[:10]:
            reason = f"marked or claimed as {before}, and claimed as {claimed}"
            self.coverage["owners"].miss("page", self._frames.page(number), reason)
        self.coverage["owners"].read += len(self.owners.claims)

    def _add_free(self, found: FreeList) -> None:
        """
        Add the blocks of a list of free pages.

        :raises drgn.FaultError: if the list does not end, or a page on it is not free
        """
        page = self._image.type("struct page")
        link = offsetof(page, "lru")
        at = found.first
        for _ in range(_MOST_LINKS):
            if at == found.head or not at:
                self.coverage["free_lists"].read += 1
                return
            address = at - link
            pfn, order = self._frames.pfn(address), found.order
            if order is None:
                order = self._memory.word(address + offsetof(page, "private"))
            block = range(pfn, pfn + (1 << min(order, 32)))
            bare = self.bare.get(pfn)
            if bare is None or order > 32 or any(p not in self.bare for p in block):
                raise FaultError("a page on a list of free pages is in use", address)
            for each in block:
                del self.bare[each]
            self.count(Place(found.nid, found.zone, "free_pcp", order), len(block), UNUSED)
            at = bare[2]
        raise FaultError("the list does not end", found.first)

    def _add_block(self, first: int, head: _Head) -> None:
        """
        Add the other pages of a block that is not compound.

        It is aligned to its size, and ends before the next page that is not bare:
        :meth:`memcg_inspect.linux.mm.page_alloc.BlockReader.order()`.

        :param first: page frame of its first page, which has been counted
        """
        order = 0
        while not first >> order & 1 and first + (1 << order) in self.bare:
            order += 1
        size = 1 << order
        tails = [pfn for pfn in range(first + 1, first + size) if pfn in self.bare]
        if len(tails) != size - 1:
            return
        if head.place.order is not None:
            self._orders_found[first] = order
        else:
            self.count(head.place, size - 1, head.payer)
        for pfn in tails:
            del self.bare[pfn]


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
    """The pages of one piece of the memory map."""

    def __init__(self, reader: _Reader, piece: PagePiece, raw: RawPiece) -> None:
        self._reader, self._piece, self._raw = reader, piece, raw
        self._frames = reader._frames
        self._first = self._frames.pfn(raw.page)
        self._count = len(raw.data) // self._frames.size
        self._marks: Marks = reader.marks.read(raw)
        self._words = reader.marks.payers(raw)
        self._kinds = bytearray(self._marks.codes.translate(reader.translate))
        # 1: counted, or to be counted, with the block that the page is in; 2: claimed by its owner.
        self._done = bytearray(self._count)
        zones = reader.layout.zone.column(raw.data, self._frames.size)
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
        self._add_slabs()
        self._add_blocks(blocks)
        self._add_singles()
        self._add_unmarked()
        self._note_last()

    def _spread(self) -> dict[int, int]:
        """Give all pages of a block the kind of its first page. Return the blocks."""
        reader, first, count = self._reader, self._first, self._count
        end, code = reader.open
        rest = min(max(end - first, 0), count)
        if rest:
            self._kinds[:rest] = bytes([code]) * rest
            self._done[:rest] = b"\1" * rest
        blocks = {i: order for i, order in self._raw.orders.items() if i >= rest}
        for i in self._marks.free:
            self._kinds[i] = _CODES["free"]
        blocks |= self._marks.free
        for i, order in blocks.items():
            stop = min(i + (1 << order), count)
            self._kinds[i:stop] = self._kinds[i : i + 1] * (stop - i)
            self._done[i:stop] = b"\1" * (stop - i)
            if i + (1 << order) > count:
                reader.open = (first + i + (1 << order), self._kinds[i])
        return blocks

    def _mark_holes(self) -> None:
        first, reader = self._first, self._reader
        for start, end in reader.holes.within(first, first + self._count):
            start, end = start - first, end - first
            self._kinds[start:end] = bytes([_HOLE]) * (end - start)
            self._done[start:end] = b"\1" * (end - start)
            if self._zone is not None:
                reader.inventory.holes[self._zone] += end - start
            else:
                reader.inventory.holes.update(self._zones[start:end])

    def _apply_claims(self) -> None:
        first = self._first
        for claim in self._reader.owners.within(first, first + self._count):
            start, end = claim.start - first, claim.end - first
            order = self._raw.orders.get(start) if end - start == 1 else None
            if order is not None:
                end = min(start + (1 << order), self._count)
            allowed = {0, _CODES[claim.kind], *(_CODES[k] for k in _FINER.get(claim.kind, ()))}
            for a, b in self._runs(claim.kind, start, end, allowed):
                self._kinds[a:b] = bytes([_CODES[claim.kind]]) * (b - a)
                self._done[a:b] = b"\2" * (b - a)
                self._count_claim(claim, a, b)

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
            elif kinds[i] != _HOLE:
                found = (self._first + i, _NAMES[kinds[i]], kind)
                self._reader.inventory.conflicts.append(found)

    def _count_claim(self, claim: Claim, start: int, end: int) -> None:
        reader = self._reader
        is_charged = KINDS[claim.kind].is_charged
        if claim.share is not None or not is_charged:
            zones = Counter({self._zone: end - start}) if self._zone else None
            for (nid, zone), pages in (zones or Counter(self._zones[start:end])).items():
                place = Place(nid, zone, claim.kind, None, None, claim.caller)
                if claim.share is None:
                    reader.count(place, pages, NEVER)
                else:
                    reader.count_shared(place, 1, claim.share, pages)
            return
        # The first page of a block names who pays.
        words = self._words[start:end]
        if end - start > 1 and start in self._raw.orders:
            words = [words[0]] * (end - start)
        places = [self._at(i) for i in range(start, end)] if self._zone is None else None
        if places is None:
            assert self._zone is not None
            places = [self._zone] * (end - start)
        for ((nid, zone), word), pages in Counter(zip(places, words, strict=True)).items():
            place = Place(nid, zone, claim.kind, None, None, claim.caller)
            reader.count(place, pages, reader.payer(word))

    def _refine_reserved(self) -> None:
        first, reserved = self._first, _CODES["reserved"]
        for start, end, kind in self._reader.owners.regions:
            a, b = max(start - first, 0), min(end - first, self._count)
            if a < b:
                table = bytes(_CODES[kind] if c == reserved else c for c in range(256))
                self._kinds[a:b] = self._kinds[a:b].translate(table)

    def _index(self, page: int) -> int:
        return (page - self._raw.page) // self._frames.size

    def _add_slabs(self) -> None:
        reader = self._reader
        for page in self._piece.slabs:
            i = self._index(page.page)
            if self._done[i] == 2 or self._kinds[i] == _HOLE:
                continue
            nid, zone = self._at(i)
            self._done[i] = max(self._done[i], 1)
            pages, slab = 1 << page.order, reader.slabs.slab(page)
            if slab is None:
                reader.coverage["slab"].miss("slab", page.page, "its cache is not known")
                reader.count(Place(nid, zone, "slab"), pages, NOBODY)
                continue
            size = slab.cache.size
            paid = tuple((o, n * size) for o, n in (slab.charged or {}).items())
            reader.find_owners(slab)
            place = Place(nid, zone, "slab", page.order, slab.cache.name)
            used = max(slab.inuse * size, sum(b for _, b in paid))
            reader.count_shared(place, pages, Share(used, paid))

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
                payer = reader.payer(self._words[i]) if is_kmem else NEVER
            elif kind in _PAID:
                payer = reader.payer(self._words[i])
            lru = self._list_of(self._marks.lru[i], self._marks.mlocked[i], kind)
            share = reader.owners.shares.get(self._first + i) if kind == "zsmalloc" else None
            place = Place(nid, zone, kind, order, None, None, lru)
            if kind in _UNMARKED:
                reader.unmarked[place, payer].append(self._first + i)
            elif share is not None:
                reader.count_shared(place, 1 << order, share)
            else:
                reader.count(place, 1 << order, payer)

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
            reader.count(Place(nid, zone, kind), pages, payer)
        chosen = _both(self._kinds.translate(paid), free)
        shares = reader.owners.shares
        if shares:
            for i in positions(int.from_bytes(chosen, "little"), self._count):
                share = shares.get(self._first + i)
                if share is not None and self._kinds[i] == _CODES["zsmalloc"]:
                    reader.count_shared(Place(*self._at(i), "zsmalloc"), 1, share)
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
            reader.count(place, pages, reader.payer(word))

    def _list_of(self, flags: int, mlocked: int, kind: str) -> str | None:
        """Return the LRU list of user pages."""
        if kind not in _USER:
            return None
        return "mlocked" if mlocked else _list_of(LRU_FLAGS[flags])

    def _all_zones(self) -> list[tuple[int, int]]:
        return self._zones if self._zone is None else [self._zone] * self._count

    def _add_unmarked(self) -> None:
        """Count the pages that nothing marks and nobody claims; keep those that are bare."""
        reader, first = self._reader, self._first
        everything = int.from_bytes(b"\1" * self._count, "little")
        done = int.from_bytes(self._done.translate(bytes(b != 0 for b in range(256))), "little")
        marked = int.from_bytes(self._kinds.translate(bytes(b != 0 for b in range(256))), "little")
        rest = everything & ~done & ~marked
        bare = self._marks.bare & rest
        for i in positions(rest & ~bare & self._marks.kmem, self._count):
            place = Place(*self._at(i), "kmem", 0)
            reader.unmarked[place, reader.payer(self._words[i])].append(first + i)
        for i in positions(rest & ~bare & ~self._marks.kmem, self._count):
            reader.unmarked[Place(*self._at(i), "unknown", 0), NEVER].append(first + i)
        links = reader.marks.links(self._raw) if bare else []
        for i in positions(bare, self._count):
            reader.bare[first + i] = (*self._at(i), links[i])
        for i in positions(bare & ~(bare << 8), self._count):
            head = self._head(i - 1) if i else self._head_before()
            if head is not None:
                reader.heads[first + i - 1] = head

    def _head_before(self) -> _Head | None:
        pfn, head = self._reader.last
        return head if pfn == self._first - 1 else None

    def _head(self, i: int) -> _Head | None:
        """Return a page that may begin a block that is not compound."""
        if self._done[i] == 1 or self._kinds[i] == _HOLE or i in self._raw.orders:
            return None
        if self._marks.bare >> 8 * i & 1 and not self._kinds[i]:
            return None
        is_kmem = self._marks.kmem >> 8 * i & 1
        kind = _NAMES[self._kinds[i]] or ("kmem" if is_kmem else "unknown")
        if kind not in _BLOCKS:
            return None
        order = 0 if kind in _UNMARKED else None
        payer = self._reader.payer(self._words[i]) if KINDS[kind].is_charged else NEVER
        return _Head(Place(*self._at(i), kind, order), payer)

    def _note_last(self) -> None:
        last = self._count - 1
        self._reader.last = (self._first + last, self._head(last))


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
