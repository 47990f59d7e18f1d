# SPDX-License-Identifier: LGPL-2.1-or-later
"""Select rows and columns of a table, and print it in three formats."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from support.printed import answer_text

from memcg_inspect.escape import printable
from memcg_inspect.model import NUMA_NO_NODE, Coverage, ImageInfo, Memcg
from memcg_inspect.render.documents import answer_document, to_json
from memcg_inspect.render.text import Output, answer_lines, as_csv, make_output, scripted
from memcg_inspect.tables import (
    Answer,
    Choice,
    Column,
    Field,
    MemcgAddress,
    NotRead,
    Table,
    UsageError,
    Value,
    as_path,
    check_fields,
    choose,
    columns_of,
    largest,
    matches,
    with_subtrees,
)


@dataclass(frozen=True)
class Charge:
    """A row of the test's table."""

    memcg: Annotated[Value, Field("memcg", "who pays")]
    memcg_address: MemcgAddress
    node: Annotated[Value, Field("node", "where")]
    bytes: Annotated[Value, Field("bytes", "how much", total=True)]
    part: Annotated[Value, Field("share", "of the whole")]
    stale: Annotated[Value, Field("flag", "whether it is")]


COLUMNS = columns_of(Charge)
ROWS = (
    Charge("/a", 0xFFFF888000001000, 0, 1000, 0.25, True),
    Charge("/b", 0xFFFF888000002000, 1, 3000, 0.75, False),
    Charge("/b/c", 0xFFFF888000003000, 1, NotRead("the page is gone"), None, False),
    Charge("/b", 0xFFFF888000004000, NUMA_NO_NODE, 0, 0.0, False),
    Charge(None, None, None, 5, None, None),
)


def answer(rows: Sequence[Charge] = ROWS, **more: object) -> Answer:
    table = Table("charges", "charges", COLUMNS, rows)
    image = ImageInfo("7.3.0", "vmcore", (0, 1), 2, 4096, "objcg-per-node")
    return Answer("test", image, (table,), **more)  # type: ignore[arg-type]


def table_of(name: str, title: str, columns: Sequence[Column], *rows: Sequence[Value]) -> Table:
    """Return a table of records with these values."""
    names = [column.name for column in columns]
    made = [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in rows]
    return Table(name, title, tuple(columns), made)


def values(table: Table) -> list[tuple[Value, ...]]:
    return [tuple(table.values(row).values()) for row in table.rows]


def rows(choice: Choice) -> list[tuple[Value, ...]]:
    return values(choose(answer(), choice).tables[0])


def shown(made: Answer) -> str:
    return answer_text(made)


def ranked(*choice: str, sizes: Sequence[Value] = (50, 40, 30, 7, 2)) -> Answer:
    made = [Charge(f"/{n}", None, 0, size, None, None) for n, size in enumerate(sizes)]
    whole = replace(answer(made), tables=(replace(answer(made).tables[0], is_ranked=True),))
    return choose(whole, Choice(fields=choice or None))


def words(text: str) -> list[list[str]]:
    """Return the words of each line below the headings."""
    return [line.split() for line in text.splitlines()[4:] if line.strip()]


def test_rows_that_are_left_out_are_summed_up() -> None:
    assert words(shown(largest(ranked("memcg", "bytes"), 3))) == [
        ["/0", "50"], ["/1", "40"], ["/2", "30"], ["(2", "other", "rows)", "9"], ["total", "129"],
        ["2", "rows", "summed", "up", "in", "one", "line:", "--top", "0", "lists", "all", "rows"],
    ]  # fmt: skip
    assert "(1 other row) " in shown(largest(ranked(), 4))


@pytest.mark.parametrize("most", [0, 5, 6])
def test_all_rows_are_listed_where_there_is_room_or_all_are_wanted(most: int) -> None:
    assert largest(ranked(), most) == ranked()
    assert "other row" not in shown(largest(ranked(), most))


def test_tables_that_are_not_ranked_are_left_whole() -> None:
    assert largest(answer(), 1) == answer()


def test_sum_of_what_is_left_out_is_not_known_if_a_part_is_not() -> None:
    text = shown(largest(ranked("memcg", "bytes", sizes=(5, 4, NotRead("the page is gone"))), 1))
    assert ["(2", "other", "rows)", "?"] in words(text)
    assert "? the page is gone" in text


def test_what_is_left_out_is_said_without_a_column_for_it() -> None:
    assert words(shown(largest(ranked("bytes"), 4))) == [
        ["50"], ["40"], ["30"], ["7"], ["2"], ["129"],
        ["1", "row", "summed", "up", "in", "one", "line:", "--top", "0", "lists", "all", "rows"],
    ]  # fmt: skip
    assert ["(4", "other", "rows)"] in words(shown(largest(ranked("memcg"), 1)))


def test_sums_count_what_rows_have_in_common_once() -> None:
    """/0 is above /1, on each node, and /1 above /2. Nothing is known of what is above /3."""
    sizes = (50, 40, 30, 7, 2)
    places = ((1, 0), (2, 0), (3, 0), (4, 0), (2, 1))
    made = [
        Charge(f"/{n}", memcg, nid, size, None, None)
        for n, (size, (memcg, nid)) in enumerate(zip(sizes, places, strict=True))
    ]
    parents = {1: None, 2: 1, 3: 2}
    nested = replace(answer(made).tables[0], is_ranked=True, parents=parents)
    chosen = choose(replace(answer(), tables=(nested,)), Choice(fields=["memcg", "bytes"]))
    assert chosen.tables[0].totals == {"bytes": 50 + 7 + 2}
    for most, rest in ((1, 40 + 7 + 2), (2, 30 + 7 + 2), (3, 7 + 2)):
        [table] = largest(chosen, most).tables
        assert table.rest is not None
        assert table.rest.totals == {"bytes": rest}
    below = choose(replace(answer(), tables=(nested,)), Choice(memcgs=["/[12]"]))
    assert below.tables[0].totals == {"bytes": 40}


def test_programs_get_all_rows() -> None:
    cut = largest(ranked(), 1)
    assert len(cut.tables[0].rows) == 1
    assert scripted(ranked()).count("\n") == 5
    assert len(answer_document(ranked())["tables"][0]["rows"]) == 5


@pytest.mark.parametrize("width", [None, 200, 80, 60, 20])
def test_nothing_is_cut_where_the_terminal_ends(width: int | None) -> None:
    columns = (
        Column("memcg", "memcg", ""),
        Column("memcg_address", "address", ""),
        *(Column(f"node_{nid}", "bytes", "", total=True) for nid in range(6)),
        Column("detail", "text", ""),
    )
    numbers = tuple(10**9 + nid for nid in range(6))
    row = ("/files/web", 0xFFFF888000001000, *numbers, "name-" * 9)
    made = replace(answer(), tables=(table_of("charges", "charges", columns, row),))
    text = answer_text(choose(made, ALL), width, exact=True)
    for cell in ("/files/web", "0xffff888000001000", *(f"{number:,}" for number in numbers)):
        assert cell in text
    assert text.count("1,000,000,005") == 2  # the total, too
    assert text.replace("\n", "").count("name-") == 9


def test_text_is_folded_where_that_makes_a_table_fit() -> None:
    columns = (Column("what", "text", ""), Column("bytes", "bytes", ""))
    table = table_of("charges", "charges", columns, ("name-" * 9, 1000), ("é" * 30, 2))
    made = replace(answer(), tables=(table,))
    lines = answer_text(made, 40).splitlines()
    assert max(map(cell_len, lines)) <= 40
    assert "".join(line.split()[0] for line in lines if "name-" in line) == "name-" * 9
    assert "name-" * 9 in answer_text(made, None)


def test_text_is_folded_between_words() -> None:
    columns = (Column("what", "text", ""), Column("bytes", "bytes", ""))
    words = "a kernel without this option"
    made = replace(answer(), tables=(table_of("charges", "charges", columns, (words, 1000)),))
    lines = answer_text(made, 27).splitlines()
    assert [line.split() for line in lines[4:6]] == [
        ["a", "kernel", "without", "1,000", "B"],
        ["this", "option"],
    ]


def document(made: Answer) -> str:
    return to_json(answer_document(made))


def scripted_rows(made: Answer) -> list[list[str]]:
    return [line.split("\t") for line in scripted(made).splitlines()]


ALL = Choice(fields=["all"])
#: Names that would break a table of text: none of them is in its way in CSV.
ODD = (
    "/a\nb",
    '/"',
    '/a","b',
    "/,",
    "/\x1b[2J",
    "/\r\n",
    "/'",
    "/a\tb",
    "/ ",
    "/\udc80",
    "/=1+1",
    r"/\x0a",
)


def named(*paths: str) -> Answer:
    return answer([replace(ROWS[0], memcg=path) for path in paths])


@given(st.lists(st.text().map("/{}".format)))
@example(list(ODD))
def test_csv_is_read_back(paths: list[str]) -> None:
    made = choose(named(*paths), ALL)
    text = as_csv(replace(made, tables=made.tables * 2))
    assert all(char == "\n" or char.isprintable() for char in text)
    blocks = text.split("\n\n")
    assert len(blocks) == 2
    for block in blocks:
        header, *lines = csv.reader(io.StringIO(block, newline=""))
        assert header == [column.name for column in made.tables[0].columns]
        found = [dict(zip(header, line, strict=True)) for line in lines]
        assert [row["memcg"] for row in found] == [printable(path) for path in paths]
        assert {row["bytes"] for row in found} <= {"1000"}
        assert {row["memcg_address"] for row in found} <= {"0xffff888000001000"}


def test_a_name_is_no_missing_value() -> None:
    """Also one that is what stands for a value that is missing, or was not read."""
    for name, shown in (("-", r"\x2d"), ("?", r"\x3f"), ("--", "--"), ("-x", "-x")):
        made = choose(named(name), Choice(fields=["memcg"]))
        assert scripted(made) == f"{shown}\n"
        assert as_csv(made) == f"memcg\n{shown}\n"


def test_a_header_for_scripts() -> None:
    made = choose(answer(), ALL)
    head, rest = scripted(made, header=True).split("\n", 1)
    assert head.split("\t") == [column.name for column in made.tables[0].columns]
    assert rest == scripted(made)
    two = scripted(replace(made, tables=made.tables * 2), header=True)
    assert two == f"{head}\n{rest}\n{head}\n{rest}"
    empty = choose(answer(()), ALL)
    assert scripted(empty, header=True) == as_csv(empty).replace(",", "\t") == f"{head}\n"
    assert scripted(empty) == ""


@pytest.mark.parametrize(
    ("choice", "left"),
    [
        (ALL, [0, 1, 2, 3, 4]),
        (ALL._replace(memcgs=["/b"]), [1, 3]),
        (ALL._replace(memcgs=["/b*"]), [1, 2, 3]),
        (ALL._replace(memcgs=["0xFFFF888000004000"]), [3]),
        (ALL._replace(memcgs=["/nowhere"]), []),
        (ALL._replace(nodes=[1]), [1, 2]),
        (ALL._replace(nodes=[1], memcgs=["/b"]), [1]),
        (ALL._replace(nodes=[1, 0]), [0, 1, 2]),
        (ALL._replace(memcgs=["/a", "/b"]), [0, 1, 3]),
        (ALL._replace(memcgs=["/a"], below=frozenset({0xFFFF888000004000})), [0, 3]),
        # amounts: largest first; what has none, last
        (ALL._replace(sort="bytes"), [1, 0, 4, 3, 2]),
        (ALL._replace(sort="bytes:asc"), [3, 4, 0, 1, 2]),
        (ALL._replace(sort="memcg:desc"), [2, 1, 3, 0, 4]),
    ],
)
def test_rows_are_chosen(choice: Choice, left: list[int]) -> None:
    assert choose(answer(), choice).tables[0].rows == [ROWS[i] for i in left]


@given(st.text(st.characters(exclude_characters="*?[")))
def test_a_name_can_be_given_as_it_is_shown(name: str) -> None:
    path = f"/{name}"
    for written in (path, printable(path), f"{printable(path)}*"):
        assert matches(written, path, None)


def test_memcgs_below_are_those_of_the_tree() -> None:
    """A removed memcg may have the path of another one, which has children of its own."""
    there = {1: ("/", None), 2: ("/a", 1), 3: ("/a/b", 2), 4: ("/ab", 1), 5: ("/a", 1),
             6: ("/a/b", 5), 7: ("/a/b/c", 6)}  # fmt: skip
    memcgs = [Memcg(at, path, 1, "online", parent, at) for at, (path, parent) in there.items()]
    for wanted, found in (("/a", {2, 3, 5, 6, 7}), ("0x5", {5, 6, 7}), ("/", {*there}),
                          ("*/b", {3, 6, 7})):  # fmt: skip
        choice = with_subtrees(Choice([wanted], subtree=True), memcgs)
        assert choice.below == found
        assert {at for at, (path, _) in there.items() if choice.has(path, at)} == found
        assert with_subtrees(Choice([wanted]), memcgs).below == frozenset()


def test_what_a_choice_has_no_say_in_is_told() -> None:
    table = answer().tables[0]
    machine = table_of("m", "of nodes", [Column("node", "node", "")], (0,), (1,))
    removed = table_of("r", "removed", [Column("memcg", "memcg", "")], ("/a",))
    plain = table_of("p", "parts", [Column("part", "text", "")], ("x",))
    parts = table_of("n", "by part", [Column("node_1", "bytes", "")], (5,))
    empty = replace(plain, rows=())
    made = replace(answer(), tables=(table, machine, removed, plain, parts, empty), notes=("said",))
    assert choose(made, Choice()).notes == ("said",)
    assert choose(made, Choice(memcgs=["/a"])).notes == (
        "said",
        '"of nodes" and "parts" and "by part" show the whole machine: --memcg does not apply to '
        "them.",
    )
    # Two rows of the first table are on no node, one of them of /b.
    assert choose(made, Choice(nodes=[1])).notes == (
        "said",
        '"removed" and "parts" show all nodes: --node does not apply to them.',
        "2 rows that belong to no node are left out.",
    )
    made = replace(made, tables=(table, removed))
    assert choose(made, Choice(nodes=[1], memcgs=["/b"])).notes == (
        "said",
        '"removed" shows all nodes: --node does not apply to it.',
        "1 row that belongs to no node is left out.",
    )


@pytest.mark.parametrize(
    ("written", "path"),
    [
        *((same, same) for same in ("/", "/a/b", "/a*", "*b", "0xFFFF888000001000", "")),
        *((other, "/a/b") for other in ("a/b", "/a/b/", "a//b//", "//a/b")),
        *((root, "/") for root in ("//", "///")),
    ],
)
def test_paths_of_memcgs(written: str, path: str) -> None:
    assert as_path(written) == path


def test_total_of_what_does_not_apply_is_none() -> None:
    made = tuple(replace(row, bytes=None) for row in ROWS)
    assert choose(answer(made), ALL).tables[0].totals == {"bytes": None}
    mixed = (*made[:1], ROWS[0])
    assert choose(answer(mixed), ALL).tables[0].totals == {"bytes": 1000}


def test_columns_are_chosen() -> None:
    assert rows(Choice(fields=["bytes", "memcg"], nodes=[0])) == [(1000, "/a")]
    default = choose(answer(), Choice()).tables[0]
    assert [column.name for column in default.columns] == [
        "memcg",
        "node",
        "bytes",
        "part",
        "stale",
    ]


@pytest.mark.parametrize(
    "choice", [Choice(fields=["size"]), Choice(sort="size"), Choice(sort="bytes:up")]
)
def test_what_is_not_there_cannot_be_chosen(choice: Choice) -> None:
    # both before and after the work
    for refuse in (lambda: check_fields(COLUMNS, choice), lambda: choose(answer(), choice)):
        with pytest.raises(UsageError) as error:
            refuse()
        said = str(error.value)
        assert "size; there are: memcg, memcg_address" in said or ":asc" in said


def test_what_may_be_there_is_refused_afterwards() -> None:
    choice = Choice(fields=["memcg", "node_1"], sort="node_1")
    check_fields(COLUMNS, choice)
    with pytest.raises(UsageError):
        choose(answer(), choice)


def test_errors_are_sorted_by_how_large_they_are() -> None:
    column = (Column("error", "bytes", "how far off"),)
    table = table_of("errors", "errors", column, *((n,) for n in (3, -31, 0, 7)))
    made = Answer("test", answer().image, (table,))
    for sort, left in (("error", [-31, 7, 3, 0]), ("error:desc", [7, 3, 0, -31])):
        assert [row.error for row in choose(made, Choice(sort=sort)).tables[0].rows] == left


def test_parts_on_nodes_are_chosen() -> None:
    columns = (Column("size", "bytes", ""), Column("node_0", "bytes", ""))
    rows = ((8, 0), (16, 64), (24, NotRead("the page is gone")), (32, None))
    made = Answer("test", answer().image, (table_of("parts", "parts", columns, *rows),))
    assert [row.size for row in choose(made, Choice(nodes=[0])).tables[0].rows] == [16, 24]


def test_no_rows_of_some_memcg_are_not_no_rows() -> None:
    empty = Table("stock", "stocks", COLUMNS, (), empty="all stocks are empty")
    full = replace(empty, rows=ROWS)
    made = replace(answer(), tables=(empty, full))
    one, other = choose(made, Choice(memcgs=["/idle"], nodes=[3])).tables
    assert (one.empty, other.rows) == ("all stocks are empty", [])
    assert "stocks: nothing of memcg /idle on node 3" in shown(replace(made, tables=(other,)))


def test_tables_without_the_fields_are_left_out() -> None:
    other = table_of("other", "other", (Column("cpu", "number", "CPU"),), (1,))
    made = answer()
    both = Answer(made.command, made.image, (*made.tables, other))
    assert [t.name for t in choose(both, Choice(fields=["bytes"])).tables] == ["charges"]
    assert [t.name for t in choose(both, Choice(fields=["cpu"])).tables] == ["other"]
    assert len(choose(both, Choice()).tables) == 2


def test_totals_are_of_the_chosen_rows() -> None:
    made = choose(answer(), Choice(memcgs=["/b"])).tables[0]
    assert (len(made.rows), made.totals) == (2, {"bytes": 3000})
    # a sum of which a part is not known is not known
    assert choose(answer(), Choice()).tables[0].totals == {"bytes": NotRead("the page is gone")}


def test_for_people() -> None:
    text = shown(choose(answer(), ALL))
    assert "25.0%" in text
    assert "3,000" in text
    assert "0xffff888000004000" in text
    line = next(line for line in text.splitlines() if "/b/c" in line)
    assert line.split() == ["/b/c", "0xffff888000003000", "1", "?", "-", "no"]
    assert "? the page is gone" in text
    assert [word for word in text.splitlines() if "total" in word][0].split() == ["total", "?"]
    assert "charges: nothing found" in shown(answer(()))


def test_titles_are_not_wrapped_to_narrow_tables() -> None:
    made = choose(answer(), Choice(fields=["node"]))
    table = replace(made.tables[0], title="charges of all memcgs by node")
    assert "charges of all memcgs by node\n" in shown(replace(made, tables=(table,)))


def test_for_scripts() -> None:
    assert scripted_rows(choose(answer(), ALL)) == [
        ["/a", "0xffff888000001000", "0", "1000", "0.25", "yes"],
        ["/b", "0xffff888000002000", "1", "3000", "0.75", "no"],
        ["/b/c", "0xffff888000003000", "1", "?", "-", "no"],
        ["/b", "0xffff888000004000", "-", "0", "0.0", "no"],
        ["-", "-", "-", "5", "-", "-"],
    ]


def test_tables_for_scripts_are_told_apart() -> None:
    made = choose(answer(), Choice(fields=["node"], memcgs=["/b"]))
    (table,) = made.tables
    empty = replace(table, rows=())
    made = replace(made, tables=(table, empty, table))
    assert scripted_rows(made) == [["1"], ["-"], [""], [""], ["1"], ["-"]]


def test_for_programs() -> None:
    missed = Coverage(read=3)
    missed.miss("page", 0x10, "gone")
    made = json.loads(document(choose(answer(coverage={"pages": missed}), ALL)))
    assert (made["schema"], made["command"], made["whole"]) == (1, "test", False)
    (table,) = made["tables"]
    assert table["columns"][3] == {"name": "bytes", "kind": "bytes", "help": "how much"}
    assert table["totals"] == {"bytes": None}
    assert table["rows"][2] == {
        "memcg": "/b/c",
        "memcg_address": "0xffff888000003000",
        "node": 1,
        "bytes": None,
        "part": None,
        "stale": False,
        "not_read": {"bytes": "the page is gone"},
    }
    assert table["rows"][3]["node"] is None
    assert made["coverage"]["pages"]["unreadable"] == 1


@pytest.mark.parametrize("name", ["/\x1b[31mred", "/[bold]x", "/a\tb\nc", "/\u202eevil"])
def test_names_cannot_do_anything(name: str) -> None:
    row = Charge(name, 1, 0, 1, 0.5, False)
    made = choose(answer((row,)), ALL)
    (cells,) = scripted_rows(made)
    assert len(cells) == len(COLUMNS)
    for text in (shown(made), "".join(cells)):
        assert not set(text) & set("\x1b\t\u202e")
    assert json.loads(document(made))["tables"][0]["rows"][0]["memcg"] == name
    if name.startswith("/[bold]"):
        assert name in shown(made)


WHOLE = """\
charges

 memcg   memcg_address        node   bytes    part   stale
 ─────────────────────────────────────────────────────────
 /a      0xffff888000001000      0   1,000   25.0%   yes
 /b      0xffff888000002000      1   3,000   75.0%   no
 /b/c    0xffff888000003000      1       ?       -   no
 /b      0xffff888000004000      -       0    0.0%   no
 -       -                       -       5       -   -

 total                                   ?

  ? the page is gone

Interrupted: the results are incomplete.
look at the other node
Not read: 5 of pages, for example
  page at 0x10: gone
  page at 0x11: gone
  page at 0x12: gone
"""


def test_a_whole_answer() -> None:
    """Amounts are on the right, and names on the left."""
    missed = Coverage(read=3)
    for address in range(0x10, 0x15):
        missed.miss("page", address, "gone")
    coverage = {"slab": Coverage(7), "pages": missed}
    made = answer(interrupted=True, notes=("look at the other node",), coverage=coverage)
    assert shown(choose(made, ALL)) == WHOLE
    assert shown(choose(answer(), ALL)) == WHOLE[: WHOLE.index("Interrupted")]


def test_a_terminal_without_utf_8_has_other_rules() -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), "ascii"))
    out = Output(console)
    answer_lines(choose(answer(), ALL), out)
    assert out.text.isascii()
    assert " " + "-" * 57 in out.text.splitlines()


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("\x1b", r"\x1b"),
        ("\x9b", r"\x9b"),
        ("\u0100\u061c", "\u0100" + r"\u061c"),
        ("\u202e", r"\u202e"),
        ("\uffff", r"\uffff"),
        ("\U00010000\U000e0041", "\U00010000" + r"\U000e0041"),
    ],
)
def test_escapes_are_those_of_python(name: str, escaped: str) -> None:
    assert printable(name) == escaped
    assert escaped.encode("raw_unicode_escape").decode("unicode_escape") == name


@pytest.mark.parametrize(("width", "has_room"), [(200, True), (80, True), (27, False)])
def test_shares_are_shown_on_terminals_only(width: int, has_room: bool) -> None:
    columns = (
        Column("memcg", "memcg", ""),
        Column("bytes", "bytes", "", total=True, priority=9, shares=True),
        Column("count", "count", "", priority=9),
    )
    sizes = (600 << 20, 399 << 20, 100, 0, (1 << 20) - 100, None)
    rows = [(f"/{n}", size, 7) for n, size in enumerate(sizes)]
    made = Answer("test", answer().image, (table_of("t", "t", columns, *rows),))
    ranked = replace(made, tables=(replace(made.tables[0], is_ranked=True),))
    text = answer_text(choose(made, Choice()), width)
    assert "600.0 MiB" in text
    assert "not shown" not in text
    assert re.findall(r"\S+ %", text) == (
        ["60 %", "40 %", "<1 %", "0 %", "<1 %", "100 %"] if has_room else []
    )
    text = answer_text(largest(choose(ranked, Choice()), 1), width)
    assert re.findall(r"\S+ %", text) == (["60 %", "40 %", "100 %"] if has_room else [])
    for shown in (
        answer_text(choose(made, Choice()), width, exact=True),
        answer_text(choose(made, Choice())),
        answer_text(choose(made, Choice(fields=["memcg", "bytes"])), width),
        answer_text(choose(made, Choice(memcgs=["/3"])), width),
        scripted(choose(made, Choice()), header=True),
        as_csv(choose(made, Choice())),
        to_json(answer_document(choose(made, ALL))),
    ):
        assert "%" not in shown
        assert "share" not in shown


def test_a_share_is_never_shown_without_its_column() -> None:
    columns = (
        Column("memcg", "memcg", ""),
        Column("sum", "bytes", "", total=True, priority=4, shares=True),
        *(Column(f"part_{n}", "bytes", "", total=True, priority=5) for n in range(4)),
    )
    rows = [(f"/a-name-of-some-length-{n}", *[1 << 30] * 5) for n in range(3)]
    made = choose(Answer("test", answer().image, (table_of("t", "t", columns, *rows),)), Choice())
    some = {width: answer_text(made, width).split("not shown")[0] for width in range(60, 130, 2)}
    assert {"33 %" in shown for shown in some.values()} == {True, False}
    assert not any("33 %" in shown and "sum" not in shown for shown in some.values())


def test_output_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of an image are no markup, whatever they look like."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    table = table_of("charges", "t", (Column("what", "text", ""),), ("word " * 20,))
    out = make_output()
    out.table(table)
    out.line("[bold]:smile: 12", "yellow")
    lines = out.text.splitlines()
    assert max(cell_len(line) for line in lines[3:-1]) <= 40
    assert "[bold]:smile: 12" in lines[-1]
    monkeypatch.setenv("FORCE_COLOR", "0")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = make_output()
    plain.line("text", "bold red")
    assert plain.text == "text\n"
