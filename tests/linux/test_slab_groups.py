# SPDX-License-Identifier: LGPL-2.1-or-later
"""Slabs are added up by cache and node: the same is found as with a read for each slab."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from support.guests import KERNELS, PERNODE_KERNELS, GuestImage, Lab
from support.missing_pages import without

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mm_types_slabs import SlabPage, SlabPages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabReader
from memcg_inspect.linux.mm.slab_groups import SlabGroupReader

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]


@pytest.fixture(scope="module", params=[*KERNELS, *PERNODE_KERNELS])
def guest(request: pytest.FixtureRequest, lab: Lab) -> GuestImage:
    return lab.image(request.param, "4", "mixed")


def nobody(cache: SlabCache) -> bool:
    return False


class Sums:
    """Sums over slabs, by cache and node, and what the slabs that are not in them are."""

    def __init__(self) -> None:
        self.numbers: Counter[tuple[int, int, str]] = Counter()
        self.charged: Counter[tuple[int, int, int]] = Counter()
        self.outside: set[tuple[int, int]] = set()
        self.others: list[SlabPage] = []
        self.reads = 0

    def add(self, cache: SlabCache, nid: int, numbers: dict[str, int]) -> None:
        for name, number in numbers.items():
            self.numbers[cache.address, nid, name] += number


def pieces(image: Image) -> list[SlabPages]:
    return [piece.slabs for piece in scan_pages(image) if piece.slabs]


def grouped(image: Image, is_alone: Callable[[SlabCache], bool] = nobody) -> Sums:
    found, slabs = Sums(), SlabReader(image)
    reader = SlabGroupReader(image, slabs, is_alone)
    before = image.memory.reads
    for some in pieces(image):
        groups, others = reader.read(some)
        found.others += others
        for group in groups:
            numbers = {
                "slabs": group.slabs,
                "pages": group.pages,
                "objects": group.objects,
                "inuse": group.inuse,
            }
            found.add(group.cache, group.nid, numbers)
            for objcg, count in group.charged.items():
                found.charged[group.cache.address, group.nid, objcg] += count
            found.outside |= set(group.outside)
    found.reads = image.memory.reads - before
    return found


def one_by_one(image: Image, pages: Iterable[SlabPage]) -> Sums:
    found, reader = Sums(), SlabReader(image)
    before = image.memory.reads
    for page in pages:
        slab = reader.slab(page)
        assert slab is not None
        add(found, reader, slab)
    found.reads = image.memory.reads - before
    return found


def add(found: Sums, reader: SlabReader, slab: Slab) -> None:
    numbers = {
        "slabs": 1,
        "pages": 1 << slab.order,
        "objects": slab.objects,
        "inuse": slab.inuse,
    }
    found.add(slab.cache, slab.nid, numbers)
    for one in reader.charged_objects(slab):
        found.charged[slab.cache.address, slab.nid, one.objcg] += 1
    if slab.vector is not None and reader.vector_page(slab) is not None:
        found.outside.add((slab.page, slab.vector.address))


def test_groups_have_what_their_slabs_have(guest: GuestImage) -> None:
    image = image_of(guest.program())
    found = grouped(image)
    left = {page.page for page in found.others}
    grouped_pages = [page for some in pieces(image) for page in some if page.page not in left]
    expected = one_by_one(image, grouped_pages)
    assert found.numbers == expected.numbers
    assert found.charged == expected.charged
    assert found.outside == expected.outside
    # Only slabs without objects, and those of KFENCE, are left.
    reader = SlabReader(image)
    for page in found.others:
        slab = reader.slab(page)
        assert slab is not None
        assert not slab.objects or page.page in kfence_pages(image)
    assert len(grouped_pages) > 1000
    assert found.reads < expected.reads


def test_slabs_of_some_caches_are_left_out(guest: GuestImage) -> None:
    def is_alone(cache: SlabCache) -> bool:
        return cache.name.startswith("kmalloc")

    image = image_of(guest.program())
    found = grouped(image, is_alone)
    names = {cache.name for cache in _caches(image, found.others)}
    assert any(name.startswith("kmalloc") for name in names)
    reader = SlabReader(image)
    in_groups = {reader.cache(cache).name for cache, _, _ in found.numbers}
    assert in_groups
    assert not any(name.startswith("kmalloc") for name in in_groups)


def _caches(image: Image, pages: Iterable[SlabPage]) -> list[SlabCache]:
    reader = SlabReader(image)
    return [slab.cache for page in pages if (slab := reader.slab(page)) is not None]


def test_only_slabs_near_a_missing_vector_are_left_out(guest: GuestImage) -> None:
    image = image_of(guest.program())
    whole = grouped(image)
    reader, frames = SlabReader(image), mem_map(image)
    slabs = (reader.slab(page) for some in pieces(image) for page in some)
    vector = next(slab.vector for slab in slabs if slab and slab.charged and slab.vector)
    damaged = image_of(without(guest, [frames.pfn(frames.virt_to_page(vector.address))]))
    found = grouped(damaged)
    left = {p.page for p in found.others} - {p.page for p in whole.others}
    assert left
    reader = SlabReader(damaged)
    unread = 0
    for page in found.others:
        slab = reader.slab(page)
        unread += slab is not None and slab.charged is None
    assert unread
    assert reader.coverage.unreadable >= unread
    total = sum(found.numbers[key] for key in found.numbers if key[2] == "slabs")
    before = sum(whole.numbers[key] for key in whole.numbers if key[2] == "slabs")
    assert total + len(left) == before
