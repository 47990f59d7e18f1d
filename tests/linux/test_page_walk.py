# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The walk over all ``struct page`` finds what a plain loop over the pages finds.

Memory maps are made by chance from a seed, as releases have them: slabs, page tables, large
kmallocs, user pages on and off LRU lists, free pages, and compound pages of each.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest
from support.layouts import FRAMES, NODE_1, MadeImage
from support.made_pages import NO_TYPE, PG_SLAB, TYPES, kernel_with_pages, put, put_compound

from memcg_inspect.linux.mm.mm_types import (
    LRU_FLAGS,
    KmemPage,
    LruFlags,
    LruPages,
    PagePiece,
    page_layout,
    pages_per_piece,
    scan_pages,
    scan_range,
)
from memcg_inspect.linux.mm.mm_types_columns import FlagColumn, Marker, PageColumns
from memcg_inspect.linux.mm.mm_types_orders import WrongOrder, why_not_block
from memcg_inspect.linux.mm.mm_types_slabs import SlabPage, SlabPages
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.model import ImageError

PAYERS = (0xFFFF888000111000, 0xFFFF888000222000, 0)
#: Bits of the flags, as :func:`kernel_with_pages` has them.
LRU, ACTIVE, UNEVICTABLE, SWAPBACKED = 1 << 4, 1 << 5, 1 << 20, 1 << 19
ZONE_NORMAL = 1 << 62
#: Bits that tell nothing here, in each byte of the flags that has others.
NOISE = (1 << 0, 1 << 6, 1 << 18, 1 << 23, 1 << 40, 1 << 61)
LARGE_KMALLOC = 0xF8FFFFFF


class Made(NamedTuple):
    """What was made of some pages: ``kind`` is ``user``, ``kmem``, ``slab``, or ``free``."""

    pfn: int
    order: int
    compound: bool
    kind: str
    flags: int
    page_type: int
    data: int
    refs: bool


def one(chance: random.Random, release: str, pfn: int, left: int) -> Made:
    """Choose what begins at a page frame."""
    types = TYPES[release]
    order = chance.choice([0, 0, 0, 0, 1, 1, 2, 3])
    order = order if 1 << order <= left and not pfn % (1 << order) else 0
    flags = chance.choice((0, NODE_1)) | chance.choice((0, ZONE_NORMAL))
    flags |= sum(bit for bit in NOISE if chance.random() < 0.3)
    kind = chance.choice(("user", "user", "kmem", "slab", "free"))
    page_type, data = NO_TYPE, 0
    if kind == "user":
        flags |= sum(b for b in (LRU, ACTIVE, UNEVICTABLE, SWAPBACKED) if chance.random() < 0.5)
        data, page_type = chance.choice(PAYERS), chance.choice((NO_TYPE, 0, 3))
    elif kind == "slab":
        page_type, data = types.slab, chance.choice((0, PAYERS[0] | 1, PAYERS[0] | 2))
        flags |= PG_SLAB if types.slab == NO_TYPE else 0
    elif kind == "kmem":
        data = chance.choice((PAYERS[0] | 2, PAYERS[1] | 2, 0))
        kinds = [NO_TYPE, types.table] + [LARGE_KMALLOC] * (release == "7.1")
        page_type = chance.choice(kinds)
    return Made(pfn, order, order > 0, kind, flags, page_type, data, chance.random() < 0.8)


def made(release: str, seed: int, pages: int) -> tuple[MadeImage, list[Made]]:
    chance, image, found = random.Random(seed), kernel_with_pages(TYPES[release]), []
    pfn = 0
    while pfn < pages:
        block = one(chance, release, pfn, pages - pfn)
        put_block(image, release, block)
        found.append(block)
        pfn += 1 << block.order
    return image, found


def put_block(image: MadeImage, release: str, block: Made) -> None:
    if block.compound:
        put_compound(image, TYPES[release], *(block.pfn, block.order, block.flags, block.page_type),
                     block.data)  # fmt: skip
    else:
        put(image, block.pfn, block.flags, block.page_type, block.data)
    refcount = image.type("struct page").member("_refcount").bit_offset // 8
    image.write(FRAMES.page(block.pfn) + refcount, bytes([0, 0, block.refs, 0]))


def nid(block: Made) -> int:
    return block.flags >> 63


def type_name(block: Made, release: str) -> str:
    if block.page_type == TYPES[release].table:
        return "table"
    return "large_kmalloc" if block.page_type == LARGE_KMALLOC else ""


def expected_kmem(blocks: list[Made], release: str) -> list[KmemPage]:
    return [
        KmemPage(
            FRAMES.page(b.pfn),
            nid(b),
            b.order,
            b.compound,
            type_name(b, release),
            b.data - 2,
            b.refs,
        )
        for b in blocks
        if b.kind != "slab" and b.data & 7 == 2
    ]


def expected_lru(blocks: list[Made]) -> Counter[LruPages]:
    """Return pages without flags in ``memcg_data`` that are charged, or on an LRU list."""
    folios: Counter[tuple[object, ...]] = Counter()
    for b in blocks:
        if b.kind == "slab" or b.data & 7 or not (b.data or b.flags & LRU):
            continue
        is_set = (bool(b.flags & bit) for bit in (LRU, ACTIVE, UNEVICTABLE, SWAPBACKED))
        folios[nid(b), b.data, b.flags >> 62 & 1, LruFlags(*is_set, 0), b.order] += 1
    return Counter(
        LruPages(*key[:4], number, number << key[4])  # type: ignore[arg-type, operator]
        for key, number in folios.items()
    )


def by_node(blocks: list[Made], page_type: int) -> Counter[int]:
    found: Counter[int] = Counter()
    for b in blocks:
        if b.kind != "slab" and b.page_type == page_type:
            found[nid(b)] += 1 << b.order
    return found


def whole(image: MadeImage, pages: int) -> PagePiece:
    [piece] = scan_range(image, PageRange(0, pages))
    return piece


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("release", ["6.2", "6.6", "6.10", "6.13", "7.1"])
def test_all_pages_of_a_memory_map(release: str, seed: int) -> None:
    pages = 256
    image, blocks = made(release, seed, pages)
    piece = whole(image, pages)
    assert (piece.pages, piece.unreadable) == (pages, None)
    assert piece.kmem == expected_kmem(blocks, release)
    assert Counter(piece.lru) == expected_lru(blocks)
    slabs = [b for b in blocks if b.kind == "slab"]
    assert list(piece.slabs) == [
        SlabPage(
            FRAMES.page(b.pfn), nid(b), b.order, image.memory.read(FRAMES.page(b.pfn), FRAMES.size)
        )
        for b in slabs
    ]
    assert piece.tables == by_node(blocks, TYPES[release].table)
    large = by_node(blocks, LARGE_KMALLOC) if release == "7.1" else Counter()
    assert piece.large_kmalloc == large
    assert piece.raw is not None
    assert piece.raw.orders == {b.pfn: b.order for b in blocks if b.compound}
    assert [piece.raw.nid(b.pfn) for b in blocks] == [nid(b) for b in blocks]
    tails = piece.raw.tails(page_layout(image).tail)
    first = {b.pfn for b in blocks}
    assert tails == sum(1 << 8 * pfn for pfn in range(pages) if pfn not in first)


@pytest.mark.parametrize("release", ["6.2", "7.1"])
def test_few_user_pages_among_many_others(release: str) -> None:
    """Below one in eight they are taken one by one; above, all are looked at."""
    for number in (1, 7, 8, 9, 40, 63):
        image = kernel_with_pages(TYPES[release])
        for pfn in range(64):
            is_user = pfn < number
            put(image, pfn, ZONE_NORMAL | LRU if is_user else 0, NO_TYPE, PAYERS[0] * is_user)
        flags = LruFlags(True, False, False, False, 0)
        assert whole(image, 64).lru == [LruPages(0, PAYERS[0], 1, flags, number, number)]


@pytest.mark.parametrize("release", ["6.2", "6.6", "7.1"])
def test_parts_of_a_memory_map_add_up(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compound pages end in another piece, and none is counted twice."""
    image, blocks = made(release, 99, 256)
    monkeypatch.setattr("memcg_inspect.image.memory.PIECE", 6 * FRAMES.size)
    for start, end in ((0, 256), (0, 130), (130, 256)):
        pieces = list(scan_range(image, PageRange(start, end)))
        assert len(pieces) == -(-(end - start) // 6)
        assert [kmem for piece in pieces for kmem in piece.kmem] == [
            kmem
            for kmem in expected_kmem(blocks, release)
            if FRAMES.page(start) <= kmem.page < FRAMES.page(end)
        ]
        assert sum(piece.pages for piece in pieces) == end - start
        assert [slab.page for piece in pieces for slab in piece.slabs] == [
            FRAMES.page(b.pfn) for b in blocks if b.kind == "slab" and start <= b.pfn < end
        ]


def test_pieces_have_an_even_number_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    image = kernel_with_pages(TYPES["7.1"])
    assert pages_per_piece(image) == (1 << 20) // FRAMES.size
    monkeypatch.setattr("memcg_inspect.linux.mm.mm_types.PIECE", 7 * FRAMES.size + 1)
    assert pages_per_piece(image) == 6


def test_a_piece_that_is_not_in_the_image() -> None:
    image = kernel_with_pages(TYPES["7.1"])
    put(image, 0, 0, NO_TYPE, PAYERS[0] | 2)
    there, gone = scan_range(image, PageRange(0, 128))
    assert (there.pages, there.unreadable, len(there.kmem)) == (64, None, 1)
    nothing = (0, FRAMES.page(64), [], [], Counter(), Counter(), None)
    assert (
        *(gone.pages, gone.unreadable, gone.kmem, gone.lru, gone.tables, gone.large_kmalloc),
        gone.raw,
    ) == nothing
    assert list(gone.slabs) == [] and len(gone.slabs) == 0


@pytest.mark.parametrize("covered", ["head", "beyond", "missing", "not a tail", "wrong order"])
def test_a_range_that_begins_in_a_compound_page(covered: str) -> None:
    """
    Tails of a hugetlb page with optimized vmemmap look like heads, up to 7.0.

    The second page of the range says where the compound page begins, and that one has its order.
    """
    types = TYPES["6.6"]
    image = kernel_with_pages(types)
    for pfn in range(64, 88):
        put(image, pfn, 0, NO_TYPE, 0)
    start = 64
    put_compound(image, types, start, 4, 0, NO_TYPE, 0)
    for pfn in range(72, 80, 2):
        put(image, pfn, 1 << 16, NO_TYPE, PAYERS[0] | 2)  # PG_head
        image.words(FRAMES.page(pfn + 1), 1)
    if covered == "beyond":
        put_compound(image, types, 80, 1, 0, NO_TYPE, PAYERS[1] | 2)
    if covered == "wrong order":
        image.write(FRAMES.page(start + 1), bytes([7]))  # 64 is no multiple of 128
    if covered == "missing":
        for pfn in range(73, 80, 2):
            image.words(FRAMES.page(pfn) + 8, 0xFFFFEA0100000001)
    if covered == "not a tail":
        image.words(FRAMES.page(73) + 8, FRAMES.page(start))
    [piece] = scan_range(image, PageRange(72, 88))
    assert piece.raw is not None
    if covered in ("head", "beyond"):
        assert piece.raw.orders == ({8: 1} if covered == "beyond" else {})
    else:
        assert set(piece.raw.orders) >= {2, 4, 6}
        assert (0 in piece.raw.orders) == (covered != "not a tail")
    why = "its second page is no tail"
    wrong = WrongOrder(FRAMES.page(72), 0, 1, why, "kmem")
    assert piece.wrong == ((wrong,) if covered == "not a tail" else ())


@pytest.mark.parametrize("release", ["6.2", "6.6", "7.1"])
@pytest.mark.parametrize(
    ("pfn", "order"), [(36, 3), (34, 2), (33, 1), (32, 6), (0, 31), (0, 64), (32, 255)]
)
def test_an_order_that_cannot_be_right(release: str, pfn: int, order: int) -> None:
    """A compound page begins at a multiple of its size. Those behind it are found all the same."""
    image, types = kernel_with_pages(TYPES[release]), TYPES[release]
    for other in range(64):
        put(image, other, 0, NO_TYPE, 0)
    put_compound(image, types, pfn, 1, NODE_1, NO_TYPE, PAYERS[0] | 2)
    image.write(FRAMES.page(pfn + 1) + types.order, bytes([order]))
    put_compound(image, types, 40, 2, 0, NO_TYPE, PAYERS[1] | 2)
    piece = whole(image, 64)
    assert piece.raw is not None and piece.raw.orders == {40: 2}
    assert [(kmem.page, kmem.order, kmem.compound) for kmem in piece.kmem] == [
        (FRAMES.page(pfn), 0, False),
        (FRAMES.page(40), 2, True),
    ]
    why = "no compound page of this size can begin here"
    assert piece.wrong == (WrongOrder(FRAMES.page(pfn), 1, order, why, "kmem"),)
    assert piece.wrong[0].reason == f"it is {order}, and {why}"


@pytest.mark.parametrize(
    ("pfn", "order", "can_be"),
    [(0, 30, True), (0, 31, False), (8, 3, True), (8, 4, False), (12, 2, True), (7, 0, True)],
)
def test_where_compound_pages_begin(pfn: int, order: int, can_be: bool) -> None:
    assert (why_not_block(pfn, order) is None) is can_be


def scanned(
    image: MadeImage, monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None
) -> tuple[list[PagePiece], list[tuple[str, float]]]:
    """Scan two ranges in pieces of 64 pages; stop when a piece begins, if it is given."""
    ranges, said = [PageRange(0, 100), PageRange(128, 228)], list[tuple[str, float]]()
    monkeypatch.setattr("memcg_inspect.image.memory.PIECE", 4096)
    monkeypatch.setattr("memcg_inspect.linux.mm.mm_types.PIECE", 4096)
    monkeypatch.setattr("memcg_inspect.linux.mm.mm_types.page_ranges", lambda _: ranges)

    def report(what: str, share: float) -> None:
        image.progress.stop = len(said) == stop_at
        said.append((what, share))

    image.progress.report = report
    return list(scan_pages(image)), said


def test_progress_of_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the share of the pages that were read. Missing pages count, too."""
    image = kernel_with_pages(TYPES["7.1"])
    for pfn in range(64):
        put(image, pfn, 0, NO_TYPE, 0)
    put(image, 192, 0, NO_TYPE, PAYERS[0] | 2)
    pieces, said = scanned(image, monkeypatch)
    assert said == [("pages", n / 200) for n in (0, 64, 100, 164)]
    assert [(piece.pages, piece.unreadable) for piece in pieces] == [
        *((64, None), (0, FRAMES.page(64)), (0, FRAMES.page(128)), (36, None)),
    ]
    assert [kmem.page for kmem in pieces[3].kmem] == [FRAMES.page(192)]


def test_a_walk_that_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The piece that would be next is not read, and is the last one."""
    image = kernel_with_pages(TYPES["7.1"])
    for pfn in range(128):
        put(image, pfn, 0, NO_TYPE, 0)
    pieces, said = scanned(image, monkeypatch, stop_at=1)
    assert [(piece.pages, piece.unreadable) for piece in pieces] == [
        (64, None),
        (0, FRAMES.page(64)),
    ]
    assert len(said) == 2
    monkeypatch.setattr("memcg_inspect.image.memory.PIECE", 2048)
    pieces, _ = scanned(image, monkeypatch, stop_at=0)
    assert [(piece.pages, piece.unreadable) for piece in pieces] == [(0, FRAMES.page(0))]


def test_kernels_that_do_not_charge_pages() -> None:
    image = MadeImage()
    image.declare("struct page { unsigned long flags; unsigned int page_type; };")
    with pytest.raises(ImageError, match="struct page has no memcg_data: this kernel does not"):
        page_layout(image)
    image = MadeImage()
    image.declare("struct page { unsigned long flags; unsigned long memcg_data; };")
    with pytest.raises(ImageError, match="struct page has no page_type: this kernel is too old"):
        page_layout(image)


# Columns


def test_columns_of_bits() -> None:
    data = bytes.fromhex("00000102 01000103 00000004 ff000005")
    columns = PageColumns(data, 4)
    assert (columns.count, columns.everything) == (4, 0x01010101)
    assert columns.byte(0) == bytes.fromhex("000100ff")
    assert columns.byte(3) == bytes.fromhex("02030405")
    assert columns.of(Marker(3, 6, 4)) == 0x01010000
    assert columns.of(Marker(1, 0xFF, 0)) == columns.everything
    assert columns.of(Marker(1, 1, 1)) == 0
    assert columns.all_of(()) == 0
    assert columns.all_of((Marker(3, 4, 4), Marker(0, 1, 1))) == 0x01000000
    assert columns.all_of((Marker(3, 4, 4), Marker(1, 1, 1), Marker(0, 1, 1))) == 0
    assert columns.not_zero(0, 2) == 0x01000100
    assert columns.not_zero(1, 1) == 0
    assert columns.not_zero(1, 2) == 0x00000101
    assert columns.not_zero(2, 1) == 0x00000101


def test_columns_of_flags() -> None:
    columns = PageColumns(bytes.fromhex("0001 0201 0302"), 2)
    low = bytes(byte >> 1 & 1 for byte in range(256))
    high = bytes((byte & 3) << 1 for byte in range(256))
    assert columns.flags(FlagColumn(((0, low),))) == bytes([0, 1, 1])
    assert columns.flags(FlagColumn(((0, low), (1, high)))) == bytes([2, 3, 5])
    assert columns.flags(FlagColumn(())) == bytes(3)


def test_flags_of_lru_lists_by_their_byte() -> None:
    """The generation is above the four flags."""
    assert len(LRU_FLAGS) == 256
    assert LRU_FLAGS[0] == LruFlags(False, False, False, False, 0)
    assert LRU_FLAGS[0b0000_0001] == LruFlags(True, False, False, False, 0)
    assert LRU_FLAGS[0b0101_0010] == LruFlags(False, True, False, False, 5)
    assert LRU_FLAGS[0b1111_0100] == LruFlags(False, False, True, False, 15)
    assert LRU_FLAGS[0b0001_1001] == LruFlags(True, False, False, True, 1)


def test_slabs_of_a_piece() -> None:
    columns = PageColumns(b"".join(bytes([n] * 4) for n in range(5)), 4)
    of_nodes = SlabPages(1000, columns, [1, 4], [9, 1, 9, 9, 0], {4: 2, 0: 7})
    assert len(of_nodes) == 2
    second = SlabPage(1016, 0, 2, b"\4\4\4\4")
    assert list(of_nodes) == [SlabPage(1004, 1, 0, b"\1\1\1\1"), second]
    assert of_nodes[1] == second
    assert of_nodes.raw() == b"\1\1\1\1\4\4\4\4"
    assert [slab.nid for slab in SlabPages(0, columns, [0, 2], 3, {})] == [3, 3]
