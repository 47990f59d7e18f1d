# SPDX-License-Identifier: LGPL-2.1-or-later
"""
On a full node, vectors of some slabs are on another node, which is legal.

The workload ``fullnode`` causes this.
"""

from __future__ import annotations

from collections import Counter

import pytest
from drgn import Program, cast
from drgn.helpers.linux.mm import PageSlab, for_each_page, page_to_pfn, virt_to_pfn
from support.guests import DEBIAN_KERNELS, PERNODE_KERNELS, Lab
from support.reference import node_spans

pytestmark = pytest.mark.image

KERNELS = (DEBIAN_KERNELS[0], DEBIAN_KERNELS[-1], *PERNODE_KERNELS)


def vectors_apart(prog: Program) -> Counter[tuple[int, str]]:
    """Return the number of vectors outside their slab, by (node of the slab, place)."""
    spans, found = node_spans(prog), Counter[tuple[int, str]]()

    def nid(pfn: int) -> int:
        return next(nid for start, end, nid in spans if start <= pfn < end)

    for page in for_each_page(prog):
        if not PageSlab(page):
            continue
        slab, pfn = cast("struct slab *", page), page_to_pfn(page).value_()
        word = slab.memcg_data if hasattr(slab, "memcg_data") else slab.obj_exts
        pages = -(-slab.objects.value_() * slab.slab_cache.size.value_() // 4096)
        vector = word.value_() & ~7
        if vector:
            at = virt_to_pfn(prog, vector).value_()
            if not pfn <= at < pfn + pages:
                found[nid(pfn), "on_node" if nid(at) == nid(pfn) else "elsewhere"] += 1
    return found


@pytest.mark.long
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_vectors_elsewhere_are_no_fault(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "2", "fullnode")
    report = image.report()
    assert (report.verdict, report.findings) == ("exact", ())
    rows = [row for row in report.rows if row.identity == "placement"]
    found = Counter({(row.nid, part): n for row in rows for part, n in row.found.items()})
    assert +found == vectors_apart(image.program())
    # the first node has room, the last one is full: one vector in ten at least is elsewhere
    assert not found[0, "elsewhere"]
    assert found[1, "elsewhere"] > found[1, "on_node"] / 10
