# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Long walks and those who wait for them
--------------------------------------

Whoever started a long walk can ask how far it is, and to end it. The walk ends early then, in
order: what was not read is counted as not read.
"""

from __future__ import annotations

from collections.abc import Callable

from drgn import Program, ProgramFlags

from memcg_inspect.image.layout import per_program

__all__ = ("STOPPED", "Attention", "attention_of", "is_moving")

#: Why a part was not read, if the walk was ended.
STOPPED = "interrupted before it was read"


class Attention:
    """
    What a walk looks at between two pieces.

    :ivar stop: whether it should end
    :ivar held_still: whether somebody stopped the machine that is looked into
    :ivar tell: is told what is walked, and how far it is, as a share of the whole
    """

    def __init__(self) -> None:
        self.stop = False
        self.held_still = False
        self.tell: Callable[[str, float], None] = lambda what, share: None


@per_program
def attention_of(prog: Program) -> Attention:
    """Return the one :class:`Attention` of a program."""
    return Attention()


def is_moving(prog: Program) -> bool:
    """Return whether what is read may change meanwhile."""
    return bool(prog.flags & ProgramFlags.IS_LIVE) and not attention_of(prog).held_still
