# SPDX-License-Identifier: LGPL-2.1-or-later
"""How many pages of a folio count as mapped, in memory maps made by hand."""

from __future__ import annotations

import pytest
from drgn import FaultError, offsetof
from support.layouts import FRAMES, MadeImage
from support.made_pages import NO_TYPE, TYPES, kernel_with_pages, put, put_compound

from memcg_inspect.linux.mm.mm_types import RawPiece, scan_range
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.rmap import MapcountReader, Mapped

HEAD, ORDER = 8, 2
#: ``struct folio`` of 6.8 and 6.15, and one whose mapcount is in the third page (32 bits).
FOLIOS = {
    "6.8": "int _entire_mapcount;",
    "6.15": "int _large_mapcount; int _entire_mapcount;",
    "6.15, third page": "unsigned long rest[6]; int _large_mapcount; int _entire_mapcount;",
}


def kernel(release: str) -> MadeImage:
    """Return a kernel with a folio of four pages. Nothing is mapped."""
    image = kernel_with_pages(TYPES["7.1"])
    image.declare(
        f"struct folio {{ struct page page; unsigned long _flags_1; unsigned long _head_1;"
        f" {FOLIOS[release]} }};"
    )
    for pfn in range(128):
        put(image, pfn, 0, NO_TYPE, 0)
    put_folio(image, HEAD, ORDER)
    return image


def put_folio(image: MadeImage, pfn: int, order: int) -> None:
    put_compound(image, TYPES["7.1"], pfn, order, 0, NO_TYPE, 0)
    for member in ("_entire_mapcount", "_large_mapcount"):
        if image.type("struct folio").has_member(member):
            set_folio(image, pfn, member, -1)


def set_folio(image: MadeImage, pfn: int, member: str, value: int) -> None:
    at = FRAMES.page(pfn) + offsetof(image.type("struct folio"), member)
    image.write(at, value.to_bytes(4, "little", signed=True))


def map_page(image: MadeImage, pfn: int, mapcount: int = 0) -> None:
    at = FRAMES.page(pfn) + offsetof(image.type("struct page"), "_mapcount")
    image.write(at, mapcount.to_bytes(4, "little"))


def mapped(image: MadeImage, pfn: int = HEAD, order: int = ORDER, end: int = 128) -> Mapped:
    reader, raw = MapcountReader(image), piece(image, end)
    column = reader.mapped(raw.columns).to_bytes(end, "little")
    return reader.folio(raw, pfn, order, column)


def piece(image: MadeImage, end: int) -> RawPiece:
    [found] = scan_range(image, PageRange(0, end))
    assert found.raw is not None
    return found.raw


def test_pages_with_a_mapcount() -> None:
    """All page types are below 0 there, and a mapcount is one less than the number of entries."""
    image = kernel("6.8")
    map_page(image, 1)
    map_page(image, 2, 70_000)
    map_page(image, 3, 0xF5FFFFFF)
    map_page(image, 4, 0x7FFFFFFF)
    raw = piece(image, 64)
    column = MapcountReader(image).mapped(raw.columns).to_bytes(64, "little")
    assert [i for i, byte in enumerate(column) if byte] == [1, 2, 4]


@pytest.mark.parametrize("release", FOLIOS)
def test_a_folio_that_is_mapped_as_a_whole(release: str) -> None:
    image = kernel(release)
    assert mapped(image) == Mapped(0, False)
    map_page(image, HEAD + 1)
    map_page(image, HEAD + 3, 5)
    map_page(image, HEAD + 4)  # behind it
    assert mapped(image) == Mapped(2, False)
    set_folio(image, HEAD, "_entire_mapcount", 0)
    assert mapped(image) == Mapped(4, True)
    set_folio(image, HEAD, "_entire_mapcount", 300)
    assert mapped(image) == Mapped(4, True)


def test_kernels_whose_pages_have_no_mapcount() -> None:
    """CONFIG_NO_PAGE_MAPCOUNT: a folio that has a mapping, and no page of which has one."""
    image = kernel("6.15")
    set_folio(image, HEAD, "_large_mapcount", 0)
    assert mapped(image) == Mapped(4, False)
    map_page(image, HEAD + 2)  # another kernel
    assert mapped(image) == Mapped(1, False)


def test_a_mapcount_in_a_page_that_the_folio_does_not_have() -> None:
    """What is in page[2] on 32 bits is of another folio, if this one has two pages."""
    image = kernel("6.15, third page")
    put_folio(image, 16, 2)
    put_folio(image, 16, 1)
    for member in ("_entire_mapcount", "_large_mapcount"):
        set_folio(image, 16, member, 0)
    assert mapped(image, 16, 1) == Mapped(0, False)
    assert mapped(image, 16, 2).entire


def test_a_folio_that_ends_in_another_piece() -> None:
    image = kernel("6.15, third page")
    for pfn in (HEAD, HEAD + 2, HEAD + 3, HEAD + 4):
        map_page(image, pfn)
    for end in (HEAD + 1, HEAD + 2, HEAD + 3, HEAD + 4):
        assert mapped(image, end=end) == Mapped(3, False)
    set_folio(image, HEAD, "_entire_mapcount", 0)
    assert mapped(image, end=HEAD + 2) == Mapped(4, True)


def test_a_folio_whose_rest_is_not_in_the_image() -> None:
    image = kernel("6.8")
    put_folio(image, 62, 2)
    map_page(image, 62)
    image.forget(FRAMES.page(64))
    with pytest.raises(FaultError, match="rest of a folio") as raised:
        mapped(image, 62, 2, end=64)
    assert raised.value.address == FRAMES.page(64)
    set_folio(image, 62, "_entire_mapcount", 0)
    assert mapped(image, 62, 2, end=64) == Mapped(4, True)


def test_up_to_6_1_the_mapcount_is_in_the_second_page() -> None:
    """compound_mapcount is a member of struct page."""
    image = kernel_with_pages(TYPES["6.2"])
    image.declare(
        """
        struct page {
            unsigned long flags;
            union {
                struct { unsigned long lru[2]; void *mapping; unsigned long index;
                         unsigned long private; };
                struct { unsigned long compound_head; unsigned char compound_dtor;
                         unsigned char compound_order; int compound_mapcount; };
            };
            union { int _mapcount; unsigned int page_type; };
            int _refcount;
            unsigned long memcg_data;
        };
        struct folio { struct page page; };
        """
    )
    for pfn in range(128):
        put(image, pfn, 0, NO_TYPE, 0)
    put_compound(image, TYPES["6.2"], HEAD, ORDER, 0, NO_TYPE, 0)
    at = FRAMES.page(HEAD + 1) + offsetof(image.type("struct page"), "compound_mapcount")
    image.write(at, b"\xff" * 4)
    map_page(image, HEAD)
    assert mapped(image) == Mapped(1, False)
    image.write(at, bytes(4))
    assert mapped(image) == Mapped(4, True)


def test_each_bit_of_a_mapcount_that_is_in_the_next_piece() -> None:
    """The sign is in the highest byte. -1 is no mapcount, and 0 is one entry."""
    image = kernel("6.15, third page")
    for value, pages in ((-1, 0), (0, 4), (1 << 30, 4), (-(1 << 31), 0)):
        set_folio(image, HEAD, "_entire_mapcount", value)
        for end in (HEAD + 1, HEAD + 2, HEAD + 4, 128):
            assert mapped(image, end=end) == Mapped(pages, bool(pages))


def test_why_the_rest_of_a_folio_is_missing() -> None:
    image = kernel("6.8")
    put_folio(image, 62, 2)
    image.forget(FRAMES.page(64))
    with pytest.raises(FaultError) as raised:
        mapped(image, 62, 2, end=64)
    page = FRAMES.page(64)
    assert str(raised.value) == f"rest of a folio: not made: {page:#x}: {page:#x}"


def test_folios_beside_pages_that_are_mapped() -> None:
    """Those before the folio and behind it are no part of it, also at the end of a piece."""
    image = kernel("6.8")
    for pfn in (HEAD - 1, HEAD + 4):
        map_page(image, pfn)
    for end in (HEAD + 2, HEAD + 4, HEAD + 5):
        assert mapped(image, end=end) == Mapped(0, False)
    map_page(image, HEAD + 3)
    for end in (HEAD + 2, HEAD + 3, HEAD + 4, HEAD + 5):
        assert mapped(image, end=end) == Mapped(1, False)
