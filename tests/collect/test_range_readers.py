# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the pass over page frames does with what each of its readers finds, or cannot read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError, offsetof
from support.page_board import KMEM, NID, ONE, PAGES, TWO, Board

from memcg_inspect.checks.ledger import Amount, Entry
from memcg_inspect.collect import ranges
from memcg_inspect.collect.page_uses import PageUses
from memcg_inspect.collect.partial import Partial
from memcg_inspect.collect.ranges import PassContext, RangeCollector, collect_ranges, walk_ranges
from memcg_inspect.collect.slab_cells import SlabCells
from memcg_inspect.image.image import Image
from memcg_inspect.linux.fs.file_table import OpenFile
from memcg_inspect.linux.mm.mm_types import KmemPage, pages_per_piece
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.slab import Slab, SlabCache
from memcg_inspect.model import Coverage
from memcg_inspect.model_freeing import Transient

pytestmark = pytest.mark.image

PAGE = 4096
CACHE = SlabCache(0x1000, "dentry", 192, 192, 0, True, 200, True)
FILE = OpenFile("pipefifo_fops", 0x70, True)


@pytest.fixture(scope="module")
def uses(of_module: Board) -> PageUses:
    return PageUses(of_module.image, defaultdict(Coverage))


@pytest.fixture
def collector(board: Board, uses: PageUses) -> RangeCollector:
    return RangeCollector(board.image, PassContext(frozenset(), uses))


def read(collector: RangeCollector, board: Board) -> Partial:
    return collector(PageRange(board.start, board.start + PAGES))


def missed(found: Partial, subject: str) -> list[tuple[str, int, str]]:
    examples = found.coverage[subject].examples
    return [(m.what, m.address, m.reason.partition(": 0x")[0]) for m in examples]


def owners(files: Any = lambda slab: {FILE}) -> Any:
    """Return owners of compound pages, as kernels without a mark for large kmallocs have."""
    return SimpleNamespace(files=files, may_read=lambda cache: cache.name == "filp")


def test_work_items_and_maps_that_are_missing(
    board: Board, collector: RangeCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a running kernel, lists of work items change while they are read."""
    collector._released.faults = [FaultError("a broken list", 0x1230)]
    collector._maps.fault = FaultError("no types", 0x1240)
    found = read(collector, board)
    assert missed(found, "css") == [("work items", 0x1230, "a broken list")]
    assert missed(found, "bpf") == [("types of BPF maps", 0x1240, "no types")]
    monkeypatch.setattr(Image, "is_moving", True)
    found = read(collector, board)
    assert missed(found, "css") == []
    assert len(missed(found, "bpf")) == 1


def test_each_reader_counts_for_its_subject(board: Board, collector: RangeCollector) -> None:
    found = read(collector, board).coverage
    assert collector._pages is found["pages"]
    assert collector._slabs.coverage is found["slab"]
    assert collector._socks.coverage is found["sock"]
    assert collector._socks.queues is found["sock_queues"]
    assert collector._socks.others is found["other_socks"]
    assert collector._notify.coverage is found["notify"]
    assert collector._users.coverage is found["user_pages"]
    assert collector._released.coverage is found["released"]
    assert collector._maps.coverage is found["bpf"]


def test_what_slabs_that_nobody_wants_to_see_are(collector: RangeCollector) -> None:
    """They are read in groups. Others are read one by one."""
    readers = [collector._released, collector._maps, collector._socks, collector._notify]
    for reader in readers:
        reader.may_read = lambda cache: False  # type: ignore[method-assign, union-attr]
    assert collector._is_alone(CACHE) is False
    for reader in readers:
        reader.may_read = lambda cache: True  # type: ignore[method-assign, union-attr]
        assert collector._is_alone(CACHE) is True
        reader.may_read = lambda cache: False  # type: ignore[method-assign, union-attr]
    collector._owners = owners()
    assert collector._is_alone(CACHE) is False
    assert collector._is_alone(CACHE._replace(name="filp")) is True


def test_files_may_be_where_nothing_can_be_read(board: Board, collector: RangeCollector) -> None:
    """The pages that they own pass for large kmallocs then."""
    collector._owners = owners()
    board.missing = {1}
    board.lost_slab(0, 1)
    found = read(collector, board)
    assert missed(found, "compound") == [
        ("files", board.address(0), "the cache of a slab is not known"),
        ("files", board.address(64), "not in the image"),
    ]
    assert missed(found, "slab_pages") == [("slab", board.address(0), "its cache is not known")]


def test_a_compound_page_that_says_no_order(board: Board, collector: RangeCollector) -> None:
    """Pages of any kind can be missing on its node. What is behind it is found."""
    collector._owners = owners()
    board.compound(4, 1, data=ONE | KMEM, nid=2)
    board.write(5, offsetof(board.page, "flags"), bytes([0x81]))
    board.compound(8, 3, data=TWO | KMEM)
    found = read(collector, board)
    why = "it is 129, and no compound page of this size can begin here"
    assert missed(found, "pages") == [("order of a compound page", board.address(4), why)]
    assert missed(found, "compound") == [("files", board.address(4), why)]
    assert dict(found.ledger)[Entry(TWO, "kmem", "other", NID)] == Amount(8 * PAGE, 1)
    for kind in ("slab", "kmem", "lru"):
        # A page that is charged as kernel memory may be one of a large kmalloc.
        assert found.ledger.may_miss(kind, None, 2) == (kind != "lru")  # type: ignore[arg-type]
        assert not found.ledger.may_miss(kind, None, NID)  # type: ignore[arg-type]
    assert not found.ledger.may_miss("sock")


class Reads:
    """A slab that readers find things in."""

    def __init__(self, collector: RangeCollector, **more: Any) -> None:
        self.slab = Slab(0x4000, 1, 0, CACHE, 21, 3, None, {ONE: 2}, b"")._replace(**more)
        self.collector: Any = collector
        self.transients = [(ONE, Transient("a memcg", 0x10)), (0, Transient("a map", 0x20))]
        reads: Any = {
            "_slabs": SimpleNamespace(slab=lambda page: self.slab, vector_page=lambda slab: None),
            "_released": SimpleNamespace(
                read=lambda slab: self.transients[:1], children=lambda slab: [0x50, 0x50, 0x60]
            ),
            "_maps": SimpleNamespace(read=lambda slab: self.transients[1:]),
            "_socks": SimpleNamespace(read=lambda slab, memcgs: []),
            "_notify": SimpleNamespace(read=lambda slab, memcgs: []),
            "_owners": owners(),
        }
        for name, reader in reads.items():
            setattr(collector, name, reader)

    def added(self) -> Partial:
        found = Partial()
        self.collector._add_slab_page(found, SimpleNamespace(page=0x4000, nid=1))
        return found


def test_what_is_found_in_a_slab(collector: RangeCollector) -> None:
    reads = Reads(collector)
    found = reads.added()
    assert found.transients == set(reads.transients)
    assert found.files == {FILE}
    assert found.released == {0x50: 2, 0x60: 1}
    assert dict(found.ledger) == {Entry(ONE, "slab", "reclaimable", 1): Amount(400, 2)}
    assert not found.ledger.missing
    (usage,) = found.slabs.usage()
    assert (usage.kfence, usage.objects, usage.inuse) == (False, 21, 3)
    collector._kfence = (0x4000,)  # type: ignore[assignment]
    (usage,) = reads.added().slabs.usage()
    assert usage.kfence


def test_a_slab_of_files_that_is_not_in_the_image(collector: RangeCollector) -> None:
    def lost(slab: Slab) -> set[OpenFile]:
        raise FaultError("not there", 0x1230)

    reads = Reads(collector)
    collector._owners = owners(lost)
    found = reads.added()
    assert missed(found, "compound") == [("files", 0x1230, "not there")]
    assert found.released == {0x50: 2, 0x60: 1}
    collector._owners = None
    assert reads.added().files == set()


def test_obj_cgroups_of_a_slab_that_are_missing(collector: RangeCollector) -> None:
    """The charges on its node, of caches like this one, are not all known."""
    found = Reads(collector, charged=None).added()
    assert found.ledger.missing == {("slab", "reclaimable", 1)}
    assert dict(found.ledger) == {}
    cache = CACHE._replace(reclaimable=False)
    found = Reads(collector, charged=None, cache=cache).added()
    assert found.ledger.missing == {("slab", "unreclaimable", 1)}


def test_vectors_of_slabs(collector: RangeCollector) -> None:
    """One that is inside its slab is not counted."""
    collector._vector_pages = {0x9: (1, True)}
    vector: Any = SimpleNamespace(address=0x9040)
    reads = Reads(collector, vector=vector)
    assert reads.added().vectors == {}
    reads.collector._slabs.vector_page = lambda slab: 0x700
    assert reads.added().vectors == {1: 1}


def test_the_pages_of_vectors_that_are_kept(
    collector: RangeCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be too many. Then all are forgotten, and read again when they are needed."""
    pages: list[int] = []

    def vector_page(page: int) -> tuple[int, bool]:
        pages.append(page)
        return 1, True

    monkeypatch.setattr(ranges, "_MOST_PAGES", 2)
    monkeypatch.setattr(collector, "_vector_page", vector_page)
    found = Partial()
    for address in (0x10000, 0x11000, 0x10040, 0x12000, 0x12080, 0x10000):
        collector._add_vectors(found, 1, [(0x100, address)])
    frames = collector._frames
    numbers = [frames.virt_to_page(a) for a in (0x10000, 0x11000, 0x12000, 0x10000)]
    assert pages == numbers
    assert set(collector._vector_pages) == {0x12, 0x10}
    assert found.vectors == {1: 6}


@pytest.mark.parametrize(
    ("in_pool", "of_kmalloc", "is_of_allocator"),
    [(True, False, True), (False, True, True), (False, False, False)],
)
def test_pages_that_vectors_can_be_on(
    collector: RangeCollector,
    monkeypatch: pytest.MonkeyPatch,
    in_pool: bool,
    of_kmalloc: bool,
    is_of_allocator: bool,
) -> None:
    collector._kfence = (0x40,) if in_pool else ()  # type: ignore[assignment]
    monkeypatch.setattr(ranges, "is_kmalloc_page", lambda image, page: of_kmalloc)
    monkeypatch.setattr(collector._slabs, "page_nid", lambda page: 3)
    assert collector._vector_page(0x40) == (3, is_of_allocator)


def test_compound_pages_that_may_have_other_owners(
    board: Board, collector: RangeCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the ledger after their owners have been read."""
    board.compound(0, 2, data=ONE | KMEM)
    board.put(4, data=TWO | KMEM)
    uses = collector._context.uses
    monkeypatch.setattr(uses, "may_be_of_others", lambda kmem: kmem.compound)
    found = read(collector, board)
    entry = Entry(ONE, "kmem", "other", NID)
    assert found.compound == {board.address(0): (entry, 4 * PAGE)}
    assert dict(found.ledger) == {entry._replace(payer=TWO): Amount(PAGE, 1)}


def test_pages_of_no_known_use_on_a_running_kernel(
    board: Board, collector: RangeCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their owners may be new."""
    board.compound(0, 2, data=ONE | KMEM)
    board.put(4, type="table", data=ONE | KMEM)
    monkeypatch.setattr(Image, "is_moving", True)
    found = read(collector, board)
    entry = Entry(ONE, "kmem", "other", NID)
    assert found.unplaced == {board.address(0): (entry, 4 * PAGE)}
    assert dict(found.ledger) == {entry._replace(detail="table"): Amount(PAGE, 1)}


def test_only_large_kmallocs_are_added_to_cells(
    board: Board, uses: PageUses, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = SlabCells(board.image, {ONE: 0x10}.get)
    collector = RangeCollector(board.image, PassContext(frozenset(), uses, cells=cells))
    large = KmemPage(board.address(0), NID, 2, True, "large_kmalloc", ONE)
    for kmem in (large, large._replace(type="table")):
        collector._add_kmem(Partial(), kmem)
    assert {(key.payer, key.cache): cell.objects for key, cell in cells.cells.items()} == {
        (0x10, -4 * PAGE): 1
    }


def test_a_page_that_is_not_in_the_image_is_not_free(
    board: Board, collector: RangeCollector
) -> None:
    board.free(0, 0)
    assert collector._is_free(board.address(0)) is True
    board.missing = {0}
    assert collector._is_free(board.address(0)) is False


def test_a_list_of_free_pages_that_is_missing(collector: RangeCollector) -> None:
    """A block may be larger than it seems."""
    collector._miss_list(0x1230, "a broken list")
    (found,) = collector._pages.examples
    assert (found.what, found.address, found.reason) == (
        *("list of free pages", 0x1230),
        "a broken list",
    )
    assert collector._ledger.missing == {("kmem", None, None)}


def test_processes(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running kernel is read by one; a pool has as many as it has; else as the image says."""
    image: Any = board.image
    monkeypatch.setattr(image, "jobs", 5)
    assert ranges.jobs_of(image) == 5
    monkeypatch.setattr(image, "pool", SimpleNamespace(workers=7))
    assert ranges.jobs_of(image) == 7
    monkeypatch.setattr(Image, "is_moving", True)
    assert ranges.jobs_of(image) == 1


def test_ranges_that_are_lost(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that ends too early must not pass for one that is done."""
    parts = [PageRange(0, 2), PageRange(2, 4), PageRange(4, 6)]

    def run(function: Any, given: Any) -> Iterator[int]:
        return iter([1, 2])

    image: Any = SimpleNamespace(progress=SimpleNamespace(report=lambda *_: None))
    found = walk_ranges(image, lambda part: part.start, run, parts)
    with pytest.raises(RuntimeError, match="2 of 3 ranges of page frames were collected"):
        list(found)


@pytest.mark.parametrize("jobs", [1, 3])
def test_who_reads_ranges(board: Board, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    """Processes that are forked, if there are several."""
    asked: list[int] = []

    def forked_map(image: Image, number: int) -> Any:
        asked.append(number)
        return map

    parts = [PageRange(0, 2), PageRange(2, 4)]
    monkeypatch.setattr(ranges, "jobs_of", lambda _: jobs)
    monkeypatch.setattr(ranges, "forked_map", forked_map)
    monkeypatch.setattr(ranges, "page_parts", lambda _: parts)
    image: Any = SimpleNamespace(progress=SimpleNamespace(report=lambda *_: None))
    assert list(walk_ranges(image, lambda part: part.start)) == [0, 2]
    assert asked == ([] if jobs == 1 else [jobs])


def test_a_pass_over_nothing(board: Board, uses: PageUses) -> None:
    found = collect_ranges(board.image, PassContext(frozenset(), uses), map, [])
    assert dict(found.ledger) == {}
    assert found.start == 0


def test_how_much_memory_one_process_reads(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 4 GiB: others would have to be started first."""
    monkeypatch.setattr(board.image, "jobs", None)
    monkeypatch.setattr(ranges, "available_cores", lambda: 3)
    for more, jobs in ((0, 1), (1, 3)):
        whole = [PageRange(5, 5 + (4 << 30) // PAGE + more)]
        monkeypatch.setattr(ranges, "page_ranges", lambda _, whole=whole: whole)
        assert ranges.jobs_of(board.image) == jobs


def test_how_large_a_range_is(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 pieces of the memory map."""
    piece = pages_per_piece(board.image)
    monkeypatch.setattr(ranges, "jobs_of", lambda _: 1)
    monkeypatch.setattr(ranges, "page_ranges", lambda _: [PageRange(0, 130 * piece)])
    parts = ranges.page_parts(board.image)
    assert [part.end - part.start for part in parts] == [64 * piece, 64 * piece, 2 * piece]
