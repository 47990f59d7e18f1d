# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What the page frames of a range are: the ``struct page`` of some page frames of a real image are
written here, so that every kind, order and payer can be worked out by hand.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict

import pytest
from drgn import FaultError, Object, offsetof
from support.page_board import ANON, KMEM, NID, ONE, PAGES, TWO, ZONE, Board, Claimed

from memcg_inspect.collect import inventory_range
from memcg_inspect.collect.inventory_part import BarePage, Head, InventoryPart
from memcg_inspect.collect.inventory_range import RangeInventory
from memcg_inspect.collect.page_owners import Owners, Share
from memcg_inspect.image import memory
from memcg_inspect.image.image import Image
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import PageRange, page_ranges
from memcg_inspect.linux.mm.page_flags import page_flags
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.model import Coverage
from memcg_inspect.model_pages import NEVER, NOBODY, UNUSED, Place

pytestmark = pytest.mark.image


def test_pages_that_are_marked(board: Board) -> None:
    """Memcgs pay for pages of some kinds only, and ``memcg_data`` names who does."""
    board.put(0, type="table", data=ONE | KMEM)
    board.put(1, type="table")
    board.put(2, "PG_reserved")
    board.put(3, "PG_reserved", data=ONE | KMEM)
    board.put(4, type="zsmalloc")
    found = board.read()
    assert board.of(found) == {
        ("pagetables", None, ONE): 4096,
        ("pagetables", None, NOBODY): 4096,
        ("reserved", None, NEVER): 2 * 4096,
        ("zsmalloc", None, NOBODY): 4096,
    }
    assert found.bytes[Place(NID, ZONE, "offline"), NEVER] == (PAGES - 5) * 4096
    assert found.pages.total() == PAGES
    assert found.coverage["pages"].read == PAGES
    assert (found.unmarked, found.bare, found.heads, found.conflicts) == ({}, {}, {}, [])


def test_blocks(board: Board) -> None:
    """A block is of the kind of its first page, and that names who pays for all of it."""
    board.free(0, 2)
    board.compound(4, 1, data=ONE | KMEM, type="table")
    board.compound(8, 3, type="large_kmalloc", data=TWO | KMEM)
    board.compound(16, 2, type="hugetlb")
    board.compound(20, 2, "PG_swapbacked", "PG_lru", "PG_active", mapping=ANON | 64, data=ONE)
    board.compound(24, 1, data=ONE | KMEM)
    board.compound(26, 1)
    board.lost_slab(28, 1)
    board.compound(30, 1, type="zsmalloc", data=ONE | KMEM)
    found = board.read()
    assert board.of(found) == {
        ("free", 2, UNUSED): 4 * 4096,
        ("pagetables", 1, ONE): 2 * 4096,
        ("large_kmalloc", 3, TWO): 8 * 4096,
        ("hugetlb", 2, NOBODY): 4 * 4096,
        ("anon", 2, ONE): 4 * 4096,
        ("slab", None, NOBODY): 2 * 4096,
        ("zsmalloc", 1, ONE): 2 * 4096,
    }
    assert board.unmarked(found) == {("kmem", 1, ONE): [24], ("unknown", 1, NEVER): [26]}
    assert found.bare == {}
    assert found.pages.total() == PAGES - 4
    assert found.last is None


def test_pages_that_nothing_marks(board: Board) -> None:
    """A charged page is kernel memory. One without a reference may be free, or part of a block."""
    board.put(0, data=ONE | KMEM)
    board.put(2, data=ONE | KMEM, refs=0)
    board.put(4)
    board.put(6, nid=2, zone=3)
    board.bare(8, link=0x1230)
    board.bare(10, link=0x1240, nid=2, zone=3)
    found = board.read()
    assert found.unmarked == {
        (Place(NID, ZONE, "kmem", 0), ONE): array("Q", [board.start, board.start + 2]),
        (Place(NID, ZONE, "unknown", 0), NEVER): array("Q", [board.start + 4]),
        (Place(2, 3, "unknown", 0), NEVER): array("Q", [board.start + 6]),
    }
    assert found.bare == {
        board.start + 8: BarePage(NID, ZONE, 0x1230),
        board.start + 10: BarePage(2, 3, 0x1240),
    }
    assert found.pages.total() == PAGES - 6


def test_the_first_page_of_a_block_that_is_not_compound(board: Board) -> None:
    """It has a reference and may have a mark; the others have neither."""
    board.put(0, data=ONE | KMEM)
    board.put(4)
    board.put(8, type="table", data=TWO | KMEM)
    board.put(16, "PG_reserved")
    board.put(20, "PG_lru", mapping=ANON | 64, data=ONE)
    board.compound(24, 1)
    board.put(28, nid=2, zone=3)
    owners = Claimed([board.claim(12, 13, "trace"), board.claim(32, 33, "vmalloc")])
    board.put(12)
    board.put(32, data=ONE | KMEM)
    for i in (0, 4, 8, 12, 16, 20, 24, 28, 32):
        board.bare(i + 1 if i != 24 else i + 2, i + 3)
    board.bare(37, 38, 39)
    found = board.read(owners)
    assert {pfn - board.start: head for pfn, head in found.heads.items()} == {
        0: Head(Place(NID, ZONE, "kmem", 0), ONE),
        4: Head(Place(NID, ZONE, "unknown", 0), NEVER),
        8: Head(Place(NID, ZONE, "pagetables"), TWO),
        12: Head(Place(NID, ZONE, "trace"), NEVER),
        28: Head(Place(2, 3, "unknown", 0), NEVER),
    }


def test_a_block_that_is_not_compound_may_begin_before_the_first_page(board: Board) -> None:
    """Then the range before has its first page, as its last one."""
    board.bare(0)
    board.put(PAGES - 1, data=ONE | KMEM)
    found = board.read()
    assert found.heads == {}
    assert found.last == Head(Place(NID, ZONE, "kmem", 0), ONE)
    for i, last in ((PAGES - 1, "offline"), (PAGES - 2, "compound"), (PAGES - 1, "bare")):
        if last == "offline":
            board.put(i, type=last)
        elif last == "compound":
            board.compound(i, 1)
        else:
            board.bare(i)
        assert board.read().last is None


def test_user_pages_by_list(board: Board) -> None:
    """The LRU list of a folio: ``folio_lru_list()``, and those that a process locked."""
    swap, lru = "PG_swapbacked", "PG_lru"
    board.put(0, swap, lru, mapping=ANON | 64, data=ONE)
    board.put(1, swap, lru, "PG_active", mapping=ANON | 64, data=ONE)
    board.put(2, swap, lru, "PG_unevictable", mapping=ANON | 64, data=ONE)
    board.put(3, swap, lru, "PG_unevictable", "PG_mlocked", mapping=ANON | 64, data=ONE)
    board.put(4, swap, mapping=ANON | 64, data=ONE)
    board.put(5, lru, mapping=64, data=TWO)
    board.put(6, swap, lru, "PG_active", mapping=64)
    board.compound(8, 1, lru, "PG_active", mapping=64, data=TWO)
    found = board.read()
    assert {
        (place.kind, place.order, place.lru, payer): size // 4096
        for (place, payer), size in found.bytes.items()
        if place.kind != "offline"
    } == {
        ("anon", 0, "inactive", ONE): 1,
        ("anon", 0, "active", ONE): 1,
        ("anon", 0, "unevictable", ONE): 1,
        ("anon", 0, "mlocked", ONE): 1,
        ("anon", 0, "none", ONE): 1,
        ("file", 0, "inactive", TWO): 1,
        ("shmem", 0, "active", NOBODY): 1,
        ("file", 1, "active", TWO): 2,
    }


def test_regions_tell_what_is_reserved(board: Board) -> None:
    """Pages of the kernel's image that it has freed are no part of it any more."""
    for i in (0, 1, 3, 4):
        board.put(i, "PG_reserved")
    board.put(2, type="table")
    start = board.start
    found = board.read(Claimed(regions=[(start - 5, start + 4, "image"), (0, start, "swiotlb")]))
    assert board.of(found) == {
        ("image", None, NEVER): 3 * 4096,
        ("reserved", None, NEVER): 4096,
        ("pagetables", None, NOBODY): 4096,
    }
    found = board.read(Claimed(regions=[(start + 4, start + PAGES + 9, "crash_kernel")]))
    assert board.of(found)["crash_kernel", None, NEVER] == 4096


def test_pages_of_zsmalloc_have_shares(board: Board) -> None:
    """Who pays for what is in them is not in ``memcg_data``."""
    board.put(0, type="zsmalloc")
    board.put(1, type="zsmalloc", nid=2, zone=3)
    board.put(2, type="zsmalloc")
    board.put(3, type="table", data=ONE | KMEM)
    board.compound(4, 1, type="zsmalloc")
    half = Share(4096, ((ONE, 1000), (TWO, 500)))
    start = board.start
    shares = {start: half, start + 1: half, start + 3: half, start + 4: Share(4096, ((ONE, 7),))}
    found = board.read(Claimed(shares=shares))
    assert board.of(found) == {
        ("zsmalloc", None, ONE): 2 * 1000,
        ("zsmalloc", None, TWO): 2 * 500,
        ("zsmalloc", None, NOBODY): 2 * 2596 + 4096,
        ("zsmalloc", 1, ONE): 7,
        ("zsmalloc", 1, NOBODY): 4096 - 7,
        ("zsmalloc", 1, UNUSED): 4096,
        ("pagetables", None, ONE): 4096,
    }
    assert found.pages[Place(2, 3, "zsmalloc")] == 1
    assert found.pages.total() == PAGES


def test_slabs(board: Board) -> None:
    """What is in use, and who pays: a free object of a slab can still be charged."""
    slabs = SlabReader(board.image)
    slab = next(
        slab
        for piece in scan_pages(board.image)
        for slab in filter(None, map(slabs.slab, piece.slabs))
        if slab.cache.name == "dentry" and slab.charged
    )
    inuse = board.prog.type("struct slab").member("inuse")
    assert inuse.bit_offset % 8 == 0
    assert inuse.bit_field_size == 16
    words = bytearray(board.prog.read(slab.page, board.size))
    places = ((0, slab.inuse), (8, 0)) if slab.order <= 3 else ()
    for at, number in places:
        words[inuse.offset : inuse.offset + 2] = number.to_bytes(2, "little")
        if slab.order:
            board.compound(at, slab.order, type="slab")
        else:
            board.put(at, type="slab")
        board.write(at, 8, words[8:])
    size, paid = slab.cache.size, sum(slab.charged.values()) * slab.cache.size
    used = max(slab.inuse * size, paid)
    wanted = Counter({objcg: 2 * count * size for objcg, count in slab.charged.items()})
    wanted[NOBODY] = used - paid
    wanted[UNUSED] = 2 * (4096 << slab.order) - used - paid
    found = board.read()
    place = Place(NID, ZONE, "slab", slab.order, "dentry")
    assert {owner: size for (at, owner), size in found.bytes.items() if at == place} == wanted
    assert found.pages[place] == 2 << slab.order
    assert found.coverage["slab"].read == 2
    assert found.pages.total() == PAGES


def test_where_there_is_no_memory(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page frames between ranges of memory are no pages, whatever their ``struct page`` says."""
    start = board.start
    ranges = [(start - 8, start + 2), (start + 4, start + 6), (start + 14, start + PAGES)]
    monkeypatch.setattr(inventory_range, "system_ram", lambda *_: ranges)
    for i in range(6):
        board.put(i)
    board.lost_slab(6, 1)
    board.compound(8, 1, data=ONE | KMEM)
    board.free(10, 1)
    board.put(12, data=ONE | KMEM)
    board.put(13, data=ONE | KMEM)
    board.bare(14)
    board.put(3, nid=2, zone=3)
    found = board.read(Claimed([board.claim(12, 13, "vmalloc")]))
    assert found.holes == {(NID, ZONE): 9, (2, 3): 1}
    assert board.unmarked(found) == {("unknown", 0, NEVER): [0, 1, 4, 5]}
    assert (board.of(found), found.conflicts, found.heads) == ({}, [], {})
    assert list(found.bare) == [start + 14]
    assert found.pages.total() == PAGES - 15
    for i in range(6):
        board.put(i)
    assert board.read().holes == {(NID, ZONE): 10}


def test_ranges_without_memory(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [(10, 20), (30, 40)]
    monkeypatch.setattr(inventory_range, "system_ram", lambda *_: ranges)
    holes = board.reader().holes
    for start, end, wanted in (
        (0, 50, [(0, 10), (20, 30), (40, 50)]),
        (10, 20, []),
        (12, 18, []),
        (20, 30, [(20, 30)]),
        (15, 35, [(20, 30)]),
        (0, 10, [(0, 10)]),
        (21, 29, [(21, 29)]),
        (35, 45, [(40, 45)]),
        (40, 45, [(40, 45)]),
    ):
        assert list(holes.within(start, end)) == wanted


def test_the_ranges_of_memory_may_be_missing(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all page frames of the memory map are taken for memory."""

    def missing(image: Image, page_shift: int) -> list[tuple[int, int]]:
        raise FaultError("not in the image", 0x1230)

    monkeypatch.setattr(inventory_range, "system_ram", missing)
    coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
    reader = RangeInventory(board.image, Claimed(), frozenset(), coverage)
    ranges = page_ranges(board.image)
    assert list(reader.holes.within(0, ranges[-1].end + 2)) == [
        (ranges[-1].end, ranges[-1].end + 2)
    ]
    assert [(found.what, found.address) for found in coverage["resources"].examples] == [
        ("iomem_resource", 0x1230)
    ]


def zoo(board: Board) -> Owners:
    """Write pages of all sorts. Return their owners."""
    board.free(0, 3)
    board.compound(8, 3, data=ONE | KMEM)
    board.compound(16, 4, data=ONE | KMEM)
    board.lost_slab(32, 3)
    board.compound(40, 3, "PG_lru", mapping=64, data=ONE)
    for i in range(48, 56):
        board.put(i, type="table", data=ONE | KMEM, nid=2 + i % 2, zone=3)
    board.put(57, data=ONE | KMEM)
    board.bare(58, 59)
    board.put(60)
    board.put(61, data=TWO | KMEM)
    board.put(63, data=TWO | KMEM)
    board.bare(64, 65, 66, 67)
    for i in range(68, 80):
        board.put(i, *(["PG_reserved"] if i % 2 else []), data=0 if i % 2 else ONE | KMEM)
    for i in range(80, 84):
        board.put(i, type="zsmalloc")
    start = board.start
    return Claimed(
        [
            board.claim(2, 4, "vmalloc"),
            board.claim(60, 62, "vmalloc"),
            board.claim(69, 76, "percpu", None, Share(300, ((ONE, 100),))),
        ],
        [(start + 74, start + 80, "image")],
        {start + 81: Share(4096, ((TWO, 77),))},
    )


def sums(found: InventoryPart) -> InventoryPart:
    """Return a part without what the order of pages and blocks says."""
    for pfns in found.unmarked.values():
        pfns[:] = array("Q", sorted(pfns))
    found.conflicts.sort()
    return found


@pytest.mark.parametrize("pages", [2, 4, 12, 16, 64])
def test_pieces_of_any_size_find_the_same(
    board: Board, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """A block, or a claim, may reach from one piece into the next, or over several."""
    owners = zoo(board)
    whole = sums(board.read(owners))
    assert len(whole.heads) == 2
    assert len(whole.conflicts) == 6
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    assert sums(board.read(owners)) == whole


@pytest.mark.parametrize("cut", [48, 56, 58, 62, 64, 72, 80])
def test_ranges_add_up_to_the_same(board: Board, cut: int) -> None:
    """No block reaches from one range into the next, except one that is not compound."""
    owners = zoo(board)
    whole, reader = sums(board.read(owners)), board.reader(owners)
    total = InventoryPart(PageRange(board.start, board.start), 4096)
    for start, end in ((0, cut), (cut, PAGES)):
        total.merge(reader(PageRange(board.start + start, board.start + end)))
    assert sums(total) == whole


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_page_of_the_memory_map_may_be_missing(board: Board, gone: int) -> None:
    """Its page frames are unreadable. What is behind it belongs to no block that is before it."""
    board.put(63, data=TWO | KMEM)
    board.bare(64, 128)
    board.put(127, data=ONE | KMEM)
    board.put(PAGES - 1, data=ONE | KMEM)
    board.missing = {gone}
    found = board.read()
    assert found.coverage["pages"].read == PAGES - 64
    (missed,) = found.coverage["pages"].examples
    assert (missed.what, missed.address) == ("struct pages", board.address(64 * gone))
    assert missed.reason.startswith("not in the image")
    assert (found.last is None) == (gone == 2)
    heads = {0: {127: ONE}, 1: {}, 2: {63: TWO}}[gone]
    assert {pfn - board.start: head.owner for pfn, head in found.heads.items()} == heads


def test_a_block_goes_on_behind_a_page_of_the_memory_map_that_is_missing(board: Board) -> None:
    board.free(0, 7)
    board.missing = {1}
    found = board.read()
    assert board.of(found) == {("free", 7, UNUSED): 128 * 4096}
    assert found.bare == {}


def test_an_interrupted_walk(board: Board) -> None:
    reader = board.reader()
    board.image.progress.stop = True
    try:
        found = reader(PageRange(board.start, board.start + PAGES))
    finally:
        board.image.progress.stop = False
    assert found.pages == {}
    assert [missed.reason for missed in found.coverage["pages"].examples] == [STOPPED]


def test_pages_of_two_zones_of_a_node(board: Board) -> None:
    board.put(0, type="table")
    board.put(1, type="table", zone=3)
    found = board.read()
    assert found.pages == {
        Place(NID, ZONE, "offline"): PAGES - 2,
        Place(NID, ZONE, "pagetables"): 1,
        Place(NID, 3, "pagetables"): 1,
    }


def test_page_frame_0_is_a_page(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory_range, "system_ram", lambda *_: [(0, board.start)])
    assert board.reader()(PageRange(0, 2)).pages.total() == 2


def test_a_share_is_of_a_page_of_zsmalloc_only(board: Board) -> None:
    """A page of it that was freed meanwhile may be of any kind."""
    board.compound(0, 1, type="large_kmalloc", data=TWO | KMEM)
    board.put(2, type="table", data=TWO | KMEM)
    share = Share(4096, ((ONE, 7),))
    found = board.read(Claimed(shares={board.start: share, board.start + 2: share}))
    assert board.of(found) == {
        ("large_kmalloc", 1, TWO): 2 * 4096,
        ("pagetables", None, TWO): 4096,
    }


def test_a_page_on_a_list_of_the_multi_gen_lru(board: Board) -> None:
    """``page->flags`` has the number of its generation plus one (``LRU_GEN_PGOFF``)."""
    nodes = (len(board.prog["node_data"]) - 1).bit_length()
    board.put(0, "PG_lru", "PG_swapbacked", mapping=ANON | 64, data=ONE)
    bits = page_flags(board.image).generation
    assert bits is not None
    assert bits.shift + bits.width <= 64 - nodes - 3
    word = int.from_bytes(board.prog.read(board.address(0), 8), "little")
    board.write(0, 0, (word | 2 << bits.shift).to_bytes(8, "little"))
    (place,) = (place for place in board.read().pages if place.kind == "anon")
    assert (place.lru, place.nid, place.zone) == ("multi-gen", NID, ZONE)


def test_the_name_of_a_cache_may_be_missing(board: Board) -> None:
    """The slab is of a cache that is in the last page frames of the board."""
    cache = board.prog.type("struct kmem_cache")
    for member, size in (("size", 64), ("object_size", 64), ("name", 0x1000)):
        board.write(PAGES - 8, offsetof(cache, member), size.to_bytes(8, "little")[:4])
    board.lost_slab(0, 1, cache=board.address(PAGES - 8))
    found = board.read(pages=8)
    assert list(found.unnamed) == [board.address(PAGES - 8)]


def test_sockets_in_slabs_may_own_pages(board: Board) -> None:
    """All that are in use, whether they refer to a memcg or not."""
    slabs = SlabReader(board.image)

    def plain(slab: Slab) -> set[int]:
        return {
            address
            for address in slabs.objects(slab)
            if (sock := Object(board.prog, "struct sock", address=address)).sk_prot_creator
            and sock.sk_wmem_alloc.refs.counter > 0
        }

    # Of a slab in use, all objects may wait for RCU.
    slab, expected = next(
        (slab, socks)
        for piece in scan_pages(board.image)
        for slab in filter(None, map(slabs.slab, piece.slabs))
        if slab.cache.name == "TCP" and (socks := plain(slab))
    )
    first = (slab.page - board.address(0)) // board.size + board.start
    found = board.reader()(PageRange(first, first + (1 << slab.order)))
    assert found.in_slabs.socks == expected
