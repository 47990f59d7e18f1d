# SPDX-License-Identifier: LGPL-2.1-or-later
"""Signals of processes that tests start."""

from __future__ import annotations

import signal

__all__ = ("with_interrupts",)


def with_interrupts() -> None:
    """Let SIGINT end a new process, also if the tests run in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
