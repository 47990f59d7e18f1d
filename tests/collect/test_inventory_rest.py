# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page frames that no range knows the kind of: free pages that CPUs keep, the rest of blocks that are
not compound, and blocks that only their owners know. The ranges are written here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError, offsetof
from support.page_board import NID, ONE, TWO, ZONE, Board, Claimed

from memcg_inspect.collect import inventory
from memcg_inspect.collect.inventory import read_inventory, whole_blocks
from memcg_inspect.collect.inventory_part import BarePage, Head, InventoryPart
from memcg_inspect.image.image import Image
from memcg_inspect.image.memory import Memory
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.show_mem import FreeList
from memcg_inspect.model import Coverage
from memcg_inspect.model_pages import (
    NEVER,
    NOBODY,
    UNKNOWN_PAYER,
    UNUSED,
    Inventory,
    Place,
)

pytestmark = pytest.mark.image

#: Memcgs that pay for what was charged to obj_cgroups.
PAYERS = {ONE: 0x10}


class Given:
    """
    What ranges, lists of free pages, and owners say.

    :ivar part: the ranges, as one
    :ivar free: lists of free pages
    :ivar owners: kinds of pages that only their owners know, by page frame
    """

    def __init__(self, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
        self.board, self.start = board, board.start
        self.part = InventoryPart(PageRange(board.start, board.start + 64), 4096)
        self.free: list[FreeList] = []
        self.head = self.link(60)
        self.owners: dict[int, str] = {}
        self.claimed = Claimed()
        self.claimed.conflicts = []
        self.coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
        self.given = monkeypatch
        for name, given in (
            ("Owners", lambda *_: self.claimed),
            ("RangeInventory", lambda *_: None),
            ("walk_ranges", lambda *_, **__: iter([self.part])),
            ("page_parts", lambda _: []),
            ("free_lists", lambda *_: iter(self.free)),
            ("UnmarkedOwners", lambda *_: self),
        ):
            monkeypatch.setattr(inventory, name, given)

    def find(self) -> dict[int, str]:
        return {self.start + i: kind for i, kind in self.owners.items()}

    def link(self, i: int) -> int:
        """Return the address of ``page->lru`` of a page frame."""
        return self.board.address(i) + offsetof(self.board.page, "lru")

    def free_list(self, order: int, first: int, nid: int = NID, zone: int = ZONE) -> None:
        """Add a list of a CPU: it ends at its head."""
        self.free.append(FreeList(nid, zone, order, self.head, self.link(first), self.head))

    def put_aside(self, first: int, nid: int = NID, zone: int = ZONE) -> None:
        """Add a list of pages that each say their order. It ends with NULL."""
        self.free.append(FreeList(nid, zone, None, self.head, self.link(first), 0))

    def bare(self, *pages: int, link: int = 0) -> None:
        for i in pages:
            self.part.bare[self.start + i] = BarePage(NID, ZONE, link)

    def unmarked(self, kind: str, order: int, owner: int, *pages: int) -> None:
        for i in pages:
            self.part.keep_unmarked(Place(NID, ZONE, kind, order), owner, self.start + i)

    def read(self) -> Inventory:
        return read_inventory(self.board.image, frozenset(), PAYERS.get, self.coverage)

    def found(self) -> dict[tuple[str, int | None, int], int]:
        """Return pages by kind, order and payer."""
        return {
            (place.kind, place.order, payer): size // 4096
            for (place, payer), size in self.read().bytes.items()
            if size
        }

    def not_free(self) -> str:
        return f"the list at {self.head:#x} leads to what is not a free page"

    def missed(self, subject: str) -> list[tuple[str, int, str]]:
        examples = self.coverage[subject].examples
        # drgn writes the address of a fault behind its words.
        return [(m.what, m.address, m.reason.partition(": 0x")[0]) for m in examples]


@pytest.fixture
def given(of_module: Board, monkeypatch: pytest.MonkeyPatch) -> Iterator[Given]:
    of_module.clear()
    yield Given(of_module, monkeypatch)


def test_free_pages_that_cpus_keep(given: Given) -> None:
    """A list has blocks of one order, or each says its own. It ends at its head, or with NULL."""
    given.bare(0, 1, link=given.link(4))
    given.bare(4, 5, link=given.head)
    given.free_list(1, 0)
    given.bare(8, link=0)
    given.bare(12, 13, 14, 15, link=given.link(8))
    given.board.bare(12, private=2)
    given.board.bare(8, private=0)
    given.put_aside(12, 2, 3)
    given.bare(20)
    found = given.read()
    assert found.pages == {
        Place(NID, ZONE, "free_pcp", 1): 4,
        Place(2, 3, "free_pcp", 2): 4,
        Place(2, 3, "free_pcp", 0): 1,
        Place(NID, ZONE, "unknown", 0): 1,
    }
    assert {payer for _, payer in found.bytes} == {UNUSED, NEVER}
    assert given.coverage["free_lists"].read == 2
    assert given.coverage["free_lists"].unreadable == 0


@pytest.mark.parametrize("order", [1, 33, 1 << 40])
def test_a_list_of_free_pages_that_is_broken(given: Given, order: int) -> None:
    """It leads to a page in use, or a block has no order that can be right."""
    given.bare(0, link=given.link(4))
    given.bare(4)
    given.board.bare(4, private=order)
    given.board.bare(0)
    given.put_aside(0)
    assert given.found() == {("free_pcp", 0, UNUSED): 1, ("unknown", 0, NEVER): 1}
    assert given.missed("free_lists") == [("free pages", given.link(4), given.not_free())]
    assert given.coverage["free_lists"].read == 0


def test_a_list_of_free_pages_in_a_cycle(given: Given) -> None:
    """The second time, its page has been counted."""
    given.bare(0, link=given.link(0))
    given.free_list(0, 0)
    given.bare(8, link=given.head)
    given.free_list(0, 8)
    assert given.found() == {("free_pcp", 0, UNUSED): 2}
    assert given.coverage["free_lists"].unreadable == given.coverage["free_lists"].read == 1


#: Where a damaged link leads: bytes from the link of a page on the list. ``None`` is NULL.
WRONG = (None, 1, 8)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_link_that_is_wrong(given: Given, wrong: int | None) -> None:
    """NULL does not end a list that has a head. A ``struct page`` has one link."""
    to = 0 if wrong is None else given.link(4) + wrong
    given.bare(0, link=to)
    given.bare(4, link=given.head)
    given.free_list(0, 0)
    assert given.found() == {("free_pcp", 0, UNUSED): 1, ("unknown", 0, NEVER): 1}
    assert given.missed("free_lists") == [("free pages", to, given.not_free())]


@pytest.fixture
def moving(given: Given, monkeypatch: pytest.MonkeyPatch) -> Given:
    """The kernel runs: the board says what is there now, and the ranges what was there before."""
    monkeypatch.setattr(Image, "is_moving", True)
    return given


def test_a_page_that_was_freed_to_a_list_meanwhile(moving: Given) -> None:
    """It has been counted as what it was. Links are those of now."""
    moving.board.bare(0, link=moving.link(8))
    moving.board.bare(8, link=moving.link(4))
    moving.board.bare(4, link=moving.head)
    moving.bare(0, link=moving.link(4))
    moving.bare(4, link=moving.link(20))
    moving.bare(20)
    moving.free_list(0, 0)
    assert moving.found() == {("free_pcp", 0, UNUSED): 2, ("unknown", 0, NEVER): 1}
    assert (moving.coverage["free_lists"].read, moving.missed("free_lists")) == (1, [])


def test_a_page_that_is_taken_from_a_list_meanwhile(moving: Given) -> None:
    """The list is read again from its head. The page that was taken was free."""
    moving.board.put(0, type="table")
    moving.board.put(60, link=moving.link(4))
    moving.board.bare(4, link=moving.link(8))
    moving.board.bare(8, link=moving.head)
    moving.bare(0, 4, 8)
    moving.free_list(0, 0)
    assert moving.found() == {("free_pcp", 0, UNUSED): 3}
    assert (moving.coverage["free_lists"].read, moving.missed("free_lists")) == (1, [])


class Heads:
    """Memory in which a list leads elsewhere each time that its head is read."""

    def __init__(self, memory: Memory, head: int, firsts: list[int]) -> None:
        self.memory, self.head, self.firsts = memory, head, firsts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def word(self, address: int) -> int:
        return self.firsts.pop(0) if address == self.head else self.memory.word(address)


@pytest.mark.parametrize("tries", [15, 16])
def test_a_list_that_changes_quickly(
    moving: Given, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    """It is read 16 times. What is reported is where it led the last time."""
    for i in range(tries):
        moving.board.put(i, type="table")
    moving.board.bare(20, link=moving.head)
    moving.bare(20)
    firsts = [moving.link(i) for i in (*range(1, tries), 20)]
    memory = Heads(moving.board.image.memory, moving.head, firsts)
    monkeypatch.setattr(moving.board.image, "memory", memory)
    moving.free_list(0, 0)
    was_found = tries < 16
    kind, owner = ("free_pcp", UNUSED) if was_found else ("unknown", NEVER)
    assert moving.found() == {(kind, 0, owner): 1}
    why = f"the list at {moving.head:#x} led to what is not a free page 16 times"
    missed = [] if was_found else [("free pages", moving.link(15), why)]
    assert moving.missed("free_lists") == missed
    assert moving.coverage["free_lists"].read == was_found


@pytest.mark.parametrize("to", [0, 4, 12, None, *WRONG])
def test_a_list_that_leads_to_what_is_not_free_each_time(moving: Given, to: int | None) -> None:
    """To itself, to a page in use, to a link that is wrong: what was found counts."""
    wrong = 0 if to is None else moving.link(8) + to if to in WRONG else moving.link(to)
    moving.board.put(60, link=moving.link(0))
    moving.board.bare(0, link=wrong)
    moving.board.put(4, type="table", link=moving.link(8))
    moving.board.put(12, refs=1, link=moving.link(8))
    moving.board.bare(8, link=moving.head)
    moving.bare(0, 8)
    moving.free_list(0, 0)
    assert moving.found() == {("free_pcp", 0, UNUSED): 1, ("unknown", 0, NEVER): 1}
    why = f"the list at {moving.head:#x} led to what is not a free page 16 times"
    assert moving.missed("free_lists") == [("free pages", wrong, why)]
    assert moving.coverage["free_lists"].read == 0


@pytest.mark.parametrize("is_freed", [True, False])
def test_pages_put_aside_that_are_freed_meanwhile(moving: Given, is_freed: bool) -> None:
    """Their list is empty then. If it is not, it is damaged."""
    moving.board.put(60, link=0 if is_freed else moving.link(8))
    moving.board.bare(8, link=moving.link(4))
    moving.board.put(4, type="buddy")
    moving.bare(4, 8)
    moving.put_aside(8)
    assert moving.found() == {("free_pcp", 0, UNUSED): 2}
    assert moving.coverage["free_lists"].read == is_freed
    assert len(moving.missed("free_lists")) == 1 - is_freed


def test_a_list_whose_reading_is_interrupted(moving: Given) -> None:
    moving.bare(0)
    moving.board.bare(0, link=moving.head)
    moving.free_list(0, 0)
    moving.board.image.progress.stop = True
    try:
        assert moving.found() == {("unknown", 0, NEVER): 1}
    finally:
        moving.board.image.progress.stop = False
    assert (moving.coverage["free_lists"].read, moving.missed("free_lists")) == (0, [])


@pytest.mark.parametrize(
    ("first", "bare", "size"),
    [
        (0, (1,), 2),
        (0, (1, 2, 3), 4),
        (8, (9, 10, 11, 12, 13, 14, 15), 8),
        # It is aligned to its size.
        (2, (3, 4, 5), 2),
        (4, (5, 6, 7, 8), 4),
        (1, (2, 3), 1),
        (1, (2,), 1),
        # What is before its first page is no part of it.
        (2, (1, 3), 2),
        # A page in between is in use: then the size is not known.
        (0, (1, 2), 1),
        (0, (2,), 1),
        (0, (1, 2, 4), 1),
    ],
)
def test_a_block_that_is_not_compound(
    given: Given, first: int, bare: tuple[int, ...], size: int
) -> None:
    """The other pages are of the kind of its first one, and who pays for that pays for them."""
    given.bare(*bare)
    place = Place(NID, ZONE, "pagetables")
    given.part.count(place, 1, ONE)
    given.part.heads[given.start + first] = Head(place, ONE)
    rest = len(bare) - (size - 1)
    wanted = {("pagetables", None, 0x10): size}
    assert given.found() == wanted | ({("unknown", 0, NEVER): rest} if rest else {})


def test_blocks_are_taken_in_the_order_of_their_pages(given: Given) -> None:
    """The rest of the first one is not there any more for the next."""
    place = Place(NID, ZONE, "trace")
    given.bare(1, 2, 3, 5, 6, 7)
    for first in (4, 0):
        given.part.count(place, 1, NEVER)
        given.part.heads[given.start + first] = Head(place, NEVER)
    assert given.found() == {("trace", None, NEVER): 8}


def test_blocks_that_only_their_owners_know(given: Given) -> None:
    """Any of its pages tells the kind of a block, also one that its head has just given it."""
    given.unmarked("unknown", 0, NEVER, 0, 1, 4)
    given.unmarked("unknown", 2, NEVER, 8, 16)
    given.bare(5, 6, 7)
    given.part.heads[given.start + 4] = Head(Place(NID, ZONE, "unknown", 0), NEVER)
    given.owners = {0: "trace", 11: "perf", 12: "perf", 7: "hash_table"}
    assert given.found() == {
        ("trace", 0, NEVER): 1,
        ("unknown", 0, NEVER): 1,
        ("hash_table", 2, NEVER): 4,
        ("perf", 2, NEVER): 4,
        ("unknown", 2, NEVER): 4,
    }


def test_who_pays_for_blocks_that_only_their_owners_know(given: Given) -> None:
    """Nobody pays for what a memcg could have paid for, and for other kinds nobody ever does."""
    given.unmarked("kmem", 0, ONE, 0, 1, 2)
    given.unmarked("kmem", 0, TWO, 3)
    given.unmarked("kmem", 0, NOBODY, 4)
    given.unmarked("unknown", 0, NEVER, 5, 6)
    given.owners = {0: "pipe", 1: "trace", 5: "pipe", 6: "trace"}
    assert given.found() == {
        ("pipe", 0, 0x10): 1,
        ("kmem", 0, 0x10): 2,  # a charged page is no buffer of ftrace
        ("kmem", 0, UNKNOWN_PAYER): 1,
        ("kmem", 0, NOBODY): 1,
        ("pipe", 0, NOBODY): 1,
        ("trace", 0, NEVER): 1,
    }


def test_blocks_of_an_order_that_cannot_be_right(given: Given) -> None:
    """A damaged ``struct page`` can say any order. No owner has such a block."""
    given.unmarked("unknown", 10, NEVER, 0)
    given.unmarked("unknown", 11, NEVER, 1024)
    given.owners = {3: "trace", 1025: "trace"}
    assert given.found() == {("trace", 10, NEVER): 1024, ("unknown", 11, NEVER): 2048}


def test_conflicts_are_told(given: Given) -> None:
    """Ten of them are enough."""
    given.claimed.conflicts = [(given.start, "slab", "stack")]
    given.part.conflicts = [(given.start + n, "free", "vmalloc") for n in range(1, 20)]
    given.claimed.claims = [given.board.claim(0, 1, "stack"), given.board.claim(1, 9, "vmalloc")]
    assert len(given.read().conflicts) == 20
    owners = given.coverage["owners"]
    assert (owners.read, owners.unreadable) == (2, 10)
    what, address, reason = given.missed("owners")[0]
    assert (what, address) == ("page", given.board.address(0))
    assert reason == "marked or claimed as slab, and claimed as stack"


@pytest.fixture
def asked_again(moving: Given, monkeypatch: pytest.MonkeyPatch) -> Iterator[Claimed]:
    """The owners when they are read for the second time."""
    again = Claimed()
    again.conflicts = []
    readings = iter([moving.claimed, again])
    monkeypatch.setattr(inventory, "Owners", lambda *_: next(readings))
    # Ranges are read for the second time with these owners.
    monkeypatch.setattr(inventory, "page_parts", lambda _: [moving.part.part])
    part = InventoryPart(moving.part.part, 4096)
    monkeypatch.setattr(inventory, "RangeInventory", lambda _, o, *__: o is again and again.ranges)
    again.ranges = lambda _: part
    again.part = part
    yield again
    assert next(readings, None) is None, "the owners were not read twice"


def test_conflicts_of_owners_that_last(moving: Given, asked_again: Claimed) -> None:
    """Both owners still claim the page. Which of them is the first may change."""
    start = moving.start
    moving.claimed.conflicts = [(start + i, "stack", "vmalloc") for i in range(6)]
    asked_again.conflicts = [
        (start, "stack", "vmalloc"),
        (start + 1, "vmalloc", "stack"),
        (start + 2, "stack", "trace"),
        (start + 3, "vmalloc", "trace"),
        (start + 9, "stack", "vmalloc"),
    ]
    asked_again.claim([moving.board.claim(4, 5, "stack"), moving.board.claim(5, 6, "vmalloc")])
    assert moving.read().conflicts == moving.claimed.conflicts[:2]
    assert [address for _, address, _ in moving.missed("owners")] == [
        moving.board.address(i) for i in (0, 1)
    ]


def test_conflicts_with_marks_that_last(moving: Given, asked_again: Claimed) -> None:
    """The owner still claims the page, alone or with another one, and its marks are of another."""
    start = moving.start
    moving.part.conflicts = [(start + i, "slab", "stack") for i in range(7)]
    asked_again.part.conflicts = [
        *((start + i, "pagetables", "stack") for i in range(5)),
        (start + 5, "slab", "vmalloc"),
    ]
    asked_again.claim([moving.board.claim(1, 3, "stack"), moving.board.claim(3, 4, "vmalloc")])
    asked_again.conflicts = [
        (start + 4, "vmalloc", "stack"),
        (start + 5, "stack", "vmalloc"),
        (start + 6, "slab", "vmalloc"),
    ]
    lasting = [moving.part.conflicts[i] for i in (1, 2, 4)]
    assert moving.read().conflicts == lasting


def test_conflicts_if_an_owner_cannot_be_read_again(
    moving: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the one that claims the page."""
    again = Claimed()
    again.conflicts = []
    readings = iter([moving.claimed, again])

    def owners(image: Image, coverage: defaultdict[str, Coverage]) -> Claimed:
        found = next(readings)
        if found is again:
            coverage["stacks"].miss("stack", 0x10, "freed")
        return found

    monkeypatch.setattr(inventory, "Owners", owners)
    moving.part.conflicts = [(moving.start, "slab", "stack")]
    assert moving.read().conflicts == moving.part.conflicts
    # What the second reading missed is no part of the answer.
    assert moving.missed("stacks") == []


def test_owners_are_read_again_only_for_conflicts_of_a_running_kernel(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter([given.claimed] * 3)
    monkeypatch.setattr(inventory, "Owners", lambda *_: next(readings))
    given.part.conflicts = [(given.start, "slab", "stack")]
    assert given.read().conflicts == given.part.conflicts
    monkeypatch.setattr(Image, "is_moving", True)
    given.part.conflicts = []
    assert given.read().conflicts == []
    given.part.conflicts = [(given.start, "slab", "stack")]
    given.board.image.progress.stop = True
    try:
        assert given.read().conflicts == given.part.conflicts
    finally:
        given.board.image.progress.stop = False
    assert next(readings, None) is None


def test_what_ranges_could_not_read(given: Given) -> None:
    given.part.unnamed = {0x50: "why"}
    given.part.coverage["pages"].read = 7
    given.part.coverage["pages"].miss("struct pages", 0x60, "because")
    given.part.holes[NID, ZONE] = 5
    found = given.read()
    assert given.missed("names") == [("name of a kmem_cache", 0x50, "why")]
    assert given.missed("pages") == [("struct pages", 0x60, "because")]
    assert given.coverage["pages"].read == 7
    assert found.holes == {(NID, ZONE): 5}
    assert {nid for nid, _ in found.zones} == {0, 1, 2, 3}


def test_the_size_of_the_memory_map_may_be_missing(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(image: object) -> int:
        raise FaultError("not in the image", 0x1230)

    monkeypatch.setattr(inventory, "counted_memmap", missing)
    assert given.read().memmap is None
    assert given.missed("zones") == [("nr_memmap_pages", 0x1230, "not in the image")]
    monkeypatch.setattr(inventory, "counted_memmap", lambda _: 77)
    assert given.read().memmap == 77


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([(0, 8), (8, 16), (16, 24)], [(0, 8), (8, 16), (16, 24)]),
        # What is in a block belongs to the range of its first page.
        ([(0, 4), (4, 8)], [(0, 8)]),
        ([(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 8)]),
        ([(0, 4), (4, 12), (12, 16)], [(0, 8), (8, 16)]),
        ([(0, 12), (12, 20), (20, 24)], [(0, 8), (8, 20), (20, 24)]),
        # The page before a range tells nothing: that of page frame 11 is damaged.
        ([(8, 12), (12, 16)], [(8, 16)]),
        # Page frames that are not there end a block, as a range of a single one does.
        ([(0, 2), (4, 6), (6, 8)], [(0, 2), (4, 8)]),
        ([(0, 4), (6, 8)], [(0, 4), (6, 8)]),
        ([(2, 4), (4, 8)], [(2, 8)]),
        ([(0, 4), (4, 5)], [(0, 4), (4, 5)]),
        ([(0, 5), (5, 8)], [(0, 8)]),
        # The block of page frame 24 is said to begin there, after it, or too long before it.
        ([(16, 24), (24, 28)], [(16, 24), (24, 28)]),
        ([(16, 28), (28, 32)], [(16, 28), (28, 32)]),
        ([(16, 32), (32, 36)], [(16, 32), (32, 36)]),
        ([(16, 36), (36, 40)], [(16, 36), (36, 40)]),
        # Page frame 44 cannot be read, and the block of 48 begins at an odd one.
        ([(40, 44), (44, 48)], [(40, 44), (44, 48)]),
        ([(40, 48), (48, 52)], [(40, 48), (48, 52)]),
    ],
)
def test_ranges_begin_where_blocks_begin(
    of_module: Board,
    monkeypatch: pytest.MonkeyPatch,
    parts: list[tuple[int, int]],
    wanted: list[tuple[int, int]],
) -> None:
    """Blocks of eight pages are at 0 and at 8. What is after them is damaged."""
    board, start = of_module, of_module.start
    heads = {pfn: (pfn // 8 * 8, 3) for pfn in range(16)} | {pfn: (pfn, 0) for pfn in range(16, 50)}
    # The second page of a range tells.
    heads |= {11: (11, 0), 25: (24, 3), 29: (30, 3), 33: (24, 3), 37: (32, 2), 49: (45, 3)}
    del heads[45]

    def read_page(image: object, page: int) -> SimpleNamespace:
        head, order = heads.get((page - board.address(0)) // board.size, (None, 0))
        if head is None:
            raise FaultError("not in the image", page)
        return SimpleNamespace(head=board.address(head), order=order)

    monkeypatch.setattr(inventory, "read_page", read_page)
    found = whole_blocks(board.image, [PageRange(start + a, start + b) for a, b in parts])
    assert [(part.start - start, part.end - start) for part in found] == wanted


@pytest.mark.parametrize("why_not", [None, "not profiled"])
def test_lines_of_code_that_allocated_what_is_unknown(
    given: Given, monkeypatch: pytest.MonkeyPatch, why_not: str | None
) -> None:
    """On kernels that profile allocations. What is known to be something needs no line."""
    sites = {given.board.address(i): SimpleNamespace(place="mm/a.c:7 f") for i in (0, 1, 4)}
    finder = SimpleNamespace(why_not=why_not, coverage=Coverage(3), of_page=sites.get)
    monkeypatch.setattr(inventory, "SiteFinder", lambda _: finder)
    given.unmarked("unknown", 0, NEVER, 0, 1, 2)
    given.unmarked("kmem", 0, ONE, 4)
    given.owners = {1: "trace"}
    site = None if why_not else "mm/a.c:7 f"
    wanted = {
        Place(NID, ZONE, "unknown", 0, caller=site): 1,
        Place(NID, ZONE, "trace", 0): 1,
        Place(NID, ZONE, "kmem", 0): 1,
    }
    wanted[Place(NID, ZONE, "unknown", 0)] = 2 if why_not else 1
    assert given.read().pages == wanted
    assert given.coverage["call_sites"].read == 3
