# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a drgn session, a notebook and a script get of the program."""

from __future__ import annotations

import html
import json

import pytest
from drgn import Program
from drgn.commands import run_command
from support.guests import DEBIAN_KERNELS, GuestImage, Lab
from support.reports import diagnosed, more, report

import memcg_inspect
from memcg_inspect.image.image import Image
from memcg_inspect.model import ImageInfo
from memcg_inspect.report import Report
from memcg_inspect.session import in_session, session_image
from memcg_inspect.tables import Answer, NotRead, Table, columns_of
from memcg_inspect.views.stat import StatRow

KERNEL = DEBIAN_KERNELS[-1]
HOSTILE = "/<script>alert('x')</script>&amp;\x1b[2J\n"


@pytest.mark.parametrize("made", [report(), diagnosed(), more(), report(path=HOSTILE)])
def test_a_report_is_shown_as_its_first_screen(made: Report) -> None:
    shown = in_session(made)
    assert isinstance(shown, Report)
    text = repr(shown)
    assert text.startswith("FINDINGS: ")
    assert len(text.splitlines()) <= 40
    assert all(char == "\n" or char.isprintable() for char in text)
    page = shown._repr_html_()
    assert page.startswith("<pre>FINDINGS: ")
    assert page.count("<") == page.count(">") == 2
    assert html.unescape(page).startswith("<pre>FINDINGS: ")
    assert json.loads(shown.to_json())["verdict"] == made.verdict
    assert shown.rows == made.rows


def answer(rows: int) -> Answer:
    unread = NotRead(f"{HOSTILE} is not in the image")
    made = [StatRow(HOSTILE, n, HOSTILE, None, "bytes", n, 0, unread) for n in range(rows)]
    table = Table("stat", f"of {HOSTILE}", columns_of(StatRow), made)
    return Answer("stat", ImageInfo("7.3.0", "vmcore", (0,), 1, 4096, "memcg"), (table,))


@pytest.mark.parametrize("rows", [0, 1, 25, 1000])
def test_tables_are_shown_as_their_first_screen(rows: int) -> None:
    shown = in_session(answer(rows))
    text = repr(shown)
    assert text.startswith("of /<script>")
    assert len(text.splitlines()) <= 40
    assert (".rows has all rows" in text) == (rows > 40)
    page = shown._repr_html_()
    assert page.count("<") == page.count(">") == 2
    assert html.unescape(page).startswith("<pre>of /<script>")
    for part in (text, page):
        assert all(char == "\n" or char.isprintable() for char in part)
    assert [(row["memcg"], row["folded"]) for row in shown.rows] == [
        (HOSTILE, n) for n in range(rows)
    ]
    assert [row["folded"] for row in json.loads(shown.to_json())["tables"][0]["rows"]] == [
        *range(rows)
    ]


class Reads:
    """Count the reads of kernel memory, which come from another program of the image."""

    def __init__(self, image: GuestImage) -> None:
        self.count = 0
        self.prog, self._whole = image.own_program(), image.program()
        self.prog.add_memory_segment(1 << 63, 1 << 63, self._read)

    def _read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        self.count += 1
        return self._whole.read(address, count)


def asked(prog: Program, command: str) -> dict[str, object]:
    """Return the document of a command without the times, and the class of its result."""
    made = run_command(prog, f"memcg {command} --json > /dev/null")
    document: dict[str, object] = json.loads(made.to_json())
    document.pop("timings", None)
    return document | {"class": type(made).__name__}


def differing(one: object, other: object, path: str = "") -> list[str]:
    """Return where two documents differ, in a line each."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted(one.keys() | other.keys())
        return [s for key in keys for s in differing(one.get(key), other.get(key), f"{path}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [s for n, pair in pairs for s in differing(*pair, f"{path}[{n}]")]
    return [] if one == other else [f"{path}: {one!r} is not {other!r}"]


#: Commands after an audit. One of an address, and one that needs another kernel, are not here.
AFTER = (
    *("overview", "overview --by-node", "usage /files/web", "dying --files 0", "tasks", "stock"),
    *("slabinfo", "slabinfo --by node", "slabinfo --by memcg,cache,node", "slabinfo --by-node"),
    *("percpu", "percpu --by node", "stat /files/web", "stat / --subtree", "drift", "rss"),
    "audit",
)


@pytest.mark.image
@pytest.mark.parametrize("kernel", [pytest.param("6.1", marks=pytest.mark.long), KERNEL])
def test_the_next_command_reuses_the_walk(lab: Lab, kernel: str) -> None:
    """Whatever the order, each command says what it says alone."""
    image = lab.image(kernel, "4", "mixed")
    reads = Reads(image)
    counts = {}
    for command in ("audit", *AFTER):
        before = reads.count
        found, alone = asked(reads.prog, command), asked(image.own_program(), command)
        assert differing(found, alone) == [], command
        counts[command] = reads.count - before
        if command == "audit" and len(counts) == 1:
            first = counts[command]
    assert {name: n for name, n in counts.items() if n > first / 4} == {}
    assert counts["overview"] == counts["slabinfo --by node"] == counts["percpu --by node"] == 0
    assert counts["usage /files/web"] > 0


@pytest.mark.image
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("slabinfo", "slabinfo --by memcg,node"),
        ("slabinfo --by cache", "slabinfo --node 2 --memcg /files --subtree"),
        ("percpu", "percpu --by memcg,node"),
        ("stock", "stock --sort charged --memcg /files/web"),
        ("stat /files/web", "stat /files/web --node 1"),
        ("tasks", "tasks --sort comm"),
        ("dying", "dying --each --sort memcg"),
        ("usage /files/web", "overview"),
    ],
)
def test_the_same_question_in_another_way(lab: Lab, first: str, second: str) -> None:
    image = lab.image(KERNEL, "4", "mixed")
    reads = Reads(image)
    asked(reads.prog, first)
    before = reads.count
    assert asked(reads.prog, second) == asked(image.own_program(), second)
    assert reads.count - before <= before / 4
    assert before > 0


@pytest.mark.image
def test_nothing_is_kept_of_a_running_kernel(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(lab.image(KERNEL, "4", "mixed"))
    monkeypatch.setattr(Image, "is_moving", True)
    counts = []
    for _ in range(2):
        before = reads.count
        for command in ("slabinfo", "percpu", "stock"):
            asked(reads.prog, command)
        counts.append(reads.count - before)
    # What never changes, such as the layout of memory, is read once.
    assert counts[1] > counts[0] / 2


@pytest.mark.image
def test_a_walk_that_was_interrupted_is_not_kept(lab: Lab) -> None:
    prog = lab.image(KERNEL, "4", "mixed").own_program()
    image = session_image(prog)
    image.progress.stop = True
    assert memcg_inspect.audit(prog).verdict == "incomplete"
    image.progress.stop = False
    assert memcg_inspect.audit(prog).verdict == "exact"


@pytest.mark.image
def test_open_in_a_script(lab: Lab) -> None:
    image = lab.image(KERNEL, "4", "mixed")
    for path in (image.core, str(image.core)):
        prog = memcg_inspect.open(path)
        shown = repr(memcg_inspect.audit(prog))
        assert shown.startswith("EXACT: ")
        assert "BTF" in shown
    namespace: dict[str, object] = {}
    exec("from memcg_inspect import *", namespace)
    assert "audit" in namespace
    assert "open" not in namespace
