# SPDX-License-Identifier: LGPL-2.1-or-later
"""The terminal of ``top``, without a guest. tests/live/test_top.py looks at its screen."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from memcg_inspect.top.terminal import GONE, Terminal, opened_terminal

PATIENCE = 20.0


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    host, ours = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    with open(ours, closefd=False) as keys, open(ours, "w", closefd=False) as screen:
        monkeypatch.setattr(sys, "stdin", keys)
        monkeypatch.setattr(sys, "stdout", screen)
        with opened_terminal() as opened:
            yield opened
    os.close(host)
    os.close(ours)


def test_a_signal_that_comes_just_before_the_wait(terminal: Terminal) -> None:
    """Its handler has had no instruction to run between: Ctrl-C would wait for a key."""
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        began = time.monotonic()
        assert terminal.wait(PATIENCE) == []
        assert time.monotonic() - began < PATIENCE / 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_wakeup_is_given_back(terminal: Terminal) -> None:
    ours = signal.set_wakeup_fd(-1)
    assert ours >= 0
    signal.set_wakeup_fd(ours)


def test_a_terminal_that_has_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel sends SIGHUP and SIGCONT, and what was the terminal cannot be taken over again."""
    host, ours = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    with open(ours) as keys, open(ours, "w", closefd=False) as screen:
        monkeypatch.setattr(sys, "stdin", keys)
        monkeypatch.setattr(sys, "stdout", screen)
        with opened_terminal() as opened:
            os.close(host)
            opened.handlers()[signal.SIGCONT](signal.SIGCONT, None)
            assert opened.wait(PATIENCE) == [GONE]
