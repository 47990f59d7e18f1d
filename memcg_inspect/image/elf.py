# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What an ELF dump leaves out
---------------------------

``makedumpfile -E`` writes the pages that it leaves out as the end of a segment that is longer in
memory than in the file, and drgn, as an ELF loader would, reads zeroes there. Whether a page was
zero or was left out cannot be told. So here it is not there: reading it is a fault, as it is in
the kdump format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from drgn import FaultError, Program

__all__ = ("LEFT_OUT", "cut_short", "has_holes", "hide_holes")

#: What the fault says.
LEFT_OUT = "left out of the ELF dump"

_MAGIC, _CLASS_64, _LITTLE = b"\x7fELF", 2, 1
_PT_LOAD, _PN_XNUM = 1, 0xFFFF


_CACHE = ("memcg_inspect", "elf_holes")


class _Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    virtual: int
    physical: int
    in_file: int
    in_memory: int
    align: int


def hide_holes(prog: Program, path: str) -> None:
    """
    Make reads of what an ELF dump leaves out fail.

    :param path: of the dump; one that is no 64-bit ELF file is left as it is
    """

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        raise FaultError(LEFT_OUT, address)

    for segment in _segments(Path(path)):
        size = segment.in_memory - segment.in_file
        if segment.kind != _PT_LOAD or size <= 0:
            continue
        prog.cache[_CACHE] = True
        prog.add_memory_segment(segment.physical + segment.in_file, size, read, True)
        if segment.virtual:
            prog.add_memory_segment(segment.virtual + segment.in_file, size, read, False)


def has_holes(prog: Program) -> bool:
    """Return whether an ELF dump leaves something out."""
    return _CACHE in prog.cache


def cut_short(path: str) -> str | None:
    """
    Return what is wrong with an ELF dump that ends before its last segment does.

    :param path: of the dump
    :return: ``None`` if nothing is, or it is no 64-bit ELF file
    """
    try:
        size = Path(path).stat().st_size
        end = max((s.offset + s.in_file for s in _segments(Path(path))), default=0)
    except OSError:
        return None
    if end <= size:
        return None
    return f"the file is truncated: it has {size:,} bytes of {end:,}"


def _segments(path: Path) -> Iterator[_Segment]:
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:4] != _MAGIC or header[4] != _CLASS_64:
            return
        order = "<" if header[5] == _LITTLE else ">"
        start, sections = struct.unpack_from(f"{order}QQ", header, 32)
        size, number = struct.unpack_from(f"{order}HH", header, 54)
        if number == _PN_XNUM:  # then the first section header has it
            file.seek(sections + 44)
            (number,) = struct.unpack(f"{order}I", file.read(4).ljust(4, b"\0"))
        file.seek(start)
        data = file.read(size * number)
    for at in range(0, len(data) - 55, max(size, 56)):
        yield _Segment(*struct.unpack_from(f"{order}IIQQQQQQ", data, at))
