# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Sources of BTF
--------------

BTF is read from the image, between the symbols ``__start_BTF`` and ``__stop_BTF``; from
``/sys/kernel/btf`` of the running kernel; or from a file, which is raw BTF or an ELF file with a
section ``.BTF``.
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

#: What a user can do about missing BTF.
ADVICE = (
    "give the kernel's vmlinux with debug info (-s), from its debug package "
    "(Debian: linux-image-RELEASE-dbg)"
)

SYS = "/sys/kernel/btf"

#: The most bytes of BTF. Kernels refuse more than 16 MiB of names.
LIMIT = 128 << 20


class Source(NamedTuple):
    """
    BTF that was read.

    :ivar name: its origin, e.g. ``BTF of the image``
    :ivar data: its contents
    """

    name: str
    data: bytes


def is_running_kernel(prog: Program) -> bool:
    """Return whether a program debugs the running kernel."""
    running = ProgramFlags.IS_LIVE | ProgramFlags.IS_LOCAL | ProgramFlags.IS_LINUX_KERNEL
    return bool(prog.flags & running == running)


def from_image(prog: Program, symbols: Symbols) -> Source:
    """
    Read the BTF of the kernel from an image.

    :raises BtfError: if the kernel has no BTF, or the image lacks it
    """
    if is_running_kernel(prog) and os.access(f"{SYS}/vmlinux", os.R_OK):
        return from_file(f"{SYS}/vmlinux")
    ends = [symbols.named(name) for name in ("__start_BTF", "__stop_BTF")]
    if not all(ends):
        if symbols.named("_stext") and not symbols.named("init_task"):
            why = (
                "its symbols have no variables, so its BTF cannot be found (CONFIG_KALLSYMS_ALL=n)"
            )
        else:
            why = "this kernel has no BTF (it was built without CONFIG_DEBUG_INFO_BTF)"
        raise BtfError(f"{why}: {ADVICE}")
    start, stop = (found[0].address for found in ends)
    if not 0 < stop - start <= LIMIT:
        raise BtfError(
            f"the BTF of this kernel has an impossible size of {stop - start} bytes: {ADVICE}"
        )
    try:
        return Source("BTF of the image", prog.read(start, stop - start))
    except FaultError as error:
        raise BtfError(
            f"part of the BTF of this kernel is not in the image (address {error.address:#x}: "
            f"{error.message}): {ADVICE}"
        ) from None


def from_file(path: str) -> Source:
    """
    Read BTF from a file.

    :param path: raw BTF, or an ELF file with a section ``.BTF``
    :raises BtfError: if the file has no BTF
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
