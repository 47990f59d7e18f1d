# SPDX-License-Identifier: LGPL-2.1-or-later
from support.printed import text
from support.reports import report


def test_note() -> None:
    assert "\x1b" not in text(report(note="\x1b[2Jsh (7)"))
