# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Files of results
----------------

A file has a line of JSON for each dump, in the order in which they were done. What is in it is not
done again. A line that was being written when the program was killed is cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import BinaryIO

from memcg_inspect.model import MemcgInspectError
from memcg_inspect.model_fleet import DumpResult, parse_result
from memcg_inspect.render.documents import record_document
from memcg_inspect.tables import SCHEMA

__all__ = ("ResultFile", "line_of", "result_file", "results_in")

#: The longest line that is read: thousands of causes.
_LONGEST = 16 << 20


def line_of(result: DumpResult) -> str:
    """Return a result as a line of JSON, in ASCII."""
    return json.dumps(record_document("fleet", result)) + "\n"


def results_in(name: str) -> Iterator[DumpResult]:
    """
    Yield the results in a file.

    :raises MemcgInspectError: if it cannot be read, or has other lines
    """
    try:
        with open(name, "rb") as file:
            yield from _results(name, file)
    except OSError as error:
        raise MemcgInspectError(f"{name}: {error.strerror}") from None


def _results(name: str, file: BinaryIO) -> Iterator[DumpResult]:
    number = 0
    while line := file.readline(_LONGEST):
        number += 1
        if not line.endswith(b"\n"):
            return  # it was not finished
        try:
            document = json.loads(line)
            if (document["schema"], document["command"]) != (SCHEMA, "fleet"):
                raise ValueError
            yield parse_result(document)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise MemcgInspectError(
                f"{name}: line {number} is none of memcg-inspect fleet"
            ) from None


@contextmanager
def result_file(name: str) -> Iterator[ResultFile]:
    """
    Open a file of results, or make one.

    :raises MemcgInspectError: if that fails
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(name, "a+b"))
        except OSError as error:
            raise MemcgInspectError(f"{name}: {error.strerror}") from None
        yield ResultFile(name, file)


class ResultFile:
    """
    A file to which results are added. One program at a time adds to it.

    :ivar done: the results that it had
    """

    def __init__(self, name: str, file: BinaryIO) -> None:
        """
        Read what a file has.

        :raises MemcgInspectError: if it has other lines, or if another program adds to it
        """
        self._name, self._file = name, file
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise MemcgInspectError(f"{name}: another memcg-inspect fleet writes to it") from None
        self._file.seek(0)
        self.done = list(_results(name, self._file))
        self._cut()

    def _cut(self) -> None:
        """Remove a last line that was not finished."""
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - _LONGEST))
        tail = self._file.read()
        unfinished = len(tail) - (tail.rfind(b"\n") + 1)
        self._file.truncate(size - unfinished)

    def add(self, result: DumpResult) -> None:
        """
        Add a result.

        :raises MemcgInspectError: if it cannot be written
        """
        try:
            self._file.write(line_of(result).encode())
            self._file.flush()
        except OSError as error:
            raise MemcgInspectError(f"{self._name}: {error.strerror}") from None
