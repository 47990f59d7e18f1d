# SPDX-License-Identifier: LGPL-2.1-or-later
"""Diagnoses of what an address proves, and what they take along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.made_kernel import BATCH, MAIL, WEB, Kernel, Thing, busy

from memcg_inspect.checks.diagnosis import diagnose
from memcg_inspect.checks.judge import judge
from memcg_inspect.model_counters import CounterWord
from memcg_inspect.report import Diagnosis, Evidence, Finding

OBJCG = WEB + 0x100
UNRECLAIMABLE = "NR_SLAB_UNRECLAIMABLE_B"


def proof(kind: str, *addresses: int, **known: Any) -> Finding:
    """Return a finding that some addresses prove."""
    first = {
        "identity": "updated",
        "memcg": WEB,
        "objcg": None,
        "nid": 1,
        "item": "made",
        "unit": "references",
        "difference": 3,
        "what": f"made: {kind}",
        "evidence": tuple(Evidence(address=a, kind="made") for a in addresses),
        "evidence_total": len(addresses) or None,
    }
    return Finding(kind=kind, evidence_is="proof", **{**first, **known})


def of_proofs(*findings: Finding) -> list[Diagnosis]:
    return list(diagnose(busy(1).snapshot(), [], findings))


def test_a_proof_is_its_own_diagnosis() -> None:
    [found] = of_proofs(proof("never-folded", 0x8000, 0x9000))
    assert (found.cause, found.confidence, found.what) == (
        *("never-folded", "proved"),
        "made: never-folded",
    )
    assert (found.memcgs, found.nid, found.amount, found.unit) == ((WEB,), 1, 3, "references")
    assert [e.address for e in found.evidence] == [0x8000, 0x9000]
    assert (found.evidence_total, found.findings, found.others) == (2, (0,), ())
    assert found.functions == ("css_rstat_updated", "cgroup_rstat_updated")
    [nowhere] = of_proofs(proof("dangling-vector", 0x8000, memcg=None))
    assert (nowhere.cause, nowhere.memcgs) == ("vector-freed", ())


def test_findings_that_the_same_addresses_prove_are_one_diagnosis() -> None:
    two = (proof("never-folded", 0x8000), proof("stale-active-memcg", 0x8000, memcg=MAIL))
    [one] = of_proofs(*two)
    assert (one.cause, one.memcgs, one.findings) == ("never-folded", (WEB,), (0, 1))
    assert len(of_proofs(two[0], proof("stale-active-memcg", 0x8000, 0x9000))) == 2
    # Nothing tells that those without an address are one.
    assert len(of_proofs(proof("never-folded"), proof("never-folded", memcg=MAIL))) == 2


def test_candidates_and_findings_of_no_known_cause_prove_nothing() -> None:
    candidates = replace(proof("never-folded", 0x8000), evidence_is="candidates")
    assert of_proofs(candidates, proof("counter-above-objects", 0x9000)) == []
    assert diagnose(busy(1).snapshot(), [], []) == ()


def test_the_diagnosis_of_most_findings_comes_first() -> None:
    some = [
        proof("objcg-set", 0x7000),
        proof("never-folded", 0x8000),
        proof("never-folded", 0x8000, memcg=MAIL),
        proof("dangling-vector", 0x9000),
    ]
    assert [d.cause for d in of_proofs(*some)] == ["never-folded", "objcg-set", "vector-freed"]


LEAKED = proof("leaked-memcg", 0x6000, 0x6100, difference=2)


@pytest.mark.parametrize(
    ("other", "follows"),
    [
        (proof("unknown-objcg", 0x8000, objcg=0x6000), True),
        (proof("unknown-objcg", 0x6000, objcg=0x5000), False),
        (proof("unknown-objcg", 0x8000, objcg=None), False),
        (proof("never-folded", 0x6000), False),
        (proof("skew", 0x8000, evidence=(Evidence(address=1, kind="slab", objcg=0x6100),)), True),
        (proof("skew", 0x6000, evidence=(Evidence(address=0x6000, kind="slab", objcg=1),)), False),
        (
            proof(
                "skew",
                evidence=(
                    Evidence(address=1, kind="slab", objcg=0x6100),
                    Evidence(address=2, kind="slab", objcg=0x9900),
                ),
            ),
            False,
        ),
    ],
)
def test_what_is_charged_to_a_memcg_that_was_forgotten_follows_from_it(
    other: Finding, follows: bool
) -> None:
    for findings in ((LEAKED, other), (other, LEAKED)):
        found = of_proofs(*findings)
        assert len(found) == (1 if follows else 2)
        if follows:
            assert (found[0].cause, found[0].findings) == ("memcg-leaked", (0, 1))
    misplaced = proof("misplaced-objcg", 0x6000, 0x6100)
    assert len(of_proofs(misplaced, other)) == (1 if follows else 2)
    # Other proofs explain nothing else.
    assert len(of_proofs(proof("objcg-set", 0x6000, 0x6100), other)) == 2


# Charges to what is no obj_cgroup


def diagnosed(kernel: Kernel, *words: CounterWord) -> tuple[Diagnosis, ...]:
    made = kernel.snapshot()
    judged = judge(made)
    return diagnose(made, judged.rows, [pending.finding for pending in judged.findings], words)


def orphaned(*owners: int, size: int = 1112, seed: int = 1) -> tuple[Kernel, list[Thing]]:
    """Charge an object for each owner, which is no obj_cgroup."""
    kernel = busy(seed)
    for owner in owners:
        kernel.slab(OBJCG, 0, size, "unreclaimable")
        kernel.things[-1].payer = owner
    return kernel, kernel.things[-len(owners) :]


def test_an_object_that_refers_to_no_obj_cgroup_has_a_proof() -> None:
    kernel, _ = orphaned(0xBAD)
    [found] = diagnosed(kernel)
    assert (found.cause, found.confidence, found.memcgs) == ("object-owner", "proved", (WEB,))
    assert found.what.endswith("and now refers to 0xbad, which is no obj_cgroup")
    assert (found.others, found.amount) == ((), 1112)
    assert found.functions == ("__memcg_slab_post_alloc_hook",)


@pytest.mark.parametrize(
    ("change", "is_it"),
    [
        ({}, True),
        ({"bytes": 1104}, False),
        ({"nid": 1}, False),
        ({"detail": "reclaimable"}, False),
        ({"kind": "percpu", "detail": "data"}, False),
    ],
)
def test_the_object_has_the_size_node_and_detail_of_what_was_charged(
    change: dict[str, Any], is_it: bool
) -> None:
    kernel, [thing] = orphaned(0xBAD)
    for name, value in change.items():
        setattr(thing, name, value)
    found = diagnosed(kernel)
    assert {d.cause for d in found} == (
        {"object-owner"} if is_it else {"still-charged", "unknown-owner"}
    )


def test_the_node_and_detail_of_other_charges_are_in_no_row() -> None:
    kernel = busy(1)
    kernel.percpu(OBJCG, 672)
    kernel.things[-1].payer = 0xBAD
    kernel.things[-1].nid, kernel.things[-1].detail = 1, "chunk"
    [found] = diagnosed(kernel)
    assert (found.cause, found.confidence) == ("object-owner", "proved")
    assert found.what.startswith("a percpu allocation of 672 bytes was charged to ")


def test_several_charges_of_one_finding_are_not_told_apart() -> None:
    """One finding lists all charges to an address. If they are of two sorts, no one is known."""
    kernel, _ = orphaned(0xBAD)
    kernel.things.append(Thing("slab", "reclaimable", 1, 64, 0xBAD))
    assert {d.cause for d in diagnosed(kernel)} == {"still-charged", "unknown-owner"}


def test_of_two_objects_none_is_known_to_be_it() -> None:
    kernel, [one, other] = orphaned(0xBAD, 0xBAD0)
    kernel.things.remove(one)
    kernel.things.append(Thing("slab", "unreclaimable", 0, 1112, 0xBAD))
    kernel.refs[OBJCG] -= 1
    other.payer = OBJCG
    kernel.things.append(Thing("slab", "unreclaimable", 0, 1112, 0xBAD8))
    assert "object-owner" not in {d.cause for d in diagnosed(kernel)}


# Changes that are on no list to fold them from


def never_folded(memcg: int, number: int, item: str) -> Finding:
    return proof(
        "never-folded",
        0x8000,
        memcg=memcg,
        nid=None,
        item="unfolded counters",
        difference=number,
        what=f"{number} counters: {item} and others",
    )


def with_unfolded(kernel: Kernel, unfolded: Finding, *words: CounterWord) -> Sequence[Diagnosis]:
    made = kernel.snapshot()
    judged = judge(made)
    findings = [pending.finding for pending in judged.findings]
    return diagnose(made, judged.rows, [*findings, unfolded], words)


@pytest.mark.parametrize(
    ("memcg", "number", "item", "place", "together"),
    [
        (WEB, 1, "NR_PAGETABLE", "cpu", True),
        (WEB, 2, "NR_PAGETABLE", "cpu", False),
        (MAIL, 1, "NR_PAGETABLE", "cpu", False),
        (WEB, 1, "NR_PAGETABLE_2", "cpu", False),
        (WEB, 1, "XNR_PAGETABLE", "cpu", False),
        (WEB, 1, "NR_PAGETABLE", "state", False),
    ],
)
def test_changes_that_no_flush_knows_of_are_those_that_are_wrong(
    memcg: int, number: int, item: str, place: str, together: bool
) -> None:
    kernel = busy(1)
    getattr(kernel, place)[WEB, "NR_PAGETABLE", 1] += 900
    found = with_unfolded(kernel, never_folded(memcg, number, item))
    assert [d.cause for d in found] == ["counter"] if together else ["counter", "never-folded"]


def overwritten(number: int) -> tuple[Kernel, list[CounterWord]]:
    """Overwrite what a CPU has changed in several counters of WEB on node 0."""
    items = (UNRECLAIMABLE, "NR_KERNEL_STACK_KB", "NR_PAGETABLE", "NR_ANON_MAPPED")[:number]
    kernel = busy(1)
    words = []
    for n, item in enumerate(items):
        kernel.cpu[WEB, item, 0] += 40_000
        words.append(CounterWord("percpu", item, 0x8000 + 8 * n, 8, WEB, 0, 1, 40_000))
    return kernel, words


@pytest.mark.parametrize(
    ("memcg", "number", "together"),
    [(WEB, 3, True), (WEB, 1, True), (WEB, 4, False), (WEB, 0, False), (MAIL, 3, False)],
)
def test_an_event_leaves_as_many_counters_with_changes(
    memcg: int, number: int, together: bool
) -> None:
    kernel, words = overwritten(3)
    found = with_unfolded(kernel, never_folded(memcg, number, "made"), *words)
    assert [d.cause for d in found] == ["overwritten"] + ["never-folded"] * (not together)
    assert found[0].evidence_total == 1
    assert found[0].confidence == "likely"
    assert len(found[0].signature) >= 6


def test_counters_that_are_wrong_have_words_as_evidence() -> None:
    kernel, words = overwritten(1)
    [found] = diagnosed(kernel, *words)
    assert [e.address for e in found.evidence] == [0x8000]
    assert found.evidence_total == 1
    many = [words[0]._replace(address=0x9000 + 8 * n, cpu=n) for n in range(12)]
    [found] = diagnosed(kernel, *many)
    assert (len(found.evidence), found.evidence_total) == (10, 12)
    [without] = diagnosed(kernel)
    assert (without.evidence, without.evidence_total) == ((), None)


def test_other_explanations_are_said_once_and_not_that_of_the_diagnosis() -> None:
    for memcg in (WEB, BATCH):
        kernel = busy(1)
        kernel.slab(kernel.objcg(memcg, 0), 0, 736, "unreclaimable")
        kernel.things.pop()
        [found] = diagnosed(kernel)
        assert found.confidence == "likely"
        assert 0 < len(found.others) <= 5
        assert len(set(found.others)) == len(found.others)
        assert found.what not in found.others


@pytest.mark.parametrize(
    ("change", "is_it"),
    [
        ({}, True),
        ({"memcg": WEB}, False),
        ({"identity": "percpu"}, False),
        ({"nid": 1}, False),
        ({"difference": 1104}, False),
        ({"kind": "objcg-set"}, False),
    ],
)
def test_a_charge_on_the_node_of_another_obj_cgroup_proves_who_has_it(
    change: dict[str, Any], is_it: bool
) -> None:
    """The charge that moved is on another node than that of its new owner."""
    kernel = busy(1)
    kernel.slab(OBJCG, 0, 1112, "unreclaimable")
    kernel.things[-1].payer = MAIL + 0x200
    known = {"identity": "slab", "memcg": MAIL, "nid": 0, "difference": 1112, "unit": "bytes"}
    skew = proof(**{"kind": "skew", **known, **change}, evidence=(Evidence(0x8000, "slab", nid=0),))
    found = with_unfolded(kernel, skew)
    [moved] = [d for d in found if d.cause == "object-owner"]
    assert moved.confidence == ("proved" if is_it else "likely")
    assert [e.address for e in moved.evidence] == ([0x8000] if is_it else [])
    assert len(found) == (1 if is_it else 2)
