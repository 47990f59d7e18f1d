# SPDX-License-Identifier: LGPL-2.1-or-later
"""Pages that are free, and still charged as kernel memory."""

from __future__ import annotations

import pytest
from drgn import Program
from drgn.helpers.linux.list import list_for_each_entry
from support.findings import by_path
from support.free_pages import free_page
from support.guests import DEBIAN_KERNELS, Lab, Plant

from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.mm.mm_types import MEMCG_DATA_KMEM

pytestmark = pytest.mark.image

KERNELS = [*DEBIAN_KERNELS]


def inside_of_a_block(prog: Program, nid: int) -> int:
    """Return a page that is not the first of a free block of a node: nothing marks it as free."""
    for zone in prog["node_data"][nid].node_zones:
        if not zone.present_pages:
            continue
        for area in reversed(list(zone.free_area)):
            for head in area.free_list:
                for page in list_for_each_entry("struct page", head.address_of_(), "lru"):
                    found: int = (page + 3).value_()
                    return found
    raise AssertionError("no free block")


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_free_pages_that_are_charged_are_found(lab: Lab, plant: Plant, kernel: str) -> None:
    image = lab.image(kernel)
    prog = image.program()
    snapshot = collect(image_of(prog))
    assert snapshot.freed == []
    memcg = by_path(image.report())["/files/web"]
    objcg = next(o.address for o in snapshot.objcgs.values() if o.memcg == memcg)
    pages = {free_page(prog, 0), inside_of_a_block(prog, 1)}
    assert len(pages) == 2
    data = f"{objcg | MEMCG_DATA_KMEM:#x}"
    places = [f"Object(prog, 'struct page *', {page:#x}).memcg_data" for page in sorted(pages)]
    report = plant(image, *((place, data) for place in places))
    found = [f for f in report.findings if f.kind == "charged-free-page"]
    assert {e.address for f in found for e in f.evidence} == pages
    for finding in found:
        assert (finding.identity, finding.memcg) == ("kmem", memcg)
        assert finding.evidence_is == "proof"
        assert all(e.objcg == objcg for e in finding.evidence)
    # Where the counters have the pages, too, no row differs, and the pages are found all the same.
    usage = f"Object(prog, 'struct mem_cgroup *', {memcg:#x}).memory.usage.counter"
    slots = StatReader(image_of(prog), ["MEMCG_KMEM"]).slots
    state = f"Object(prog, 'struct mem_cgroup *', {memcg:#x}).vmstats_percpu"
    state = f"per_cpu_ptr({state}, 0).state[{slots['MEMCG_KMEM']}]"
    counted = plant(
        image, *((place, data) for place in places), (usage, "old + 2"), (state, "old + 2")
    )
    rows = [r for r in counted.rows if (r.identity, r.memcg) in (("kmem", memcg), ("usage", memcg))]
    assert {(row.identity, row.difference) for row in rows} >= {("kmem", 0)}
    assert counted.verdict == "findings"
    assert {e.address for f in counted.findings for e in f.evidence} >= pages
