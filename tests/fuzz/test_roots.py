# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A damaged word on which much depends: the hierarchy of the controller, a section of memory, a CPU's
percpu memory, the memcgs of swap entries.

Each of them made findings on dozens of memcgs with nothing wrong.
"""

from __future__ import annotations

import pytest
from drgn import FaultError, Object, Program
from drgn.helpers.linux.mmzone import for_each_online_pgdat, nr_to_section
from fuzz.damage import damaged
from support.guests import GuestImage, Lab

from memcg_inspect.collect import audit
from memcg_inspect.helpers import for_each_charged_slab_object
from memcg_inspect.linux.mm.show_mem import LostPages, lost_pages
from memcg_inspect.model import ImageError
from memcg_inspect.views.slabinfo import slabinfo

pytestmark = pytest.mark.image

#: Bits of ``section_mem_map``: present, and online.
PRESENT, ONLINE = 1, 4


@pytest.fixture(scope="module", params=["6.1", "7.3"])
def image(request: pytest.FixtureRequest, lab: Lab) -> GuestImage:
    return lab.image(request.param, "4", "mixed")


@pytest.mark.parametrize("root", [0, 0xFFFFFFFF81000000])
def test_the_hierarchy_of_the_controller(image: GuestImage, root: int) -> None:
    """It was taken for cgroup v1."""
    place = image.program()["memory_cgrp_subsys"].root.address_
    assert place is not None
    with pytest.raises(ImageError, match=f"in the cgroup_root {root:#x}, and its root memcg in "):
        audit(damaged(image.core, (place, root)))


@pytest.mark.parametrize("name", ["__per_cpu_offset", "pcpu_unit_offsets"])
def test_the_percpu_memory_of_a_cpu(image: GuestImage, name: str) -> None:
    """The counters of that CPU were read elsewhere. One CPU has nothing to compare with."""
    for cpu in (0, 1):
        entry = image.program()[name][cpu]
        assert entry.address_ is not None
        why = rf"CPU {cpu} has not .*: __per_cpu_offset\[{cpu}\], pcpu_unit_offsets\[{cpu}\] or "
        with pytest.raises(ImageError, match=why):
            audit(damaged(image.core, (entry.address_, int(entry) + 4096)))


def pointers_to_ids(prog: Program) -> dict[str, tuple[Object, int]]:
    """Return pointers to the IDs of swap entries, and the address that each is told with."""
    area = prog["swap_info"][0]
    if "swap_cgroup_ctrl" in prog:  # up to 7.1
        control = prog["swap_cgroup_ctrl"][0]
        found = {"swap_cgroup_ctrl.map": (control.map, area.value_())}
        if hasattr(control, "length"):
            found["a page of swap_cgroup_ctrl.map"] = control.map[0], control.map.value_()
        return found
    clusters = (area.cluster_info[n] for n in range(area.max.value_() // 512))
    used = next(cluster for cluster in clusters if cluster.count)
    return {
        "cluster_info": (area.cluster_info, area.value_()),
        "memcg_table": (used.memcg_table, used.address_ or 0),
    }


def test_the_memcgs_of_swap_entries(image: GuestImage) -> None:
    """NULL was taken for an area or a cluster without entries."""
    for name, (pointer, address) in pointers_to_ids(image.program()).items():
        assert pointer.value_() and pointer.address_ is not None
        report = audit(damaged(image.core, (pointer.address_, 0)))
        assert (report.verdict, list(report.findings)) == ("incomplete", [])
        missed = [(m.address, m.reason) for m in report.coverage["swap_ids"].examples]
        assert [at for at, reason in missed if name in reason and "is NULL" in reason] == [address]


def last_section(image: GuestImage) -> tuple[int, Object]:
    """Return the last section with memory of the last node, and the page frames of one."""
    prog = image.program()
    pages = 1 << int(prog["SECTION_SIZE_BITS"]) - int(prog["PAGE_SHIFT"])
    *_, node = for_each_online_pgdat(prog)
    end = int(node.node_start_pfn) + int(node.node_spanned_pages)
    return pages, nr_to_section(prog, (end - 1) // pages)


@pytest.mark.parametrize("how", ["offline", "no pointer"])
def test_a_section_of_the_memory_map(image: GuestImage, how: str) -> None:
    """Its pages were in no range, and nothing said so."""
    pages, section = last_section(image)
    word = int(section.section_mem_map)
    assert word & PRESENT and word & ONLINE
    place = section.section_mem_map.address_
    assert place is not None
    prog = damaged(image.core, (place, word & ~ONLINE if how == "offline" else 0))
    report = audit(prog)
    assert (report.verdict, list(report.findings)) == ("incomplete", [])
    missed = [m for m in report.coverage["pages"].examples if m.what == "memory map of a zone"]
    [zone] = [Object(image.program(), "struct zone *", m.address) for m in missed]
    present, spanned = int(zone.present_pages), int(zone.spanned_pages)
    assert spanned - pages < present
    assert f"it has {present:,} pages, and " in missed[0].reason
    # Nor do those who look at slabs alone take the rest for all.
    assert not slabinfo(damaged(image.core, (place, 0))).is_whole
    with pytest.raises(FaultError, match="memory map of a zone: it has "):
        next(for_each_charged_slab_object(prog.prog))


def test_no_zone_has_lost_pages(image: GuestImage) -> None:
    assert list(lost_pages(damaged(image.core))) == []


def test_pages_that_a_zone_has_lost(image: GuestImage) -> None:
    """The number of its pages can be what is damaged, too."""
    *_, node = for_each_online_pgdat(image.program())
    [zone] = [zone for zone in node.node_zones if zone.present_pages]
    spanned, place = int(zone.spanned_pages), zone.present_pages.address_
    assert place is not None
    nid = int(node.node_id)
    assert list(lost_pages(damaged(image.core, (place, spanned)))) == []
    assert list(lost_pages(damaged(image.core, (place, spanned + 1)))) == [
        LostPages(zone.address_ or 0, nid, spanned + 1, spanned)
    ]
