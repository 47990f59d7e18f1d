# SPDX-License-Identifier: LGPL-2.1-or-later
"""Amounts, reasons and colours on the first screen of an audit, to the character."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.printed import first_text
from support.reports import WEB, clean, diagnosed, report, row

from memcg_inspect.model import Memcg
from memcg_inspect.report import Identity, Report

#: A memcg whose name needs no address beside it.
ONE = (Memcg(WEB, "/web", 31, "online", None, WEB),)


def section(shown: str, title: str) -> list[str]:
    """Return the lines of a section, without its title."""
    return shown[shown.index(title) :].split("\n\n")[0].splitlines()[1:]


def unexplained(*findings: dict[str, Any]) -> Report:
    """Return a report of findings that nothing explains, each of an identity of its own."""
    [one] = report().findings
    some = [replace(one, identity=f"of {n}", **parts) for n, parts in enumerate(findings)]
    return replace(report(), memcgs=ONE, findings=tuple(some), diagnoses=())


def test_amounts_have_their_units_and_signs() -> None:
    made = unexplained(
        {"unit": "pages", "difference": -1000},
        {"unit": "KiB", "difference": 12},
        {"unit": "bytes", "difference": -1064, "nid": None},
        {"unit": "references", "difference": 1, "nid": -1},
        {"unit": "bytes", "difference": 0, "memcg": None, "nid": None},
        {"unit": "pages", "difference": None, "memcg": None, "nid": 1},
    )
    assert section(first_text(made, None), "Unexplained") == [
        "  of 0: 1 finding, -1,000 pages: /web, node 0",
        "  of 1: 1 finding, +12.0 KiB: /web, node 0",
        "  of 2: 1 finding, -1,064 bytes: /web",
        "  of 3: 1 finding, +1 reference: /web",
        "  of 4: 1 finding, 0 bytes",
        "  of 5: 1 finding: node 1",
    ]
    exact = section(first_text(made, None, exact=True), "Unexplained")
    assert exact[1] == "  of 1: 1 finding, +12 KiB: /web, node 0"


@pytest.mark.parametrize(
    ("unit", "amount", "least"), [("KiB", 2, 2048), ("pages", 3, 3 * 4096), ("references", 7, 7)]
)
def test_the_largest_amounts_come_first(unit: str, amount: int, least: int) -> None:
    """In bytes, whatever their unit is. Those that are alike stay in their order."""
    for size, first in ((least - 1, "of 1"), (least, "of 0"), (least + 1, "of 0")):
        made = unexplained(
            {"unit": "bytes", "difference": -size}, {"unit": unit, "difference": amount}
        )
        lines = section(first_text(made, None), "Unexplained")
        assert lines[0].startswith(f"  {first}: "), size


def test_findings_of_several_nodes_name_none() -> None:
    [one] = report().findings
    both = tuple(replace(one, nid=nid) for nid in (0, 1))
    made = replace(report(), memcgs=ONE, findings=both, diagnoses=())
    assert section(first_text(made, None), "Unexplained") == [
        "  slab: 2 findings, largest +1,064 bytes: /web"
    ]


def test_the_most_frequent_reason_is_shown() -> None:
    reasons = ("rare", "frequent", None, "frequent")
    rows = tuple(replace(row(WEB, 3, 4, "unverifiable"), reason=reason) for reason in reasons)
    identities = (Identity("slab", "unverifiable", 9, 0, "why"),)
    made = replace(clean(), verdict="incomplete", identities=identities, rows=rows)
    title = "Could not be verified"
    said = section(first_text(made, None), title)
    assert said == ["  slab: 4 of 9 rows: frequent (and 2 other reasons)"]
    said = section(first_text(replace(made, rows=(rows[2],)), None), title)
    assert said == ["  slab: 1 of 9 rows: the reason is not known"]
    said = section(first_text(replace(made, rows=rows[:2], identities=()), None), title)
    assert said == ["  slab: 2 of 2 rows: rare (and 1 other reason)"]


def test_identities_with_most_rows_come_first() -> None:
    one = replace(row(WEB, 3, 4, "unverifiable"), reason="why")
    rows = (one, *(replace(one, identity="kmem"),) * 2)
    identities = tuple(Identity(name, "unverifiable", 9, 0, "why") for name in ("slab", "kmem"))
    made = replace(clean(), verdict="incomplete", identities=identities, rows=rows)
    assert section(first_text(made, None), "Could not be verified") == [
        "  kmem: 2 of 9 rows: why",
        "  slab: 1 of 9 rows: why",
    ]


def test_a_counter_may_be_any_word_of_it() -> None:
    """It is one of several words in which the kernel keeps the counter."""
    made = diagnosed()
    [diagnosis] = made.diagnoses
    word = replace(diagnosis.evidence[0], kind="counter", note=None)
    for total, said in (
        (1, ""),
        (2, " (or one of 1 other word)"),
        (9, " (or one of 8 other words)"),
    ):
        changed = replace(diagnosis, evidence=(word,), evidence_total=total)
        shown = first_text(replace(made, memcgs=ONE, diagnoses=(changed,)), None)
        assert f"page 0xffffea0000001000, node 0{said}\n" in shown


def test_what_was_overwritten_comes_with_the_object_before_it() -> None:
    made = diagnosed()
    [diagnosis] = made.diagnoses
    three = tuple(replace(diagnosis.evidence[1], address=n) for n in (0x10, 0x20, 0x30))
    for cause, listed in (("overwritten", ["0x10", "0x20"]), ("counter", ["0x10"])):
        changed = replace(diagnosis, cause=cause, confidence="proved", evidence=three)
        shown = first_text(replace(made, diagnoses=(changed,)), None)
        assert [line for line in shown.splitlines() if line.startswith("   at ")] == [
            f"   at {address}" for address in listed
        ]


def test_titles_have_their_colours() -> None:
    rows = tuple(
        replace(row(WEB, 3, 4), status=status, reason="why")
        for status in ("unverifiable", "moving", "in-flight")
    )
    whole = replace(diagnosed(), rows=rows, notes=("a note",))
    lines = first_text(whole, colour=True).splitlines()
    red, yellow = ("\x1b[1;31m", "\x1b[1;33m")
    titles = [line.removesuffix("\x1b[0m") for line in lines if line.startswith(("\x1b[1;3",))]
    assert titles == [
        f"{red}FINDINGS\x1b[0m: 2 findings; 0 of 4 rows differ",
        f"{red}Diagnoses",
        f"{red}Unexplained: 1 finding (memcg-inspect audit --findings -c vmcore)",
        f"{yellow}Notes",
        f"{yellow}Could not be verified",
        f"{yellow}Were changing",
        f"{yellow}In flight, half done on a stopped CPU",
        f"{yellow}Not read",
    ]
