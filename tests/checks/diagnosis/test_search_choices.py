# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which sets of causes the search prefers, what it names beside them, and where it stops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from support.made import snapshot
from support.made_rows import Short, key, view
from support.made_search import ROWS, causes, fault, found, names

from memcg_inspect.checks.diagnosis import search
from memcg_inspect.checks.diagnosis.cause import Cause, Hypothesis
from memcg_inspect.checks.diagnosis.differences import Differences, View
from memcg_inspect.checks.diagnosis.effects import Charge
from memcg_inspect.checks.diagnosis.search import Explanation, each_alone, explain
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.model import Held, Running

A, B, C, D, E = ({row: 100 + 7 * n} for n, row in enumerate(ROWS[:5]))


def others(explained: Explanation) -> set[tuple[str, ...]]:
    """Return the names of the causes of each set that explains the same."""
    return {tuple(sorted(h.cause for h in some)) for some in explained.others}


def part_of(row: dict[Short, int]) -> dict[Short, int]:
    """Return less than the difference of a row."""
    return dict.fromkeys(row, 30)


# Scores


def test_a_row_that_is_changed_and_not_explained_is_half_a_row() -> None:
    one, two = fault("one", A | part_of(B)), fault("two", A | part_of(B) | part_of(C))
    assert names(found(A | B, one)) == ["one"]
    assert found(A | B | C, two) == []
    assert names(found(A | B, one, fault("a", A))) == ["a"]


def test_of_causes_of_as_many_rows_the_one_that_changes_no_others_is_taken() -> None:
    changes = fault("changes", A | B | part_of(C) | part_of(D))
    assert names(found(A | B | C | D, changes)) == ["changes"]
    assert names(found(A | B | C | D, changes, fault("a", A))) == ["a"]


IN_FLIGHT: Short = ("slab", "NR_SLAB_RECLAIMABLE_B", 0x8000, 0)


def beside_half_done(off: Mapping[Short, int]) -> Differences:
    """Return rows that differ, and one that is in flight and 500 bytes off."""
    held = Held("object", 0x9000, 0, 0, 208, "reclaimable")
    running = (Running(0, 1, "sh", ("kmalloc",), True, (held,)),)
    amounts = {key(*short): amount for short, amount in off.items()}
    rows = [make_row(k, {"found": 1000}, {"folded": 1000 + n}) for k, n in amounts.items()]
    doubtful = make_row(key(*IN_FLIGHT), {"found": 1000}, {"folded": 1500})
    rows.append(replace(doubtful, status="in-flight", reason="made"))
    return Differences(snapshot(running=running), rows, set(amounts))


def test_a_cause_that_a_row_in_flight_speaks_for_is_taken() -> None:
    silent, spoken_for = fault("silent", A), fault("spoken for", A | {IN_FLIGHT: 500})
    some = causes(silent, spoken_for)
    assert names(explain(beside_half_done(A), some)) == ["spoken for"]
    assert names(explain(view(snapshot(), A).differences, some)) == ["silent"]


def test_a_cause_may_change_rows_alone_that_are_in_flight() -> None:
    """It explains no row that differs, so none can have another cause."""
    quiet = fault("quiet", {IN_FLIGHT: 500})

    def options(_rows: View, _row: RowKey, _amount: int) -> Iterator[Hypothesis]:
        yield quiet

    some = [*causes(fault("a", A)), Cause("quiet", ("css_refs",), options, str, (), "")]
    assert names(explain(beside_half_done(A), some)) == ["a", "quiet"]


# In place of those that were taken first


def test_rows_that_differ_for_a_reason_of_their_own_replace_no_causes() -> None:
    memcgs, rest = (0x9002,), {ROWS[4]: 500}
    large, other = fault("large", A | B, memcgs=memcgs), fault("other", rest, memcgs=memcgs)
    some = large, other, fault("first", A | C), fault("second", B | D)
    replaced = found(A | B | C | D | rest, *some)
    # Nothing is left over then.
    assert {e.cause.cause: e.sure for e in replaced} == {
        "first": True,
        "other": True,
        "second": True,
    }
    ignored = frozenset(key(*row) for row in C | D)
    assert names(found(A | B | C | D | rest, *some, ignored=ignored)) == ["large", "other"]


def test_a_single_cause_stays_though_another_one_is_less() -> None:
    """Rows do not tell which one it is."""
    more, less = (fault("one", A, item=str(n), amount=n) for n in (500, 100))
    [explained] = found(A, more, less)
    assert explained.cause.amount == 500


def test_charges_together_replace_the_causes_of_their_rows() -> None:
    charge = Charge("slab", "", 0, 700, references=3, together=True)
    some = [fault(name, row, memcgs=(1,)) for name, row in (("a", A), ("b", B))]
    assert names(found(A | B, *some, fault("both", A | B, charge=charge))) == ["both"]


def test_as_many_causes_of_other_kinds_replace_none() -> None:
    """Though they are likelier. Those of the same kinds do, if their amounts are smaller."""
    likelier = fault("likelier 1", A | B), fault("likelier 2", C | D)
    some = fault("three", A | B | C, memcgs=(1,)), fault("d", D, memcgs=(1,))
    assert names(found(A | B | C | D, *likelier, *some)) == ["d", "three"]
    smaller = fault("three", A | B, amount=10, item="s"), fault("d", C | D, amount=10, item="s")
    made = found(A | B | C | D, *some, *smaller)
    assert {(e.cause.cause, e.cause.item) for e in made} == {("three", "s"), ("d", "s")}


def spread(size: int, parts: int) -> tuple[dict[Short, int], list[Hypothesis], list[Short]]:
    """
    Return rows that differ, causes of them, and rows that are exact.

    Each of *size* causes explains one row, and is near another one. The *parts* explain all rows
    together. Each two of them change exact rows, and cancel that for each other.
    """
    own = [("css_refs", "css.refcnt", 0xA000 + n) for n in range(size)]
    near = [("css_refs", "css.refcnt", 0xB000 + n) for n in range(size)]
    off: dict[Short, int] = {row: 100 + 7 * n for n, row in enumerate([*own, *near])}
    singles = [
        fault(f"single {n}", {row: off[row]}, memcgs=(0xB000 + n,)) for n, row in enumerate(own)
    ]
    shares = [
        {row: off[row] for some in (own, near) for row in some[n::parts]} for n in range(parts)
    ]
    exact: list[Short] = []
    for one, other in combinations(shares, 2):
        for _ in range(size // 2 + 1):
            exact.append(("id_refs", "id.ref", 0xC000 + len(exact)))
            one[exact[-1]], other[exact[-1]] = 500, -500
    return off, [*singles, *(fault(f"part {n}", rows) for n, rows in enumerate(shares))], exact


@pytest.mark.parametrize(
    ("size", "parts", "taken"),
    [
        (3, 3, "part"),
        (4, 3, "single"),  # three of them are too many to try with four near
        (4, 2, "part"),
        (12, 2, "part"),
        (13, 2, "single"),
    ],
)
def test_larger_sets_are_looked_for_near_fewer_causes(size: int, parts: int, taken: str) -> None:
    off, some, exact = spread(size, parts)
    assert {name.split()[0] for name in names(found(off, *some, exact=exact))} == {taken}


@pytest.mark.parametrize(("hidden", "taken"), [(5, True), (6, False)])
def test_a_cause_of_three_may_leave_two_more_rows(hidden: int, taken: bool) -> None:
    """Of three rows, it explains one and changes three others, not four."""
    between = [("id_refs", "id.ref", 0xC000 + n) for n in range(hidden)]
    shares = [A | {}, B | {}, C | {}]
    for number, (one, other) in enumerate(combinations(shares, 2)):
        for row in between[number::3]:
            one[row], other[row] = 500, -500
    some = [fault(f"part {n}", rows) for n, rows in enumerate(shares)]
    made = names(found(A | B | C, *some, exact=between))
    assert made == (["part 0", "part 1", "part 2"] if taken else [])


# What is named beside them


def test_what_explains_a_part_of_two_causes_is_another_one_of_the_first() -> None:
    """What it leaves of the row of the second one can have another cause."""
    one, two = fault("one", A), fault("two", B)
    made = found(A | B, one, two, fault("it", A | part_of(B)))
    explained = {e.cause.cause: others(e) for e in made}
    assert explained == {"one": {("it",)}, "two": set()}


@pytest.mark.parametrize(("most", "named"), [(2, {("it",)}), (1, set())])
def test_parts_of_causes_are_looked_for_in_few_rows(
    monkeypatch: pytest.MonkeyPatch, most: int, named: set[tuple[str, ...]]
) -> None:
    monkeypatch.setattr(search, "_MOST_ENTANGLED", most)
    one, two = fault("one", A), fault("two", B)
    made = found(A | B, one, two, fault("it", A | part_of(B)))
    assert {e.cause.cause: others(e) for e in made} == {"one": named, "two": set()}


def test_rows_that_nothing_explains_name_no_causes() -> None:
    [explained] = found(A | B, fault("one", A), fault("it", A | part_of(B)))
    assert others(explained) == set()


@pytest.mark.parametrize(("amount", "named"), [(16, {("p1", "p2")}), (17, set())])
def test_two_causes_are_others_of_a_small_one_and_three_are_not(
    amount: int, named: set[tuple[str, ...]]
) -> None:
    both = fault("both", A | B | C, amount=amount)
    some = fault("p1", A), fault("p2", B | C), fault("p3", B), fault("p4", C)
    [explained] = found(A | B | C, both, *some)
    assert others(explained) == named


def test_two_causes_can_share_the_row_that_tells_most() -> None:
    """Neither explains it by itself, so they are recognized from other rows."""
    shared: Short = ("slab", "NR_SLAB_RECLAIMABLE_B", 0x8000, 0)
    off = A | B | {shared: 100}
    shares = (("one", A, 40), ("two", B, 60), ("three", A, 60), ("four", B, 40))
    faults = [fault(name, row | {shared: part}, memcgs=(1,)) for name, row, part in shares]

    def options(_rows: View, row: RowKey, amount: int) -> Iterator[Hypothesis]:
        yield from (f for f in faults if f.signature.rows.get(row) == amount)

    some = [Cause(f.cause, ("css_refs", "slab"), options, str, (), "") for f in faults]
    made = explain(view(snapshot(), off).differences, some)
    assert names(made) == ["one", "two"]
    assert [others(e) for e in made] == [{("four", "three")}, {("four", "three")}]


def test_a_row_that_may_have_any_difference_makes_no_group() -> None:
    one, two = fault("one", A | D), fault("two", C | D)
    assert [e.sure for e in found(A | C, one, two)] == [True, True]
    assert [e.sure for e in found(A | C | D, fault("one", A), fault("two", C | D))] == [True, True]


@pytest.mark.parametrize("size", [700, 701])
def test_charges_of_one_size_may_be_the_other_way_round(size: int) -> None:
    def charge(name: str, rows: dict[Short, int], amount: int) -> Hypothesis:
        what = Charge("slab", "", 0, amount)
        known: dict[str, Any] = {"charge": what, "objcgs": (0xB0,), "item": "slab", "nid": 0}
        return fault(name, rows, amount=amount, unit="bytes", **known)

    one, two = charge("one", A | B, 700), charge("two", C | D, size)
    crossed = charge("crossed 1", A | D, 700), charge("crossed 2", B | C, size)
    made = found(A | B | C | D, one, two, *crossed)
    assert names(made) == ["one", "two"]
    expected = {("crossed 1", "crossed 2")} if size == 700 else set()
    assert [others(e) for e in made] == [expected, expected]


# Bounds


@pytest.mark.parametrize(("number", "every"), [(3, True), (4, False)])
def test_all_are_known_if_no_more_are_tried_than_the_bound(
    monkeypatch: pytest.MonkeyPatch, number: int, every: bool
) -> None:
    monkeypatch.setattr(search, "_MOST_TRIES", 3)
    made = view(snapshot(), {}, ROWS).differences
    some = [fault(f"f{n}", A) for n in range(number)]
    alone = each_alone(made, causes(*some), {key(*row): amount for row, amount in A.items()})
    assert len(alone) == (3 if every else 0)


def test_nothing_is_sure_if_not_all_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_MOST_TRIES", 5)
    some = [fault("one", A, place=str(n)) for n in range(9)]
    [explained] = found(A, *some)
    assert (explained.cause.place, explained.others, explained.sure) == ("0", (), False)


@pytest.mark.parametrize(("most", "taken"), [(2, ["one"]), (3, ["one", "two"])])
def test_no_more_causes_are_looked_for_after_so_many_tries(
    monkeypatch: pytest.MonkeyPatch, most: int, taken: list[str]
) -> None:
    """The first one changes a row that the second one explains."""
    monkeypatch.setattr(search, "_MOST_TRIES", most)
    shared: Short = ("slab", "NR_SLAB_RECLAIMABLE_B", 0x8000, 0)
    faults = fault("one", A | {shared: 40}), fault("two", B | {shared: 60})

    def options(_rows: View, row: RowKey, _amount: int) -> Iterator[Hypothesis]:
        yield from (f for f in faults if row in f.signature.rows)

    cause = Cause("one", ("css_refs",), options, str, (), "")
    some = [cause, replace(cause, name="two", rows=())]
    made = view(snapshot(), A | B | {shared: 100}).differences
    assert names(explain(made, some)) == taken
