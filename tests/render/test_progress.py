# SPDX-License-Identifier: LGPL-2.1-or-later
"""Progress is shown on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from memcg_inspect.render import progress
from memcg_inspect.render.progress import progress_bar, progress_if_needed


def be_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is written to be taken for a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(lambda: False) as report:
        report("pages", 0.5)
    with progress_if_needed() as report:
        report("copy", 0.5)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_a_terminal(monkeypatch)
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
    be_a_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    for is_stopping in (True, False):
        with progress_bar(lambda: is_stopping) as report:  # noqa: B023
            report("pages", 0.5)
        shown = capsys.readouterr().err
        assert ("interrupted: Ctrl-C again to stop at once" in shown) == is_stopping


def test_nothing_is_left_of_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line is erased after it was drawn for the last time."""
    be_a_terminal(monkeypatch)
    with progress_bar(lambda: False) as report:
        report("pages", 0.5)
    after = capsys.readouterr().err.rpartition("50%")[2]
    assert after.endswith("\x1b[1A\x1b[2K")


def test_a_bar_is_drawn_from_the_first_report_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that nobody sees are left out, unless something else begins."""
    drawn: list[tuple[str, float]] = []
    opened: list[bool] = []

    @contextmanager
    def bar(is_stopping: Callable[[], bool]) -> Iterator[Callable[[str, float], None]]:
        opened.append(is_stopping())
        yield lambda what, share: drawn.append((what, share))

    monkeypatch.setattr(progress, "progress_bar", bar)
    with progress_if_needed():
        pass
    assert opened == []
    with progress_if_needed() as report:
        for share in (0.0, 0.001, 0.002, 0.003, 0.0045, 0.005):
            report("copy", share)
        report("check", 0.005)
        report("check", 0.006)
        report("check", 1.0)
    assert opened == [False]
    wanted = [("copy", 0.0), ("copy", 0.002), ("copy", 0.0045), ("check", 0.005), ("check", 1.0)]
    assert drawn == wanted
