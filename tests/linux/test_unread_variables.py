# SPDX-License-Identifier: LGPL-2.1-or-later
"""Variables of the kernel that are not in the image."""

from __future__ import annotations

import pytest
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import excluded, opened

from memcg_inspect.collect import audit
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.huge_memory import huge_zero_pages
from memcg_inspect.linux.mm.rss_stat import rss_bounds
from memcg_inspect.model import Coverage

pytestmark = pytest.mark.image


def test_what_a_task_moves_is_needed_for_the_usage(lab: Lab) -> None:
    image = lab.image("6.1", "1", "idle")
    assert audit(image_of(image.program())).verdict == "exact"
    prog = opened(image.core)
    size = prog.type("struct move_charge_struct").size
    prog.add_memory_segment(prog.symbol("mc").address, size, excluded, False)
    report = audit(image_of(prog))
    assert report.verdict == "incomplete"
    assert not report.findings
    reasons = {i.name: i.reason for i in report.identities if i.status == "unverifiable"}
    assert reasons == {"usage": "what a task moves to another memcg is not in the image"}


@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_the_huge_page_of_zeroes_is_missed(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "1", "idle")
    coverage = Coverage()
    huge_zero_pages(image_of(image.program()), coverage)
    assert (coverage.read, coverage.unreadable) == (1, 0)
    prog = opened(image.core)
    prog.add_memory_segment(prog.symbol("huge_zero_pfn").address, 8, excluded, False)
    missed = Coverage()
    assert not huge_zero_pages(image_of(prog), missed)
    assert (missed.read, missed.unreadable) == (0, 1)


def test_pages_that_a_fault_maps_are_not_known(lab: Lab) -> None:
    image = lab.image("6.1", "1", "idle")
    bounds = rss_bounds(image_of(image.program()), threads=1)
    assert bounds["file"] == 16 * 66
    prog = opened(image.core)
    prog.add_memory_segment(prog.symbol("fault_around_bytes").address, 8, excluded, False)
    assert rss_bounds(image_of(prog), threads=1) == {**bounds, "file": None, "shmem": None}
