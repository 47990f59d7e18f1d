# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What the pass over page frames finds in a few of them, whose ``struct page`` is written here.

``tests/collect/test_ranges.py`` compares passes over whole images.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from drgn import Object, offsetof
from support.guests import Lab
from support.page_board import KMEM, NID, ONE, PAGES, TWO, ZONE, Board

from memcg_inspect.checks.ledger import Amount, Entry
from memcg_inspect.checks.sockets import SockRemainder, UnknownSock
from memcg_inspect.collect import ranges
from memcg_inspect.collect.page_uses import PageUses
from memcg_inspect.collect.partial import Partial
from memcg_inspect.collect.ranges import PassContext, RangeCollector, page_parts, walk_ranges
from memcg_inspect.collect.slab_cells import LARGE_KMALLOC, SlabCells
from memcg_inspect.image.image import Image
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.mm.memcontrol import read_memcgs
from memcg_inspect.linux.mm.mm_types import pages_per_piece, scan_pages
from memcg_inspect.linux.mm.mmzone import PageRange, page_ranges
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabReader
from memcg_inspect.linux.net.sock import Protocol, Sock, UnknownCharge, socket_caches
from memcg_inspect.model import NUMA_NO_NODE, Coverage, FreedPage

pytestmark = pytest.mark.image

PAGE = 4096


class Pass(NamedTuple):
    """A board, and the uses of pages of its image."""

    board: Board
    uses: PageUses

    def read(self, cells: SlabCells | None = None, pages: int = PAGES) -> Partial:
        start = self.board.start
        context = PassContext(frozenset(), self.uses, cells=cells)
        return RangeCollector(self.board.image, context)(PageRange(start, start + pages))


@pytest.fixture(scope="module")
def of_module(lab: Lab) -> Pass:
    board = Board(lab.image("7.3", "4", "mixed").own_program())
    return Pass(board, PageUses(board.image, defaultdict(Coverage)))


@pytest.fixture
def made(of_module: Pass) -> Iterator[Pass]:
    of_module.board.clear()
    yield of_module
    of_module.board.image.progress.stop = False


def charges(found: Partial) -> dict[Entry, Amount]:
    return dict(found.ledger)


def test_pages_of_the_kernel(made: Pass) -> None:
    """A compound page says its order. A block that is not compound ends before the next page."""
    board = made.board
    board.put(0, data=ONE | KMEM)
    board.put(2, data=ONE | KMEM, nid=2)
    board.bare(3, nid=2)
    board.put(4, type="table", data=TWO | KMEM)
    board.compound(8, 3, data=ONE | KMEM)
    board.compound(16, 2, type="large_kmalloc", data=TWO | KMEM)
    board.compound(20, 2, type="large_kmalloc")
    found = made.read()
    assert charges(found) == {
        Entry(ONE, "kmem", "other", NID): Amount(9 * PAGE, 2),
        Entry(ONE, "kmem", "other", 2): Amount(2 * PAGE, 1),
        Entry(TWO, "kmem", "table", NID): Amount(PAGE, 1),
        Entry(TWO, "kmem", "large_kmalloc", NID): Amount(4 * PAGE, 1),
    }
    assert found.large_kmalloc == {NID: 8}
    assert found.node_pages["table", NID] == 1
    assert (found.freed, found.compound, found.unplaced) == (set(), {}, {})
    assert found.coverage["pages"].read == PAGES
    assert found.coverage["pages"].unreadable == 0
    assert not any(found.ledger.may_miss(kind) for kind in ("slab", "kmem", "lru", "sock"))


def test_large_kmallocs_are_added_to_cells(made: Pass) -> None:
    """By payer, those that a memcg pays for; and by node, all."""
    board = made.board
    board.compound(0, 2, type="large_kmalloc", data=TWO | KMEM)
    board.compound(4, 2, type="large_kmalloc")
    board.compound(8, 1, data=TWO | KMEM)
    cells = SlabCells(board.image, {TWO: 0x20}.get)
    made.read(cells)
    assert {(key.payer, key.cache): cell.bytes for key, cell in cells.cells.items()} == {
        (0x20, -4 * PAGE): 4 * PAGE
    }
    assert cells.nodes[NID, LARGE_KMALLOC]["slab_bytes"] == 8 * PAGE


def test_a_free_page_that_is_still_charged(made: Pass) -> None:
    """It has no reference, and is in a block of the buddy allocator."""
    board = made.board
    board.free(0, 2)
    board.put(2, refs=0, data=ONE | KMEM)
    board.put(8, refs=0, data=ONE | KMEM)
    board.free(12, 1)
    board.put(13, refs=1, data=TWO | KMEM)
    found = made.read()
    assert found.freed == {FreedPage(board.address(2), ONE, NID)}
    assert charges(found) == {
        Entry(ONE, "kmem", "other", NID): Amount(2 * PAGE, 2),
        Entry(TWO, "kmem", "other", NID): Amount(PAGE, 1),
    }


def test_user_pages(made: Pass) -> None:
    """Pages on LRU lists count there, whether a memcg pays or not; others are charged only."""
    board = made.board
    board.compound(0, 2, "PG_lru", mapping=64, data=ONE)
    board.put(4, "PG_lru", mapping=64, data=ONE)
    board.put(5, mapping=64, data=ONE)
    board.put(6, "PG_lru", "PG_active", mapping=64, nid=2, zone=3)
    found = made.read()
    assert charges(found) == {Entry(ONE, "lru", "lru", NID): Amount(6 * PAGE, 3)}
    assert {
        (payer, nid, zone, flags.active): pages
        for (payer, nid, zone, flags), pages in found.lru.items()
    } == {(ONE, NID, ZONE, False): 5, (0, 2, 3, True): 1}


def test_a_slab_of_a_cache_that_is_not_in_the_image(made: Pass) -> None:
    """It may have held anything: charges on its node, and sockets."""
    made.board.lost_slab(0, 1)
    found = made.read()
    (missed,) = found.coverage["slab_pages"].examples
    assert (missed.what, missed.address) == ("slab", made.board.address(0))
    ledger = found.ledger
    assert ledger.may_miss("slab", "reclaimable", NID) and ledger.may_miss("sock")
    assert not ledger.may_miss("slab", "reclaimable", 2)
    assert not ledger.may_miss("kmem")


@pytest.mark.parametrize("stop", [False, True])
def test_page_frames_that_could_not_be_read(made: Pass, stop: bool) -> None:
    """They may have been charged in any way."""
    made.board.missing = {1}
    made.board.image.progress.stop = stop
    found = made.read()
    (missed,) = found.coverage["pages"].examples
    assert (missed.what, missed.address) == ("struct pages", made.board.address(0 if stop else 64))
    assert missed.reason == STOPPED if stop else missed.reason == "not in the image"
    assert found.coverage["pages"].read == (0 if stop else PAGES - 64)
    assert all(found.ledger.may_miss(kind) for kind in ("slab", "kmem", "lru", "sock"))
    assert "compound" not in found.coverage or not found.coverage["compound"].unreadable


class Socks:
    """Takes the place of a reader of sockets: the same ones in each slab."""

    given: tuple[Sock, ...] = ()
    lost = False

    def __init__(self, image: Image, slabs: SlabReader, protocols: dict[int, Protocol]) -> None:
        self.coverage = self.queues = self.others = Coverage()

    def may_read(self, cache: SlabCache) -> bool:
        return True

    def read(self, slab: Slab, memcgs: Container[int]) -> Iterator[Sock]:
        if self.lost:
            self.coverage.miss("socket", 0x1000, "not in the image")
        yield from self.given


def test_sockets(made: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of protocols that account memory count, and have a remainder or a reason for it."""
    why = UnknownCharge("a reason", False)
    monkeypatch.setattr(ranges, "SockReader", Socks)
    made.board.compound(0, 1, type="slab")
    given = (
        Sock(0x100, 0x10, 0, "UNIX"),
        Sock(0x200, 0x10, 8192, "TCP", True),
        Sock(0x300, 0x10, 4096, "TCP", True, 7),
        Sock(0x400, 0x20, 4096, "UDP", True, 0, why),
        Sock(0x500, 0x20, 4096, "UDP", True, 7, why),
    )
    monkeypatch.setattr(Socks, "given", given)
    found = made.read()
    assert {e: a for e, a in found.ledger if e.kind == "sock"} == {
        Entry(0x10, "sock", "UNIX", NUMA_NO_NODE): Amount(0, 1),
        Entry(0x10, "sock", "TCP", NUMA_NO_NODE): Amount(12288, 2),
        Entry(0x20, "sock", "UDP", NUMA_NO_NODE): Amount(8192, 2),
    }
    assert found.sockets == {0x10: 2, 0x20: 2}
    assert found.sock_remainders == {(0x10, SockRemainder(0x300, "TCP", 7))}
    assert found.unknown_socks == {
        (0x20, UnknownSock("a reason", False, False)),
        (0x20, UnknownSock("a reason", False, True)),
    }
    assert not found.ledger.may_miss("sock")
    monkeypatch.setattr(Socks, "lost", True)
    assert made.read().ledger.may_miss("sock")


def test_progress_is_told_range_by_range(made: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    image, told = made.board.image, []
    monkeypatch.setattr(image.progress, "report", lambda what, share: told.append((what, share)))
    parts = [PageRange(0, 2), PageRange(2, 4), PageRange(8, 9), PageRange(10, 12)]
    assert list(walk_ranges(image, lambda part: part.start, parts=parts)) == [0, 2, 8, 10]
    assert told == [("pages", 0.25), ("pages", 0.5), ("pages", 0.75), ("pages", 1.0)]


@pytest.mark.parametrize(("jobs", "pieces", "most"), [(1, 3, 3), (2, 3, 3), (2, 64, 1)])
def test_ranges_are_small_enough_for_all_processes(
    made: Pass, monkeypatch: pytest.MonkeyPatch, jobs: int, pieces: int, most: int
) -> None:
    """There are eight for each process, if memory is large enough, and none is cut in a piece."""
    image = made.board.image
    piece = pages_per_piece(image)
    monkeypatch.setattr(ranges, "PIECES_PER_RANGE", pieces)
    monkeypatch.setattr(ranges, "jobs_of", lambda _: jobs)
    whole = [PageRange(0, 48 * piece)] if pieces == 3 else page_ranges(image)
    monkeypatch.setattr(ranges, "page_ranges", lambda _: whole)
    parts = page_parts(image)
    assert max(part.end - part.start for part in parts) == most * piece
    assert sum(p.end - p.start for p in parts) == sum(p.end - p.start for p in whole)


def test_ranges_of_processes_count_only_what_is_there(
    made: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that begins high, as on large machines or on arm64, is as large as it is."""
    image = made.board.image
    piece = pages_per_piece(image)
    monkeypatch.setattr(ranges, "jobs_of", lambda _: 2)
    start = 1000 * piece
    whole = [PageRange(start, start + 32 * piece), PageRange(2 * start, 2 * start + 16 * piece)]
    monkeypatch.setattr(ranges, "page_ranges", lambda _: whole)
    parts = page_parts(image)
    assert {part.end - part.start for part in parts} == {3 * piece, 2 * piece, piece}
    assert len(parts) == 11 + 6


def slab_of(image: Image, name: str) -> Slab:
    """Return a slab of the image itself, with charged objects."""
    slabs = SlabReader(image)
    return next(
        slab
        for piece in scan_pages(image)
        for slab in filter(None, map(slabs.slab, piece.slabs))
        if slab.cache.name == name and slab.charged
    )


def range_of(made: Pass, slab: Slab) -> PageRange:
    first = (slab.page - made.board.address(0)) // made.board.size + made.board.start
    return PageRange(first, first + (1 << slab.order))


@pytest.mark.parametrize(
    ("name", "detail"), [("dentry", "reclaimable"), ("anon_vma", "unreclaimable")]
)
@pytest.mark.parametrize("alone", [False, True])
def test_objects_of_a_slab_are_charged(made: Pass, alone: bool, name: str, detail: str) -> None:
    """Slabs are read in groups, unless somebody wants to see each of them."""
    image = made.board.image
    slab = slab_of(image, name)
    cells = SlabCells(image, lambda objcg: objcg) if alone else None
    context = PassContext(frozenset(), made.uses, cells=cells)
    found = RangeCollector(image, context)(range_of(made, slab))
    assert slab.charged is not None
    assert {e: a for e, a in found.ledger if e.kind == "slab"} == {
        Entry(objcg, "slab", detail, slab.nid): Amount(count * slab.cache.charge, count)
        for objcg, count in slab.charged.items()
    }
    (usage,) = found.slabs.usage()
    assert (usage.slabs, usage.charged) == (1, sum(slab.charged.values()))
    assert found.coverage["slab"].read == 1
    if cells is not None:
        paid = {key.payer: cell.objects for key, cell in cells.cells.items() if key.payer}
        assert paid == slab.charged


def test_sockets_of_a_slab_are_read(made: Pass) -> None:
    """All that refer to a memcg, in the cache of a protocol that accounts memory."""
    image, prog = made.board.image, made.board.prog
    memcgs, slab = frozenset(read_memcgs(image, Coverage())), slab_of(image, "TCP")
    context = PassContext(memcgs, made.uses, socket_caches(image, Coverage()))
    found = RangeCollector(image, context)(range_of(made, slab))
    socks = [Object(prog, "struct sock", address=at) for at in SlabReader(image).objects(slab)]
    plain = Counter(sock.sk_memcg.value_() for sock in socks if sock.sk_wmem_alloc.refs.counter > 0)
    assert found.sockets == {memcg: n for memcg, n in plain.items() if memcg in memcgs}
    assert found.sockets


def test_the_name_of_a_cache_may_be_missing(made: Pass) -> None:
    """The slab is of a cache that is in the last page frames of the board."""
    board = made.board
    cache = board.prog.type("struct kmem_cache")
    for member, size in (("size", 64), ("object_size", 64), ("name", 0x1000)):
        board.write(PAGES - 8, offsetof(cache, member), size.to_bytes(4, "little"))
    board.lost_slab(0, 1, cache=board.address(PAGES - 8))
    assert list(made.read(pages=8).unnamed) == [board.address(PAGES - 8)]


def test_vectors_outside_of_their_slabs(made: Pass) -> None:
    """
    On the node of the slab, on another one, or in memory that is not of kmalloc().

    Those of KFENCE's own pages are never of kmalloc(). A page that is not in the image tells
    nothing.
    """
    collector = RangeCollector(made.board.image, PassContext(frozenset(), made.uses))
    collector._kfence = (0x900,)  # type: ignore[assignment]
    collector._vector_pages = {
        0x10: (1, True),
        0x11: (2, True),
        0x12: (2, False),
        0x13: (NUMA_NO_NODE, False),
    }
    partial = Partial()
    of_node_1 = [(0x100, 0x10000), (0x100, 0x10040), (0x200, 0x11000), (0x200, 0x11040)]
    of_node_1 += [(0x300, 0x12000), (0x900, 0x12040), (0x400, 0x13000)]
    collector._add_vectors(partial, 1, of_node_1)
    collector._add_vectors(partial, 2, [(0x900, 0x12040)])
    assert partial.vectors == {1: 6, 2: 1}
    assert partial.vectors_elsewhere == {1: 3}
    assert partial.vectors_dangling == {(1, 0x12000, 2, 0x300)}


@pytest.mark.parametrize(("pages", "jobs"), [(5, 1), (6, 3)])
def test_large_memory_is_read_by_all_cores(
    made: Pass, monkeypatch: pytest.MonkeyPatch, pages: int, jobs: int
) -> None:
    image = made.board.image
    monkeypatch.setattr(ranges, "_SMALL", 5 * PAGE)
    monkeypatch.setattr(ranges, "available_cores", lambda: 3)
    parts = [PageRange(10, 12), PageRange(20, 18 + pages)]
    monkeypatch.setattr(ranges, "page_ranges", lambda _: parts)
    monkeypatch.setattr(image, "jobs", None)
    assert ranges.jobs_of(image) == jobs


class Counted:
    """Takes the place of readers of call sites and of groups of inotify."""

    seen: list[str] = []

    def __init__(self, *_: object) -> None:
        self.coverage = Coverage()

    def may_read(self, cache: SlabCache) -> bool:
        return False

    def add_pages(self, partial: Partial, piece: object) -> None:
        self.seen.append("pages")

    def add_slab(self, partial: Partial, slab: Slab, slabs: SlabReader) -> None:
        self.seen.append(slab.cache.name)

    def read(self, slab: Slab, memcgs: object) -> Iterator[SimpleNamespace]:
        yield from (SimpleNamespace(memcg=memcg) for memcg in (0x10, 0x20, 0x10))


def test_each_slab_is_read_if_call_sites_are_asked_for(
    made: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object has one. Groups of inotify refer to memcgs, and so count, too."""
    image = made.board.image
    monkeypatch.setattr(ranges, "CallSiteCounter", Counted)
    monkeypatch.setattr(ranges, "GroupReader", Counted)
    monkeypatch.setattr(Counted, "seen", [])
    part = range_of(made, slab_of(image, "dentry"))
    found = RangeCollector(image, PassContext(frozenset(), made.uses))(part)
    assert (Counted.seen, found.groups) == ([], {})
    context = PassContext(frozenset(), made.uses, call_sites=True)
    found = RangeCollector(image, context)(part)
    assert Counted.seen == ["pages", "dentry"]
    assert found.groups == {0x10: 2, 0x20: 1}


def test_vectors_of_a_group_of_slabs(made: Pass) -> None:
    image = made.board.image
    slabs = SlabReader(image)
    slab = next(
        slab
        for piece in scan_pages(image)
        for slab in filter(None, map(slabs.slab, piece.slabs))
        if slab.cache.name == "radix_tree_node" and slabs.vector_page(slab) is not None
    )
    context = PassContext(frozenset(), made.uses)
    found = RangeCollector(image, context)(range_of(made, slab))
    assert (found.vectors, found.vectors_dangling) == ({slab.nid: 1}, set())


def test_pages_that_nodes_count(made: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    on_nodes = SimpleNamespace(of=lambda raw: Counter({("stack", NID): 2}))
    monkeypatch.setattr(made.uses, "on_nodes", on_nodes)
    made.board.put(0, type="table")
    assert made.read().node_pages == {("stack", NID): 2, ("table", NID): 1}


def test_a_charged_page_that_is_free(made: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was charged when it was freed. On a running kernel, it was freed since it was read."""
    made.board.put(0, type="buddy", refs=0, data=ONE | KMEM)
    at = made.board.address(0)
    collector = RangeCollector(made.board.image, PassContext(frozenset(), made.uses))
    assert collector._is_free(at)
    monkeypatch.setattr(Image, "is_moving", True)
    assert not collector._is_free(at)
