# SPDX-License-Identifier: LGPL-2.1-or-later
"""The per-node kernel: exact as posted, and findings for each broken variant."""

from __future__ import annotations

import pytest
from labkit import kernels
from support import mistakes
from support.guests import PERNODE_KERNELS, Lab
from support.mistakes import MISTAKES

from memcg_inspect.report import Report

pytestmark = pytest.mark.image

OFF = {"counter-above-objects", "counter-below-objects"}
#: What gives each mistake away: the identity that fails, and how.
IDENTITIES = {
    "kmem-high-order": ("kmem", {"skew"}),
    "percpu-current-node": ("kmem", OFF),
    "percpu-forgotten-node": ("kmem", OFF),
    "percpu-metadata-one-node": ("kmem", OFF),
    "percpu-metadata-size": ("percpu", OFF),
    "percpu-page-offset": ("objcg_bytes", {"rule"}),
    "percpu-not-noted": ("kmem", OFF),
    "percpu-note-stays": ("kmem", OFF),
    "percpu-table-at-boot": ("kmem", OFF),
    "reparent-forgotten-node": ("reparenting", {"not-reparented"}),
    "task-not-updated": ("task_objcg", {"stale-task-objcg"}),
    "uncharged-page-counter": ("usage", OFF),
    "zswap-first-page": ("objcg_bytes", {"rule"}),
    "zswap-storing-node": ("zswap", {"skew"}),
}


def check_honest(report: Report) -> None:
    assert report.image.accounting == "kmem-per-node"
    assert report.findings == ()
    assert report.verdict == "exact"
    assert report.follows is not None
    assert set(report.follows) == {"percpu", "zswap"}
    assert set(report.follows.values()) <= {"physical", "both"}
    kmem = [row for row in report.rows if row.identity == "kmem"]
    assert {row.item for row in kmem} == {"NR_KMEM"}
    # memory of each node is charged to obj_cgroups of that node, on every node
    assert {row.nid for row in kmem if sum(row.found.values())} == set(report.image.nodes)
    for cell in report.skew:
        if cell.kind in ("slab", "kmem", "percpu") and cell.bytes:
            assert cell.charged_nid == cell.backing_nid


@pytest.mark.parametrize("kernel", PERNODE_KERNELS)
def test_honest_on_four_nodes(lab: Lab, kernel: str) -> None:
    check_honest(lab.image(kernel, "4", "mixed").report())


@pytest.mark.parametrize("kernel", PERNODE_KERNELS)
def test_honest_where_memory_has_no_cpus(lab: Lab, kernel: str) -> None:
    report = lab.image(kernel, "2cpu+6mem", "interleave").report()
    check_honest(report)
    # an allocation that the posted rule would book elsewhere is among them
    assert report.follows == {"percpu": "physical", "zswap": "both"}


@pytest.mark.parametrize("kernel", PERNODE_KERNELS)
def test_honest_where_pages_are_populated_again(lab: Lab, kernel: str) -> None:
    """They are on other nodes than before."""
    report = lab.image(kernel, "2cpu+6mem", "repopulated").report()
    assert (report.verdict, report.findings) == ("exact", ())


@pytest.mark.long
@pytest.mark.parametrize("nodes", ["1", "2", "8", "2cpu+6mem"])
def test_honest_on_more(lab: Lab, nodes: str) -> None:
    check_honest(lab.image("7.3-pernode", nodes, "mixed").report())


@pytest.mark.long
@pytest.mark.parametrize("mistake", kernels.BROKEN)
def test_each_mistake_is_found(lab: Lab, mistake: str) -> None:
    workload, (identity, kinds) = MISTAKES[mistake].workload, IDENTITIES[mistake]
    report = lab.image(f"7.3-pernode-broken-{mistake}", "2cpu+6mem", workload).report()
    assert report.verdict == "findings"
    # What one objcg is off by may be whole pages: then its counter alone shows a rule.
    identities = {identity, "kmem"} if kinds == {"rule"} else {identity}
    found = [f for f in report.findings if f.identity in identities and f.kind in kinds]
    assert found
    # a memcg, and, but for the page counter, which has none, a node
    assert all(f.memcg is not None for f in found)
    assert identity in ("usage", "percpu", "task_objcg") or all(f.nid is not None for f in found)
    if kinds == {"rule"}:
        kind = mistake.split("-")[0]
        assert report.follows == {"percpu": "both", "zswap": "both"} | {kind: "posted"}
        # each with charges that lie across the node's pages
        for finding in found:
            assert {e.kind for e in finding.evidence} == {kind}
            assert all(e.memcg == finding.memcg for e in finding.evidence)


@pytest.mark.long
@pytest.mark.parametrize("mistake", kernels.BROKEN)
def test_the_cause_of_a_mistake_is_never_a_sure_wrong_one(mistake: str) -> None:
    outcome = mistakes.run(mistake)
    assert outcome.wrongly_sure == ()
    assert outcome.right is not False, outcome.said
    if MISTAKES[mistake].causes & {"rule", "charged-to-node", "charged-size"}:
        assert (len(outcome.said), outcome.unexplained) == (1, 0), outcome.said
