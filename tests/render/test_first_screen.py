# SPDX-License-Identifier: LGPL-2.1-or-later
"""The first screen of an audit: what it says, and that it is one screen on any machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from support.printed import first_text, output
from support.reports import GONE, ITEM, ROOT, WEB, clean, diagnosed, more, report, row

from memcg_inspect.model import Coverage, Memcg
from memcg_inspect.render.first_screen import (
    MOST_LINES,
    diagnosis_lines,
    explained_lines,
    first_screen,
)
from memcg_inspect.render.text import rounded, size
from memcg_inspect.render.typed import Typed
from memcg_inspect.report import OWN_MACHINE, OWN_MEMCG, Charged, Identity, Report, Row, RowStatus
from memcg_inspect.tables import UsageError

#: The path of a container as Kubernetes and systemd name it.
POD = (
    "/kubepods.slice/kubepods-burstable.slice/"
    "kubepods-burstable-pod7a0b6f4e_3c1d_4f5a_9e2b_8d7c6b5a4f3e.slice/"
    "cri-containerd-{:064x}.scope"
)


def faults(number: int) -> Report:
    """Return a report of that many faults, each with two findings and a diagnosis."""
    one = diagnosed()
    findings = one.findings * number
    diagnoses = tuple(
        replace(
            one.diagnoses[0],
            findings=(2 * n,),
            memcgs=(0xFFFF888001000000 + 4096 * n, WEB),
            what=f"{one.diagnoses[0].what}, and {n} words more that make it a long sentence",
        )
        for n in range(number)
    )
    pods = tuple(
        Memcg(0xFFFF888001000000 + 4096 * n, POD.format(n << 200 | n), n, "online", ROOT, ROOT)
        for n in range(5000)
    )
    return replace(one, findings=findings, diagnoses=diagnoses, memcgs=one.memcgs + pods)


def with_rows(status: RowStatus, identities: int = 41, verdict: str = "incomplete") -> Report:
    """Return a report in which a row of each identity has a status."""
    names = [f"identity_{n}" for n in range(identities)]
    rows = tuple(
        replace(row(WEB, 3, 4, status), identity=name, reason=f"a long reason {name} " * 12)
        for name in names
    )
    return replace(
        clean(),
        verdict=verdict,
        identities=tuple(Identity(name, "unverifiable", 7, 0, "why") for name in names),
        rows=rows,
        memcgs=report(path=POD.format(7)).memcgs,
        not_accounted=("sockets",),
        coverage={name: report().coverage["slab"] for name in names},
        notes=("makedumpfile left out what is needed; " * 20,) * 3,
    )


def half_done(number: int) -> Report:
    """Return a report of so many charges that are half done, and of rows that no stack shows."""
    made = with_rows("in-flight", verdict="exact")
    [one] = faults(1).diagnoses
    charge = replace(one, cause="half-done", findings=(), memcgs=(WEB,))
    return replace(made, half_done=(charge,) * number)


def undiagnosed() -> Report:
    """Return a report with findings of 41 identities, and everything else."""
    made = with_rows("unverifiable", verdict="findings")
    [finding] = report().findings
    findings = tuple(replace(finding, identity=i.name) for i in made.identities)
    return replace(faults(50), findings=faults(50).findings + findings, rows=made.rows,
                   coverage=made.coverage, notes=made.notes, interrupted=True, looks=3)  # fmt: skip


CASES: dict[str, Callable[[], Report]] = {
    "healthy": clean,
    "one fault": lambda: faults(1),
    "50 faults": lambda: faults(50),
    "50 causes": lambda: different(faults(50)),
    "incomplete": lambda: with_rows("unverifiable"),
    "moving": lambda: with_rows("moving", verdict="moving"),
    "in flight": lambda: with_rows("in-flight", verdict="exact"),
    "half done": lambda: half_done(50),
    "not accounted": lambda: replace(clean(), not_accounted=("kernel memory", "BPF", "sockets")),
    "no diagnosis": lambda: replace(undiagnosed(), diagnoses=()),
    "everything": undiagnosed,
    "a long path": lambda: report(path="/" + "abcdefghi-" * 200, name="x" * 900),
    "a path of words": lambda: report(path="/" + "some words " * 90),
}


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("name", CASES)
def test_it_is_one_screen(name: str, width: int) -> None:
    shown = first_text(CASES[name](), width)
    lines = shown.splitlines()
    # A command is not folded, so that it can be copied; the terminal does that.
    wide = [line for line in lines if cell_len(line) > width]
    assert [line for line in wide if " memcg-inspect " not in line and "(memcg-" not in line] == []
    assert sum(-(-max(1, cell_len(line)) // width) for line in lines) <= MOST_LINES
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("name", CASES)
def test_only_spaces_break_lines(name: str, width: int) -> None:
    """No number and no address is cut in two: each is a word of the wide form, too."""
    made = CASES[name]()
    wide, narrow = first_text(made, None).split(), first_text(made, width).split()
    # Of items that are left out there are other numbers.
    counts = {str(n) for n in range(1, 100)}
    numbers = {word for word in narrow if re.fullmatch(r"\(?[+-]?(0x[0-9a-f]+|\d[\d,]*)\)?", word)}
    assert numbers
    assert numbers - set(wide) <= counts


def test_healthy() -> None:
    made = replace(clean(), charges=(Charged("lru", 3 << 30, 1_240_000), Charged("slab", 0, 0)))
    assert first_text(made).splitlines() == [
        "EXACT: 1 identity holds in 1 row",
        "Checked: 1 identity, 1 row, 3.0 GiB of charges: 1.2 million objects and pages",
        "Accounting: one obj_cgroup per memcg and node",
        "Linux 7.3.0 (vmcore), 1 node, 2 CPUs, 4.0 MiB of memory, 3 memcgs (1 removed)",
        "",
        "More: --findings, --identities, --rows, --skew; --all prints everything",
    ]
    assert "3,221,225,472 bytes of charges" in first_text(made, exact=True)
    out = output(100)
    first_screen(made, out, Typed("%memcg"))  # as sessions do
    assert "3.0 GiB of charges" in out.text
    assert "nothing is charged" in first_text(clean())


def test_a_half_done_charge_is_a_cause_with_a_number() -> None:
    """Its rows are not counted again. Those that no stack shows are."""
    made = half_done(1)
    [charge] = made.half_done
    effect = replace(charge.signature[0], identity="identity_0", memcg=made.rows[0].memcg)
    made = replace(made, half_done=(replace(charge, signature=(effect,)),))
    lines = first_text(made).splitlines()
    start = lines.index("In flight, half done on a stopped CPU")
    assert lines[start + 1].startswith(f"1. likely, {charge.amount:,} bytes, node 0: ")
    assert any(line.startswith("   or: ") for line in lines[start:])
    assert not any("identity_0: 1 of 7 rows" in line for line in lines)
    assert any("identity_1: 1 of 7 rows: a long reason" in line for line in lines)
    both = replace(made, diagnoses=faults(1).diagnoses, notes=(), coverage={})
    assert "\n2. likely, " in first_text(both)
    out = output()
    explained_lines(both, 2, out, Typed())
    assert "identity_0" in out.text
    diagnosis_lines(made, out := output(), Typed())
    assert "no diagnoses" not in out.text


def test_what_was_not_verified_was_not_checked() -> None:
    made = with_rows("unverifiable", 3)
    assert "Checked: 3 identities, 18 of 21 rows, " in first_text(made)
    whole = tuple(replace(identity, rows=1) for identity in made.identities[:1])
    made = replace(made, identities=(*whole, *made.identities[1:]))
    assert "Checked: 2 of 3 identities, 12 of 15 rows, " in first_text(made)


def test_a_diagnosis_has_all_that_is_needed_next() -> None:
    made = diagnosed()
    [diagnosis] = made.diagnoses
    shown = first_text(made, 2000)
    part = shown[shown.index("Diagnoses") :].split("\n\n")[0].splitlines()
    assert part[1:] == [
        f"1. likely, 1,064 bytes, node 0: {diagnosis.what}",
        f"   /web ({WEB:#x}), /",
        "   at 0xffff888000f00000, dentry object, 200 bytes, charged to "
        f"/web ({WEB:#x}) (objcg 0xffff88800000a000), page 0xffffea0000001000, node 0, a note "
        "(the likeliest of 20)",
        "   or: 1,064 bytes of freed slab objects are still charged",
        "   $ memcg-inspect who 0xffff888000f00000 -c vmcore",
    ]
    assert GONE not in diagnosis.memcgs


def test_nothing_of_a_diagnosis_is_cut_at_80_columns() -> None:
    made = diagnosed()
    [diagnosis] = made.diagnoses
    first = replace(
        diagnosis.evidence[0], note=f"objcg at {WEB:#x}", site="charge.c:73 [charge] allocate()"
    )
    sentence = f"a slab object of 2,056 bytes on node 2 was charged to memcg {WEB:#x}, and now"
    others = tuple(f"{sentence} refers to {ROOT + n:#x}" for n in range(3))
    whole = replace(diagnosis, evidence=(first,), others=others)
    said = " ".join(first_text(replace(made, diagnoses=(whole,)), 80).split())
    assert "allocated at charge.c:73 [charge] allocate() (the likeliest of 20)" in said
    assert "or: a slab object of 2,056 bytes" in said
    assert f"and now refers to {ROOT:#x} (and 2 more)" in said


def test_causes_that_differ_by_the_obj_cgroup_alone_are_one() -> None:
    made = diagnosed()
    said = [f"pages were charged twice to obj_cgroup 0x{n} of memcg {WEB:#x}" for n in "ab"]
    other = f"{WEB:#x} is wrong"
    changed = replace(made.diagnoses[0], what=said[0], others=(said[1], other, other))
    shown = " ".join(first_text(replace(made, diagnoses=(changed,)), None).split())
    assert "charged twice to /web" in shown
    assert f"or: {other} " in shown
    assert "more)" not in shown


def test_memcgs_in_a_sentence_have_their_paths() -> None:
    made = diagnosed()
    memcgs = tuple(Memcg(0x10 + n, f"/{name}", n, "online", None, 0x10 + n)
                   for n, name in enumerate("abc"))  # fmt: skip

    def screen(what: str) -> list[str]:
        changed = replace(made.diagnoses[0], what=what, memcgs=(0x10, 0x11), others=(), evidence=())
        shown = first_text(replace(made, diagnoses=(changed,), memcgs=memcgs), None)
        return shown[shown.index("1. ") :].split("\n\n")[0].splitlines()[:-1]

    was = "was charged to obj_cgroup 0xa of memcg 0x10, and now refers to obj_cgroup 0xb of memcg "
    start = "1. likely, 1,064 bytes, node 0: "
    assert screen(f"{was}0x11") == [f"{start}was charged to /a, and now refers to /b"]
    # of one memcg: then the obj_cgroups tell it
    same = [f"{start}was charged to obj_cgroup 0xa of /a, and now refers to obj_cgroup 0xb of /a"]
    assert screen(f"{was}0x10") == [*same, "   /a, /b"]
    assert screen("memcg 0xbad is wrong") == [f"{start}0xbad is wrong", "   /a, /b"]


def test_what_is_known_decides_what_comes_next() -> None:
    made = diagnosed()
    [diagnosis] = made.diagnoses

    def command(**parts: object) -> list[str]:
        changed = replace(diagnosis, **parts)  # type: ignore[arg-type]
        shown = first_text(replace(made, diagnoses=(changed,)), 2000)
        [line] = [line.strip() for line in shown.splitlines() if line.startswith("   $ ")]
        return shlex.split(line.removeprefix("$ "))

    end = ["-c", "vmcore"]
    explain = ["memcg-inspect", "audit", "--explain", "1", *end]
    assert command(evidence=()) == explain
    assert command() == ["memcg-inspect", "who", "0xffff888000f00000", *end]
    of_counter = tuple(replace(evidence, kind="counter") for evidence in diagnosis.evidence)
    assert command(evidence=of_counter) == explain
    rows = ["memcg-inspect", "audit", "--rows", "--memcg", f"{WEB:#x}", "--sort", "difference"]
    assert command(evidence=(), signature=()) == [*rows, *end]
    assert command(evidence=(), signature=(), memcgs=()) == [
        "memcg-inspect",
        "audit",
        "--findings",
        *end,
    ]


@pytest.mark.parametrize(
    ("listed", "total", "said"),
    [
        (1, 1, ""),
        (1, None, ""),
        (2, 20, " (the likeliest of 20)"),
        (3, None, " (the likeliest of 3 or more)"),
        (10, None, " (the likeliest of 10 or more)"),
        (10, 10, " (the likeliest of 10)"),
    ],
)
def test_how_many_objects_may_be_the_cause(listed: int, total: int | None, said: str) -> None:
    made = diagnosed()
    [diagnosis] = made.diagnoses
    evidence = tuple(replace(diagnosis.evidence[0], note=None) for _ in range(listed))
    changed = replace(diagnosis, evidence=evidence, evidence_total=total)
    shown = first_text(replace(made, diagnoses=(changed,)), None)
    assert f"node 0{said}\n" in shown
    proved = replace(changed, confidence="proved")
    assert "likeliest" not in first_text(replace(made, diagnoses=(proved,)), None)


def test_a_diagnosis_is_explained_row_by_row() -> None:
    made = diagnosed()
    [diagnosis] = made.diagnoses
    [effect] = diagnosis.signature
    changed = replace(diagnosis, signature=(replace(effect, amount=1000, difference=1064),))
    made = replace(made, diagnoses=(changed,))
    out = output(None)
    explained_lines(made, 1, out, Typed())
    first, *_ = out.text.splitlines()
    assert first.startswith("1. likely, 1,064 bytes, node 0: ")
    [line] = [line for line in out.text.splitlines() if line.startswith(f" {effect.identity} ")]
    assert line.split()[-3:] == ["+1,000", "+1,064", "+64"]
    for title, item in (
        ("Objects that may be the cause", "0xffff888000f00000, dentry object"),
        ("Other causes that fit", diagnosis.others[0]),
        ("Functions of the kernel that could do it", "mod_objcg_mlstate()"),
    ):
        assert f"\n\n{title}\n  {item}" in out.text
    assert out.text.endswith("\n\n")
    explained_lines(faults(3), 2, out := output(), Typed())
    assert out.text.startswith("2. likely, ")
    assert out.text.count(", and 1 words more") == 1
    for number in (0, 2, -1):
        with pytest.raises(UsageError, match="no such diagnosis; there are: 1 to 1"):
            explained_lines(made, number, out, Typed())
    with pytest.raises(UsageError, match="there are: none"):
        explained_lines(clean(), 1, out, Typed())


def different(made: Report) -> Report:
    """Return a report whose diagnoses have a cause each."""
    diagnoses = (replace(d, cause=f"cause-{n}") for n, d in enumerate(made.diagnoses))
    return replace(made, diagnoses=tuple(diagnoses))


def test_of_many_diagnoses_that_are_alike_the_first_one_is_shown() -> None:
    made = faults(50)
    shown = first_text(made)
    assert re.findall(r"^(\d+)\. ", shown, re.MULTILINE) == ["1"]
    assert f"   and 49 more like it: {made.diagnoses[0].cause}, of /" in shown
    assert "more diagnoses" not in shown
    three = replace(made, diagnoses=made.diagnoses[:3])
    assert re.findall(r"^(\d+)\. ", first_text(three), re.MULTILINE) == ["1", "2", "3"]
    # The number is that of --explain. Those that are not shown are counted in all.
    mixed = replace(made, diagnoses=(*different(faults(30)).diagnoses, *made.diagnoses))
    shown = first_text(mixed, 100)
    numbers = re.findall(r"^(\d+)\. ", shown, re.MULTILINE)
    assert f"and {80 - len(numbers)} more diagnoses (--diagnoses)" in shown


def test_diagnoses_that_do_not_fit_are_counted() -> None:
    shown = first_text(different(faults(50)))
    numbers = [int(n) for n in re.findall(r"^(\d+)\. ", shown, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 2 < len(numbers) < 10
    assert f"and {50 - len(numbers)} more diagnoses (--diagnoses)" in shown
    assert "Unexplained: 50 findings" in shown
    several = tuple(replace(f, identity=name) for f in report().findings for name in "abcdefgh")
    one_left = replace(report(), findings=several * 4, notes=("a word " * 170,) * 2)
    assert "and 1 more note (--all)" in first_text(one_left, 60)
    out = output(100)
    diagnosis_lines(faults(50), out, Typed())
    assert out.text.count("memcg-inspect who") == 50


def test_what_is_unexplained_comes_by_identity() -> None:
    made = more()
    pages = replace(made.findings[0], identity="kmem", unit="pages", difference=-3, nid=None)
    many = (*made.findings, pages, replace(pages, difference=1), replace(pages, memcg=None))
    shown = first_text(replace(made, findings=many))
    part = shown[shown.index("Unexplained") :].split("\n\n")[0].splitlines()
    assert part == [
        "Unexplained: 4 findings (memcg-inspect audit --findings -c vmcore)",
        f"  kmem: 3 findings, largest -3 pages: /web ({WEB:#x})",
        f"  slab: 1 finding, +1,064 bytes: /web ({WEB:#x})",
    ]
    assert ITEM not in shown


def test_why_rows_are_unverifiable() -> None:
    shown = first_text(with_rows("unverifiable", 2), 400)
    reason = " ".join(["a long reason identity_0"] * 12)
    assert f"\nCould not be verified\n  identity_0: 1 of 7 rows: {reason}" in shown
    assert "Not accounted on this machine: sockets" in shown
    assert "slab: 1 of 2,512, for example objcg vector at 0x" in first_text(report())


def test_who_was_changing() -> None:
    made = with_rows("moving", 1, "moving")
    rows = [replace(made.rows[0], memcg=memcg) for memcg in (WEB, ROOT, None, WEB, 0xBAD, 0xBAE)]
    shown = first_text(replace(made, rows=tuple(rows)), None)
    assert f"identity_0: 6 of 7 rows: {POD.format(7)} ({WEB:#x}), /, 0xbad and 1 more" in shown
    rows = [replace(made.rows[0], memcg=None, nid=nid) for nid in (1, 0, None, 1)]
    assert "identity_0: 4 of 7 rows: node 0, node 1\n" in first_text(
        replace(made, rows=tuple(rows))
    )
    none = replace(made.rows[0], memcg=None, nid=None)
    assert "identity_0: 1 of 7 rows: -\n" in first_text(replace(made, rows=(none,)))


def test_the_first_line_says_who_was_changing() -> None:
    made = with_rows("moving", 1, "moving")
    first = made.rows[0]
    rows = [replace(first, memcg=memcg) for memcg in (WEB, ROOT, None, WEB, 0xBAD, 0xBAE)]
    made = replace(made, identities=(Identity("slab", "moving", 90, 0, None),))

    def line(*rows: Row, width: int | None = None) -> str:
        return first_text(replace(made, rows=rows), width).splitlines()[0]

    some = "MOVING: nothing wrong was found; "
    assert line(*rows) == (
        f"{some}6 of 90 rows were changing: {POD.format(7)} ({WEB:#x}), /, 0xbad and 1 more"
    )
    assert line(replace(first, memcg=None, nid=2)) == f"{some}1 of 90 rows were changing: node 2"
    assert line(replace(first, memcg=None, nid=None)) == f"{some}1 of 90 rows were changing"
    own = replace(first, memcg=WEB, reason=OWN_MEMCG)
    node = replace(first, memcg=None, nid=0, reason=OWN_MACHINE)
    assert line(own) == f"{some}1 of 90 rows were changing, all because this program runs there"
    assert (
        line(own, node) == f"{some}2 of 90 rows were changing, all because this program runs there"
    )
    assert line(own, node, rows[1]) == (
        f"{some}3 of 90 rows were changing, 2 of them because this program runs there: /"
    )


def test_what_is_not_accounted_is_said_once() -> None:
    made = replace(clean(), not_accounted=("kernel memory", "BPF"))
    assert first_text(made).count("kernel memory is not accounted on this machine") == 1
    assert "Not accounted on this machine: BPF" in first_text(made)
    moving = replace(made, verdict="moving")
    assert "Not accounted on this machine: kernel memory, BPF" in first_text(moving)


def test_alike_names_are_told_apart() -> None:
    """Removed memcgs can have the same path, and long paths the same beginning and end."""
    paths = [POD.format(5), POD.format(5), POD.format(1 << 250 | 5)]
    memcgs = tuple(Memcg(n, path, n, "online", None, n) for n, path in enumerate(paths, 1))
    made = replace(with_rows("moving", 1), memcgs=memcgs)
    made = replace(made, rows=tuple(replace(made.rows[0], memcg=n) for n in (1, 2, 3)))
    shown = first_text(made, 100)
    assert all(f"({n:#x})" in shown for n in (1, 2))
    assert "0000000000000005.scope" in shown
    assert "/kubepods.slice" in shown


@given(st.text(st.characters(), max_size=40))
@settings(deadline=None)
def test_no_name_reaches_the_terminal_as_it_is(name: str) -> None:
    made = replace(diagnosed(), memcgs=report(path=f"/{name}").memcgs)
    shown = first_text(made)
    assert all(char == "\n" or char.isprintable() for char in shown)
    assert len(shown.splitlines()) <= MOST_LINES


def test_sizes() -> None:
    sizes = [0, 1, 10_239, 10_240, 1_048_000, (1 << 20) - 1, 5 << 30, 3 << 50]
    assert [size(n) for n in sizes] == [
        *("0 bytes", "1 byte", "10,239 bytes", "10.0 KiB", "1,023.4 KiB", "1.0 MiB", "5.0 GiB"),
        "3,072.0 TiB",
    ]
    assert size(5 << 30, exact=True) == "5,368,709,120 bytes"
    assert [rounded(n) for n in (0, 999_999, 1_000_000, 12_340_000)] == [
        "0", "999,999", "1.0 million", "12.3 million",
    ]  # fmt: skip


def test_interrupted_and_samples() -> None:
    made = replace(clean(), interrupted=True, looks=3, coverage={"pages": Coverage(9)})
    assert "Interrupted: the results are incomplete" in first_text(made)
    assert "Samples: 3" in first_text(made)
    assert "\x1b[" in first_text(made, colour=True)
    assert "\x1b[" not in first_text(made)
