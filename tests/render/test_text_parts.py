# SPDX-License-Identifier: LGPL-2.1-or-later
"""Numbers, lines and tables as text, to the character."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated

import pytest
from support.printed import findings_text, output, text
from support.reports import clean, report, row

from memcg_inspect.render.text import (
    amount,
    make_output,
    plain_output,
    rounded,
    signed,
    size,
)
from memcg_inspect.report import Report
from memcg_inspect.tables import Column, Field, NotRead, Table, Value, columns_of


def test_amounts() -> None:
    assert [amount(n) for n in (None, 0, 1234567, -1000)] == ["-", "0", "1,234,567", "-1,000"]
    assert [signed(n) for n in (None, 0, 1234, -1000)] == ["-", "0", "+1,234", "-1,000"]
    assert [rounded(n) for n in (999_999, 1_000_000, 12_340_000)] == [
        *("999,999", "1.0 million"),
        "12.3 million",
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [(1, "1 byte"), (10239, "10,239 bytes"), (10240, "10.0 KiB"), (1048524, "1,023.9 KiB"),
     (1048525, "1.0 MiB"), (-20480, "-20.0 KiB"), (5 << 40, "5.0 TiB"), (9 << 50, "9,216.0 TiB")],
)  # fmt: skip
def test_sizes(value: int, said: str) -> None:
    assert size(value) == said
    assert size(value, exact=True).replace(",", "") == (
        f"{value} byte" if value == 1 else f"{value} bytes"
    )


def test_an_output_without_colours() -> None:
    made = plain_output(30)
    made.paragraph("red", "bold red", rest=" and more words, so many that they are wrapped")
    assert made.text.splitlines() == ["red and more words, so many", "that they are wrapped"]


def test_only_the_first_words_have_the_style() -> None:
    made = output(100, colour=True)
    made.paragraph("FINDINGS", "bold red", rest=": 3")
    made.paragraph("all of it", "yellow")
    assert made.text == "\x1b[1;31mFINDINGS\x1b[0m: 3\n\x1b[33mall of it\x1b[0m\n"


def test_why_values_were_not_read_is_yellow() -> None:
    made = output(100, colour=True)
    made.reasons(Table("t", "t", (Column("bytes", "bytes", ""),), [Part("a", 0, NotRead("gone"))]))
    assert "\x1b[33m" in made.text
    assert "gone" in made.text


@dataclass(frozen=True)
class Part:
    """A row of a table with a sum."""

    name: Annotated[str, Field("text", "name")]
    node: Annotated[int, Field("node", "node")]
    bytes: Annotated[Value, Field("bytes", "size", total=True, shares=True)]
    after: Annotated[str, Field("text", "what comes after", priority=1)] = "x"


def table(*sizes: int, total: int | None = None) -> list[str]:
    rows = [Part(f"part {n}", n, one) for n, one in enumerate(sizes)]
    totals = None if total is None else {"bytes": total}
    made = output(80)
    made.table(Table("parts", "Parts", columns_of(Part), rows, totals=totals))
    return made.text.splitlines()


def test_a_table_with_its_sum_and_shares() -> None:
    lines = table(50, 949, 1, total=1000)
    assert lines[0] == "Parts"
    assert [" ".join(line.split()) for line in lines[2:3] + lines[4:]] == [
        "name node bytes share after",
        "part 0 0 50 B 5 % x",
        "part 1 1 949 B 95 % x",
        "part 2 2 1 B <1 % x",
        "",
        "total 1,000 B 100 %",
        "",
    ]
    almost = "\n".join(table(9_999, 1, total=10_000))
    assert "99 %" in almost
    assert almost.count("100 %") == 1


def test_a_cell_that_fits_is_not_folded() -> None:
    made = output(40)
    rows = [Part("a name of many words that needs two lines", 0, 1), Part("short", 1, 2)]
    made.table(Table("parts", "Parts", columns_of(Part), rows))
    assert max(map(len, made.text.splitlines())) <= 40
    assert "short" in made.text


def test_columns_without_room_are_named() -> None:
    for choosable, how in ((True, "--fields chooses columns, and a pipe"), (False, "A pipe")):
        made = output(24)
        rows = [Part("a long name", 0, 1 << 30, "words that are long")]
        made.table(Table("parts", "Parts", columns_of(Part), rows), choosable)
        said = " ".join(made.text.split())
        assert f". {how} (| less -S) has room for all." in said


# The whole report


def moved(*rows: object) -> Report:
    return replace(clean(), verdict="moving", rows=tuple(rows))  # type: ignore[arg-type]


def test_nodes_that_were_changing_are_named() -> None:
    rows = [replace(row(0, 3, 4, "moving", nid=nid), memcg=None) for nid in (1, 0, -1)]
    assert text(moved(*rows)).splitlines()[0].endswith(" were changing: node 0, node 1")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("physical", "by the physical rule"),
        ("posted", "by the posted rule"),
        ("both", "by either rule"),
        ("neither", "by no known rule"),
    ],
)
def test_rules_that_counters_follow(rule: str, said: str) -> None:
    made = replace(clean(), follows={"percpu": rule})  # type: ignore[dict-item]
    assert f"per memcg and node, percpu {said}" in text(made).splitlines()[1]


def test_reasons_are_indented_below_their_rows() -> None:
    moving = replace(row(4096, 3, 4, "moving"), reason="it changed in each sample")
    shown = findings_text(moved(moving))
    assert "\n  it changed in each sample\n\n" in shown


def test_the_tables_of_a_report_have_no_fields_to_choose() -> None:
    narrow = text(report(), 40)
    assert "A pipe" in narrow
    assert "--fields" not in narrow


def test_states_of_rows_have_their_colours() -> None:
    made = output(100, colour=True)
    rows = [
        SimpleNamespace(status=status)
        for status in ("exact", "differs", "WRONG", "in-flight", "moving", "unverifiable")
    ]
    made.table(Table("t", "t", (Column("status", "text", ""),), rows))
    red, yellow = ("\x1b[1;31m", "\x1b[33m")
    lines = [line for line in made.text.splitlines() if "status" not in line][3:]
    assert [line.rstrip() for line in lines if line] == [
        " exact",
        f"{red} differs\x1b[0m",
        f"{red} WRONG\x1b[0m",
        *(f"{yellow} {status}\x1b[0m" for status in ("in-flight", "moving", "unverifiable")),
    ]


def test_words_that_are_too_wide() -> None:
    """They lose their middle, unless they are to be shown as a whole."""
    made = output(20)
    word = "/abcdefghijklmnopqrstuvwxyz"
    assert made.wrapped(f"of {word} all") == ["of", "/abcde…nopqrstuvwxyz", "all"]
    assert made.wrapped(f"of {word} all", whole=True) == ["of", word[:20], f"{word[20:]} all"]


def test_fields_can_be_chosen_where_nothing_else_is_said() -> None:
    made = output(24)
    rows = [Part("a long name", 0, 1 << 30, "words that are long")]
    made.table(Table("parts", "Parts", columns_of(Part), rows))
    assert "--fields chooses columns" in " ".join(made.text.split())


def test_the_end_of_a_report() -> None:
    """Notes are below what was read, after an empty line each."""
    made = replace(clean(), notes=("one", "two"), timings={"pages": 1.0, "slab": 0.25})
    assert text(made).splitlines()[-5:] == ["Read 1,024 pages in 1.25 s.", "", "one", "", "two"]


def test_not_everything_could_be_read() -> None:
    """Although every row could be verified."""
    made = replace(clean(), verdict="incomplete")
    assert text(made).splitlines()[0] == (
        "INCOMPLETE: nothing wrong was found; not everything could be read"
    )


def test_lines_are_wrapped_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes in tables are rounded there, too, unless they are to be exact."""
    words, column = "many words " * 9, Column("bytes", "bytes", "")
    monkeypatch.setenv("COLUMNS", "40")
    made = make_output()
    assert made.wrapped(words) == [words]
    assert made.cell(column, 5 << 20) == "5,242,880"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert max(map(len, make_output().wrapped(words))) <= 40
    assert make_output().cell(column, 5 << 20) == "5.0 MiB"
    assert make_output(exact=True).cell(column, 5 << 20) == "5,242,880"
    assert plain_output(40).cell(column, 5 << 20) == "5.0 MiB"
