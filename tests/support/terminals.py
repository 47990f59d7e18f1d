# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a program writes to a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator, Mapping

__all__ = ("on_terminal", "read_terminal", "resize")

#: Colours. Whatever else moves the cursor or clears the screen is none of the program's.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def resize(terminal: int, columns: int) -> None:
    """Give a terminal so many columns."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))


def on_terminal(
    command: list[str], columns: int, more: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """
    Return the exit status of a command, and what it writes to a terminal of this width.

    Colours are left out, and no other escape sequence.

    :param more: variables of its environment
    """
    ours, theirs = pty.openpty()
    resize(theirs, columns)
    env = {**os.environ, **(more or {}), "TERM": "xterm"}
    for name in ("COLUMNS", "LINES"):
        env.pop(name, None)
    with subprocess.Popen(
        command, stdout=theirs, stderr=subprocess.PIPE, stdin=theirs, env=env
    ) as process:
        os.close(theirs)
        shown = b"".join(read_terminal(ours))
        status = process.wait(timeout=120)
    os.close(ours)
    return status, _COLOURS.sub("", shown.decode()).replace("\r\n", "\n")


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
