# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Machine code whose instructions all have 4 bytes
------------------------------------------------

What finds a load, a store, a call and a jump among them, for :linux:`arch/arm64/lib/insn.c` and
:linux:`arch/powerpc/lib/code-patching.c`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ("FixedInstructions",)

#: Size of an instruction in bytes.
_SIZE = 4
#: No instruction has a larger offset.
_MOST_OFFSET = 1 << 15
_REGISTER_MASK = 0x1F


class FixedInstructions(NamedTuple):
    """
    The forms of little-endian instructions that are looked for.

    :ivar member_mask: bits of a load or a store of a word at an offset, without its registers
    :ivar load: value of these bits of a load, but for the offset
    :ivar store: the same of a store
    :ivar unit: offsets are multiples of it, in bytes
    :ivar offset_shift: where an offset in bytes would begin
    :ivar base_shift: where the number of the base register begins, which has 5 bits
    :ivar sp: number of the stack pointer
    :ivar branch_mask: bits that tell calls and jumps
    :ivar call: value of these bits of a call
    :ivar jump: the same of a jump
    :ivar distance_mask: bits of a signed distance
    :ivar distance_unit: what a distance counts, in bytes
    """

    member_mask: int
    load: int
    store: int
    unit: int
    offset_shift: int
    base_shift: int
    sp: int
    branch_mask: int
    call: int
    jump: int
    distance_mask: int
    distance_unit: int

    def loads_member(self, text: bytes, offset: int) -> bool:
        """
        Return whether a function may load a word at an offset in a structure.

        :param offset: in bytes
        """
        return self._has_member(text, offset, self.load)

    def stores_member(self, text: bytes, offset: int) -> bool:
        """
        Return whether a function may store a word at an offset in a structure.

        :param offset: in bytes
        """
        return self._has_member(text, offset, self.store)

    def called(self, text: bytes, address: int) -> set[int]:
        """
        Return the addresses that a function calls directly.

        :param address: address of the first byte of *text*
        """
        return self._targets(text, address, self.call)

    def jumped_to(self, text: bytes, address: int) -> set[int]:
        """Return the addresses that a function jumps to without a condition."""
        return self._targets(text, address, self.jump)

    def called_before(self, text: bytes, address: int) -> int | None:
        """
        Return the address that the call before a return address calls directly.

        :param text: the instruction before the return address
        :param address: the return address
        :return: ``None`` if there is no such call: the call is indirect, or it is no return address
        """
        return next(iter(self._targets(text, address - _SIZE, self.call)), None)

    def _has_member(self, text: bytes, offset: int, kind: int) -> bool:
        if offset % self.unit or not 0 <= offset < _MOST_OFFSET:
            return False
        wanted = kind | offset << self.offset_shift
        return any(
            insn & self.member_mask == wanted
            and insn >> self.base_shift & _REGISTER_MASK != self.sp
            for insn in _instructions(text)
        )

    def _targets(self, text: bytes, address: int, kind: int) -> set[int]:
        sign = 1 << self.distance_mask.bit_length() - 1
        found = set()
        for number, insn in enumerate(_instructions(text)):
            if insn & self.branch_mask == kind:
                distance = ((insn & self.distance_mask) ^ sign) - sign
                at = address + _SIZE * number
                found.add((at + distance * self.distance_unit) % (1 << 64))
        return found


def _instructions(text: bytes) -> tuple[int, ...]:
    return struct.unpack_from(f"<{len(text) // _SIZE}I", text)
