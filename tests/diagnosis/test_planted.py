# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The cause of faults that planters make in images of real kernels.

scripts/diagnosis plants more, and docs/diagnosis.md has the rates.
"""

from __future__ import annotations

import pytest
from drgn import Object
from drgn.helpers.linux.mm import compound_head, virt_to_page
from drgn.helpers.linux.mmzone import NODE_DATA
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.slab import find_containing_slab_cache, slab_object_info
from support import diagnosing
from support.cause_planters import PERCPU, each_percpu_size
from support.diagnosing import Case, Result
from support.guests import KERNELS, PERNODE_KERNELS, Lab
from support.planting import BY_STACKS, Fault, NoVictim, Subject, ended
from support.sampling import Sampled

from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.report import Evidence

pytestmark = pytest.mark.image


def subject(lab: Lab, kernel: str) -> Subject:
    return Subject(lab.image(kernel, "4", "mixed").program())


def doubted(image: Subject, case: Case) -> frozenset[str]:
    """Return memcgs to leave alone: a stack casts doubt on what is planted in them."""
    image.doubtful = frozenset[str]()
    for _ in range(12 if case.identity in BY_STACKS else 0):
        try:
            fault = case.planter.plant(image, case.size)
        except NoVictim:
            break
        end = ended(image.report, case.identity, fault, image.audit(fault))
        if end.outcome != "unverifiable":
            break
        image.doubtful |= frozenset(fault.paths)
    found, image.doubtful = image.doubtful, frozenset()
    return found


def of_each_cause(chosen: list[Case]) -> list[Case]:
    """Return one fault of each cause."""
    return list({case.cause: case for case in reversed(chosen)}.values())


def check_never_wrongly_sure(results: list[Result]) -> None:
    assert [r for r in results if r.wrongly_sure] == []


@pytest.mark.parametrize("kernel", ["7.3"])
def test_the_first_diagnosis_is_the_cause(lab: Lab, kernel: str) -> None:
    image = subject(lab, kernel)
    assert image.report.diagnoses == ()
    results = []
    for case in of_each_cause(diagnosing.cases(image, 1)):
        image.doubtful = doubted(image, case)
        results += list(diagnosing.singles(image, [case], 1))
    check_never_wrongly_sure(results)
    assert len(results) >= 24
    assert [(r.what, r.said) for r in results if not (r.named and r.alone)] == []


@pytest.mark.parametrize("kernel", PERNODE_KERNELS[:1])
def test_faults_of_kernels_that_count_by_node(lab: Lab, kernel: str) -> None:
    image = subject(lab, kernel)
    some = ("objcg_lists: ", "objcg_sets: ", "percpu: ", "no owner of an allocation")
    chosen = [case for case in diagnosing.cases(image, 1) if str(case).startswith(some)]
    results = list(diagnosing.singles(image, chosen, 1))
    check_never_wrongly_sure(results)
    assert len(results) >= 9
    assert [(r.what, r.said) for r in results if not (r.named and r.alone)] == []


@pytest.mark.parametrize(
    "cause",
    [c if c == "still-charged" else pytest.param(c, marks=pytest.mark.long) for c in PERCPU],
)
@pytest.mark.parametrize("kernel", ["7.3", *PERNODE_KERNELS[:1]])
def test_percpu_allocations_of_every_size(lab: Lab, kernel: str, cause: str) -> None:
    """One of less than a page on each node is seen by other rows than one of several pages."""
    image = subject(lab, kernel)
    planters = each_percpu_size(image, PERCPU[cause])
    chosen = [Case(planter, 0, cause) for planter in planters]
    results = list(diagnosing.singles(image, chosen, 1))
    check_never_wrongly_sure(results)
    assert len(results) >= 8
    assert [(r.what, r.said) for r in results if not (r.named and r.alone)] == []


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["7.3"])
def test_pairs(lab: Lab, kernel: str) -> None:
    image = subject(lab, kernel)
    chosen = diagnosing.cases(image, 1)
    image.doubtful = frozenset().union(*(doubted(image, case) for case in chosen))
    results = list(diagnosing.together(image, chosen, 2, 8))
    check_never_wrongly_sure(results)
    assert len(results) >= 5
    assert sum(r.named for r in results) >= len(results) - 1, results


def range_of_counters(image: Subject, start: Object, number: int) -> tuple[Fault, int]:
    """Overwrite neighbouring elements of an array of counters; return the address of the first."""
    # As if freed memory had been poisoned, see POISON_FREE.
    writes = [image.put(start[n], 0x6B6B6B6B) for n in range(number)]
    return Fault(tuple(writes), (), set()), writes[0].address


@pytest.mark.parametrize("kernel", KERNELS)
def test_neighbouring_counters_that_were_overwritten_are_one_cause(lab: Lab, kernel: str) -> None:
    image = subject(lab, kernel)
    path, nid = image.largest("slab", "unreclaimable")
    memcg = image.memcg(path)
    arrays = (
        memcg.vmstats.state,
        per_cpu_ptr(memcg.nodeinfo[nid].lruvec_stats_percpu, 1).state,
        NODE_DATA(image.prog, nid).vm_stat,
    )
    for array in arrays:
        fault, address = range_of_counters(image, array, 6)
        [found] = image.audit(fault).diagnoses
        assert (found.cause, found.confidence) == ("overwritten", "likely")
        where, *before = found.evidence
        # The first words may be as they were, or counters that are compared with nothing.
        assert address <= where.address < address + 4 * 8
        assert [(e.address + size_of(image, e), e.kind) for e in before] == starts_of(image, array)


def size_of(image: Subject, evidence: Evidence) -> int:
    """Return the bytes from one object of a slab to the next, or those of a percpu allocation."""
    cache = find_containing_slab_cache(image.prog, evidence.address)
    return int(cache.size) if cache else evidence.bytes or 1


def starts_of(image: Subject, array: Object) -> list[tuple[int, str]]:
    """Return where the object or the percpu allocation begins, and its kind, if there is any."""
    address = array[0].address_of_().value_()
    info = slab_object_info(image.prog, address)
    if info is not None:
        # The first object of a slab has none before it.
        heads = [
            compound_head(virt_to_page(image.prog, at)) for at in (info.address, info.address - 1)
        ]
        return [(info.address, "slab")] if heads[0] == heads[1] else []
    # The counters of a node are in no object of an allocator.
    return [] if array[0].type_.type_name() == "atomic_long_t" else [(address, "percpu")]


def test_the_words_of_a_wrong_counter(lab: Lab, sampled: Sampled) -> None:
    """The CPU and the address are named, and no other word fits."""
    image = subject(lab, "7.3")
    # A change that waits on another CPU may be of the same amount.
    image.doubtful = frozenset(path for path in image.victims() if not image.is_folded(path))
    causes = ("counter", "page-counter", "lru-size")
    cases = [case for case in diagnosing.cases(image, 1) if case.cause in causes]
    for case in sampled(cases, 2):
        fault = case.planter.plant(image, case.size)
        [found] = image.audit(fault).diagnoses
        where = [evidence.address for evidence in found.evidence]
        # Of a few counters, no row tells which node it is.
        if case.planter.what == "the page cache of a node alone":
            assert where == []
        else:
            assert where == [fault.writes[0].address], str(case)


def given_to(image: Subject, path: str, memcg: int) -> Fault:
    """
    Let the obj_cgroup of a memcg that has most bytes refer to another memcg.

    If the memcg has some that were made for the other one, it is one of these.
    """
    some = [o for o in image.snapshot.objcgs.values() if image.path(o.address) == path]
    made_for = [o for o in some if any(place.memcg == memcg for place in o.places)]
    sizes = {
        objcg.address: sum(image.snapshot.objcg_bytes[objcg.address].values())
        for objcg in made_for or some
    }
    objcg = image.object("struct obj_cgroup *", max(sizes, key=lambda each: sizes[each]))
    return Fault((image.put(objcg.memcg, memcg),), (), set())


@pytest.mark.parametrize("kernel", ["7.3", "6.1"])
def test_all_that_an_obj_cgroup_pays_for_went_to_another_memcg(lab: Lab, kernel: str) -> None:
    """That may be an ancestor, or one that was removed: then its charges are its parent's."""
    image = subject(lab, kernel)
    removed = {m.path: m for m in image.snapshot.memcgs.values() if m.offline}
    chain, above = removed["/dying/chain"], image.paths["/files"]
    for path, memcg, payer in (
        ("/dying/family", chain.address, chain.payer),
        ("/files/web", chain.address, chain.payer),
        ("/files/web", above, above),
    ):
        report = image.audit(given_to(image, path, memcg))
        [found] = report.diagnoses
        assert (found.cause, found.confidence) == ("objcg-owner", "proved")
        assert found.memcgs == (image.paths[path], payer)
        assert report.unexplained == ()


@pytest.mark.parametrize("kernel", ["7.3", "6.1"])
def test_pages_of_an_obj_cgroup_that_was_not_reparented(lab: Lab, kernel: str) -> None:
    """Since 7.1, user pages belong to an obj_cgroup, and so do their LRU lists."""
    image = subject(lab, kernel)
    [chain] = [m for m in image.snapshot.memcgs.values() if m.path == "/dying/chain"]
    report = image.audit(given_to(image, "/dying", chain.address))
    [found] = report.diagnoses
    assert (found.cause, found.confidence) == ("not-reparented", "proved")
    assert (found.memcgs, found.amount) == ((chain.address,), -1)
    assert report.unexplained == ()


@pytest.mark.parametrize("kernel", ["7.3", "6.1"])
def test_a_change_that_will_not_be_folded_is_that_of_its_counter(lab: Lab, kernel: str) -> None:
    image, item = subject(lab, kernel), "NR_SLAB_RECLAIMABLE_B"
    # On the list of a CPU, it would be folded.
    path = next(filter(image.is_folded, ("/pages/tables", *image.victims())))
    slot = StatReader(image.image, [item]).slots[item]
    write = image.add(image.memcg(path).vmstats.state_pending[slot], -200)
    report = image.audit(Fault((write,), (), set()))
    assert "never-folded" in {finding.kind for finding in report.findings}
    [found] = report.diagnoses
    assert (found.cause, found.memcgs, found.amount) == ("counter", (image.paths[path],), -200)
    assert report.unexplained == ()


@pytest.mark.long
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_planter(kernel: str) -> None:
    results: tuple[list[Result], ...] = ([], [], [])
    for unit in diagnosing.units(kernel, sizes=20, victims=2, several=60):
        results[unit.faults - 1].extend(diagnosing.run(unit))
    single, pairs, triples = results
    check_never_wrongly_sure([*single, *pairs, *triples])
    assert sum(result.cause for result in single) >= 0.99 * len(single)
    assert sum(result.named and result.alone for result in pairs) >= 0.9 * len(pairs)
