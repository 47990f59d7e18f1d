# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is told of one page, on memory maps made by hand."""

from __future__ import annotations

import pytest
from drgn import FaultError
from support.layouts import FRAMES, NODE_1, MadeImage
from support.made_pages import NO_TYPE, PG_SLAB, TYPES, kernel_with_pages, put, put_compound

from memcg_inspect.linux.mm import debug
from memcg_inspect.linux.mm.debug import (
    PageInfo,
    is_kmalloc_page,
    page_at,
    page_behind,
    read_page,
)
from memcg_inspect.linux.mm.mm_types_slabs import SlabPage
from memcg_inspect.linux.mm.mmzone import PageRange

RELEASES = ("6.2", "6.9", "6.10", "6.11", "6.13", "7.1")
OBJCG, MEMCG, MAPPING = 0xFFFF888000111000, 0xFFFF888000222000, 0xFFFF888000333001
#: Bits of the flags word.
SWAPBACKED, SWAPCACHE, RESERVED = 1 << 19, 1 << 10, 1 << 12
#: Offsets in ``struct page``.
MAPPING_AT, INDEX, PRIVATE, REFCOUNT = 24, 32, 40, 52
#: The memory that its ``struct page`` is in was not made.
MISSING = 0x10000


def kernel(release: str) -> MadeImage:
    """Return a kernel with 64 pages in use that nobody pays for."""
    image = kernel_with_pages(TYPES[release])
    image.declare("struct zone { unsigned long free_area[11]; };")
    image.enum(None, PG_swapcache=10, PG_reserved=12)
    for pfn in range(64):
        put(image, pfn, 0, NO_TYPE, 0)
    return image


def told(image: MadeImage, pfn: int) -> PageInfo:
    return read_page(image, FRAMES.page(pfn))


@pytest.mark.parametrize("release", RELEASES)
def test_a_page_that_belongs_to_nothing(release: str) -> None:
    page = FRAMES.page(5)
    assert told(kernel(release), 5) == PageInfo(
        *(page, 5, 0, page, 0, "", False, 1, False, 0, 0, 0, False, None)
    )


@pytest.mark.parametrize("release", RELEASES)
def test_a_page_of_a_folio(release: str) -> None:
    """The index is that of the first page, and the distance to it."""
    image, types = kernel(release), TYPES[release]
    flags = NODE_1 | SWAPBACKED | SWAPCACHE
    put_compound(image, types, 8, 2, flags, NO_TYPE, MEMCG)
    head = FRAMES.page(8)
    image.words(head + MAPPING_AT, MAPPING, 70)
    image.write(head + REFCOUNT, (6).to_bytes(4, "little"))
    for n in range(4):
        assert told(image, 8 + n) == PageInfo(
            *(FRAMES.page(8 + n), 8 + n, 1, head, 2, "", False, 6, False, MEMCG),
            *(MAPPING, 70 + n, True, None),
        )
    assert told(image, 12).head == FRAMES.page(12)


@pytest.mark.parametrize(
    ("flags", "is_cached"),
    [(SWAPBACKED, False), (SWAPCACHE, False), (SWAPBACKED | SWAPCACHE, True), (0, False)],
)
def test_the_swap_cache(flags: int, is_cached: bool) -> None:
    """``PG_swapcache`` has another meaning where ``PG_swapbacked`` is not set."""
    image = kernel("7.1")
    put(image, 5, flags, NO_TYPE, MEMCG)
    assert told(image, 5).swap_cache is is_cached


def test_pages_that_are_reserved_or_released_too_often() -> None:
    image = kernel("7.1")
    put(image, 5, RESERVED, NO_TYPE, 0)
    image.write(FRAMES.page(5) + REFCOUNT, b"\xfe\xff\xff\xff")
    assert (told(image, 5).reserved, told(image, 5).refs) == (True, -2)
    assert told(image, 6).reserved is False


@pytest.mark.parametrize("release", RELEASES)
def test_pages_of_the_kernel(release: str) -> None:
    """``memcg_data`` of a slab is no obj_cgroup."""
    image, types = kernel(release), TYPES[release]
    slab_flag = PG_SLAB if types.slab == NO_TYPE else 0
    put_compound(image, types, 8, 1, NODE_1 | slab_flag, types.slab, OBJCG | 2)
    put(image, 10, 0, types.table, OBJCG | 2)
    put(image, 11, 0, NO_TYPE, OBJCG | 1)
    for pfn in (8, 9):
        found = told(image, pfn)
        assert (found.type, found.is_kmem, found.payer) == ("slab", False, 0)
        raw = image.memory.read(FRAMES.page(8), FRAMES.size)
        assert found.slab == SlabPage(FRAMES.page(8), 1, 1, raw)
    for pfn, expected in ((10, ("table", True, OBJCG)), (11, ("", False, OBJCG))):
        found = told(image, pfn)
        assert (found.type, found.is_kmem, found.payer) == expected
        assert found.slab is None


@pytest.mark.parametrize("release", RELEASES)
def test_what_has_no_page_type(release: str) -> None:
    """Of a page that is mapped, the word is its mapcount. All ones end the types."""
    image = kernel(release)
    if TYPES[release].enumerators:
        more = {"PGTY_mapcount_underflow": 0xFF} if release in ("6.13", "7.1") else {}
        image.enum("pagetype", **TYPES[release].enumerators, **more)
    for value in (0, 3, 0x7FFFFFFF, NO_TYPE):
        put(image, 5, 0, value, 0)
        assert told(image, 5).type == "", hex(value)


@pytest.mark.parametrize(
    ("release", "value", "name"),
    [
        ("6.2", NO_TYPE & ~0x100, "offline"),
        ("6.9", NO_TYPE & ~0x400, "guard"),
        ("6.10", NO_TYPE & ~0x200, "table"),
        ("6.11", NO_TYPE & ~0x10000000, "table"),
        ("6.13", 0xF2000000, "table"),
        ("7.1", 0xF8123456, "large_kmalloc"),
    ],
)
def test_page_types(release: str, value: int, name: str) -> None:
    """A bit that is clear, or a byte; the rest may be anything since 6.12."""
    image = kernel(release)
    put(image, 5, 0, value, 0)
    assert told(image, 5).type == name


# Free blocks


def put_free(image: MadeImage, release: str, pfn: int, order: int) -> None:
    put(image, pfn, 0, TYPES[release].buddy, 0)
    image.words(FRAMES.page(pfn) + PRIVATE, order)


@pytest.mark.parametrize("release", RELEASES)
def test_pages_of_a_free_block(release: str) -> None:
    """Only the first one is marked. It is aligned, and knows the order."""
    image = kernel(release)
    put_free(image, release, 8, 2)
    put_free(image, release, 16, 0)
    found = {pfn: told(image, pfn) for pfn in range(7, 18)}
    free = {pfn: (FRAMES.pfn(i.head), i.order) for pfn, i in found.items() if i.type == "buddy"}
    assert free == {**dict.fromkeys(range(8, 12), (8, 2)), 16: (16, 0)}
    assert all(i.pfn == pfn and i.page == FRAMES.page(pfn) for pfn, i in found.items())
    assert found[13].head == FRAMES.page(13)


@pytest.mark.parametrize(("order", "is_free"), [(3, True), (2, False), (10, True), (11, False)])
def test_orders_of_free_blocks(order: int, is_free: bool) -> None:
    """They are 0 to ``MAX_PAGE_ORDER``. A page beyond the end of a block is not of it."""
    image = kernel("7.1")
    put_free(image, "7.1", 0, order)
    found = told(image, 5)
    assert (found.type, found.head) == (
        ("buddy", FRAMES.page(0)) if is_free else ("", FRAMES.page(5))
    )
    assert found.order == (order if is_free else 0)


def test_a_block_whose_first_page_is_not_in_the_image() -> None:
    """Blocks above it are not looked for."""
    image = kernel("7.1")
    put(image, 200, 0, NO_TYPE, 0)
    put_free(image, "7.1", 0, 10)
    found = told(image, 200)
    assert (found.type, found.head) == ("", FRAMES.page(200))


def test_a_page_that_is_not_in_the_image() -> None:
    image = kernel("7.1")
    with pytest.raises(FaultError):
        told(image, MISSING)
    assert is_kmalloc_page(image, FRAMES.page(MISSING)) is True
    # A tail whose head is missing.
    image.words(FRAMES.page(5) + 8, FRAMES.page(MISSING) + 1)
    with pytest.raises(FaultError):
        told(image, 5)
    assert is_kmalloc_page(image, FRAMES.page(5)) is True


# Which pages there are


@pytest.mark.parametrize("release", RELEASES)
def test_pages_that_can_hold_what_kmalloc_returned(release: str) -> None:
    """Slabs, and large kmallocs if they are marked; before, any compound page."""
    image, types = kernel(release), TYPES[release]
    slab_flag = PG_SLAB if types.slab == NO_TYPE else 0
    put_compound(image, types, 8, 1, slab_flag, types.slab, 0)
    put_compound(image, types, 10, 1, 0, NO_TYPE, 0)
    put_compound(image, types, 12, 1, 0, 0xF8FFFFFF if release == "7.1" else NO_TYPE, 0)
    expected = {8: True, 9: True, 10: release != "7.1", 11: release != "7.1"}
    for pfn, can in (expected | {12: True, 13: True, 14: False}).items():
        assert is_kmalloc_page(image, FRAMES.page(pfn)) is can, pfn


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> MadeImage:
    """A kernel with two ranges of page frames, and a direct map of 64 pages."""
    parts = [PageRange(0, 10), PageRange(20, 30)]
    monkeypatch.setattr(debug, "page_ranges", lambda _: parts)
    end = FRAMES.direct_map + 64 * 4096
    monkeypatch.setattr(debug, "in_direct_map", lambda _, at: FRAMES.direct_map <= at < end)
    return kernel("7.1")


VALID = [(0, True), (9, True), (10, False), (19, False), (20, True), (29, True), (30, False)]


@pytest.mark.parametrize(("pfn", "is_valid"), VALID)
def test_addresses_of_pages(ranges: MadeImage, pfn: int, is_valid: bool) -> None:
    page = FRAMES.page(pfn)
    expected = page if is_valid else None
    for byte in (0, 1, 63):
        assert page_at(ranges, page + byte) == expected
    for byte in (0, 1, 4095):
        assert page_behind(ranges, FRAMES.virt(page) + byte) == expected


def test_addresses_of_nothing(ranges: MadeImage) -> None:
    """What is before the memory map, and outside of the direct map."""
    assert page_at(ranges, FRAMES.base - 1) is None
    assert page_at(ranges, FRAMES.base - FRAMES.size) is None
    for address in (0, FRAMES.direct_map - 1, FRAMES.direct_map + 64 * 4096):
        assert page_behind(ranges, address) is None
