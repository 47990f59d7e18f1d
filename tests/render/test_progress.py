# SPDX-License-Identifier: LGPL-2.1-or-later
"""Progress is shown on a terminal only."""

from __future__ import annotations

import pytest

from memcg_inspect.render.progress import progress_bar, progress_if_needed


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(lambda: False) as report:
        report("pages", 0.5)
    with progress_if_needed() as report:
        report("copy", 0.5)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar(lambda: False) as report:
        report("pages", 0.5)
    out, err = capsys.readouterr()
    assert out == ""
    assert "reading pages" in err
    assert "50%" in err


def test_a_second_interrupt_is_told_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first one on."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    for is_stopping in (True, False):
        with progress_bar(lambda: is_stopping) as report:  # noqa: B023
            report("pages", 0.5)
        shown = capsys.readouterr().err
        assert ("interrupted: Ctrl-C again to stop at once" in shown) == is_stopping
