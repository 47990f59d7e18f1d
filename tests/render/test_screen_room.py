# SPDX-License-Identifier: LGPL-2.1-or-later
"""How much room the parts of the first screen of an audit have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.printed import first_text, output
from support.reports import WEB, clean, diagnosed, report, row

from memcg_inspect.model import Coverage, Memcg
from memcg_inspect.render.first_screen import diagnosis_lines, explained_lines
from memcg_inspect.render.typed import Typed
from memcg_inspect.report import Identity, Report

WORDS = "word " * 400
#: A memcg whose name needs no address beside it.
ONE = (Memcg(WEB, "/web", 31, "online", None, WEB),)


def in_flight(number: int, reason: str = "why") -> Report:
    """Return a report with a row in flight of each of some identities."""
    names = [f"identity_{n}" for n in range(number)]
    one = replace(row(WEB, 3, 4, "in-flight"), reason=reason)
    identities = tuple(Identity(name, "exact", 7, 0) for name in names)
    rows = tuple(replace(one, identity=name) for name in names)
    return replace(clean(), memcgs=ONE, identities=identities, rows=rows)


def with_diagnosis(**parts: Any) -> Report:
    """Return a report with one diagnosis."""
    made = replace(diagnosed(), memcgs=ONE)
    return replace(made, diagnoses=(replace(made.diagnoses[0], **parts),))


def lines_of(shown: str, start: str, end: str) -> int:
    """Return how many lines there are from one that begins so to the next that begins so."""
    lines = shown.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(start))
    return next(n for n, line in enumerate(lines[first:]) if line.startswith(end))


def test_the_screen_is_used_up_to_its_last_line() -> None:
    """It has forty, and the line that counts what is left out is one of them."""
    few = len(first_text(in_flight(1)).splitlines())
    whole = 40 - few + 1
    assert len(first_text(in_flight(whole)).splitlines()) == 40
    assert "more" not in first_text(in_flight(whole)).partition("In flight")[2].partition("More")[0]
    shown = first_text(in_flight(whole + 1))
    assert len(shown.splitlines()) == 40
    assert "\n  and 2 more identities (--findings)\n" in shown


def test_an_item_has_two_lines_and_a_note_eight() -> None:
    made = replace(in_flight(2, WORDS), notes=(WORDS, WORDS))
    shown = first_text(made, 60)
    assert lines_of(shown, "  identity_0: ", "  identity_1: ") == 2
    assert lines_of(shown, "Notes", "In flight") == 1 + 8 + 8 + 1


def test_parts_of_a_diagnosis_have_three_or_four_lines() -> None:
    """The object has four, so that its page and its note have room."""
    [diagnosis] = diagnosed().diagnoses
    evidence = replace(diagnosis.evidence[0], note=WORDS)
    made = with_diagnosis(what=WORDS, evidence=(evidence,), others=(f"or {WORDS}",), memcgs=())
    shown = first_text(made, 80)
    assert lines_of(shown, "1. ", "   at ") == 3
    assert lines_of(shown, "   at ", "   or: ") == 4
    assert lines_of(shown, "   or: ", "   $ ") == 3


def test_one_other_cause_is_shown_and_the_rest_counted() -> None:
    for others, more in ((("one",), ""), (("one", "two"), " (and 1 more)")):
        shown = first_text(with_diagnosis(others=others), None).splitlines()
        assert [line for line in shown if line.startswith("   or: ")] == [f"   or: one{more}"]


def test_four_diagnoses_of_one_cause_are_shown_as_one() -> None:
    """Those that are not shown are named by the first memcg of each."""
    names = "abcd"
    memcgs = tuple(Memcg(n, f"/{name}", n, "online", None, n) for n, name in enumerate(names, 1))
    made = with_diagnosis()
    [one] = made.diagnoses
    some = tuple(replace(one, memcgs=(n, WEB)) for n in range(1, 5))
    made = replace(made, memcgs=(*ONE, *memcgs), diagnoses=some)
    assert "   and 3 more like it: counter, of /b, /c, /d (--diagnoses)\n" in first_text(made)
    three = first_text(replace(made, diagnoses=some[:3]))
    assert "like it" not in three
    assert "\n3. likely, " in three
    # Of another confidence, it is not alike.
    other = (*some[:3], replace(some[3], confidence="proved"))
    assert "like it" not in first_text(replace(made, diagnoses=other))
    nobody = tuple(replace(one, memcgs=()) for _ in range(4))
    assert "   and 3 more like it: counter (--diagnoses)\n" in first_text(
        replace(made, diagnoses=nobody)
    )


def test_paths_take_fifty_six_columns() -> None:
    def named(length: int, width: int | None = 200) -> str:
        path = "/" + "x" * (length - 2) + "y"
        memcgs = (Memcg(WEB, path, 31, "online", None, WEB),)
        made = replace(with_diagnosis(memcgs=(WEB,), what="made"), memcgs=memcgs)
        return next(
            line.strip() for line in first_text(made, width).splitlines() if line.startswith("   /")
        )

    assert named(56) == "/" + "x" * 54 + "y"
    assert len(named(57)) == 56
    assert "…" in named(57)
    assert len(named(300, None)) == 300


def test_what_does_not_fit_on_a_narrow_terminal_is_counted() -> None:
    """There may be no room for even one item of each section."""
    missed = Coverage()
    missed.miss("page", 0x10, WORDS)
    made = replace(with_diagnosis(), rows=in_flight(9, WORDS).rows, notes=(WORDS,) * 3)
    made = replace(made, coverage={"pages": missed}, findings=report().findings)
    lines = first_text(made, 24).splitlines()
    assert sum(max(1, -(-len(line) // 24)) for line in lines) <= 40
    assert "  and 1 more diagnosis (--diagnoses)" in lines
    assert "  and 2 more notes (--all)" in lines


def test_one_example_of_what_could_not_be_read_is_shown() -> None:
    missed = Coverage(read=5)
    for address in (0x10, 0x20):
        missed.miss("page", address, "gone")
    shown = first_text(replace(clean(), coverage={"slab": missed}), None)
    assert "\nNot read\n  slab: 2 of 7, for example page at 0x10: gone\n\n" in shown


def test_identities_without_rows_were_checked_unless_they_are_not_kept() -> None:
    made = replace(
        clean(),
        identities=(
            Identity("slab", "exact", 1, 0),
            Identity("none", "exact", 0, 0),
            Identity("zswap", "not-kept", 0, 0, "this kernel has no zswap"),
        ),
    )
    assert "Checked: 2 identities, 1 row, " in first_text(made)


def test_sizes_are_rounded_unless_they_are_to_be_exact() -> None:
    made = with_diagnosis(amount=5 << 20)
    for exact, said in ((False, "5.0 MiB"), (True, "5,242,880 bytes")):
        first, second = output(), output()
        diagnosis_lines(made, first, Typed(), exact)
        explained_lines(made, 1, second, Typed(), exact)
        assert first.text.startswith(f"1. likely, {said}, node 0: ")
        assert second.text.startswith(f"1. likely, {said}, node 0: ")
    plain = output()
    diagnosis_lines(made, plain, Typed())
    explained_lines(made, 1, plain, Typed())
    assert plain.text.count("1. likely, 5.0 MiB, node 0: ") == 2


def test_parts_of_an_explanation_are_apart_and_have_titles() -> None:
    out = output(colour=True)
    explained_lines(with_diagnosis(), 1, out, Typed())
    parts = out.text.split("\n\n")
    titles = [part.splitlines()[0] for part in parts if part.startswith("\x1b[1m")]
    assert [title for title in titles if not title.startswith("\x1b[1m ")] == [
        f"\x1b[1m{title}\x1b[0m"
        for title in (
            "Objects that may be the cause",
            "Other causes that fit",
            "Functions of the kernel that could do it",
        )
    ]
    # The command is the last line of the diagnosis, and the table comes after an empty line.
    assert parts[0].splitlines()[-1].startswith("   $ ")
