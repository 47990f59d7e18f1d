# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Machine code of x86-64
----------------------

Finds instructions of a few forms in the text of a function. They are the forms that
:linux:`arch/x86/lib/insn.c` decodes as a prefix ``REX.W``, an opcode, ``ModRM``, maybe ``SIB``, and
a displacement of 32 bits. The text is searched, not decoded, so other bytes can look the same.
"""

from __future__ import annotations

import re
from functools import cache

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

#: ``REX.W``, with any of ``REX.R`` and ``REX.B``.
_REX = rb"[\x48\x49\x4c\x4d]"
#: A ModRM byte with a register and a displacement of 32 bits, and the SIB byte of ``rsp`` or
#: ``r12``.
_OPERAND = rb"[\x80-\xbf]\x24?"
#: ``call rel32`` and ``jmp rel32``, and their size in bytes.
_CALL, _JUMP, CALL_SIZE = 0xE8, 0xE9, 5
#: Offsets of the entries of a function, in bytes.
ENTRIES = (0,)
#: The smallest displacement that does not fit in one byte.
_LEAST_DISPLACEMENT = 128


@cache
def _pattern(opcodes: bytes, offset: int) -> re.Pattern[bytes]:
    displacement = re.escape(offset.to_bytes(4, "little"))
    return re.compile(_REX + b"[" + re.escape(opcodes) + b"]" + _OPERAND + displacement, re.DOTALL)


def loads_member(text: bytes, offset: int) -> bool:
    """
    Return whether a function may load a word at an offset in a structure: ``mov r64, m64``.

    :param offset: in bytes, 128 or more
    """
    assert offset >= _LEAST_DISPLACEMENT
    return _pattern(b"\x8b", offset).search(text) is not None


def stores_member(text: bytes, offset: int) -> bool:
    """
    Return whether a function may store a word from a register: ``mov m64, r64``.

    :param offset: in bytes, 128 or more
    """
    assert offset >= _LEAST_DISPLACEMENT
    return _pattern(b"\x89", offset).search(text) is not None


def called(text: bytes, address: int) -> set[int]:
    """
    Return the addresses that a function may call directly: ``call rel32``.

    Bytes that are no instruction can look like one. So not all addresses are those of functions.

    :param address: address of the first byte of *text*
    """
    return _targets(text, address, _CALL)


def jumped_to(text: bytes, address: int) -> set[int]:
    """Return the addresses that a function may jump to: ``jmp rel32``. See :func:`called`."""
    return _targets(text, address, _JUMP)


def _targets(text: bytes, address: int, opcode: int) -> set[int]:
    found = set()
    at = text.find(opcode)
    while 0 <= at <= len(text) - CALL_SIZE:
        after = at + CALL_SIZE
        displacement = int.from_bytes(text[at + 1 : after], "little", signed=True)
        found.add((address + after + displacement) % (1 << 64))
        at = text.find(opcode, at + 1)
    return found


def called_before(text: bytes, address: int) -> int | None:
    """
    Return the address that the call before a return address calls directly.

    :param text: the 5 bytes before the return address
    :param address: the return address
    :return: ``None`` if there is no such call: the call is indirect, or it is no return address
    """
    if len(text) != CALL_SIZE or text[0] != _CALL:
        return None
    return (address + int.from_bytes(text[1:], "little", signed=True)) % (1 << 64)


def is_thunk(name: str) -> bool:
    """Return whether a function stands for an indirect call: a retpoline."""
    return name.startswith(("__x86_indirect", "__pi___x86_indirect"))
