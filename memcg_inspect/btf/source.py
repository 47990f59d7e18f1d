# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Where BTF comes from
--------------------

Gets the bytes: out of the image, where the kernel keeps them between ``__start_BTF`` and
``__stop_BTF``; from ``/sys/kernel/btf`` of the running kernel; or from a file, which holds
BTF itself or is an ELF file with a section ``.BTF``.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from drgn import FaultError, Program, ProgramFlags

from memcg_inspect.btf.parse import MAGIC, BtfError
from memcg_inspect.btf.symbols import Symbols

__all__ = ("ADVICE", "Source", "from_file", "from_image", "is_running_kernel")

#: Where types are to be had when there is no BTF.
ADVICE = (
    "give the kernel's vmlinux with debug info (-s), from its debug package "
    "(Debian: linux-image-RELEASE-dbg)"
)

SYS = "/sys/kernel/btf"

#: No kernel's BTF comes near; kernels refuse 16 MiB of names.
LIMIT = 128 << 20


class Source(NamedTuple):
    """
    BTF as it was found.

    :ivar name: what to call it, e.g. ``BTF of the image``
    """

    name: str
    data: bytes


def is_running_kernel(prog: Program) -> bool:
    """Return whether the program is the kernel that this runs on."""
    running = ProgramFlags.IS_LIVE | ProgramFlags.IS_LOCAL | ProgramFlags.IS_LINUX_KERNEL
    return bool(prog.flags & running == running)


def from_image(prog: Program, symbols: Symbols) -> Source:
    """
    Get the BTF of the kernel itself.

    :raises BtfError: if it has none, or it is not in the image
    """
    if is_running_kernel(prog) and os.access(f"{SYS}/vmlinux", os.R_OK):
        return from_file(f"{SYS}/vmlinux")
    ends = [symbols.named(name) for name in ("__start_BTF", "__stop_BTF")]
    if not all(ends):
        raise BtfError(
            f"this kernel has no BTF (it was built without CONFIG_DEBUG_INFO_BTF): {ADVICE}"
        )
    start, stop = (found[0].address for found in ends)
    if not 0 < stop - start <= LIMIT:
        raise BtfError(f"the BTF of this kernel cannot have {stop - start} bytes: {ADVICE}")
    try:
        return Source("BTF of the image", prog.read(start, stop - start))
    except FaultError as error:
        raise BtfError(
            f"the BTF of this kernel is not all in the image (address {error.address:#x}: "
            f"{error.message}): {ADVICE}"
        ) from None


def from_file(path: str) -> Source:
    """
    Get BTF from a file.

    :raises BtfError: if there is none in it
    """
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            if head[:4] != b"\x7fELF":
                if int.from_bytes(head[:2], "little") not in (MAGIC, _swap(MAGIC)):
                    raise BtfError(f"{path} is neither BTF nor an ELF file")
                return Source(f"BTF of {path}", head + file.read(LIMIT))
            place = _elf_section(file.fileno(), head, b".BTF")
            if place is None:
                raise BtfError(f"{path} has no section .BTF: {ADVICE}")
            data = os.pread(file.fileno(), min(place[1], LIMIT), place[0])
    except OSError as error:
        raise BtfError(f"{path}: {error.strerror}") from None
    except struct.error:
        raise BtfError(f"{path} is a damaged ELF file") from None
    return Source(f"BTF of {path}", data)


def _swap(magic: int) -> int:
    return magic >> 8 | (magic & 0xFF) << 8


def _elf_section(file: int, head: bytes, name: bytes) -> tuple[int, int] | None:
    """Return offset and size of a section of an ELF file of any class and byte order."""
    order, wide = "<" if head[5] == 1 else ">", head[4] == 2
    # Elf64_Ehdr and Elf32_Ehdr, from e_shoff on.
    table, size, count, names = (
        struct.unpack_from(f"{order}40xQ10xHHH", head)
        if wide
        else struct.unpack_from(f"{order}32xI10xHHH", head)
    )
    form = struct.Struct(f"{order}IIQQQQ" if wide else f"{order}IIIIII")
    raw = os.pread(file, size * count, table)
    sections = [form.unpack_from(raw, at) for at in range(0, len(raw), size or 1)]
    if names >= len(sections):
        return None
    strings = os.pread(file, min(sections[names][5], LIMIT), sections[names][4])
    for at, *_, offset, length in sections:
        if strings[at : at + len(name) + 1] == name + b"\0":
            return offset, length
    return None
