# SPDX-License-Identifier: LGPL-2.1-or-later
"""
ELF dumps
---------

What drgn takes from an ELF dump and what is not memory of the kernel.

QEMU's ``dump-guest-memory`` writes segments whose ``p_vaddr`` is their ``p_paddr``. drgn reads
physical memory at these low virtual addresses, so a NULL pointer does not fault.
:func:`unmap_low_addresses` makes it fault.

``makedumpfile -E`` excludes pages at the end of a segment by making ``p_filesz`` less than
``p_memsz``. drgn reads such memory as zeroes, as a loader of programs does. So an excluded page
looks like a page of zeroes. :func:`hide_holes` makes reading an excluded page a fault, as in the
kdump format.
"""

from __future__ import annotations

import re
from pathlib import Path

from drgn import FaultError, PlatformFlags, Program

from memcg_inspect.elf import MAGIC, PT_LOAD, ElfError, ElfFile, Segment
from memcg_inspect.model import ImageError

__all__ = (
    "LEFT_OUT",
    "UNMAPPED",
    "check_elf",
    "cut_short",
    "has_high_half",
    "has_holes",
    "hide_holes",
    "is_protected",
    "protect",
    "translates_addresses",
    "unmap_low_addresses",
)

#: Message of the fault.
LEFT_OUT = "left out of the ELF dump"

#: Message of drgn for an address in no segment, when it does not know how to translate it.
_NO_SEGMENT = "could not find memory segment"

#: Message of drgn for an address that the kernel's page tables do not map.
UNMAPPED = "address is not mapped"

#: The address of the kernel's first function in VMCOREINFO.
_STEXT = re.compile(rb"^SYMBOL\(_stext\)=([0-9a-f]{1,16})$", re.MULTILINE)
#: The split of an address space of 32 bits is not known here. This is what
#: ``CONFIG_DEFAULT_MMAP_MIN_ADDR`` keeps unmapped.
_LEAST = 64 << 10

_CACHE = ("memcg_inspect", "elf_holes")
_HIGH_HALF = ("memcg_inspect", "high_half")
_PROTECTED = ("memcg_inspect", "elf_protected")


#: Addresses end here, and offsets in a file (``off_t``) at half of it.
_END = 1 << 64


def check_elf(path: str) -> None:
    """
    Check that the program headers of an ELF dump are in its file, and can be right.

    drgn and libelf take them as they are.

    :param path: path of the dump; nothing is done for other formats
    :raises ElfError: if the program headers are truncated or damaged
    """
    for segment in _segments(path)[0]:
        offset, size = segment.offset, segment.file_size
        if offset + size > _END // 2 or segment.memory_size > _END // 2:
            raise ElfError(f"a segment of {max(size, segment.memory_size):#x} bytes at {offset:#x}")
        for start in (segment.virtual, segment.physical):
            # Of a segment without physical address, p_paddr is -1.
            if start != _END - 1 and start + segment.memory_size > _END:
                raise ElfError(f"a segment at {start:#x} exceeds the address space")


def protect(prog: Program, path: str) -> None:
    """
    Make reading what is no memory of the kernel a :class:`drgn.FaultError`, once for a program.

    :param path: path of its dump
    :raises ElfError: if the program headers are truncated or damaged
    :raises OSError: if the dump cannot be read
    """
    if not is_protected(prog):
        hide_holes(prog, path)
        unmap_low_addresses(prog, path)
        prog.cache[_PROTECTED] = True


def is_protected(prog: Program) -> bool:
    """Return whether :func:`protect` has run for a program."""
    return _PROTECTED in prog.cache


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


def unmap_low_addresses(prog: Program, path: str) -> None:
    """
    Make reading an address that the kernel does not use a :class:`drgn.FaultError`.

    :param path: path of the dump; nothing is done for other formats, which drgn reads through the
        kernel's page tables
    :raises ElfError: if the program headers are truncated or damaged
    """

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        raise FaultError(UNMAPPED, address)

    platform = prog.platform
    if platform is None or not _segments(path)[0]:
        return
    if has_high_half(prog):
        prog.add_memory_segment(0, 1 << 63, read, False)
    elif not platform.flags & PlatformFlags.IS_64_BIT:
        prog.add_memory_segment(0, _LEAST, read, False)


def has_high_half(prog: Program) -> bool:
    """
    Return whether all addresses of the kernel have the highest bit set, and no others.

    It is so on all architectures of 64 bits but s390, whose direct map begins at 0. The address of
    ``_stext`` in VMCOREINFO tells them apart.

    :return: ``True`` if VMCOREINFO is damaged, since most machines are like that
    """
    found: bool | None = prog.cache.get(_HIGH_HALF)
    if found is None:
        platform = prog.platform
        is_64_bit = platform is not None and bool(platform.flags & PlatformFlags.IS_64_BIT)
        found = prog.cache[_HIGH_HALF] = is_64_bit and not _has_low_code(prog)
    return found


def _has_low_code(prog: Program) -> bool:
    match = _STEXT.search(_vmcoreinfo(prog))
    if match is None or int(match[1], 16) >> 63:
        return False
    try:
        prog.read(int(match[1], 16), 1)
    except FaultError:
        return False
    return True


def _vmcoreinfo(prog: Program) -> bytes:
    try:
        return bytes(prog["VMCOREINFO"].string_())
    except (FaultError, KeyError):
        return b""


def translates_addresses(prog: Program, has_debug_info: bool) -> bool:
    """
    Return whether drgn can read virtual addresses of the architecture, as far as this shows.

    :param has_debug_info: whether vmlinux will be loaded
    :raises ImageError: if VMCOREINFO is so damaged that nothing can be read, or if drgn needs
        vmlinux to read anything
    """
    match = _STEXT.search(_vmcoreinfo(prog))
    try:
        # Without the address of anything, reading shows at least whether VMCOREINFO can be used.
        prog.read(0 if match is None else int(match[1], 16), 1)
    except FaultError as error:
        return match is None or str(error.message) != _NO_SEGMENT
    except UnicodeDecodeError:
        # libkdumpfile quotes what it cannot parse, such as OSRELEASE, and drgn decodes that.
        raise ImageError("the dump cannot be read: its VMCOREINFO is damaged") from None
    except LookupError as error:
        # Before commit 36e826b568e4 ("powerpc/vmcore: Add MMU information to vmcoreinfo") (in
        # v6.7), VMCOREINFO does not tell the MMU of powerpc, and drgn reads cur_cpu_spec.
        if not has_debug_info:
            raise ImageError(
                f"drgn needs the debug info of this kernel to translate addresses ({error}): name "
                "its vmlinux with -s"
            ) from None
    return True


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
