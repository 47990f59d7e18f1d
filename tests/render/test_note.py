# SPDX-License-Identifier: LGPL-2.1-or-later
"""The note of a piece of evidence is printed, with unprintable characters escaped."""

from __future__ import annotations

from support.printed import WIDE, text
from support.reports import report


def test_a_note_is_printed() -> None:
    assert "objcg at 0x10" in text(report(note="objcg at 0x10"), width=WIDE)


def test_a_note_is_escaped() -> None:
    shown = text(report(note="\x1b[2Jsh (7)"), width=WIDE)
    assert "\\x1b[2Jsh (7)" in shown
    assert "\x1b" not in shown
