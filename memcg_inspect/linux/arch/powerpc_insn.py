# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Machine code of powerpc
-----------------------

Finds instructions of a few forms in the text of a little-endian function, as
:linux:`arch/powerpc/include/asm/ppc-opcode.h` describes them. All instructions have 4 bytes.

Functions have two entries (ELF ABI v2): calls from the kernel itself go to the local one, which is
behind two instructions.
"""

from __future__ import annotations

import struct

__all__ = (
    "CALL_SIZE",
    "ENTRIES",
    "called",
    "called_before",
    "is_thunk",
    "jumped_to",
    "loads_member",
    "stores_member",
)

#: Size of an instruction in bytes, and so of a call.
CALL_SIZE = 4
#: Offsets of the entries of a function, in bytes.
ENTRIES = (0, 8)
#: ``ld r, offset(r)`` and ``std r, offset(r)``: all but the registers.
_MEMBER_MASK, _LOAD, _STORE = 0xFC00FFFF, 0xE8000000, 0xF8000000
#: Offsets are multiples of a word's half, and less than this.
_UNIT, _MOST_OFFSET = 4, 1 << 15
#: The base register, and that of the stack pointer.
_BASE_SHIFT, _REGISTER_MASK, _SP = 16, 0x1F, 1
#: ``bl`` and ``b``, and the signed distance in bytes.
_BRANCH_MASK, _CALL, _JUMP = 0xFC000003, 0x48000001, 0x48000000
_DISTANCE_MASK, _DISTANCE_SIGN = 0x03FFFFFC, 0x02000000


def _instructions(text: bytes) -> tuple[int, ...]:
    number = len(text) // CALL_SIZE
    return struct.unpack_from(f"<{number}I", text)


def _has_member(text: bytes, offset: int, kind: int) -> bool:
    if offset % _UNIT or not 0 <= offset < _MOST_OFFSET:
        return False
    return any(
        insn & _MEMBER_MASK == kind | offset and insn >> _BASE_SHIFT & _REGISTER_MASK != _SP
        for insn in _instructions(text)
    )


def loads_member(text: bytes, offset: int) -> bool:
    """
    Return whether a function may load a word at an offset in a structure.

    :param offset: in bytes
    """
    return _has_member(text, offset, _LOAD)


def stores_member(text: bytes, offset: int) -> bool:
    """
    Return whether a function may store a word at an offset in a structure.

    :param offset: in bytes
    """
    return _has_member(text, offset, _STORE)


def _targets(text: bytes, address: int, kind: int) -> set[int]:
    return {
        (address + CALL_SIZE * number + ((insn & _DISTANCE_MASK) ^ _DISTANCE_SIGN) - _DISTANCE_SIGN)
        % (1 << 64)
        for number, insn in enumerate(_instructions(text))
        if insn & _BRANCH_MASK == kind
    }


def called(text: bytes, address: int) -> set[int]:
    """
    Return the addresses that a function calls directly.

    :param address: address of the first byte of *text*
    """
    return _targets(text, address, _CALL)


def jumped_to(text: bytes, address: int) -> set[int]:
    """Return the addresses that a function jumps to without a condition. See :func:`called`."""
    return _targets(text, address, _JUMP)


def called_before(text: bytes, address: int) -> int | None:
    """
    Return the address that the call before a return address calls directly.

    :param text: the instruction before the return address
    :param address: the return address
    :return: ``None`` if there is no such call: the call is indirect, or it is no return address
    """
    return next(iter(_targets(text, address - CALL_SIZE, _CALL)), None)


def is_thunk(name: str) -> bool:
    """Return whether a function stands for an indirect call. powerpc has none."""
    return False
