# SPDX-License-Identifier: LGPL-2.1-or-later
"""The table of ``docs/identities.md``: which kernel keeps which identity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from labkit import kernels

from memcg_inspect.report import Report
from support.guests import ROOT

DOCS = ROOT / "docs" / "identities.md"

BEGIN, END = "<!-- identities -->", "<!-- /identities -->"

#: kernel -> identity -> how it ended, and why it is not kept
Table = dict[str, dict[str, tuple[str, str]]]


def found_in(reports: Iterable[Report]) -> dict[str, tuple[str, str]]:
    """Return how each identity ended on all images of one kernel: the same on each."""
    ended: dict[str, tuple[str, str]] = {}
    for report in reports:
        for identity in report.identities:
            now = (identity.status.replace("-", " "), identity.reason or "")
            assert ended.setdefault(identity.name, now) == now, identity
    return ended


def read_table(text: str) -> Table:
    """Read the table in the text of the document."""
    table: Table = defaultdict(dict)
    head: list[str] = []
    for line in text.split(BEGIN)[1].split(END)[0].strip().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and not head:
            head = cells[1:]
        elif line.startswith("| `"):
            for kernel, cell in zip(head, cells[1:], strict=True):
                if cell != "?":
                    table[kernel][cells[0].strip("`")] = cell, ""
        elif line.startswith("- "):
            names, reason = line[2:].split(": ", 1)
            identity, _, kernel = names.partition(" on ")
            identity = identity.strip("`")
            table[kernel][identity] = table[kernel][identity][0], reason
    return dict(table)


def identities() -> set[str]:
    """Return the names of the identities in the document."""
    return {name for column in read_table(DOCS.read_text()).values() for name in column}


def write_table(text: str, table: Table) -> str:
    """Return the text of the document with another table."""
    columns = [kernel for kernel in kernels.names() if kernel in table]
    columns += [name for name in table if name not in columns]
    lines = [
        "| identity | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    names = dict.fromkeys(identity for column in table.values() for identity in column)
    for identity in names:
        cells = [table[kernel].get(identity, ("?", ""))[0] for kernel in columns]
        lines.append(f"| `{identity}` | " + " | ".join(cells) + " |")
    reasons = [
        f"- `{identity}` on {kernel}: {table[kernel][identity][1]}"
        for identity in names
        for kernel in columns
        if table[kernel].get(identity, ("", ""))[1]
    ]
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    parts = [BEGIN, "", *lines, "", *reasons, "", END]
    return before + "\n".join(parts) + after


def check_table(name: str, found: dict[str, tuple[str, str]], write: bool) -> None:
    """
    Compare a column of the table with what was found.

    :param write: write the column first
    """
    if write:
        text = DOCS.read_text()
        DOCS.write_text(write_table(text, {**read_table(text), name: found}))
    assert read_table(DOCS.read_text()).get(name) == found
