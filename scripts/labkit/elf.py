# SPDX-License-Identifier: LGPL-2.1-or-later
"""The little of ELF core files that the lab must know itself."""

import struct
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION_SIZE = 64
_PT_LOAD = 1


@dataclass(frozen=True)
class Segment:
    """One program header."""

    type: int
    offset: int
    physical: int
    file_size: int


def segments(path: Path) -> list[Segment]:
    """The program headers of a core file."""
    with open(path, "rb") as file:
        file.seek(0)
        data = file.read(_HEADER.size)
        if len(data) < _HEADER.size or data[:6] != b"\x7fELF\x02\x01":
            raise LabError(f"{path} is not a 64-bit ELF image")
        fields = _HEADER.unpack(data)
        phoff, phnum = fields[5], fields[10]
        file.seek(phoff)
        table = file.read(_SEGMENT.size * phnum)
    found = []
    for kind, _, offset, _, physical, size, _, _ in _SEGMENT.iter_unpack(table):
        found.append(Segment(kind, offset, physical, size))
    return found


def file_offset(table: list[Segment], physical: int, size: int) -> int:
    """Where in the file the memory at a physical address is."""
    for segment in table:
        start = physical - segment.physical
        if segment.type == _PT_LOAD and start >= 0 and start + size <= segment.file_size:
            return segment.offset + start
    raise LabError(f"the image does not hold physical address {physical:#x}")


def program_headers_first(path: Path) -> None:
    """Move the program headers to where makedumpfile looks for them: right at the start.

    QEMU puts the section headers before them; the two trade places.
    """
    with open(path, "r+b") as file:
        data = bytearray(file.read(_HEADER.size))
        fields = list(_HEADER.unpack(data))
        phoff, shoff, phnum, shnum = fields[5], fields[6], fields[10], fields[12]
        programs, sections = phnum * _SEGMENT.size, shnum * _SECTION_SIZE
        if phoff == _HEADER.size:
            return
        if shoff != _HEADER.size or phoff != shoff + sections:
            raise LabError(f"{path}: headers are not laid out as QEMU does it")
        file.seek(shoff)
        section_table = file.read(sections)
        program_table = file.read(programs)
        # QEMU gives the size of the ELF header as 8 also
        fields[5], fields[6], fields[8] = shoff, shoff + programs, _HEADER.size
        file.seek(0)
        file.write(_HEADER.pack(*fields) + program_table + section_table)
