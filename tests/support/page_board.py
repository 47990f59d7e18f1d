# SPDX-License-Identifier: LGPL-2.1-or-later
"""Page frames of a real image whose ``struct page`` a test writes, and owners of page frames."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from drgn import FaultError, Program, offsetof, sizeof
from drgn.helpers.linux.mm import follow_phys
from drgn.helpers.linux.mmzone import for_each_online_pgdat

from memcg_inspect.collect.inventory_part import InventoryPart
from memcg_inspect.collect.inventory_range import RangeInventory
from memcg_inspect.collect.page_owners import Claim, Owners, Share
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.model import Coverage

__all__ = ("ANON", "KMEM", "NID", "ONE", "PAGES", "TWO", "ZONE", "Board", "Claimed")

#: Page frames of a board.
PAGES = 192
#: ``struct obj_cgroup *``. Nothing is read of them.
ONE, TWO = 0xFFFF888001234500, 0xFFFF888001234600
#: ``MEMCG_DATA_KMEM``
KMEM = 2
#: ``PAGE_MAPPING_ANON``
ANON = 1
#: Node and zone of page frames for which a test says none.
NID, ZONE = 1, 2


class Claimed(Owners):
    """Owners that were not read from an image."""

    def __init__(
        self,
        claims: Iterable[Claim] = (),
        regions: Iterable[tuple[int, int, str]] = (),
        shares: Mapping[int, Share] | None = None,
    ) -> None:
        self.regions, self.shares = list(regions), dict(shares or {})
        self.claim(claims)

    def claim(self, claims: Iterable[Claim]) -> None:
        """Let these claims be all, in ascending order."""
        self.claims = list(claims)
        self._ends = [claim.end for claim in self.claims]


class Board:
    """
    Page frames of an image whose ``struct page`` a test writes. All others are ``offline``.

    :ivar start: the first page frame
    :ivar missing: pages of the memory map that are not in the image, by number
    """

    def __init__(self, prog: Program) -> None:
        self.prog, self.image = prog, Image(prog)
        self.page = prog.type("struct page")
        self.size = sizeof(self.page)
        self.start = self._start()
        self.missing: set[int] = set()
        self._data = bytearray(PAGES * self.size)
        self.clear()
        prog.add_memory_segment(self.address(0), len(self._data), self._read, False)

    def _start(self) -> int:
        """
        Return a page frame of the kernel's code that no block of pages crosses.

        Those page frames are in no list, in no vmalloc area, and never free. The first one of a
        node must stay as it is, for it must name its node. KASLR can put it there.
        """
        text = follow_phys(self.prog["init_mm"].address_of_(), self.prog.symbol("_stext").address)
        start = -(-int(text.value_() >> 12) // 1024) * 1024
        firsts = {int(node.node_start_pfn) for node in for_each_online_pgdat(self.prog)}
        return start if firsts.isdisjoint(range(start, start + PAGES)) else start + 1024

    def _read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        # With a struct page of 64 bytes, 64 of them are in a page.
        if self.missing & set(range(offset >> 12, (offset + count - 1 >> 12) + 1)):
            raise FaultError("not in the image", address)
        return bytes(self._data[offset : offset + count])

    def write(self, i: int, offset: int, data: bytes) -> None:
        """Write bytes of a ``struct page``."""
        begin = i * self.size + offset
        self._data[begin : begin + len(data)] = data

    def address(self, i: int) -> int:
        """Return the ``struct page *`` of a page frame of the board."""
        return int((self.prog["vmemmap"] + self.start + i).value_())

    def clear(self) -> None:
        """Write all page frames."""
        self.missing = set()
        for i in range(PAGES):
            self.put(i, type="offline")

    def put(
        self,
        i: int,
        *flags: str,
        type: str = "",
        refs: int = 1,
        data: int = 0,
        link: int = 0,
        mapping: int = 0,
        private: int = 0,
        nid: int = NID,
        zone: int = ZONE,
    ) -> None:
        """Write a ``struct page``."""
        prog = self.prog
        # Without CONFIG_SPARSEMEM's sections, the node is in the highest bits, and the zone
        # below it: three bits, for five zones.
        nodes = (len(prog["node_data"]) - 1).bit_length()
        assert prog["__MAX_NR_ZONES"].value_() == 5
        word = nid << 64 - nodes | zone << 64 - nodes - 3
        for flag in flags:
            word |= 1 << prog[flag].value_()
        kind = prog[f"PGTY_{type}"].value_() << 24 | 0xFFFFFF if type else 0xFFFFFFFF
        members = {"flags": word, "lru": link, "mapping": mapping, "private": private}
        members |= {"memcg_data": data, "page_type": kind, "_refcount": refs}
        self.write(i, 0, bytes(self.size))
        for name, value in members.items():
            size = 4 if name in ("page_type", "_refcount") else 8
            self.write(i, offsetof(self.page, name), value.to_bytes(size, "little"))

    def bare(self, *pages: int, **more: int) -> None:
        """Write pages that nothing marks, without a reference."""
        for i in pages:
            self.put(i, refs=0, **more)

    def free(self, i: int, order: int) -> None:
        """Write a free block."""
        self.bare(*range(i + 1, i + (1 << order)))
        self.put(i, type="buddy", refs=0, private=order)

    def guard(self, i: int, order: int) -> None:
        """Write a block of guard pages."""
        self.free(i, order)
        self.put(i, type="guard", refs=0, private=order)

    def compound(self, i: int, order: int, *flags: str, **more: Any) -> None:
        """Write a compound page."""
        place = {name: more[name] for name in ("nid", "zone") if name in more}
        for tail in range(i + 1, i + (1 << order)):
            self.put(tail, refs=0, link=1, **place)
        self.put(i, "PG_head", *flags, **more)
        # Since 6.6, in the low byte of the flags of the second page.
        self.write(i + 1, offsetof(self.page, "flags"), bytes([order]))

    def lost_slab(self, i: int, order: int, cache: int = 0x1000) -> None:
        """Write a slab with objects, of a cache that is not in the image, or of another one."""
        self.compound(i, order, type="slab", link=cache)
        # Numbers of objects, in use and in all, are in one word.
        self.write(i, self.prog.type("struct slab").member("inuse").offset, bytes([5, 0, 9, 0]))

    def claim(self, start: int, end: int, kind: str, *more: Any) -> Claim:
        return Claim(self.start + start, self.start + end, kind, *more)

    def stack(self, start: int, end: int) -> Claim:
        """Return the claim of a stack that is a block (``CONFIG_VMAP_STACK=n``)."""
        return self.claim(start, end, "stack")._replace(block=self.start + start)

    def reader(self, owners: Owners | None = None) -> RangeInventory:
        owners = owners if owners is not None else Claimed()
        return RangeInventory(self.image, owners, frozenset(), defaultdict(Coverage))

    def read(self, owners: Owners | None = None, pages: int = PAGES) -> InventoryPart:
        return self.reader(owners)(PageRange(self.start, self.start + pages))

    def of(self, found: InventoryPart) -> Counter[tuple[str, int | None, int]]:
        """Return the bytes by kind, order and payer, without those of ``offline`` pages."""
        sums: Counter[tuple[str, int | None, int]] = Counter()
        for (place, payer), size in found.bytes.items():
            sums[place.kind, place.order, payer] += size if place.kind != "offline" else 0
        return +sums

    def unmarked(self, found: InventoryPart) -> dict[tuple[str, int | None, int], list[int]]:
        """Return the blocks whose use is to be found, by kind, order and payer."""
        return {
            (place.kind, place.order, payer): sorted(pfn - self.start for pfn in pfns)
            for (place, payer), pfns in found.unmarked.items()
        }
