# SPDX-License-Identifier: LGPL-2.1-or-later
"""What lies before memory that was overwritten: an object of a slab, or a percpu allocation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from drgn import Object, cast
from drgn.helpers.linux.mm import page_to_virt, virt_to_pfn
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.slab import (
    find_slab_cache,
    slab_cache_for_each_allocated_object,
    slab_object_info,
)
from support.guests import Lab
from support.reference import node_spans, object_objcg

from memcg_inspect.collect.neighbours import with_neighbours
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.report import Diagnosis, Evidence

pytestmark = pytest.mark.image


@pytest.fixture(scope="module")
def image(lab: Lab) -> Image:
    # With debug info, which drgn's helpers of slabs need.
    return image_of(lab.image("7.3", "4", "mixed").program(dwarf=True))


def overwritten(address: int, cause: str = "overwritten") -> Diagnosis:
    return Diagnosis(
        cause=cause,
        what="something",
        confidence="likely",
        memcgs=(),
        nid=None,
        amount=8,
        unit="bytes",
        evidence=(Evidence(address=address, kind="counters"),),
        evidence_total=7,
    )


def before(image: Image, address: int) -> Evidence | None:
    """Return what is said to lie before an address."""
    given = overwritten(address)
    (found,) = with_neighbours(image, [given])
    if found == given:
        return None
    assert found.evidence[:-1] == given.evidence
    assert found.evidence_total is None
    return found.evidence[-1]


def objects(image: Image) -> Iterator[Object]:
    """Return allocated objects of a cache that the kernel charges."""
    cache = find_slab_cache(image.prog, "vm_area_struct")
    yield from slab_cache_for_each_allocated_object(cache, "struct vm_area_struct")


class Place(NamedTuple):
    """Where an object is."""

    found: Object
    slab: Object
    size: int
    index: int

    @classmethod
    def of(cls, found: Object) -> Place:
        """Return the place of an object of a slab."""
        info = slab_object_info(found)
        assert info is not None
        start = page_to_virt(cast("struct page *", info.slab)).value_()
        size = info.slab_cache.size.value_()
        return cls(found, info.slab, size, (found.value_() - start) // size)

    def objcg_before(self) -> int:
        """Return the obj_cgroup that is charged for the object before this one."""
        return object_objcg(self.slab, self.slab.slab_cache, self.index - 1)


def test_the_object_before_one_in_the_same_slab(image: Image) -> None:
    """drgn tells whether that one is free. Where a slab begins, nothing is known before it."""
    spans, places = node_spans(image.prog), [Place.of(found) for found in objects(image)]
    first = next(place for place in places if not place.index)
    charged = next(place for place in places if place.index and place.objcg_before())
    for place in (first, charged, *places[::20]):
        address = place.found.value_()
        inner, exact = before(image, address + 20), before(image, address)
        if not place.index:
            assert inner is exact is None
            continue
        other = slab_object_info(Object(image.prog, "void *", address - place.size))
        assert other is not None
        state = "allocated" if other.allocated else "free"
        pfn = virt_to_pfn(place.found).value_()
        expected = Evidence(
            address=address - place.size,
            kind="slab",
            nid=next(nid for start, end, nid in spans if start <= pfn < end),
            cache="vm_area_struct",
            objcg=place.objcg_before() or None,
            note=f"{state}, directly before the range",
        )
        assert exact == expected
        begins = "before the range, which begins 20 bytes into the next one"
        assert inner == replace(expected, note=f"{state}, {begins}")


def test_the_percpu_allocation_before_one(image: Image) -> None:
    """The allocations of a chunk are next to each other, or free memory is between them."""
    reader = PercpuReader(image)
    tight = loose = 0
    for chunk in reader.chunks():
        areas = list(reader.allocations(chunk))
        for first, second in zip(areas, areas[1:], strict=False):
            if (tight > 2 and loose > 2) or not second.offset:
                continue
            pointer = Object(image.prog, "void *", reader.pointer(second))
            copy = per_cpu_ptr(pointer, 1).value_()
            found = before(image, copy + 3)
            begins = "before the range, which begins 3 bytes into the next one"
            assert found is not None
            assert found.kind == "percpu"
            if first.offset + first.size < second.offset:
                assert found == Evidence(
                    address=copy - 1, kind="percpu", note=f"free percpu memory, {begins}"
                )
                loose += 1
                continue
            assert found == Evidence(
                address=copy - first.size,
                kind="percpu",
                bytes=first.size,
                objcg=first.objcg or None,
                note=f"copy of CPU 1, {begins}",
            )
            tight += 1
    assert tight > 2
    assert loose > 2


def test_other_causes_have_no_neighbours(image: Image) -> None:
    found = next(objects(image)).value_()
    other = overwritten(found, "object-owner")
    assert with_neighbours(image, [other]) == (other,)
    both = with_neighbours(image, [other, overwritten(0x1000)])
    assert both == (other, overwritten(0x1000))  # nothing is known before an address of nobody
    assert with_neighbours(image, []) == ()
