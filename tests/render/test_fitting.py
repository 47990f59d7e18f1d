# SPDX-License-Identifier: LGPL-2.1-or-later
"""Tables on terminals of any width: what is folded, shortened, rounded or left out."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from support.printed import answer_text

from memcg_inspect.model import ImageInfo
from memcg_inspect.render.fitting import fitted, short_paths
from memcg_inspect.tables import (
    CHOSEN,
    Answer,
    Choice,
    Column,
    ColumnType,
    Table,
    Value,
    choose,
    largest,
)

POD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice"
DIGITS = "c535a0f4d1e2b39788a6c0ffee12345678900987654321abcdefabcdef123456"
NAME = "cri-containerd-{}.scope"


def answer(columns: Sequence[Column], *rows: Sequence[Value]) -> Answer:
    names = [column.name for column in columns]
    made = [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in rows]
    image = ImageInfo("7.3.0", "vmcore", (0, 1), 2, 4096, "objcg-per-node")
    return Answer("test", image, (Table("t", "sizes", tuple(columns), made, is_ranked=True),))


def headings(text: str) -> list[str]:
    return text.splitlines()[2].split()


COLUMNS = (
    Column("memcg", "memcg", "", priority=1),
    Column("size", "bytes", "", priority=9, total=True),
    *(
        Column(f"node_{nid}", "bytes", "", priority=4, total=True, field=f"node_{nid}", key=None)
        for nid in range(3)
    ),
    Column("objects", "count", "", priority=6, total=True),
    Column("flag", "flag", "", priority=2),
)
ROW = ("/web", 5 << 30, 1 << 30, 3 << 20, 9 << 10, 1_234_567, True)


@pytest.mark.parametrize(
    ("width", "left"),
    [
        (None, "memcg size node_0 node_1 node_2 objects flag"),
        (80, "memcg size node_0 node_1 node_2 objects flag"),
        (57, "memcg size node_0 node_1 node_2 objects"),
        (45, "memcg size node_0 node_1 objects"),
        (36, "memcg size node_0 objects"),
        (27, "memcg size objects"),
        (17, "memcg size"),
        (16, "memcg size"),
        (9, "memcg"),
    ],
)
def test_columns_are_left_out_by_priority(width: int | None, left: str) -> None:
    """The first column is always there. Of equal ones the last goes first."""
    text = answer_text(answer(COLUMNS, ROW), width)
    assert headings(text) == left.split()
    gone = [c.name for c in COLUMNS if c.name not in left.split()]
    said = " ".join(text.split())
    assert (f"the terminal has {width} columns: {', '.join(gone)}." in said) is bool(gone)


def test_an_empty_line_is_below_the_columns_that_are_left_out() -> None:
    one = answer(COLUMNS, ROW)
    text = answer_text(replace(one, tables=one.tables * 2), 36)
    assert "has room for all.\n\nsizes\n\n memcg" in text


def test_columns_of_nodes_are_left_out_together() -> None:
    columns = [
        Column(f"node_{nid}", "bytes", "", field="nodes", key=nid, total=True) for nid in range(3)
    ]
    whole = (Column("memcg", "memcg", ""), *columns, Column("count", "count", "", priority=6))
    row = SimpleNamespace(memcg="/web", nodes={0: 5 << 30, 1: 0, 2: 1 << 20}, count=7)
    table = Table("t", "sizes", whole, [row])
    made = replace(answer(COLUMNS, ROW), tables=(table,))
    assert headings(answer_text(made, 60)) == ["memcg", "node_0", "node_1", "node_2", "count"]
    assert headings(answer_text(made, 30)) == ["memcg", "count"]


def test_columns_that_are_asked_for_stay() -> None:
    made = choose(answer(COLUMNS, ROW), Choice(fields=["memcg", "flag", "node_2", "objects"]))
    assert all(column.priority == CHOSEN for column in made.tables[0].columns)
    assert headings(answer_text(made, 20)) == ["memcg", "flag", "node_2", "objects"]
    made = choose(answer(COLUMNS, ROW), Choice(sort="flag"))
    assert headings(answer_text(made, 27)) == ["memcg", "size", "flag"]


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0"),
        (1, "1 B"),
        (10_239, "10,239 B"),
        (10_240, "10.0 KiB"),
        (-10_240, "-10.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (int(1.2 * 2**30), "1.2 GiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (5000 << 40, "5,000.0 TiB"),
    ],
)
def test_sizes_are_rounded_on_a_terminal(size: int, shown: str) -> None:
    columns = (Column("of", "text", ""), Column("bytes", "bytes", ""))
    made = answer(columns, ("x", size))

    def cells(width: int | None, exact: bool = False) -> list[str]:
        row = answer_text(made, width, exact).splitlines()[4]
        return re.split(" {2,}", row.strip())

    assert cells(80) == ["x", shown]
    for plain in (cells(80, exact=True), cells(None), cells(None, exact=True)):
        assert plain == ["x", f"{size:,}"]


def test_only_what_is_in_bytes_is_rounded() -> None:
    columns = (
        Column("of", "text", ""),
        Column("kib", "KiB", ""),
        Column("pages", "pages", ""),
        Column("count", "count", ""),
        Column("change", "difference", "", in_bytes=True),
        Column("difference", "difference", ""),
    )
    made = answer(columns, ("x", 64, 20_000, 20_000, 1 << 20, 1 << 20), ("y", 0, 0, 0, -9, 0))
    one, other = answer_text(made, 100).splitlines()[4:6]
    assert re.split(" {2,}", one.strip()) == [
        "x", "64.0 KiB", "20,000", "20,000", "+1.0 MiB", "+1,048,576",
    ]  # fmt: skip
    assert re.split(" {2,}", other.strip()) == ["y", "0", "0", "0", "-9 B", "0"]


def test_the_widest_column_is_not_narrowed_if_it_has_numbers() -> None:
    """Numbers are never cut. Words of another column are folded in their place."""
    columns = (
        Column("memcg", "memcg", ""),
        Column("size", "number", ""),
        Column("why", "text", ""),
    )
    number = 10**39
    shown = answer_text(answer(columns, ("/web", number, "one word after the other " * 2)), 72)
    assert f" {number} " in shown
    assert max(map(len, shown.splitlines())) <= 72


@pytest.mark.parametrize(
    ("width", "short"),
    [
        (300, POD.format(1) + "/" + NAME.format(DIGITS)),
        (100, "…/" + NAME.format(DIGITS)),
        (60, "…/" + NAME.format(DIGITS[:12] + "…")),
        (30, "…/cri-containerd-c535a….scope"),
        (20, "…ainerd-c535a….scope"),
    ],
)
def test_paths_keep_their_end(width: int, short: str) -> None:
    assert short_paths([POD.format(1) + "/" + NAME.format(DIGITS)], width, "…") == [short]
    assert cell_len(short) <= width


def test_paths_keep_what_there_is_room_for() -> None:
    path = "/system.slice/a/b/memcached.service"
    assert short_paths([path], 24, "…") == ["…/a/b/memcached.service"]
    assert short_paths([path], 22, "…") == ["…/b/memcached.service"]
    assert short_paths([path], 22, "...") == ["...b/memcached.service"] or (
        short_paths([path], 22, "...") == [".../memcached.service"]
    )
    assert short_paths(["(5 other rows)", "-"], 22, "…") == ["(5 other rows)", "-"]


def test_paths_that_would_look_alike_are_whole() -> None:
    paths = [f"{POD.format(pod)}/app.scope" for pod in ("1a", "2b")]
    third = f"{POD.format('3c')}/web.scope"
    assert short_paths([*paths, third, third], 20, "…") == [*paths, "…/web.scope", "…/web.scope"]
    columns = (Column("memcg", "memcg", ""), Column("size", "bytes", "", total=True))
    text = answer_text(answer(columns, (paths[0], 5), (paths[1], 7), (third, 9)), 45)
    assert max(map(cell_len, text.splitlines())) <= 45
    first = re.findall(r"^ (\S+)", text, re.MULTILINE)
    assert paths[0] in "".join(first)
    assert paths[1] in "".join(first)
    assert "…" in text


def numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w.,])[\d,]+(?![\w.,])", text)


def test_no_table_is_wider_than_the_terminal() -> None:
    """Of any shape, as long as the first column and a gap have room."""
    chance = random.Random(16)
    for _ in range(300):
        types = chance.choices(("bytes", "count", "text", "memcg", "number"), k=12)
        columns = [Column("what", chance.choice(("memcg", "text")), "")] + [
            Column(f"c{n}", kind, "", total=kind == "bytes", priority=chance.randrange(10))
            for n, kind in enumerate(types)
        ]
        rows = [[_value(chance, column) for column in columns] for _ in range(4)]
        made = choose(answer(columns, *rows), Choice())
        made = largest(made, chance.choice((0, 2)))
        width, whole = chance.randrange(40, 200), set(numbers(answer_text(made)))
        text = answer_text(made, width, exact=True)
        assert max(map(cell_len, text.splitlines())) <= width
        assert [line for line in text.splitlines() if line != line.rstrip()] == []
        shown = [line for line in text.splitlines()[3:] if "rows" not in line]
        assert set(numbers("\n".join(shown))) <= whole | {str(width)}


def _value(chance: random.Random, column: Column) -> Value:
    if column.type == "text":
        return " ".join("x" * chance.randrange(1, 30) for _ in range(chance.randrange(3)))
    if column.type == "memcg":
        return "/x" + "".join(f"/{'y' * chance.randrange(1, 40)}" for _ in range(4))
    return chance.choice((0, chance.randrange(10**12)))


def test_a_terminal_narrower_than_the_first_column() -> None:
    columns = (Column("number", "count", ""), Column("other", "count", ""))
    assert fitted(columns, [["number", "other"], ["1,000,000", "5"]], 5).shown == [0]


@pytest.mark.parametrize(("room", "gap"), [(None, 3), (14, 3), (13, 2)])
def test_gaps_are_as_wide_as_the_room_allows(room: int | None, gap: int) -> None:
    """A space is at the beginning of each line."""
    columns = [Column("one", "count", ""), Column("two", "count", "")]
    assert fitted(columns, [["11111", "22222"]], room, keep=(0, 1)).gap == gap


@pytest.mark.parametrize(
    ("kind", "cell", "least"),
    [
        ("memcg", "/x" * 50, 30),
        ("memcg", "/abcdefg", 8),
        ("text", "a word " * 10, 12),
        ("text", "several", 7),
        ("text", f"{'x' * 13} and more words", 13),
        ("text", f"{'x' * 24} and more words", 24),
        ("text", f"{'x' * 40} and more words", 24),
        ("count", "123,456,789", 11),
    ],
)
def test_a_column_is_narrowed_before_another_one_is_left_out(
    kind: ColumnType, cell: str, least: int
) -> None:
    """A path keeps 30 columns, and a text its longest word, if that is not too long itself."""
    columns = [Column("one", kind, ""), Column("two", "count", "", priority=1)]
    lines = [["one", "two"], [cell, "12,345"]]
    fits = [fitted(columns, lines, room) for room in range(1, 120)]
    assert min(fit.widths[0] for fit in fits if len(fit.shown) == 2) == least
    # As soon as there is room: a space before it, the gap, and the other column.
    assert [len(fit.shown) for fit in fits].index(2) + 1 == 1 + least + 2 + 6


def test_the_widest_column_is_narrowed_first() -> None:
    columns = [Column(name, "text", "") for name in ("one", "two", "three")]
    lines = [["one", "two", "three"], ["word " * 9 + "last!", "word " * 7 + "last!", "few words"]]
    for room, widths in ((106, [50, 40, 9]), (96, [42, 40, 9]), (76, [31, 31, 9])):
        fit = fitted(columns, lines, room)
        assert sorted(fit.widths) == sorted(widths)
        assert (fit.widths[2], sum(fit.widths)) == (9, room - 1 - fit.gap * 2)


def test_paths_are_as_long_as_their_column_is_wide() -> None:
    path = "/system.slice/b/memcached.service"
    for width, short in (
        (33, path),
        (32, "…/b/memcached.service"),
        (21, "…/b/memcached.service"),
        (20, "…/memcached.service"),
        (19, "…/memcached.service"),
        (18, "…memcached.service"),
        (17, "…emcached.service"),
    ):
        assert short_paths([path], width, "…") == [short]
    # A name that fits is whole, whatever digits it has.
    name = f"{DIGITS[:32]}.scope"
    path = f"/{'x' * 40}.slice/{name}"
    assert short_paths([path], 40, "…") == [f"…/{name}"]
    assert short_paths([path], 39, "…") == [f"…/{DIGITS[:12]}….scope"]


def test_a_path_of_which_only_the_identifier_is_shortened_has_all_folders() -> None:
    name = "c535a0f4d1e2b39788a6c0ffee123456.scope"
    assert short_paths([f"/a/{name}"], 39, "…") == ["/a/c535a0f4d1e2….scope"]
    assert short_paths([f"/{name}"], 38, "…") == ["/c535a0f4d1e2….scope"]
    assert short_paths([f"/a/b/{name}"], 25, "…") == ["/a/b/c535a0f4d1e2….scope"]
    assert short_paths([f"/a/b/{name}"], 24, "…") == ["…/b/c535a0f4d1e2….scope"]
