# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Faults planted into copies of real images are found and named, and nothing else is.

Which objects share a slab differs from image to image. So victims are chosen by the property
that a test needs, and what a test expects of a list of candidates follows from the objects of
that very image. ``test_owner_on_a_new_image`` repeats this on images made for it.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
from drgn import Object
from support.findings import by_path, lost_updates, named, touched
from support.guests import BUILT_KERNELS, DEBIAN_KERNELS, GuestImage, Lab, Plant

from memcg_inspect.checks.evidence_query import MOST_EVIDENCE, Rank
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import SlabObject, SlabReader
from memcg_inspect.report import Finding, Report

KERNELS = [k for k in (*DEBIAN_KERNELS, *BUILT_KERNELS) if k.startswith("7.3")]
ITEM = "NR_SLAB_UNRECLAIMABLE_B"
PAGE_SIZE = 4096
OWNER, THIEF, NID = "/files/mail", "/files/db", 2

pytestmark = pytest.mark.image
each_kernel = pytest.mark.parametrize("kernel", KERNELS)

#: Charged objects of one slab, by the path of the memcg that pays.
Objects = dict[str, list[SlabObject]]


@lru_cache(maxsize=2)
def slabs_of(image: GuestImage, nid: int) -> list[Objects]:
    """Return the charged objects of each unreclaimable slab on a node."""
    drgn_image = image_of(image.program())
    snapshot, slabs = collect(drgn_image), SlabReader(drgn_image)
    found = []
    for piece in scan_pages(drgn_image):
        for slab in filter(None, map(slabs.slab, piece.slabs)):
            if slab.nid == nid and not slab.cache.reclaimable:
                objects: Objects = {}
                for thing in slabs.charged_objects(slab):
                    payer = snapshot.payer(thing.objcg)
                    assert payer is not None
                    objects.setdefault(snapshot.memcgs[payer].path, []).append(thing)
                found.append(objects)
    return found


def the(findings: tuple[Finding, ...], memcg: int) -> Finding:
    """Return the first finding on a memcg, which is that of ``slab``."""
    return next(f for f in findings if f.memcg == memcg)


@each_kernel
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


@each_kernel
def test_percpu_counter(lab: Lab, plant: Plant, kernel: str) -> None:
    image = lab.image(kernel, "4")
    prog, clean = image.program(), image.report()
    db = by_path(clean)["/files/db"]
    slot = StatReader(image_of(prog), [ITEM]).slots[ITEM]
    stats = f"Object(prog, 'struct mem_cgroup *', {db}).nodeinfo[2].lruvec_stats_percpu"
    report = plant(image, (f"per_cpu_ptr({stats}, 3).state[{slot}]", "old - 504"))
    assert named(report) == {("/files/db", 2, ITEM, -504)}
    assert touched(report, "/files/db", *lost_updates(clean))


def charge_to_thief(image: GuestImage, plant: Plant, victim: SlabObject) -> Report:
    """Charge an object of ``OWNER`` to ``THIEF``, and check which rows the report names."""
    paths = by_path(image.report())
    memcg = Object(image.program(), "struct mem_cgroup *", paths[THIEF])
    objcg = memcg.nodeinfo[NID].objcg.value_()
    report = plant(image, (f"u64:{victim.element:#x}", objcg))
    size = victim.slab.cache.charge
    assert named(report) == {(OWNER, NID, ITEM, size), (THIEF, NID, ITEM, -size)}
    assert touched(report, OWNER, THIEF)
    return report


def check_candidates(image: GuestImage, report: Report, victim: SlabObject) -> list[int]:
    """
    Compare the candidates with the objects of the image.

    The candidates are those of the thief's objects of which a number make up the difference. A
    single object comes before a number of smaller ones. Then more objects of the owner in the same
    slab count, and then no other object of the thief.

    :return: addresses of the candidates, the same in the findings of both memcgs
    """
    size, ranks = victim.slab.cache.charge, dict[int, Rank]()
    for objects in slabs_of(image, NID):
        owned, stolen = len(objects.get(OWNER, ())), objects.get(THIEF, [])
        if victim in objects.get(OWNER, ()):
            owned, stolen = owned - 1, [*stolen, victim]
        alone = len(stolen) == 1 and sum(map(len, objects.values())) > 1
        for thing in stolen:
            if size % thing.slab.cache.charge == 0:
                ranks[thing.address] = Rank(thing.slab.cache.charge == size, owned, alone)
    paths, listed = by_path(report), []
    for path in (OWNER, THIEF):
        finding = the(report.findings, paths[path])
        assert finding.evidence_is == "candidates"
        listed = [evidence.address for evidence in finding.evidence]
        assert len(listed) == len(set(listed)) == min(MOST_EVIDENCE, len(ranks))
        shown = [ranks[address] for address in listed]
        # As a list of ranks: which of equal ones comes first is not said.
        assert shown == sorted(ranks.values(), reverse=True)[:MOST_EVIDENCE]
        better = sum(rank >= ranks[victim.address] for rank in ranks.values())
        assert victim.address in listed or better > MOST_EVIDENCE
        for evidence in finding.evidence:
            likelier = sum(rank > ranks[evidence.address] for rank in ranks.values())
            assert evidence.rank == 1 + likelier
        tied = sum(ranks[address] == shown[-1] for address in ranks.keys() - set(listed))
        assert (finding.evidence_total, finding.evidence_tied) == (len(ranks), tied)
    return listed


def check_remainders(report: Report, victim: SlabObject) -> None:
    """Compare the candidates for remainders modulo a page; the object is one of them."""
    found = [f for f in report.findings if f.identity == "objcg_bytes"]
    assert len(found) == (2 if victim.slab.cache.charge % PAGE_SIZE else 0)
    for finding in found:
        assert finding.evidence_total is not None
        addresses = {evidence.address for evidence in finding.evidence}
        assert victim.address in addresses or finding.evidence_total > MOST_EVIDENCE
        # The amount is that of the object, or what is left of whole pages.
        off = (finding.difference or 0) % PAGE_SIZE
        first = [e.bytes or 0 for e in finding.evidence if e.rank == 1]
        assert {size % PAGE_SIZE for size in first} <= {off, PAGE_SIZE - off}


def among_its_own(image: GuestImage) -> SlabObject:
    """
    Return an object in a slab that has many objects of ``OWNER``, and only those.

    The workload makes thousands of files in each memcg, so their inodes fill whole slabs. A slab
    that ``THIEF`` has objects of the same size in has fewer objects of ``OWNER``.
    """
    rivals: Counter[int] = Counter()
    for objects in slabs_of(image, NID):
        for thing in objects.get(THIEF, ()):
            size = thing.slab.cache.charge
            rivals[size] = max(rivals[size], len(objects.get(OWNER, ())))
    full = [o[OWNER] for o in slabs_of(image, NID) if set(o) == {OWNER}]
    return max(full, key=lambda own: len(own) - rivals[own[0].slab.cache.charge])[-1]


def check_owner(image: GuestImage, plant: Plant) -> None:
    """
    An object whose slab otherwise has only objects of its true owner is the likeliest candidate.

    An object of the thief that is alone in another full slab of this cache is as likely.
    """
    victim = among_its_own(image)
    report = charge_to_thief(image, plant, victim)
    check_candidates(image, report, victim)
    check_remainders(report, victim)
    for path in (OWNER, THIEF):
        evidence = the(report.findings, by_path(report)[path]).evidence
        [own] = [e for e in evidence if e.address == victim.address]
        assert own.rank == 1
        assert (own.cache, own.page) == (victim.slab.cache.name, victim.slab.page)
    check_number_that_fits(image, report, victim)


def check_number_that_fits(image: GuestImage, report: Report, victim: SlabObject) -> None:
    """The diagnosis says how many objects of the thief have this size, listed or not."""
    [found] = report.diagnoses
    assert found.cause == "object-owner"
    memcg = Object(image.program(), "struct mem_cgroup *", by_path(report)[THIEF])
    objcg, size = memcg.nodeinfo[NID].objcg.value_(), victim.slab.cache.charge
    alike = [
        thing
        for objects in slabs_of(image, NID)
        for thing in objects.get(THIEF, ())
        if (thing.objcg, thing.slab.cache.charge) == (objcg, size)
    ]
    assert found.evidence_total == len(alike) + 1


@each_kernel
def test_object_with_another_owner(lab: Lab, plant: Plant, kernel: str) -> None:
    check_owner(lab.image(kernel, "4"), plant)


@each_kernel
def test_candidates_of_any_object(lab: Lab, plant: Plant, kernel: str) -> None:
    """One object of each cache is planted; the list of candidates is in order."""
    image = lab.image(kernel, "4")
    victims: dict[str, SlabObject] = {}
    for objects in slabs_of(image, NID):
        for thing in objects.get(OWNER, ()):
            victims.setdefault(thing.slab.cache.name, thing)
    assert len(victims) >= 4
    for victim in victims.values():
        report = charge_to_thief(image, plant, victim)
        assert check_candidates(image, report, victim)
        check_remainders(report, victim)
        plant.remove()


@pytest.mark.long
@pytest.mark.parametrize("number", range(10))
def test_owner_on_a_new_image(plant: Plant, number: int, tmp_path: Path) -> None:
    """The same on ten new images, whose slabs are filled differently."""
    image = GuestImage.fresh(tmp_path / "vmcore", "7.3", "4", "files")
    assert image.report().verdict == "exact"
    check_owner(image, plant)
    filled = Counter(len(objects.get(OWNER, ())) for objects in slabs_of(image, NID))
    assert filled.total() > 10
    image.remove()


@each_kernel
def test_pointer_to_no_objcg(lab: Lab, plant: Plant, kernel: str) -> None:
    image = lab.image(kernel, "4")
    victim = next(o["/files/build"][-1] for o in slabs_of(image, 3) if "/files/build" in o)
    report = plant(image, (f"u64:{victim.element:#x}", victim.address))
    size = victim.slab.cache.charge
    assert ("/files/build", 3, ITEM, size) in named(report)
    assert touched(report, "/files/build")
    orphan = next(f for f in report.findings if f.kind == "unknown-objcg")
    assert orphan.evidence_is == "proof"
    assert [e.address for e in orphan.evidence] == [victim.address]
    assert orphan.objcg == victim.address
