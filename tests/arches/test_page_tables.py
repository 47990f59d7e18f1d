# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables of processes on other architectures, held against what the guest's kernel found in them.

They run in the parts of the tests that choose kernels of an architecture (``LAB_ARCH``).
"""

from __future__ import annotations

import pytest
from labkit.kernels import kernel_arch
from support.guests import ARCH, KERNELS, GuestImage, Lab, series
from support.rss import PROCESSES, STATUS, Rows, by_status, checked, number, said

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mmzone import mem_map

pytestmark = [pytest.mark.image, pytest.mark.long]

OF_OTHER_ARCHES = KERNELS if ARCH != "amd64" else ()


def processes(lab: Lab, kernel: str) -> GuestImage:
    nodes = "2" if kernel_arch(kernel).has_nodes else "1"
    return lab.image(kernel, nodes, "rss", cpus=4, memory="6G")


def page_size(image: GuestImage) -> int:
    return mem_map(image_of(image.program())).page_size


def mapped(rows: Rows, pid: int, item: str) -> int:
    values = rows.get((pid, item))
    return 0 if values is None else number(values, "mapped")


@pytest.mark.parametrize("kernel", OF_OTHER_ARCHES)
def test_rss_of_processes(lab: Lab, kernel: str) -> None:
    image = processes(lab, kernel)
    rows = checked(image)
    assert {(values["status"], values["difference"]) for values in rows.values()} == {("exact", 0)}
    assert {item for _, item in rows} == set(STATUS)
    assert len(said(image)) == PROCESSES
    # The workload counts in units of 4 KiB.
    units = page_size(image) // 4096
    for pid, told in said(image).items():
        resident = sum(mapped(rows, pid, item) for item in STATUS if item != "swapents")
        assert units * resident == told["rss"]
        assert units * mapped(rows, pid, "anon") == told["anon"]
        assert units * mapped(rows, pid, "swapents") == told["swap"]


@pytest.mark.parametrize("kernel", OF_OTHER_ARCHES)
def test_rss_is_what_the_guest_read(lab: Lab, kernel: str) -> None:
    """6.1 shows the approximate value in /proc; newer kernels add up the values of all CPUs."""
    image = processes(lab, kernel)
    rows, shown = checked(image), "approximate" if series(kernel) == "6.1" else "exact"
    told = by_status(image, page_size(image))
    assert len(told) == PROCESSES
    for pid, items in told.items():
        for item, pages in items.items():
            values = rows.get((pid, item))
            assert (0 if values is None else values[shown]) == pages, (pid, item)
