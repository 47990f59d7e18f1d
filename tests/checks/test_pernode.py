# SPDX-License-Identifier: LGPL-2.1-or-later
"""The rule of per-node accounting that the counters follow, for each kind of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.made import DEAD, OBJCG_B, ROOT, A, B, features, ledger, snapshot

from memcg_inspect.checks.identities.kmem import kmem_rows
from memcg_inspect.checks.identities.objcg_bytes import objcg_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.pernode import judge_per_node
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Accounting, Follows, Misplaced, Objcg, PerNodeCharges, Stat
from memcg_inspect.report import Evidence

#: Objcgs of /a on nodes 0 and 1.
ON_0, ON_1 = 0xA0, 0xA8
PAGE = 4096
#: Bytes on node 1 that the posted rule books on node 0.
MOVED = {"percpu": 100, "zswap": 300}


def booked(
    percpu: str, zswap: str, wrong: int = 0, accounting: Accounting = "kmem-per-node"
) -> Snapshot:
    """
    Return 1,000 bytes of each kind on each node, booked by these rules.

    ``nr_charged_bytes`` is the rest of the pages by what the kernel booked. ``/a/b`` has nothing.
    """
    left = {ON_0: PAGE - 2000 - wrong, ON_1: PAGE - 2000}
    for kind, rule in (("percpu", percpu), ("zswap", zswap)):
        if rule == "posted":
            left[ON_0] -= MOVED[kind]
            left[ON_1] += MOVED[kind]
    return snapshot(
        accounting=accounting,
        objcgs={
            address: Objcg(address, A, nid, False, left[address], refs=2)
            for address, nid in ((ON_0, 0), (ON_1, 1))
        }
        | {OBJCG_B: Objcg(OBJCG_B, B, 0, False, 0, refs=0)},
        charges=ledger(
            {
                (objcg, kind, "data", nid): (1000, 1)
                for kind in MOVED
                for objcg, nid in ((ON_0, 0), (ON_1, 1))
            }
        ),
        per_node=PerNodeCharges(
            posted={
                kind: {(ON_0, 0): size, (ON_1, 1): -size} if rule else {}
                for (kind, size), rule in zip(MOVED.items(), (percpu, zswap), strict=True)
            },
            straddling=[
                Misplaced("percpu", 0x9000, ON_0, 0, 1, 100),
                Misplaced("zswap", 0x9100, ON_0, 0, 1, 300),
            ],
            misplaced=[],
        ),
    )


@pytest.mark.parametrize("percpu", ["physical", "posted"])
@pytest.mark.parametrize("zswap", ["physical", "posted"])
def test_each_kind_follows_a_rule_of_its_own(percpu: Follows, zswap: Follows) -> None:
    taken = booked(percpu, zswap)
    assert judge_per_node(taken, objcg_rows(taken)).follows == {"percpu": percpu, "zswap": zswap}
    judged = judge(taken)
    findings = [pending.finding for pending in judged.findings]
    wrong = [kind for kind, rule in (("percpu", percpu), ("zswap", zswap)) if rule == "posted"]
    assert {finding.kind for finding in findings} == ({"rule"} if wrong else set())
    # for each, both nodes, with what lies on the one and is booked on the other
    assert sorted((f.what.split()[0], f.nid) for f in findings) == [
        (kind, nid) for kind in wrong for nid in (0, 1)
    ]
    for finding in findings:
        assert (finding.memcg, finding.identity, finding.unit) == (A, "objcg_bytes", "bytes")
        assert (finding.evidence_is, finding.evidence_total) == ("proof", 1)
        [evidence] = finding.evidence
        address = {"percpu": 0x9000, "zswap": 0x9100}[finding.what.split()[0]]
        assert (evidence.address, evidence.nid) == (address, 1)


@pytest.mark.parametrize("wrong", [0, 8])
def test_where_nothing_straddles_there_is_no_telling(wrong: int) -> None:
    taken = booked("", "", wrong)
    either: Follows = "neither" if wrong else "both"
    assert judge_per_node(taken, objcg_rows(taken)).follows == {"percpu": either, "zswap": either}


@pytest.mark.parametrize("percpu", ["physical", "posted"])
def test_where_charges_may_be_missing_there_is_no_telling(percpu: str) -> None:
    taken = booked(percpu, "physical", wrong=8)
    taken.ledger.note_missing("percpu")
    assert judge_per_node(taken, objcg_rows(taken)).follows == {"percpu": "both", "zswap": "both"}
    assert judge(taken).findings == []


@pytest.mark.parametrize("percpu", ["physical", "posted"])
def test_what_no_rule_explains(percpu: str) -> None:
    taken = booked(percpu, "", wrong=8)
    assert judge_per_node(taken, objcg_rows(taken)).follows == {
        "percpu": "neither",
        "zswap": "neither",
    }
    assert "rule" not in {pending.finding.kind for pending in judge(taken).findings}


def test_charges_of_another_node_than_their_obj_cgroup() -> None:
    """By both rules. One finding for a memcg, a kind, and the two nodes."""
    taken = booked("physical", "physical")
    charges = taken.per_node
    assert charges is not None
    first = [Misplaced("slab", 0x9000 + n, ON_0, 0, 1, 100 + n) for n in range(12)]
    others = [
        Misplaced("slab", 0xA000, ON_1, 1, 0, 7),
        Misplaced("kmem", 0xB000, ON_0, 0, 1, PAGE),
        Misplaced("slab", 0xC000, OBJCG_B, 0, 1, 9),
    ]
    taken = replace(taken, per_node=charges._replace(misplaced=[*first, *others]))
    judged = judge_per_node(taken, objcg_rows(taken))
    assert all(pending.queries == () for pending in judged.findings)
    found = [pending.finding for pending in judged.findings]
    assert [(f.memcg, f.identity, f.item, f.nid, f.difference) for f in found] == [
        (A, "slab", "slab", 1, 1200 + 66),
        (A, "slab", "slab", 0, 7),
        (A, "kmem", "kmem", 1, PAGE),
        (B, "slab", "slab", 1, 9),
    ]
    assert {(f.kind, f.unit, f.objcg, f.evidence_is) for f in found} == {
        ("skew", "bytes", None, "proof")
    }
    assert found[0].what == "1,266 bytes of slab memory on node 1 are charged to node 0"
    assert (len(found[0].evidence), found[0].evidence_total) == (10, 12)
    assert found[1].evidence == (Evidence(0xA000, "slab", 0, 7, objcg=ON_1, memcg=A),)
    # They are found whatever the counters say.
    assert judged.follows == {"percpu": "physical", "zswap": "physical"}
    assert "skew" in {pending.finding.kind for pending in judge(taken).findings}


def test_rows_that_the_posted_rule_explains_are_not_reported_twice() -> None:
    taken = booked("posted", "physical")
    rows = objcg_rows(taken)
    assert {row.objcg for row in rows if row.status == "differs"} == {ON_0, ON_1}
    judged = judge_per_node(taken, rows)
    assert [row.objcg for row in judged.others] == [OBJCG_B]
    # A row that no rule explains stays.
    wrong = booked("posted", "physical", wrong=8)
    rows = objcg_rows(wrong)
    assert judge_per_node(wrong, rows).others == rows
    # Rows of obj_cgroups that the posted rule does not touch are not explained by it.
    [row, *_] = rows
    others = [replace(row, objcg=OBJCG_B, memcg=B), replace(row, objcg=0xA9)]
    findings = judge_per_node(taken, [*others, *objcg_rows(taken)]).findings
    assert {pending.finding.objcg for pending in findings} <= {ON_0, ON_1}


def test_other_kernels_follow_none() -> None:
    taken = replace(booked("physical", "physical"), per_node=None)
    assert judge_per_node(taken, objcg_rows(taken)).follows is None


def test_whole_pages_that_the_posted_rule_books_show_in_counters_only() -> None:
    """No obj_cgroup lacks part of a page. Each kind is found in the memcg that has some of it."""
    b_0, b_1 = OBJCG_B, OBJCG_B + 8
    nodes = {ON_0: (A, 0), ON_1: (A, 1), b_0: (B, 0), b_1: (B, 1)}
    charges = {
        (objcg, kind, "data", nid): (2 * PAGE, 1)
        for (objcg, (memcg, nid)) in nodes.items()
        for kind in MOVED
        if kind == ("percpu" if memcg == A else "zswap")
    }
    taken = snapshot(
        accounting="kmem-per-node",
        objcgs={o: Objcg(o, memcg, nid, False, 0, refs=1) for o, (memcg, nid) in nodes.items()},
        charges=ledger(charges),
        features=features("NR_KMEM"),
        # Of 2 pages on each node, one more is booked on node 0. /a has its child's, too.
        lruvec_stats={
            (memcg, nid): {"NR_KMEM": Stat(pages * below, 0, 0)}
            for memcg, below in ((ROOT, 2), (A, 2), (B, 1), (DEAD, 0))
            for nid, pages in ((0, 3), (1, 1))
        },
        per_node=PerNodeCharges(
            posted={
                "percpu": {(ON_0, 0): PAGE, (ON_1, 1): -PAGE, (b_0, 0): 0},
                "zswap": {(b_0, 0): PAGE, (b_1, 1): -PAGE, (ON_1, 1): 0},
            },
            straddling=[],
            misplaced=[],
        ),
    )
    rows = [*objcg_rows(taken), *kmem_rows(taken)]
    assert {row.identity for row in rows if row.status == "differs"} == {"kmem"}
    judged = judge_per_node(taken, rows)
    assert judged.follows == {"percpu": "posted", "zswap": "posted"}
    found = [pending.finding for pending in judged.findings]
    assert [(f.what.split()[0], f.memcg, f.nid, f.objcg) for f in found] == [
        ("percpu", A, 0, None), ("percpu", A, 1, None),
        ("zswap", B, 0, None), ("zswap", B, 1, None),
    ]  # fmt: skip
    assert [row.status for row in judged.others if row.identity == "kmem"] == ["exact"] * 2
