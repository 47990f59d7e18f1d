# SPDX-License-Identifier: LGPL-2.1-or-later
"""Tables of struct page_ext, one of each section, in a kernel made by hand."""

from __future__ import annotations

import pytest
from drgn import FaultError, Object
from support.layouts import MadeImage

from memcg_inspect.linux.mm import page_ext
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.page_ext import page_ext_tables
from memcg_inspect.model import Coverage

VARIABLES, SECTIONS, TABLES = 0xFFFFFFFF82000000, 0xFFFF888031000000, 0xFFFF888040000000
#: Pages of a section, and bytes of a struct page_ext.
SECTION, SIZE = 1 << 15, 24
#: Bytes from one table to the next.
STEP = 1 << 24


def kernel(monkeypatch: pytest.MonkeyPatch, *ranges: PageRange) -> MadeImage:
    """Return a kernel with four sections. The tables of the last one are a vmalloc area."""
    image = MadeImage()
    image.declare(
        "struct page_ext { long flags; }; struct mem_section { struct page_ext *page_ext; };"
    )
    for n, (name, value) in enumerate(
        {"page_ext_size": SIZE, "SECTION_SIZE_BITS": 27, "PAGE_SHIFT": 12}.items()
    ):
        image.variable(name, "unsigned long", VARIABLES + 8 * n)
        image.words(VARIABLES + 8 * n, value)
    for number in range(4):
        put(image, number, table(number))

    def section(prog: object, pfn: int) -> Object:
        return image.pointer("struct mem_section *", SECTIONS + 8 * (pfn // SECTION))

    monkeypatch.setattr(page_ext, "pfn_to_section", section)
    monkeypatch.setattr(page_ext, "pfn_to_section_nr", lambda prog, pfn: pfn // SECTION)
    monkeypatch.setattr(page_ext, "section_nr_to_pfn", lambda prog, number: number * SECTION)
    monkeypatch.setattr(page_ext, "page_ranges", lambda image: list(ranges))
    monkeypatch.setattr(page_ext, "in_direct_map", lambda prog, at: at < table(3))
    return image


def table(number: int) -> int:
    return TABLES + STEP * number


def put(image: MadeImage, number: int, address: int) -> None:
    """Let a section have its table at an address. The pointer is that of page frame 0."""
    biased = (address - number * SECTION * SIZE) % (1 << 64)
    image.words(SECTIONS + 8 * number, biased)


def tables(image: MadeImage) -> tuple[list[tuple[int, int]], Coverage]:
    coverage = Coverage()
    return list(page_ext_tables(image, coverage)), coverage


def whole(*numbers: int) -> list[tuple[int, int]]:
    return [(table(number), SECTION * SIZE) for number in numbers]


def test_each_section_has_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    image = kernel(monkeypatch, PageRange(0, 2 * SECTION), PageRange(2 * SECTION, 4 * SECTION))
    found, coverage = tables(image)
    assert found == whole(0, 1, 2)
    assert (coverage.read, coverage.unreadable) == (3, 0)


def test_parts_of_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may begin and end within one: its table is about all of it."""
    image = kernel(monkeypatch, PageRange(100, SECTION + 1))
    assert tables(image)[0] == whole(0, 1)
    assert tables(kernel(monkeypatch, PageRange(SECTION, 2 * SECTION)))[0] == whole(1)


def test_sections_without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """PAGE_EXT_INVALID marks that of a section that is offline."""
    image = kernel(monkeypatch, PageRange(0, 3 * SECTION))
    image.words(SECTIONS, 0)
    put(image, 1, table(1) | 1)
    found, coverage = tables(image)
    assert found == whole(2)
    assert (coverage.read, coverage.unreadable) == (1, 0)


def test_a_pointer_that_wraps_around(monkeypatch: pytest.MonkeyPatch) -> None:
    image = kernel(monkeypatch, PageRange(SECTION, 2 * SECTION))
    put(image, 1, 0x1000)
    assert tables(image)[0] == [(0x1000, SECTION * SIZE)]


def test_sections_that_are_not_in_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    image = kernel(monkeypatch, PageRange(0, 2 * SECTION))
    image.forget(SECTIONS)
    found, coverage = tables(image)
    assert (found, coverage.read, coverage.unreadable) == ([], 0, 1)
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("page_ext of a section", SECTIONS)
    assert missed.reason == f"not made: {SECTIONS:#x}"


def test_sections_behind_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is read."""
    image = kernel(monkeypatch, PageRange(0, 2 * SECTION), PageRange(2 * SECTION, 3 * SECTION))
    find = page_ext.pfn_to_section

    def section(prog: object, pfn: int) -> Object:
        if pfn // SECTION == 1:
            raise FaultError("missing", SECTIONS + 8)
        return find(prog, pfn)

    monkeypatch.setattr(page_ext, "pfn_to_section", section)
    found, coverage = tables(image)
    assert (found, coverage.read, coverage.unreadable) == (whole(0), 1, 1)


def test_a_size_that_cannot_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables would be larger than the memory that they are about."""
    image = kernel(monkeypatch, PageRange(0, SECTION))
    image.words(VARIABLES, 4096)
    assert tables(image)[0] == [(table(0), 4096 * SECTION)]
    image.words(VARIABLES, 4097)
    with pytest.raises(FaultError, match="page_ext_size is 4097 bytes") as raised:
        tables(image)
    assert raised.value.address == VARIABLES


def test_kernels_without_page_ext() -> None:
    image = MadeImage()
    assert tables(image)[0] == []
    image.declare("struct mem_section { unsigned long *page_ext; };")
    assert tables(image)[0] == []
