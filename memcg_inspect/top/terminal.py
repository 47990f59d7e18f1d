# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A terminal that shows one page after the other
----------------------------------------------

rich writes to it. Keys are read here: neither rich nor the standard library knows their names.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from memcg_inspect.tables import UsageError

__all__ = ("GONE", "Terminal", "opened_terminal")

#: In place of a key: nobody is at the terminal any more.
GONE = "gone"
#: Sequences that terminals send, see :manpage:`console_codes(4)` and xterm's ctlseqs.
_KEYS = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left",
    b"\x1bOA": "up", b"\x1bOB": "down", b"\x1bOC": "right", b"\x1bOD": "left",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\x1b[Z": "back tab",
    b"\x1b[H": "home", b"\x1b[F": "end", b"\x1b[1~": "home", b"\x1b[4~": "end",
    b"\x1bOH": "home", b"\x1bOF": "end", b"\x1b": "escape", b"\t": "tab",
    b"\r": "enter", b"\n": "enter", b"\x7f": "backspace", b"\x08": "backspace",
    b"\x15": "erase",
}  # fmt: skip
#: Seconds that the rest of a sequence may take to arrive.
_PAUSE = 0.05
_MOST_BYTES = 1024

_Handler = Callable[[int, "FrameType | None"], None]


class Terminal:
    """
    A terminal without echo, on its alternate screen.

    :ivar is_gone: whether nobody is at it any more, so that it cannot be written to
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._keys = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._keys)
        self._stops = self._continues = False
        self.is_gone = False

    def size(self) -> tuple[int, int]:
        """Return columns and lines."""
        return self._console.width, self._console.height

    def show(self, lines: Sequence[Text]) -> None:
        """Show lines in place of those that are there."""
        if self._live is not None:
            try:
                self._live.update(Group(*lines), refresh=True)
            except OSError:
                self.is_gone = True
                self.wake()

    def wake(self) -> None:
        """Make :meth:`wait` return. Any thread, and any handler of a signal, may do so."""
        with suppress(BlockingIOError):
            os.write(self._wake_in, b"\0")

    def wake_on_signals(self) -> int:
        """
        Make :meth:`wait` return on every signal.

        Python runs a handler between two instructions. A signal that comes after the last of them,
        and before the wait begins, would wait with it.

        :return: what :func:`signal.set_wakeup_fd` takes to undo it
        """
        return signal.set_wakeup_fd(self._wake_in, warn_on_full_buffer=False)

    def wait(self, seconds: float) -> list[str]:
        """
        Wait for keys, for :meth:`wake`, or for the time.

        :return: the keys by name, characters as they are; :data:`GONE` if there will be none
        """
        ready, _, _ = select.select([self._keys, self._wake_out], [], [], max(0.0, seconds))
        if self._wake_out in ready:
            os.read(self._wake_out, _MOST_BYTES)
        self._stop_or_continue()
        if self.is_gone:
            return [GONE]
        if self._keys not in ready:
            return []
        try:
            data = os.read(self._keys, _MOST_BYTES)
            if data.endswith(b"\x1b") and select.select([self._keys], [], [], _PAUSE)[0]:
                data += os.read(self._keys, _MOST_BYTES)
        except OSError:
            return [GONE]
        return list(_names(data)) if data else [GONE]

    def enter(self) -> None:
        """Take the terminal over."""
        tty.setcbreak(self._keys, termios.TCSADRAIN)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._live.start()

    def leave(self) -> None:
        """Give the terminal back as it was."""
        live, self._live = self._live, None
        try:
            if live is not None:
                live.stop()
        except OSError:
            self.is_gone = True
        finally:
            with suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)

    def handlers(self) -> dict[int, _Handler]:
        """Return what to do on signals."""
        return {
            signal.SIGWINCH: lambda number, frame: self.wake(),
            signal.SIGTSTP: self._ask_to_stop,
            signal.SIGCONT: self._ask_to_continue,
        }

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._stops = True
        self.wake()

    def _ask_to_continue(self, number: int, frame: FrameType | None) -> None:
        self._continues = True
        self.wake()

    def _stop_or_continue(self) -> None:
        """Stop when the terminal has been given back (Ctrl-Z), and take it over again."""
        if self._stops:
            self._stops = False
            self.leave()
            ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            # The kernel ignores it if nobody could continue this process.
            signal.raise_signal(signal.SIGTSTP)
            signal.signal(signal.SIGTSTP, ours)
            self._enter_again()
        elif self._continues:
            # Somebody else had it meanwhile.
            self.leave()
            self._enter_again()
        self._continues = False

    def _enter_again(self) -> None:
        """Take the terminal over again, if it is still there."""
        try:
            self.enter()
        except (OSError, termios.error):
            # A terminal that hangs up sends SIGHUP, then SIGCONT: tty_signal_session_leader().
            self.is_gone = True


def _names(data: bytes) -> Iterator[str]:
    """Return the keys that a terminal has sent."""
    known = sorted(_KEYS, key=len, reverse=True)
    while data:
        found = next((some for some in known if data.startswith(some)), None)
        if found == b"\x1b" and len(data) > 2 and data[1:2] in b"[O":
            # A sequence that is none of these ends with a letter or a tilde.
            end = next((n for n in range(2, len(data)) if 0x40 <= data[n] <= 0x7E), len(data) - 1)
            data = data[end + 1 :]
            continue
        if found is not None:
            yield _KEYS[found]
            data = data[len(found) :]
            continue
        size = next((n for n in range(1, 5) if _is_text(data[:n])), 1)
        with suppress(UnicodeDecodeError):
            yield data[:size].decode()
        data = data[size:]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@contextmanager
def opened_terminal() -> Iterator[Terminal]:
    """
    Take the terminal over, and give it back at the end, also after an error.

    :raises UsageError: if there is none
    """
    # The size is that of the terminal, also when that changes.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    console = Console(highlight=False, markup=False, emoji=False)
    # rich's is_terminal says whether colours are wanted.
    are_terminals = all(some is not None and some.isatty() for some in (sys.stdin, sys.stdout))
    if not are_terminals or not console.is_terminal or console.is_dumb_terminal:
        raise UsageError("top needs a terminal; --batch prints pages one after the other")
    terminal = Terminal(console)
    handlers = terminal.handlers()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    woken = terminal.wake_on_signals()
    try:
        terminal.enter()
        yield terminal
    finally:
        try:
            terminal.leave()
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)
