# SPDX-License-Identifier: LGPL-2.1-or-later
"""Where blocks of pages end that are not compound, in memory maps made by hand."""

from __future__ import annotations

import pytest
from drgn import offsetof
from support.layouts import FRAMES, MadeImage
from support.made_pages import NO_TYPE, TYPES, kernel_with_pages, put, put_compound

from memcg_inspect.linux.mm import page_alloc
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.page_alloc import BlockReader

#: The map has 256 pages, and the largest block 2^7.
PAGES, MOST = 256, 7
FIRST = 128
#: A list head in a zone, a node, and memory that is not in the image.
HEAD, PGDAT, MISSING = 0xFFFF888030000000, 0xFFFF888030001000, 0xFFFF888077700000
#: LIST_POISON1 and LIST_POISON2
POISON = 0xDEAD000000000100, 0xDEAD000000000122
LRU = 8


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> MadeImage:
    """All pages but the first of the block have neither a refcount nor a type."""
    image = kernel_with_pages(TYPES["7.1"])
    image.declare(
        """
        struct list_head { struct list_head *next; struct list_head *prev; };
        struct llist_node { struct llist_node *next; };
        struct llist_head { struct llist_node *first; };
        struct free_area { long nr_free; };
        struct zone { struct free_area free_area[8]; struct llist_head trylock_free_pages; };
        struct pglist_data { struct zone node_zones[2]; };
        """
    )
    for pfn in range(PAGES):
        bare(image, pfn)
    image.make("struct pglist_data", PGDAT, {})
    put(image, FIRST, 0, NO_TYPE, 0)
    pgdat = image.pointer("struct pglist_data *", PGDAT)
    monkeypatch.setattr(page_alloc, "page_ranges", lambda image: [PageRange(0, PAGES)])
    monkeypatch.setattr(page_alloc, "online_pgdats", lambda image: [pgdat])
    # Memory that this machine has is at MISSING, and elsewhere there is none.
    end = FRAMES.page(PAGES)
    monkeypatch.setattr(
        page_alloc, "page_at", lambda image, at: at if FRAMES.base <= at < end else None
    )
    monkeypatch.setattr(
        page_alloc, "page_behind", lambda image, at: at if at >> 12 == MISSING >> 12 else None
    )
    return image


def bare(image: MadeImage, pfn: int, next: int = POISON[0], prev: int = POISON[1]) -> int:
    """Write a page without a refcount and a type; return the address of its links."""
    image.make("struct page", FRAMES.page(pfn), {"page_type": NO_TYPE})
    link = FRAMES.page(pfn) + LRU
    image.words(link, next, prev)
    return link


def order(image: MadeImage, pfn: int = FIRST) -> int:
    return BlockReader(image).order(FRAMES.page(pfn))


def test_a_block_ends_where_another_begins(image: MadeImage) -> None:
    assert order(image) == MOST
    for after in range(MOST):
        bare(image, FIRST + (1 << after + 1))
        put(image, FIRST + (1 << after), 0, NO_TYPE, 0)
        assert order(image) == after
        bare(image, FIRST + (1 << after))


def test_blocks_are_aligned_to_their_size(image: MadeImage) -> None:
    """What looks like more of the block is then the rest of others."""
    assert [order(image, pfn) for pfn in (1, 2, 4, 12, 64, 192)] == [0, 1, 2, 2, 6, 6]


def test_a_page_in_use_begins_a_block(image: MadeImage) -> None:
    """One with a refcount, a type or a payer; a compound page; and what is not in the image."""
    page = FRAMES.page(FIRST + 4)
    refcount = offsetof(image.type("struct page"), "_refcount")
    for byte in range(4):
        image.write(page + refcount + byte, b"\1")
        assert order(image) == 2
        bare(image, FIRST + 4)
        image.write(page + offsetof(image.type("struct page"), "page_type") + byte, b"\xf5")
        assert order(image) == 2
        bare(image, FIRST + 4)
    image.words(page + offsetof(image.type("struct page"), "memcg_data"), MISSING | 2)
    assert order(image) == 2
    put_compound(image, TYPES["7.1"], FIRST + 4, 2, 0, NO_TYPE, 0)
    for pfn in range(FIRST + 4, FIRST + 8):  # a compound page that is being freed
        image.write(FRAMES.page(pfn) + refcount, bytes(4))
    assert order(image) == 2
    for pfn in range(FIRST + 4, FIRST + 8):
        bare(image, pfn)
    image.words(FRAMES.page(FIRST + 16) + LRU, FRAMES.page(FIRST) + 1)  # a tail page
    assert order(image) == 4
    image.forget(FRAMES.page(FIRST + 64))
    bare(image, FIRST + 16)
    assert order(image) == 6


def test_a_page_that_is_known_to_begin_a_block(image: MadeImage) -> None:
    known = FRAMES.page(FIRST + 8)
    assert BlockReader(image, lambda page: page == known).order(FRAMES.page(FIRST)) == 3
    assert BlockReader(image, lambda page: False).order(FRAMES.page(FIRST)) == MOST


def test_a_page_on_a_list_of_free_pages(image: MadeImage) -> None:
    """Its neighbours point back, and the list has a head, which is in no struct page."""
    link = bare(image, FIRST + 2, HEAD, HEAD)
    image.words(HEAD, link, link)
    assert order(image) == 1
    other = bare(image, 7, HEAD, link)
    image.words(link, other, HEAD)
    image.words(HEAD, link, other)
    assert order(image) == 1
    image.words(HEAD, other)
    assert order(image) == MOST  # the head leads elsewhere: it was on the list once
    image.words(HEAD, link)
    image.words(other + 8, HEAD)
    assert order(image) == MOST  # so does the next one
    # Right behind the memory map
    image.words(other + 8, link)
    end = FRAMES.page(PAGES)
    image.words(end, link, other)
    image.words(link + 8, end)
    image.words(other, end)
    assert order(image) == 1
    # Right before it
    begin = FRAMES.page(0) - 16
    image.words(begin, link, other)
    image.words(link + 8, begin)
    image.words(other, begin)
    assert order(image) == 1


def test_pages_that_point_to_each_other_are_on_no_list(image: MadeImage) -> None:
    """Old contents may do that. All of them are in struct pages: there is no head."""
    link, other = bare(image, FIRST + 2), FRAMES.page(9) + LRU
    image.words(link, other, other)
    bare(image, 9, link, link)
    assert order(image) == MOST
    image.words(link, link, link)
    assert order(image) == MOST
    first = FRAMES.page(0)
    image.words(first, link, link)
    image.words(link, first, first)
    assert order(image) == MOST


def test_a_list_that_is_broken_may_be_one(image: MadeImage) -> None:
    """Nobody can tell whether a page is on it that is not in the image."""
    missed: list[tuple[int, str]] = []
    reader = BlockReader(image, None, lambda page, why: missed.append((page, why)))
    link, other = bare(image, FIRST + 2), FRAMES.page(9) + LRU
    image.words(link, MISSING, MISSING)
    assert reader.order(FRAMES.page(FIRST)) == 1
    assert [page for page, _ in missed] == [FRAMES.page(FIRST + 2)]
    assert order(image) == 1
    # One of its pages leads back into it, and it has no end.
    bare(image, 9, bare(image, 10, other, other), link)
    image.words(link, other, HEAD)
    image.words(HEAD, link)
    assert order(image) == 1
    assert len(missed) == 1
    image.forget(FRAMES.page(9))
    assert reader.order(FRAMES.page(FIRST)) == 1
    assert len(missed) == 2
    # No memory of this machine has the address: it is none of a list.
    image.words(link, 0x10000, HEAD)
    assert reader.order(FRAMES.page(FIRST)) == MOST
    assert len(missed) == 2


def test_pages_that_free_pages_nolock_put_aside(image: MadeImage) -> None:
    """They are on a list of their zone, which has no way back (6.15)."""
    missed: list[tuple[int, str]] = []

    def miss(page: int, why: str) -> None:
        missed.append((page, why))

    links = [FRAMES.page(pfn) + LRU for pfn in (FIRST + 32, FIRST + 16)]
    zones = offsetof(image.type("struct zone"), "trylock_free_pages")
    image.words(PGDAT + 72 + zones, links[0])  # of the second zone
    image.words(links[0], links[1])
    image.words(links[1], 0)
    assert BlockReader(image, None, miss).order(FRAMES.page(FIRST)) == 4
    bare(image, FIRST + 16)
    image.words(links[0], 0)
    assert BlockReader(image, None, miss).order(FRAMES.page(FIRST)) == 5
    assert missed == []
    image.words(links[0], links[0])
    assert BlockReader(image, None, miss).order(FRAMES.page(FIRST)) == 5
    assert [page for page, _ in missed] == [links[0]]
    assert "the list does not end" in missed[0][1]
    image.words(links[0], MISSING)
    assert BlockReader(image, None, miss).order(FRAMES.page(FIRST)) == 5
    assert missed[1][0] == MISSING


def test_the_longest_lists(image: MadeImage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with three pages. What is on a longer one may be free."""
    monkeypatch.setattr(page_alloc, "_MOST_LINKS", 3)
    missed: list[tuple[int, str]] = []
    links = [FRAMES.page(pfn) + LRU for pfn in (FIRST + 32, 3, 5, 7)]
    zones = offsetof(image.type("struct zone"), "trylock_free_pages")
    image.words(PGDAT + zones, links[0])
    for at, after in zip(links, (*links[1:3], 0), strict=False):
        image.words(at, after)
    reader = BlockReader(image, None, lambda page, why: missed.append((page, why)))
    assert (reader.order(FRAMES.page(FIRST)), missed) == (5, [])
    image.words(links[2], links[3])
    reader = BlockReader(image, None, lambda page, why: missed.append((page, why)))
    assert reader.order(FRAMES.page(FIRST)) == 5
    assert missed == [(links[3], f"the list does not end: {links[3]:#x}")]


def test_lists_without_a_head(image: MadeImage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of struct pages is none. One that is too long to be followed may have a head."""
    pages = [bare(image, pfn) for pfn in (FIRST + 2, 9, 11, 13)]
    for before, at, after in zip(pages[-1:] + pages, pages, pages[1:] + pages[:1], strict=False):
        image.words(at, after, before)
    monkeypatch.setattr(page_alloc, "_MOST_LINKS", 4)
    assert order(image) == MOST
    monkeypatch.setattr(page_alloc, "_MOST_LINKS", 3)
    assert order(image) == 1


def test_why_a_list_is_missed(image: MadeImage) -> None:
    missed: list[tuple[int, str]] = []
    reader = BlockReader(image, None, lambda page, why: missed.append((page, why)))
    image.words(bare(image, FIRST + 2), MISSING, MISSING)
    assert reader.order(FRAMES.page(FIRST)) == 1
    [(page, why)] = missed
    assert page == FRAMES.page(FIRST + 2)
    assert why.startswith(f"not made: {MISSING:#x}")
    bare(image, FIRST + 2)
    # The list of the first zone cannot be read. That of the second one is.
    zones = offsetof(image.type("struct zone"), "trylock_free_pages")
    image.words(PGDAT + zones, MISSING)
    image.words(PGDAT + 72 + zones, FRAMES.page(FIRST + 8) + LRU)
    image.words(FRAMES.page(FIRST + 8) + LRU, 0)
    reader = BlockReader(image, None, lambda page, why: missed.append((page, why)))
    assert reader.order(FRAMES.page(FIRST)) == 3
    assert missed[1:] == [(MISSING, f"not made: {MISSING:#x}")]
    assert BlockReader(image).order(FRAMES.page(FIRST)) == 3
