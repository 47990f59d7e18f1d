# SPDX-License-Identifier: LGPL-2.1-or-later
"""The table of ``docs/identities.md``: which kernel keeps which identity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from labkit import kernels
from labkit.store import locked, write_atomically

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
    """Read the tables in the text of the document."""
    table: Table = defaultdict(dict)
    head: list[str] = []
    for line in text.split(BEGIN)[1].split(END)[0].strip().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| identity"):
            head = cells[1:]
        elif line.startswith("| `"):
            for kernel, cell in zip(head, cells[1:], strict=True):
                if cell != "?":
                    table[kernel][cells[0].strip("`")] = cell, ""
        elif line.startswith("- "):
            names, reason = line[2:].split(": ", 1)
            identity, _, kernels_of_reason = names.partition(" on ")
            identity = identity.strip("`")
            for kernel in kernels_of_reason.split("; "):
                table[kernel][identity] = table[kernel][identity][0], reason
    return dict(table)


def identities() -> set[str]:
    """Return the names of the identities in the document."""
    return {name for column in read_table(DOCS.read_text()).values() for name in column}


def write_table(text: str, table: Table) -> str:
    """Return the text of the document with other tables: of x86-64, and of other architectures."""
    columns = [kernel for kernel in kernels.names() if kernel in table]
    columns += [name for name in table if name not in columns]
    of_others = [kernel for kernel in columns if "/" in kernel]
    own = [kernel for kernel in columns if kernel not in of_others]
    parts = [*_lines(table, own)]
    if of_others:
        parts += ["Kernels of other architectures:", "", *_lines(table, of_others)]
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return before + "\n".join([BEGIN, "", *parts, END]) + after


def _lines(table: Table, columns: Sequence[str]) -> Iterator[str]:
    """Yield a table of some kernels, and the reasons for what they do not keep."""
    yield "| identity | " + " | ".join(columns) + " |"
    yield "|---|" + "---|" * len(columns)
    names = dict.fromkeys(identity for column in table.values() for identity in column)
    reasons: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for identity in names:
        cells = [table[kernel].get(identity, ("?", "")) for kernel in columns]
        yield f"| `{identity}` | " + " | ".join(cell for cell, _ in cells) + " |"
        for kernel, (_, reason) in zip(columns, cells, strict=True):
            if reason:
                reasons[identity, reason].append(kernel)
    yield ""
    for (identity, reason), some in reasons.items():
        yield f"- `{identity}` on {'; '.join(some)}: {reason}"
    yield ""


def check_table(name: str, found: dict[str, tuple[str, str]], write: bool) -> None:
    """
    Compare a column of the table with what was found.

    :param write: write the column first
    """
    if write:
        with locked("identity-table"):  # processes of one test run share the document
            text = DOCS.read_text()
            # Others read it meanwhile.
            write_atomically(DOCS, write_table(text, {**read_table(text), name: found}).encode())
    assert read_table(DOCS.read_text()).get(name) == found
