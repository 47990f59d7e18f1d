# SPDX-License-Identifier: LGPL-2.1-or-later
"""Hierarchical and own values of counters made by hand."""

from __future__ import annotations

from dataclasses import replace

from support.made import DEAD, ROOT, A, B, family, tree

from memcg_inspect.checks.counters import Counters, CounterValue
from memcg_inspect.model import Memcg, Stat

ITEM = "MEMCG_KMEM"

#: state, pending, percpu
STATS = {
    ROOT: {ITEM: Stat(1000, 20, 3)},
    A: {ITEM: Stat(700, 10, 5)},
    B: {ITEM: Stat(300, 0, 7)},
    DEAD: {ITEM: Stat(200, 4, -2)},
}


def counters(without: int | None = None) -> Counters:
    return Counters(family(), {a: s for a, s in STATS.items() if a != without}, {})


def test_hierarchical_is_state_and_what_waits_below() -> None:
    whole = counters()
    assert whole.hierarchical(B, ITEM) == CounterValue(300, 0 + 7)
    assert whole.hierarchical(DEAD, ITEM) == CounterValue(200, 4 - 2)
    # 10 + 5 of its own, 7 of /a/b, 2 of /a/dead
    assert whole.hierarchical(A, ITEM) == CounterValue(700, 24)
    # 20 + 3 of its own and those 24
    assert whole.hierarchical(ROOT, ITEM) == CounterValue(1000, 47)


def test_own_leaves_out_live_children_and_keeps_removed_ones() -> None:
    whole = counters()
    assert whole.own(B, ITEM) == CounterValue(300, 7)
    # less /a/b: 700 - 300 folded, 24 - 7 waiting; /a/dead stays in
    assert whole.own(A, ITEM) == CounterValue(400, 17)
    # less /a: 1000 - 700 folded, 47 - 24 waiting
    assert whole.own(ROOT, ITEM) == CounterValue(300, 23)


def test_own_values_add_up_to_the_root() -> None:
    whole = counters()
    claims = [whole.own(memcg, ITEM) for memcg in (ROOT, A, B)]
    assert sum(sum(claim) for claim in claims if claim is not None) == 1000 + 47


def test_live_memcg_below_a_removed_one_is_its_payers() -> None:
    memcgs = tree(
        Memcg(ROOT, "/", 1, "online", None, ROOT),
        Memcg(DEAD, "/dead", 2, "dying", ROOT, ROOT),
        Memcg(B, "/dead/b", 3, "online", DEAD, B),
    )
    stats = {
        ROOT: {ITEM: Stat(90, 0, 0)},
        DEAD: {ITEM: Stat(50, 0, 0)},
        B: {ITEM: Stat(30, 0, 1)},
    }
    whole = Counters(memcgs, stats, {})
    assert whole.own(B, ITEM) == CounterValue(30, 1)
    assert whole.own(ROOT, ITEM) == CounterValue(90 - 30, 0)


def test_removed_below_removed() -> None:
    older = 0x5000
    memcgs = {**family(), older: Memcg(older, "/a/dead/older", 5, "dying", DEAD, A)}
    stats = {**STATS, older: {ITEM: Stat(60, 1, 8)}}
    whole = Counters(memcgs, stats, {})
    assert whole.hierarchical(DEAD, ITEM) == CounterValue(200, 4 - 2 + 1 + 8)
    assert whole.own(A, ITEM) == CounterValue(400, 17 + 9)


def test_counters_of_nodes_stand_apart() -> None:
    memcgs = tree(Memcg(ROOT, "/", 1, "online", None, ROOT))
    by_node = {(ROOT, 0): {ITEM: Stat(5, 0, 0)}, (ROOT, 1): {ITEM: Stat(7, 1, 1)}}
    whole = Counters(memcgs, {ROOT: {ITEM: Stat(100, 0, 0)}}, by_node)
    assert whole.own(ROOT, ITEM) == CounterValue(100, 0)
    assert whole.own(ROOT, ITEM, 0) == CounterValue(5, 0)
    assert whole.own(ROOT, ITEM, 1) == CounterValue(7, 2)
    assert whole.stat(ROOT, ITEM, 1) == Stat(7, 1, 1)


def test_what_was_not_read_is_none() -> None:
    assert counters(without=B).own(B, ITEM) is None
    assert counters(without=B).stat(B, ITEM) is None
    assert counters(without=B).own(A, ITEM) is None
    assert counters(without=DEAD).own(A, ITEM) is None
    # nor is what an ancestor claims with all its descendants
    assert counters(without=B).hierarchical(A, ITEM) is None
    assert counters(without=DEAD).hierarchical(A, ITEM) is None
    assert counters(without=DEAD).hierarchical(ROOT, ITEM) is None
    assert counters(without=DEAD).hierarchical(B, ITEM) == CounterValue(300, 7)
    # the others are known all the same
    assert counters(without=DEAD).own(B, ITEM) == CounterValue(300, 7)
    assert counters(without=A).own(B, ITEM) == CounterValue(300, 7)


def test_unknown_item_node_or_memcg_is_none() -> None:
    whole = counters()
    assert whole.own(A, "NR_NO_SUCH_ITEM") is None
    assert whole.own(A, ITEM, 3) is None
    assert whole.own(0x9999, ITEM) is None
    assert whole.hierarchical(0x9999, ITEM) is None


#: Items of the counters of :func:`test_items_that_a_memcg_or_those_below_it_have`.
EVERY = {ITEM, "NR_FILE", "NR_SHMEM"}


def active(made: Counters, memcg: int) -> set[str]:
    return {item for item in EVERY if made.is_active(memcg, item)}


def test_items_that_a_memcg_or_those_below_it_have() -> None:
    quiet = {"NR_SHMEM": Stat(0, 0, 0, 0)}
    stats = {memcg: {**of, **quiet} for memcg, of in STATS.items()}
    by_node = {(memcg, nid): {"NR_FILE": Stat(0, 0, 0)} for memcg in stats for nid in (0, 1)}
    assert active(Counters(family(), stats, by_node), B) == {ITEM}
    only_in_child = {**stats, A: quiet}
    assert active(Counters(family(), only_in_child, by_node), A) == {ITEM}
    on_a_node = {**by_node, (A, 1): {"NR_FILE": Stat(0, 0, -1)}}
    assert active(Counters(family(), stats, on_a_node), A) == {ITEM, "NR_FILE"}
    # What was not read may be anything.
    unread = {cell: of for cell, of in by_node.items() if cell != (DEAD, 1)}
    assert active(Counters(family(), stats, unread), A) == EVERY
    assert active(Counters(family(), stats, unread), B) == {ITEM}
    partial = {a: replace(m, whole=a != B) for a, m in family().items()}
    assert active(Counters(partial, stats, by_node), B) == EVERY


def test_sums_of_items() -> None:
    """One item that could not be read leaves no sum."""
    stats = {memcg: {**some, "OTHER": Stat(50, 6, 1)} for memcg, some in STATS.items()}
    whole = Counters(family(), stats, {})
    assert whole.own_sum(B, (ITEM, "OTHER")) == CounterValue(300 + 50, 7 + 7)
    assert whole.hierarchical_sum(B, (ITEM, "OTHER")) == CounterValue(300 + 50, 7 + 7)
    assert whole.own_sum(A, ()) == CounterValue(0, 0)
    for total in (whole.own_sum, whole.hierarchical_sum):
        assert total(B, (ITEM, "NONE")) is None


def test_counters_that_were_read_and_are_zero() -> None:
    """On any node. Of a counter that was not read, nothing is known."""
    quiet = {"NR_SHMEM": Stat(0, 0, 0)}
    stats = {memcg: {**of, **quiet} for memcg, of in STATS.items()}
    by_node = {(memcg, 1): {"NR_FILE": Stat(0, 0, 0)} for memcg in stats}
    made = Counters(family(), stats, by_node)
    zero = [
        (item, nid)
        for item in (*sorted(EVERY), "NONE")
        for nid in (None, 0, 1)
        if made.is_zero(B, item, nid)
    ]
    assert zero == [("NR_FILE", 1), ("NR_SHMEM", None)]
    assert [
        (item, nid) for item in sorted(EVERY) for nid in (None, 0, 1) if made.has(item, nid)
    ] == [
        (ITEM, None),
        ("NR_FILE", 1),
        ("NR_SHMEM", None),
    ]
