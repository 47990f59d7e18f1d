# SPDX-License-Identifier: LGPL-2.1-or-later
"""Call sites in dumps that lack pages: no invented values, no traceback."""

from __future__ import annotations

import random
from collections.abc import Callable

import drgn
import pytest
from drgn import FaultError
from drgn.helpers.linux.mm import follow_phys
from fuzz.damage import damaged
from support.allocinfo import GUESTS, guest_image
from support.guests import GuestImage, Lab
from support.missing_pages import ask_without, excluded, opened, without

from memcg_inspect.collect import audit
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.lib.list import idr_entries
from memcg_inspect.linux.mm.alloc_tag import read_call_sites, tag_ranges
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.page_ext import page_ext_tables
from memcg_inspect.model import Coverage, ImageError
from memcg_inspect.report import Report
from memcg_inspect.tables import Answer, NotRead
from memcg_inspect.views.allocinfo import (
    allocinfo,
    allocinfo_by,
    allocinfo_overhead,
    allocinfo_proc,
)
from memcg_inspect.views.pages import pages

pytestmark = pytest.mark.image


def without_addresses(image: GuestImage, *ranges: tuple[int, int]) -> drgn.Program:
    """Open an image in which ranges of virtual addresses cannot be read."""
    prog = opened(image.core)
    for address, size in ranges:
        prog.add_memory_segment(address, size, excluded, False)
    return prog


def check_nothing_made_up(report: Report, whole: Report) -> None:
    """Rows are those of the whole image, or cannot be verified; none is a finding."""
    truth = {(row.item, row.unit): row for row in whole.rows if row.identity == "alloc_tags"}
    rows = [row for row in report.rows if row.identity == "alloc_tags"]
    assert [f for f in report.findings if f.identity == "alloc_tags"] == []
    for row in rows:
        assert row.status in ("exact", "unverifiable"), row
        if row.status == "exact":
            same = truth[row.item, row.unit]
            assert (row.found, row.claimed) == (same.found, same.claimed)
    assert any(row.status == "unverifiable" for row in rows)
    assert report.verdict == "incomplete"


VIEWS: list[Callable[[Image], Answer]] = [
    allocinfo,
    lambda image: allocinfo_by(image, ["memcg", "node", "kind", "site"]),
    allocinfo_overhead,
]
PAGE = 4096


def page_of_tags(image: GuestImage) -> int:
    """Return the address of a page that holds nothing but tags, of call sites of the kernel."""
    start = tag_ranges(image_of(image.program()), Coverage())[0].start
    return start - start % PAGE + PAGE


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_tags_may_be_missing(lab: Lab, kernel: str, append: str) -> None:
    """A missing page of tags hides the tags in it, and no others."""
    image = guest_image(lab, kernel, append)
    prog = without_addresses(image, (page_of_tags(image), PAGE))
    report = audit(image_of(prog))
    check_nothing_made_up(report, image.report())
    before, after = (
        allocinfo(image_of(p), everything=True).tables[0] for p in (image.program(), prog)
    )
    missing = len(before.rows) - len(after.rows)
    assert PAGE // 40 <= missing <= 3 * PAGE // 40
    assert set(after.rows) < set(before.rows)
    for view in VIEWS:
        assert not view(image_of(prog)).is_whole
    table = VIEWS[1](image_of(prog)).tables[0]
    values = [value for row in table.rows for value in table.values(row).values()]
    assert any(isinstance(value, NotRead) for value in values)
    with pytest.raises(ImageError, match="not all in the image"):
        allocinfo_proc(image_of(prog))


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_counters_may_be_missing(lab: Lab, kernel: str, append: str) -> None:
    """Only the counters in one page of one CPU are missing."""
    image = guest_image(lab, kernel, append)
    rows = allocinfo(image_of(image.program())).tables[0].rows
    site = next(iter(read_call_sites(image_of(image.program()), Coverage()).values()))
    per_cpu = image.program()["__per_cpu_offset"][1].value_()
    address = (site.counters + per_cpu) % 2**64
    prog = without_addresses(image, (address - address % PAGE, PAGE))
    answer = allocinfo(image_of(prog))
    assert not answer.is_whole
    unread = [row for row in answer.tables[0].rows if isinstance(row.bytes, NotRead)]
    assert 4 <= len(unread) <= PAGE // 16 + 1
    assert len(answer.tables[0].rows) >= len(rows)
    check_nothing_made_up(audit(image_of(prog)), image.report())


@pytest.mark.parametrize(
    ("share", "times"), [(0.002, 1), pytest.param(0.01, 3, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_any_pages_may_be_missing(
    lab: Lab, kernel: str, append: str, share: float, times: int
) -> None:
    """
    Random pages are missing: slabs, page_ext, percpu memory, the memory map.

    Each view answers once the pages are back that every walk needs. A page of tags is always
    missing, so no answer is complete.
    """
    image = guest_image(lab, kernel, append)
    prog, frames = image.program(), mem_map(image_of(image.program()))
    tags = follow_phys(prog["init_mm"].address_of_(), page_of_tags(image)).value_()
    pages = (1 << 30) // frames.page_size  # that the guest has
    for seed in range(times):
        gone = set(random.Random(seed).sample(range(pages), int(pages * share)))
        gone.add(tags >> frames.page_shift)
        for view in VIEWS:
            answer, left = ask_without(image, gone, view)
            assert not answer.is_whole
            assert len(left) > 0.9 * len(gone)
            with pytest.raises(ImageError, match="not all in the image"):
                allocinfo_proc(image_of(without(image, left)))
        report, left = ask_without(image, gone, audit)
        assert len(left) > 0.9 * len(gone)
        check_nothing_made_up(report, image.report())


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_a_range_of_tags_that_cannot_be(lab: Lab, kernel: str, append: str) -> None:
    """No range has more call sites than are registered."""
    image = guest_image(lab, kernel, append)
    prog, registered = image.program(), image.program()["alloc_tag_cttype"]
    entries = idr_entries(
        image_of(prog), "struct codetag_module", registered.mod_idr, lambda error: None
    )
    stop = next(entries).range.stop
    for value in ((1 << 64) - 8, 1 << 63, 0):
        coverage = Coverage()
        changed = damaged(image.core, (stop.address_ or 0, value))
        ranges = tag_ranges(changed, coverage)
        assert coverage.unreadable == 1
        assert len(ranges) == len(tag_ranges(image_of(prog), Coverage())) - 1


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
@pytest.mark.parametrize("value", [0, 4, 1 << 40, (1 << 64) - 1])
def test_sizes_of_what_refers_to_call_sites(lab: Lab, kernel: str, append: str, value: int) -> None:
    image = guest_image(lab, kernel, append)
    name = "alloc_tag_ref_offs" if append.endswith("compressed") else "page_ext_size"
    variable = image.program()[name]
    size = drgn.sizeof(variable)
    new = (value | 1 << 31 if size == 4 else value) % (1 << 8 * size)
    changed = damaged(image.core, (variable.address_ or 0, new.to_bytes(size, "little")))
    with pytest.raises(ImageError, match="damaged"):
        audit(changed)


@pytest.mark.parametrize("value", [1 << 20, (1 << 64) - 1])
@pytest.mark.parametrize(("kernel", "append"), GUESTS[:1])
def test_the_tables_of_page_ext_are_not_larger_than_memory(
    lab: Lab, kernel: str, append: str, value: int
) -> None:
    image = guest_image(lab, kernel, append)
    size = image.program()["page_ext_size"]
    changed = damaged(image.core, (size.address_ or 0, value))
    with pytest.raises(FaultError, match="page_ext_size is"):
        list(page_ext_tables(changed, Coverage()))
    with pytest.raises(ImageError, match="page_ext_size is"):
        pages(changed)
