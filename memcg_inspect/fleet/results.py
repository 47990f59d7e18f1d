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
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from io import RawIOBase
from typing import BinaryIO

from memcg_inspect.model import MemcgInspectError
from memcg_inspect.model_fleet import DumpResult, parse_result
from memcg_inspect.render.documents import record_document
from memcg_inspect.tables import SCHEMA

__all__ = ("ResultFile", "latest", "line_of", "result_file", "results_in")

#: The longest line that is read: thousands of causes.
_LONGEST = 16 << 20
#: How each line begins.
_BEGIN = f'{{"schema": {SCHEMA}, "command": "fleet"'.encode()


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


def latest(results: Iterable[DumpResult]) -> dict[str, DumpResult]:
    """Return the last result of each dump, by its path."""
    return {result.dump: result for result in results}


def _results(name: str, file: BinaryIO) -> Iterator[DumpResult]:
    number = 0
    while line := file.readline(_LONGEST):
        number += 1
        try:
            if _is_unfinished(line):
                return
            document = json.loads(line)
            if (document["schema"], document["command"]) != (SCHEMA, "fleet"):
                raise ValueError
            yield parse_result(document)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise MemcgInspectError(
                f"{name}: line {number} is none of memcg-inspect fleet"
            ) from None


def _is_unfinished(line: bytes) -> bool:
    """Return whether a line was being written when the program was killed."""
    size = min(len(line), len(_BEGIN))
    return not line.endswith(b"\n") and len(line) < _LONGEST and line[:size] == _BEGIN[:size]


@contextmanager
def result_file(name: str) -> Iterator[ResultFile]:
    """
    Open a file of results, or make one.

    :raises MemcgInspectError: if that fails
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(name, "a+b", buffering=0))
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise MemcgInspectError(f"{name} is no regular file")
        except OSError as error:
            raise MemcgInspectError(f"{name}: {error.strerror or error}") from None
        yield ResultFile(name, file)


class ResultFile:
    """
    A file to which results are added. One program at a time adds to it.

    :ivar done: the last result of each dump that it had
    """

    def __init__(self, name: str, file: RawIOBase) -> None:
        """
        Read what a file has, and cut off a last line that was not finished.

        :raises MemcgInspectError: if it has other lines, or if another program adds to it
        """
        self._name, self._file = name, file
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise MemcgInspectError(f"{name}: another memcg-inspect fleet writes to it") from None
        try:
            file.seek(0)
            lines = open(file.fileno(), "rb", closefd=False)  # noqa: SIM115
            self.done = latest(_results(name, lines))
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(0, size - _LONGEST))
            unfinished = lines.read().rpartition(b"\n")[2]
            if unfinished:
                file.truncate(size - len(unfinished))
        except OSError as error:
            raise MemcgInspectError(f"{name}: {error.strerror or error}") from None

    def add(self, result: DumpResult) -> None:
        """
        Add a result.

        :raises MemcgInspectError: if it cannot be written
        """
        left = memoryview(line_of(result).encode())
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            raise MemcgInspectError(f"{self._name}: {error.strerror}") from None
