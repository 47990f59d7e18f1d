# SPDX-License-Identifier: LGPL-2.1-or-later
from __future__ import annotations

import pytest
from support.printed import WIDE, text
from support.reports import report


@pytest.mark.parametrize(
    "name", ["/[red]a[/red]", "/[/]", "/[link=x]a", "/a:boom:b", "/\\[b]", "/[", "/[bold]", "/a\\"]
)
def test_names_are_no_markup(name: str) -> None:
    harmless = "/" + "x" * (len(name) - 1)
    plain = text(report(path=harmless, name=harmless), width=WIDE)
    for colour in (False, True):
        shown = text(report(path=name, name=name), width=WIDE, colour=colour)
        assert shown.count(name) == plain.count(harmless)
