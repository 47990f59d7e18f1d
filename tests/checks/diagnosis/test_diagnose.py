# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a diagnosis says of the objects and findings of its cause."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from support.made_kernel import BATCH, MAIL, PAGE, WEB, Kernel, Thing, busy

from memcg_inspect.checks.diagnosis import diagnose
from memcg_inspect.checks.diagnosis.charges import _sums
from memcg_inspect.checks.diagnosis.differences import Differences, View
from memcg_inspect.checks.diagnosis.registry import CAUSES, cause_of
from memcg_inspect.checks.identities.slab import ITEMS
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.checks.rows import RowKey, finding_key, row_key
from memcg_inspect.model_tasks import TaskCharge
from memcg_inspect.report import Diagnosis, Evidence, Finding

#: Number of candidates by kind, bytes of one charge and obj_cgroup.
Sizes = Mapping[tuple[str, int, int], int]


def findings_of(kernel: Kernel) -> list[Finding]:
    return [pending.finding for pending in judge(kernel.snapshot()).findings]


def diagnoses(
    kernel: Kernel, findings: list[Finding], sizes: Sequence[Sizes] = ()
) -> tuple[Diagnosis, ...]:
    made = kernel.snapshot()
    return diagnose(made, judge(made).rows, findings, sizes=sizes)


def of_cause(found: tuple[Diagnosis, ...], cause: str) -> list[Diagnosis]:
    return [diagnosis for diagnosis in found if diagnosis.cause == cause]


def test_a_row_of_pages_is_not_of_bytes_that_round_to_none() -> None:
    kernel = busy(1)
    kernel.slab(kernel.objcg(WEB, 0), 0, 200, "unreclaimable")
    kernel.things.pop()
    kernel.usage[WEB] += 60_000
    findings = findings_of(kernel)
    [freed] = of_cause(diagnoses(kernel, findings), "still-charged")
    [pages] = of_cause(diagnoses(kernel, findings), "page-counter")
    assert "usage" not in {findings[n].identity for n in freed.findings}
    assert "usage" in {findings[n].identity for n in pages.findings}


def test_a_row_of_pages_is_of_the_bytes_of_two_causes_that_round_to_one() -> None:
    kernel = busy(1)
    objcg = kernel.objcg(WEB, 0)
    kernel.slab(objcg, 0, 1112, "unreclaimable")
    kernel.percpu(objcg, 1304)
    del kernel.things[-2:]
    findings = findings_of(kernel)
    found = diagnoses(kernel, findings)
    assert [d.cause for d in found] == ["still-charged"] * 2
    for freed in found:
        assert "usage" in {findings[n].identity for n in freed.findings}


def several(kernel: Kernel) -> list[Thing]:
    """Let a memcg have 5 more objects of one cache."""
    for _ in range(5):
        kernel.slab(kernel.objcg(WEB, 0), 0, 704, "unreclaimable")
    return kernel.things[-5:]


def test_objects_of_one_memcg_that_lost_their_owner_are_one_cause() -> None:
    unknown = "and now refer to what is no obj_cgroup"
    for owners, now in (
        ([None] * 5, "and nothing refers to them: freed, or their owners lost"),
        ([0xBAD] * 5, "and now refer to 0xbad, which is no obj_cgroup"),
        ([0xBAD] * 3 + [0xBAE] * 2, unknown),
        ([0xBAD0 + n for n in range(5)], unknown),
    ):
        kernel = busy(1)
        for thing, owner in zip(several(kernel), owners, strict=True):
            if owner is None:
                kernel.things.remove(thing)
            else:
                thing.payer = owner
        [found] = diagnoses(kernel, findings_of(kernel))
        assert (found.memcgs, found.nid, found.amount) == ((WEB,), 0, 5 * 704)
        assert found.what.startswith("5 slab objects of 3,520 bytes together on node 0 ")
        assert found.what.endswith(now)
        proved = owners[0] is not None
        assert found.cause == ("object-owner" if proved else "still-charged")
        # A single object of as many bytes, and 4 references that were lost, look alike.
        assert found.confidence == ("proved" if proved else "likely")
        assert bool(found.others) == (not proved)


def test_objects_that_another_memcg_got_are_one_cause() -> None:
    kernel = busy(1)
    for thing in several(kernel):
        thing.payer = kernel.objcg(MAIL, 0)
    [found] = diagnoses(kernel, findings_of(kernel))
    assert (found.cause, found.memcgs, found.amount) == ("object-owner", (WEB, MAIL), 5 * 704)
    assert found.confidence == "likely"
    assert "5 slab objects" in found.what


def test_one_unknown_owner_is_no_proof_of_two_causes() -> None:
    def lost(kernel: Kernel, memcg: int) -> None:
        kernel.slab(kernel.objcg(memcg, 0), 0, 1112, "unreclaimable")

    kernel = busy(1)
    lost(kernel, WEB)
    kernel.things[-1].payer = 0xBAD
    proved = diagnoses(kernel, findings_of(kernel))
    assert [d.memcgs for d in of_cause(proved, "object-owner")] == [(WEB,)]
    assert [d.confidence for d in of_cause(proved, "object-owner")] == ["proved"]
    lost(kernel, BATCH)
    kernel.things.pop()
    found = diagnoses(kernel, findings_of(kernel))
    assert of_cause(found, "object-owner") == []
    freed = of_cause(found, "still-charged")
    assert {d.memcgs for d in freed} == {(WEB,), (BATCH,)}
    assert {d.confidence for d in freed} == {"likely"}


@pytest.mark.parametrize(
    ("kind", "detail", "nid", "size", "is_it"),
    [
        ("slab", "unreclaimable", 0, 1112, True),
        ("slab", "reclaimable", 0, 1112, False),
        ("slab", "unreclaimable", 1, 1112, False),
        ("slab", "unreclaimable", 0, 1104, False),
        ("percpu", "data", 0, 1112, False),
    ],
)
def test_an_object_with_an_unknown_owner_is_the_one_that_was_charged(
    kind: ChargeKind, detail: str, nid: int, size: int, is_it: bool
) -> None:
    kernel = busy(1)
    kernel.slab(kernel.objcg(WEB, 0), 0, 1112, "unreclaimable")
    kernel.things[-1] = Thing(kind, detail, nid, size, 0xBAD)
    found = diagnoses(kernel, findings_of(kernel))
    causes = {"object-owner"} if is_it else {"still-charged", "unknown-owner"}
    assert {d.cause for d in found} == causes
    assert [d.memcgs for d in of_cause(found, "unknown-owner")] == ([] if is_it else [()])
    # If it owns more than one, that is no proof.
    kernel.things.append(Thing("slab", "reclaimable", 1, 64, 0xBAD))
    found = diagnoses(kernel, findings_of(kernel))
    if kind == "slab":
        assert {d.cause for d in found} == {"still-charged", "unknown-owner"}


def test_what_a_block_of_an_unknown_owner_is_used_for_does_not_matter() -> None:
    kernel = busy(1)
    kernel.kmem(kernel.objcg(WEB, 0), 0, "table")
    kernel.things[-1] = replace(kernel.things[-1], detail="other", payer=0xBAD)
    [found] = diagnoses(kernel, findings_of(kernel))
    assert (found.cause, found.confidence) == ("object-owner", "proved")


def test_no_object_that_was_found_is_one_that_nothing_refers_to() -> None:
    kernel = busy(1)
    kernel.slab(kernel.objcg(WEB, 0), 0, 1112, "unreclaimable")
    kernel.things.pop()
    payer = kernel.objcg(WEB, 0)
    same = Evidence(address=1, kind="slab", nid=0, bytes=1112, objcg=payer, memcg=WEB)
    findings = [replace(f, evidence=(same,), evidence_total=1) for f in findings_of(kernel)]
    [freed] = of_cause(diagnoses(kernel, findings), "still-charged")
    assert (freed.evidence, freed.evidence_total) == ((), None)


def test_an_unknown_owner_is_no_proof_of_what_was_not_counted() -> None:
    kernel = busy(1)
    for payer in (kernel.objcg(WEB, 0), 0xBAD):
        kernel.things.append(Thing("slab", "unreclaimable", 0, 1112, payer))
    found = diagnoses(kernel, findings_of(kernel))
    assert [d.cause for d in found] == ["not-counted", "unknown-owner"]


def test_a_charge_on_another_node_is_proved_by_its_pages() -> None:
    """Of what is compared for all nodes together, no row shows the node."""

    def proof(identity: str, memcg: int, nid: int, size: int) -> Finding:
        where = Evidence(address=0x8000, kind=identity, nid=nid)
        known = (identity, "skew", memcg, None, nid, identity, "bytes", size, "made", "proof")
        return Finding(*known, (where,), 1)

    for use, identity, nid, followed in (
        ("other", "kmem", 0, {(WEB, 0, PAGE), (WEB, 1, PAGE)}),
        ("table", "kmem", 1, {(WEB, 1, PAGE)}),
    ):
        kernel = busy(1)
        kernel.kmem(kernel.objcg(WEB, 0), nid, use)
        kernel.things.pop()
        findings = findings_of(kernel)
        for at in ((WEB, 0, PAGE), (WEB, 1, PAGE), (MAIL, 1, PAGE), (WEB, 1, 2 * PAGE)):
            found = diagnoses(kernel, [*findings, proof(identity, *at)])
            [freed] = of_cause(found, "still-charged")
            assert (len(findings) in freed.findings) == (at in followed)
            assert freed.confidence == ("proved" if at in followed else "likely")


def test_objects_with_another_owner_are_those_of_any_obj_cgroup_if_none_is_known() -> None:
    kernel = busy(1)
    kernel.slab(kernel.objcg(WEB, 0), 0, 1112, "unreclaimable")
    kernel.things[-1].payer = kernel.objcg(MAIL, 0)
    [alone] = without_objcgs(kernel)
    assert alone.evidence == ()
    [moved] = without_objcgs(
        kernel,
        *(
            Evidence(address=nid, kind="slab", nid=0, bytes=1112, objcg=kernel.objcg(MAIL, nid))
            for nid in (0, 1)
        ),
    )
    assert [e.address for e in moved.evidence] == [0, 1]


def test_all_objects_that_may_be_the_cause_are_counted() -> None:
    def total(count: int | None, sizes: Sizes) -> int | None:
        listed = tuple(
            Evidence(address=n, kind="slab", nid=0, bytes=1112, objcg=payer, memcg=MAIL, rank=n)
            for n in range(1, 11)
        )
        number = next(n for n, f in enumerate(findings) if (f.identity, f.memcg) == ("slab", MAIL))
        given = list(findings)
        given[number] = replace(given[number], evidence=listed, evidence_total=count)
        counts = [sizes if n == number else {} for n in range(len(findings))]
        [moved] = of_cause(diagnoses(kernel, given, counts), "object-owner")
        assert moved.evidence == listed
        return moved.evidence_total

    kernel = busy(1)
    kernel.slab(kernel.objcg(WEB, 0), 0, 1112, "unreclaimable")
    kernel.things[-1].payer = payer = kernel.objcg(MAIL, 0)
    findings = findings_of(kernel)
    assert total(10, {}) == 10
    assert total(40, {}) is None
    assert total(None, {}) is None
    # Others are of another size or kind, or of the other obj_cgroup of the memcg.
    others = {("slab", 556, payer): 3, ("kmem", 1112, payer): 5, ("slab", 1112, payer + 8): 7}
    assert total(40, {("slab", 1112, payer): 25, **others}) == 25


def test_objects_that_were_not_counted_are_those_of_the_obj_cgroup() -> None:
    kernel = busy(1)
    payer = kernel.objcg(WEB, 0)
    kernel.things.append(Thing("slab", "reclaimable", 0, 1112, payer))
    findings = findings_of(kernel)
    number = next(n for n, f in enumerate(findings) if (f.identity, f.memcg) == ("slab", WEB))
    listed = tuple(
        Evidence(address=n, kind="slab", nid=0, bytes=1112, objcg=objcg, memcg=WEB, rank=n)
        for n, objcg in enumerate((payer, payer + 8, payer), 1)
    )
    findings[number] = replace(findings[number], evidence=listed, evidence_total=3)
    [found] = of_cause(diagnoses(kernel, findings), "not-counted")
    assert [e.address for e in found.evidence] == [1, 3]
    assert found.evidence_total == 2


def test_objects_with_another_owner_are_those_of_the_new_one() -> None:
    kernel = busy(1)
    old, new = kernel.objcg(WEB, 0), kernel.objcg(MAIL, 0)
    kernel.slab(old, 0, 1112, "unreclaimable")
    kernel.things[-1].payer = new
    findings = findings_of(kernel)
    number = next(n for n, f in enumerate(findings) if (f.identity, f.memcg) == ("slab", MAIL))
    listed = tuple(
        Evidence(address=n, kind="slab", nid=0, bytes=1112, objcg=objcg, memcg=MAIL, rank=n)
        for n, objcg in enumerate((old, new), 1)
    )
    findings[number] = replace(findings[number], evidence=listed, evidence_total=2)
    [moved] = of_cause(diagnoses(kernel, findings), "object-owner")
    assert [e.address for e in moved.evidence] == [2]


@pytest.mark.parametrize(("more", "ways"), [(0, 1), (1, 5), (2, 8), (4, 5), (5, 1), (6, 0)])
def test_ways_to_share_out_half_pages(more: int, ways: int) -> None:
    """A page on each of five nodes, and half a page that was rounded. Eight ways are tried."""
    nodes = range(5)
    size = 5 * PAGE // 2 + more * PAGE
    found = [*_sums(dict.fromkeys(nodes, PAGE), dict.fromkeys(nodes, PAGE // 2), size, PAGE)]
    assert len(found) == len({tuple(parts.items()) for parts in found}) == ways
    for parts in found:
        assert sum(parts.values()) == size
        assert {*parts.values()} <= {PAGE // 2, 3 * PAGE // 2}


def test_functions_are_named_as_in_c() -> None:
    named = {function for cause in CAUSES for function in cause.functions}
    assert named
    assert [name for name in named if not re.fullmatch("[a-z_][a-z0-9_]*", name)] == []


def test_functions_are_those_of_what_was_charged() -> None:
    for kind, moving, freeing in (
        ("slab", {"__memcg_slab_post_alloc_hook"}, {"__memcg_slab_free_hook"}),
        ("percpu", {"pcpu_memcg_post_alloc_hook"}, {"pcpu_memcg_free_hook"}),
        ("sock", {"mem_cgroup_sk_alloc"}, {"__sk_mem_reduce_allocated"}),
    ):
        kernel = busy(2)
        thing = next(t for t in kernel.things if t.kind == kind and kernel.memcg_of(t.payer) == WEB)
        thing.payer = MAIL if kind == "sock" else kernel.objcg(MAIL, 0)
        [moved] = diagnoses(kernel, findings_of(kernel))
        assert set(moved.functions) == moving
        kernel = busy(2)
        kernel.things.remove(
            next(t for t in kernel.things if t.kind == kind and t.payer >> 12 == 3)
        )
        [freed] = diagnoses(kernel, findings_of(kernel))
        assert set(freed.functions) == freeing


def without_objcgs(kernel: Kernel, *listed: Evidence) -> tuple[Diagnosis, ...]:
    """
    Return the diagnoses if no identity of obj_cgroups can be verified.

    :param listed: evidence of each finding
    """
    made, hidden = kernel.snapshot(), ("references", "objcg_bytes")
    judged = judge(made)
    rows = [
        replace(row, status="unverifiable", reason="made") if row.identity in hidden else row
        for row in judged.rows
    ]
    findings = [
        replace(p.finding, evidence=listed, evidence_total=len(listed))
        for p in judged.findings
        if p.finding.identity not in hidden
    ]
    return diagnose(made, rows, findings)


def test_an_object_that_moved_may_be_two_faults_of_its_size() -> None:
    kernel = busy(1)
    kernel.slab(kernel.objcg(WEB, 0), 0, 1112, "unreclaimable")
    kernel.things[-1].payer = kernel.objcg(MAIL, 0)
    known = diagnoses(kernel, findings_of(kernel))
    for found in (known, without_objcgs(kernel)):
        assert [(d.cause, d.confidence) for d in found] == [("object-owner", "likely")]
        lost, more = found[0].others[0].split("; and ")
        assert lost.endswith("and nothing refers to it: freed, or its owner lost")
        assert more.endswith(f"memcg {MAIL:#x}, and was not charged")


def test_a_reference_that_no_task_cached_is_not_that_of_a_stale_task() -> None:
    for cached, taken in ((0, True), (1, False)):
        kernel = busy(1)
        kernel.refs[kernel.objcg(WEB, 0)] += 1
        kernel.refs[kernel.objcg(MAIL, 0)] -= 1
        task = TaskCharge(1, 1, "made", WEB, (kernel.objcg(MAIL, cached),), False, True)
        made = replace(kernel.snapshot(), tasks=(task,))
        judged = judge(made)
        key = RowKey("task_objcg", "task->objcg", "references", WEB)
        findings = [pending.finding for pending in judged.findings]
        differing = {
            row_key(r): r.difference or 0 for r in judged.rows if r.status == "differs"
        } | {key: 1}
        view = View(Differences(made, judged.rows, set(map(finding_key, findings))), differing)
        options = list(cause_of("task-objcg").options(view, key, 1))
        assert bool(options) == taken


def test_a_proof_without_objects_does_not_follow_from_another_one() -> None:
    def proof(identity: str, kind: str, *evidence: Evidence) -> Finding:
        return Finding(
            identity,
            kind,
            WEB,
            None,
            0,
            "",
            "bytes",
            4096,
            "made",
            "proof",
            evidence,
            len(evidence),
        )

    at = Evidence(address=0x6000, kind="memcg")
    leaked, objcg = proof("dying", "leaked-memcg", at), proof("objcg_lists", "misplaced-objcg", at)
    objects = Evidence(address=0x8000, kind="lru", objcg=0x6000)
    unknown = replace(proof("slab", "unknown-objcg"), memcg=None)
    unfolded = proof("updated", "never-folded", at)
    for first, second, causes in (
        (leaked, proof("lru", "skew"), {"memcg-leaked", "charged-to-node"}),
        (leaked, proof("lru", "skew", objects), {"memcg-leaked"}),
        (objcg, proof("lru", "skew", objects), {"objcg-owner"}),
        (leaked, replace(unknown, objcg=0x6000), {"memcg-leaked"}),
        (leaked, replace(unknown, objcg=0x7000), {"memcg-leaked", "unknown-owner"}),
        # What is proved about another structure has no charges.
        (unfolded, proof("lru", "skew", objects), {"never-folded", "charged-to-node"}),
    ):
        found = diagnose(busy(1).snapshot(), [], [first, second])
        assert {d.cause for d in found} == causes
    # Two findings that the same structure proves are one.
    [both] = diagnose(busy(1).snapshot(), [], [leaked, replace(leaked, nid=1)])
    assert both.findings == (0, 1)


def test_a_local_counter_of_slab_memory_that_is_off() -> None:
    # The kernel may have kept some bytes too many by mistake, but not as many as these.
    for item in ITEMS.values():
        for amount in (-200, -(1 << 40), 1 << 50):
            kernel = busy(1)
            kernel.local[WEB, item, 0] += amount
            kernel.flushed[WEB, item, 0] += amount
            [found] = diagnoses(kernel, findings_of(kernel))
            assert (found.cause, found.memcgs, found.nid) == ("local-counter", (WEB,), 0)
            assert abs(found.amount) == abs(amount)


def test_of_causes_with_as_many_findings_those_that_are_proved_come_first() -> None:
    kernel = busy(1)
    for counters in (kernel.local, kernel.flushed):
        counters[WEB, "NR_SLAB_RECLAIMABLE_B", 0] -= 200
    [local] = findings_of(kernel)
    evidence = (Evidence(address=0x6000, kind="memcg"),)
    leaked = replace(
        local, identity="dying", kind="leaked-memcg", evidence_is="proof", evidence=evidence
    )
    found = diagnoses(kernel, [local, leaked])
    assert [d.cause for d in found] == ["memcg-leaked", "local-counter"]
    assert {len(d.findings) for d in found} == {1}


def test_a_small_fault_is_the_only_explanation_where_nothing_else_is_wrong() -> None:
    kernel = busy(1)
    kernel.refs[kernel.objcg(WEB, 0)] += 1
    [found] = diagnoses(kernel, findings_of(kernel))
    assert (found.cause, found.confidence) == ("reference-leaked", "only-explanation")
    # What an address proves may have made it, too.
    evidence = (Evidence(address=0x9000, kind="memcg"),)
    [finding] = findings_of(kernel)
    local = replace(
        finding,
        identity="local",
        item=ITEMS["reclaimable"],
        kind="never-folded",
        memcg=MAIL,
        objcg=None,
        evidence_is="proof",
        evidence=evidence,
    )
    [leaked] = of_cause(diagnoses(kernel, [finding, local]), "reference-leaked")
    assert leaked.confidence == "likely"


def test_references_to_a_memcg_that_leaked_follow_from_that() -> None:
    for number, cause in ((1, "reference-leaked"), (-1, "reference-lost")):
        kernel = busy(1)
        kernel.css[WEB] += number
        [references] = findings_of(kernel)
        proof = replace(
            references,
            identity="dying",
            item="",
            kind="leaked-memcg",
            evidence_is="proof",
            evidence=(Evidence(address=WEB, kind="memcg"),),
        )
        [alone] = diagnoses(kernel, [references])
        assert alone.cause == cause
        [found] = diagnoses(kernel, [references, proof])
        assert (found.cause, found.findings) == ("memcg-leaked", (0, 1))
        other = replace(proof, evidence=(Evidence(address=MAIL, kind="memcg"),))
        assert {d.cause for d in diagnoses(kernel, [references, other])} == {cause, "memcg-leaked"}
        # Those of an obj_cgroup are no references to a memcg.
        kernel = busy(1)
        kernel.refs[kernel.objcg(WEB, 0)] += number
        [references] = findings_of(kernel)
        assert {d.cause for d in diagnoses(kernel, [references, proof])} == {cause, "memcg-leaked"}


def test_no_other_explanation_says_the_same() -> None:
    """A charge with its reference and one without it are the same in words."""
    kernel = busy(1)
    kernel.things.append(Thing("slab", "reclaimable", 0, 1112, kernel.objcg(WEB, 0)))
    found = without_objcgs(kernel)
    assert found
    for diagnosis in found:
        assert diagnosis.what not in diagnosis.others
        assert len(set(diagnosis.others)) == len(diagnosis.others)


def test_a_change_that_no_flush_finds_is_that_of_the_counter_in_a_cpu() -> None:
    item = "NR_PAGETABLE"

    def found(where: str, difference: int = 1, memcg: int = WEB, what: str = item) -> set[str]:
        kernel = busy(1)
        getattr(kernel, where)[WEB, item, 0] += 40
        findings = findings_of(kernel)
        unfolded = replace(
            findings[0],
            identity="updated",
            item="changes to fold",
            kind="never-folded",
            memcg=memcg,
            nid=None,
            difference=difference,
            what=f"changes of {what} are on no list",
            evidence_is="proof",
            evidence=(Evidence(address=0x8000, kind="memcg"),),
        )
        return {d.cause for d in diagnoses(kernel, [*findings, unfolded])}

    both = {"counter", "never-folded"}
    assert found("cpu") == {"counter"}
    assert found("state") == both
    assert found("cpu", difference=2) == found("cpu", memcg=MAIL) == both
    assert found("cpu", what="NR_PAGETABLES") == both


def test_no_more_than_five_other_explanations_are_named() -> None:
    kernel, item = Kernel(), "NR_PAGETABLE"
    kernel.cpu[WEB, item, 0] += 40
    kernel.cpu[WEB, item, 1] -= 40
    for diagnosis in diagnoses(kernel, findings_of(kernel)):
        assert len(diagnosis.others) == 5
