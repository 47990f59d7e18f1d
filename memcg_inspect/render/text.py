# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Text
----

Tables and lines for people, and rows for scripts. No number is ever cut. On a terminal, sizes are
rounded, and tables are made to fit (:mod:`memcg_inspect.render.fitting`). Names from an image are
untrusted input: every control character in them is escaped.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console
from rich.text import Text

from memcg_inspect.escape import printable
from memcg_inspect.model import NUMA_NO_NODE, Coverage, counted
from memcg_inspect.render.fitting import Fit, fitted, short_paths
from memcg_inspect.tables import AMOUNTS, Answer, Column, ColumnType, NotRead, Table, Value

__all__ = (
    "Output",
    "amount",
    "answer_lines",
    "as_csv",
    "coverage_lines",
    "exact_cell",
    "make_output",
    "plain_output",
    "rounded",
    "scripted",
    "signed",
    "size",
)

_RIGHT: frozenset[ColumnType] = AMOUNTS | {"number", "node"}
#: The least width of text that is wrapped.
_NARROWEST = 12
#: A column of tables on terminals. It tells more than most columns beside the size itself.
_SHARE = Column("share", "share", "share of the total", priority=6)
#: Shown for a value that does not apply, and for one that could not be read.
_NONE, _NOT_READ = "-", "?"
_STATUS_STYLES = {
    "exact": "",
    "differs": "bold red",
    "WRONG": "bold red",
    "in-flight": "yellow",
    "moving": "yellow",
    "unverifiable": "yellow",
}


#: The least number of bytes that is rounded.
_LEAST_ROUNDED = 10 << 10


def amount(value: int | None) -> str:
    """Format an amount with separators of thousands; ``None`` is a dash."""
    return _NONE if value is None else f"{value:,}"


def signed(value: int | None) -> str:
    """Format a difference with its sign; ``None`` is a dash."""
    return _NONE if value is None else f"{value:+,}" if value else "0"


def size(value: int, exact: bool = False) -> str:
    """
    Format a number of bytes: ``1.2 GiB``. Below 10 KiB it is exact.

    :param exact: whether to format all of them as bytes
    """
    return counted(value, "bytes") if exact or abs(value) < _LEAST_ROUNDED else _rounded_size(value)


def _rounded_size(value: int) -> str:
    amount = float(value)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        # 1,023.96 would be shown as 1,024.0.
        if abs(amount) < 1023.95 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:,.1f} {unit}"


def _short_size(value: int) -> str:
    """Format a number of bytes for a cell of a table: ``1.2 GiB``, ``9,216 B`` or ``0``."""
    if abs(value) < _LEAST_ROUNDED:
        return f"{value:,} B" if value else "0"
    return _rounded_size(value)


def rounded(value: int) -> str:
    """Format a number of things: ``1.2 million``. Below one million it is exact."""
    if abs(value) < 1_000_000:
        return f"{value:,}"
    return f"{value / 1e6:,.1f} million"


def make_output(exact: bool = False) -> Output:
    """
    Return an output for standard output, with colours if that is a terminal.

    :param exact: whether to write sizes in tables in bytes on a terminal, too
    """
    console = Console(highlight=False, markup=False, emoji=False)
    return Output(console, console.width if console.is_terminal else None, exact)


def plain_output(width: int | None) -> Output:
    """
    Return an output without colours, for text that may be shown anywhere.

    :param width: columns; ``None``: as many as needed
    """
    console = Console(color_system=None, highlight=False, markup=False, emoji=False)
    return Output(console, width)


class Output:
    """
    Collects lines of text.

    :ivar text: all lines so far
    """

    def __init__(self, console: Console, width: int | None = None, exact: bool = False) -> None:
        """
        Collect lines for a console.

        :param console: describes the colours of its terminal; nothing is written to it
        :param width: columns of the terminal; ``None`` if it is not a terminal
        :param exact: whether to write sizes in tables in bytes. If it is not a terminal, they are
            in bytes in any case.
        """
        self._console = console
        self._rounds = width is not None and not exact
        self._width = width
        is_utf = console.encoding.startswith("utf")
        self._rule, self._ellipsis = ("─", "…") if is_utf else ("-", "...")
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        """All lines so far."""
        return "".join(f"{line}\n" for line in self._lines)

    def line(self, text: str = "", style: str = "", rest: str = "") -> None:
        """
        Add a line.

        :param style: style of ``text``, as in rich
        :param rest: text that follows, without a style
        """
        self._lines.append(self._styled(printable(text), style) + printable(rest))

    def height(self, text: str) -> int:
        """Return the number of lines that a terminal makes of a line."""
        if self._width is None:
            return 1
        return max(1, -(-cell_len(printable(text)) // self._width))

    def elided(self, text: str, most: int) -> str:
        """
        Return a printable text without its middle, if a terminal has too few columns for it.

        Twice as much is left of its end as of its beginning: the end of a path tells more.

        :param most: columns that it may take on a terminal
        """
        if self._width is None or cell_len(text) <= most:
            return text
        room = most - cell_len(self._ellipsis)
        head = set_cell_size(text, room // 3).rstrip()
        tail = set_cell_size(text[::-1], room - cell_len(head)).rstrip()[::-1]
        return head + self._ellipsis + tail

    def wrapped(
        self, text: str, indent: str = "", most: int | None = None, whole: bool = False
    ) -> list[str]:
        """
        Return lines that fit on the terminal, broken at spaces only.

        Words that are too wide lose their middle.

        :param indent: begins the lines after the first one
        :param most: number of lines; what is more is left out, and an ellipsis in its place
        :param whole: whether to break words that are too wide instead
        """
        text = printable(text)
        if self._width is None:
            return [text]
        room = max(self._width, _NARROWEST + cell_len(indent))
        start = len(text) - len(text.lstrip(" "))
        lines, line = [], text[:start]
        is_empty = True
        widest = room - max(cell_len(indent), start)
        for word in self._narrow(text[start:].split(" "), widest, whole):
            if not is_empty and cell_len(line) + 1 + cell_len(word) > room:
                lines.append(line.rstrip())
                line, is_empty = indent, True
            line += word if is_empty else f" {word}"
            is_empty = False
        lines.append(line.rstrip())
        if most is None or len(lines) <= most:
            return lines
        last, wide = lines[most - 1], room - cell_len(self._ellipsis) - 1
        while " " in last.strip() and cell_len(last) > wide:
            last = last[: last.rindex(" ")]
        return [*lines[: most - 1], f"{self.elided(last, wide)} {self._ellipsis}"]

    def _narrow(self, words: Iterable[str], widest: int, whole: bool) -> Iterator[str]:
        """Return words that are not too wide: without their middle, or whole, in pieces."""
        for word in words:
            if whole and cell_len(word) > widest:
                yield from chop_cells(word, widest)
            else:
                yield self.elided(word, widest)

    def _styled(self, text: str, style: str) -> str:
        if not style or self._console.color_system is None:
            return text
        with self._console.capture() as captured:
            self._console.print(Text(text, style), soft_wrap=True, end="")
        return captured.get()

    def paragraph(self, text: str, style: str = "", indent: str = "", rest: str = "") -> None:
        """
        Add a line, broken at spaces if the terminal has too few columns for it.

        :param indent: begins each line
        :param rest: text that follows, without a style
        """
        text = printable(indent + text)
        first, *more = self.wrapped(text + rest, indent)
        is_split = bool(rest) and first.startswith(text)
        self.line(text if is_split else first, style, first[len(text) :] if is_split else "")
        for line in more:
            self.line(line, "" if rest else style)

    def item(self, text: str, indent: str) -> None:
        """
        Add a line of a list. If the terminal has too few columns for it, the rest hangs.

        :param indent: begins the first line
        """
        for line in self.wrapped(indent + text, f"{indent}  ", whole=True):
            self.line(line)

    def table(self, table: Table, choosable: bool = True) -> None:
        """
        Add a table: title, headings, rows, totals, and why values could not be read.

        :param choosable: whether ``--fields`` applies to it
        """
        if not table.rows:
            self.paragraph(f"{table.title}: {table.empty}")
            return
        self.paragraph(table.title, "italic")
        self.line()
        columns, totals = table.columns, table.totals
        rows = [[self.cell(c, c.value(row)) for c in columns] for row in table.rows]
        head = [column.name for column in columns]
        foot = [] if totals is None else self._total(columns, totals)
        rest, label = self._rest(table)
        lines = [head, *rows, *([rest] if rest else []), *([foot] if foot else [])]
        shares = self._shares(table)
        if shares is not None:
            at, added = shares
            # It says nothing without its column, which is left out later, or never.
            share = replace(_SHARE, priority=min(_SHARE.priority, columns[at - 1].priority))
            columns = (*columns[:at], share, *columns[at:])
            pairs = zip(lines, added, strict=True)
            lines = [[*line[:at], cell, *line[at:]] for line, cell in pairs]
            label += label >= at
        fit = fitted(columns, lines, self._width, {0, label})
        columns = tuple(columns[i] for i in fit.shown)
        head, *lines = self._shortened(columns, lines, fit)
        self._row(columns, fit, head, "bold")
        self.line(" " + self._rule * (sum(fit.widths) + fit.gap * (len(fit.widths) - 1)))
        for n, cells in enumerate(lines):
            if foot and n == len(lines) - 1:
                self.line()
                self._row(columns, fit, cells, "bold")
            else:
                status = getattr(table.rows[n], "status", "") if n < len(rows) else ""
                self._row(columns, fit, cells, _STATUS_STYLES.get(status, ""))
        self.line()
        if table.rest is not None:
            number = counted(table.rest.rows, "rows")
            self.paragraph(f"{number} summed up in one line: --top 0 lists all rows", "", "  ")
            self.line()
        self._left_out([c.name for c in table.columns if c not in columns], choosable)
        self.reasons(table)

    def _shares(self, table: Table) -> tuple[int, list[str]] | None:
        """
        Return a column with what share of the total each row has, and where it belongs.

        :return: its index and the cells of all lines; ``None`` if there is none
        """
        at = next((i for i, column in enumerate(table.columns) if column.shares), None)
        if at is None or not self._rounds or table.totals is None:
            return None
        column = table.columns[at]
        total = table.totals.get(column.name)
        if not isinstance(total, int) or total <= 0:
            return None
        values = [column.value(row) for row in table.rows]
        if table.rest is not None:
            values.append(table.rest.totals.get(column.name))
        values.append(total)
        return at + 1, [_SHARE.name, *(_share(value, total) for value in values)]

    def _left_out(self, names: Sequence[str], choosable: bool) -> None:
        """Add a line about the columns for which there is no room."""
        if names:
            how = "--fields chooses columns, and a pipe" if choosable else "A pipe"
            text = f"not shown, since the terminal has {self._width} columns: {', '.join(names)}"
            self.paragraph(f"{text}. {how} (| less -S) has room for all.", "", "  ")
            self.line()

    def _shortened(
        self, columns: Sequence[Column], lines: Sequence[Sequence[str]], fit: Fit
    ) -> list[list[str]]:
        """Return the cells of the columns that are shown, with paths that fit into them."""
        made = [[line[i] for i in fit.shown] for line in lines]
        for n, (column, width) in enumerate(zip(columns, fit.widths, strict=True)):
            if column.type == "memcg":
                paths = short_paths([line[n] for line in made], width, self._ellipsis)
                for line, path in zip(made, paths, strict=True):
                    line[n] = path
        return made

    def reasons(self, table: Table) -> None:
        """Add the reasons why values of a table could not be read."""
        values = [column.value(row) for row in table.rows for column in table.columns]
        values += table.rest.totals.values() if table.rest is not None else ()
        reasons = {value.reason for value in values if isinstance(value, NotRead)}
        for reason in sorted(reasons):
            self.paragraph(f"{_NOT_READ} {reason}", "yellow", "  ")
        if reasons:
            self.line()

    def _row(self, columns: Sequence[Column], fit: Fit, cells: Sequence[str], style: str) -> None:
        """Add a row. It has several lines if cells are folded."""
        parts = [
            self._folded(cell, width) if cell_len(cell) > width else [cell]
            for cell, width in zip(cells, fit.widths, strict=True)
        ]
        for at in range(max(map(len, parts), default=0)):
            line = [part[at] if at < len(part) else "" for part in parts]
            padded = map(_padded, columns, line, fit.widths)
            self.line((" " + (" " * fit.gap).join(padded)).rstrip(), style)

    def _folded(self, cell: str, width: int) -> list[str]:
        """Return the lines of a cell, broken at spaces if possible."""
        lines = Text(cell).wrap(self._console, width, overflow="fold")
        return [line.plain.rstrip() for line in lines]

    def _total(self, columns: Sequence[Column], totals: Mapping[str, Value]) -> list[str]:
        return [
            self.cell(c, totals[c.name]) if c.name in totals else "" if i else "total"
            for i, c in enumerate(columns)
        ]

    def _rest(self, table: Table) -> tuple[list[str], int]:
        """
        Return the cells of the line for rows that are left out, and where it says so.

        There are none if there are no such rows.
        """
        if table.rest is None:
            return [], 0
        totals, label = table.rest.totals, f"({counted(table.rest.rows, 'other rows')})"
        cells = [self.cell(c, totals[c.name]) if c.name in totals else "" for c in table.columns]
        at = cells.index("") if "" in cells else 0
        return [label if i == at and not cell else cell for i, cell in enumerate(cells)], at

    def cell(self, column: Column, value: Value) -> str:
        """Format a value for people."""
        if isinstance(value, (int, float)) and column.type == "share":
            return f"{100 * value:.1f}%"
        if isinstance(value, int) and self._rounds:
            if column.type == "bytes":
                return _short_size(value)
            if column.type == "KiB":
                return _short_size(value * 1024)
            if column.type == "difference" and column.in_bytes:
                return ("+" if value > 0 else "") + _short_size(value)
        if isinstance(value, int) and column.type == "difference":
            return signed(value)
        if isinstance(value, int) and column.type in AMOUNTS:
            return amount(value)
        return _exact(column, value)


def exact_cell(column: Column, value: Value) -> str:
    """Format a value for people, with all digits of its amounts."""
    return _unbounded().cell(column, value)


@cache
def _unbounded() -> Output:
    """Return an output that only formats cells: a page has thousands of them."""
    return plain_output(None)


def _share(value: Value, total: int) -> str:
    """Format a share of a total: ``37 %``. It is 0 or 100 only if that is exact."""
    if not isinstance(value, int):
        return _NOT_READ if isinstance(value, NotRead) else _NONE
    if 0 < 100 * value < total:
        return "<1 %"
    most = 100 if value == total else 99
    return f"{min(most, round(100 * value / total))} %"


def _padded(column: Column, text: str, width: int) -> str:
    space = " " * (width - cell_len(text))
    return space + text if column.type in _RIGHT else text + space


def answer_lines(answer: Answer, output: Output) -> None:
    """Write an answer for people."""
    for table in answer.tables:
        output.table(table)
    if answer.interrupted:
        output.line("Interrupted: the results are incomplete.", "bold yellow")
    for note in answer.notes:
        output.paragraph(note)
    coverage_lines(answer.coverage, output)


def coverage_lines(coverage: Mapping[str, Coverage], output: Output) -> None:
    """Write what could not be read, if anything."""
    for name, part in coverage.items():
        if part.unreadable:
            output.paragraph(f"Not read: {part.unreadable:,} of {name}, for example", "yellow")
            for example in part.examples[:3]:
                text = f"{example.what} at {example.address:#x}: {example.reason}"
                output.paragraph(text, "", "  ")


def scripted(answer: Answer, header: bool = False) -> str:
    """
    Return rows for scripts: exact values separated by tabs.

    An empty line separates two tables, whether they have rows or not. The text of an answer that
    has one is returned as it is.

    :param header: whether the names of the columns are above each table
    """
    if answer.text is not None:
        return "".join(f"{printable(line)}\n" for line in answer.text.splitlines())
    return "\n".join(
        "".join("\t".join(line) + "\n" for line in _exact_lines(table, header))
        for table in answer.tables
    )


def as_csv(answer: Answer) -> str:
    """
    Return rows as CSV: exact values below the names of the columns.

    Values are those of :func:`scripted`. An empty line separates two tables.
    """
    out = io.StringIO()
    for number, table in enumerate(answer.tables):
        if number:
            out.write("\n")
        csv.writer(out, lineterminator="\n").writerows(_exact_lines(table, header=True))
    return out.getvalue()


def _exact_lines(table: Table, header: bool) -> Iterator[list[str]]:
    if header:
        yield [column.name for column in table.columns]
    for row in table.rows:
        yield [_exact(column, column.value(row)) for column in table.columns]


def _exact(column: Column, value: Value) -> str:
    """Format a value for programs."""
    if value is None or (column.type == "node" and value == NUMA_NO_NODE):
        return _NONE
    if isinstance(value, NotRead):
        return _NOT_READ
    if column.type == "address" and isinstance(value, int):
        return f"{value:#x}"
    if column.type == "flag":
        return "yes" if value else "no"
    text = printable(str(value))
    # A name is not taken for a value that is missing.
    return f"\\x{ord(text):02x}" if text in (_NONE, _NOT_READ) else text
