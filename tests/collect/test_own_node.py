# SPDX-License-Identifier: LGPL-2.1-or-later
"""User pages and page cache are charged to the obj_cgroup of the node that they are on (7.2)."""

from __future__ import annotations

import pytest
from drgn import Object
from drgn.helpers.linux.mm import for_each_page
from support.findings import by_path
from support.guests import DEBIAN_KERNELS, Lab, Plant

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcg_data import charges_node_of_folio

pytestmark = pytest.mark.image


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_the_types_tell_it(lab: Lab, kernel: str) -> None:
    own = not kernel.startswith("6.")
    for dwarf in (False, True):
        assert charges_node_of_folio(image_of(lab.image(kernel).program(dwarf=dwarf))) == own


@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", [k for k in DEBIAN_KERNELS if not k.startswith("6.")])
def test_a_page_that_is_charged_to_another_node_is_found(
    lab: Lab, plant: Plant, kernel: str
) -> None:
    image = lab.image(kernel)
    prog = image.program()
    memcg = by_path(image.report())["/files/web"]
    nodes = Object(prog, "struct mem_cgroup *", memcg).nodeinfo
    here, there = (nodes[nid].objcg.value_() for nid in (0, 1))
    page = next(p for p in for_each_page(prog) if p.memcg_data.value_() == here)
    report = plant(image, (f"Object(prog, 'struct page *', {page.value_():#x}).memcg_data", there))
    [finding] = [f for f in report.findings if f.kind == "skew"]
    assert (finding.memcg, finding.nid, finding.item) == (memcg, 0, "lru")
    assert finding.difference % report.image.page_size == 0
    assert page.value_() in {e.page for e in finding.evidence}
