# SPDX-License-Identifier: LGPL-2.1-or-later
"""The slabs and large kmallocs of a few page frames, whose ``struct page`` is written here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.page_board import KMEM, NID, ONE, PAGES, TWO, Board

from memcg_inspect.collect import slab_walk
from memcg_inspect.collect.slab_cells import LARGE_KMALLOC, SlabCell, SlabCells
from memcg_inspect.collect.slab_walk import read_slabs
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.slab import Slab, SlabCache
from memcg_inspect.model import Coverage

pytestmark = pytest.mark.image

PAYERS = {ONE: 0x10, TWO: 0x20}
PAGE = 4096


class Walk:
    """
    The pages of a board in two ranges.

    :ivar uses: uses of pages that are neither compound nor marked
    :ivar others: compound pages that are no large kmallocs
    """

    def __init__(self, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
        self.board, self.uses, self.others = board, dict[int, str](), set[int]()
        self.coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
        uses = SimpleNamespace(
            of=lambda kmem, _: (self.uses.get(kmem.page, kmem.type), 1 << kmem.order)
        )
        monkeypatch.setattr(slab_walk, "page_uses", lambda *_: uses)
        monkeypatch.setattr(slab_walk, "compound_pages_of_others", lambda *_: self.others)
        monkeypatch.setattr(slab_walk, "walk_ranges", self._ranges)

    def _ranges(self, image: object, read: Callable[[PageRange], Any]) -> Iterator[Any]:
        start = self.board.start
        for a, b in ((0, 64), (64, PAGES)):
            yield read(PageRange(start + a, start + b))

    def read(self) -> SlabCells:
        return read_slabs(self.board.image, PAYERS.get, self.coverage)


@pytest.fixture
def walk(of_module: Board, monkeypatch: pytest.MonkeyPatch) -> Iterator[Walk]:
    of_module.clear()
    yield Walk(of_module, monkeypatch)
    of_module.image.progress.stop = False


def test_large_kmallocs(walk: Walk) -> None:
    """Charged ones by payer, and all by node. A page of another owner is none."""
    board = walk.board
    board.compound(0, 2, type="large_kmalloc", data=ONE | KMEM)
    board.compound(4, 2, type="large_kmalloc")
    board.compound(64, 1, data=TWO | KMEM)
    board.compound(68, 1, data=TWO | KMEM)
    board.compound(72, 1, data=TWO | KMEM)
    walk.uses = {board.address(64): "large_kmalloc", board.address(68): "large_kmalloc"}
    walk.others = {board.address(68)}
    found = walk.read()
    assert {(key.payer, key.cache, key.nid): cell.bytes for key, cell in found.cells.items()} == {
        (0x10, -4 * PAGE, NID): 4 * PAGE,
        (0x20, -2 * PAGE, NID): 2 * PAGE,
    }
    assert found.nodes[NID, LARGE_KMALLOC]["slab_bytes"] == 8 * PAGE
    assert (walk.coverage["pages"].read, walk.coverage["pages"].unreadable) == (PAGES, 0)


def test_slabs(walk: Walk) -> None:
    """A slab of a cache that is not in the image is counted as unreadable."""
    walk.board.lost_slab(0, 1)
    walk.board.compound(64, 2, type="slab")  # it is being made, and has no cache yet
    found = walk.read()
    assert {cache for cache, _ in found.slabs} == set()
    assert found.nodes[NID, "unreclaimable"]["slab_bytes"] == 4 * PAGE
    assert (walk.coverage["slab"].read, walk.coverage["slab"].unreadable) == (1, 1)


@pytest.mark.parametrize("stop", [False, True])
def test_page_frames_that_could_not_be_read(walk: Walk, stop: bool) -> None:
    walk.board.missing, walk.board.image.progress.stop = {1}, stop
    walk.read()
    pages = walk.coverage["pages"]
    assert pages.read == (0 if stop else PAGES - 64)
    assert pages.unreadable == (2 if stop else 1)
    missed = pages.examples[0]
    assert (missed.what, missed.address) == ("struct pages", walk.board.address(0 if stop else 64))
    assert missed.reason == (STOPPED if stop else "not in the image")


def test_slabs_that_a_session_has_read(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read again. What could be read then counts again, of the same subjects."""
    cells = SlabCells(walk.board.image, PAYERS.get)
    before = {"pages": Coverage(7), "slab": Coverage(5), "lru": Coverage(9)}
    monkeypatch.setattr(slab_walk, "kept_slabs", lambda _: (cells, before))
    monkeypatch.setattr(slab_walk, "walk_ranges", None)
    assert walk.read() is cells
    assert {subject: found.read for subject, found in walk.coverage.items() if found.read} == {
        "pages": 7,
        "slab": 5,
    }


def test_the_name_of_a_cache_may_be_missing(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    part = slab_walk._Part(SlabCells(walk.board.image, PAYERS.get), Coverage(), Coverage(), {})
    parts = [part._replace(unnamed={at: "why"}) for at in (0x40, 0x80, 0x40)]
    monkeypatch.setattr(slab_walk, "walk_ranges", lambda *_: parts)
    walk.read()
    assert [(missed.what, missed.address) for missed in walk.coverage["names"].examples] == [
        ("name of a kmem_cache", 0x40),
        ("name of a kmem_cache", 0x80),
    ]


def test_objects_of_kfence_are_in_no_counter_of_slabs(board: Board) -> None:
    """They are charged as others of their cache are."""
    cache = SlabCache(0x1000, "kmalloc-cg-64", 64, 64, 0, False, 72, True)
    slab = Slab(board.address(0), NID, 0, cache, 1, 0, None, {ONE: 1}, b"")
    cells = SlabCells(board.image, PAYERS.get)
    cells._kfence = (slab.page,)  # type: ignore[assignment]
    cells.add(slab)
    wanted = SlabCell(objects=1, bytes=64, charged=72)
    assert cells.cells == {(0x10, cache.address, NID): wanted}
    assert (cells.nodes, cells.slabs, cells.unread) == ({}, {}, {})
