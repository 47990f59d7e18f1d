# SPDX-License-Identifier: LGPL-2.1-or-later
"""Standard output that cannot be written is an error in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

__all__ = ("check_output", "failed_output", "give_up", "is_written", "output", "say")


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


def is_written(text: str) -> bool:
    """
    Write text to standard output; return whether anybody reads it.

    :raises MemcgInspectError: as :func:`failed_output`
    """
    with failed_output():
        sys.stdout.write(text)
        sys.stdout.flush()
        return True
    return False


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


def say(line: str) -> None:
    """Write a line to standard error, if there is one that can be written."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def give_up(stream: TextIO) -> None:
    """Keep Python from flushing the rest at exit, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
