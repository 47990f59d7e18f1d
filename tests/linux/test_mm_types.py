# SPDX-License-Identifier: LGPL-2.1-or-later
"""Columns of ``struct page``: nodes, compound pages and marks, on memory maps made by hand."""

from __future__ import annotations

import pytest
from drgn import Architecture, Platform, PlatformFlags, Program

from memcg_inspect.image.memory import Memory
from memcg_inspect.linux.mm.mm_types import page_nids
from memcg_inspect.linux.mm.mm_types_columns import Marker, PageColumns, positions
from memcg_inspect.linux.mm.mm_types_orders import BlockKinds, compound_orders
from memcg_inspect.linux.mm.mmzone import MemMap

SIZE, FLAGS, ORDER, TAIL = 64, 8, 17, 24
MARK = Marker(TAIL, 1, 1)
LITTLE = PlatformFlags.IS_64_BIT | PlatformFlags.IS_LITTLE_ENDIAN


def memory(flags: PlatformFlags) -> Memory:
    return Memory(Program(Platform(Architecture.UNKNOWN, flags)))


def mem_map(width: int, word: int = 8) -> MemMap:
    """Return a memory map whose flags have the node in this many highest bits."""
    return MemMap(0xEA << 56, SIZE, 12, FLAGS, 8 * word - width, (1 << width) - 1, 0xFF << 56)


def pages(of: Memory, *flags: int) -> PageColumns:
    words = [word.to_bytes(of.word_size, of.order) for word in flags]
    return PageColumns(b"".join((bytes(FLAGS) + w).ljust(SIZE, b"\xa5") for w in words), SIZE)


@pytest.mark.parametrize("flags", [LITTLE, PlatformFlags.IS_64_BIT, PlatformFlags(0)])
@pytest.mark.parametrize("width", [1, 2, 6, 8, 10, 13])
def test_nodes_of_pages(flags: PlatformFlags, width: int) -> None:
    """Each bit of the node tells pages apart, and no bit below it does."""
    of = memory(flags)
    frames = mem_map(width, of.word_size)
    low = frames.node_shift
    for node in {0, 1, (1 << width) - 1}:
        word = node << low | 0x5A
        noise = [word ^ 1 << bit for bit in range(low)]
        assert page_nids(of, frames, pages(of, word, *noise)) == node
        assert page_nids(of, frames, pages(of, word)) == node
        for bit in range(width):
            other = node ^ 1 << bit
            for place in range(3):
                words = [word] * 3
                words[place] = other << low
                expected = [node] * 3
                expected[place] = other
                assert page_nids(of, frames, pages(of, *words)) == expected


def test_a_kernel_with_one_node_has_none_in_the_flags() -> None:
    of = memory(LITTLE)
    assert page_nids(of, mem_map(0), pages(of, 1 << 63, 0, 7)) == 0


def orders(*of_second_pages: int | None, covered: int = 0) -> list[tuple[int, int]]:
    """
    Return the compound pages of a piece.

    :param of_second_pages: for each page, the order that the next page stores if it is a head
    """
    data = bytearray(SIZE * len(of_second_pages))
    heads = 0
    for i, order in enumerate(of_second_pages):
        if order is not None:
            heads |= 1 << 8 * i
            if i + 1 < len(of_second_pages):
                data[(i + 1) * SIZE + ORDER] = order
                data[(i + 1) * SIZE + TAIL] = 1
    return list(compound_orders(PageColumns(bytes(data), SIZE), MARK, ORDER, heads, covered))


def test_orders_of_compound_pages() -> None:
    assert orders(1, None, None, 2, None, None, None, 1, None) == [(0, 1), (3, 2), (7, 1)]
    assert orders(None, None) == []


def test_heads_inside_of_compound_pages_are_fake() -> None:
    """Tails of a hugetlb page with optimized vmemmap look like heads (before 7.1)."""
    assert orders(2, 1, 1, 1, 1, None) == [(0, 2), (4, 1)]
    # One that began in an earlier piece.
    assert orders(1, 1, 1, None, covered=2) == [(2, 1)]
    assert orders(1, 1, 1, None, covered=3) == []


def test_the_order_of_a_head_at_the_end_is_in_the_next_piece() -> None:
    assert orders(None, 1) == []
    assert orders(1, None, 0) == [(0, 1)]


def test_a_head_whose_second_page_is_no_tail() -> None:
    """It is being split, and flags are where the order was."""
    data, told = bytearray(SIZE * 8), []
    data[SIZE + ORDER], data[5 * SIZE + ORDER], data[5 * SIZE + TAIL] = 2, 1, 1
    columns, heads = PageColumns(bytes(data), SIZE), 1 | 1 << 8 * 4
    found = compound_orders(columns, MARK, ORDER, heads, on_wrong=lambda *one: told.append(one))
    assert list(found) == [(4, 1)]
    assert told == [(0, 2, "its second page is no tail")]


@pytest.mark.parametrize(
    ("kind", "order", "why"),
    [
        ("slab", 2, None),
        ("slab", 1, "the page after it is a tail"),
        ("kmem", 0, "the page after it is a tail"),
        ("slab", 3, "its second half begins with no tail"),
        ("kmem", 3, "its second half begins with no tail"),
        ("lru", 1, "the page after it is a tail"),
        ("lru", 3, None),  # it may be being split
        (None, 1, None),  # it may be being freed
        ("slab", 4, "its second half begins with no tail"),
        ("slab", 5, None),  # the piece does not have half of it
    ],
)
def test_tails_tell_the_order(kind: str | None, order: int, why: str | None) -> None:
    """The compound page of order 2 is the first of 12 pages. The others are single pages."""
    kinds = BlockKinds(
        PageColumns(bytes(SIZE * 12), SIZE), kind == "slab", kind == "kmem", kind is not None
    )
    assert (kinds.of(0), kinds.of(1)) == (kind, None)
    assert kinds.why_not(0, order, bytes([0, 1, 1, 1]) + bytes(8)) == why


def test_positions_of_marks() -> None:
    assert list(positions(0, 4)) == []
    assert list(positions(1 | 1 << 16 | 1 << 24, 4)) == [0, 2, 3]


def test_marks_of_pages() -> None:
    data = b"".join(bytes([0, byte]).ljust(SIZE, b"\0") for byte in (0x31, 0x30, 0x21, 0xF1))
    marker = Marker(1, 0x11, 0x11)
    column = PageColumns(data, SIZE).of(marker)
    assert list(positions(column, 4)) == [0, 3]
    found = [marker.is_set(data[i * SIZE : (i + 1) * SIZE]) for i in range(4)]
    assert found == [True, False, False, True]


def test_addresses_of_pages() -> None:
    frames = mem_map(2)
    for pfn in (0, 1, 0x12345):
        page = frames.page(pfn)
        assert page == frames.base + pfn * SIZE
        assert frames.pfn(page) == pfn
        assert frames.virt(page) == frames.direct_map + pfn * 4096
        assert frames.virt_to_page(frames.virt(page) + 4095) == page
    assert frames.page_size == 4096
    assert frames.nid(3 << 62 | 5) == 3
