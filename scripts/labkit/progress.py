# SPDX-License-Identifier: LGPL-2.1-or-later
"""Show progress on stderr for everything that takes longer than two seconds."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType

_FIRST_AFTER = 2.0
_PLAIN_EVERY = 30.0


class Progress:
    """Show what is being done, and for how long, until the block is left.

    On a terminal one line is redrawn each second and erased at the end. Otherwise (a log, CI)
    a line is written after two seconds, then each 30 seconds, and at the end.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._detail = ""
        self._done = threading.Event()
        self._began = time.monotonic()
        self._shown = False
        self._tty = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        if not self._shown:
            return
        if self._tty:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        else:
            end = "failed" if kind else "done"
            print(f"lab: {self._what}: {end} ({self._elapsed()})", file=sys.stderr, flush=True)

    def step(self, what: str) -> None:
        """Set the detail to show: what is being done within it."""
        self._detail = "" if what == self._what else f"- {what}"

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._began)
        return f"{seconds // 60}m{seconds % 60:02}s" if seconds >= 60 else f"{seconds}s"

    def _tell(self) -> None:
        if self._done.wait(_FIRST_AFTER):
            return
        pause = 1.0 if self._tty else _PLAIN_EVERY
        while True:
            self._shown = True
            text = f"lab: {self._what} ({self._elapsed()})"
            if self._detail:
                text += f" {self._detail}"
            if self._tty:
                sys.stderr.write(f"\r{text[:118]}\x1b[K")
            else:
                sys.stderr.write(text + "\n")
            sys.stderr.flush()
            if self._done.wait(pause):
                return


_current: list[Progress] = []


@contextlib.contextmanager
def doing(what: str) -> Iterator[Progress]:
    """Show progress about `what`; inside another block, as the detail of the outer one."""
    if _current:
        _current[-1].step(what)
        yield _current[-1]
        return
    with Progress(what) as progress:
        _current.append(progress)
        try:
            yield progress
        finally:
            _current.pop()
