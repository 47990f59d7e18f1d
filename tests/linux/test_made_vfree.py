# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Vmalloc areas that a task counts or frees, in memory made by hand.

``tests/linux/test_vmalloc.py`` has areas of images.
"""

from __future__ import annotations

import pytest
from support.layouts import FRAMES, NODE_1
from support.made_pages import NO_TYPE, TYPES, kernel_with_pages, put, put_compound

from memcg_inspect.linux.mm import vmalloc_vfree
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.vmalloc_vfree import PartialAreaReader
from memcg_inspect.model import PagesOfArea, PartialArea

VM, ARRAY, MISSING = 0xFFFF888030000000, 0xFFFF888031000000, 0xFFFF888077700000
START, PAGE = 0xFFFFC90000000000, 4096
VM_ALLOC, VM_MAP_PUT_PAGES = 0x2, 0x200
PAYER, OTHER = 0xFFFF888000111000, 0xFFFF888000222000
#: Pages of the machine, the last of which are a compound page.
MOST = 32
#: ``struct vm_struct`` of 6.12 and of 7.2
STRUCTS = {
    "6.12": "unsigned int nr_pages; unsigned int other;",
    "7.2": "unsigned long nr_pages;",
}


class Kernel:
    """
    :ivar linked: the ``struct vm_struct *`` of areas on lists
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, release: str = "7.2") -> None:
        self.image = image = kernel_with_pages(TYPES["7.1"])
        image.declare(
            f"""
            struct vm_struct {{ struct vm_struct *next; void *addr; unsigned long size;
                               unsigned long flags; struct page **pages; {STRUCTS[release]} }};
            """
        )
        self.linked: set[int] = set()
        for pfn in range(MOST):
            put(image, pfn, 0, NO_TYPE, PAYER | 2)
        ranges = [PageRange(0, MOST // 2), PageRange(MOST // 2, MOST)]
        end = FRAMES.page(MOST)
        monkeypatch.setattr(vmalloc_vfree, "linked_areas", lambda image: frozenset(self.linked))
        monkeypatch.setattr(vmalloc_vfree, "page_ranges", lambda image: ranges)
        monkeypatch.setattr(
            vmalloc_vfree,
            "page_at",
            lambda image, at: at - at % 64 if FRAMES.base <= at < end else None,
        )

    def area(self, count: int = 4, **members: int) -> None:
        given = {"addr": START, "size": (count + 1) * PAGE, "flags": VM_ALLOC, "pages": ARRAY}
        self.image.make("struct vm_struct", VM, given | {"nr_pages": count} | members)
        self.image.words(ARRAY, *(FRAMES.page(pfn) for pfn in range(count)))

    def read(self, *words: int) -> PartialArea | None:
        found = PartialAreaReader(self.image).read([VM], words)
        assert len(found) < 2
        return found[0] if found else None

    def left(self) -> tuple[tuple[PagesOfArea, ...], tuple[int, ...]]:
        found = self.read()
        assert found is not None
        return found.left, found.stops


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


@pytest.mark.parametrize("release", STRUCTS)
def test_an_area(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, release)
    kernel.area(**{"other": 1} if release == "6.12" else {})
    runs = (PagesOfArea(PAYER, 0, 4),)
    assert kernel.read() == PartialArea(VM, 4, False, True, runs, (0, 4))
    kernel.area(flags=VM_ALLOC | VM_MAP_PUT_PAGES)
    assert kernel.read() == PartialArea(VM, 4, False, False, runs, (0, 4))


def test_areas_among_other_objects(kernel: Kernel) -> None:
    """Each is read once. What cannot be read is none."""
    kernel.area()
    reader = PartialAreaReader(kernel.image)
    found = reader.read([MISSING, VM, MISSING + 8, VM], [])
    assert [area.address for area in found] == [VM]
    kernel.area(pages=MISSING)
    assert kernel.read() is None


@pytest.mark.parametrize("counts_each", [False, True])
def test_areas_on_a_list(kernel: Kernel, counts_each: bool) -> None:
    """Since 7.1 their pages are counted."""
    if counts_each:
        kernel.image.enum(None, NR_VMALLOC=7)
    kernel.area()
    kernel.linked = {VM}
    found = kernel.read()
    assert (found is None) == counts_each
    assert found is None or found.is_linked
    kernel.linked = {VM + 64}
    found = kernel.read()
    assert found is not None and not found.is_linked


def test_objects_that_are_no_areas(kernel: Kernel) -> None:
    members = (
        {"flags": 0xFFFFFFFF & ~VM_ALLOC},
        {"pages": 0},
        {"addr": START + 8},
        {"size": 5 * PAGE + 8},
        {"nr_pages": 0},
        {"nr_pages": 5, "size": 4 * PAGE},
    )
    for wrong in members:
        kernel.area(**wrong)
        assert kernel.read() is None
    kernel.area(size=4 * PAGE)
    assert kernel.read() is not None
    kernel.area(1)
    assert kernel.read() is not None


def test_as_many_pages_as_the_machine_has(kernel: Kernel) -> None:
    kernel.area(MOST, size=64 * PAGE)
    found = kernel.read()
    assert found is not None and found.nr_pages == MOST
    kernel.area(MOST + 1, size=64 * PAGE)
    assert kernel.read() is None


def test_payers_and_nodes_of_the_pages(kernel: Kernel) -> None:
    """User memory in an area has no payer that matters."""
    kernel.area(7)
    flags = (0, 0, NODE_1, NODE_1, NODE_1, 0, 0)
    data = (PAYER | 2, PAYER | 2, PAYER | 2, OTHER | 2, PAYER, PAYER | 1, 0)
    for pfn, (flag, word) in enumerate(zip(flags, data, strict=True)):
        put(kernel.image, pfn, flag, NO_TYPE, word)
    assert kernel.left()[0] == (
        PagesOfArea(PAYER, 0, 2),
        PagesOfArea(PAYER, 1, 1),
        PagesOfArea(OTHER, 1, 1),
        PagesOfArea(0, 1, 1),
        PagesOfArea(0, 0, 2),
    )


def test_pages_that_were_freed(kernel: Kernel) -> None:
    """They are freed in their order, and may be in use again: only the last ones are left."""
    image = kernel.image
    runs = (PagesOfArea(PAYER, 0, 2),)
    kernel.area()
    assert kernel.left() == ((PagesOfArea(PAYER, 0, 4),), (0, 4))
    image.make("struct page", FRAMES.page(1), {"memcg_data": PAYER | 2})
    assert kernel.left() == (runs, (2, 4))
    # Each byte of the refcount counts.
    for byte in range(4):
        image.make("struct page", FRAMES.page(1), {"memcg_data": PAYER | 2})
        at = image.type("struct page").member("_refcount").offset
        image.write(FRAMES.page(1) + at + byte, b"\1")
        assert kernel.left() == ((PagesOfArea(PAYER, 0, 4),), (0, 4))
    # None, one that is no page, one inside a struct page, and a compound page
    put_compound(image, TYPES["7.1"], 16, 2, 0, NO_TYPE, PAYER | 2)
    for entry in (0, 0x1000, FRAMES.page(1) + 8, FRAMES.page(16)):
        image.words(ARRAY + 8, entry)
        assert kernel.left() == (runs, (2, 4))
    image.words(ARRAY + 24, 0)
    assert kernel.left() == ((), (4,))


def test_where_the_task_may_be(kernel: Kernel) -> None:
    kernel.area(8)

    def stops(*words: int) -> tuple[int, ...]:
        found = kernel.read(*words)
        assert found is not None
        return found.stops

    assert stops() == stops(0, 9, ARRAY - 8, ARRAY + 72, FRAMES.page(8)) == (0, 8)
    # An index, a pointer to an entry or into one, and the page of an entry
    assert stops(4) == stops(ARRAY + 32) == stops(ARRAY + 39) == (0, 3, 4, 5, 8)
    assert stops(FRAMES.page(4)) == (0, 3, 4, 5, 8)
    assert stops(1) == (0, 1, 2, 8)
    assert stops(8) == stops(ARRAY + 64) == (0, 7, 8)
    assert stops(ARRAY) == stops(FRAMES.page(0)) == (0, 1, 8)
    assert stops(3, ARRAY + 48) == (0, 2, 3, 4, 5, 6, 7, 8)
    # It is behind the pages that are freed.
    kernel.image.words(ARRAY + 16, 0)
    assert stops() == (3, 8)
    assert stops(3) == (3, 4, 8)
    assert stops(1) == (3, 8)
