# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Images that other processes open
--------------------------------

A :class:`Place` says which image to open, and can be pickled. A process of another machine must see
the same files at the same paths.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from drgn import Program

from memcg_inspect.image.dump_file import nothing_to_report
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.model import ImageError

__all__ = ("Place", "code_of_program", "place_of")

#: Bytes at the beginning of a dump that tell it from others: the headers and the notes, which have
#: the registers of each CPU.
_HEAD = 1 << 20


@dataclass(frozen=True)
class Place:
    """
    An image, as other processes open it.

    :ivar source: what to open
    :ivar files: size of each file, and a hash of how it begins
    :ivar code: hash of this program
    """

    source: ImageSource
    files: tuple[tuple[int, str], ...]
    code: str

    def opened(self) -> Program:
        """
        Open the image in another process.

        :raises ImageError: if that fails, or if it is another image
        """
        host = os.uname().nodename
        if code_of_program() != self.code:
            raise ImageError(f"{host} has another version of memcg-inspect")
        try:
            if _files(self.source) != self.files:
                raise ImageError(f"{self.source.name} is another file there")
            return open_program(self.source)
        except OSError as error:
            raise ImageError(f"{host}: {self.source.name}: {error.strerror}") from None
        except ImageError as error:
            raise ImageError(f"{host}: {error}") from None


def place_of(source: ImageSource) -> Place:
    """
    Return how other processes open an image, which this process has opened.

    Paths are made absolute.

    :raises OSError: if it cannot be read
    """

    def absolute(path: str | None) -> str | None:
        return None if path is None else os.path.abspath(path)

    shared = replace(
        source,
        core=absolute(source.core),
        parts=tuple(map(os.path.abspath, source.parts)),
        symbols=tuple(map(os.path.abspath, source.symbols)),
        debug_directories=tuple(map(os.path.abspath, source.debug_directories)),
        vmcoreinfo=absolute(source.vmcoreinfo),
        report=nothing_to_report,
    )
    return Place(shared, _files(shared), code_of_program())


@cache
def code_of_program() -> str:
    """Return a hash of this program: what another version reads is not merged."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _files(source: ImageSource) -> tuple[tuple[int, str], ...]:
    found = []
    for path in (source.core, *source.parts):
        assert path is not None, "what is running is read by one process"
        with open(path, "rb") as file:
            head = hashlib.sha256(file.read(_HEAD)).hexdigest()
            found.append((os.fstat(file.fileno()).st_size, head))
    return tuple(found)
