# SPDX-License-Identifier: LGPL-2.1-or-later
"""Run a command in a terminal, and look at its screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyte

from support.signals import with_interrupts

#: A guard against hangs, in seconds: on a busy machine a page takes long.
_PATIENCE = 600.0


def _control() -> None:
    """Make standard input the terminal whose Ctrl-C this process gets."""
    with_interrupts()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class TerminalScreen:
    """What a terminal of some size shows."""

    def __init__(
        self, command: Sequence[str], columns: int, rows: int, controls: bool, **popen: Any
    ) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._host, terminal = pty.openpty()
        self.terminal = os.ttyname(terminal)
        self._resize(columns, rows)
        self.settings = termios.tcgetattr(terminal)
        self.raw = b""
        env = {**os.environ, "TERM": "xterm-256color", **popen.pop("env", {})}
        env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command, **{"stdin": terminal, "stdout": terminal, "stderr": terminal, **popen},
            env=env, start_new_session=True, preexec_fn=_control if controls else with_interrupts,
        )  # fmt: skip
        self._terminal = terminal
        self._open: tuple[int, ...] = (self._host, terminal)

    def _resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._host, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, as a user who drags a window."""
        self._screen.resize(rows, columns)
        self._resize(columns, rows)

    def press(self, keys: str) -> None:
        """Type keys."""
        os.write(self._host, keys.encode())

    def lines(self) -> list[str]:
        """Return the lines that are shown."""
        return [line.rstrip() for line in self._screen.display]

    def reversed_lines(self) -> list[str]:
        """Return the lines that begin in reverse video."""
        rows = self._screen.buffer
        return [line for n, line in enumerate(self.lines()) if rows[n][0].reverse]

    def settings_now(self) -> list[Any]:
        """Return the settings of the terminal."""
        return termios.tcgetattr(self._terminal)

    def wait(self, wanted: Callable[[list[str]], object], patience: float = _PATIENCE) -> list[str]:
        """Wait until the lines are as wanted, and return them."""
        end = time.monotonic() + patience
        while not wanted(self.lines()):
            left = end - time.monotonic()
            assert left > 0, "\n".join(["the screen is:", *self.lines()])
            self.read(min(left, 1.0))
        return self.lines()

    def read(self, seconds: float) -> None:
        """Read what is written, for a time at most."""
        if select.select([self._host], [], [], seconds)[0]:
            with contextlib.suppress(OSError):  # the terminal has no writer any more
                data = os.read(self._host, 1 << 16)
                self.raw += data
                self._stream.feed(data)

    def ended(self, patience: float = _PATIENCE) -> int:
        """Wait until the command has ended, and return its exit status."""
        end = time.monotonic() + patience
        while self.process.poll() is None:
            assert time.monotonic() < end, "\n".join(["it did not end:", *self.lines()])
            self.read(0.1)
        self.read(0.1)
        return self.process.returncode

    def hang_up(self) -> None:
        """Close the terminal, as a user who closes its window."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open = ()

    def close(self) -> None:
        """End the command."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.hang_up()


@contextlib.contextmanager
def terminal_of(
    command: Sequence[str],
    columns: int = 80,
    rows: int = 24,
    controls: bool = True,
    **popen: Any,
) -> Iterator[TerminalScreen]:
    """
    Run a command in a terminal until the end of the block.

    :param controls: whether the command gets the terminal's Ctrl-C
    """
    screen = TerminalScreen(command, columns, rows, controls, **popen)
    try:
        yield screen
    finally:
        screen.close()
