# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page frames that owners claim, among page frames whose ``struct page`` is written here.

Each page frame counts once, whatever part of a block is claimed.
"""

from __future__ import annotations

import pytest
from support.page_board import KMEM, NID, ONE, PAGES, TWO, ZONE, Board, Claimed

from memcg_inspect.collect import inventory_range
from memcg_inspect.collect.page_owners import Share
from memcg_inspect.image import memory
from memcg_inspect.model_pages import NEVER, NOBODY, UNUSED, Place

pytestmark = pytest.mark.image


def test_pages_that_are_claimed(board: Board) -> None:
    """The payer of each page is its own; those of a compound page have that of its first page."""
    for i in range(4):
        board.put(i, data=(ONE if i < 3 else TWO) | KMEM)
    board.put(4, nid=2, zone=3)
    board.compound(8, 2, data=ONE | KMEM)
    board.compound(12, 2, data=TWO | KMEM)
    board.put(16, "PG_reserved")
    board.put(17, type="table", data=ONE | KMEM)
    board.put(18)
    board.put(20)
    owners = Claimed(
        [
            board.claim(0, 5, "vmalloc", "a_caller"),
            board.claim(8, 9, "vmalloc", "another"),
            board.claim(12, 16, "stack"),
            board.claim(16, 18, "kernel_pagetables"),
            board.claim(18, 19, "percpu", None, Share(3000, ((ONE, 1000),))),
            board.claim(20, 21, "percpu", None, Share(0, ())),
        ]
    )
    found = board.read(owners)
    assert board.of(found) == {
        ("vmalloc", None, ONE): 7 * 4096,
        ("vmalloc", None, TWO): 4096,
        ("vmalloc", None, NOBODY): 4096,
        ("stack", None, TWO): 4 * 4096,
        ("kernel_pagetables", None, NEVER): 2 * 4096,
        ("percpu", None, ONE): 1000,
        ("percpu", None, NOBODY): 2000,
        ("percpu", None, UNUSED): 4096 - 3000 + 4096,
    }
    assert {place: pages for place, pages in found.pages.items() if place.caller} == {
        Place(NID, ZONE, "vmalloc", caller="a_caller"): 4,
        Place(2, 3, "vmalloc", caller="a_caller"): 1,
        Place(NID, ZONE, "vmalloc", caller="another"): 4,
    }
    assert (found.unmarked, found.conflicts) == ({}, [])
    assert found.pages.total() == PAGES


def test_pages_of_two_zones_that_are_claimed(board: Board) -> None:
    """Shares and kinds that nobody pays for are counted by node and zone, too."""
    board.put(0)
    board.put(1, nid=2, zone=3)
    board.put(2)
    board.put(3, nid=2, zone=3)
    half = Share(2048, ((ONE, 2048),))
    owners = Claimed([board.claim(0, 2, "percpu", None, half), board.claim(2, 4, "memmap")])
    found = board.read(owners)
    wanted = {
        (Place(nid, zone, kind), payer): size
        for nid, zone in ((NID, ZONE), (2, 3))
        for kind, payer, size in (
            ("percpu", ONE, 2048),
            ("percpu", UNUSED, 2048),
            ("memmap", NEVER, 4096),
        )
    }
    wanted[Place(NID, ZONE, "offline"), NEVER] = (PAGES - 4) * 4096
    assert +found.bytes == wanted | {(Place(NID, ZONE, "offline"), NEVER): (PAGES - 4) * 4096}
    assert {place: pages for place, pages in found.pages.items() if place.kind == "percpu"} == {
        Place(NID, ZONE, "percpu"): 1,
        Place(2, 3, "percpu"): 1,
    }


def test_claims_that_no_mark_agrees_with(board: Board) -> None:
    """The mark stays, and the claim is told of. Where there is no memory, it is not."""
    board.free(0, 1)
    board.put(2)
    board.put(3, "PG_reserved")
    board.put(4, type="table")
    board.put(6, "PG_reserved")
    board.put(7, type="table")
    board.put(8)
    owners = Claimed(
        [
            board.claim(0, 4, "vmalloc"),
            board.claim(4, 5, "memmap"),
            board.claim(6, 9, "page_ext"),
        ]
    )
    found = board.read(owners)
    assert found.conflicts == [
        (board.start, "free", "vmalloc"),
        (board.start + 1, "free", "vmalloc"),
        (board.start + 3, "reserved", "vmalloc"),
        (board.start + 4, "pagetables", "memmap"),
        (board.start + 7, "pagetables", "page_ext"),
    ]
    assert board.of(found) == {
        ("free", 1, UNUSED): 2 * 4096,
        ("vmalloc", None, NOBODY): 4096,
        ("reserved", None, NEVER): 4096,
        ("pagetables", None, NOBODY): 2 * 4096,
        ("page_ext", None, NEVER): 2 * 4096,
    }
    assert found.pages.total() == PAGES


@pytest.mark.parametrize(
    ("kind", "mark", "flag"),
    [
        ("pagetables", "", "PG_reserved"),
        ("kernel_pagetables", "", "PG_reserved"),
        ("kernel_pagetables", "table", ""),
        ("kfence", "", "PG_reserved"),
        ("kfence", "slab", ""),
        ("page_ext", "", "PG_reserved"),
        ("memmap", "", "PG_reserved"),
        ("percpu_first", "", "PG_reserved"),
    ],
)
def test_owners_that_tell_more_than_the_mark(board: Board, kind: str, mark: str, flag: str) -> None:
    board.put(0, *filter(None, [flag]), type=mark)
    found = board.read(Claimed([board.claim(0, 1, kind)]))
    payer = NOBODY if kind == "pagetables" else NEVER
    assert board.of(found) == {(kind, None, payer): 4096}
    assert found.conflicts == []


def test_compound_pages_that_are_claimed_count_once(board: Board) -> None:
    """Any of its pages may be claimed, or all, or more than are in the range."""
    board.compound(0, 2, type="slab")
    board.compound(4, 2, data=ONE | KMEM)
    board.compound(8, 2, data=ONE | KMEM)
    owners = Claimed(
        [
            board.claim(0, 4, "kfence"),
            board.claim(4, 8, "vmalloc"),
            board.claim(8, 9, "vmalloc"),
        ]
    )
    found = board.read(owners)
    assert board.of(found) == {("kfence", None, NEVER): 4 * 4096, ("vmalloc", None, ONE): 8 * 4096}
    assert found.unmarked == {}
    assert found.pages.total() == PAGES


@pytest.mark.parametrize("pages", [2, 4, 8, PAGES])
def test_who_has_the_first_page_of_a_block_has_all_of_it(
    board: Board, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """
    Page tables of processes are claimed by their first pages, and joined if they are neighbours.

    With page table isolation, the table at the top has two pages. Since 6.16 they are compound.
    """
    board.put(15, type="table", data=ONE | KMEM)
    board.compound(16, 1, type="table", data=TWO | KMEM)
    board.compound(18, 1, type="table", data=ONE | KMEM)
    board.compound(32, 4, data=ONE | KMEM, nid=2, zone=3)
    board.compound(48, 3, data=TWO | KMEM)
    claims = [
        (15, 17, "pagetables"),
        (18, 19, "pagetables"),
        (32, 33, "vmalloc"),
        (48, 49, "memmap"),
    ]
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    found = board.read(Claimed([board.claim(*claim) for claim in claims]))
    assert board.of(found) == {
        ("pagetables", None, ONE): 3 * 4096,
        ("pagetables", None, TWO): 2 * 4096,
        ("vmalloc", None, ONE): 16 * 4096,
        ("memmap", None, NEVER): 8 * 4096,
    }
    assert found.pages[Place(2, 3, "vmalloc")] == 16
    assert found.pages.total() == PAGES
    assert (found.conflicts, found.unmarked) == ([], {})


@pytest.mark.parametrize("pages", [2, 4, 8, PAGES])
def test_pages_of_a_block_whose_first_page_is_not_claimed(
    board: Board, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """They are of the block, and count once. The claim is told of, unless it says the same."""
    board.compound(16, 4, data=ONE | KMEM)
    board.compound(32, 3, type="table", data=ONE | KMEM)
    board.compound(40, 3, data=TWO | KMEM)
    claims = [
        *((18, 20, "vmalloc"), (31, 33, "pagetables"), (35, 36, "pagetables")),
        *((40, 41, "vmalloc"), (46, 47, "vmalloc"), (47, 48, "stack")),
    ]
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    found = board.read(Claimed([board.claim(*claim) for claim in claims]))
    conflicts = [(pfn - board.start, kind) for pfn, _, kind in found.conflicts]
    assert conflicts == [(18, "vmalloc"), (19, "vmalloc"), (31, "pagetables"), (47, "stack")]
    assert board.of(found) == {
        ("pagetables", None, ONE): 8 * 4096,
        ("vmalloc", None, TWO): 8 * 4096,
    }
    assert board.unmarked(found) == {("kmem", 4, ONE): [16]}
    assert found.pages.total() == PAGES - 16


def test_each_block_of_a_claim_has_its_own_payer(board: Board) -> None:
    for i in range(3):
        board.put(i, data=ONE | KMEM)
    board.put(3)
    board.compound(4, 2, data=TWO | KMEM)
    board.compound(8, 2)
    board.put(12, data=TWO | KMEM)
    found = board.read(Claimed([board.claim(0, 13, "vmalloc")]))
    assert board.of(found) == {
        ("vmalloc", None, ONE): 3 * 4096,
        ("vmalloc", None, TWO): 5 * 4096,
        ("vmalloc", None, NOBODY): 5 * 4096,
    }


def test_a_claim_of_many_pages_may_begin_with_a_compound_page(board: Board) -> None:
    """Then it is of all its pages, and whoever pays for the compound page pays for its tails."""
    board.compound(0, 1, data=ONE | KMEM)
    board.compound(2, 1)
    board.compound(4, 1, data=TWO | KMEM)
    found = board.read(Claimed([board.claim(0, 4, "memmap"), board.claim(4, 6, "stack")]))
    assert board.of(found) == {
        ("memmap", None, NEVER): 4 * 4096,
        ("stack", None, TWO): 2 * 4096,
    }
    assert found.unmarked == {}


@pytest.mark.parametrize("pages", [2, PAGES])
def test_the_first_page_of_a_stack_that_is_a_block_tells_who_pays(
    board: Board, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """``__memcg_kmem_charge_page()`` marks the first page only. It may be in the piece before."""
    board.put(0, data=ONE | KMEM)
    board.bare(1, 2, 3)
    board.put(4)
    board.bare(5, 6, 7)
    for i, payer in ((8, ONE), (9, TWO)):  # a stack of vmalloc(): each page has its own payer
        board.put(i, data=payer | KMEM)
    claims = [board.stack(0, 4), board.stack(4, 8), board.claim(8, 10, "stack")]
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    found = board.read(Claimed(claims))
    assert board.of(found) == {
        ("stack", None, ONE): 5 * 4096,
        ("stack", None, TWO): 4096,
        ("stack", None, NOBODY): 4 * 4096,
    }
    assert (found.bare, found.heads) == ({}, {})


def test_the_first_page_of_a_stack_may_be_missing(board: Board) -> None:
    """Then it is not known who pays for the pages that are there."""
    board.bare(*range(62, 68))
    board.missing = {0}
    found = board.read(Claimed([board.stack(62, 66)]))
    assert board.of(found) == {("stack", None, NOBODY): 2 * 4096}
    assert [(one.what, one.address) for one in found.coverage["owners"].examples] == [
        ("payer of a block", board.address(62))
    ]


@pytest.mark.parametrize("pages", [2, PAGES])
def test_a_page_with_an_error_may_stay_with_its_owner(
    board: Board, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """``memory_failure()`` leaves pages of the kernel where they are (``MF_IGNORED``)."""
    poison = "PG_hwpoison"
    board.put(0, data=ONE | KMEM)
    board.put(1, poison, data=ONE | KMEM)
    board.put(2, poison, "PG_reserved")
    board.put(3, poison)
    board.compound(4, 2, poison, data=TWO | KMEM)
    claims = [(0, 2, "vmalloc"), (2, 3, "memmap"), (3, 4, "percpu"), (5, 7, "vmalloc")]
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    found = board.read(Claimed([board.claim(*claim) for claim in claims]))
    assert found.conflicts == []
    assert board.of(found) == {
        ("vmalloc", None, ONE): 4096,
        ("hwpoison", None, NEVER): 3 * 4096,
        ("hwpoison", 2, NEVER): 4 * 4096,
    }
    assert found.pages.total() == PAGES


@pytest.mark.parametrize("pages", [2, 4, PAGES])
def test_only_pages_that_are_claimed_are_conflicts(
    board: Board, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """A huge page has many more."""
    board.compound(0, 3, type="large_kmalloc", data=ONE | KMEM)
    claims = [(0, 1, "vmalloc"), (1, 2, "vmalloc", "another"), (5, 6, "vmalloc")]
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    found = board.read(Claimed([board.claim(*claim) for claim in claims]))
    assert found.conflicts == [(board.start + i, "large_kmalloc", "vmalloc") for i in (0, 1, 5)]
    assert board.of(found) == {("large_kmalloc", 3, ONE): 8 * 4096}


@pytest.mark.parametrize("pages", [2, PAGES])
def test_a_claim_of_the_same_kind_as_its_block_is_no_conflict(
    board: Board, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """It does not matter whether the first page is claimed, or in which piece it is."""
    board.compound(0, 2, type="table", data=ONE | KMEM)
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    found = board.read(Claimed([board.claim(1, 3, "pagetables"), board.claim(3, 4, "vmalloc")]))
    assert found.conflicts == [(board.start + 3, "pagetables", "vmalloc")]
    assert board.of(found) == {("pagetables", 2, ONE): 4 * 4096}


@pytest.mark.parametrize("pages", [2, PAGES])
def test_what_is_no_memory_is_no_conflict(
    board: Board, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """Neither a page of its own, nor one that follows the first page of a block."""
    start = board.start
    ranges = [(start, start + 4), (start + 9, start + PAGES)]
    monkeypatch.setattr(inventory_range, "system_ram", lambda *_: ranges)
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    board.compound(0, 3, data=ONE | KMEM)
    found = board.read(Claimed([board.claim(5, 6, "vmalloc"), board.claim(8, 9, "stack")]))
    assert (found.conflicts, found.holes) == ([], {(NID, ZONE): 5})
