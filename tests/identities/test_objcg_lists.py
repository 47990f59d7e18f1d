# SPDX-License-Identifier: LGPL-2.1-or-later
"""The identity ``objcg_lists``, by hand and on images of real kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from drgn import Object, Program
from drgn.helpers.linux.list import list_for_each_entry
from support.guests import KERNELS, PERNODE_KERNELS, Lab, series
from support.made import DEAD, OBJCG_A, OBJCG_DEAD, A, B, snapshot

from memcg_inspect.checks.identities.objcg_lists import objcg_list_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Memcg, Objcg, ObjcgPlace


def made(*objcgs: Objcg) -> Snapshot:
    return snapshot(objcgs={objcg.address: objcg for objcg in objcgs})


def objcg(address: int, memcg: int, nid: int | None, *places: ObjcgPlace) -> Objcg:
    return Objcg(address, memcg, nid, False, 0, places=places)


def wrong(taken: Snapshot) -> dict[tuple[int | None, int | None], int | None]:
    return {(r.memcg, r.nid): r.difference for r in objcg_list_rows(taken) if r.difference}


def test_a_removed_memcg_refers_to_what_its_parent_has() -> None:
    taken = made(
        objcg(OBJCG_A, A, 0, ObjcgPlace(A, 0, "objcg"), ObjcgPlace(A, 0, "orig_objcg")),
        objcg(OBJCG_DEAD, A, 1, ObjcgPlace(A, 1, "objcg_list"), ObjcgPlace(DEAD, 1, "orig_objcg")),
    )
    rows = {(row.memcg, row.nid): (row.found, row.claimed) for row in objcg_list_rows(taken)}
    assert rows == {
        (A, 0): ({"own": 2}, {"listed": 2}),
        (A, 1): ({"own": 1}, {"listed": 1}),
        (DEAD, 1): ({"own": 1}, {"listed": 1}),
    }


def test_a_memcg_whose_obj_cgroups_were_not_all_read() -> None:
    """One that does not belong there is a fault, whatever else is on the list."""
    right = objcg(OBJCG_A, A, 0, ObjcgPlace(A, 0, "objcg"))
    wrong = objcg(OBJCG_A, B, 0, ObjcgPlace(A, 0, "objcg"))
    for some, unread, status in (
        (right, (), "exact"),
        (right, (B,), "exact"),
        (right, (A,), "unverifiable"),
        (wrong, (A,), "differs"),
    ):
        [row] = objcg_list_rows(replace(made(some), unreadable=frozenset(unread)))
        assert row.status == status


def test_while_it_is_removed_they_may_be_its_own() -> None:
    assert wrong(made(objcg(OBJCG_DEAD, DEAD, 1, ObjcgPlace(DEAD, 1, "objcg")))) == {}


def test_one_objcg_for_all_nodes() -> None:
    assert wrong(made(objcg(OBJCG_A, A, None, ObjcgPlace(A, None, "objcg")))) == {}
    assert wrong(made(objcg(OBJCG_A, B, None, ObjcgPlace(A, None, "objcg")))) == {(A, None): 1}


def test_an_objcg_on_the_list_of_another_node_or_memcg() -> None:
    other_node = objcg(
        OBJCG_DEAD, A, 1, ObjcgPlace(A, 0, "objcg_list"), ObjcgPlace(DEAD, 1, "orig_objcg")
    )
    assert wrong(made(other_node)) == {(A, 0): 1}
    other_memcg = objcg(OBJCG_DEAD, A, 1, ObjcgPlace(B, 1, "objcg_list"))
    assert wrong(made(other_memcg)) == {(B, 1): 1}
    findings = [p.finding for p in judge(made(other_node, other_memcg)).findings]
    [finding] = [f for f in findings if f.identity == "objcg_lists"]
    assert (finding.kind, finding.evidence_is) == ("misplaced-objcg", "proof")
    assert [e.address for e in finding.evidence] == [OBJCG_DEAD]
    assert (finding.memcg, finding.nid) == (B, 1)
    assert finding.what == "the memcg has 1 obj_cgroup for node 1 that does not belong there"
    note = f"in objcg_list, but it belongs to the memcg {A:#x}"
    assert [(e.nid, e.memcg, e.note) for e in finding.evidence] == [(1, A, note)]


def test_what_is_wrong_with_each_objcg_is_said() -> None:
    taken = made(
        objcg(OBJCG_A, A, 1, ObjcgPlace(B, None, "orig_objcg")),
        objcg(OBJCG_DEAD, A, 1, ObjcgPlace(B, None, "objcg_list"), ObjcgPlace(A, 0, "objcg")),
    )
    found = [p.finding for p in judge(taken).findings if p.finding.identity == "objcg_lists"]
    assert {finding.what for finding in found} == {
        "the memcg has 2 obj_cgroups that do not belong there",
        "the memcg has 1 obj_cgroup for node 0 that does not belong there",
    }
    assert {e.note for finding in found for e in finding.evidence} == {
        f"in orig_objcg, but it belongs to the memcg {A:#x}",
        f"in objcg_list, but it belongs to the memcg {A:#x}",
        "in objcg, but it is of node 1",
    }


def placed(prog: Program, memcgs: Iterable[Memcg]) -> Counter[tuple[int, int | None]]:
    """Count the obj_cgroups that memcgs refer to, by memcg and node, with a plain walk."""
    found: Counter[tuple[int, int | None]] = Counter()
    for memcg in memcgs:
        pointer = Object(prog, "struct mem_cgroup *", memcg.address)
        holders: dict[int | None, Object] = {None: pointer}
        if not hasattr(pointer, "objcg"):
            holders = {nid: pointer.nodeinfo[nid] for nid in range(int(prog["nr_node_ids"]))}
        for nid, holder in holders.items():
            members = [holder.objcg, getattr(holder, "orig_objcg", None)]
            found[memcg.address, nid] += sum(map(bool, members))
            # A removed memcg leaves the head of its list behind, which leads to that of the parent.
            if memcg.state == "online":
                head = holder.objcg_list.address_of_()
                for _ in list_for_each_entry("struct obj_cgroup", head, "list"):
                    found[memcg.address, nid] += 1
    return +found


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", [*KERNELS, *PERNODE_KERNELS])
def test_all_objcgs_are_where_they_belong(lab: Lab, kernel: str) -> None:
    for workload in ("mixed", "dying"):
        image = lab.image(kernel, "4", workload)
        rows = [row for row in image.report().rows if row.identity == "objcg_lists"]
        assert rows and {row.status for row in rows} == {"exact"}
        listed = {(row.memcg, row.nid): (row.claimed or {})["listed"] for row in rows}
        assert listed == placed(image.program(dwarf=True), image.report().memcgs)
        dying = {memcg.address for memcg in image.report().memcgs if memcg.state == "dying"}
        # In 6.1 a removed memcg does not know its obj_cgroups any more.
        assert any(row.memcg in dying for row in rows) is (series(kernel) != "6.1")
