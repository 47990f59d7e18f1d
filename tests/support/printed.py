# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reports and answers as text."""

from __future__ import annotations

import subprocess
import sys

from rich.console import Console

from memcg_inspect.render.first_screen import first_screen
from memcg_inspect.render.report import findings_lines, report_lines
from memcg_inspect.render.text import Output, answer_lines
from memcg_inspect.render.typed import Typed
from memcg_inspect.report import Report
from memcg_inspect.tables import Answer

#: A width at which no line is wrapped.
WIDE = 2000


def output(width: int | None = None, colour: bool = False, exact: bool = False) -> Output:
    """Return an output of this width; ``None``: one that is not a terminal."""
    console = Console(
        color_system="standard" if colour else None, force_terminal=colour, legacy_windows=False
    )
    return Output(console, width, exact)


def text(made: Report, width: int | None = 200, colour: bool = False) -> str:
    """Return the text of a whole report."""
    out = output(width, colour)
    report_lines(made, out)
    return out.text


def findings_text(made: Report, width: int | None = 200) -> str:
    """Return the text of the findings of a report, and of the rows that are not exact."""
    out = output(width)
    findings_lines(made, out)
    return out.text


def first_text(
    made: Report, width: int | None = 100, exact: bool = False, colour: bool = False
) -> str:
    """Return the first screen of a report."""
    out = output(width, colour)
    first_screen(made, out, Typed("memcg-inspect", ("-c", "vmcore")), exact)
    return out.text


def answer_text(made: Answer, width: int | None = None, exact: bool = False) -> str:
    """Return the text of an answer."""
    out = output(width, exact=exact)
    answer_lines(made, out)
    return out.text


def on_full_disk(*arguments: str) -> tuple[int, str]:
    """Run the program with standard output on a full disk; return its status, and its errors."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "memcg_inspect", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    return done.returncode, done.stderr
