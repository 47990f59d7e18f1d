# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Progress and cancellation
-------------------------

A long walk reports its progress, and can be cancelled. It checks for cancellation between two
pieces. A cancelled walk counts what it did not read as unreadable.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ("STOPPED", "Progress")

#: Reason why memory is unreadable after a walk was cancelled.
STOPPED = "interrupted before it was read"


class Progress:
    """
    Progress and cancellation of a walk.

    :ivar stop: set to ``True`` to cancel the walk
    :ivar report: function to call with the name of the current walk and the share of it that is
        done, from 0.0 to 1.0
    """

    def __init__(self) -> None:
        self.stop = False
        self.report: Callable[[str, float], None] = lambda what, share: None
