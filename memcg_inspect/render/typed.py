# SPDX-License-Identifier: LGPL-2.1-or-later
"""Commands to type next, about the same image."""

from __future__ import annotations

import shlex
from typing import NamedTuple

__all__ = ("Typed",)


class Typed(NamedTuple):
    """
    How the user types commands.

    :ivar program: ``memcg-inspect`` or ``%memcg``
    :ivar image: the options that name the image
    """

    program: str = "memcg-inspect"
    image: tuple[str, ...] = ()

    def command(self, *words: str) -> str:
        """Return a command about the same image, as a shell reads it."""
        return f"{self.program} {shlex.join([*words, *self.image])}"
