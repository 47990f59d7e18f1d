# SPDX-License-Identifier: LGPL-2.1-or-later
"""Free blocks and pages that zones count, on memory maps made by hand (mm/internal.h)."""

from __future__ import annotations

from collections import Counter

import pytest
from support.layouts import FRAMES, NODE_1, MadeImage
from support.made_pages import NO_TYPE, TYPES, kernel_with_pages, put, put_compound

from memcg_inspect.linux.mm.internal import ZonePageReader, page_type_markers, zone_uses
from memcg_inspect.linux.mm.mm_types import RawPiece, scan_range
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.model_pages import ZoneUse

MLOCKED, PRIVATE = 1 << 21, 40
#: The zone is one bit, below the node: include/linux/page-flags-layout.h.
ZONE_NORMAL = 1 << 62
BUDDY, ZSMALLOC, UNACCEPTED = 0xF0FFFFFF, 0xF6FFFFFF, 0xF7FFFFFF


def kernel(release: str = "7.1", **more: int) -> MadeImage:
    image = kernel_with_pages(TYPES[release])
    image.declare("struct zone { unsigned long free_area[11]; };")
    image.enum(None, **{"PG_mlocked": 21, **more})
    return image


def raw(image: MadeImage, first: int, last: int) -> RawPiece:
    [piece] = scan_range(image, PageRange(first, last))
    assert piece.raw is not None
    return piece.raw


def counted(
    image: MadeImage, first: int, last: int
) -> tuple[Counter[tuple[int, int, int]], Counter[tuple[ZoneUse, int, int]]]:
    free, pages = Counter[tuple[int, int, int]](), Counter[tuple[ZoneUse, int, int]]()
    ZonePageReader(image).add(raw(image, first, last), free, pages)
    return free, pages


def put_free(image: MadeImage, pfn: int, order: int, flags: int = 0) -> None:
    put(image, pfn, flags, BUDDY, 0)
    image.words(FRAMES.page(pfn) + PRIVATE, order)
    for other in range(pfn + 1, pfn + (1 << min(order, 3))):
        put(image, other, flags, NO_TYPE, 0)


def test_free_blocks_by_node_zone_and_order() -> None:
    """What is no order is counted by itself: one more than the largest."""
    image = kernel()
    put_free(image, 0, 3)
    put_free(image, 8, 0, NODE_1 | ZONE_NORMAL)
    put_free(image, 9, 0, NODE_1)
    put_free(image, 10, 0, NODE_1)
    for pfn, order in ((16, 10), (24, 11), (32, 12), (40, (1 << 64) - 1)):
        put_free(image, pfn, order, ZONE_NORMAL)
    free, pages = counted(image, 0, 48)
    assert free == Counter({(0, 0, 3): 1, (1, 1, 0): 1, (1, 0, 0): 2, (0, 1, 10): 1, (0, 1, 11): 3})
    assert pages == Counter()
    assert ZonePageReader(image).most_order == 10
    # All pages of a piece may be of one node.
    assert counted(image, 8, 10)[0] == Counter({(1, 1, 0): 1, (1, 0, 0): 1})
    assert counted(image, 0, 8)[0] == Counter({(0, 0, 3): 1})


def test_orders_of_free_blocks() -> None:
    image = kernel()
    reader = ZonePageReader(image)
    put_free(image, 0, 1)
    put_free(image, 2, 7, NODE_1)
    put(image, 3, 0, NO_TYPE, 0)
    piece = raw(image, 0, 4)
    assert reader.free_orders(piece, piece.columns.everything) == (1 | 1 << 16, [1, 7])
    assert reader.free_orders(piece, 1 << 16) == (1 << 16, [7])
    assert reader.free_orders(piece, 0) == (0, [])


@pytest.mark.parametrize(
    ("release", "guard", "more"),
    [
        ("6.9", 0xFFFFFFFF & ~0x400, {}),  # PG_guard, a macro
        ("7.1", 0xF3FFFFFF, {"PGTY_guard": 0xF3, "PGTY_unaccepted": 0xF7}),
    ],
)
def test_blocks_whose_first_page_alone_has_a_type(
    release: str, guard: int, more: dict[str, int]
) -> None:
    """Guard pages say their order. Pages that are not accepted have a type since 6.12."""
    image = kernel(release, **more)
    for pfn in range(2048):
        put(image, pfn, 0, NO_TYPE, 0)
    for pfn, order in ((0, 3), (8, 0), (16, 1 << 63)):
        put(image, pfn, 0, guard, 0)
        image.words(FRAMES.page(pfn) + PRIVATE, order)
    put(image, 1024, 0, UNACCEPTED if more else NO_TYPE, 0)
    reader, piece = ZonePageReader(image), raw(image, 0, 2048)
    unaccepted = {1024: 10} if more else {}
    found = reader.marked_orders(piece, piece.columns.everything)
    assert found == {0: 3, 8: 0, 16: 11, **unaccepted}
    assert reader.marked_orders(piece, 1) == {0: 3}
    firsts = {pfn: reader.first_page(pfn) for pfn in (0, 1, 7, 8, 9, 15, 31, 1023, 1025, 2047)}
    # Number 16 says an order that cannot be: it is taken for the largest that its place allows.
    behind = {1025: 1024, 2047: 1024} if more else {1025: 1025, 2047: 2047}
    assert firsts == {0: 0, 1: 0, 7: 0, 8: 8, 9: 9, 15: 15, 31: 16, 1023: 1023, **behind}


def test_pages_in_use_by_node_and_zone() -> None:
    types = TYPES["7.1"]
    image = kernel(PGTY_zsmalloc=0xF6, PGTY_unaccepted=0xF7)
    put(image, 0, NODE_1, ZSMALLOC, 0)
    put(image, 1, NODE_1 | ZONE_NORMAL, ZSMALLOC, 0)
    put(image, 2, NODE_1, ZSMALLOC, 0)
    put(image, 3, ZONE_NORMAL | MLOCKED, NO_TYPE, 0)
    put_compound(image, types, 4, 2, ZONE_NORMAL | MLOCKED, NO_TYPE, 0)
    put_compound(image, types, 8, 1, NODE_1 | MLOCKED, NO_TYPE, 0)
    put(image, 10, ZONE_NORMAL, UNACCEPTED, 0)  # the first page of a block of the largest order
    put(image, 11, 0, NO_TYPE, 0)
    put_free(image, 12, 0, MLOCKED)  # the flag was left behind
    put_compound(image, types, 14, 1, MLOCKED, NO_TYPE, 0)
    image.words(FRAMES.page(15), MLOCKED | 1)  # a flag of a tail has another meaning
    put(image, 13, 0, NO_TYPE, 0)
    free, pages = counted(image, 0, 16)
    assert free == Counter({(0, 0, 0): 1})
    assert pages == Counter(
        {
            ("zsmalloc", 1, 0): 2,
            ("zsmalloc", 1, 1): 1,
            ("mlocked", 0, 1): 5,
            ("mlocked", 1, 0): 2,
            ("mlocked", 0, 0): 2,
            ("unaccepted", 0, 1): 1024,
        }
    )


@pytest.mark.parametrize(
    ("release", "more", "uses"),
    [
        ("6.9", {}, {"mlocked"}),
        ("6.10", {}, {"mlocked"}),
        ("6.11", {"PG_zsmalloc": 0x08000000}, {"mlocked", "zsmalloc"}),
        ("6.13", {"PGTY_zsmalloc": 0xF6, "PGTY_unaccepted": 0xF7}, None),
        ("7.1", {"PGTY_zsmalloc": 0xF6}, {"mlocked", "zsmalloc"}),
    ],
)
def test_uses_that_a_kernel_marks(
    release: str, more: dict[str, int], uses: set[ZoneUse] | None
) -> None:
    every: set[ZoneUse] = {"mlocked", "zsmalloc", "unaccepted"}
    assert zone_uses(kernel(release, **more)) == (every if uses is None else uses)


def test_kernels_without_mlock() -> None:
    """CONFIG_MMU=n"""
    image = kernel_with_pages(TYPES["7.1"])
    image.declare("struct zone { unsigned long free_area[11]; };")
    assert zone_uses(image) == frozenset()


@pytest.mark.parametrize(
    ("release", "more", "name", "types"),
    [
        ("6.9", {}, "offline", [0xFFFFFFFF & ~0x100]),
        ("6.9", {}, "guard", [0xFFFFFFFF & ~0x400]),
        ("6.9", {}, "table", [0xFFFFFFFF & ~0x200]),
        ("6.9", {}, "buddy", [0xFFFFFFFF & ~0x80]),
        ("6.9", {}, "zsmalloc", []),
        ("6.10", {}, "table", [0xFFFFFFFF & ~0x200]),
        ("6.11", {}, "buddy", [0xFFFFFFFF & ~0x40000000]),
        ("6.13", {}, "guard", []),  # this kernel has enumerators, and none for these
        ("6.13", {"PG_guard": 12}, "guard", []),
        ("6.13", {"PGTY_guard": 0xF3}, "guard", [0xF3FFFFFF]),
        ("7.1", {}, "buddy", [0xF0FFFFFF]),
    ],
)
def test_marks_of_page_types(
    release: str, more: dict[str, int], name: str, types: list[int]
) -> None:
    """include/linux/page-flags.h; of all types of all releases, only these are marked."""
    image = kernel(release, **more)
    markers = page_type_markers(image, name)
    others = [0xFFFFFFFF & ~(1 << bit) for bit in range(32)] + [
        top << 24 | 0xFFFFFF for top in range(0xF0, 0x100)
    ]
    place = image.type("struct page").member("page_type").bit_offset // 8
    marked = [
        value
        for value in (*others, 0, 5)
        if markers
        and all(m.is_set(bytes(place) + value.to_bytes(4, "little") + bytes(8)) for m in markers)
    ]
    assert marked == types
