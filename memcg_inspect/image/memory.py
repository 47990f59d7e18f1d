# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Bulk reads
----------

Every structure that is walked more than a thousand times is read through here:
whole pieces with one ``Program.read``, and columns taken out of them by strides.
Reads are counted, so that tests can hold a reader to its shape.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Literal

from drgn import FaultError, PlatformFlags, Program

__all__ = ("PIECE", "SMALLEST_PAGE", "Memory", "filled")

#: Bytes of one bulk read: the size at which reads of a dump are fastest.
PIECE = 2 << 20

#: No kernel has smaller pages: what is missing from a dump is missing in these units.
SMALLEST_PAGE = 4096


#: Nothing that is read at once is larger, whatever a damaged length says.
LARGEST = 1 << 30


class Memory:
    """
    The memory of one program.

    :ivar order: byte order of the image
    :ivar word_size: ``sizeof(unsigned long)`` of the image
    :ivar reads: number of reads so far
    :ivar bytes_read: bytes read so far
    """

    def __init__(self, prog: Program) -> None:
        if prog.platform is None:
            raise ValueError("the program has no platform")
        self.prog = prog
        little = bool(prog.platform.flags & PlatformFlags.IS_LITTLE_ENDIAN)
        self.order: Literal["little", "big"] = "little" if little else "big"
        self.word_size = 8 if prog.platform.flags & PlatformFlags.IS_64_BIT else 4
        self._code: Literal["Q", "I"] = "Q" if self.word_size == 8 else "I"
        self._native = self.order == sys.byteorder
        self._limit = 1 << 8 * self.word_size
        self.reads = 0
        self.bytes_read = 0

    def read(self, address: int, size: int) -> bytes:
        """
        Read *size* bytes at a virtual address.

        :param address: taken modulo the size of a pointer, like any sum of pointers in C
        :raises drgn.FaultError: if any of them is not in the image
        """
        self.reads += 1
        self.bytes_read += size
        address %= self._limit
        if address + size > self._limit:
            raise FaultError("address is past the end of memory", address)
        if not 0 <= size <= LARGEST:
            # Made of a length that changed while it was read, or is damaged.
            raise FaultError(f"{size} bytes cannot be one thing", address)
        data: bytes = self.prog.read(address, size)
        return data

    def word(self, address: int) -> int:
        """Read one ``unsigned long``."""
        return int.from_bytes(self.read(address, self.word_size), self.order)

    def word_at(self, data: bytes, offset: int) -> int:
        """Take one ``unsigned long`` out of *data*."""
        return int.from_bytes(data[offset : offset + self.word_size], self.order)

    def signed_at(self, data: bytes, offset: int) -> int:
        """Take one ``long`` out of *data*."""
        return int.from_bytes(data[offset : offset + self.word_size], self.order, signed=True)

    def words(self, data: bytes, start: int = 0, stride: int | None = None) -> list[int]:
        """
        Take a column of ``unsigned long`` out of *data*.

        :param start: byte offset of the first one
        :param stride: bytes from one to the next; one word if not given
        """
        size = self.word_size
        stride = size if stride is None else stride
        usable = len(data) - len(data) % size
        if start % size or stride % size:
            return [
                int.from_bytes(data[at : at + size], self.order)
                for at in range(start, len(data) - size + 1, stride)
            ]
        if self._native:
            view = memoryview(data)[:usable].cast(self._code)
            column: list[int] = view[start // size :: stride // size].tolist()
            return column
        swapped = array(self._code, data[:usable])
        swapped.byteswap()
        return swapped[start // size :: stride // size].tolist()

    def unpacker(self, words: int) -> Callable[[bytes], tuple[int, ...]]:
        """Return what takes the first words of a small structure apart, faster than a column."""
        order = "<" if self.order == "little" else ">"
        return Struct(f"{order}{words}{self._code}").unpack_from

    def byte_of_word(self, offset: int, n: int) -> int:
        """Return the offset of the *n*-th least significant byte of the word at *offset*."""
        return offset + n if self.order == "little" else offset + self.word_size - 1 - n

    def pieces(self, address: int, size: int, unit: int) -> Iterator[tuple[int, bytes | None]]:
        """
        Read a long range in pieces.

        A piece that faults is read again in page-sized parts, so that one missing
        page hides no more than itself.

        :param unit: size of an element: no piece splits one
        :return: (offset in the range, the bytes or ``None`` if they are not there)
        """
        step = max(PIECE - PIECE % unit, unit)
        for offset in range(0, size, step):
            length = min(step, size - offset)
            try:
                yield offset, self.read(address + offset, length)
            except FaultError:
                yield from self._parts(address, offset, length, unit)

    def _parts(
        self, address: int, offset: int, length: int, unit: int
    ) -> Iterator[tuple[int, bytes | None]]:
        step = max(SMALLEST_PAGE - SMALLEST_PAGE % unit, unit)
        for at in range(offset, offset + length, step):
            part = min(step, offset + length - at)
            try:
                yield at, self.read(address + at, part)
            except FaultError:
                yield at, None


def filled(data: bytes, unit: int) -> Iterator[tuple[int, bytes]]:
    """
    Walk the parts of *data*, a page each, that are not all 0.

    :param unit: size of an element: no part splits one
    :return: (offset, the part)
    """
    step = max(SMALLEST_PAGE - SMALLEST_PAGE % unit, unit)
    empty = bytes(step)
    for offset in range(0, len(data), step):
        part = data[offset : offset + step]
        if part != empty[: len(part)]:
            yield offset, part
