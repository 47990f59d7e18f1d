# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The inventory of page frames in parts: where ranges begin, and what they leave to the whole.

``tests/views/test_view_pages.py`` holds the whole against what guests say.
"""

from __future__ import annotations

import pickle
from array import array

import pytest
from drgn import Program
from drgn.helpers.linux.mm import PageSlab, compound_head, compound_order, for_each_valid_page_range
from support.guests import DEBIAN_KERNELS, Lab, gigantic
from support.missing_pages import without_bytes
from support.views import number, rows

from memcg_inspect.collect.inventory import whole_blocks
from memcg_inspect.collect.inventory_part import BarePage, Head, InventoryPart
from memcg_inspect.collect.page_owners import Share
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mm_types import pages_per_piece, scan_pages
from memcg_inspect.linux.mm.mmzone import PageRange, page_ranges, split_ranges
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.model_pages import NEVER, NOBODY, UNUSED, Place
from memcg_inspect.views.pages import pages

OBJCG = 0xFFFF888001234560
TABLE = Place(0, 1, "pagetables")


def test_a_part_can_be_pickled() -> None:
    part = InventoryPart(PageRange(0, 8), 4096)
    part.count_shared(Place(0, 1, "slab"), 2, Share(5000, ((OBJCG, 3000),)), 3)
    part.keep_unmarked(Place(0, 1, "unknown", 0), NEVER, 5)
    part.in_slabs.files.setdefault("pipefifo_fops", set()).add(1)
    part.coverage["slab"].read += 1
    assert pickle.loads(pickle.dumps(part)) == part
    assert part.pages == {Place(0, 1, "slab"): 6}
    assert {payer: size for (_, payer), size in part.bytes.items()} == {
        OBJCG: 9000,
        NOBODY: 6000,
        UNUSED: 3 * (8192 - 5000),
    }


@pytest.mark.parametrize(("start", "bare", "is_head"), [(8, 8, True), (8, 9, False), (9, 9, False)])
def test_a_block_that_is_not_compound_may_reach_into_the_next_range(
    start: int, bare: int, is_head: bool
) -> None:
    """Its first page is the last one of a range, and the next page begins a range."""
    first = InventoryPart(PageRange(0, 8), 4096, last=Head(TABLE, OBJCG))
    second = InventoryPart(PageRange(start, 16), 4096, bare={bare: BarePage(0, 1, 0)})
    whole = InventoryPart(PageRange(0, 0), 4096)
    whole.merge(first)
    whole.merge(second)
    assert whole.heads == ({7: Head(TABLE, OBJCG)} if is_head else {})
    assert whole.bare == second.bare
    assert whole.last is None


def test_sums_of_parts_add_up() -> None:
    whole = InventoryPart(PageRange(0, 0), 4096)
    for start in (0, 8):
        part = InventoryPart(PageRange(start, start + 8), 4096)
        part.count(TABLE, 3, OBJCG)
        part.holes[0, 1] += 2
        part.keep_unmarked(TABLE, NOBODY, start + 1)
        part.conflicts.append((start, "slab", "stack"))
        part.in_slabs.socks.add(start)
        part.in_slabs.files.setdefault("a", set()).add(start)
        part.coverage["pages"].read += 8
        part.unnamed[start] = "why"
        whole.merge(part)
    assert whole.pages == {TABLE: 6}
    assert whole.bytes == {(TABLE, OBJCG): 6 * 4096}
    assert whole.holes == {(0, 1): 4}
    assert whole.unmarked == {(TABLE, NOBODY): array("Q", [1, 9])}
    assert [number for number, *_ in whole.conflicts] == [0, 8]
    assert (whole.in_slabs.socks, whole.in_slabs.files) == ({0, 8}, {"a": {0, 8}})
    assert whole.coverage["pages"].read == 16
    assert set(whole.unnamed) == {0, 8}


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_no_range_begins_within_a_block(lab: Lab, kernel: str) -> None:
    """A page of 1 GiB is eight times as large as the smallest range."""
    prog = gigantic(lab, kernel).program()
    image = image_of(prog)
    parts = list(split_ranges(page_ranges(image), pages_per_piece(image)))
    found = whole_blocks(image, parts)
    large = [
        pfn
        for start, end, _ in for_each_valid_page_range(prog)
        for pfn in range((start + 0x3FFFF) >> 18 << 18, end, 1 << 18)
        if compound_order(prog["vmemmap"] + pfn).value_() == 18
    ]
    assert len(large) == 1
    pfns = sorted({part.start for part in parts} - {part.start for part in found})
    within = range(large[0] + 1, large[0] + (1 << 18))
    assert pfns == [part.start for part in parts if part.start in within]
    assert pfns
    assert sum(part.end - part.start for part in found) == sum(p.end - p.start for p in parts)
    for before, after in zip(found, found[1:], strict=False):
        assert before.end <= after.start
        page = prog["vmemmap"] + after.start
        assert compound_head(page) == page


@pytest.mark.image
def test_a_range_that_begins_within_a_block_is_moved(lab: Lab) -> None:
    """Ranges of any length: slabs, large folios and free blocks are where they end."""
    prog = lab.image("7.3", "4", "mixed").program()
    image = image_of(prog)
    ranges = page_ranges(image)
    slab = _pfn_within_a_slab(prog)
    parts = [
        part
        for whole in ranges
        for cut in cut_at(whole, slab)
        for part in split_ranges([cut], 1002)
    ]
    found = whole_blocks(image, parts)
    moved = {part.start for part in parts} - {part.start for part in found}
    assert slab in moved
    assert sum(part.end - part.start for part in found) == sum(p.end - p.start for p in parts)
    for part in found:
        page = prog["vmemmap"] + part.start
        assert compound_head(page) == page


def cut_at(whole: PageRange, pfn: int) -> list[PageRange]:
    """Return the parts of a range before and from a page frame on, without empty ones."""
    middle = min(max(pfn, whole.start), whole.end)
    cuts = (PageRange(whole.start, middle), PageRange(middle, whole.end))
    return [cut for cut in cuts if cut.start < cut.end]


def _pfn_within_a_slab(prog: Program) -> int:
    """Return the third page frame of the first slab of four pages: ranges begin at even ones."""
    for start, end, _ in for_each_valid_page_range(prog):
        for pfn in range((start + 3) & ~3, end, 4):
            page = prog["vmemmap"] + pfn
            if PageSlab(page) and compound_head(page) == page and compound_order(page).value_() > 1:
                return pfn + 2
    raise AssertionError("no slab of four pages")


@pytest.mark.image
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_who_pays_for_a_slab_may_be_missing(lab: Lab, kernel: str) -> None:
    """A vector of obj_cgroups that is not in the dump is told of, not taken for one of nobody."""
    guest = lab.image(kernel, "4", "mixed")
    image = image_of(guest.program())
    slabs = SlabReader(image)
    lost = [
        slab
        for piece in scan_pages(image)
        for page in piece.slabs
        if (slab := slabs.slab(page)) is not None and slab.charged and slabs.vector_page(slab)
    ]
    slab = lost[len(lost) // 2]
    assert slab.vector is not None
    # Its bytes alone: what else is in the page may be needed to read anything.
    size = slab.vector.stride * (slab.objects - 1) + 8
    whole, answer = pages(image), pages(image_of(without_bytes(guest, slab.vector.address, size)))
    assert whole.coverage["slab"].unreadable == 0
    assert answer.coverage["slab"].unreadable == 1
    assert "objcgs of a" in answer.coverage["slab"].examples[0].what
    assert sum(number(row, "pages") for row in rows(whole)) == sum(
        number(row, "pages") for row in rows(answer)
    )
