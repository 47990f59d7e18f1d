# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Blocks of documents that a run writes.

A block is between two comments of HTML, which a reader of the page does not see:

    <!-- begin demo: written by scripts/update-docs -->
    <!-- end demo -->
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Sequence
from typing import Any

#: Rows shown of one table; the rest is counted.
MOST_ROWS = 6

_RULE = re.compile(r"^ *[─━]{20,} *$")


def begin(name: str) -> str:
    """Return the line that opens a block."""
    return f"<!-- begin {name}: written by scripts/update-docs -->"


def end(name: str) -> str:
    """Return the line that closes a block."""
    return f"<!-- end {name} -->"


def replace(text: str, name: str, body: str) -> str:
    """
    Return the text of a document with another body in a block.

    :raises ValueError: if the document does not have the block exactly once
    """
    head, tail = begin(name) + "\n", end(name)
    if text.count(head) != 1 or text.count(tail) != 1 or text.index(head) > text.index(tail):
        raise ValueError(f"there must be one block {name!r}, and its end after its begin")
    before, rest = text.split(head)
    after = rest.split(tail)[1]
    return before + head + body.strip("\n") + "\n" + tail + after


def extract(text: str, name: str) -> str:
    """Return what is in a block of a document."""
    return text.split(begin(name) + "\n")[1].split(end(name))[0].strip("\n")


def fenced(body: str) -> str:
    """Return text as a fenced block of Markdown."""
    return "```text\n" + "\n".join(line.rstrip() for line in body.strip("\n").split("\n")) + "\n```"


def fields(tables: Sequence[Sequence[Any]]) -> str:
    """
    Return a list of the fields of a view, table by table.

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
    Return output without some tables and without the later rows of long ones, which it counts.

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


_UNITS = "page|byte|reference|row|node|CPU|memcg|task|object"
#: Candidates that are no slab objects, and those that are not listed: how many there are, and how
#: likely, depends on the image. So does whether a charge was half done.
_MAY_BE = re.compile(
    r"    (0x[0-9a-f]+, [\d,]+ bytes, charged to |and [\d,]+ more).*"
    r"|Part of memory\.current was not found, or more was found than it says\. .*"
)
#: What differs from image to image, and what takes its place in a comparison.
_VARIES = (
    (re.compile(r"(of caches that always account: [^:]*): .*"), r"\1: CACHES"),
    (re.compile(r"\b0x[0-9a-f]+"), "ADDRESS"),
    (re.compile(r"ADDRESS, [\w-]+ object"), "ADDRESS, CACHE object"),
    (re.compile(r"candidates, [\w, ]+:$"), "candidates:"),
    (re.compile(r" \(the likeliest of [\w, ]+\)$"), ""),
    (re.compile(r"\b[0-9]+\.[0-9]+\.[0-9]+[\w.+-]*"), "RELEASE"),
    # Any number may be 1, but "1 pages" is a mistake.
    (re.compile(rf"(?<![\w.,/+-])1 ({_UNITS})\b"), r"N \1s"),
    (re.compile(rf"(?<![\w.,/+-])1 ({_UNITS})s\b"), r"ONE \1s"),
    (re.compile(r"[+-]?\b\d[\d,]*(\.\d+)?"), "N"),
    (re.compile(r"\bN [KMGT]iB\b"), "N bytes"),
    (re.compile(r"[ \t]+"), " "),
    (re.compile(r"─+"), "─"),
)


def comparable(body: str) -> list[str]:
    """
    Return what a block says on every image of its kind.

    Addresses, amounts, releases and padding are replaced. Of a table the title and the head are
    left, since which rows there are depends on the image; the table of identities is left whole.
    Lines that follow one another and are now the same count once, as candidates do.
    """
    lines: list[str] = []
    title = ""
    for part in re.split(r"\n(?:[ \t]*\n)+", body.strip("\n")):
        rows = part.split("\n")
        rule = next((n for n, line in enumerate(rows) if _RULE.match(line)), None)
        if rule is None:
            title = rows[-1]
            # How a long line is folded depends on the numbers in it.
            rows = [" ".join(rows)] if part.startswith("Read ") else rows
        elif title != "identities":
            rows = rows[: rule + 1]
        lines += [*(_replaced(row) for row in rows if not _MAY_BE.fullmatch(row)), ""]
    return [line for line, before in zip(lines, ["", *lines], strict=False) if line != before]


def _replaced(line: str) -> str:
    for pattern, text in _VARIES:
        line = pattern.sub(text, line)
    return line.strip()


def differences(before: str, after: str, exactly: bool = False) -> list[str]:
    """
    Compare a block with a new one.

    :param exactly: compare all of it, and not only what is the same on every image
    :return: lines of a diff; empty if there is none
    """
    old, new = (
        body.strip().split("\n") if exactly else comparable(body) for body in (before, after)
    )
    return list(difflib.unified_diff(old, new, "document", "run", n=1, lineterm=""))
