# SPDX-License-Identifier: LGPL-2.1-or-later
"""Vmalloc areas of thousands of pages, which tasks allocate and free when a guest is stopped."""

from __future__ import annotations

import pytest
from support.findings import by_path
from support.guests import DEBIAN_KERNELS, Lab, Plant

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.kernel.stacktrace import read_running
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.model import PartialArea
from memcg_inspect.report import Report

pytestmark = pytest.mark.image

#: Where pages of an area are counted, but not found in an area on the list of all areas.
FREEING = [("6.1", "free_vmap_area_noflush"), ("7.3", "vm_area_free_pages")]
IDENTITIES = ("vmalloc", "node_vmalloc", "hierarchy")
#: Pages: more than all areas together that tasks may be freeing.
PLANTED = 1_000_000


def check(report: Report) -> None:
    assert report.findings == ()
    for row in report.rows:
        if row.identity in IDENTITIES and row.difference:
            assert row.reason


@pytest.mark.each_kernel
@pytest.mark.parametrize(("kernel", "function"), FREEING)
def test_stopped_in_vfree(lab: Lab, plant: Plant, kernel: str, function: str) -> None:
    """Nothing is wrong, and a fault that is larger than the areas is found."""
    image = lab.image(kernel, "4", "bigmaps", freeze=f"in:{function}", seed=7)
    check(image.report())
    found: list[PartialArea] = []
    for task in read_running(image_of(image.program())):
        assert all(area.stops[-1] == area.nr_pages for area in task.areas)
        found += task.areas
    assert found
    memcg = by_path(image.report())["/bigmaps/group-1"]
    slots = StatReader(image_of(image.program()), ["NR_VMALLOC", "MEMCG_VMALLOC"]).slots
    place = f"Object(prog, 'struct mem_cgroup *', {memcg:#x})"
    [(item, slot)] = slots.items()
    if item == "NR_VMALLOC":
        place += f".nodeinfo[0].lruvec_stats_percpu, 0).state[{slot}]"
    else:
        place += f".vmstats_percpu, 0).state[{slot}]"
    report = plant(image, (f"per_cpu_ptr({place}", f"old + {PLANTED}"))
    differences = {
        f.difference for f in report.findings if (f.identity, f.memcg) == ("vmalloc", memcg)
    }
    assert any(abs((difference or 0) - PLANTED) < PLANTED / 2 for difference in differences)


@pytest.mark.long
@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_stopped_at_any_moment(lab: Lab, kernel: str, seed: int) -> None:
    check(lab.image(kernel, "4", "bigmaps", freeze="busy", seed=seed).report())
