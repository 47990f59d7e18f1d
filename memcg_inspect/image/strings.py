# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Strings
-------

Many short strings that are close together, read a page at a time.
"""

from __future__ import annotations

from drgn import FaultError, Object

from memcg_inspect.image.memory import SMALLEST_PAGE, Memory

__all__ = ("Strings", "c_string", "text")

#: No name in the kernel is longer, in bytes. Longer strings are cut, or unreadable.
_LONGEST = 2 * SMALLEST_PAGE


def text(data: bytes) -> str:
    """
    Return the C string at the start of *data*.

    :return: bytes that are not UTF-8 are escaped as ``\\xNN``
    """
    return data.partition(b"\0")[0].decode(errors="backslashreplace")


def c_string(pointer: Object) -> bytes:
    """
    Return the C string that a pointer points to.

    :param pointer: ``char *``
    :raises drgn.FaultError: if it cannot be read, or is longer than any string of the kernel
    """
    found: bytes = pointer.prog_.read_c_string(pointer.value_(), max_size=_LONGEST)
    if len(found) == _LONGEST:
        raise FaultError("a string that does not end", pointer.value_())
    return found


class Strings:
    """Reader of strings that are close together, e.g. in one section of the kernel."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._pages: dict[int, bytes] = {}

    def at(self, address: int) -> str:
        """
        Return the C string at an address.

        :param address: ``const char *``
        :return: bytes that are not UTF-8 are escaped as ``\\xNN``
        :raises drgn.FaultError: if the string cannot be read
        """
        data = b""
        while b"\0" not in data and len(data) < _LONGEST:
            end = address + len(data)
            offset = end % SMALLEST_PAGE
            data += self._page(end - offset)[offset:]
        return text(data)

    def _page(self, address: int) -> bytes:
        page = self._pages.get(address)
        if page is None:
            page = self._pages[address] = self._memory.read(address, SMALLEST_PAGE)
        return page
