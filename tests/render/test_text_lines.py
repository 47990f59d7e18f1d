# SPDX-License-Identifier: LGPL-2.1-or-later
"""Where lines of text end on a terminal, and what has a style there."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from support.printed import answer_text, output
from support.reports import report

from memcg_inspect.model import Coverage
from memcg_inspect.render.text import answer_lines, as_csv, exact_cell, scripted
from memcg_inspect.tables import Answer, Column, NotRead, Rest, Table, Value

BOLD, ITALIC, RED, YELLOW, END = "\x1b[1m", "\x1b[3m", "\x1b[1;31m", "\x1b[33m", "\x1b[0m"


def test_a_line_is_as_long_as_the_terminal_is_wide() -> None:
    made = output(20)
    assert made.wrapped("aaaa bbbb cccc ddddd eeee") == ["aaaa bbbb cccc ddddd", "eeee"]
    assert made.wrapped("aaaa bbbb cccc dddddd eeee") == ["aaaa bbbb cccc", "dddddd eeee"]
    # The space before the first word is kept, and the other lines are indented.
    assert made.wrapped("  aaaa bbbb cccc ddd eeeee", "    ") == [
        "  aaaa bbbb cccc ddd",
        "    eeeee",
    ]


def test_a_line_has_at_least_twelve_columns_beside_its_indent() -> None:
    for indent in ("", "   "):
        said = output(1).wrapped("aaa bbb cccc ddd eee ffff ggg hhh iiiii", indent)
        rest = [line.removeprefix(indent) for line in said[1:]]
        assert rest == ["ddd eee ffff", "ggg hhh", "iiiii"]


def test_a_word_that_is_too_wide_fits_beside_the_indent() -> None:
    made = output(20)
    assert [len(line) for line in made.wrapped(f"aaa {'x' * 40} bbb", "  ")] == [3, 20, 5]
    # The word ends after the heading, which has lost its end with it.
    made.paragraph("abcdefgh", "bold", rest="x" * 40)
    assert made.text == f"abcdef…{'x' * 13}\n"


def test_an_ellipsis_is_in_place_of_the_lines_that_are_left_out() -> None:
    """It is within the width, too, and after as many words as there is room for."""
    made = output(20)
    whole = "aaaa bbbb cccc dddd eeee ffff"
    assert made.wrapped(whole, most=2) == ["aaaa bbbb cccc dddd", "eeee ffff"]
    assert made.wrapped(whole, most=1) == ["aaaa bbbb cccc …"]
    assert made.wrapped("aaaa bbbb cccc ddd eeee", most=1) == ["aaaa bbbb cccc ddd …"]
    long = made.wrapped(f"aaa {'x' * 40} bbb", "  ", most=2)
    assert (long[0], len(long[1])) == ("aaa", 20)
    assert long[1].endswith("x …")


def test_lines_that_a_terminal_makes_of_a_line() -> None:
    made = output(10)
    heights = [made.height("x" * size) for size in (0, 1, 10, 11, 20, 21)]
    assert heights == [1, 1, 1, 2, 2, 3]
    assert made.height("\x1b" * 3) == 2  # as \x1b each
    assert output(None).height("x" * 1000) == 1


def test_a_text_loses_its_middle_only_where_it_must() -> None:
    made = output(80)
    assert made.elided("x" * 20, 20) == "x" * 20
    assert made.elided("abcdefghijklmnopqrstu", 20) == "abcdef…ijklmnopqrstu"
    assert output(None).elided("x" * 200, 20) == "x" * 200


def test_what_follows_a_heading_has_no_style_on_any_line() -> None:
    made = output(20, colour=True)
    made.paragraph("FINDINGS", "bold red", rest=": many words that are wrapped")
    assert made.text.splitlines() == [
        f"{RED}FINDINGS{END}: many words",
        "that are wrapped",
    ]
    made = output(20, colour=True)
    made.paragraph("each line of it is yellow", "yellow", "  ")
    assert made.text.splitlines() == [
        f"{YELLOW}  each line of it is{END}",
        f"{YELLOW}  yellow{END}",
    ]


def test_a_heading_that_is_wrapped_fits_as_well() -> None:
    made = output(20)
    made.paragraph("a heading of more words than fit", "bold red", rest=": 3")
    assert made.text.splitlines() == ["a heading of more", "words than fit: 3"]


def test_a_line_with_a_style_is_one_line() -> None:
    """As one without: who writes it has wrapped it."""
    made = output(20, colour=True)
    made.line("word " * 100, "bold red")
    assert len(made.text.splitlines()) == 1


SIZES = (
    Column("memcg", "memcg", ""),
    Column("bytes", "bytes", "", total=True, priority=9, shares=True),
    Column("count", "count", "", priority=9),
)


def sizes(*values: Value, total: Value, rest: Rest | None = None) -> Table:
    rows = [SimpleNamespace(memcg=f"/{n}", bytes=value, count=7) for n, value in enumerate(values)]
    return Table("t", "sizes", SIZES, rows, totals={"bytes": total}, rest=rest)


def shown(table: Table, width: int | None = 80, colour: bool = False) -> list[str]:
    made = output(width, colour)
    made.table(table)
    return made.text.splitlines()


def test_the_rule_is_as_long_as_the_lines() -> None:
    for width in (None, 80):
        lines = shown(sizes(50, 50, total=100), width)[2:6]
        assert {len(line) for line in lines} == {len(lines[0])}
        assert lines[1].strip(" ─") == ""
        assert lines[1].startswith(" ─")


def test_titles_headings_and_sums_stand_out() -> None:
    title, _, head, rule, row, _, total, _ = shown(sizes(50, total=50), colour=True)
    assert title == f"{ITALIC}sizes{END}"
    assert head.startswith(f"{BOLD} memcg")
    assert total.startswith(f"{BOLD} total")
    assert "\x1b" not in rule + row


def test_an_empty_line_is_below_each_part_of_a_table() -> None:
    """That is below the rows, the sum, what is summed up, and why values could not be read."""
    values = sizes(50, NotRead("gone"), total=60, rest=Rest(2, {"bytes": 10}))
    said = [line.split()[0] if line else "" for line in shown(values)[4:]]
    assert said == ["/0", "/1", "(2", "", "total", "", "2", "", "?", ""]


def test_shares_of_the_total() -> None:
    """What is not known, or does not apply, has no share; 0 and 100 percent are exact."""
    values = (1, 0, None, NotRead("gone"), 100)
    cells = [re.split(" {2,}", line.strip()) for line in shown(sizes(*values, total=101))[4:9]]
    assert [row[1:3] for row in cells] == [
        ["1 B", "<1 %"],
        ["0", "0 %"],
        ["-", "-"],
        ["?", "?"],
        ["100 B", "99 %"],
    ]
    assert " 1 % " in shown(sizes(1, 99, total=100))[4]


@pytest.mark.parametrize(("total", "has"), [(0, False), (1, True), (NotRead("gone"), False)])
def test_only_of_some_total_there_are_shares(total: Value, has: bool) -> None:
    lines = shown(sizes(1 if total == 1 else 0, total=total))
    assert ("share" in lines[2].split()) is has


def test_what_is_left_out_is_counted_at_any_width() -> None:
    """The column that says so stays, wherever it is."""
    columns = (
        Column("bytes", "bytes", "", total=True, priority=9, shares=True),
        Column("name", "text", "", priority=0),
        Column("count", "count", "", priority=5),
    )
    row = SimpleNamespace(bytes=5 << 20, name="a name", count=123_456_789)
    table = Table("t", "sizes", columns, [row], totals={"bytes": 9 << 20},
                  rest=Rest(2, {"bytes": 4 << 20}))  # fmt: skip
    for width in range(30, 70):
        assert "(2 other" in "\n".join(shown(table, width)), width


def test_a_column_without_a_label_is_left_out_as_others_are() -> None:
    columns = [Column(f"c{n}", "bytes", "", total=True) for n in range(3)]
    row = SimpleNamespace(c0=1 << 30, c1=1 << 30, c2=1 << 30)
    totals = dict.fromkeys(("c0", "c1", "c2"), 1 << 30)
    table = Table("t", "sizes", tuple(columns), [row], totals=totals, rest=Rest(1, totals))
    assert shown(table, 12)[2].split() == ["c0"]


def test_differences_have_a_sign_unless_they_are_0() -> None:
    column = Column("change", "difference", "", in_bytes=True)
    for width in (None, 80):
        cells = [output(width).cell(column, value) for value in (-1, 0, 1)]
        assert [cell.removesuffix(" B") for cell in cells] == ["-1", "0", "+1"]
    assert exact_cell(column, 1 << 20) == "+1,048,576"


def test_minus_one_is_a_number_unless_it_is_a_node() -> None:
    columns = (Column("node", "node", ""), Column("count", "count", ""))
    table = Table("t", "sizes", columns, [SimpleNamespace(node=-1, count=-1)])
    answer = Answer("test", report().image, (table,))
    assert scripted(answer) == "-\t-1\n"
    assert as_csv(answer) == "node,count\n-,-1\n"


def test_an_answer_that_is_not_whole_says_so_in_yellow() -> None:
    missed = Coverage()
    for address in range(4):
        missed.miss("page", address, "gone")
    made = Answer("test", report().image, (), interrupted=True, coverage={"pages": missed})
    out = output(80, colour=True)
    answer_lines(made, out)
    assert out.text.splitlines() == [
        f"\x1b[1;33mInterrupted: the results are incomplete.{END}",
        f"{YELLOW}Not read: 4 of pages, for example{END}",
        *(f"  page at {n:#x}: gone" for n in range(3)),
    ]
    assert "\x1b" not in answer_text(made)
