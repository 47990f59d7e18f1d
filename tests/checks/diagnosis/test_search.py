# SPDX-License-Identifier: LGPL-2.1-or-later
"""The search for sets of causes, with causes and rows made for it."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from itertools import pairwise
from typing import Any

import pytest
from support.made import snapshot
from support.made_rows import Short, key, view
from support.made_search import ROWS, causes, fault, found, names

from memcg_inspect.checks.diagnosis import search
from memcg_inspect.checks.diagnosis.cause import Cause, Hypothesis
from memcg_inspect.checks.diagnosis.differences import Signature, View
from memcg_inspect.checks.diagnosis.effects import Charge
from memcg_inspect.checks.diagnosis.search import each_alone, explain
from memcg_inspect.checks.rows import RowKey

A, B, C, D = ({row: 100 + 7 * n} for n, row in enumerate(ROWS[:4]))


def test_the_cause_of_most_rows_is_taken() -> None:
    both = fault("both", A | B)
    assert names(found(A | B, fault("a", A), fault("b", B), both)) == ["both"]
    assert names(found(A | B, fault("a", A), fault("b", B))) == ["a", "b"]
    assert names(found(A, fault("a", A), both)) == ["a"]
    assert found(A | B) == found({}, both) == []


def test_a_cause_must_not_change_rows_that_are_exact() -> None:
    wrong = fault("wrong", A | B)
    assert found(A, wrong, exact=[ROWS[1]]) == []
    # A row that is not there may have any difference.
    assert names(found(A, wrong)) == ["wrong"]
    # Three rows are worth one that is wrong then.
    assert names(found(A | B | C, fault("three", A | B | C | D), exact=[ROWS[3]])) == ["three"]
    assert found(A | B, fault("two", A | B | D), exact=[ROWS[3]]) == []


def test_of_causes_of_the_same_rows_the_first_one_is_taken_and_others_are_named() -> None:
    one, other = fault("one", A), fault("other", A)
    [explained] = found(A, one, other)
    assert (explained.cause.cause, explained.sure) == ("one", True)
    assert [[h.cause for h in some] for some in explained.others] == [["other"]]
    [alone] = found(A, one)
    assert (alone.others, alone.sure) == ((), True)


def test_fewer_causes_are_better_than_those_that_were_taken_first() -> None:
    """The largest cause leaves rows to two others; two causes explain all."""
    large = fault("large", A | B)
    rows = A | B | C | D
    first, second = fault("first", A | C), fault("second", B | D)
    some = (large, fault("c", C), fault("d", D), first, second)
    assert names(found(rows, *some)) == ["first", "second"]


def test_causes_near_rows_that_are_left_over_are_replaced() -> None:
    """Two causes of other rows are about the memcg of a row that nothing explains after them."""
    memcgs, rest = (0x9002,), {ROWS[4]: 500}
    large, other = fault("large", A | B, memcgs=memcgs), fault("other", rest, memcgs=memcgs)
    first, second = fault("first", A | C), fault("second", B | D)
    assert names(found(A | B | C | D | rest, large, other)) == ["large", "other"]
    made = found(A | B | C | D | rest, large, other, first, second)
    assert names(made) == ["first", "other", "second"]


def test_places_that_no_row_tells_apart_are_one_cause() -> None:
    some = [fault("a", A, place=place) for place in ("here", "there", "")]
    [explained] = found(A, *some)
    assert (explained.cause.place, explained.others) == ("here, there", ())


@pytest.mark.parametrize(
    ("amount", "unit", "sure"),
    [
        (16, "references", False),
        (-16, "references", False),
        (17, "references", True),
        (100, "bytes", True),
        (4096, "bytes", False),
        (16 * 4096, "bytes", False),
        (17 * 4096, "bytes", True),
    ],
)
def test_small_amounts_may_be_a_coincidence(amount: int, unit: Any, sure: bool) -> None:
    rows = A | B
    both = fault("both", A, amount=amount, unit=unit), fault("other", B, amount=777)
    made = {e.cause.cause: e.sure for e in found(rows, *both)}
    assert made == {"both": sure, "other": True}


def test_causes_of_the_same_amount_are_not_sure() -> None:
    one, other = fault("one", A, amount=100), fault("other", B, amount=-100, item="one")
    assert [e.sure for e in found(A | B, one, other)] == [False, False]
    different = other._replace(item="other")
    assert [e.sure for e in found(A | B, one, different)] == [True, True]
    unit = other._replace(unit="bytes")
    assert [e.sure for e in found(A | B, one, unit)] == [True, True]


def test_causes_that_concern_one_memcg_are_not_sure() -> None:
    one, other = fault("one", A, memcgs=(1,)), fault("other", B, memcgs=(2, 1))
    assert [e.sure for e in found(A | B, one, other)] == [False, False]
    apart = other._replace(memcgs=(2,))
    assert [e.sure for e in found(A | B, one, apart)] == [True, True]


def test_rows_without_an_explanation_make_those_near_them_unsure() -> None:
    one = fault("one", A, memcgs=(0x9001,))
    off = A | B
    assert [e.sure for e in found(off, one)] == [False]  # B is a row of 0x9001
    assert [e.sure for e in found(A | C, one)] == [True]
    # Unless they differ for a reason of their own.
    ignored = frozenset([key(*ROWS[1])])
    assert [e.sure for e in found(off, one, ignored=ignored)] == [True]
    node = fault("node", A, nid=1)
    near = ("node_levels", "NR_SHMEM", None, 1)
    for nid, sure in ((1, False), (0, True)):
        assert [e.sure for e in found(A | {(*near[:3], nid): 500}, node)] == [sure]


@pytest.mark.parametrize(
    ("charge", "objcgs", "sure"),
    [
        (Charge("slab", "", 0, 700), (0xB0,), True),
        (Charge("slab", "", 0, 700, references=0), (0xB0,), False),
        (Charge("slab", "", 0, 700, references=3, together=True), (0xB0,), False),
        (Charge("slab", "", 0, 700), (None,), True),
    ],
)
def test_a_charge_is_sure_with_its_references(charge: Charge, objcgs: Any, sure: bool) -> None:
    """The row of references that it changes tells as much as its obj_cgroup."""
    one = fault("one", A, charge=charge, objcgs=objcgs, unit="bytes", amount=700)
    assert [e.sure for e in found(A, one)] == ([sure] if not charge.together else [False])
    without = fault("one", {("usage", "x", 1): 70}, charge=charge, objcgs=(None,), amount=700)
    if not charge.together:
        assert [e.sure for e in found({("usage", "x", 1): 70}, without)] == [False]


def test_each_alone() -> None:
    one, other, both = fault("one", A), fault("other", A), fault("both", A | B)
    made = view(snapshot(), {}, ROWS).differences
    goal = {key(*row): amount for row, amount in A.items()}
    alone = each_alone(made, causes(one, other, both), goal)
    assert [h.cause for h in alone] == ["one", "other"]
    many = [fault("many", A, place=str(n)) for n in range(40_000)]
    assert each_alone(made, causes(*many), goal) == []


def test_a_node_is_near_a_fault_of_no_memcg_only() -> None:
    on_node, everywhere = ("node_levels", "NR_SHMEM", None, 1), ("node_totals", "NR_SHMEM")
    of_memcg = fault("one", A, memcgs=(0x9000,), nid=1)
    assert [e.sure for e in found(A | {on_node: 500}, of_memcg)] == [True]
    assert [e.sure for e in found(A | {everywhere: 500}, fault("one", A))] == [True]


def test_the_cause_of_all_rows_is_looked_for_in_one_of_them() -> None:
    asked: list[RowKey] = []

    def options(_rows: View, row: RowKey, _amount: int) -> Iterator[Hypothesis]:
        asked.append(row)
        yield fault("all", A | B | C)

    made = view(snapshot(), {}, ROWS).differences
    goal = {key(*row): amount for row, amount in (A | B | C).items()}
    cause = Cause("all", ("css_refs",), options, str, (), "")
    assert [h.cause for h in each_alone(made, [cause], goal)] == ["all"]
    assert len(asked) == 1


@pytest.mark.parametrize(("singles", "fewer"), [(11, True), (12, False)])
def test_fewer_causes_are_looked_for_in_place_of_twelve(singles: int, fewer: bool) -> None:
    """The largest cause leaves rows to as many others, and two causes explain all."""
    rows: list[dict[Short, int]] = [
        {("css_refs", "css.refcnt", 0xA000 + n): 100 + 7 * n} for n in range(14 + singles)
    ]

    def of(*numbers: int) -> dict[Short, int]:
        return {row: amount for n in numbers for row, amount in rows[n].items()}

    every = range(len(rows))
    some = [fault("large", of(*every[:14]), memcgs=(1,))]
    some += [fault(f"single {n}", of(n), memcgs=(1,)) for n in every[14:]]
    halves = [fault(f"half {n}", of(*every[n::2])) for n in (0, 1)]
    explained = names(found(of(*every), *some, *halves))
    assert explained == (["half 0", "half 1"] if fewer else sorted(h.cause for h in some))


@pytest.mark.parametrize(("most", "sure"), [(2, True), (1, False)])
def test_nothing_is_sure_where_very_many_rows_differ(
    monkeypatch: pytest.MonkeyPatch, most: int, sure: bool
) -> None:
    monkeypatch.setattr(search, "_MOST_ENTANGLED", most)
    assert [e.sure for e in found(A | B, fault("a", A), fault("b", B))] == [sure, sure]


def test_causes_away_from_rows_that_are_left_over_stay() -> None:
    large, first, second = fault("large", A | B), fault("first", A | C), fault("second", B | D)
    assert names(found(A | B | C | D, large, first, second)) == ["large"]


def test_two_causes_are_others_of_two_and_three_are_not() -> None:
    """In rows of one memcg."""
    one, two = fault("one", A | B, memcgs=(1,)), fault("two", C | D, memcgs=(1,))
    pair = fault("pair 1", A | C), fault("pair 2", B | D)
    three = fault("three 1", A), fault("three 2", B | C), fault("three 3", D)
    explanations = found(A | B | C | D, one, two, *pair, *three)
    assert names(explanations) == ["one", "two"]
    for explained in explanations:
        others = {tuple(sorted(h.cause for h in some)) for some in explained.others}
        assert others == {("pair 1", "pair 2")}


#: Rows that tell less than those before them: other rows tell least.
TELLING = (
    *("objcg_lists", "task_objcg", "id_refs", "slab", "percpu", "zswap", "sock", "kernel_stack"),
    *("pagetable", "vmalloc", "lru", "kmem", "swap", "levels", "page_levels", "usage", "local"),
    *("node_levels", "references"),
)


@pytest.mark.parametrize(("first", "second"), list(pairwise(TELLING)))
def test_the_cause_is_looked_for_in_the_row_that_tells_most(first: str, second: str) -> None:
    """A cause of a charge starts from the row of its kind, and not from that of its references."""
    rows: dict[Short, int] = {(second, "x", 0x9000): 100, (first, "x", 0x9000): 100}
    asked: list[str] = []

    def options(_rows: View, row: RowKey, _amount: int) -> Iterator[Hypothesis]:
        asked.append(row.identity)
        yield fault("all", rows)

    made = view(snapshot(), {}, rows).differences
    goal = {key(*row): amount for row, amount in rows.items()}
    each_alone(made, [Cause("all", TELLING, options, str, (), "")], goal)
    assert asked == [first]


def test_of_rows_that_tell_as_much_those_of_bytes_are_the_first() -> None:
    asked: list[str] = []

    def options(_rows: View, row: RowKey, _amount: int) -> Iterator[Hypothesis]:
        asked.append(row.item)
        return iter(())

    rows: list[Short] = [("zswap", "MEMCG_A", 1), ("zswap", "Z_B", 1), ("zswap", "X_B", 1)]
    made = view(snapshot(), {}, rows).differences
    cause = Cause("all", ("zswap",), options, str, (), "")
    each_alone(made, [cause], {key(*row): 100 for row in rows})
    assert asked == ["X_B"]


class Looked(dict[RowKey, int]):
    """Counts how often all amounts are looked up."""

    looks = 0

    def items(self) -> ItemsView[RowKey, int]:
        self.looks += 1
        return super().items()


def looks_at(suggested_by: int) -> int:
    """Return how often a cause of three rows is looked at that so many of them suggest."""
    rows = Looked({key(*row): amount for row, amount in (A | B | C).items()})
    one = fault("one", A)._replace(signature=Signature(rows))

    def options(_rows: View, row: RowKey, _amount: int) -> Iterator[Hypothesis]:
        if row in list(rows)[:suggested_by]:
            yield one

    cause = Cause("one", ("css_refs",), options, str, (), "")
    [explained] = explain(view(snapshot(), A | B | C).differences, [cause])
    assert explained.cause == one
    return rows.looks


def test_a_cause_that_several_rows_suggest_is_tried_once() -> None:
    assert looks_at(suggested_by=3) == looks_at(suggested_by=1) > 0
