# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a program writes to a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator

__all__ = ("read_terminal",)


def read_terminal(terminal: int) -> Iterator[bytes]:
    """
    Return what is written to a terminal, until nobody has it open.

    :param terminal: the first descriptor that ``pty.openpty()`` returned
    """
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # how a terminal says that nobody is left
            return
        if not data:
            return
        yield data
