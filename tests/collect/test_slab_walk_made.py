# SPDX-License-Identifier: LGPL-2.1-or-later
"""A walk over slabs and large kmallocs that are made here, and the sums of their cells."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.layouts import FRAMES

from memcg_inspect.collect import slab_cells, slab_walk
from memcg_inspect.collect.slab_cells import (
    LARGE_KMALLOC,
    UNKNOWN_PAYER,
    SlabCell,
    SlabCells,
    SlabKey,
)
from memcg_inspect.collect.slab_walk import read_slabs
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.mm.mm_types import KmemPage
from memcg_inspect.linux.mm.mm_types_orders import WrongOrder
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.slab import Slab, SlabCache
from memcg_inspect.model import Coverage

PAGE = FRAMES.page_size
ONE, TWO, LOST = 0xA0, 0xB0, 0xC0
PAYERS = {ONE: 0x10, TWO: 0x20}
CACHE = SlabCache(0x900, "dentry", 200, 192, 0, True, 208, True)
IMAGE: Any = SimpleNamespace(progress=SimpleNamespace(stop=False))
SUBJECTS = ("vmalloc", "stacks", "compound", "pages", "slab")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_cells, "mem_map", lambda _: FRAMES)
    monkeypatch.setattr(slab_cells, "kfence_pages", lambda _: (0x777,))


def slab(charged: Any, inuse: int = 5, **more: Any) -> Slab:
    return Slab(0x40, 1, 1, CACHE, 40, inuse, None, charged, b"")._replace(**more)


def cells_of(*slabs: Slab) -> SlabCells:
    cells = SlabCells(IMAGE, PAYERS.get)
    for each in slabs:
        cells.add(each)
    return cells


def test_a_slab_of_several_payers() -> None:
    """Objects that nobody pays for are those in use that are not charged."""
    cells = cells_of(slab({ONE: 2, TWO: 1}))
    one = SlabCell(
        objects=2, bytes=400, charged=416, in_slabs=400, slabs=1, pages=2, room=8000,
        shared=1, others={0x10, 0x20, None},
    )  # fmt: skip
    others = {"in_slabs": 200, "slabs": 1, "pages": 2, "room": 8000, "shared": 1}
    two = SlabCell(objects=1, bytes=200, charged=208, others=one.others, **others)  # type: ignore[arg-type]
    nobody = SlabCell(
        objects=2, bytes=400, in_slabs=400, slabs=1, pages=2, room=8000, shared=1,
        others=one.others,
    )  # fmt: skip
    assert cells.cells == {
        SlabKey(0x10, 0x900, 1): one,
        SlabKey(0x20, 0x900, 1): two,
        SlabKey(None, 0x900, 1): nobody,
    }
    assert cells.slabs == {(0x900, 1): SlabCell(slabs=1, pages=2, room=8000)}
    assert cells.nodes == {(1, "reclaimable"): Counter(slab_bytes=2 * PAGE, paid=600, unpaid=400)}
    assert cells.caches == {0x900: CACHE}
    assert cells.are_all_known


@pytest.mark.parametrize(("inuse", "unpaid"), [(2, 0), (1, 0), (3, 200)])
def test_a_slab_of_one_payer(inuse: int, unpaid: int) -> None:
    """It may have more charged objects than are in use: CPUs keep some."""
    cells = cells_of(slab({ONE: 2}, inuse))
    assert cells.nodes[1, "reclaimable"]["unpaid"] == unpaid
    assert cells.cells[SlabKey(0x10, 0x900, 1)].shared == bool(unpaid)
    assert (SlabKey(None, 0x900, 1) in cells.cells) == bool(unpaid)


def test_an_empty_slab() -> None:
    cells = cells_of(slab({}, 0, cache=CACHE._replace(reclaimable=False)))
    assert (cells.cells, cells.slabs, cells.unread) == ({}, {}, {})
    assert +cells.nodes[1, "unreclaimable"] == {"slab_bytes": 2 * PAGE}


def test_a_slab_whose_obj_cgroups_are_missing() -> None:
    cells = cells_of(slab(None, 3))
    assert cells.cells == {}
    assert cells.unread == {(0x900, 1): SlabCell(objects=3, bytes=600, in_slabs=600)}
    assert cells.nodes[1, "reclaimable"]["unknown"] == 1
    assert cells.slabs == {(0x900, 1): SlabCell(slabs=1, pages=2, room=8000)}
    assert not cells.are_all_known


def test_payers_that_are_not_known() -> None:
    """Each obj_cgroup is looked up once."""
    asked: list[int] = []

    def payer(objcg: int) -> int | None:
        asked.append(objcg)
        return PAYERS.get(objcg)

    cells = SlabCells(IMAGE, payer)
    for charged in ({ONE: 1}, {LOST: 1}, {ONE: 1}, {LOST: 2}):
        cells.add(slab(charged, 1))
        assert cells.has_unknown == (LOST in asked)
    assert asked == [ONE, LOST]
    assert cells.cells[SlabKey(UNKNOWN_PAYER, 0x900, 1)].objects == 3
    assert not cells.are_all_known
    other = cells_of()
    other.merge(cells)
    assert other.has_unknown
    assert other.caches == cells.caches
    assert cells.__getstate__()["_payer_of"] is None


def test_large_kmallocs() -> None:
    cells = cells_of()
    cells.add_larges(ONE, 1, 4, 3)
    cells.add_large(KmemPage(0x40, 1, 2, True, "", TWO), 2)
    cells.add_all_large(SimpleNamespace(large_kmalloc={1: 20, 2: 1}))  # type: ignore[arg-type]
    size = 4 * PAGE
    assert cells.cells[SlabKey(0x10, -size, 1)] == SlabCell(
        objects=3, bytes=3 * size, charged=3 * size, in_slabs=3 * size, slabs=3, pages=12,
        room=3 * size, has_large=True,
    )  # fmt: skip
    assert cells.cells[SlabKey(0x20, -2 * PAGE, 1)].pages == 2
    assert cells.nodes[1, LARGE_KMALLOC] == {"paid": 14 * PAGE, "slab_bytes": 20 * PAGE}
    cells.nodes[3, LARGE_KMALLOC] = Counter(paid=PAGE, slab_bytes=PAGE)
    cells.nodes[4, "reclaimable"] = Counter(slab_bytes=PAGE)

    def unpaid(pages: int) -> SlabCell:
        of = pages * PAGE
        return SlabCell(
            bytes=of, in_slabs=of, pages=pages, room=of, has_large=True, has_uncounted=True
        )

    assert cells.unpaid_large() == {1: unpaid(6), 2: unpaid(1)}


class Walk:
    """A walk over two ranges."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
        self.kept: Any = None
        self.lost: tuple[str, int, str] | None = None
        self.pieces: dict[int, list[Any]] = {0: [], 8: []}
        self.slabs = SimpleNamespace(slab=self._slab, unnamed={0x900: "why"}, coverage=Coverage())
        for name, value in {
            "kept_slabs": lambda _: self.kept,
            "page_uses": self._page_uses,
            "compound_pages_of_others": self._others,
            "SlabReader": lambda _: self.slabs,
            "BlockReader": lambda _: "blocks",
            "walk_ranges": self._ranges,
            "scan_range": lambda image, part: self.pieces[part.start],
            "miss_lost_pages": lambda _, pages: self.lost and pages.miss(*self.lost),
        }.items():
            monkeypatch.setattr(slab_walk, name, value)

    def _page_uses(self, image: Any, coverage: Any) -> Any:
        coverage["vmalloc"].read += 3

        def of(kmem: KmemPage, blocks: Any) -> tuple[str, int]:
            assert blocks == "blocks"
            return kmem.type, 4

        return SimpleNamespace(of=of)

    def _others(self, image: Any, coverage: Coverage) -> set[int]:
        coverage.read += 4
        return {0x700}

    def _slab(self, page: Any) -> Slab | None:
        self.slabs.coverage.read += 1
        return None if page is None else slab({ONE: 1}, 1, page=page)

    def _ranges(self, image: Any, read: Callable[[PageRange], Any]) -> Iterator[Any]:
        return map(read, (PageRange(0, 8), PageRange(8, 16)))

    def read(self) -> SlabCells:
        return read_slabs(IMAGE, PAYERS.get, self.coverage)


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> Walk:
    return Walk(monkeypatch)


def piece(pages: int, slabs: Any = (), kmem: Any = (), large: Any = None) -> Any:
    return SimpleNamespace(
        pages=pages, unreadable=None, slabs=slabs, kmem=kmem, large_kmalloc=large or {}, wrong=()
    )


def test_what_a_walk_finds(walk: Walk) -> None:
    """Slabs of caches that are missing are no slabs here; each subject counts once."""
    kmem = KmemPage(0x40, 1, 2, True, "large_kmalloc", TWO)
    walk.pieces = {
        0: [piece(5, [0x100, None], [kmem, kmem._replace(page=0x700, nid=3)]), piece(3)],
        8: [piece(8, [0x200], [kmem._replace(type="stack")], {1: 9})],
    }
    found = walk.read()
    assert found.cells[SlabKey(0x10, 0x900, 1)].slabs == 2
    assert found.cells[SlabKey(0x20, -4 * PAGE, 1)].objects == 1
    assert len(found.cells) == 2
    assert found.nodes[1, LARGE_KMALLOC]["slab_bytes"] == 9 * PAGE
    assert {subject: part.read for subject, part in walk.coverage.items() if part.read} == {
        "vmalloc": 3,
        "compound": 4,
        "pages": 16,
        "slab": 3,
    }
    (missed,) = walk.coverage["names"].examples
    assert (missed.what, missed.address, missed.reason) == ("name of a kmem_cache", 0x900, "why")


@pytest.mark.parametrize("stop", [False, True])
def test_page_frames_that_could_not_be_read(
    walk: Walk, monkeypatch: pytest.MonkeyPatch, stop: bool
) -> None:
    lost = piece(0)
    lost.unreadable = 0x800
    walk.pieces = {0: [lost, piece(3)], 8: []}
    monkeypatch.setattr(IMAGE.progress, "stop", stop)
    walk.read()
    (missed,) = walk.coverage["pages"].examples
    assert (missed.what, missed.address) == ("struct pages", 0x800)
    assert missed.reason == (STOPPED if stop else "not in the image")
    assert walk.coverage["pages"].read == 3


def test_pages_that_are_not_in_the_memory_map(walk: Walk) -> None:
    walk.lost = ("memory map of a zone", 0x900, "why")
    walk.read()
    (missed,) = walk.coverage["pages"].examples
    assert (missed.what, missed.address, missed.reason) == walk.lost


def test_a_compound_page_that_says_no_order(walk: Walk) -> None:
    """It hides slabs if it is one, and large kmallocs if it is charged as kernel memory."""
    damaged = piece(3)
    damaged.wrong = [
        WrongOrder(0x800 + n, 1, 35, "it is damaged", kind)
        for n, kind in enumerate(("slab", "kmem", "lru", None))
    ]
    walk.pieces = {0: [damaged], 8: []}
    walk.read()
    missed = walk.coverage["pages"].examples
    assert [(one.what, one.address) for one in missed] == [
        ("order of a compound page", 0x800),
        ("order of a compound page", 0x801),
    ]
    assert {one.reason for one in missed} == {damaged.wrong[0].reason}


def test_an_object_of_kfence() -> None:
    """It is charged, and in no slab of its cache."""
    cells, total = cells_of(slab({ONE: 1}, 0, page=0x777)), cells_of()
    for _ in range(2):
        total.merge(cells)
    assert cells.cells == {SlabKey(0x10, 0x900, 1): SlabCell(objects=1, bytes=200, charged=208)}
    assert total.cells == {SlabKey(0x10, 0x900, 1): SlabCell(objects=2, bytes=400, charged=416)}
    assert (total.nodes, total.slabs) == ({}, {})


def test_what_an_earlier_command_has_read(walk: Walk) -> None:
    """All that it needed counts again, as far as there is any."""
    cells = cells_of()
    walk.kept = cells, {subject: Coverage(n) for n, subject in enumerate((*SUBJECTS, "lru"), 1)}
    assert walk.read() is cells
    assert {subject: part.read for subject, part in walk.coverage.items()} == {
        subject: n for n, subject in enumerate(SUBJECTS, 1)
    }
    walk.coverage.clear()
    walk.kept = cells, {}
    assert walk.read() is cells
    assert not any(part.read for part in walk.coverage.values())
