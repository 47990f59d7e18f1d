# SPDX-License-Identifier: LGPL-2.1-or-later
"""ELF core files, read with pyelftools.

Few commands of the lab need it, so pyelftools is imported when one of them runs.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import LabError

# Names and contents of notes begin at multiples of it.
_NOTE_ALIGN = 4
# Size of struct elf64_note: sizes of the name and of the content, and the type.
_NOTE_HEADER = 12
# Type of the note with the registers of a CPU, and where it has a process number and the registers.
_PRSTATUS, _PID, _REGISTERS = 1, 32, 112


@dataclass(frozen=True)
class Segment:
    """One program header of type PT_LOAD (include/uapi/linux/elf.h, struct elf64_phdr)."""

    offset: int
    physical: int
    file_size: int


@contextmanager
def _opened(path: Path, mode: str = "rb") -> Iterator[Any]:
    """Open a 64-bit ELF file as an `elftools.elf.elffile.ELFFile`."""
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError:
        raise LabError(
            "reading ELF images needs pyelftools: pip install pyelftools, or run scripts/setup "
            "and use the Python in .venv"
        ) from None
    with open(path, mode) as file:
        try:
            image = ELFFile(file)
        except ELFError:
            image = None
        if image is None or image.elfclass != 64:
            raise LabError(f"{path} is not a 64-bit ELF image")
        yield image


def segments(path: Path) -> list[Segment]:
    """Return the PT_LOAD program headers of a core file."""
    with _opened(path) as image:
        return [
            Segment(one["p_offset"], one["p_paddr"], one["p_filesz"])
            for one in image.iter_segments("PT_LOAD")
        ]


def note(path: Path, name: str) -> bytes:
    """Return the content of a note of a core file, whose end may be missing."""
    with _opened(path) as image:
        for segment in image.iter_segments("PT_NOTE"):
            for one in segment.iter_notes():
                if one["n_name"] == name:
                    return bytes(one["n_descdata"])
    raise LabError(f"{path} has no note {name}")


def add_note(path: Path, name: str, data: bytes) -> None:
    """Add a note to a core file: all notes move to its end."""
    with _opened(path, "r+b") as image:
        header, file = image.header, image.stream
        (number,) = [n for n, s in enumerate(image.iter_segments()) if s["p_type"] == "PT_NOTE"]
        segment = image.get_segment(number)
        word = struct.Struct("<III" if image.little_endian else ">III")
        label = name.encode() + b"\0"
        parts = [segment.data(), word.pack(len(label), len(data), 0), label, data]
        notes = b"".join(part + bytes(-len(part) % _NOTE_ALIGN) for part in parts)
        file.seek(0, os.SEEK_END)
        file.write(bytes(-file.tell() % _NOTE_ALIGN))
        program = segment.header
        program["p_offset"] = file.tell()
        program["p_filesz"] = program["p_memsz"] = len(notes)
        file.write(notes)
        file.seek(header["e_phoff"] + number * header["e_phentsize"])
        file.write(image.structs.Elf_Phdr.build(program))


def make_little_endian(path: Path) -> None:
    """Give a core file of a little-endian machine that byte order, if its headers have the other.

    QEMU decides by a register that says nothing of guests on its machine pseries (HID0).
    number_cpus() writes the process numbers anew.
    """
    with _opened(path, "r+b") as image:
        if image.little_endian:
            return
        file, header, old = image.stream, image.header, image.structs
        new = type(old)(little_endian=True, elfclass=64)
        new.create_basic_structs()
        new.create_advanced_structs(header["e_type"], header["e_machine"], 0)
        notes = image.iter_segments("PT_NOTE")
        swapped = [(s["p_offset"], _swapped_notes(s.data())) for s in notes]
        programs = [new.Elf_Phdr.build(s.header) for s in image.iter_segments()]
        # The names of sections are not in the file.
        size = header["e_shentsize"]
        file.seek(header["e_shoff"])
        raw = [file.read(size) for _ in range(header["e_shnum"])]
        sections = [new.Elf_Shdr.build(old.Elf_Shdr.parse(one)) for one in raw]
        header["e_ident"]["EI_DATA"] = "ELFDATA2LSB"
        swapped += [
            (0, new.Elf_Ehdr.build(header)),
            (header["e_phoff"], b"".join(programs)),
            (header["e_shoff"], b"".join(sections)),
        ]
        for offset, data in swapped:
            file.seek(offset)
            file.write(data)


def number_cpus(path: Path) -> None:
    """Give each CPU's note with registers the number by which drgn finds it, from 1 on.

    QEMU 7.2 leaves it 0 on ppc64, and writes it in the byte order of this machine on s390.
    """
    with _opened(path, "r+b") as image:
        order: Literal["little", "big"] = "little" if image.little_endian else "big"
        for segment in image.iter_segments("PT_NOTE"):
            number = 0
            for kind, start, _ in _notes(segment.data(), order):
                if kind == _PRSTATUS:
                    number += 1
                    image.stream.seek(segment["p_offset"] + start + _PID)
                    image.stream.write(number.to_bytes(4, order))


def _notes(data: bytes, order: Literal["little", "big"]) -> Iterator[tuple[int, int, int]]:
    """Yield type, start and size of the content of each note."""
    at = 0
    while at + _NOTE_HEADER <= len(data):
        names, size, kind = (
            int.from_bytes(data[place : place + 4], order) for place in range(at, at + 12, 4)
        )
        start = at + _NOTE_HEADER + _aligned(names)
        yield kind, start, size
        at = start + _aligned(size)


def _swapped_notes(data: bytes) -> bytes:
    made, at = b"", 0
    for kind, start, size in _notes(data, "big"):
        header = struct.pack("<3I", *struct.unpack_from(">3I", data, at))
        end = start + _aligned(size)
        description = data[start:end]
        if kind:  # not text
            first = _REGISTERS if kind == _PRSTATUS else 0
            whole = first + (size - first) // 8 * 8
            words = struct.unpack(f">{(whole - first) // 8}Q", description[first:whole])
            swapped = struct.pack(f"<{len(words)}Q", *words)
            description = description[:first] + swapped + description[whole:]
        made += header + data[at + _NOTE_HEADER : start] + description
        at = end
    return made + data[at:]


def _aligned(size: int) -> int:
    return -(-size // _NOTE_ALIGN) * _NOTE_ALIGN


def file_offset(table: list[Segment], physical: int, size: int) -> int:
    """Return the offset in the file of `size` bytes at a physical address."""
    for segment in table:
        start = physical - segment.physical
        if start >= 0 and start + size <= segment.file_size:
            return segment.offset + start
    raise LabError(f"the image does not hold physical address {physical:#x}")


def program_headers_first(path: Path) -> None:
    """Move the program headers right behind the ELF header, where makedumpfile expects them.

    QEMU writes the section headers there and the program headers after them. Exchange the two.
    """
    with _opened(path, "r+b") as image:
        header, file = image.header, image.stream
        first = image.structs.Elf_Ehdr.sizeof()
        programs = header["e_phnum"] * header["e_phentsize"]
        sections = header["e_shnum"] * header["e_shentsize"]
        if header["e_phoff"] == first:
            return
        if header["e_shoff"] != first or header["e_phoff"] != first + sections:
            raise LabError(f"{path}: the headers are not in the order in which QEMU writes them")
        file.seek(first)
        section_table, program_table = file.read(sections), file.read(programs)
        # QEMU (dump/dump.c) writes 8 into e_ehsize, the size of the ELF header
        header["e_phoff"], header["e_shoff"], header["e_ehsize"] = first, first + programs, first
        file.seek(0)
        file.write(image.structs.Elf_Ehdr.build(header) + program_table + section_table)
