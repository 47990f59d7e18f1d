# SPDX-License-Identifier: LGPL-2.1-or-later
"""Call sites in dumps that lack pages: nothing is made up, and nothing ends in a traceback."""

from __future__ import annotations

import random
from collections.abc import Callable

import drgn
import pytest
from support.allocinfo import GUESTS, guest_image
from support.guests import GuestImage, Lab

from memcg_inspect.collect import audit
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.linux.mm.alloc_tag import read_call_sites, tag_ranges
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage, ImageError, Report
from memcg_inspect.tables import Answer, NotRead
from memcg_inspect.views.allocinfo import (
    allocinfo,
    allocinfo_by,
    allocinfo_overhead,
    allocinfo_proc,
)

pytestmark = pytest.mark.image


def _missing(address: int, count: int, offset: int, physical: bool) -> bytes:
    raise drgn.FaultError("Excluded page", address)


def without(image: GuestImage, *ranges: tuple[int, int], physical: bool = False) -> drgn.Program:
    """An image in which ranges of addresses cannot be read."""
    prog = open_program(ImageSource(core=str(image.core), debuginfo="btf"))
    for address, size in ranges:
        prog.add_memory_segment(address, size, _missing, physical)
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


VIEWS: list[Callable[[drgn.Program], Answer]] = [
    allocinfo,
    lambda prog: allocinfo_by(image_of(prog), ["memcg", "node", "kind", "site"]),
    allocinfo_overhead,
]


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_tags_may_be_missing(lab: Lab, kernel: str, append: str) -> None:
    """A page of them hides those in it, and no others."""
    image = guest_image(lab, kernel, append)
    start = tag_ranges(image_of(image.program()), Coverage())[0].start
    page = start - start % 4096 + 4096
    prog = without(image, (page, 4096))
    report = audit(image_of(prog))
    check_nothing_made_up(report, image.report())
    before, after = (
        allocinfo(image_of(p), everything=True).tables[0] for p in (image.program(), prog)
    )
    lost = len(before.rows) - len(after.rows)
    assert 4096 // 40 <= lost <= 3 * 4096 // 40
    assert set(after.rows) < set(before.rows)
    for view in VIEWS:
        assert not view(prog).is_whole
    rows = VIEWS[1](prog).tables[0].rows
    assert any(isinstance(value, NotRead) for row in rows for value in row)
    with pytest.raises(ImageError, match="not all in the image"):
        allocinfo_proc(image_of(prog))


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_counters_may_be_missing(lab: Lab, kernel: str, append: str) -> None:
    """Those of one page of one CPU."""
    image = guest_image(lab, kernel, append)
    rows = allocinfo(image_of(image.program())).tables[0].rows
    site = next(iter(read_call_sites(image_of(image.program()), Coverage()).values()))
    per_cpu = image.program()["__per_cpu_offset"][1].value_()
    address = (site.counters + per_cpu) % 2**64
    prog = without(image, (address - address % 4096, 4096))
    answer = allocinfo(image_of(prog))
    assert not answer.is_whole
    unread = [row for row in answer.tables[0].rows if isinstance(row[0], NotRead)]
    assert 4 <= len(unread) <= 4096 // 16 + 1
    assert len(answer.tables[0].rows) >= len(rows)
    check_nothing_made_up(audit(image_of(prog)), image.report())


@pytest.mark.parametrize(
    ("share", "times"), [(0.002, 1), pytest.param(0.01, 3, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_any_pages_may_be_missing(
    lab: Lab, kernel: str, append: str, share: float, times: int
) -> None:
    """Whatever is in them: slabs, page_ext, percpu memory, the page map."""
    image = guest_image(lab, kernel, append)
    size = mem_map(image_of(image.program())).page_size
    pages = (1 << 30) // size  # that the guest has
    answered = 0
    for seed in range(times):
        chance = random.Random(seed)
        gone = chance.sample(range(pages), int(pages * share))
        prog = without(image, *((pfn * size, size) for pfn in gone), physical=True)
        for view in (*VIEWS, allocinfo_proc):
            try:
                answered += not view(prog).is_whole
            except ImageError as error:
                assert str(error)
        try:
            report = audit(image_of(prog))
        except ImageError as error:
            assert str(error)
            continue
        assert [f for f in report.findings if f.identity == "alloc_tags"] == []
    assert answered
