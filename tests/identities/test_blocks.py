# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Charged blocks of pages that are not compound: nothing stores their order.

KVM is the user of such blocks that any host has. The module ``fixtures/modules/charge`` makes
blocks of any order; see ``tests/collect/test_charge_module.py``.
"""

from __future__ import annotations

import drgn
import pytest
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.percpu import per_cpu_ptr
from fuzz.damage import damaged
from labkit import kernels, kmodules
from support.guests import DEBIAN_KERNELS, KERNELS, GuestImage, Lab, Plant

from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.page_alloc import BlockReader
from memcg_inspect.report import Report

pytestmark = pytest.mark.image

#: In the workload ``kvm``.
VCPUS = 5


def kvm(lab: Lab, kernel: str) -> GuestImage:
    """Return an image of a guest with two virtual machines, one of which has VCPUs."""
    modules = kmodules.with_dependencies(kernels.kernel(kernel), "kvm_amd")
    return lab.image(kernel, "2", "kvm", modules=modules)


def memcg_of(report: Report, path: str) -> int:
    (found,) = (m.address for m in report.memcgs if m.path == path and m.state == "online")
    return found


def kmem_pages(report: Report, path: str) -> int:
    memcg = memcg_of(report, path)
    (row,) = (r for r in report.rows if (r.identity, r.memcg) == ("kmem", memcg))
    assert row.status == "exact", row
    return row.found["kmem_pages"]


@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_permission_maps_of_kvm(lab: Lab, kernel: str) -> None:
    """Each VCPU has a map of two pages, whose second page nothing refers to."""
    image = kvm(lab, kernel)
    report = image.report()
    assert not report.findings
    assert report.verdict == "exact"
    kmem_pages(report, "/kvm/none")
    # The blocks are there: without them the row would be off by this many pages.
    prog = image.program()
    blocks = blocks_of(prog, memcg_of(report, "/kvm/some"))
    assert blocks.count(1) >= VCPUS


def blocks_of(prog: drgn.Program, memcg: int) -> list[int]:
    """Return the orders of the blocks that are charged to a memcg."""
    from memcg_inspect.linux.mm.mm_types import scan_pages

    image = image_of(prog)
    snapshot, blocks = collect(image), BlockReader(image)
    return [
        order
        for piece in scan_pages(image)
        for page in piece.kmem
        if not page.compound and not page.type and snapshot.payer(page.objcg) == memcg
        if (order := blocks.order(page.page))
    ]


@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_a_page_too_many_or_too_few_is_found(lab: Lab, plant: Plant, kernel: str) -> None:
    """Blocks explain no difference."""
    image = kvm(lab, kernel)
    memcg = memcg_of(image.report(), "/kvm/some")
    prog = image.program()
    usage = drgn.Object(prog, "struct mem_cgroup *", memcg).memory.usage
    value = int(usage.counter)
    for off in (-1, 1):
        new = (value + off).to_bytes(8, "little")
        report = plant(image, (int(usage.counter.address_ or 0), new))
        assert {
            (f.identity, f.memcg, f.difference) for f in report.findings if f.memcg == memcg
        } == {("usage", memcg, off)}


@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_free_pages_of_cpus_belong_to_no_block(lab: Lab, kernel: str) -> None:
    """A free page on the list of a CPU looks like the last page of a block."""
    prog = lab.image(kernel, "4", "files").program(dwarf=True)
    frames, blocks = mem_map(image_of(prog)), BlockReader(image_of(prog))
    free = set(pages_of_cpus(prog))
    assert len(free) > 100
    neighbours = [page - frames.size for page in free if frames.pfn(page) & 1]
    assert neighbours
    assert {blocks.order(page) for page in neighbours} == {0}


@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_list_that_is_a_circle_without_a_head(lab: Lab, kernel: str) -> None:
    """An entry of the list of a CPU points to itself."""
    image = lab.image(kernel, "4", "files")
    prog = image.program(dwarf=True)
    frames, member = mem_map(image_of(prog)), list_member(prog)
    free = {page: drgn.Object(prog, "struct page *", page) for page in pages_of_cpus(prog)}
    links = {page.member_(member).address_of_().value_() for page in free.values()}
    entries = [page.member_(member) for at, page in free.items() if frames.pfn(at) & 1]
    entry = next(e for e in entries if e.next.value_() in links)
    page = entry.address_of_().value_() - drgn.offsetof(prog.type("struct page"), member)
    after = entry.next
    changed = damaged(image.core, (after.next.address_of_().value_(), after.value_()))
    blocks, before = BlockReader(changed), changed.memory.reads
    blocks.order(page - frames.size)
    assert changed.memory.reads - before < 100


def list_member(prog: drgn.Program) -> str:
    """Return the member of ``struct page`` that is on the lists of CPUs."""
    return "pcp_list" if prog.type("struct page").has_member("pcp_list") else "lru"


def pages_of_cpus(prog: drgn.Program) -> list[int]:
    """Return the free blocks on lists of CPUs, found by a plain walk."""
    found = []
    member = list_member(prog)
    for pgdat in for_each_online_pgdat(prog):
        for zone in pgdat.node_zones:
            if not zone.per_cpu_pageset:
                continue
            for cpu in range(int(prog["nr_cpu_ids"])):
                for head in per_cpu_ptr(zone.per_cpu_pageset, cpu).lists:
                    pages = list_for_each_entry("struct page", head.address_of_(), member)
                    found += [page.value_() for page in pages]
    return found
