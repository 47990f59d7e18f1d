# SPDX-License-Identifier: LGPL-2.1-or-later
"""One first screen with everything, line by line, and its colours."""

from __future__ import annotations

import re
from dataclasses import replace

from support.printed import first_text, output
from support.reports import GONE, ITEM, OBJCG, ROOT, WEB, diagnosed, report, row

from memcg_inspect.model import NUMA_NO_NODE, Coverage
from memcg_inspect.render.first_screen import diagnosis_lines
from memcg_inspect.render.typed import Typed
from memcg_inspect.report import (
    Charged,
    Diagnosis,
    Effect,
    Evidence,
    Finding,
    Identity,
    Report,
    Row,
)


def finding(
    identity: str, difference: int | None, unit: str, nid: int | None, memcg: int | None
) -> Finding:
    return Finding(
        identity=identity, kind="made", memcg=memcg, objcg=None, nid=nid, item="x",
        unit=unit,  # type: ignore[arg-type]
        difference=difference, what="made", evidence_is="candidates",
    )  # fmt: skip


def everything() -> Report:
    """Return a report with each part of the screen."""
    one = diagnosed()
    named = {m.address: m for m in one.memcgs}
    half = Diagnosis(
        cause="half-done",
        what=f"the charge of a slab object of memcg {WEB:#x} is half done: CPU 1 was in f()",
        confidence="likely",
        memcgs=(WEB,),
        nid=1,
        amount=208,
        unit="bytes",
        evidence=(Evidence(0xFFFF888000F00000, "slab", nid=1, bytes=208),),
        evidence_total=1,
        signature=(Effect("slab", WEB, None, 1, ITEM, "bytes", 208, 208),),
    )
    read, missed = Coverage(5), Coverage(7)
    missed.miss("vector", 0xABC0, "not in the image")
    rows: tuple[Row, ...] = (
        row(ROOT, 1, 1),
        row(WEB, 3, 4, "differs"),
        replace(row(WEB, 0, 208, "in-flight", nid=1), reason="shown by a stack"),
        replace(row(GONE, 0, 16, "in-flight"), reason="a CPU may have it half done"),
        replace(row(WEB, 3, 4, "unverifiable"), identity="kmem", reason="vectors are missing"),
        replace(row(ROOT, 3, 4, "unverifiable"), identity="kmem", reason="vectors are missing"),
        replace(row(GONE, 3, 4, "unverifiable"), identity="kmem", reason="something else"),
        replace(row(GONE, 3, 4, "unverifiable"), identity="usage", reason=None),
        replace(row(WEB, 3, 4, "moving"), identity="lru"),
        replace(row(GONE, 3, 4, "moving"), identity="lru"),
        replace(row(0, 3, 4, "moving", nid=1), identity="node_slab", memcg=None),
        replace(row(0, 3, 4, "moving", nid=0), identity="node_slab", memcg=None),
        replace(row(0, 3, 4, "moving"), identity="updated", memcg=None, nid=None),
    )
    return replace(
        one,
        memcgs=(*(m for m in one.memcgs if m.address != GONE), replace(named[GONE], path="/gone")),
        identities=(
            Identity("slab", "findings", 5, 1),
            Identity("kmem", "unverifiable", 3, 0, "vectors are missing"),
            Identity("usage", "unverifiable", 2, 0, "made"),
            Identity("lru", "moving", 4, 0),
            Identity("zswap", "not-kept", 0, 0, "this kernel has no zswap"),
        ),
        rows=rows,
        findings=(
            one.findings[0],
            finding("sock", 3, "pages", None, WEB),
            finding("sock", -5, "pages", None, ROOT),
            finding("kernel_stack", 16, "KiB", 1, WEB),
            finding("slab", -13_000, "bytes", NUMA_NO_NODE, None),
            finding("objcg_sets", None, "references", 0, WEB),
            finding("references", -1, "references", 0, WEB),
            finding("references", 2, "references", 1, WEB),
        ),
        half_done=(half,),
        charges=(Charged("slab", 300_000, 1_500), Charged("lru", 4_096, 1)),
        not_accounted=("BPF", "sockets"),
        notes=("Something is worth knowing.",),
        coverage={"pages": Coverage(262144), "objcgs": read, "slab": missed},
        interrupted=True,
        looks=3,
    )


HEAD = [
    "Accounting: one obj_cgroup per memcg and node",
    "Linux 7.3.0 (vmcore), 2 nodes, 2 CPUs, 1.0 GiB of memory, 3 memcgs (1 removed)",
    "Interrupted: the results are incomplete",
    "Samples: 3, since the kernel was running",
    "Not accounted on this machine: BPF, sockets",
]
MORE = "More: --findings, --identities, --rows, --skew; --all prints everything"


def test_causes_and_what_could_not_be_read() -> None:
    made = everything()
    made = replace(made, findings=made.findings[:1], rows=made.rows[:4])
    assert first_text(made, 200).splitlines() == [
        "FINDINGS: 1 finding; 1 of 14 rows differ",
        "Checked: 4 identities, 14 rows, 297.0 KiB of charges: 1,501 objects and pages",
        *HEAD,
        "",
        "Diagnoses",
        f"1. likely, 1,064 bytes, node 0: {ITEM} on node 0 is 1,064 bytes too high",
        "   /web, /",
        "   at 0xffff888000f00000, dentry object, 200 bytes, charged to /web (objcg "
        f"{OBJCG:#x}), page 0xffffea0000001000, node 0, a note (the likeliest of 20)",
        "   or: 1,064 bytes of freed slab objects are still charged",
        "   $ memcg-inspect who 0xffff888000f00000 -c vmcore",
        "",
        "Notes",
        "  Something is worth knowing.",
        "",
        "In flight, half done on a stopped CPU",
        "2. likely, 208 bytes, node 1: the charge of a slab object of /web is half done: CPU 1 was "
        "in f()",
        "   at 0xffff888000f00000, 208 bytes, node 1",
        "   $ memcg-inspect who 0xffff888000f00000 -c vmcore",
        "  slab: 1 of 5 rows: a CPU may have it half done",
        "",
        "Not read",
        "  slab: 1 of 8, for example vector at 0xabc0: not in the image",
        "",
        MORE,
    ]


def test_findings_and_rows_without_a_cause() -> None:
    made = replace(everything(), diagnoses=(), half_done=(), notes=(), coverage={})
    small = (finding("percpu", 3000, "bytes", None, WEB), finding("swap", 1, "pages", None, WEB))
    made = replace(made, findings=made.findings + small)
    assert first_text(made, 200).splitlines() == [
        "FINDINGS: 10 findings; 1 of 14 rows differ",
        "Checked: 3 of 4 identities, 10 of 14 rows, 297.0 KiB of charges: 1,501 objects and pages",
        *(line.replace(", 1.0 GiB of memory", "") for line in HEAD),
        "",
        "Unexplained: 10 findings (memcg-inspect audit --findings -c vmcore)",
        "  sock: 2 findings, largest -5 pages: /, /web",
        "  kernel_stack: 1 finding, +16.0 KiB: /web, node 1",
        "  slab: 2 findings, largest -12.7 KiB: /web",
        "  swap: 1 finding, +1 page: /web",
        "  percpu: 1 finding, +3,000 bytes: /web",
        "  references: 2 findings, largest +2 references: /web",
        "  objcg_sets: 1 finding: /web, node 0",
        "",
        "Could not be verified",
        "  kmem: 3 of 3 rows: vectors are missing (and 1 other reason)",
        "  usage: 1 of 2 rows: the reason is not known",
        "",
        "Were changing",
        "  lru: 2 of 4 rows: /web, /gone",
        "  node_slab: 2 of 2 rows: node 0, node 1",
        "  updated: 1 of 1 row: -",
        "",
        "In flight, half done on a stopped CPU",
        "  slab: 2 of 5 rows: shown by a stack (and 1 other reason)",
        "",
        MORE,
    ]


def test_what_does_not_fit_is_counted_in_singular_and_plural() -> None:
    made = everything()
    many = replace(made, diagnoses=(), notes=("a note of words " * 60,) * 2)
    shown = first_text(many, 60)
    assert re.search(r"^  and 1 more note \(--all\)$", shown, re.MULTILINE)
    assert re.search(r"^  and \d more (identity|identities) \(--findings\)$", shown, re.MULTILINE)
    causes = replace(made, findings=made.findings[:1], rows=made.rows[:3], notes=many.notes)
    for half, said in ((1, "and 1 more cause ("), (9, "and 9 more causes (")):
        assert said in first_text(replace(causes, half_done=made.half_done * half), 70)


def test_what_is_important_is_coloured() -> None:
    made = everything()
    red, yellow, plain = "\x1b[1;31m", "\x1b[1;33m", "\x1b[0m"
    shown = first_text(replace(made, findings=made.findings[:1]), 200, colour=True)
    assert shown.startswith(f"{red}FINDINGS{plain}: 1 finding; 1 of 14 rows differ\n")
    for title in ("Notes", "Could not be verified", "Were changing"):
        assert f"\n{yellow}{title}{plain}\n" in shown
    assert f"\n{red}Diagnoses{plain}\n" in shown
    assert f"\n{yellow}Interrupted: the results are incomplete{plain}\n" in shown
    assert f"{red}Unexplained: 7 findings (" in first_text(made, 200, colour=True)
    in_flight = replace(made, rows=made.rows[:4], findings=(), diagnoses=(), notes=())
    assert f"{yellow}In flight, half done on a stopped CPU{plain}" in first_text(
        in_flight, 200, colour=True
    )
    assert f"{yellow}Not read{plain}" in first_text(in_flight, 200, colour=True)
    for verdict, style in {"exact": "\x1b[1;32m", "incomplete": yellow, "moving": yellow}.items():
        other = replace(in_flight, verdict=verdict)  # type: ignore[arg-type]
        assert first_text(other, 200, colour=True).startswith(style + verdict.upper())


def test_a_report_without_diagnoses_says_so() -> None:
    made = output(200)
    diagnosis_lines(replace(report(), diagnoses=()), made, Typed())
    assert made.text == "no diagnoses\n"
    made = output(200)
    diagnosis_lines(everything(), made, Typed())
    first, *_ = made.text.splitlines()
    assert first.startswith("1. likely, 1,064 bytes, node 0: ")
    assert "\n2. likely, 208 bytes, node 1: the charge" in made.text
    assert "no diagnoses" not in made.text
