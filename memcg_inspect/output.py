# SPDX-License-Identifier: LGPL-2.1-or-later
"""Output that cannot be written, to standard output or to a file, is an error in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp
from typing import TextIO

__all__ = ("check_output", "failed_output", "give_up", "output", "write_file")


def _error(message: str) -> Exception:
    from memcg_inspect.model import MemcgInspectError  # --help needs no more than the parser

    return MemcgInspectError(message)


def check_output() -> None:
    """
    Check that there is a standard output.

    :raises MemcgInspectError: if it is closed
    """
    if sys.stdout is None:
        raise _error("output cannot be written: standard output is closed")


def output(write: Callable[[], None]) -> None:
    """
    Write to standard output.

    :param write: does it
    :raises MemcgInspectError: as :func:`failed_output`
    """
    with failed_output():
        write()


@contextmanager
def failed_output() -> Iterator[None]:
    """
    Say in one line that standard output cannot be written.

    :raises MemcgInspectError: unless the reader of a pipe has closed it
    """
    try:
        yield
    except BrokenPipeError:
        give_up(sys.stdout)  # the reader of the pipe has closed it
    except OSError as error:
        give_up(sys.stdout)
        raise _error(f"output cannot be written: {error.strerror}") from None


def write_file(name: str, text: str, mode: int = 0o644) -> None:
    """
    Write a file. Another program that reads it meanwhile has the old one or the new one whole.

    :param mode: its permissions, less those of the umask
    :raises MemcgInspectError: if it cannot be written
    """
    target, temporary = Path(name), None
    try:
        handle, temporary = mkstemp(".tmp", f".{target.name}.", target.parent)
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        raise _error(f"{name}: {error.strerror}") from None


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found


def give_up(stream: TextIO) -> None:
    """Keep Python from flushing the rest at exit, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
