# SPDX-License-Identifier: LGPL-2.1-or-later
"""The work for many rows that differ is bounded, and so is the number of causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn
from unittest import mock

from support.made_kernel import busy

from memcg_inspect.checks.diagnosis.cause import Cause, Hypothesis
from memcg_inspect.checks.diagnosis.differences import Differences, Signature, View
from memcg_inspect.checks.diagnosis.registry import CAUSES
from memcg_inspect.checks.diagnosis.search import explain
from memcg_inspect.checks.findings import row_findings
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.report import Row

SNAPSHOT = busy(1).snapshot()


def many(number: int) -> list[Row]:
    """Return rows of memcgs that differ by their number, every other one too low."""
    keys = (RowKey("css_refs", "css.refcnt", "references", 0x10000 + n) for n in range(number))
    return [
        make_row(key, {"holders": 10**6}, {"refs": 10**6 + n * (-1) ** n})
        for n, key in enumerate(keys, 1)
    ]


def differences(number: int) -> Differences:
    rows = many(number)
    return Differences(SNAPSHOT, rows, {RowKey(r.identity, r.item, r.unit, r.memcg) for r in rows})


def test_an_image_has_no_more_causes_than_a_reader_can_follow() -> None:
    assert len(explain(differences(50), CAUSES)) == 50
    assert len(explain(differences(3000), CAUSES)) == 64


def test_nothing_is_sure_beside_rows_without_an_explanation() -> None:
    def options(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
        yield Hypothesis(
            "made", (key.memcg or 0,), (), None, "", amount, "references", Signature({key: amount})
        )

    cause = Cause("made", ("css_refs",), options, str, (), "")
    known = many(80)[40:42]
    for other, sure in ((known[0].memcg, [False, True]), (0x99, [True, True])):
        key = RowKey("id_refs", "id.ref", "references", other)
        rows = [*known, make_row(key, {"holders": 1}, {"refs": 900})]
        keys = {RowKey(r.identity, r.item, r.unit, r.memcg) for r in rows}
        found = explain(Differences(SNAPSHOT, rows, keys), [cause])
        assert [e.sure for e in sorted(found, key=lambda e: e.cause.memcgs)] == sure


def test_no_more_options_are_tried_than_the_bound() -> None:
    tried = 0

    def options(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
        nonlocal tried
        for other in view.residuals:
            tried += 1
            yield Hypothesis("made", (), (), None, "", 1, "bytes", Signature({key: 1, other: 1}))

    cause = Cause("made", ("css_refs",), options, str, (), "")
    assert explain(differences(1000), [cause]) == []
    assert 30_000 <= tried < 31_000


class Counted(dict[RowKey, int]):
    """Counts how often an amount is looked up."""

    lookups = 0

    def __getitem__(self, key: RowKey) -> int:
        self.lookups += 1
        return super().__getitem__(key)


def test_the_other_side_of_a_charge_is_found_without_looking_at_all_rows() -> None:
    made = differences(2000)
    rows = Counted(made.differing())
    view = View(made, rows)
    keys = list(rows)
    same = RowKey("css_refs", "css.refcnt", "references", 0x99)
    rows[same] = -rows[keys[7]]
    view = View(made, rows)
    rows.lookups = 0
    assert view.opposite(keys[7], 8)[0] == same
    partners = {key: view.opposite(key, rows[key]) for key in keys}
    assert all(len(some) == 4 for some in partners.values())
    assert all(rows[k] * rows[o] < 0 for k, some in partners.items() for o in some)
    assert rows.lookups < 50 * len(keys)


class Unwalked(dict[RowKey, int]):
    """Rows to look up, and not to look at one by one."""

    def items(self) -> NoReturn:
        raise AssertionError("all rows were looked at")


def test_who_lost_a_cached_obj_cgroup_is_found_without_looking_at_all_rows() -> None:
    memcg = 0x10001
    had = RowKey("references", "refcnt", "references", memcg, 0, 0x99)
    key = RowKey("task_objcg", "task->objcg", "references", memcg)
    [cause] = [cause for cause in CAUSES if cause.rows == ("task_objcg",)]
    view = View(differences(3), {had: 1, key: 1})
    view.residuals = Unwalked(view.residuals)
    assert list(cause.options(view, key, 1)) == []


def test_of_many_rows_that_differ_alike_some_are_tried() -> None:
    made = differences(200)
    rows = {key: 8 if n % 2 else -8 for n, key in enumerate(made.differing())}
    view = View(made, rows)
    assert {len(view.opposite(key, amount)) for key, amount in rows.items()} == {64}


def test_a_finding_is_compared_with_rows_of_its_own_amount() -> None:
    class Told(Row):
        told = 0

        @property
        def difference(self) -> int | None:
            Told.told += 1
            return super().difference

    rows: list[Row] = [Told(**vars(r)) for r in many(400)]
    assert len(row_findings(SNAPSHOT, rows)) == 400
    assert Told.told < 20 * len(rows)


def test_causes_of_very_many_rows_take_no_look_at_all_rows_each() -> None:
    """Of 64 causes, each was looked at beside all 5,000 rows. Without that, none is sure."""
    looks, plain = 0, View.__init__

    def counted(view: View, made: Differences, residuals: Mapping[RowKey, int]) -> None:
        nonlocal looks
        looks += len(residuals) > 4096
        plain(view, made, residuals)

    with mock.patch.object(View, "__init__", counted):
        found = explain(differences(5000), CAUSES)
    assert len(found) == 64
    assert looks < 10
    assert not any(explanation.sure for explanation in found)
    assert any(explanation.sure for explanation in explain(differences(1), CAUSES))
