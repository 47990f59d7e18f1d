# SPDX-License-Identifier: LGPL-2.1-or-later
"""Single lines of a whole report, to the character."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.printed import findings_text, text
from support.reports import OBJCG, WEB, clean, report, row

from memcg_inspect.model import Coverage
from memcg_inspect.render.report import evidence_text
from memcg_inspect.report import Evidence


@pytest.mark.parametrize(
    ("verdict", "colour"), [("exact", 32), ("findings", 31), ("incomplete", 33), ("moving", 33)]
)
def test_verdicts_have_their_colours(verdict: str, colour: int) -> None:
    made = replace(clean(), verdict=verdict)
    assert text(made, colour=True).startswith(f"\x1b[1;{colour}m{verdict.upper()}\x1b[0m: ")


def test_what_is_doubtful_is_coloured() -> None:
    flying = replace(row(WEB, 3, 4, "in-flight"), reason="a charge is half done")
    made = replace(report(), rows=(flying,), interrupted=True)
    lines = text(made, colour=True).splitlines()
    assert "\x1b[1;33mInterrupted: the results are incomplete\x1b[0m" in lines
    assert "\x1b[33m  a charge is half done\x1b[0m" in lines
    assert any(line.startswith("\x1b[1;31mFinding 1:\x1b[0m /web: ") for line in lines)


@pytest.mark.parametrize(
    ("accounting", "said"),
    [
        ("memcg", "one obj_cgroup per memcg"),
        ("objcg-per-node", "one obj_cgroup per memcg and node"),
        ("kmem-per-node", "kernel memory counted per memcg and node"),
    ],
)
def test_how_a_kernel_accounts(accounting: str, said: str) -> None:
    made = clean()
    made = replace(made, image=replace(made.image, accounting=accounting))  # type: ignore[arg-type]
    assert text(made).splitlines()[1] == f"Accounting: {said}"


def test_memory_is_what_was_read_and_what_was_not() -> None:
    made = replace(clean(), coverage={"pages": Coverage(1024, 256), "slab": Coverage(0)})
    start, end = "Linux 7.3.0 (vmcore), 1 node, 2 CPUs, ", "3 memcgs (1 removed)"
    assert text(made).splitlines()[2] == f"{start}5.0 MiB of memory, {end}"
    assert text(replace(made, coverage={})).splitlines()[2] == f"{start}{end}"
    # What there is nothing of was not read.
    made = replace(made, coverage={"pages": Coverage(7), "slab": Coverage(0), "lru": Coverage(9)})
    assert "Read 7 pages, 9 lru in 0.03 s." in text(made).splitlines()


def test_a_table_says_if_it_has_not_all_rows() -> None:
    made = report()
    assert "\nslab: findings (2 of 4 rows)\n" in findings_text(made)
    assert "\nslab: findings\n" in findings_text(replace(made, rows=made.rows[2:]))


@pytest.mark.parametrize(("total", "end"), [(2, ""), (3, "    and 1 more"), (4, "    and 2 more")])
def test_evidence_that_is_not_listed(total: int, end: str) -> None:
    [finding] = report().findings
    made = replace(report(), findings=(replace(finding, evidence_total=total),))
    lines = [line for line in text(made).splitlines() if line.startswith("    and ")]
    assert lines == ([end] if end else [])


def test_an_object_of_an_obj_cgroup_that_has_no_memcg() -> None:
    evidence = Evidence(0x10, "slab", objcg=OBJCG, site="mm/a.c:7 func:f")
    assert evidence_text(evidence, {}) == f"0x10, objcg {OBJCG:#x}, allocated at mm/a.c:7 func:f"
    charged = replace(evidence, memcg=WEB, site=None)
    assert evidence_text(charged, {}) == f"0x10, charged to {WEB:#x} (objcg {OBJCG:#x})"
