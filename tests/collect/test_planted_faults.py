# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults planted into copies of real images are found, named, and nothing else is."""

from __future__ import annotations

import pytest
from drgn import Object
from support.findings import by_path, named, touched
from support.guests import BUILT_KERNELS, DEBIAN_KERNELS, Lab, Plant

from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import SlabObject, SlabReader
from memcg_inspect.model import Finding

KERNELS = [k for k in (*DEBIAN_KERNELS, *BUILT_KERNELS) if k.startswith("7.3")]
ITEM = "NR_SLAB_UNRECLAIMABLE_B"

pytestmark = [pytest.mark.image, pytest.mark.parametrize("kernel", KERNELS)]


def an_object(prog, memcg: int, nid: int) -> SlabObject:
    """Some unreclaimable object of a memcg, on a node, away from its slab's first one."""
    snapshot, slabs = collect(image_of(prog)), SlabReader(image_of(prog))
    for piece in scan_pages(image_of(prog)):
        for page in piece.slabs:
            slab = slabs.slab(page)
            if slab is None or slab.nid != nid or slab.cache.reclaimable:
                continue
            for thing in slabs.charged_objects(slab):
                if thing.number and snapshot.payer(thing.objcg) == memcg:
                    return thing
    raise AssertionError("no such object")


def the(findings: tuple[Finding, ...], memcg: int) -> Finding:
    return next(f for f in findings if f.memcg == memcg)


@pytest.mark.parametrize("amount", [64, -4096, 1_000_003])
def test_folded_counter(lab: Lab, plant: Plant, kernel: str, amount: int) -> None:
    image = lab.image(kernel, "4")
    prog, clean = image.program(), image.report()
    web = by_path(clean)["/files/web"]
    slot = StatReader(image_of(prog), [ITEM]).slots[ITEM]
    stats = f"Object(prog, 'struct mem_cgroup *', {web}).nodeinfo[1].lruvec_stats"
    report = plant(image, (f"{stats}.state[{slot}]", f"old + {amount}"))
    assert report.verdict == "findings"
    # What a memcg claims for itself is its counter less its children's.
    assert named(report) == {
        ("/files/web", 1, ITEM, amount),
        ("/files", 1, ITEM, -amount),
    }
    assert touched(report, "/files/web")


def test_percpu_counter(lab: Lab, plant: Plant, kernel: str) -> None:
    image = lab.image(kernel, "4")
    prog, clean = image.program(), image.report()
    db = by_path(clean)["/files/db"]
    slot = StatReader(image_of(prog), [ITEM]).slots[ITEM]
    stats = f"Object(prog, 'struct mem_cgroup *', {db}).nodeinfo[2].lruvec_stats_percpu"
    report = plant(image, (f"per_cpu_ptr({stats}, 3).state[{slot}]", "old - 504"))
    assert named(report) == {("/files/db", 2, ITEM, -504)}
    assert touched(report, "/files/db")


def test_object_with_another_owner(lab: Lab, plant: Plant, kernel: str) -> None:
    image = lab.image(kernel, "4")
    prog, clean = image.program(), image.report()
    paths = by_path(clean)
    victim = an_object(prog, paths["/files/mail"], 2)
    thief = Object(prog, "struct mem_cgroup *", paths["/files/db"]).nodeinfo[2].objcg.value_()
    report = plant(image, (f"u64:{victim.element:#x}", thief))
    size = victim.slab.cache.charge
    assert named(report) == {
        ("/files/mail", 2, ITEM, size),
        ("/files/db", 2, ITEM, -size),
    }
    assert touched(report, "/files/mail", "/files/db")
    for path in ("/files/mail", "/files/db"):
        finding = the(report.findings, paths[path])
        assert finding.evidence_is == "candidates"
        assert len(finding.evidence) <= 10
        # The object stands among objects of its true owner: it heads the list.
        assert finding.evidence[0].address == victim.address
        assert finding.evidence[0].cache == victim.slab.cache.name
        assert finding.evidence[0].page == victim.slab.page


def test_pointer_to_no_objcg(lab: Lab, plant: Plant, kernel: str) -> None:
    image = lab.image(kernel, "4")
    prog, clean = image.program(), image.report()
    paths = by_path(clean)
    victim = an_object(prog, paths["/files/build"], 3)
    report = plant(image, (f"u64:{victim.element:#x}", victim.address))
    size = victim.slab.cache.charge
    assert ("/files/build", 3, ITEM, size) in named(report)
    assert touched(report, "/files/build")
    stray = next(f for f in report.findings if f.kind == "unknown-objcg")
    assert stray.evidence_is == "proof"
    assert [e.address for e in stray.evidence] == [victim.address]
    assert stray.objcg == victim.address
