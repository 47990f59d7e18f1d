# SPDX-License-Identifier: LGPL-2.1-or-later
"""Many short strings, read a page at a time."""

from __future__ import annotations

from memcg_inspect.image.memory import SMALLEST_PAGE, Memory

__all__ = ("Strings", "text")

#: No name in the kernel is longer; what is not ended by then is none.
_LONGEST = 2 * SMALLEST_PAGE


def text(data: bytes) -> str:
    """Return the string that some bytes begin with, its bytes that are no text escaped."""
    return data.partition(b"\0")[0].decode(errors="backslashreplace")


class Strings:
    """Reads strings that lie close together, like those of one section of the kernel."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._pages: dict[int, bytes] = {}

    def at(self, address: int) -> str:
        """
        Return a string, its bytes that are no text escaped.

        :param address: ``const char *``
        :raises drgn.FaultError: if it cannot be read
        """
        found = b""
        while b"\0" not in found and len(found) < _LONGEST:
            at = address + len(found)
            found += self._page(at - at % SMALLEST_PAGE)[at % SMALLEST_PAGE :]
        return text(found)

    def _page(self, address: int) -> bytes:
        page = self._pages.get(address)
        if page is None:
            page = self._pages[address] = self._memory.read(address, SMALLEST_PAGE)
        return page
