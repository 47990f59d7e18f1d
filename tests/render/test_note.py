# SPDX-License-Identifier: LGPL-2.1-or-later
from support.reports import report
from test_terminal import text


def test_note() -> None:
    assert "\x1b" not in text(report(note="\x1b[2Jsh (7)"))
