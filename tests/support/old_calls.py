# SPDX-License-Identifier: LGPL-2.1-or-later
"""What calls that have returned left on the stack of a task."""

from __future__ import annotations

import re

from support.planting import Overlay, Write

_WORD = 8


def clear_calls(overlay: Overlay, start: int, size: int, names: str = "") -> None:
    """
    Write 0 over addresses of functions that are on a stack.

    :param start: address of the stack, and its *size* in bytes
    :param names: a pattern of functions; all if it is not given
    """
    prog = overlay.prog
    data = prog.read(start, size)
    for offset in range(0, size, _WORD):
        word = int.from_bytes(data[offset : offset + _WORD], "little")
        try:
            name = prog.symbol(word).name
        except LookupError:
            continue
        if re.search(names, name):
            overlay.write((Write(start + offset, bytes(_WORD)),))
