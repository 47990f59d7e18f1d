# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Blocks of documents that a run writes: figures and output are measured, never typed.

A block stands between two comments of HTML, which a reader of the page does not see:

    <!-- begin demo: written by scripts/update-docs -->
    <!-- end demo -->
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Any

#: Rows shown of one table; the rest is counted.
MOST_ROWS = 6

_RULE = re.compile(r"^ *[─━]{20,} *$")


def begin(name: str) -> str:
    """The line that opens a block."""
    return f"<!-- begin {name}: written by scripts/update-docs -->"


def end(name: str) -> str:
    """The line that closes it."""
    return f"<!-- end {name} -->"


def replace(text: str, name: str, body: str) -> str:
    """Put *body* into a block of a document."""
    head, tail = begin(name) + "\n", end(name)
    if text.count(head) != 1 or text.count(tail) != 1 or text.index(head) > text.index(tail):
        raise ValueError(f"there must be one block {name!r}, and its end after its begin")
    before, rest = text.split(head)
    after = rest.split(tail)[1]
    return before + head + body.strip("\n") + "\n" + tail + after


def fenced(body: str) -> str:
    """Show something as it is."""
    return "```text\n" + "\n".join(line.rstrip() for line in body.strip("\n").split("\n")) + "\n```"


def fields(tables: Sequence[Sequence[Any]]) -> str:
    """
    List the fields of a view, table by table.

    :param tables: for each table, its columns: ``memcg_inspect.tables.Column``
    """
    listed = [column for table in tables for column in table]
    names, types = max(len(c.name) for c in listed), max(len(c.type) for c in listed)
    parts = [
        "\n".join(
            f"{c.name:{names}}  {c.type:{types}}  {c.help}{'' if c.shown else ' (if asked for)'}"
            for c in table
        )
        for table in tables
    ]
    return fenced("\n\n".join(parts))


def shortened(
    output: str,
    tables: Container[str] | None,
    most_rows: int = MOST_ROWS,
    whole: Container[str] = (),
) -> str:
    """
    Leave out tables, and the later rows of long ones, and say so.

    :param tables: names, the first word of a title, of the tables to show; ``None`` for all
    :param whole: those of which no row is left out
    """
    parts: list[str] = []
    for part in re.split(r"\n(?:[ \t]*\n)+", output.strip("\n")):
        lines = [line.rstrip() for line in part.split("\n")]
        rule = next((n for n, line in enumerate(lines) if _RULE.match(line)), None)
        if rule is None:
            parts.append("\n".join(lines))
            continue
        rows = lines[rule + 1 :]
        if parts and tables is not None and parts[-1].split(":")[0] not in tables:
            parts[-1] += f" [{_rows(len(rows))}]"
            continue
        if len(rows) > most_rows and not (parts and parts[-1].split(":")[0] in whole):
            rows[most_rows:] = [f" [{_rows(len(rows) - most_rows)} more]"]
        parts.append("\n".join([*lines[: rule + 1], *rows]))
    return "\n\n".join(parts) + "\n"


def _rows(number: int) -> str:
    return f"{number} row{'s' * (number != 1)}"


def with_few_candidates(output: str, most: int = 2) -> str:
    """Leave out the later candidates of findings, and say so."""
    lines: list[str] = []
    listed = 0
    for line in [*output.split("\n"), ""]:
        if line.startswith("    0x"):
            listed += 1
            if listed <= most:
                lines.append(line)
            continue
        if listed > most:
            lines.append(f"    [{listed - most} more]")
        listed = 0
        lines.append(line)
    return "\n".join(lines[:-1])
