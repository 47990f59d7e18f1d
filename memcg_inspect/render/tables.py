# SPDX-License-Identifier: LGPL-2.1-or-later
"""Answers of views: as tables for a terminal, tab separated for scripts, and as JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from memcg_inspect.model import NUMA_NO_NODE
from memcg_inspect.render.json_report import SCHEMA, coverage_document, image_document
from memcg_inspect.render.terminal import box_style, print_coverage, say
from memcg_inspect.render.text import amount, printable
from memcg_inspect.tables import AMOUNTS, Answer, Column, NotRead, Table, Value

__all__ = ("answer_to_json", "print_answer", "print_scripted", "print_text")

_RIGHT = AMOUNTS | {"number", "node"}
#: In place of values that do not apply, and of those that could not be read.
_NONE, _NOT_READ = "-", "?"
#: Wider than any table.
_UNBOUNDED = 1 << 20


def print_answer(answer: Answer, console: Console) -> None:
    """Print an answer for people."""
    for number, table in enumerate(answer.tables):
        if number:
            console.print()
        _print_table(table, console)
    if answer.interrupted:
        say(console, "Interrupted: this is what was found so far.", "bold yellow")
    for note in answer.notes:
        say(console, note)
    print_coverage(answer.coverage, console)


def print_scripted(answer: Answer, console: Console) -> None:
    """
    Print rows for scripts: no headings, values exact, separated by tabs.

    Tables have columns of their own: an empty line is between two, whether they have rows or not.
    """
    for number, table in enumerate(answer.tables):
        if number:
            console.file.write("\n")
        for row in table.rows:
            cells = (_exact(c, v) for c, v in zip(table.columns, row, strict=True))
            console.file.write("\t".join(cells) + "\n")


def print_text(answer: Answer, console: Console) -> None:
    """Print the text of an answer that has one, line by line."""
    for line in (answer.text or "").splitlines():
        console.file.write(printable(line) + "\n")


def answer_to_json(answer: Answer) -> str:
    """Write an answer as one JSON document."""
    document = {
        "schema": SCHEMA,
        "command": answer.command,
        "image": image_document(answer.image),
        "interrupted": answer.interrupted,
        "whole": answer.is_whole,
        "tables": [_table_document(table) for table in answer.tables],
        "notes": list(answer.notes),
        "coverage": {name: coverage_document(c) for name, c in answer.coverage.items()},
    }
    return json.dumps(document, indent=1)


def _print_table(table: Table, console: Console) -> None:
    if not table.rows:
        say(console, f"{table.title}: {table.empty}")
        return
    # A title of the table itself would be wrapped to the width of that.
    say(console, table.title, "italic")
    shown = RichTable(
        box=box_style(),
        pad_edge=False,
        show_footer=table.totals is not None,
    )
    for i, column in enumerate(table.columns):
        right = column.kind in _RIGHT
        footer = "" if table.totals is None else _total(column, table.totals, i == 0)
        shown.add_column(
            Text(column.name),
            justify="right" if right else "left",
            no_wrap=right or column.kind == "address",
            overflow="fold",
            footer=Text(footer),
        )
    for row in table.rows:
        cells = (_cell(c, v) for c, v in zip(table.columns, row, strict=True))
        shown.add_row(*map(Text, cells))
    _print_whole(shown, console)
    reasons = {v.reason for row in table.rows for v in row if isinstance(v, NotRead)}
    for reason in sorted(reasons):
        say(console, f"  {_NOT_READ} {reason}", "yellow")


def _print_whole(table: RichTable, console: Console) -> None:
    """Print a table that may be wider than the console, which would cut values where it ends."""
    before = console.width
    natural = Measurement.get(console, console.options.update_width(_UNBOUNDED), table).maximum
    console.width = max(before, natural)
    try:
        console.print(table, crop=False)
    finally:
        console.width = before


def _total(column: Column, totals: Any, is_first: bool) -> str:
    if column.name in totals:
        return _cell(column, totals[column.name])
    return "total" if is_first else ""


def _cell(column: Column, value: Value) -> str:
    """A value for people."""
    if value is None or (column.kind == "node" and value == NUMA_NO_NODE):
        return _NONE
    if isinstance(value, NotRead):
        return _NOT_READ
    if column.kind == "share" and isinstance(value, (int, float)):
        return f"{100 * value:.1f}%"
    if column.kind in AMOUNTS and isinstance(value, int):
        return amount(value)
    return _exact(column, value)


def _exact(column: Column, value: Value) -> str:
    """A value for programs."""
    if value is None or (column.kind == "node" and value == NUMA_NO_NODE):
        return _NONE
    if isinstance(value, NotRead):
        return _NOT_READ
    if column.kind == "address" and isinstance(value, int):
        return f"{value:#x}"
    if column.kind == "flag":
        return "yes" if value else "no"
    return printable(str(value))


def _table_document(table: Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "columns": [{"name": c.name, "kind": c.kind, "help": c.help} for c in table.columns],
        "rows": [_row_document(table, row) for row in table.rows],
        "totals": None
        if table.totals is None
        else {name: _plain(table.columns, name, value) for name, value in table.totals.items()},
    }


def _row_document(table: Table, row: tuple[Value, ...]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for column, value in zip(table.columns, row, strict=True):
        document[column.name] = _json(column, value)
        if isinstance(value, NotRead):
            reasons[column.name] = value.reason
    if reasons:
        document["not_read"] = reasons
    return document


def _plain(columns: tuple[Column, ...], name: str, value: Value) -> Any:
    column = next((c for c in columns if c.name == name), None)
    return None if isinstance(value, NotRead) else value if column is None else _json(column, value)


def _json(column: Column, value: Value) -> Any:
    if value is None or isinstance(value, NotRead):
        return None
    if column.kind == "node" and value == NUMA_NO_NODE:
        return None
    if column.kind == "address" and isinstance(value, int):
        return f"{value:#x}"
    return bool(value) if column.kind == "flag" else value
