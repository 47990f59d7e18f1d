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
from typing import NamedTuple

from drgn import FaultError, Program, ProgramFlags

from memcg_inspect.btf.parse import MAGIC, BtfError
from memcg_inspect.btf.symbols import Symbols
from memcg_inspect.elf import MAGIC as ELF_MAGIC
from memcg_inspect.elf import ElfError, ElfFile

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
            head = file.read(4)
            if head != ELF_MAGIC:
                if int.from_bytes(head[:2], "little") not in (MAGIC, _swap(MAGIC)):
                    raise BtfError(f"{path} is neither BTF nor an ELF file")
                return Source(f"BTF of {path}", head + file.read(LIMIT))
            elf = ElfFile(file)
            section = elf.section(b".BTF")
            if section is None:
                raise BtfError(f"{path} has no section .BTF: {ADVICE}")
            if section.size > LIMIT:
                raise BtfError(f"{path}: a section .BTF of {section.size} bytes is too large")
            data = elf.read(section)
    except OSError as error:
        raise BtfError(f"{path}: {error.strerror}") from None
    except ElfError as error:
        raise BtfError(f"{path} is a damaged ELF file: {error}") from None
    return Source(f"BTF of {path}", data)


def _swap(magic: int) -> int:
    return magic >> 8 | (magic & 0xFF) << 8
