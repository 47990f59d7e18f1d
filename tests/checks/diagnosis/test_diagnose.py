# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a diagnosis says of the objects and findings of its cause."""

from __future__ import annotations

from dataclasses import replace

from support.made_kernel import BATCH, MAIL, WEB, Kernel, busy

from memcg_inspect.checks.diagnosis import diagnose
from memcg_inspect.checks.judge import judge
from memcg_inspect.report import Diagnosis, Evidence, Finding


def findings_of(kernel: Kernel) -> list[Finding]:
    return [pending.finding for pending in judge(kernel.snapshot()).findings]


def diagnoses(kernel: Kernel, findings: list[Finding]) -> tuple[Diagnosis, ...]:
    made = kernel.snapshot()
    return diagnose(made, judge(made).rows, findings)


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


def test_all_objects_that_may_be_the_cause_are_counted() -> None:
    def total(count: int | None, tied: int | None) -> int | None:
        listed = tuple(
            Evidence(address=n, kind="slab", nid=0, bytes=1112, objcg=payer, memcg=MAIL, rank=n)
            for n in range(1, 11)
        )
        given = [
            replace(f, evidence=listed, evidence_total=count, evidence_tied=tied)
            if (f.identity, f.memcg) == ("slab", MAIL)
            else f
            for f in findings
        ]
        [moved] = of_cause(diagnoses(kernel, given), "object-owner")
        assert moved.evidence == listed
        return moved.evidence_total

    kernel = busy(1)
    kernel.slab(kernel.objcg(WEB, 0), 0, 1112, "unreclaimable")
    kernel.things[-1].payer = payer = kernel.objcg(MAIL, 0)
    findings = findings_of(kernel)
    assert total(10, 0) == 10
    # What is not listed may be of another size, or of the other obj_cgroup of the memcg.
    assert total(40, 3) is None
    assert total(None, None) is None
