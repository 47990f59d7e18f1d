# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Machine code of the image's architecture
----------------------------------------

Chooses what finds instructions in the text of a function, as :linux:`arch/x86/lib/insn.c` and
:linux:`arch/arm64/lib/insn.c` do.
"""

from __future__ import annotations

from typing import Protocol

from drgn import Architecture, PlatformFlags

from memcg_inspect.image.image import Image
from memcg_inspect.linux.arch import arm64_insn, powerpc_insn, s390_insn, x86_insn

__all__ = ("Instructions", "instructions")


class Instructions(Protocol):
    """What is known of an architecture's machine code. See the modules for each."""

    @property
    def CALL_SIZE(self) -> int:  # noqa: N802
        """Size of a direct call in bytes."""

    @property
    def ENTRIES(self) -> tuple[int, ...]:  # noqa: N802
        """Offsets of the entries of a function, in bytes."""

    def loads_member(self, text: bytes, offset: int) -> bool:
        """Return whether a function may load a word at an offset in a structure."""

    def stores_member(self, text: bytes, offset: int) -> bool:
        """Return whether a function may store a word at an offset in a structure."""

    def called(self, text: bytes, address: int) -> set[int]:
        """Return the addresses that a function may call directly."""

    def jumped_to(self, text: bytes, address: int) -> set[int]:
        """Return the addresses that a function may jump to."""

    def called_before(self, text: bytes, address: int) -> int | None:
        """Return the address that the call before a return address calls directly."""

    def is_thunk(self, name: str) -> bool:
        """Return whether a function stands for an indirect call."""


_KNOWN: dict[Architecture, Instructions] = {
    Architecture.X86_64: x86_insn,
    Architecture.AARCH64: arm64_insn,
    Architecture.PPC64: powerpc_insn,
    Architecture.S390X: s390_insn,
}


def instructions(image: Image) -> Instructions | None:
    """Return what is known of the machine code of an image; ``None`` for other architectures."""
    platform = image.prog.platform
    if platform is None:
        return None
    is_little = bool(platform.flags & PlatformFlags.IS_LITTLE_ENDIAN)
    if platform.arch == Architecture.PPC64 and not is_little:
        return None
    return _KNOWN.get(platform.arch)
