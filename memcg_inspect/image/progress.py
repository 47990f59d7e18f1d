# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Progress and cancellation
-------------------------

A long walk reports its progress, and can be cancelled. It checks for cancellation between two
pieces. A cancelled walk counts what it did not read as unreadable.
"""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ("STOPPED", "Progress", "interrupted_reason")

#: Reason why memory is unreadable after a walk was cancelled.
STOPPED = "interrupted before it was read"

_NOT_IN_IMAGE = re.compile(r"\b(is|are) not (all )?in the image\b")


def interrupted_reason(reason: str) -> str:
    """
    Return why something could not be verified after a walk was cancelled.

    :param reason: what is missing, such as "slab memory is not all in the image". It may be in the
        image: nobody looked.
    """
    return _NOT_IN_IMAGE.sub(
        lambda found: (
            f"{'was' if found[1] == 'is' else 'were'} not {found[2] or ''}read (interrupted)"
        ),
        reason,
    )


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
