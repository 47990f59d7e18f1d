# SPDX-License-Identifier: LGPL-2.1-or-later
"""Variables of the kernel that are not in the image."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
from drgn import Object, sizeof
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import excluded, opened

from memcg_inspect.collect import audit
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm import rss_stat
from memcg_inspect.linux.mm.huge_memory import huge_zero_pages
from memcg_inspect.linux.mm.rss_stat import rss_bounds
from memcg_inspect.linux.mm.swap_cgroup import swap_cgroup_pages, swap_ids
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


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", [k for k in DEBIAN_KERNELS if k in ("6.1", "6.12")])
def test_arrays_of_swap_entries_are_missed(lab: Lab, kernel: str) -> None:
    """Neither their memcgs nor the pages of the arrays are known."""
    prog = opened(lab.image(kernel, "4", "mixed").core)
    controls = prog["swap_cgroup_ctrl"]
    prog.add_memory_segment(controls.address_ or 0, sizeof(controls), excluded, False)
    for pages in (True, False):
        coverage = Coverage()
        image = image_of(prog)
        found = list(swap_cgroup_pages(image, coverage)) if pages else swap_ids(image, coverage)
        assert not found
        [missed] = coverage.examples
        assert (missed.what, missed.address) == ("memcgs of swap entries", controls.address_)


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


def unknown(*_: object) -> NoReturn:
    raise UnknownKernelError("no such variable")


def without(image: Image, variable: str) -> Callable[[str], Object]:
    """Return how an image finds its variables, all but one."""
    find = image.object
    return lambda name: unknown() if name == variable else find(name)


def test_bounds_that_the_types_do_not_tell(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    image = image_of(lab.image("7.3").program())
    assert None not in rss_bounds(image, threads=2).values()
    monkeypatch.setattr(rss_stat, "percpu_counter_bound", unknown)
    assert rss_bounds(image, threads=2) == dict.fromkeys(rss_stat.ITEMS.values())
    # mm/memory.c maps 64 KiB around a fault, unless debugfs says otherwise.
    old = image_of(lab.image("6.1").program())
    monkeypatch.setattr(old, "object", without(old, "fault_around_bytes"))
    bounds = {"file": 2 * 66 * 16, "shmem": 2 * 66 * 16, "anon": 2 * 66, "swapents": 2 * 66}
    assert rss_bounds(old, threads=2) == bounds
