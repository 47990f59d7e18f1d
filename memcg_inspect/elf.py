# SPDX-License-Identifier: LGPL-2.1-or-later
"""
ELF files
---------

Reads program headers and sections of an ELF file, 32-bit or 64-bit, in either byte order, as
:linux:`include/uapi/linux/elf.h` and elf(5) define them. Knows nothing of drgn.

A file may be truncated or hostile: every offset, length and count that it gives is compared
with the size of the file before it is used.
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO, NamedTuple

from memcg_inspect.model import ImageError

__all__ = ("MAGIC", "PT_LOAD", "ElfError", "ElfFile", "Section", "Segment")

#: ``ELFMAG``, the first bytes of every ELF file.
MAGIC = b"\x7fELF"

PT_LOAD = 1

_ELFCLASS32, _ELFCLASS64 = 1, 2
_ELFDATA2LSB, _ELFDATA2MSB = 1, 2
_SHT_NOBITS = 8

# What a 16-bit member of the header holds if the number needs more bits, which section header 0
# then has in sh_info, sh_size and sh_link.
_PN_XNUM, _SHN_UNDEF, _SHN_XINDEX = 0xFFFF, 0, 0xFFFF

# A vmlinux built with -ffunction-sections has 100,000 section headers, which take 6 MiB.
_TABLE_LIMIT = 64 << 20


class ElfError(ImageError):
    """An ELF file that is truncated or damaged."""


class Segment(NamedTuple):
    """
    One program header, ``struct elf32_phdr`` or ``struct elf64_phdr``.

    :ivar type: ``p_type``, e.g. :data:`PT_LOAD`
    :ivar offset: ``p_offset``, in bytes from the start of the file
    :ivar virtual: ``p_vaddr``
    :ivar physical: ``p_paddr``
    :ivar file_size: ``p_filesz``, in bytes; may reach past the end of a truncated file
    :ivar memory_size: ``p_memsz``, in bytes
    """

    type: int
    offset: int
    virtual: int
    physical: int
    file_size: int
    memory_size: int


class Section(NamedTuple):
    """
    Where a section is in the file; all of it is inside the file.

    :ivar offset: ``sh_offset``, in bytes from the start of the file
    :ivar size: ``sh_size``, in bytes
    """

    offset: int
    size: int


class _SectionHeader(NamedTuple):
    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class ElfFile:
    """
    An ELF file.

    :param file: open for reading in binary mode; stays open
    :raises ElfError: if it is not an ELF file, or its header is truncated
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, os.SEEK_END)
        ident = self._read(0, 16, "the bytes of e_ident")
        if ident[:4] != MAGIC:
            raise ElfError("not an ELF file")
        if ident[4] not in (_ELFCLASS32, _ELFCLASS64):
            raise ElfError(f"unknown ELF class {ident[4]}")
        if ident[5] not in (_ELFDATA2LSB, _ELFDATA2MSB):
            raise ElfError(f"unknown ELF byte order {ident[5]}")
        self._wide = ident[4] == _ELFCLASS64
        self._order = "<" if ident[5] == _ELFDATA2LSB else ">"
        header = self._form("HHIQQQIHHHHHH", "HHIIIIIHHHHHH")
        fields = header.unpack(self._read(16, header.size, "the bytes of the header"))
        self._phoff, self._shoff = fields[4:6]
        self._phentsize, phnum, self._shentsize, shnum, shstrndx = fields[8:13]
        first = None
        if phnum == _PN_XNUM or (shnum == _SHN_UNDEF and self._shoff) or shstrndx == _SHN_XINDEX:
            first = self._section_headers(1)[0]
        self._phnum: int = first.info if first and phnum == _PN_XNUM else phnum
        self._shnum: int = first.size if first and shnum == _SHN_UNDEF else shnum
        self._shstrndx: int = first.link if first and shstrndx == _SHN_XINDEX else shstrndx

    def segments(self) -> list[Segment]:
        """
        Read all program headers.

        :raises ElfError: if they are not all in the file
        """
        form = self._form("IIQQQQQQ", "IIIIIIII")
        rows = self._table(self._phoff, self._phentsize, self._phnum, form, "program headers")
        if self._wide:
            return [Segment(row[0], *row[2:7]) for row in rows]
        return [Segment(*row[:6]) for row in rows]

    def section(self, name: bytes) -> Section | None:
        """
        Find a section by name.

        :return: ``None`` if there is none of this name that has bytes in the file
        :raises ElfError: if the section headers, their names, or the section found are not all
            in the file
        """
        headers = self._section_headers(self._shnum)
        if not headers or self._shstrndx == _SHN_UNDEF:
            return None
        if self._shstrndx >= len(headers):
            raise ElfError(f"e_shstrndx is {self._shstrndx} of {len(headers)} sections")
        names = headers[self._shstrndx]
        self._check(names.offset, names.size, "section names")
        wanted = name + b"\0"
        for header in headers:
            if header.type == _SHT_NOBITS or header.name + len(wanted) > names.size:
                continue
            if self._read(names.offset + header.name, len(wanted), "section names") == wanted:
                self._check(header.offset, header.size, f"section {name.decode()}")
                return Section(header.offset, header.size)
        return None

    def read(self, section: Section) -> bytes:
        """
        Read the content of a section.

        :raises ElfError: if it is not all in the file
        """
        return self._read(section.offset, section.size, "the section")

    def _form(self, wide: str, narrow: str) -> struct.Struct:
        return struct.Struct(self._order + (wide if self._wide else narrow))

    def _section_headers(self, count: int) -> list[_SectionHeader]:
        form = self._form("IIQQQQIIQQ", "IIIIIIIIII")
        rows = self._table(self._shoff, self._shentsize, count, form, "section headers")
        return [_SectionHeader(*row) for row in rows]

    def _table(
        self, offset: int, entry: int, count: int, form: struct.Struct, what: str
    ) -> list[tuple[int, ...]]:
        if count == 0:
            return []
        if entry < form.size:
            raise ElfError(f"{what} of {entry} bytes each, not {form.size}")
        if entry * count > _TABLE_LIMIT:
            raise ElfError(f"{count} {what} cannot be right")
        data = self._read(offset, entry * count, what)
        return [form.unpack_from(data, at) for at in range(0, len(data), entry)]

    def _check(self, offset: int, size: int, what: str) -> None:
        if offset + size > self.size:
            raise ElfError(
                f"the file is truncated or damaged: {what} end at byte {offset + size:,}, "
                f"the file has {self.size:,} bytes"
            )

    def _read(self, offset: int, size: int, what: str) -> bytes:
        self._check(offset, size, what)
        self._file.seek(offset)
        data = self._file.read(size)
        if len(data) != size:
            raise ElfError(f"the file ends inside {what}")
        return data
