# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The identity ``slab`` on images of real kernels, with every layout of vectors: pointers (6.1),
pointers with tags (6.12), a stride of bytes (7.2), one word or two for each object (7.3 without and
with allocation profiling), and KFENCE objects.
"""

from __future__ import annotations

import pytest
from support.guests import BUILT_KERNELS, DEBIAN_KERNELS, Lab
from support.guests import KERNELS as ALL_KERNELS
from support.reference import charged_slab_objects

from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.report import Report

KERNELS = [k for k in (*DEBIAN_KERNELS, *BUILT_KERNELS) if k.startswith("7.3")]
#: Kernel and nodes.
IMAGES = [
    ("7.3", "1"),
    pytest.param("7.3", "2cpu+6mem", marks=pytest.mark.long),
    *((kernel, "4") for kernel in KERNELS),
]

pytestmark = pytest.mark.image


def slab_rows(report: Report):
    return [row for row in report.rows if row.identity == "slab"]


@pytest.mark.parametrize(("kernel", "nodes"), IMAGES)
def test_every_cell_is_exact(lab: Lab, kernel: str, nodes: str) -> None:
    report = lab.image(kernel, nodes).report()
    assert report.verdict == "exact"
    assert {row.status for row in slab_rows(report)} == {"exact"}
    assert all(row.difference == 0 for row in slab_rows(report))
    # and it was not exact for want of anything to find
    assert len({row.memcg for row in slab_rows(report) if row.found["slab"]}) >= 4
    assert sum(s.count for s in report.skew if s.kind == "slab") > 10_000
    nids = {s.backing_nid for s in report.skew if s.kind == "slab"}
    assert nids == set(report.image.nodes)
    assert any(memcg.state == "dying" for memcg in report.memcgs)


#: Kernel and its options.
LAYOUTS = [
    *((kernel, "") for kernel in ALL_KERNELS),
    *((k, "sysctl.vm.mem_profiling=1") for k in BUILT_KERNELS if k == "7.3-lab"),
    pytest.param("7.2", "kfence.sample_interval=1", marks=pytest.mark.long),
]


@pytest.mark.each_kernel
@pytest.mark.parametrize(("kernel", "append"), LAYOUTS)
def test_ledger_equals_the_plain_walk(lab: Lab, kernel: str, append: str) -> None:
    prog = lab.image(kernel, "4", "mixed", append=append).program(dwarf=True)
    size, number = charged_slab_objects(prog)
    assert sum(number.values()) > 10_000
    found = {
        (entry.payer, entry.nid, entry.detail == "reclaimable"): (amount.bytes, amount.charges)
        for entry, amount in collect(image_of(prog)).ledger
        if entry.kind == "slab"
    }
    assert found == {key: (size[key], number[key]) for key in size}


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_read_for_each_vector(lab: Lab, kernel: str) -> None:
    """The walk reads the memory map in large pieces, and each vector with one read."""

    from memcg_inspect.linux.mm.mm_types import scan_pages
    from memcg_inspect.linux.mm.slab import SlabReader

    prog = lab.image(kernel, "4").program(dwarf=True)
    memory, slabs = image_of(prog).memory, SlabReader(image_of(prog))
    before = memory.reads
    pieces = list(scan_pages(image_of(prog)))
    pages = sum(piece.pages for piece in pieces)
    assert memory.reads - before <= pages * 64 // (2 << 20) + 20
    for page in (page for piece in pieces for page in piece.slabs):
        slabs.slab(page)  # now all caches are known
    before = memory.reads
    read = [slabs.slab(page) for piece in pieces for page in piece.slabs]
    vectors = sum(slab is not None and slab.vector is not None for slab in read)
    assert vectors > 100
    assert memory.reads - before == vectors
