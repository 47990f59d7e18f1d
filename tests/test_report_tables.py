# SPDX-License-Identifier: LGPL-2.1-or-later
"""The tables of a report, and the repr() of reports and answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.printed import answer_text
from support.reports import WEB, clean, more, report, row

from memcg_inspect.report import Identity, Reads, Report
from memcg_inspect.report_tables import TABLES, report_answer
from memcg_inspect.tables import Answer, Choice, NotRead, Table, Value, choose, columns_of

#: The length that no repr() reaches.
MOST = 2000


def values(made: Report, name: str, choice: Choice, show_all: bool = False) -> list[list[Value]]:
    (table,) = choose(report_answer(made, name, show_all), choice).tables
    return [list(table.values(row).values()) for row in table.rows]


def test_rows_are_chosen_and_sorted() -> None:
    fields = ["identity", "node", "difference", "status"]
    assert values(more(), "rows", Choice(["/web"], [0], None, fields)) == [
        ["slab", 0, 1064, "differs"]
    ]
    assert values(more(), "rows", Choice(sort="difference", fields=["difference"])) == [
        [1064], [-1], [1], [0], [NotRead("the counter could not be read")],
    ]  # fmt: skip


def test_rows_that_are_all_zero_are_shown_if_wanted() -> None:
    wanted = Choice(fields=["memcg"])
    assert len(values(report(), "rows", wanted)) == 2
    assert len(values(report(), "rows", wanted, show_all=True)) == 4
    assert "rows of all identities: all are zero" in answer_text(report_answer(clean(), "rows"))


def test_parts_of_a_row_are_told() -> None:
    wanted = Choice(memcgs=["/web"], nodes=[0], fields=["found_in", "claimed_in"])
    parts = [["slab:4000", "folded:5064,pending_cpu:0,stock:0"]]
    assert values(report(), "rows", wanted) == parts


def test_identities() -> None:
    assert values(more(), "identities", Choice(sort="name", fields=["name", "reason"])) == [
        ["kmem", None], ["slab", None], ["zswap", "this kernel has no zswap"],
    ]  # fmt: skip


def test_timings_have_what_each_step_read() -> None:
    made = replace(
        report(), timings={"pages": 0.0306, "judge": 0.5}, reads={"pages": Reads(40, 4096)}
    )
    assert values(made, "timings", Choice()) == [["pages", 31, 40, 4096], ["judge", 500, 0, 0]]
    (table,) = choose(report_answer(made, "timings"), Choice()).tables
    assert table.totals == {"milliseconds": 531, "reads": 40, "read": 4096}


def test_skew_is_by_both_nodes() -> None:
    fields = ["kind", "charged_node", "node", "bytes"]
    found = values(more(), "skew", Choice(fields=fields))
    assert found[:2] == [["slab", 0, 0, 4000], ["slab", 0, 1, 700]]
    assert found[2][:2] == ["sock", None]
    assert isinstance(found[2][2], NotRead)
    assert values(more(), "skew", Choice(nodes=[1], fields=["count"])) == [[3]]
    (table,) = choose(report_answer(more(), "skew"), Choice()).tables
    assert table.totals == {"bytes": 8796, "count": 24}


@pytest.mark.parametrize("name", TABLES)
def test_what_is_read_and_interrupted_is_of_the_report(name: str) -> None:
    made = report_answer(replace(more(), interrupted=True, notes=("a note",)), name)
    assert (made.command, made.interrupted, made.notes) == ("audit", True, ("a note",))
    assert made.coverage == more().coverage


def test_reports_are_short_in_a_session() -> None:
    rows = tuple(row(WEB, number, number) for number in range(10_000))
    many = replace(
        report(path="/" + "x" * 9000),
        rows=rows,
        image=replace(report().image, release="r" * 9000),
        identities=tuple(Identity("n" * 99, "exact", 1, 0) for _ in range(1000)),
        notes=("note" * 9999,),
    )
    for made in (report(), more(), clean(), many):
        assert len(repr(made)) < MOST
    assert repr(report()) == (
        "<Report FINDINGS of Linux 7.3.0 (vmcore): 3 memcgs, 1 identities, 4 rows, 1 findings>"
    )


def test_answers_are_short_in_a_session() -> None:
    record, _ = TABLES["identities"]
    table = Table("t" * 5000, "", columns_of(record), [None] * 10_000)
    made = Answer("c" * 5000, report().image, (table,) * 1000, notes=("note" * 9999,))
    assert len(repr(made)) < MOST
    short = replace(made, command="stock", tables=(replace(table, name="stock"),))
    assert repr(short) == "<Answer of stock: stock: 10000 rows; whole>"
