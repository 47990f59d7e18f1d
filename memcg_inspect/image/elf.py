# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages that are missing from an ELF dump
---------------------------------------

``makedumpfile -E`` excludes pages at the end of a segment by making ``p_filesz`` less than
``p_memsz``. drgn reads such memory as zeroes, as a loader of programs does. So an excluded page
looks like a page of zeroes. :func:`hide_holes` makes reading an excluded page a fault, as in the
kdump format.
"""

from __future__ import annotations

from pathlib import Path

from drgn import FaultError, Program

from memcg_inspect.elf import MAGIC, PT_LOAD, ElfError, ElfFile, Segment

__all__ = ("LEFT_OUT", "cut_short", "has_holes", "hide_holes")

#: Message of the fault.
LEFT_OUT = "left out of the ELF dump"

_CACHE = ("memcg_inspect", "elf_holes")


def hide_holes(prog: Program, path: str) -> None:
    """
    Make reading excluded pages of an ELF dump a :class:`drgn.FaultError`.

    :param path: path of the dump; nothing is done for other formats
    :raises ElfError: if the program headers are truncated or damaged
    """

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        raise FaultError(LEFT_OUT, address)

    for segment in _segments(path)[0]:
        size = segment.memory_size - segment.file_size
        if segment.type != PT_LOAD or size <= 0:
            continue
        prog.cache[_CACHE] = True
        prog.add_memory_segment(segment.physical + segment.file_size, size, read, True)
        if segment.virtual:
            prog.add_memory_segment(segment.virtual + segment.file_size, size, read, False)


def has_holes(prog: Program) -> bool:
    """Return whether pages were excluded from the ELF dump of this program."""
    return _CACHE in prog.cache


def cut_short(path: str) -> str | None:
    """
    Describe how an ELF dump is truncated.

    :param path: path of the dump
    :return: ``None`` if it is complete, or not an ELF file
    """
    try:
        segments, size = _segments(path)
    except ElfError as error:
        return str(error)
    except OSError:
        return None
    end = max((segment.offset + segment.file_size for segment in segments), default=0)
    if end <= size:
        return None
    return f"the file is truncated: it has {size:,} bytes of {end:,}"


def _segments(path: str) -> tuple[list[Segment], int]:
    """Return the program headers of an ELF file and its size; none for other formats."""
    with Path(path).open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return [], 0
        elf = ElfFile(file)
        return elf.segments(), elf.size
