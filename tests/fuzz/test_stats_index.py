# SPDX-License-Identifier: LGPL-2.1-or-later
"""The table with the index of each item in the arrays of counters is damaged."""

from __future__ import annotations

import pytest
from fuzz.damage import damaged
from support.guests import GuestImage, Lab

from memcg_inspect.collect import audit
from memcg_inspect.model import ImageError
from memcg_inspect.report import Report

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

SLAB = "NR_SLAB_RECLAIMABLE_B"


@pytest.fixture(scope="module")
def image(lab: Lab) -> GuestImage:
    return lab.image("7.3", "1", "mixed")


def audited(image: GuestImage, item: str, index: int) -> Report:
    prog = image.program()
    entry = prog["mem_cgroup_stats_index"][prog.constant(item)]
    return audit(damaged(image.core, (entry.address_, bytes([index]))))


def status(report: Report, name: str) -> str:
    return next(one.status for one in report.identities if one.name == name)


@pytest.mark.parametrize("item", ["NR_HUGETLB", "NR_WRITEBACK", "NR_FILE_THPS"])
def test_an_item_that_is_beyond_the_arrays(image: GuestImage, item: str) -> None:
    """It is 0 for each memcg, and so nobody looks at it closely."""
    report = audited(image, item, 200)
    assert report.verdict == "incomplete"
    assert status(report, "user_pages") == "unverifiable"
    assert status(report, "page_levels") == "unverifiable"


def test_slab_memory_that_is_beyond_the_arrays(image: GuestImage) -> None:
    report = audited(image, SLAB, 200)
    rows = [row for row in report.rows if (row.identity, row.item) == ("local_fold", SLAB)]
    assert {row.status for row in rows} == {"unverifiable"}
    assert status(report, "slab") == "unverifiable"


def test_two_items_with_one_index(image: GuestImage) -> None:
    """One of them had the counters of the other one, in each memcg."""
    prog = image.program()
    files = int(prog["mem_cgroup_stats_index"][prog.constant("NR_FILE_PAGES")])
    report = audited(image, "NR_WRITEBACK", files)
    assert (report.verdict, list(report.findings)) == ("incomplete", [])
    rows = [row for row in report.rows if row.identity == "user_pages"]
    unknown = {row.item for row in rows if row.status == "unverifiable"}
    assert unknown == {"NR_FILE_PAGES", "NR_WRITEBACK"}


def test_an_item_without_an_index(image: GuestImage) -> None:
    """Nothing looked at what the kernel seemed not to count."""
    index = int(image.program()["mem_cgroup_stats_index"][image.program().constant(SLAB)])
    with pytest.raises(ImageError, match=f"no item has the index {index}$"):
        audited(image, SLAB, 0xFF)
