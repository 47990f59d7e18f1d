# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reports as a terminal shows them."""

from __future__ import annotations

import io

from rich.console import Console

from memcg_inspect.model import Report
from memcg_inspect.render.terminal import print_report


def text(made: Report, width: int = 200, show_all: bool = False, colour: bool = False) -> str:
    """What is printed."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, highlight=False, force_terminal=colour, legacy_windows=False
    )
    print_report(made, console, show_all=show_all)
    return out.getvalue()


#: So wide that no line is folded.
WIDE = 2000
