# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Blocks among page frames whose ``struct page`` is written here: whatever they say, each page frame
counts once.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from support.page_board import KMEM, NID, ONE, PAGES, TWO, ZONE, Board, Claimed

from memcg_inspect.collect import inventory_range
from memcg_inspect.collect.inventory import whole_blocks
from memcg_inspect.collect.inventory_blocks import disjoint
from memcg_inspect.collect.inventory_part import InventoryPart
from memcg_inspect.collect.page_owners import Claim, Share
from memcg_inspect.image import memory
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.model_pages import NEVER, NOBODY, UNUSED, Place

pytestmark = pytest.mark.image

#: Kinds of claims that agree with few marks, and with many.
CLAIMED = ("vmalloc", "pagetables", "memmap", "percpu", "kernel_pagetables", "kfence", "trace")


def pages_of(found: InventoryPart) -> int:
    """Return the number of page frames of a part, those without a kind included."""
    unmarked = (len(pfns) << (at.order or 0) for (at, _), pfns in found.unmarked.items())
    return found.pages.total() + sum(unmarked) + len(found.bare)


def bytes_of(found: InventoryPart) -> Counter[Place]:
    """Return the bytes by what they are, whoever pays."""
    sums: Counter[Place] = Counter()
    for (place, _), size in found.bytes.items():
        sums[place] += size
    return +sums


def some_claims(board: Board, rng: Random) -> Claimed:
    """Return claims that do not overlap, of any pages."""
    claims: list[Claim] = []
    at = 0
    while (at := at + rng.choice((0, 1, 2, 5, 9))) < PAGES - 17:
        number, kind = rng.choice((1, 1, 2, 3, 8, 17)), rng.choice(CLAIMED)
        share = Share(rng.choice((0, 3000)), ()) if kind == "percpu" else None
        claims.append(board.claim(at, at + number, kind, None, share))
        at += number
    return Claimed(claims)


def put_block(board: Board, rng: Random, i: int, order: int) -> None:
    """Write a block, or a page, of any kind. It may be in another zone."""
    place = {"nid": 2, "zone": 3} if rng.random() < 0.3 else {}
    kind = rng.choice(("free", "kmem", "table", "slab", "anon", "reserved", "bare", "guard"))
    payer = rng.choice((0, ONE | KMEM, TWO | KMEM))
    if kind == "free":
        board.free(i, order)
    elif kind == "guard":
        board.guard(i, order)
    elif kind in ("reserved", "bare"):
        for page in range(i, i + (1 << order)):
            is_bare = kind == "bare" and page > i
            board.put(page, *(["PG_reserved"] if kind == "reserved" else []), refs=not is_bare)
    elif kind == "slab" and order:
        board.lost_slab(i, order)
    else:
        flags = ["PG_lru"] if kind == "anon" else []
        more = {"type": "table"} if kind == "table" else {"mapping": 65} if flags else {}
        data = payer & ~KMEM if flags else payer
        if order:
            board.compound(i, order, *flags, data=data, **more, **place)
        else:
            board.put(i, *flags, data=data, **more, **place)


def test_blocks_do_not_overlap() -> None:
    """A block that begins where another one ends is a block of its own."""
    blocks = {8: 2, 0: 3, 4: 1, 12: 0, 16: 1, 17: 0}
    assert disjoint(blocks, 0) == ({0: 3, 8: 2, 12: 0, 16: 1}, [4, 17])
    assert disjoint(blocks, 8) == ({8: 2, 12: 0, 16: 1}, [0, 4, 17])
    assert disjoint({}, 5) == ({}, [])


@pytest.mark.parametrize("seed", range(12))
def test_each_page_frame_counts_once(
    board: Board, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The same is found in pieces of any size, whoever claims the pages."""
    rng, i = Random(seed), 0
    while i < PAGES:
        order = rng.choice((0, 0, 1, 1, 2, 3, 4, 5, 6))
        while i % (1 << order) or i + (1 << order) > PAGES:
            order -= 1
        put_block(board, rng, i, order)
        i += 1 << order
    owners, results = some_claims(board, rng), []
    for pages in (PAGES, 2, 4, 64):
        monkeypatch.setattr(memory, "PIECE", pages * board.size)
        found = board.read(owners)
        assert pages_of(found) == PAGES
        assert bytes_of(found) == +Counter({at: n * 4096 for at, n in found.pages.items()})
        assert found.coverage["pages"].unreadable == 0
        unmarked = {key: list(pfns) for key, pfns in found.unmarked.items()}
        conflicts = sorted(found.conflicts)
        results.append((+found.bytes, unmarked, found.bare, found.heads, conflicts))
        assert len(conflicts) == len({pfn for pfn, *_ in conflicts})
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("pages", [4, 16, PAGES])
@pytest.mark.parametrize("seed", range(8))
def test_blocks_that_are_used_again_while_they_are_read(
    board: Board, monkeypatch: pytest.MonkeyPatch, seed: int, pages: int
) -> None:
    """Each page frame counts once, with the block that begins first. Nothing is damaged."""
    rng = Random(seed)
    for _ in range(60):
        order = rng.randrange(5)
        i = rng.randrange(PAGES >> order) << order
        if rng.random() < 0.3:
            board.put(i, type="buddy", refs=0, private=order)
        else:
            put_block(board, rng, i, order)
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    monkeypatch.setattr(Image, "is_moving", True)
    found = board.read(some_claims(board, rng))
    assert pages_of(found) == PAGES
    assert found.coverage["pages"].unreadable == 0


@pytest.mark.parametrize("pages", [4, PAGES])
@pytest.mark.parametrize("inner", ["free", "compound", "slab", "single slab"])
def test_a_block_inside_a_free_block(
    board: Board, monkeypatch: pytest.MonkeyPatch, pages: int, inner: str
) -> None:
    """It is of the free block. In an image that does not change, one of the two is damaged."""
    board.free(0, 3)
    if inner == "free":
        board.free(4, 1)
    elif inner == "compound":
        board.compound(4, 1, "PG_lru", mapping=64, data=ONE)
    elif inner == "slab":
        board.lost_slab(4, 1)
    else:
        board.put(4, type="slab")
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    found = board.read()
    assert board.of(found) == {("free", 3, UNUSED): 8 * 4096}
    assert found.pages.total() == PAGES
    told = [(one.what, one.address, one.reason) for one in found.coverage["pages"].examples]
    wanted = ("block of pages", board.address(4), "it begins inside another one")
    assert told == ([] if inner == "single slab" else [wanted])


@pytest.mark.parametrize("pages", [4, PAGES])
def test_a_free_block_inside_a_compound_page(
    board: Board, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    board.lost_slab(0, 3)
    board.free(4, 2)
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    found = board.read()
    unmarked = sum(map(len, found.unmarked.values()))
    assert found.pages.total() + unmarked == PAGES
    if pages < 8:
        assert board.of(found) == {("slab", None, NOBODY): 8 * 4096}
    else:
        # All of the slab is in one piece, and half of it is no tail.
        assert board.of(found) == {
            ("slab", None, NOBODY): 4096,
            ("free", 2, UNUSED): 4 * 4096,
        }
        assert told_of(board, found) == [(0, "it is 3, and its second half begins with no tail")]


def told_of(board: Board, found: InventoryPart) -> list[tuple[int, str]]:
    """Return the pages of blocks whose orders are damaged, by number, and why."""
    examples = found.coverage["pages"].examples
    assert all(one.what == "order of a block" for one in examples)
    return [((one.address - board.address(0)) // board.size, one.reason) for one in examples]


@pytest.mark.parametrize("pages", [2, PAGES])
@pytest.mark.parametrize(
    ("at", "order", "why_not"),
    [
        (64, 19, "it is 19, and no block is larger than 18"),
        (64, 100, "it is 100, and no block is larger than 18"),
        (64, 255, "it is 255, and no block is larger than 18"),
        (66, 2, "is no multiple of its size"),
        (128, 7, "it is 7, and the page frames end before"),
        (64, 6, "it is 6, and not all of its page frames are memory"),
    ],
)
def test_a_compound_page_whose_order_is_damaged(
    board: Board,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    order: int,
    why_not: str,
    pages: int,
) -> None:
    """It swallows no page behind it. Its own pages are single ones, of no known use."""
    start = board.start
    ranges = [(start, start + 127), (start + 128, start + PAGES)]
    monkeypatch.setattr(inventory_range, "system_ram", lambda *_: ranges)
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    board.compound(at, 1, data=ONE | KMEM)
    board.write(at + 1, 0, bytes([order]))
    behind = at // 8 * 8 + 8
    board.compound(behind, 1, type="large_kmalloc", data=TWO | KMEM)
    board.lost_slab(behind + 4, 2)
    for i in range(behind + 8, behind + 10):
        board.put(i, type="table")
    found = board.read()
    assert board.of(found) == {
        ("large_kmalloc", 1, TWO): 2 * 4096,
        ("slab", None, NOBODY): 4 * 4096,
        ("pagetables", None, NOBODY): 2 * 4096,
    }
    assert board.unmarked(found) == {("kmem", 0, ONE): [at], ("unknown", 0, NEVER): [at + 1]}
    assert pages_of(found) + found.holes.total() == PAGES
    ((page, reason),) = told_of(board, found)
    assert page == at
    assert why_not in reason


def test_a_slab_whose_order_is_damaged(board: Board) -> None:
    """What is in it is not read."""
    board.lost_slab(0, 1)
    board.write(1, 0, bytes([77]))
    found = board.read()
    assert board.of(found) == {("slab", None, NOBODY): 4096}
    assert board.unmarked(found) == {("unknown", 0, NEVER): [1]}
    assert found.coverage["slab"].read == found.coverage["slab"].unreadable == 0
    assert [page for page, _ in told_of(board, found)] == [0]


@pytest.mark.parametrize(("at", "order"), [(2, 2), (128, 8)])
def test_a_free_block_whose_order_is_damaged(board: Board, at: int, order: int) -> None:
    board.put(at, type="buddy", refs=0, private=order)
    found = board.read()
    assert board.unmarked(found) == {("unknown", 0, NEVER): [at]}
    assert pages_of(found) == PAGES
    assert [page for page, _ in told_of(board, found)] == [at]


def test_orders_change_while_a_running_kernel_is_read(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "is_moving", True)
    board.compound(0, 1, data=ONE | KMEM)
    board.write(1, 0, bytes([100]))
    board.put(6, type="buddy", refs=0, private=2)
    found = board.read()
    assert told_of(board, found) == []
    assert pages_of(found) == PAGES


def test_what_is_no_memory_has_no_order(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    start = board.start
    ranges = [(start + 4, start + 8), (start + 12, start + PAGES)]
    monkeypatch.setattr(inventory_range, "system_ram", lambda *_: ranges)
    for at in (0, 8):
        board.compound(at, 1, data=ONE | KMEM)
        board.write(at + 1, 0, bytes([100]))
        board.free(at + 2, 1)
    found = board.read()
    assert (told_of(board, found), found.holes.total()) == ([], 8)
    assert found.pages.total() == PAGES - 8


def test_a_range_that_begins_inside_a_block_whose_order_is_damaged(board: Board) -> None:
    """The range before has told of it."""
    board.compound(0, 2, data=ONE | KMEM)
    board.write(1, 0, bytes([100]))
    start = board.start
    found = board.reader()(PageRange(start + 2, start + PAGES))
    assert board.unmarked(found) == {("unknown", 0, NEVER): [2, 3]}
    assert (told_of(board, found), pages_of(found)) == ([], PAGES - 2)


@pytest.mark.parametrize("pages", [2, 16, PAGES])
def test_pages_that_are_not_accepted(
    board: Board, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """``__free_unaccepted()`` marks the first of 1024 pages. The board has 192 of them."""
    board.bare(*range(1, PAGES), nid=2)
    board.put(0, type="unaccepted", refs=0)
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    found = board.read()
    assert found.pages == {
        Place(NID, ZONE, "unaccepted"): 1,
        Place(2, ZONE, "unaccepted"): PAGES - 1,
    }
    assert board.of(found) == {("unaccepted", None, UNUSED): PAGES * 4096}
    assert (found.bare, found.heads, found.last) == ({}, {}, None)
    assert found.coverage["pages"].unreadable == 0


@pytest.mark.parametrize("pages", [2, 4, PAGES])
def test_guard_pages(board: Board, monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """``set_page_guard()`` marks the first page, and keeps the order in ``private``."""
    start = board.start
    ranges = [(start, start + 30), (start + 31, start + PAGES)]
    monkeypatch.setattr(inventory_range, "system_ram", lambda *_: ranges)
    monkeypatch.setattr(memory, "PIECE", pages * board.size)
    board.guard(0, 3)
    board.put(8, type="guard", refs=0)
    board.guard(16, 4)
    board.lost_slab(20, 1)  # guard pages that are used again while they are read
    monkeypatch.setattr(Image, "is_moving", True)
    found = board.read(Claimed([board.claim(6, 9, "vmalloc")]))
    assert board.of(found) == {("guard", None, NEVER): (8 + 1 + 15) * 4096}
    assert found.conflicts == [(start + i, "guard", "vmalloc") for i in (6, 7, 8)]
    assert (found.bare, found.heads) == ({}, {})
    assert pages_of(found) == PAGES - 1


def test_a_compound_page_with_guard_pages_type_is_counted_once(board: Board) -> None:
    board.compound(0, 2, type="guard", private=3)
    found = board.read()
    assert board.of(found) == {("guard", 2, NEVER): 4 * 4096}
    assert pages_of(found) == PAGES


def test_a_block_with_one_mark_whose_order_is_damaged(board: Board) -> None:
    """A block that is not accepted begins at a multiple of the largest size."""
    board.put(2, type="unaccepted", refs=0)
    board.put(6, type="guard", refs=0, private=2)
    board.bare(3, 7)
    found = board.read()
    assert board.of(found) == {
        ("unaccepted", None, UNUSED): 4096,
        ("guard", None, NEVER): 4096,
    }
    assert [pfn - board.start for pfn in found.bare] == [3, 7]
    assert [page for page, _ in told_of(board, found)] == [2, 6]


def test_guard_pages_are_no_more_than_a_free_block_can_have(board: Board) -> None:
    """The board begins at a multiple of 1024 pages, and often of more."""
    board.put(0, type="guard", refs=0, private=11)
    board.bare(1)
    found = board.read()
    assert board.of(found) == {("guard", None, NEVER): 4096}
    assert told_of(board, found) == [(0, "it is 11, and no block is larger than 10")]


@pytest.mark.parametrize(
    ("kind", "cuts", "wanted"),
    [
        ("unaccepted", (64, 128), []),
        ("guard", (4, 8, 12), [8, 12]),
        ("guard", (2, 6, 10), [10]),
    ],
)
def test_a_block_with_one_mark_is_in_one_range(
    board: Board, kind: str, cuts: tuple[int, ...], wanted: list[int]
) -> None:
    """Ranges may begin anywhere if the size of a ``struct page`` is no power of two."""
    if kind == "guard":
        board.guard(0, 3)
    else:
        board.put(0, type=kind, refs=0)
        board.bare(*range(1, PAGES))
    start = board.start
    ends = [start + cut for cut in (*cuts, PAGES)]
    parts = [PageRange(a, b) for a, b in zip([start, *ends], ends, strict=False)]
    found = whole_blocks(board.image, parts)
    assert [part.start - start for part in found[1:]] == wanted
    total, reader = InventoryPart(PageRange(start, start), 4096), board.reader()
    for part in found:
        total.merge(reader(part))
    assert total.bare == {}
