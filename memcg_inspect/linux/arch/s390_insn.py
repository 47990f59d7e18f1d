# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Machine code of s390
--------------------

Finds instructions of a few forms in the text of a function, as :linux:`arch/s390/kernel/dis.c`
describes them. An instruction has 2, 4 or 6 bytes. The text is searched, not decoded, so other
bytes can look the same.
"""

from __future__ import annotations

from collections.abc import Iterator

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

#: Size of ``brasl`` in bytes.
CALL_SIZE = 6
#: Offsets of the entries of a function, in bytes.
ENTRIES = (0,)
#: ``lg`` and ``stg``: the first byte of both, and the last of each.
_MEMBER, _LOAD, _STORE = 0xE3, 0x04, 0x24
_MEMBER_SIZE = 6
#: The stack pointer.
_SP = 15
#: An offset has 20 bits, and the highest of them is its sign.
_MOST_OFFSET = 1 << 19
#: ``brasl %r14``, ``jg`` and ``j``: two bytes, and then the distance in units of two bytes.
_CALL, _LONG_JUMP, _JUMP = b"\xc0\xe5", b"\xc0\xf4", b"\xa7\xf4"


def _found(text: bytes, start: bytes, size: int) -> Iterator[int]:
    """Yield where instructions may begin that start with some bytes."""
    at = text.find(start)
    while 0 <= at <= len(text) - size:
        if not at % 2:
            yield at
        at = text.find(start, at + 1)


def _has_member(text: bytes, offset: int, last: int) -> bool:
    if not 0 <= offset < _MOST_OFFSET:
        return False
    low, high = offset & 0xFFF, offset >> 12
    for at in _found(text, bytes([_MEMBER]), _MEMBER_SIZE):
        _, registers, base, rest, top, kind = text[at : at + _MEMBER_SIZE]
        found = ((base & 0xF) << 8 | rest, top, kind)
        # An index register would be another part of the address.
        if found == (low, high, last) and not registers & 0xF and 0 < base >> 4 < _SP:
            return True
    return False


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


def _targets(text: bytes, address: int, start: bytes, size: int) -> set[int]:
    found = set()
    for at in _found(text, start, size):
        distance = int.from_bytes(text[at + len(start) : at + size], "big", signed=True)
        found.add((address + at + 2 * distance) % (1 << 64))
    return found


def called(text: bytes, address: int) -> set[int]:
    """
    Return the addresses that a function may call directly.

    :param address: address of the first byte of *text*
    """
    return _targets(text, address, _CALL, 6)


def jumped_to(text: bytes, address: int) -> set[int]:
    """Return the addresses that a function may jump to without a condition. See :func:`called`."""
    return _targets(text, address, _LONG_JUMP, 6) | _targets(text, address, _JUMP, 4)


def called_before(text: bytes, address: int) -> int | None:
    """
    Return the address that the call before a return address calls directly.

    :param text: the 6 bytes before the return address
    :param address: the return address
    :return: ``None`` if there is no such call: the call is indirect, or it is no return address
    """
    if len(text) != CALL_SIZE:
        return None
    return next(iter(_targets(text, address - CALL_SIZE, _CALL, CALL_SIZE)), None)


def is_thunk(name: str) -> bool:
    """Return whether a function stands for an indirect call: an expoline."""
    return name.startswith("__s390_indirect_jump")
