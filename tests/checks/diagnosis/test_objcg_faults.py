# SPDX-License-Identifier: LGPL-2.1-or-later
"""
An obj_cgroup that belongs to another memcg, and a memcg that nothing frees.

All that is charged to it moves with it. The rows are those that the identities make of the changed
kernel, and each of them is an effect of the one fault.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.made import features, ledger, snapshot
from support.made_kernel import GONE, LIST, MAIL, ROOT, SHOP, WEB, busy
from support.made_rows import Short, options, shown

from memcg_inspect.checks.diagnosis import diagnose
from memcg_inspect.checks.diagnosis.cause import Hypothesis
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import ChargeStock, Memcg, Objcg, ObjcgPlace
from memcg_inspect.model_freeing import Transient
from memcg_inspect.model_tasks import TaskCharge
from memcg_inspect.report import Diagnosis

OBJCG = WEB + 0x100
UNRECLAIMABLE = "NR_SLAB_UNRECLAIMABLE_B"


def used(seed: int) -> Snapshot:
    """
    Return a kernel in which memcgs and tasks refer to obj_cgroups.

    The stock of a CPU has bytes for one of WEB. Of the last object, the counter does not know yet.
    """
    kernel = busy(seed)
    kernel.charge_bytes(OBJCG, 1000)
    for kind in ("reclaimable", "unreclaimable"):
        kernel.slab(OBJCG, 1, 504, kind)
    for nid in (None, 1):
        kernel.cpu[WEB, UNRECLAIMABLE, nid] -= 504
    kernel.obj_stock[OBJCG] = [1000, 1, 0]
    made = kernel.snapshot()
    objcgs = {
        address: replace(
            objcg,
            places=(
                ObjcgPlace(objcg.memcg, objcg.nid, "objcg"),
                *((ObjcgPlace(GONE, objcg.nid, "orig_objcg"),) if address & ~0xFFF == GONE else ()),
            ),
        )
        for address, objcg in made.objcgs.items()
    }
    own = (OBJCG, WEB + 0x200)
    tasks = (
        TaskCharge(1, 1, "a", WEB, own, False, True),
        TaskCharge(2, 2, "b", WEB, own, True, True),
        TaskCharge(3, 3, "c", WEB, own, False, True),
    )
    stocks = [s._replace(nid=1, unreclaimable=504) for s in made.stocks]
    return replace(made, objcgs=objcgs, tasks=tasks, stocks=stocks)


def diagnosed(made: Snapshot) -> tuple[Diagnosis, ...]:
    judged = judge(made)
    findings = [pending.finding for pending in judged.findings]
    found = diagnose(made, judged.rows, findings)
    assert {n for d in found for n in d.findings} == set(range(len(findings)))
    return found


def with_memcg(made: Snapshot, objcg: int, memcg: int) -> Snapshot:
    return replace(made, objcgs={**made.objcgs, objcg: replace(made.objcgs[objcg], memcg=memcg)})


def test_a_kernel_with_stocks_and_tasks_is_exact() -> None:
    for seed in range(3):
        assert diagnosed(used(seed)) == ()


@pytest.mark.parametrize("now", [MAIL, SHOP, ROOT])
def test_an_obj_cgroup_of_another_memcg_is_one_fault(now: int) -> None:
    for seed in range(3):
        [found] = diagnosed(with_memcg(used(seed), OBJCG, now))
        assert (found.cause, found.confidence) == ("objcg-owner", "proved")
        assert (found.memcgs, found.nid) == ((WEB, now), 0)
        assert (found.amount, found.unit) == (1, "references")
        assert found.what == (
            f"obj_cgroup {OBJCG:#x} is one of memcg {WEB:#x}, and refers to memcg {now:#x}, to "
            "which all its charges went"
        )
        assert [e for e in found.signature if e.amount != e.difference] == []
        identities = {e.identity for e in found.signature}
        assert identities >= {"slab", "usage", "objcg_lists", "task_objcg", "lru"}
        # The sum of SHOP has both, if it has the new owner.
        assert ("hierarchy" in identities) == (now == ROOT)


def test_an_obj_cgroup_of_a_removed_memcg_looks_as_if_it_was_not_handed_up() -> None:
    [found] = diagnosed(with_memcg(used(1), OBJCG, GONE))
    assert (found.cause, found.memcgs) == ("objcg-owner", (WEB, SHOP))
    assert "reparenting" in {e.identity for e in found.signature}
    assert [e for e in found.signature if e.amount != e.difference] == []


def test_an_obj_cgroup_of_no_memcg_has_no_other_side() -> None:
    [found] = diagnosed(with_memcg(used(1), OBJCG, 0x77000))[:1]
    assert (found.cause, found.memcgs) == ("objcg-owner", (WEB,))
    assert found.what.startswith(f"obj_cgroup {OBJCG:#x} is one of memcg {WEB:#x}, and refers to ")
    assert "0x77000, which is no memcg: nothing pays" in found.what


def test_an_obj_cgroup_of_a_removed_memcg_that_was_not_handed_up() -> None:
    for seed in range(3):
        [found] = diagnosed(with_memcg(used(seed), GONE + 0x100, GONE))
        assert (found.cause, found.memcgs, found.nid) == ("not-reparented", (GONE,), 0)
        assert (found.amount, found.unit, found.confidence) == (-1, "references", "proved")
        assert found.what.startswith(f"memcg {GONE:#x} is offline, but 1 obj_cgroup of node 0 ")
        assert [e for e in found.signature if e.amount != e.difference] == []


# Each recognized from one row


LISTED = ("objcg_lists", "objcg_list", WEB, 0)


def test_an_obj_cgroup_is_recognized_by_the_number_of_its_places() -> None:
    moved = with_memcg(used(1), OBJCG, MAIL)
    [found] = options(moved, {LISTED: 1})
    assert (found.item, found.place) == ("objcg->memcg", "")
    # Of rows that are not there, only those of lists may have been left out.
    assert {row[0] for row in shown(found.signature)} == {"objcg_lists", "lru"}
    assert options(moved, {LISTED: 2}) == []
    assert options(moved, {(*LISTED[:3], 1): 1}) == []
    assert options(used(1), {LISTED: 1}) == []
    assert options(moved, {("objcg_lists", "objcg_list", 0x99, 0): 1}) == []


def test_a_removed_memcg_is_recognized_by_the_number_of_its_obj_cgroups() -> None:
    row = ("reparenting", "objcg->memcg", GONE, 0)
    made = with_memcg(used(1), GONE + 0x100, GONE)
    assert len(options(made, {row: -1})) == 1
    for off in ({row: -2}, {row: 1}, {(*row[:3], 1): -1}, {("reparenting", row[1], 0x99, 0): -1}):
        assert options(made, off) == []


def test_lists_that_could_not_be_read_have_no_rows() -> None:
    row = ("reparenting", "objcg->memcg", GONE, 0)
    made = with_memcg(used(1), GONE + 0x100, GONE)
    [found] = options(replace(made, lru=None), {row: -1})
    assert shown(found.signature) == {row: -1}
    [listed] = options(made, {row: -1})
    # The pages are on the lists of the parent.
    pages = sum(n for (objcg, _, _), n in made.lru.pages.items() if objcg == GONE + 0x100)
    assert pages
    assert shown(listed.signature) == {
        row: -1,
        ("lru", LIST, SHOP, 0): pages,
        ("lru", LIST, GONE, 0): -pages,
    }


def by_node(**more: Any) -> Snapshot:
    """Return a kernel that accounts by node, with an obj_cgroup of node 0 that says node 1."""
    objcgs = {
        0xB0: Objcg(0xB0, WEB, 1, False, 100, set=0x5E7, places=(ObjcgPlace(WEB, 0, "objcg"),)),
        0xB1: Objcg(0xB1, WEB, 1, False, 7, places=(ObjcgPlace(WEB, 1, "objcg"),)),
    }
    memcgs = {
        ROOT: Memcg(ROOT, "/", 1, "online", None, ROOT),
        WEB: Memcg(WEB, "/web", 2, "online", ROOT, WEB),
    }
    charges = ledger({(0xB0, "slab", "reclaimable", 0): (500, 2)})
    known = {"features": features("NR_KMEM"), "memcgs": memcgs, "objcgs": objcgs, **more}
    return snapshot(charges=charges, accounting="kmem-per-node", **known)


def test_an_obj_cgroup_that_says_another_node() -> None:
    of_set = ("objcg_sets", "entries", WEB, None, 0xB0)
    [found] = options(by_node(), {LISTED: 1}, [of_set])
    assert (found.cause, found.item, found.place) == ("objcg-owner", "objcg->nid", "node 1")
    assert (found.memcgs, found.objcgs, found.nid) == ((WEB,), (0xB0,), 0)
    assert (found.amount, found.unit) == (1, "references")
    assert shown(found.signature) == {LISTED: 1, of_set: 1}
    # 500 bytes of objects and 100 that are left, which are looked for on node 1.
    assert found.signature.pools == {(WEB, 0): 600, (WEB, 1): -600}
    [alone] = options(by_node(), {LISTED: 1})
    assert shown(alone.signature) == {LISTED: 1}
    assert options(by_node(features=features()), {LISTED: 1}) == []
    assert options(by_node(), {LISTED: 2}) == []
    assert options(by_node(), {(*LISTED[:3], 1): 1}) == []
    assert options(by_node(), {("objcg_lists", "objcg_list", WEB): 1}) == []


def test_an_obj_cgroup_of_no_set_is_in_no_row_of_sets() -> None:
    objcgs = {o: replace(objcg, set=0) for o, objcg in by_node().objcgs.items()}
    of_set = ("objcg_sets", "entries", WEB, None, 0xB0)
    [found] = options(by_node(objcgs=objcgs), {LISTED: 1}, [of_set])
    assert shown(found.signature) == {LISTED: 1}


HAD = ("references", "refcnt", WEB, 0, OBJCG)
HAS = ("references", "refcnt", MAIL, 0, MAIL + 0x100)
CACHED = ("task_objcg", "task->objcg", WEB)


def cached(off: dict[Short, int], *objcgs: int) -> list[Hypothesis]:
    """Let a task of WEB have cached obj_cgroups; return the tasks that have another one."""
    task = TaskCharge(1, 1, "made", WEB, objcgs or (MAIL + 0x100,), False, True)
    made = replace(busy(1).snapshot(), tasks=(task,))
    return [h for h in options(made, off) if h.cause == "task-objcg"]


def test_a_task_with_the_obj_cgroup_of_another_memcg() -> None:
    [found] = cached({CACHED: 1, HAD: 1, HAS: -1})
    assert (found.memcgs, found.objcgs) == ((WEB, MAIL), (OBJCG, MAIL + 0x100))
    assert (found.nid, found.item, found.amount) == (None, "task->objcg", 1)
    assert found.unit == "references"
    assert shown(found.signature) == {CACHED: 1, HAD: 1, HAS: -1}
    for off in ({HAD: 1, HAS: 1}, {HAD: -1, HAS: -1}, {HAD: 2, HAS: -1}, {HAD: 1, HAS: -2}, {}):
        assert cached({CACHED: 1, **off}) == []
    assert cached({CACHED: 1, HAD: 1, HAS: -1}, 0xBAD) == []
    assert cached({("task_objcg", "task->objcg"): 1, HAD: 1, HAS: -1}) == []


def test_a_task_with_an_obj_cgroup_that_nobody_pays_for() -> None:
    lost = 0x99000
    made = busy(1).snapshot()
    task = TaskCharge(1, 1, "made", WEB, (lost,), False, True)
    objcgs = {**made.objcgs, lost: Objcg(lost, 0x77000, 0, False, 0)}
    made = replace(made, tasks=(task,), objcgs=objcgs)
    off = {CACHED: 1, HAD: 1, ("references", "refcnt", None, 0, lost): -1}
    [found] = [h for h in options(made, off) if h.cause == "task-objcg"]
    assert (found.memcgs, found.objcgs) == ((WEB,), (OBJCG, lost))


# Memcgs that nothing frees

RELEASED = ("released", "css")


def leaked(
    *transients: Transient, off: int = 1, swap: int = 5, **more: Any
) -> tuple[list[Hypothesis], Snapshot]:
    kernel = busy(1)
    kernel.swap_out(GONE, swap)
    kernel.forget(GONE)
    known = {
        "transients": {0: list(transients), GONE + 0x100: [t for t in transients if t.address]},
        "charge_stocks": [ChargeStock(0, GONE, 7), ChargeStock(1, WEB, 9)],
        "swap_ids": {6: 32},
        **more,
    }
    made = replace(kernel.snapshot(), **known)
    rows: list[Short] = [("references", "refcnt", SHOP, 0, GONE + 0x100)]
    rows += [("usage", "memory.usage", SHOP), ("sock", "MEMCG_SOCK", SHOP)]
    rows += [("swap", "MEMCG_SWAP", SHOP), ("hierarchy", "MEMCG_SWAP", SHOP)]
    rows += [("css_refs", "css.refcnt", SHOP)]
    rows += [("swap_usage", f"{name}.usage", SHOP) for name in ("swap", "memsw")]
    found = options(made, {RELEASED: off}, rows)
    return found, made


LEAKED = Transient("memcg", GONE, references=3, parent=SHOP, swap_id=6, sock_pages=4)


def test_what_is_charged_to_a_memcg_that_nothing_frees() -> None:
    [found], _ = leaked(LEAKED)
    assert (found.cause, found.memcgs, found.amount) == ("memcg-leaked", (GONE,), 1)
    assert (found.place, found.unit, found.nid) == (f" below memcg {SHOP:#x}", "references", None)
    assert (found.item, found.objcgs) == ("css", ())
    assert shown(found.signature) == {
        RELEASED: 1,
        ("references", "refcnt", SHOP, 0, GONE + 0x100): 3,
        ("usage", "memory.usage", SHOP): 7 + 4,
        ("sock", "MEMCG_SOCK", SHOP): 4,
        ("swap", "MEMCG_SWAP", SHOP): 32,
        ("hierarchy", "MEMCG_SWAP", SHOP): 32,
        ("swap_usage", "swap.usage", SHOP): 32,
        ("swap_usage", "memsw.usage", SHOP): 32,
    }


def test_a_memcg_that_is_being_freed_is_not_leaked() -> None:
    freed = LEAKED._replace(address=0x9000, freed_by="RCU")
    [found], _ = leaked(LEAKED, freed)
    assert found.memcgs == (GONE,)
    assert leaked(freed)[0] == []
    assert leaked(LEAKED, off=2)[0] == []


def test_memcgs_of_several_parents_have_no_place() -> None:
    other = LEAKED._replace(address=0x9000, parent=WEB, sock_pages=0, swap_id=0)
    [found], _ = leaked(LEAKED, other, off=2)
    assert (found.memcgs, found.amount, found.place) == ((GONE, 0x9000), 2, "")
    [found], _ = leaked(LEAKED._replace(parent=0x99000))
    assert (found.place, shown(found.signature)) == ("", {RELEASED: 1})


def test_a_memcg_that_is_in_a_list_has_its_own_rows() -> None:
    [found], _ = leaked(LEAKED._replace(address=WEB))
    assert shown(found.signature) == {RELEASED: 1}


def test_swap_without_an_id_is_no_memcgs() -> None:
    [found], _ = leaked(LEAKED._replace(swap_id=0, sock_pages=0), swap_ids={0: 32})
    assert "swap" not in {row[0] for row in shown(found.signature)}
    [unused], _ = leaked(LEAKED._replace(swap_id=9, sock_pages=0))
    assert shown(unused.signature) == shown(found.signature)


def test_bytes_in_stock_of_no_node_are_in_no_counter() -> None:
    made = with_memcg(used(1), OBJCG, MAIL)
    [stock] = made.stocks
    row = ("slab", UNRECLAIMABLE, WEB, 1)
    [found] = options(made, {LISTED: 1}, [row])
    [without] = options(replace(made, stocks=[stock._replace(nid=None)]), {LISTED: 1}, [row])
    assert shown(without.signature)[row] == shown(found.signature)[row] + 504
    none = ("slab", UNRECLAIMABLE, WEB)
    [no_node] = options(replace(made, stocks=[stock._replace(nid=None)]), {LISTED: 1}, [none])
    assert none not in shown(no_node.signature)


def test_what_a_stock_holds_for_an_obj_cgroup_moves_with_it() -> None:
    made = with_memcg(used(1), OBJCG, MAIL)
    [stock] = made.stocks
    row, reclaimable = ("slab", UNRECLAIMABLE, WEB, 1), ("slab", "NR_SLAB_RECLAIMABLE_B", WEB, 1)
    both = stock._replace(reclaimable=24)
    [found] = options(replace(made, stocks=[both]), {LISTED: 1}, [row, reclaimable])
    [without] = options(replace(made, stocks=[]), {LISTED: 1}, [row, reclaimable])
    # No counter has these bytes yet.
    changes = {r: n - shown(without.signature)[r] for r, n in shown(found.signature).items()}
    assert {r: n for r, n in changes.items() if n} == {row: -504, reclaimable: -24}
    pools = {pool: n - without.signature.pools[pool] for pool, n in found.signature.pools.items()}
    assert pools == {(WEB, None): 1000, (MAIL, None): -1000}
