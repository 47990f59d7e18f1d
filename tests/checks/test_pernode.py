# SPDX-License-Identifier: LGPL-2.1-or-later
"""The rule of per-node accounting that the counters follow, for each kind of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.made import OBJCG_B, A, B, ledger, snapshot

from memcg_inspect.checks.identities.objcg_bytes import objcg_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.pernode import judge_per_node
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Accounting, Follows, Misplaced, Objcg, PerNodeCharges

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
        assert finding.memcg == A
        [evidence] = finding.evidence
        address = {"percpu": 0x9000, "zswap": 0x9100}[finding.what.split()[0]]
        assert (evidence.address, evidence.nid) == (address, 1)


@pytest.mark.parametrize("wrong", [0, 8])
def test_where_nothing_straddles_there_is_no_telling(wrong: int) -> None:
    taken = booked("", "", wrong)
    either: Follows = "neither" if wrong else "both"
    assert judge_per_node(taken, objcg_rows(taken)).follows == {"percpu": either, "zswap": either}


@pytest.mark.parametrize("percpu", ["physical", "posted"])
def test_what_no_rule_explains(percpu: str) -> None:
    taken = booked(percpu, "", wrong=8)
    assert judge_per_node(taken, objcg_rows(taken)).follows == {
        "percpu": "neither",
        "zswap": "neither",
    }
    assert "rule" not in {pending.finding.kind for pending in judge(taken).findings}


def test_other_kernels_follow_none() -> None:
    taken = replace(booked("physical", "physical"), per_node=None)
    assert judge_per_node(taken, objcg_rows(taken)).follows is None
