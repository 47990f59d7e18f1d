# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Columns of an array of struct page
----------------------------------

A column is one member, or a part of one, of each ``struct page`` of an array
(:linux:`include/linux/mm_types.h`). Bytes of the same member lie ``sizeof(struct page)`` apart, so
a strided slice takes them all at once. A column of bits is an integer with a byte of 0 or 1 for
each page, the first page in the lowest byte: ``&`` and ``|`` then combine the bits of all pages at
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

__all__ = ("FlagColumn", "Marker", "PageColumns", "positions")

_NOT_ZERO = b"\0" + b"\1" * 255


@cache
def _table(mask: int, value: int) -> bytes:
    return bytes((byte & mask) == value for byte in range(256))


class Marker(NamedTuple):
    """
    A test of one byte of ``struct page``: ``(byte & mask) == value``.

    :ivar offset: offset of the byte in ``struct page``
    :ivar mask: bits of the byte to compare
    :ivar value: value of these bits if the test is true
    """

    offset: int
    mask: int
    value: int

    def is_set(self, raw: bytes) -> bool:
        """Return the result of the test for one ``struct page``."""
        return raw[self.offset] & self.mask == self.value


class FlagColumn(NamedTuple):
    """
    Some bits of ``page->flags``, collected in one byte.

    :ivar tables: for each byte of the flags that has such bits: its offset in ``struct page``, and
        a table from its value to the bits of the result
    """

    tables: tuple[tuple[int, bytes], ...]


class PageColumns:
    """
    The columns of an array of ``struct page``. Each is made once, when somebody asks for it.

    :ivar data: the array
    :ivar size: ``sizeof(struct page)``
    :ivar count: number of pages
    """

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size = data, size
        self.count = len(data) // size
        self._bytes: dict[int, bytes] = {}
        self._bits: dict[Marker | tuple[int, int], int] = {}
        self._flags: dict[FlagColumn, bytes] = {}

    @property
    def everything(self) -> int:
        """The column of bits that are all 1."""
        return _ones(self.count)

    def byte(self, offset: int) -> bytes:
        """Return the byte at an offset of each ``struct page``."""
        found = self._bytes.get(offset)
        if found is None:
            found = self._bytes[offset] = self.data[offset :: self.size]
        return found

    def of(self, marker: Marker) -> int:
        """Return the result of a test for each page, as a column of bits."""
        found = self._bits.get(marker)
        if found is None:
            marks = self.byte(marker.offset).translate(_table(marker.mask, marker.value))
            found = self._bits[marker] = _as_bits(marks)
        return found

    def all_of(self, markers: Iterable[Marker]) -> int:
        """
        Return the pages for which all tests are true, as a column of bits.

        :return: 0 if there are no tests
        """
        found: int | None = None
        for marker in markers:
            found = self.of(marker) if found is None else found & self.of(marker)
            if not found:
                return 0
        return found or 0

    def not_zero(self, offset: int, size: int) -> int:
        """
        Return whether a member of each page is not 0, as a column of bits.

        :param offset: offset of the member in ``struct page``
        :param size: its size, in bytes
        """
        found = self._bits.get((offset, size))
        if found is None:
            parts = (self.byte(byte) for byte in range(offset, offset + size))
            marks = _or(parts, self.count).translate(_NOT_ZERO)
            found = self._bits[offset, size] = _as_bits(marks)
        return found

    def flags(self, wanted: FlagColumn) -> bytes:
        """Return the collected flags of each page, one byte for each."""
        found = self._flags.get(wanted)
        if found is None:
            parts = [self.byte(offset).translate(table) for offset, table in wanted.tables]
            found = self._flags[wanted] = parts[0] if len(parts) == 1 else _or(parts, self.count)
        return found


@lru_cache(maxsize=8)
def _zeros(count: int) -> bytes:
    return bytes(count)


@lru_cache(maxsize=8)
def _ones(count: int) -> int:
    return int.from_bytes(b"\1" * count, "little")


def _as_bits(column: bytes) -> int:
    # Most columns of memory that nobody uses are 0. To compare them is faster than to convert them.
    return 0 if column == _zeros(len(column)) else int.from_bytes(column, "little")


def _or(parts: Iterable[bytes], count: int) -> bytes:
    total = 0
    for part in parts:
        total |= _as_bits(part)
    return total.to_bytes(count, "little")


def positions(column: int, count: int) -> Iterator[int]:
    """
    Return the indexes of the pages that a column of bits marks.

    :param count: number of pages
    """
    if not column:
        return
    data = column.to_bytes(count, "little")
    at = data.find(1)
    while at >= 0:
        yield at
        at = data.find(1, at + 1)
