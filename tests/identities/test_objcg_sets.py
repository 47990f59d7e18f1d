# SPDX-License-Identifier: LGPL-2.1-or-later
"""The identity ``objcg_sets``, by hand and on images of kernels that account by node."""

from __future__ import annotations

import pytest
from support.guests import PERNODE_KERNELS, Lab
from support.made import A, B, snapshot

from memcg_inspect.checks.identities.objcg_sets import objcg_set_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Coverage, CssRefs, Objcg, ObjcgSet
from memcg_inspect.report import Finding

SET, OTHER = 0x500, 0x600


def objcg(address: int, nid: int, memcg: int = A, of: int = SET) -> Objcg:
    return Objcg(address, memcg, nid, False, 0, set=of)


def made(refs: int = 2, entries: tuple[int, int] = (0xA0, 0xA1), **more: object) -> Snapshot:
    """Return a snapshot in which ``/a`` and ``/a/b`` have an obj_cgroup on each of two nodes."""
    objcgs = [objcg(0xA0, 0), objcg(0xA1, 1), objcg(0xB0, 0, B, OTHER), objcg(0xB1, 1, B, OTHER)]
    return snapshot(
        **{
            "objcgs": {o.address: o for o in objcgs},
            "objcg_sets": {
                SET: ObjcgSet(SET, refs, dict(enumerate(entries))),
                OTHER: ObjcgSet(OTHER, 2, {0: 0xB0, 1: 0xB1}),
            },
            "accounting": "kmem-per-node",
            **more,
        }
    )


def findings(taken: Snapshot) -> list[Finding]:
    found = [pending.finding for pending in judge(taken).findings]
    return [finding for finding in found if finding.identity == "objcg_sets"]


def test_as_many_references_as_entries() -> None:
    rows = {row.memcg: row for row in objcg_set_rows(made())}
    assert {memcg: (row.found, row.claimed, row.status) for memcg, row in rows.items()} == {
        memcg: ({"entries": 2}, {"refcnt": 2}, "exact") for memcg in (A, B)
    }
    assert findings(made()) == []


@pytest.mark.parametrize(
    ("refs", "entries", "difference", "wrong"),
    [
        (3, (0xA0, 0xA1), 1, []),
        (1, (0xA0, 0xA1), -1, []),
        # an obj_cgroup that is not released
        (2, (0xA0, 0), 1, []),
        (2, (0xA1, 0xA0), 2, [0xA1, 0xA0]),
        (2, (0xA0, 0xDEAD), 1, [0xDEAD]),
        # one of another set
        (2, (0xA0, 0xB1), 1, [0xB1]),
    ],
)
def test_a_set_that_is_wrong(
    refs: int, entries: tuple[int, int], difference: int, wrong: list[int]
) -> None:
    [finding] = findings(made(refs, entries))
    assert (finding.memcg, finding.difference, finding.kind) == (A, difference, "objcg-set")
    nodes = {address: nid for nid, address in enumerate(entries)}
    assert [(e.address, e.kind, e.nid) for e in finding.evidence] == [
        (SET, "obj_cgroup_set", None),
        *((address, "obj_cgroup", nodes[address]) for address in wrong),
    ]


def test_a_released_obj_cgroup_has_no_entry() -> None:
    objcgs = {0xA0: objcg(0xA0, 0)}
    [row] = objcg_set_rows(made(1, (0xA0, 0), objcgs=objcgs))
    assert (row.found, row.status) == ({"entries": 1}, "exact")


def test_what_cannot_be_told() -> None:
    coverage = {"objcgs": Coverage(1, 1)}
    assert objcg_set_rows(made(coverage=coverage))[0].status == "unverifiable"
    assert objcg_set_rows(made(objcg_sets={}))[0].status == "unverifiable"
    # mem_cgroup_css_online() has a reference while it makes the entries.
    new = {A: CssRefs(2, 5, 0, False, 1), B: CssRefs(2, 6, 1, True, 1)}
    first, second = objcg_set_rows(made(3, css=new))
    assert (first.status, first.reason) == ("unverifiable", "the memcg is being created")
    assert second.status == "exact"


def test_kernels_without_sets() -> None:
    [outcome] = [i for i in judge(snapshot()).identities if i.name == "objcg_sets"]
    assert outcome.status == "not-kept"


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", PERNODE_KERNELS)
def test_exact_with_removed_memcgs(lab: Lab, kernel: str) -> None:
    report = lab.image(kernel, "4", "mixed").report()
    rows = [row for row in report.rows if row.identity == "objcg_sets"]
    assert {row.status for row in rows} == {"exact"}
    # The sets of removed memcgs are there as long as something is charged to them.
    online = [memcg for memcg in report.memcgs if memcg.state == "online"]
    assert len(rows) > len(online)
    # Their obj_cgroups are released on nodes where nothing is charged to them any more.
    assert {row.found["entries"] for row in rows} <= {1, 2, 3, 4}
