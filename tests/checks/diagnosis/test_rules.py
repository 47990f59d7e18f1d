# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Mistakes that a kernel makes with all charges of one kind are one diagnosis.

``scripts/test --all`` has kernels that make them (``tests/collect/test_pernode_audit.py``).
"""

from __future__ import annotations

from dataclasses import replace

from support.made import ROOT, A, B, family, snapshot

from memcg_inspect.checks.diagnosis import diagnose
from memcg_inspect.model import Memcg, Objcg
from memcg_inspect.report import Evidence, Finding

C, PAGE = 0x5000, 4096
OBJCGS = {A: 0xA1, B: 0xB1, C: 0xC1}


def skewed(memcg: int, pages: int) -> Finding:
    """Pages on node 0 that are charged to the obj_cgroup of node 1."""
    return Finding(
        identity="kmem",
        kind="skew",
        memcg=memcg,
        objcg=None,
        nid=0,
        item="kmem",
        unit="bytes",
        difference=pages * PAGE,
        what="made",
        evidence_is="proof",
        evidence=(Evidence(memcg << 8, "kmem", 0, PAGE, objcg=OBJCGS[memcg], memcg=memcg),),
        evidence_total=pages,
    )


def counter(identity: str, memcg: int, nid: int, pages: int, item: str = "NR_KMEM") -> Finding:
    return Finding(
        identity=identity,
        kind="counter-above-objects",
        memcg=memcg,
        objcg=None,
        nid=nid,
        item=item,
        unit="pages",
        difference=pages,
        what="made",
        evidence_is="candidates",
    )


def test_charges_of_several_memcgs_to_the_wrong_node_are_one_mistake() -> None:
    memcgs = {**family(), C: Memcg(C, "/a/c", 9, "online", A, C)}
    objcgs = {o: Objcg(o, memcg, 1, False, 0) for memcg, o in OBJCGS.items()}
    made = snapshot(memcgs=memcgs, objcgs=objcgs, accounting="kmem-per-node")
    findings = [
        *(skewed(A, 4), skewed(B, 2), skewed(C, 1)),
        *(counter("kmem", A, 0, -4), counter("kmem", A, 1, 4)),
        *(counter("hierarchy", A, 0, -7), counter("hierarchy", ROOT, 1, 7)),
        # one more page than was moved: something else is wrong, too
        counter("kmem", B, 0, -3),
        # of another counter
        counter("hierarchy", A, 1, 7, "NR_FILE_PAGES"),
    ]
    one, *others = diagnose(made, (), findings)
    assert (one.cause, one.confidence) == ("charged-to-node", "proved")
    assert (one.memcgs, one.nid, one.amount) == ((A, B, C), None, 7 * PAGE)
    assert one.unit == "bytes"
    assert one.findings == tuple(range(7))
    assert (len(one.evidence), one.evidence_total) == (3, 7)
    assert {(e.memcg, e.nid, e.amount) for e in one.signature} == {
        *((A, 0, -4), (A, 1, 4), (A, 0, -7), (ROOT, 1, 7))
    }
    assert others == []
    # Only charges are counted, not what the findings on counters have as evidence.
    more = [replace(f, evidence_total=5) if f.kind != "skew" else f for f in findings]
    assert diagnose(made, (), more)[0].evidence_total == 7
    # After a search that was interrupted, not all charges are known.
    cut = [replace(findings[0], evidence=(), evidence_total=None), *findings[1:]]
    assert diagnose(made, (), cut)[0].memcgs == (A, B, C)
    assert diagnose(made, (), cut)[0].evidence_total is None
    # Those of two memcgs may be faults of their own.
    some = diagnose(made, (), findings[1:3])
    assert [d.memcgs for d in some] == [(B,), (C,)]


def test_charges_on_several_nodes_of_a_memcg_are_one_mistake() -> None:
    """Such charges of one memcg may be all that there are."""
    made = snapshot(accounting="kmem-per-node")
    findings = [
        replace(skewed(A, 2 + nid), nid=nid, evidence=(Evidence(nid << 8, "kmem", nid, PAGE),))
        for nid in range(3)
    ]
    one, *others = diagnose(made, (), findings)
    assert (one.cause, one.memcgs, one.amount) == ("charged-to-node", (A,), 9 * PAGE)
    assert others == []
    # Those of two nodes, or one charge of each, may be faults of their own.
    assert len(diagnose(made, (), findings[:2])) == 2
    single = [replace(findings[0], evidence_total=1), *findings[1:]]
    assert len(diagnose(made, (), single)) == 3
    cut = [replace(findings[0], evidence_total=None), *findings[1:]]
    assert len(diagnose(made, (), cut)) == 3


def test_findings_of_one_rule_are_one_mistake() -> None:
    made = snapshot(accounting="kmem-per-node")
    rule = [
        Finding("kmem", "rule", memcg, None, nid, "NR_KMEM", "pages", 1, what, "proof")
        for what, memcg, nid in (("one", A, 0), ("one", A, 1), ("one", B, 0), ("other", A, 0))
    ]
    found = diagnose(made, (), rule)
    assert [(d.cause, d.confidence, d.what, d.findings) for d in found] == [
        ("rule", "proved", "one", (0, 1, 2)),
        ("rule", "proved", "other", (3,)),
    ]
    assert found[0].memcgs == (A, B)
