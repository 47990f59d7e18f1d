# SPDX-License-Identifier: LGPL-2.1-or-later
"""Blocks of documents are written, shortened and compared."""

from __future__ import annotations

import pytest
from docblocks import (
    begin,
    comparable,
    differences,
    end,
    extract,
    fields,
    replace,
    shortened,
)

from memcg_inspect.tables import Column

DOCUMENT = f"before\n{begin('one')}\nold\n{end('one')}\nbetween\n{begin('two')}\n{end('two')}\n"


def test_replace_changes_one_block() -> None:
    once = replace(DOCUMENT, "one", "\nnew\nlines\n\n")
    assert once == DOCUMENT.replace("old", "new\nlines")
    assert replace(once, "one", "new\nlines") == once
    assert replace(DOCUMENT, "two", "more") == DOCUMENT.replace(end("two"), "more\n" + end("two"))


@pytest.mark.parametrize(
    "text",
    [
        "no block",
        begin("one") + "\n",
        end("one"),
        f"{end('one')}\n{begin('one')}\n",
        DOCUMENT + DOCUMENT,
    ],
)
def test_replace_refuses_a_broken_document(text: str) -> None:
    with pytest.raises(ValueError, match="one block 'one'"):
        replace(text, "one", "body")


RULE = " " + "─" * 30 + " "


def table(name: str, rows: int) -> str:
    """A table as the audit prints it, padded with spaces."""
    lines = [f"{name}: exact   ", "           ", " memcg   ", RULE]
    return "\n".join([*lines, *(f" row {n}   " for n in range(rows)), "      "])


def test_long_tables_are_shortened_and_say_so() -> None:
    output = f"EXACT: yes\n\n{table('slab', 9)}\n{table('kmem', 3)}\nafter\n"
    assert shortened(output, ("slab", "kmem"), most_rows=2).splitlines() == [
        *("EXACT: yes", "", "slab: exact", "", " memcg", RULE.rstrip(), " row 0", " row 1"),
        *(" [7 rows more]", "", "kmem: exact", "", " memcg", RULE.rstrip(), " row 0", " row 1"),
        *(" [1 row more]", "", "after"),
    ]


def test_other_tables_are_left_out_and_say_so() -> None:
    output = f"EXACT: yes\n\n{table('slab', 2)}\n{table('kmem', 1)}\nafter\n"
    assert shortened(output, ()).splitlines() == [
        *("EXACT: yes", "", "slab: exact [2 rows]", "", "kmem: exact [1 row]", "", "after"),
    ]


def test_what_is_no_table_is_left_alone() -> None:
    output = "EXACT: yes\nLinux\n\nsock: exact, nothing charged\n\nRead 7 memcgs.\n"
    assert shortened(output, ()) == output
    assert shortened(shortened(output, ()), ()) == output


AUDIT = """\
EXACT: 3 rows
Linux 7.3.4+deb13 (vmcore), 4 nodes

identities

 name   status   rows
 ──────────────────────
 slab   exact      48

slab: exact

 memcg    node   found
 ────────────────────────
 /files   0      4,000
 /web     1      -12

Finding 1: claims 2 pages less
  candidates, likeliest first, the first 2 equally likely:
    0xff110000a, dentry object, 200 bytes
    0xff110000b, kmalloc-1k object, 1,024 bytes
    0xff110000c, 100 bytes, charged to /web
    and 1,000 more, 3 of them as likely as the last one listed

Read 7 memcgs, 2 nodes,
3 names in 0.16 s.
"""


def test_images_differ_in_amounts_only() -> None:
    other = AUDIT
    for old, new in (
        ("3 rows", "1 row"), ("7.3.4+deb13", "7.3.9"), ("48", " 7"), ("4,000", "77"),
        (" /web     1      -12\n", ""), ("2 pages", "1 page"), ("0.16", "3.1"),
        ("    0xff110000a, dentry object, 200 bytes\n", ""),
        (", likeliest first, the first 2 equally likely:", ":"),
        ("    0xff110000c, 100 bytes, charged to /web\n", ""),
        ("    and 1,000 more, 3 of them as likely as the last one listed\n", ""),
        ("2 nodes,\n3", "12 nodes, 3"),
    ):  # fmt: skip
        assert old in other
        other = other.replace(old, new)
    assert differences(AUDIT, other) == []
    assert differences(AUDIT, other, exactly=True)
    assert "Read N memcgs, N nodes, N names in N s." in comparable(AUDIT)


def test_a_charge_may_be_half_done_when_a_machine_is_stopped() -> None:
    head = "memory.current of /churn\n\n what   bytes\n ────────────\n not found   0\n\n"
    note = "Part of memory.current was not found, or more was found than it says. Why?"
    for last in ("Kernel memory is 4 bytes in all.", ""):
        assert differences(f"{head}{last}", f"{head}{last}\n{note}") == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2 pages", "1 pages"),
        ("claims", "has"),
        ("EXACT", "FINDINGS"),
        (" slab   exact", " slab   moving"),
        (" slab   exact      48\n", ""),
        ("found", "counted"),
        ("Linux", "kernel"),
        ("object", "thing"),
        ("candidates", "evidence"),
    ],
)
def test_what_a_run_says_otherwise_is_a_difference(old: str, new: str) -> None:
    assert old in AUDIT
    assert any(line.startswith("-") for line in differences(AUDIT, AUDIT.replace(old, new))[2:])


def test_fields_are_listed_by_table() -> None:
    first = Column("count", "count", "of one")
    second = Column("count", "count", "of another", shown=False)
    assert fields([[first], [second]]).splitlines() == [
        "```text",
        "count  count  of one",
        "",
        "count  count  of another (if asked for)",
        "```",
    ]


def test_extract_is_what_replace_put_there() -> None:
    assert extract(replace(DOCUMENT, "one", "new\nlines"), "one") == "new\nlines"
