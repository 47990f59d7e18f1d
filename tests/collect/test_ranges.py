# SPDX-License-Identifier: LGPL-2.1-or-later
"""The pass over all page frames gives the same result for any split into ranges and any order."""

from __future__ import annotations

import pickle
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest
from support.guests import Lab
from support.missing_pages import excluded, opened

from memcg_inspect.collect.page_uses import PageUses
from memcg_inspect.collect.partial import Partial, merged
from memcg_inspect.collect.ranges import PassContext, RangeCollector, collect_ranges
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.memcontrol import read_memcgs
from memcg_inspect.linux.mm.mm_types import page_layout, scan_pages, scan_range
from memcg_inspect.linux.mm.mmzone import PageRange, mem_map, page_ranges
from memcg_inspect.linux.net.sock import socket_caches
from memcg_inspect.model import Coverage

pytestmark = pytest.mark.image


class Whole(NamedTuple):
    """An image, and the result of one pass over all of it."""

    core: Path
    image: Image
    context: PassContext
    found: Partial
    #: Page frames of heads of compound pages.
    heads: list[int]


@pytest.fixture(scope="module", params=["6.1", "7.3"])
def whole(request: pytest.FixtureRequest, lab: Lab) -> Whole:
    core = lab.image(request.param, "4", "mixed").core
    image = image_of(opened(core))
    made = PassContext(
        memcgs=frozenset(read_memcgs(image, Coverage())),
        uses=PageUses(image, defaultdict(Coverage)),
        protocols=socket_caches(image, Coverage()),
    )
    frames = mem_map(image)
    heads = [
        frames.pfn(piece.raw.page) + i
        for piece in scan_pages(image)
        if piece.raw is not None
        for i in piece.raw.orders
    ]
    found = collect_ranges(image, made, parts=page_ranges(image))
    assert len(found.ledger) > 20
    assert found.coverage["slab"].read > 1000
    return Whole(core, image, made, found, heads)


def cut(ranges: Sequence[PageRange], cuts: set[int]) -> Iterator[PageRange]:
    for start, end in ranges:
        edges = [start, *sorted(c for c in cuts if start < c < end), end]
        for first, last in zip(edges, edges[1:], strict=False):
            yield PageRange(first, last)


def split(whole: Whole, seed: int) -> list[PageRange]:
    """Split at random, inside compound pages, and into ranges of two page frames."""
    chance, ranges = random.Random(seed), page_ranges(whole.image)
    cuts = {chance.randrange(r.start, r.end) & ~1 for r in ranges for _ in range(30)}
    for head in chance.sample(whole.heads, 40):
        cuts |= {head, head + 2, head + 4}
    return list(cut(ranges, cuts))


def differing(a: Partial, b: Partial) -> list[str]:
    return [f.name for f in fields(Partial) if getattr(a, f.name) != getattr(b, f.name)]


@pytest.mark.parametrize("seed", range(4))
def test_any_split_finds_the_same(whole: Whole, seed: int) -> None:
    parts = split(whole, seed)
    assert len(parts) > 100
    assert differing(collect_ranges(whole.image, whole.context, parts=parts), whole.found) == []


def test_a_split_costs_few_reads_for_each_range(whole: Whole) -> None:
    """A border of ranges cuts reads of the memory map and of vectors in two."""
    reads = []
    for parts in (page_ranges(whole.image), split(whole, 7)):
        collector, before = RangeCollector(whole.image, whole.context), whole.image.memory.reads
        for part in parts:
            collector(part)
        reads.append(whole.image.memory.reads - before)
    assert reads[1] <= reads[0] + 4 * len(split(whole, 7))


def test_partials_merge_in_any_order_and_grouping(whole: Whole) -> None:
    collector, chance = RangeCollector(whole.image, whole.context), random.Random(3)
    found = [pickle.dumps(collector(part)) for part in split(whole, 5)]
    for _ in range(3):
        partials = [pickle.loads(data) for data in found]
        chance.shuffle(partials)
        while len(partials) > 1:
            first = partials.pop(chance.randrange(len(partials)))
            partials[chance.randrange(len(partials))].merge(first)
        assert differing(merged([Partial(), *partials]), whole.found) == []


def test_a_pickled_partial_is_the_same(whole: Whole) -> None:
    assert differing(pickle.loads(pickle.dumps(whole.found)), whole.found) == []


_collector: RangeCollector | None = None


def _begin(core: Path, context: bytes) -> None:
    global _collector
    _collector = RangeCollector(image_of(opened(core)), pickle.loads(context))


def _work(part: PageRange) -> Partial:
    assert _collector is not None
    return _collector(part)


def test_processes_that_open_the_image_themselves_find_the_same(whole: Whole) -> None:
    arguments = (whole.core, pickle.dumps(whole.context))
    with ProcessPoolExecutor(2, get_context("fork"), _begin, arguments) as pool:
        found = collect_ranges(
            whole.image,
            whole.context,
            lambda _, parts: pool.map(_work, parts),
            split(whole, 1),
        )
    assert differing(found, whole.found) == []


def test_missing_pages_of_the_memory_map_count_once(whole: Whole) -> None:
    """Cuts between two pages of the memory map do not change what is missing."""
    image, chance = image_of(opened(whole.core)), random.Random(11)
    frames = mem_map(image)
    per_page = frames.page_size // frames.size

    ranges = page_ranges(image)
    for _ in range(20):
        part = chance.choice(ranges)
        pfn = chance.randrange(part.start // per_page, part.end // per_page) * per_page
        image.prog.add_memory_segment(frames.page(pfn), frames.page_size, excluded, False)
    one = collect_ranges(image, whole.context, parts=ranges)
    cuts = {
        chance.randrange(r.start // per_page + 1, r.end // per_page) * per_page
        for r in ranges
        for _ in range(20)
    }
    many = collect_ranges(image, whole.context, parts=list(cut(ranges, cuts)))
    # A list of free pages may end in one of them, and then counts, too.
    assert one.coverage["pages"].unreadable >= 10
    assert many.coverage["pages"].unreadable == one.coverage["pages"].unreadable
    assert differing(many, one) == []
    assert one.ledger.may_miss("slab")


def test_fake_heads_of_an_earlier_range_are_no_heads(lab: Lab) -> None:
    """
    A hugetlb page with optimized vmemmap: the first page of the ``struct page`` of its tails
    is mapped again in place of the others (``vmemmap_remap_pte()``).
    """
    image = image_of(opened(lab.image("6.1", "4", "mixed").core))
    frames, layout, memory = mem_map(image), page_layout(image), image.memory
    assert layout.has_fake_heads
    per_page, pages = frames.page_size // frames.size, 512
    start = max(page_ranges(image), key=lambda r: r.end - r.start).start + pages
    start += -start % pages
    address, payer = frames.page(start), 0xFFFF888012345000

    def struct_page(flags: int, info: int, memcg_data: int) -> bytearray:
        data = bytearray(frames.size)
        for at, word in ((layout.info, info), (layout.memcg_data, memcg_data)):
            data[at : at + 8] = word.to_bytes(8, "little")
        data[frames.flags : frames.flags + 8] = flags.to_bytes(8, "little")
        return data

    head, tail = struct_page(0, 0, payer), struct_page(0, address + 1, 0)
    head[layout.head.offset] |= layout.head.value
    second = tail.copy()
    second[layout.order] = 9
    first_page = bytes(head + second + tail * (per_page - 2))
    remapped = first_page * (pages // per_page)

    def read(at: int, count: int, offset: int, physical: bool) -> bytes:
        return remapped[offset : offset + count]

    image.prog.add_memory_segment(address, len(remapped), read, False)
    assert memory.read(address, frames.size) == bytes(head)

    def charged(*cuts: int) -> int:
        parts = cut([PageRange(start, start + 2 * pages)], {start + c for c in cuts})
        return sum(
            lru.pages
            for part in parts
            for piece in scan_range(image, part)
            for lru in piece.lru
            if lru.payer == payer
        )

    assert charged() == 512
    for cuts in ((64,), (62,), (66,), (128, 130, 192), (448, 510), tuple(range(2, 512, 2))):
        assert charged(*cuts) == 512


def test_no_range_is_left_out(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    """A StopIteration inside map() would end it as if there were no more ranges."""
    parts = split(whole, 1)

    def some(collector: RangeCollector, ranges: Iterable[PageRange]) -> Iterator[Partial]:
        return map(collector, list(ranges)[:-1])

    with pytest.raises(RuntimeError, match=f"{len(parts) - 1} of {len(parts)} ranges"):
        collect_ranges(whole.image, whole.context, some, parts)
    monkeypatch.setattr(RangeCollector, "_count_piece", lambda *_: next(iter(())))
    with pytest.raises(RuntimeError, match=f"0 of {len(parts)} ranges"):
        collect_ranges(whole.image, whole.context, parts=parts)
