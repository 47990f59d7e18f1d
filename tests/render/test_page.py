# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a page of HTML has: the text, the pictures and the tables of a result, and nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from support.reports import WEB, clean, more, report, row

from memcg_inspect.render.page import (
    _MOST_WITHOUT_FILTER,
    _most_tiles,
    _table,
    answer_page,
    first_picture,
    report_page,
)
from memcg_inspect.render.pictures import Tile
from memcg_inspect.render.text import exact_cell
from memcg_inspect.report import Report, Skew
from memcg_inspect.report_tables import TABLES, report_answer
from memcg_inspect.tables import Answer, Choice, Column, NotRead, Table, choose


@dataclass
class Section:
    """
    A section of a page.

    :ivar rows: texts of cells, with the heads first and the foot last
    :ivar numbers: ``data-value`` of cells
    :ivar titles: explanations that are shown when one points at something
    :ivar amounts: ``data-amount`` of shapes
    """

    title: str = ""
    rows: list[list[str]] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    amounts: list[int] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    note: str = ""


class Page(HTMLParser):
    """A page that was read: its sections, and the text before them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections = [Section()]
        self.words: dict[str, list[str]] = {}
        self._open: list[tuple[str, str]] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "section":
            self.sections.append(Section())
        section = self.sections[-1]
        if tag == "tr":
            section.rows.append([])
        elif tag in ("td", "th"):
            section.rows[-1].append("")
            section.titles += [given["title"]] if "title" in given else []
            section.numbers += [given["data-value"]] if "data-value" in given else []
            section.classes.append(given.get("class", ""))
        if "data-amount" in given:
            section.amounts.append(int(given["data-amount"]))
        if tag not in ("meta", "input"):
            self._open.append((tag, given.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        section, tags = self.sections[-1], [tag for tag, _ in self._open]
        if "h2" in tags:
            section.title += data
        elif "td" in tags or "th" in tags:
            section.rows[-1][-1] += data
        elif tags and tags[-1] == "title" and "svg" in tags:
            section.titles.append(data)
        elif self._open and self._open[-1] == ("p", "more"):
            section.note += data
        elif tags and data.strip():
            self.words.setdefault(tags[-1], []).append(data)

    def named(self, title: str) -> Section:
        [found] = [section for section in self.sections if section.title == title]
        return found


def table_names() -> list[str]:
    return [name for name in TABLES if name != "timings"]


def test_a_report_has_all_its_parts() -> None:
    made = more()
    page = Page(report_page(made, "first <b> & last\nsecond line"))
    assert page.words["pre"] == ["first <b> & last\nsecond line"]
    assert page.words["h1"] == ["memcg-inspect audit"]
    assert page.words["span"] == ["findings"]
    facts = "Linux 7.3.0 (vmcore), nodes 0, 1, 2 CPUs, objcg-per-node"
    assert facts in page.words["p"]
    tables = [TABLES[name][1](made, False) for name in table_names()]
    assert [section.title for section in page.sections[1:]] == [
        "Charges by node, memcg and kind",
        "Charges by memcg and node",
        "Charged node and backing node",
        "Slab objects and percpu memory in counters",
        *(table.title for table in tables if table.rows),
        "Not read",
    ]


def test_tables_have_each_value() -> None:
    made = more()
    page = Page(report_page(made, ""))
    for name in table_names():
        table = TABLES[name][1](made, False)
        if not table.rows:
            continue
        section = page.named(table.title)
        values = [[column.value(row) for column in table.columns] for row in table.rows]
        shown = [
            [
                "?" if isinstance(value, NotRead) else exact_cell(column, value)
                for column, value in zip(table.columns, row, strict=True)
            ]
            for row in values
        ]
        heads, *rows = section.rows
        assert heads == [column.name for column in table.columns]
        assert rows[: len(shown)] == shown
        assert set(section.numbers) <= {str(v) for some in values for v in some}
        for some in values:
            reasons = [value.reason for value in some if isinstance(value, NotRead)]
            assert set(reasons) <= set(section.titles)
        assert len(rows) == len(shown)


def test_sums_are_at_the_foot() -> None:
    answer = choose(report_answer(more(), "skew"), Choice())
    [table] = answer.tables
    assert table.totals is not None
    *_, foot = Page(answer_page(answer)).named(table.title).rows
    cells = dict(zip((column.name for column in table.columns), foot, strict=True))
    assert {name: cells[name] for name in table.totals} == {"bytes": "8,796", "count": "24"}
    others = [cell for name, cell in cells.items() if name not in table.totals]
    assert others == ["all rows", *[""] * (len(others) - 1)]


def test_numbers_are_to_the_right_and_can_be_sorted() -> None:
    page = Page(report_page(report(), ""))
    section = page.named(TABLES["skew"][1](report(), False).title)
    assert {"4000", "700"} <= set(section.numbers)
    of_heads = section.classes[: len(section.rows[0])]
    assert dict(zip(section.rows[0], of_heads, strict=True)) == {
        name: "number" if name in ("charged_node", "node", "bytes", "count") else ""
        for name in section.rows[0]
    }


def test_pictures_show_the_charges() -> None:
    page = Page(report_page(more(), ""))
    by_kind = page.named("Charges by node, memcg and kind")
    assert sorted(by_kind.amounts) == [700, 4000, 4096]
    assert sorted(by_kind.titles) == [
        "/web, slab, node 0: 4,000 bytes",
        "/web, slab, node 1: 700 bytes",
        "/web, sock, no node: 4,096 bytes",
    ]
    by_node = page.named("Charges by memcg and node")
    assert by_node.titles == [
        "/web, no node: 4,096 bytes", "/web, node 0: 4,000 bytes", "/web, node 1: 700 bytes",
    ]  # fmt: skip
    assert by_node.note == ""
    pairs = page.named("Charged node and backing node")
    assert dict(zip(pairs.titles, pairs.amounts, strict=True)) == {
        "charged on node 0, node 0: 4,000 bytes": 4000,
        "charged on node 0, node 1: 700 bytes": 700,
        "charged on node 1, node 0: 0 bytes": 0,
        "charged on node 1, node 1: 0 bytes": 0,
    }
    assert "off the diagonal" in pairs.note
    counters = page.named("Slab objects and percpu memory in counters")
    assert counters.amounts == [5064]
    assert counters.titles == ["/web, folded: 5,064 bytes"]


def test_the_file_of_a_picture_is_the_first_one() -> None:
    picture = first_picture(report())
    assert picture is not None
    assert picture.startswith("<svg")
    assert "<style>" in picture
    assert "/web, slab, node 0: 4,000 bytes" in picture
    assert first_picture(replace(clean(), skew=(), rows=())) is None
    columns = (Column("bytes", "bytes", "", total=True), Column("node", "node", ""))
    tables = [Table("t", "sizes", columns, [SimpleNamespace(bytes=n, node=n)]) for n in (7, 9)]
    for some, amounts in ((tables, [7]), (tables[1:], [9]), ([], None)):
        drawn = first_picture(Answer("made", None, tuple(some), {}))
        found = None if drawn is None else re.findall(r'data-amount="(\d+)"', drawn)
        assert found == (None if amounts is None else [str(amount) for amount in amounts])


def test_what_could_not_be_read_is_listed() -> None:
    page = Page(report_page(report(), ""))
    coverage = report().coverage["slab"]
    [line] = page.words["li"]
    assert line.startswith(f"{coverage.unreadable:,} of slab, for example ")
    for missed in coverage.examples[:3]:
        assert f"{missed.what} at {missed.address:#x}: {missed.reason}" in line


def test_long_texts_may_be_broken() -> None:
    answer = report_answer(report("/" + "web" * 20), "rows")
    page = Page(answer_page(answer))
    [table] = answer.tables
    section = page.named(table.title)
    by_cell = dict(zip((c for row in section.rows for c in row), section.classes, strict=False))
    assert by_cell["/" + "web" * 20] == "text"
    assert by_cell["slab"] == ""


def test_an_answer_in_words_is_shown_as_it_is() -> None:
    answer = replace(
        report_answer(report(), "rows"),
        text="one <line>\ntwo",
        notes=("a <note>",),
        interrupted=True,
    )
    page = Page(answer_page(answer))
    assert page.words["pre"] == ["one <line>\ntwo"]
    assert "a <note>" in page.words["p"]
    assert "Interrupted: the results are incomplete." in page.words["p"]
    assert not any(section.rows for section in page.sections)


def test_an_answer_in_words_has_no_pictures() -> None:
    answer = report_answer(more(), "skew")
    assert "<svg" in answer_page(answer)
    assert "<svg" not in answer_page(replace(answer, text="nothing is skewed"))


def test_an_answer_has_pictures_and_tables() -> None:
    answer = report_answer(more(), "skew")
    page = Page(answer_page(answer))
    [table] = answer.tables
    titles = [section.title for section in page.sections[1:]]
    assert titles[-1] in (table.title, "Not read")
    assert f"{table.title}: bytes" in titles
    assert "bytes by memcg and node" in titles
    assert sorted(page.named(f"{table.title}: bytes").amounts) == [700, 4000, 4096]
    assert sorted(page.named("bytes by memcg and node").amounts) == [700, 4000, 4096]
    assert page.words["h1"] == [f"memcg-inspect {answer.command}"]


def crowd(number: int) -> Report:
    """Return a report of some memcgs that have charges and counters; the first one has most."""
    one = report()
    memcgs = [replace(one.memcgs[1], address=n, path=f"/m{n}") for n in range(1, number + 1)]
    return replace(
        one,
        memcgs=tuple(memcgs),
        skew=tuple(Skew(m.address, "slab", 0, 0, 1000 - m.address, 1) for m in memcgs),
        rows=tuple(row(m.address, 0, 1000 - m.address, "differs") for m in memcgs),
    )


@pytest.mark.parametrize(
    ("number", "left"), [(25, ""), (26, "Not shown: 1 other memcg with less.")]
)
def test_most_memcgs_of_a_picture(number: int, left: str) -> None:
    page = Page(report_page(crowd(number), ""))
    counters = page.named("Slab objects and percpu memory in counters")
    assert counters.amounts == [1000 - n for n in range(1, 26)]
    assert counters.note.endswith(left or "but not the stocks.")
    by_node = page.named("Charges by memcg and node")
    assert by_node.amounts == [1000 - n for n in range(1, 26)]
    assert by_node.note == left


def test_one_byte_is_drawn() -> None:
    made = replace(report(), skew=(Skew(WEB, "slab", 0, 0, 1, 1),), rows=())
    assert Page(report_page(made, "")).named("Charges by node, memcg and kind").amounts == [1]


def test_most_groups_and_tiles_of_a_picture() -> None:
    """What is left has one tile in each group, and there is one group of the smallest ones."""
    tiles = [Tile(f"node {n}", "/web", "slab", 1000 - n) for n in range(33)]
    assert _most_tiles(tiles[:32]) == tiles[:32]
    assert _most_tiles(tiles) == [*tiles[:32], tiles[32]._replace(group="(others)")]
    tiles = [Tile("node 0", f"/m{n}", "slab", 1000 - n) for n in range(302)]
    assert _most_tiles(tiles[:300]) == tiles[:300]
    rest = Tile("node 0", "(others)", "(others)", 700 + 699)
    assert _most_tiles(tiles) == [*tiles[:300], rest]


def test_tiles_of_caches_that_are_not_all_known() -> None:
    """A name that could not be read is no name, and says nothing."""
    columns = (
        Column("memcg", "memcg", ""),
        Column("cache", "text", ""),
        Column("node", "node", ""),
        Column("bytes", "bytes", "", total=True),
    )
    rows = [
        SimpleNamespace(memcg="/web", cache="dentry", node=1, bytes=700),
        SimpleNamespace(memcg="/web", cache=NotRead("the page is gone"), node=None, bytes=50),
        SimpleNamespace(memcg=None, cache=None, node=0, bytes=9),
    ]
    image = report().image
    page = Page(answer_page(Answer("test", image, (Table("t", "sizes", columns, rows),))))
    assert sorted(page.named("sizes: bytes").titles) == [
        "(no memcg), node 0: 9 bytes",
        "/web, dentry, dentry, node 1: 700 bytes",
        "/web, no node: 50 bytes",
    ]


GROWTH = (
    Column("memcg", "memcg", ""),
    Column("node", "node", ""),
    Column("bytes", "bytes", "", total=True),
    Column("growth", "difference", "", in_bytes=True),
)


def sections_of(columns: tuple[Column, ...], rows: list[SimpleNamespace]) -> list[Section]:
    """Return the sections of a page with one table."""
    answer = Answer("test", report().image, (Table("t", "sizes", columns, rows),))
    return Page(answer_page(answer)).sections[1:]


def test_one_table_may_take_all_room_for_rows() -> None:
    rows = [
        SimpleNamespace(memcg=f"/{n}/{'x' * 900}", node=0, bytes=1, growth=0) for n in range(600)
    ]
    answer = Answer("test", report().image, (Table("t", "sizes", GROWTH, rows),))
    assert 500_000 < len(answer_page(answer)) < 800_000
    [shown] = [section for section in Page(answer_page(answer)).sections if len(section.rows) > 9]
    assert len(shown.rows) >= len(rows)


def test_bars_of_what_grew_and_shrank_most() -> None:
    """What stayed the same is left out, and so is what could not be read."""
    grown = {"/a": 5, "/b": -900, "/c": 0, "/d": 70, "/e": NotRead("gone")}
    rows = [SimpleNamespace(memcg=m, node=1, bytes=1, growth=n) for m, n in grown.items()]
    chart, _ = sections_of(GROWTH, rows)
    assert chart.title == "sizes: growth"
    assert chart.titles == [
        "/b, node 1, growth: -900 bytes",
        "/d, node 1, growth: 70 bytes",
        "/a, node 1, growth: 5 bytes",
    ]
    [table] = sections_of(GROWTH, [row for row in rows if row.memcg in ("/c", "/e")])
    assert table.title == "sizes"


def test_no_picture_of_nothing() -> None:
    nothing = [
        SimpleNamespace(memcg="/a", node=0, bytes=0),
        SimpleNamespace(memcg="/b", node=1, bytes=-5),
    ]
    assert [section.title for section in sections_of(GROWTH[:3], nothing)] == ["sizes"]
    one = SimpleNamespace(memcg="/c", node=1, bytes=1)
    tree, heat, _ = sections_of(GROWTH[:3], [*nothing, one])
    assert (tree.amounts, heat.titles) == ([1], ["/c, node 1: 1 byte"])


def test_what_rows_are_told_apart_by() -> None:
    """The path and the cache come first; what is not known is left out."""
    labels = ("state", "zone", "item", "what", "kind", "caller", "site", "cache", "memcg", "size")
    columns = (
        *(Column(name, "memcg" if name == "memcg" else "text", "") for name in labels),
        Column("bytes", "bytes", "", total=True),
    )
    row = SimpleNamespace(**{name: f"a {name}" for name in labels}, bytes=1)
    [tree, _] = sections_of(columns, [row])
    names = "memcg", "cache", "site", "caller", "kind", "what", "item", "zone", "state", "size"
    label = ", ".join(f"a {name}" for name in names)
    assert tree.titles == [f"{label}, a kind, a kind: 1 byte"]
    nothing = SimpleNamespace(**dict.fromkeys(labels), bytes=1)
    [tree, _] = sections_of(columns, [nothing])
    assert tree.titles == ["(no memcg), all: 1 byte"]
    [tree, _] = sections_of((columns[-1],), [SimpleNamespace(bytes=1)])
    assert tree.titles == ["all, all: 1 byte"]


def test_texts_of_more_than_thirty_characters_may_be_broken() -> None:
    column = Column("site", "text", "")
    rows = [SimpleNamespace(site="x" * size) for size in (30, 31)]
    [section] = sections_of((column,), rows)
    assert section.classes == ["", "", "text"]


def test_charges_without_two_nodes_are_not_on_the_diagonal_or_off_it() -> None:
    """Neither memory of no node, nor charges that no node has."""
    skew = (
        Skew(WEB, "slab", 1, 0, 5, 1),
        Skew(WEB, "slab", 0, -1, 7, 1),
        Skew(WEB, "slab", None, 1, 9, 1),
    )
    page = Page(report_page(replace(report(), skew=skew), ""))
    pairs = page.named("Charged node and backing node")
    assert pairs.titles == [
        "charged on node 0, node 0: 0 bytes",
        "charged on node 0, node 1: 0 bytes",
        "charged on node 1, node 0: 5 bytes",
        "charged on node 1, node 1: 0 bytes",
    ]
    assert pairs.note == (
        "Memory off the diagonal is on another node than the obj_cgroup that pays for it."
    )


def test_parts_of_counters_that_a_reader_does_not_see() -> None:
    """Amounts in KiB and in pages are shown in bytes. Other parts are not shown."""
    claimed = {"folded": 3, "pending_cpu": -2, "stock": 5, "other": 7}
    rows = tuple(
        replace(row(WEB, 0, 0), claimed=claimed, unit=u) for u in ("bytes", "KiB", "pages")
    )
    other = replace(rows[0], identity="kmem")
    unread = replace(rows[0], claimed=None)
    references = replace(rows[0], unit="references")
    made = replace(report(), rows=(*rows, other, unread, references))
    section = Page(report_page(made, "")).named("Slab objects and percpu memory in counters")
    each = 1 + 1024 + 4096
    assert section.titles == [
        f"/web, folded: {3 * each:,} bytes",
        f"/web, pending on CPUs: {-2 * each:,} bytes",
        f"/web, in stocks: {5 * each:,} bytes",
    ]
    assert section.note == (
        "memory.stat shows what is folded. A flush adds what is pending, but not the stocks."
    )


def test_parts_of_counters_of_a_memcg_that_is_not_known() -> None:
    one = replace(row(0x10, 0, 0), claimed={"stock": 5}, unit="bytes")
    page = Page(report_page(replace(report(), rows=(one,)), ""))
    section = page.named("Slab objects and percpu memory in counters")
    assert section.titles == ["unknown, in stocks: 5 bytes"]


def test_the_picture_is_of_an_amount_with_shares_if_there_is_one() -> None:
    columns = (
        Column("node", "node", ""),
        Column("used", "bytes", "", total=True),
        Column("charged", "bytes", "", total=True, shares=True),
    )
    tree, *_ = sections_of(columns, [SimpleNamespace(node=0, used=3, charged=5)])
    assert tree.amounts == [5]
    tree, *_ = sections_of(columns[:2], [SimpleNamespace(node=0, used=3)])
    assert tree.amounts == [3]


def test_long_tables_can_be_filtered() -> None:
    """The field is between the title and the table."""
    rows = [SimpleNamespace(bytes=n) for n in range(1 + _MOST_WITHOUT_FILTER)]
    field = '</h2>\n<input type="search" placeholder="filter rows" aria-label="filter rows">\n<div'
    for count in (_MOST_WITHOUT_FILTER, 1 + _MOST_WITHOUT_FILTER):
        table = Table("t", "sizes", (Column("bytes", "bytes", ""),), rows[:count])
        assert (field in _table(table, 1 << 20)) == (count > _MOST_WITHOUT_FILTER)


def test_rows_that_just_fit_are_shown() -> None:
    rows = [SimpleNamespace(bytes=n) for n in range(3)]
    table = Table("t", "sizes", (Column("bytes", "bytes", ""),), rows)
    whole = _table(table, 1 << 20)
    size = sum(len(line) + 1 for line in whole.splitlines() if line.startswith("<tr><td"))
    assert _table(table, size) == whole
    assert "1 more row: --json has all of them." in _table(table, size - 1)
