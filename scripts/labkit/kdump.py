# SPDX-License-Identifier: LGPL-2.1-or-later
"""makedumpfile's formats, made on the host or received from a crashed guest."""

import re
import struct
import subprocess
from pathlib import Path
from typing import BinaryIO

from . import foreign
from .arch import Arch
from .elf import program_headers_first
from .errors import LabError
from .run import need, run, tool

_FLAT_SIGNATURE = b"makedumpfile\0\0\0\0"
_FLAT_HEADER = 4096
_FLAT_ENTRY = struct.Struct(">qq")


def convert(elf: Path, out: Path, level: int) -> None:
    """Convert an image of QEMU's to a kdump file with makedumpfile -d `level`. Modifies `elf`."""
    need("makedumpfile")
    program_headers_first(elf)
    out.unlink(missing_ok=True)
    command = [tool("makedumpfile"), "-c", "-d", str(level), elf, out]
    run(command, what=f"makedumpfile at level {level}")


class Flattened:
    """A writer for makedumpfile's flattened stream (-F): puts each piece at its offset."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._data = bytearray()
        self._begun = False
        self.ended = False

    def feed(self, data: bytes) -> None:
        """Take the next piece of the stream."""
        self._data += data
        if not self._begun:
            if len(self._data) < _FLAT_HEADER:
                return
            if not self._data.startswith(_FLAT_SIGNATURE):
                raise LabError("the stream of makedumpfile is not in its flattened format")
            del self._data[:_FLAT_HEADER]
            self._begun = True
        at = 0
        while not self.ended and len(self._data) - at >= _FLAT_ENTRY.size:
            offset, size = _FLAT_ENTRY.unpack_from(self._data, at)
            if offset < 0:
                self.ended = True
                break
            if len(self._data) - at - _FLAT_ENTRY.size < size:
                break
            at += _FLAT_ENTRY.size
            self._file.seek(offset)
            self._file.write(memoryview(self._data)[at : at + size])
            at += size
        del self._data[:at]

    def finish(self) -> None:
        """End the stream."""
        if not self.ended:
            raise LabError("the stream of makedumpfile ended early")


class Plain:
    """A writer that copies a stream and leaves holes for zeros."""

    _PIECE = 1 << 16

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._data = bytearray()
        self._zeros = bytes(self._PIECE)

    def feed(self, data: bytes) -> None:
        """Take the next piece of the stream."""
        self._data += data
        whole = len(self._data) // self._PIECE * self._PIECE
        for at in range(0, whole, self._PIECE):
            piece = self._data[at : at + self._PIECE]
            if piece == self._zeros:
                self._file.seek(self._PIECE, 1)
            else:
                self._file.write(piece)
        del self._data[:whole]

    def finish(self) -> None:
        """End the stream."""
        self._file.write(self._data)
        self._file.truncate()


def program_and_libraries(arch: Arch) -> dict[str, bytes]:
    """Return makedumpfile and the libraries it is linked with, by path."""
    if arch.cross:
        return foreign.programs(arch, ["makedumpfile"], ["makedumpfile"])
    need("makedumpfile")
    program = tool("makedumpfile")
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    paths = re.findall(r"(?:=> |^\s+)(/\S+) \(0x", listed, re.MULTILINE)
    files = {path: Path(path).read_bytes() for path in paths}
    files["/bin/makedumpfile"] = Path(program).read_bytes()
    return files
