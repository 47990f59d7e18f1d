# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Progress and cancellation
-------------------------

A long walk reports its progress and checks between two pieces whether it was cancelled. A
cancelled walk ends early and counts the rest as unreadable.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ("STOPPED", "Progress")

#: The reason given for what a cancelled walk did not read.
STOPPED = "interrupted before it was read"


class Progress:
    """
    Progress of a walk, and its cancellation.

    :ivar stop: whether the walk is cancelled
    :ivar tell: called with the name of the current walk and the share of it that is done
    """

    def __init__(self) -> None:
        self.stop = False
        self.tell: Callable[[str, float], None] = lambda what, share: None
