# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Machine code of arm64
---------------------

Finds instructions of a few forms in the text of a function, as
:linux:`arch/arm64/include/asm/insn.h` describes them. All instructions have 4 bytes and are
little-endian.
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
ENTRIES = (0,)
#: ``ldr x, [x, #imm]`` and ``str x, [x, #imm]``: mask, and the value of these bits.
_MEMBER_MASK, _LOAD, _STORE = 0xFFC00000, 0xF9400000, 0xF9000000
#: Where the offset is, in units of 8 bytes.
_OFFSET_SHIFT, _OFFSET_MASK, _UNIT = 10, 0xFFF, 8
#: The base register, and the number that means the stack pointer.
_BASE_SHIFT, _REGISTER_MASK, _SP = 5, 0x1F, 31
#: ``bl`` and ``b``, and the signed distance in units of instructions.
_BRANCH_MASK, _CALL, _JUMP, _DISTANCE_BITS = 0xFC000000, 0x94000000, 0x14000000, 26


def _instructions(text: bytes) -> tuple[int, ...]:
    number = len(text) // CALL_SIZE
    return struct.unpack_from(f"<{number}I", text)


def _has_member(text: bytes, offset: int, kind: int) -> bool:
    number, rest = divmod(offset, _UNIT)
    if rest or number > _OFFSET_MASK:
        return False
    wanted = kind | number << _OFFSET_SHIFT
    mask = _MEMBER_MASK | _OFFSET_MASK << _OFFSET_SHIFT
    return any(
        insn & mask == wanted and insn >> _BASE_SHIFT & _REGISTER_MASK != _SP
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
    half = 1 << _DISTANCE_BITS - 1
    return {
        (address + CALL_SIZE * (number + ((insn & 2 * half - 1) ^ half) - half)) % (1 << 64)
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
    """Return whether a function stands for an indirect call. arm64 has none."""
    return False
