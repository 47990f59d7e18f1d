# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is left of rows after a cause: bytes and pages, rounded together, and rows in doubt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from support import made_hugetlb, made_zones
from support.made import DEAD, ROOT, A, B, features, snapshot
from support.made_rows import Short, exact, key, view

from memcg_inspect.checks.diagnosis.differences import Differences, Signature, View, added
from memcg_inspect.checks.profile import Profile
from memcg_inspect.checks.registry import CHECKS
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Held, LruLists, Nodes, NodeStat, Objcg, ObjcgPlace, Running
from memcg_inspect.model_kernel import LocalItems
from memcg_inspect.model_tasks import TaskCharge
from memcg_inspect.report import Row, RowStatus

PAGE = 4096
SLAB = "NR_SLAB_RECLAIMABLE_B"
#: Difference and status of rows.
Doubtful = Mapping[Short, tuple[int, RowStatus]]
BYTES = ("objcg_bytes", "bytes of whole pages", B, 0, 0xB0)
USAGE = ("usage", "memory.usage", B)


def signature(rows: Mapping[Short, int], pools: Any = None) -> Signature:
    return Signature({key(*short): n for short, n in rows.items()}, pools or {})


def left(d: Differences, row: Short, rows: Mapping[Short, int], pools: Any = None) -> int:
    return d.residual(key(*row), signature(rows, pools))


def test_signatures_are_added_up() -> None:
    one = signature({("slab", SLAB, A): 5, ("usage", "x", A): 1}, {(A, None): 7, (B, 0): 1})
    other = signature({("slab", SLAB, A): 2, ("usage", "x", B): 3}, {(A, None): 7, (A, 0): 4})
    assert added(one, other) == signature(
        {("slab", SLAB, A): 7, ("usage", "x", A): 1, ("usage", "x", B): 3},
        {(A, None): 14, (B, 0): 1, (A, 0): 4},
    )
    assert added(one, one, sign=-1) == Signature({}, {})
    assert added(signature({}), other, sign=-1) == signature(
        {("slab", SLAB, A): -2, ("usage", "x", B): -3}, {(A, None): -7, (A, 0): -4}
    )
    assert one.rows[key("slab", SLAB, A)] == 5


def test_what_a_cause_adds_is_taken_off() -> None:
    row = ("slab", SLAB, B, 0)
    d = view(snapshot(), {row: 100}, [("slab", SLAB, A, 0)]).differences
    assert [left(d, row, {row: n}) for n in (0, 40, 100, 130)] == [100, 60, 0, -30]
    # A row that is exact is to stay so. One that is not there may have any difference.
    assert left(d, ("slab", SLAB, A, 0), {("slab", SLAB, A, 0): 8}) == -8
    assert left(d, ("slab", SLAB, B, 1), {("slab", SLAB, B, 1): 8}) == 0
    assert d.observed(key("slab", SLAB, B, 1)) is None


def test_rows_of_zeros_are_left_out_by_some_identities() -> None:
    """A row that is not there is exact, if the kernel keeps the identity."""
    local = LocalItems(frozenset(), frozenset(("NR_SHMEM",)))
    known = features("NR_SHMEM", has_local=True, lruvec_items=("NR_SHMEM",), local=local)
    made = snapshot(features=known, lru=LruLists({}, {}, True))
    kept = {"lru": "LIST", "page_levels": "NR_SHMEM", "local": "NR_SHMEM"}
    d, without = exact(made), exact(snapshot(features=features()))
    for identity, item in kept.items():
        row = (identity, item, B)
        assert (d.applies(key(*row)), without.applies(key(*row))) == (True, False), identity
        assert (d.observed(key(*row)), without.observed(key(*row))) == (0, None)
        assert d.keeps(identity)
        assert not without.keeps(identity)
        assert not d.has(key(*row))
        assert exact(made, row).has(key(*row))
        assert d.row(key(*row)) is None
    for identity in ("slab", "usage", "levels", "percpu"):
        assert not d.applies(key(identity, "x", B))


def test_identities_that_leave_out_rows_of_zeros() -> None:
    """Those whose rows are left out by a kernel that keeps them, and no others."""
    nodes = {
        "all_nodes": Nodes({"NR_SHMEM": 0}, frozenset((0, 1))),
        "node_stats": {(nid, "NR_SHMEM"): NodeStat(0, 0) for nid in (0, 1)},
    }
    items = ("NR_SHMEM",)
    known = features(*items, has_local=True, lruvec_items=items, node_items=items)
    made = (
        snapshot(features=known, lru=LruLists({}, {}, True), profile=Profile(), **nodes),
        made_zones.made(),
        made_hugetlb.made(),
    )
    kept = {c.name for d in map(exact, made) for c in CHECKS if d.keeps(c.name)}
    left_out = {name for d in map(exact, made) for name in kept if d.applies(key(name, "x", B))}
    assert left_out == {
        *("lru", "user_pages", "page_levels", "local_fold", "node_levels", "node_totals"),
        *("alloc_tags", "hugetlb_usage", "hugetlb_nodes"),
        *("zone_free", "zone_free_area", "zone_lru", "zone_totals"),
    }


@pytest.mark.parametrize(
    ("size", "rests"),
    [
        # Bytes of objects are charged as whole pages: half a page, as none or as one.
        (2047, [0, 1, 2]),
        (2048, [0, 0, 1]),
        (2049, [-1, 0, 1]),
        (4096, [-1, 0, 1]),
        (6144, [-1, 0, 0]),
        (-2048, [0, 1, 2]),
        (-2049, [1, 2, 3]),
    ],
)
def test_bytes_of_objects_are_whole_pages_in_rows_of_pages(size: int, rests: list[int]) -> None:
    for row in (USAGE, ("kmem_usage", "kmem.usage", B), ("kmem", "MEMCG_KMEM", B)):
        for pages, rest in enumerate(rests):
            d = view(snapshot(), {row: pages}).differences
            assert left(d, row, {}, {(B, None): size}) == rest


def test_bytes_of_two_causes_are_rounded_together() -> None:
    d = view(snapshot(), {USAGE: 1}).differences
    assert left(d, USAGE, {}, {(B, None): 1500}) == 1
    assert left(d, USAGE, {}, {(B, None): 3000}) == 0
    # Those of the nodes of one memcg, too, where the row is of all of them.
    assert left(d, USAGE, {}, {(B, 0): 1500, (B, 1): 1500}) == 0
    assert left(d, USAGE, {}, {(A, 0): 3000}) == 1
    assert left(d, USAGE, {USAGE: 1}, {(B, 0): 100}) == 0


def test_bytes_on_a_node_are_in_the_row_of_that_node() -> None:
    row = ("kmem", "NR_KMEM", B, 1)
    d = view(snapshot(features=features("NR_KMEM")), {row: 1}).differences
    assert left(d, row, {}, {(B, 1): PAGE}) == 0
    assert left(d, row, {}, {(B, 0): PAGE}) == 1
    assert left(d, row, {}, {(A, 1): PAGE}) == 1


def test_sums_of_a_subtree_round_the_bytes_of_each_memcg() -> None:
    for item, where, pool in (("MEMCG_KMEM", (), None), ("NR_KMEM", (1,), 1)):
        rows = [("hierarchy", item, memcg, *where) for memcg in (ROOT, A)]
        d = view(snapshot(), dict.fromkeys(rows, 2)).differences
        for row in rows:
            assert left(d, row, {}, {(A, pool): 3000, (B, pool): 3000}) == 0
            assert left(d, row, {}, {(A, pool): 3000, (B, 0): 3000}) == 1
    # Those of the parent are not in the sum of its child.
    below = ("hierarchy", "MEMCG_KMEM", B)
    d = view(snapshot(), {below: 1}).differences
    assert left(d, below, {}, {(A, None): PAGE}) == 1
    other = ("hierarchy", "NR_SHMEM", B)
    d = view(snapshot(), {other: 1}).differences
    assert left(d, other, {}, {(B, None): PAGE}) == 1


@pytest.mark.parametrize(
    ("off", "size", "rest"),
    [(100, 0, 100), (100, 100, 0), (100, 4196, 0), (100, 4000, 196), (100, 300, -200),
     (2047, 0, 2047), (-2048, 0, 2048), (-100, 4096 + 2000, 1996)],
)  # fmt: skip
def test_bytes_of_an_obj_cgroup_are_compared_modulo_a_page(off: int, size: int, rest: int) -> None:
    d = view(snapshot(), {BYTES: off}).differences
    assert left(d, BYTES, {BYTES: size}) == rest


@pytest.mark.parametrize(
    ("row", "amounts"),
    [
        # The local counter of slab memory may have too much that no row shows: not too little.
        (("local", SLAB, B, 0), {8: 0, -8: 0}),
        (("local", "NR_SHMEM", B, 0), {8: -8, -8: 8}),
        # A node may have what is not charged, so only more of the root memcg's shows.
        (("node_levels", "NR_FILE_MAPPED", None, 0), {8: 0, -8: 0}),
        (("node_levels", "NR_SHMEM", None, 0), {8: -8, -8: 8}),
    ],
)
def test_rows_in_which_something_may_be_hidden(row: Short, amounts: dict[int, int]) -> None:
    d = exact(snapshot(features=features("NR_SHMEM", has_local=True)), row)
    assert {n: left(d, row, {row: n}) for n in amounts} == amounts


@pytest.mark.parametrize(
    ("row", "off", "rests"),
    [
        (("local", SLAB, B, 0), 8, {8: 0, 20: 0, 4: 4, -8: 8}),
        (("local", SLAB, B, 0), -8, {-8: 0, -20: 0, 8: -8}),
        (("node_levels", "NR_FILE_MAPPED", None, 0), -8, {-8: 0, -20: 0, -4: -4, 8: -8}),
        (("node_levels", "NR_FILE_MAPPED", None, 0), 8, {8: 8, 20: 8}),
    ],
)
def test_of_what_may_be_hidden_a_row_shows_a_part(
    row: Short, off: int, rests: dict[int, int]
) -> None:
    d = view(snapshot(features=features("NR_FILE_MAPPED", has_local=True)), {row: off}).differences
    assert {n: left(d, row, {row: n}) for n in rests} == rests


def rows_of(made: Snapshot, off: Doubtful) -> Differences:
    """Return rows with differences and a status. Those that differ are findings."""
    rows: list[Row] = []
    for short, (amount, status) in off.items():
        row = make_row(key(*short), {"found": 1 << 40}, {"folded": (1 << 40) + amount})
        rows.append(replace(row, status=status, reason="made"))
    return Differences(
        made, rows, {key(*short) for short, (_, status) in off.items() if status == "differs"}
    )


def test_what_is_not_known_to_be_exact_may_have_any_difference() -> None:
    row = ("slab", SLAB, B, 0)
    statuses: tuple[RowStatus, ...] = ("in-flight", "moving", "unverifiable")
    for status in statuses:
        d = rows_of(snapshot(), {row: (100, status)})
        assert d.observed(key(*row)) is None
        assert left(d, row, {row: 7}) == 0
        assert d.differing() == {}
    d = rows_of(snapshot(), {row: (100, "differs")})
    assert d.differing() == {key(*row): 100}
    explained = Differences(d.snapshot, [replace(d.row(key(*row)))], ())  # type: ignore[type-var]
    assert (explained.differing(), explained.observed(key(*row))) == ({}, None)


def test_the_differences_that_one_cause_makes() -> None:
    row, other = ("slab", SLAB, B, 0), ("slab", SLAB, A, 0)
    d = view(snapshot(), {row: 100}, [other, USAGE]).differences
    goal = d.of_goal(signature({row: 30, other: -30}, {(B, None): PAGE}))
    assert goal.differing() == {key(*row): 30, key(*other): -30, key(*USAGE): 1}
    assert left(goal, row, {row: 10}) == 20
    assert d.differing() == {key(*row): 100}
    half = d.of_goal(signature({}, {(B, None): PAGE // 2}))
    # No page, or one. One is what has to be explained.
    assert half.differing() == {key(*USAGE): 1}


def test_rows_that_a_signature_touches() -> None:
    made = snapshot(features=features("NR_KMEM"))
    rows = [USAGE, ("kmem_usage", "kmem.usage", B), ("kmem", "MEMCG_KMEM", B)]
    rows += [("kmem", "NR_KMEM", B, 1), ("kmem", "NR_KMEM", B, 0)]
    rows += [("hierarchy", "MEMCG_KMEM", m) for m in (ROOT, A, B)]
    rows += [("hierarchy", "NR_KMEM", m, n) for m in (ROOT, A, B) for n in (0, 1)]
    d = exact(made, *rows)
    touched = list(d.touched(signature({("slab", SLAB, B, 0): 1}, {(B, None): 8})))
    assert touched == [
        key("slab", SLAB, B, 0),
        *(key("kmem", "MEMCG_KMEM", B), key(*USAGE), key("kmem_usage", "kmem.usage", B)),
        *(key("hierarchy", "MEMCG_KMEM", m) for m in (B, A, ROOT)),
    ]
    on_node = list(d.touched(signature({}, {(A, 1): 8})))
    assert on_node == [key("hierarchy", "NR_KMEM", m, 1) for m in (A, ROOT)]


def test_a_counter_is_compared_with_charges_in_one_row() -> None:
    """Not those that compare it with other counters, or that have no counter."""
    rows = [("slab", SLAB, B, 0), ("hierarchy", SLAB, B, 0), ("levels", SLAB, B)]
    d = exact(snapshot(), *rows, ("node_slab", SLAB, None, 0))
    assert d.counter(SLAB, B, 0) == key("slab", SLAB, B, 0)
    assert d.counter(SLAB, B, None) is None
    assert d.counter(SLAB, A, 0) is None
    unread = make_row(key("slab", SLAB, A, 0), {}, None)
    d = Differences(snapshot(), [unread], ())
    assert d.counter(SLAB, A, 0) == key("slab", SLAB, A, 0)
    other = make_row(key("references", SLAB, A, 0), {}, {"refcnt": 1})
    assert Differences(snapshot(), [other], ()).counter(SLAB, A, 0) is None


def test_memcgs_their_obj_cgroups_and_tasks() -> None:
    objcgs = {
        0xA0: Objcg(0xA0, A, 0, False, 0, places=(ObjcgPlace(A, 0, "objcg"),)),
        0xB0: Objcg(0xB0, B, 0, False, 0, set=0x5E7, places=(ObjcgPlace(B, 0, "objcg"),) * 2),
        0xD0: Objcg(0xD0, DEAD, 1, False, 0, places=(ObjcgPlace(DEAD, 1, "orig_objcg"),)),
    }
    tasks = (
        TaskCharge(1, 1, "a", B, (0xB0, 0xB1), False, True),
        TaskCharge(2, 2, "b", B, (0xB0, 0xB2), False, True),
        TaskCharge(3, 3, "c", DEAD, (0xD0,), False, True),
    )
    made = snapshot(objcgs=objcgs, tasks=tasks)
    d = exact(made, ("objcg_sets", "entries", B, None, 0xB0), BYTES)
    assert (d.chain(B), d.chain(ROOT)) == ((B, A, ROOT), (ROOT,))
    # The parent pays for what was charged to a removed memcg.
    assert (d.objcgs(A), d.objcgs(B), d.objcgs(ROOT)) == ([0xA0, 0xD0], [0xB0], [])
    assert list(d.cached(B)) == [0xB0, 0xB1, 0xB2]
    assert (list(d.cached(A)), list(d.cached(ROOT))) == ([0xD0], [])
    assert [(o.address, n) for o, n in d.listed(B, 0)] == [(0xB0, 2)]
    assert [(o.address, n) for o, n in d.listed(DEAD, 1)] == [(0xD0, 1)]
    assert list(d.listed(B, 1)) == []
    assert d.set_row(0x5E7) == key("objcg_sets", "entries", B, None, 0xB0)
    assert d.set_row(0x77) is None


# Rows of what a CPU may have left half done

OBJECT = Held("object", 0x9000, 0, 0, 208, "unreclaimable")
ROW, OTHER = ("slab", SLAB, B, 0), ("slab", SLAB, A, 0)


def beside(off: Doubtful, *held: Held, busy: bool = True) -> Differences:
    running = (Running(0, 1, "sh", ("kmalloc",), busy, held),)
    return rows_of(snapshot(running=running), off)


def test_a_row_in_flight_speaks_for_what_leaves_a_half_done_charge() -> None:
    for off, says in ((500, True), (708, True), (292, True), (501, False), (708 + 208, False)):
        d = beside({ROW: (off, "in-flight")}, OBJECT)
        assert d.speaks_for(key(*ROW), signature({ROW: 500})) == says, off
    d = beside({ROW: (500, "in-flight")}, OBJECT)
    assert not d.speaks_for(key(*ROW), signature({}))
    # It is all that the CPU has left half done, and speaks for no cause.
    assert not beside({ROW: (208, "in-flight")}, OBJECT).speaks_for(key(*ROW), signature({}))
    assert not d.speaks_for(key(*OTHER), signature({OTHER: 500}))
    assert not d.of_goal(signature({ROW: 5})).speaks_for(key(*ROW), signature({ROW: 500}))


def test_only_what_is_in_doubt_speaks() -> None:
    statuses: dict[RowStatus, bool] = {
        "in-flight": True,
        "unverifiable": True,
        "differs": False,
        "moving": False,
        "exact": False,
    }
    for status, says in statuses.items():
        d = beside({ROW: (500, status)}, OBJECT)
        assert d.speaks_for(key(*ROW), signature({ROW: 500})) == says, status
    for held, busy in (((), True), ((OBJECT,), False), ((OBJECT._replace(bytes=0),), True)):
        d = beside({ROW: (500, "in-flight")}, *held, busy=busy)
        assert not d.speaks_for(key(*ROW), signature({ROW: 500}))


def test_half_done_charges_are_in_the_unit_of_a_row() -> None:
    stack = Held("kmem", 0x9000, 0, 0, 4 * PAGE, "stack")
    for row, amount in ((("kernel_stack", "NR_KERNEL_STACK_KB", B, 0), 16), (USAGE, 4)):
        for off, says in ((100 + amount, True), (100 - amount, True), (100 + amount + 1, False)):
            d = beside({row: (off, "in-flight")}, stack)
            assert d.speaks_for(key(*row), signature({row: 100})) == says
    references = ("references", "refcnt", B, 0, 0xB0)
    d = beside({references: (101, "in-flight")}, Held("object", 0x9000, 0, 0, 1, ""))
    assert not d.speaks_for(key(*references), signature({references: 100}))
    assert d.speaks_for(key(*references), signature({references: 101}))


def test_half_done_bytes_of_an_obj_cgroup_are_modulo_a_page() -> None:
    for off, says in (
        (500, True),
        (708, True),
        (292, True),
        (500 - PAGE, True),
        (400, False),
        (800, False),
    ):
        d = beside({BYTES: (off, "in-flight")}, OBJECT)
        assert d.speaks_for(key(*BYTES), signature({BYTES: 500})) == says, off


# The other side of a charge


def test_rows_that_differ_by_as_much_are_the_other_side() -> None:
    rows = view(
        snapshot(),
        {
            ROW: 208,
            OTHER: -208,
            ("slab", SLAB, ROOT, 0): -500,
            ("slab", SLAB, DEAD, 0): 208,
            ("slab", SLAB, A, 1): -208,
            ("slab", "NR_SLAB_UNRECLAIMABLE_B", A, 0): -208,
            ("percpu", SLAB, A, 0): -208,
        },
    )
    assert rows.opposite(key(*ROW), 208) == [key(*OTHER), key("slab", SLAB, ROOT, 0)]
    assert rows.opposite(key(*OTHER), -208) == [key(*ROW), key("slab", SLAB, DEAD, 0)]
    # Not a row of the same memcg.
    same = view(snapshot(), {ROW: 208, (*ROW, 0xB0): -208})
    assert same.opposite(key(*ROW), 208) == []


def test_few_rows_that_differ_by_other_amounts_are_tried() -> None:
    others = {("slab", SLAB, 0x9000 + n, 0): -1000 - n for n in range(9)}
    rows = view(snapshot(), {ROW: 208, **others})
    assert rows.opposite(key(*ROW), 208) == [key(*short) for short in list(others)[:4]]
    rows = view(snapshot(), {ROW: 208, OTHER: -208, **others})
    assert rows.opposite(key(*ROW), 208) == [key(*OTHER), *(key(*s) for s in list(others)[:3])]
    # None where enough differ by as much.
    same = {("slab", SLAB, 0x8000 + n, 0): -208 for n in range(4)}
    rows = view(snapshot(), {ROW: 208, **same, **others})
    assert rows.opposite(key(*ROW), 208) == [key(*short) for short in same]
    # One that differs by little in the same direction is not the other side.
    assert view(snapshot(), {ROW: 208, OTHER: 1}).opposite(key(*ROW), 208) == []
    # Of very many, no row tells which one it is.
    same = {("slab", SLAB, 0x8000 + n, 0): -208 for n in range(65)}
    rows = view(snapshot(), {ROW: 208, **same, **others})
    assert rows.opposite(key(*ROW), 208) == [key(*short) for short in list(same)[:64]]


def test_the_other_side_may_be_in_flight() -> None:
    doubtful: dict[Short, tuple[int, RowStatus]] = {
        OTHER: (-208, "in-flight"),
        ("slab", SLAB, ROOT, 0): (-416, "in-flight"),
        ("slab", SLAB, DEAD, 0): (-300, "in-flight"),
        ("slab", SLAB, A, 1): (-208, "in-flight"),
        ("slab", SLAB, B, 0, 0xB0): (-208, "in-flight"),
    }
    d = beside({ROW: (208, "differs"), **doubtful}, OBJECT)
    rows = View(d, d.differing())
    assert rows.opposite(key(*ROW), 208) == [key(*OTHER), key("slab", SLAB, ROOT, 0)]
    assert list(d.of_goal(signature({})).opposite(key(*ROW), 208)) == []


def test_obj_cgroups_that_a_charge_can_concern() -> None:
    objcgs = {n: Objcg(n, B, n & 1, False, 0) for n in range(0xB0, 0xB6)}
    made = snapshot(objcgs=objcgs)
    rows = [("references", "refcnt", B, n & 1, n) for n in objcgs]
    # Those whose rows differ, or, if none does, the first ones.
    assert view(made, {rows[2]: 1, BYTES: 8, rows[0]: 2}).objcgs(B) == [0xB2, 0xB0]
    assert view(made, {BYTES: 8}).objcgs(B) == [0xB0]
    assert view(made, {}, rows).objcgs(B) == [0xB0, 0xB1, 0xB2, 0xB3]
    assert view(made, {}, rows).objcgs(A) == []
    hidden = rows_of(made, {rows[0]: (0, "exact"), rows[1]: (1, "unverifiable")})
    assert View(hidden, {}).objcgs(B) == [None]
    assert View(hidden, {}).objcgs(A) == []
    assert (hidden.may_hide(B), hidden.may_hide(A)) == (True, False)
    in_bytes = rows_of(made, {BYTES: (1, "unverifiable")})
    assert in_bytes.may_hide(B)
    assert not rows_of(made, {USAGE: (1, "unverifiable")}).may_hide(B)


def test_rows_of_a_memcg() -> None:
    rows = view(snapshot(), {ROW: 1, ("slab", SLAB, B, 1): 2, OTHER: 3, USAGE: 4})
    assert rows.of_memcg("slab", B) == [key(*ROW), key("slab", SLAB, B, 1)]
    assert rows.of_memcg("slab", ROOT) == []


def test_a_signature_is_made_once() -> None:
    d, made = exact(snapshot()), []

    def make() -> Signature:
        made.append(1)
        return signature({ROW: 1})

    assert d.remembered("it", make) is d.remembered("it", make)
    assert d.remembered("it", make) == signature({ROW: 1})
    assert (len(made), RowKey("a", "b", "bytes").memcg) == (1, None)
