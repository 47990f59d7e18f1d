# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Bulk reads
----------

Structures that exist in large numbers are read through :class:`Memory`: whole arrays with one
``Program.read()`` for each piece. A member of all structures is a strided slice of the bytes. A
drgn :class:`~drgn.Object` would need one read for each member. Reads are counted, so that tests can
check how their number grows.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from struct import Struct
from typing import Literal, TypeAlias

from drgn import FaultError, PlatformFlags, Program

__all__ = ("PIECE", "SMALLEST_PAGE", "Blocks", "Memory", "Words", "filled")

#: Bytes of one bulk read. Larger reads are not faster, and slices of them are slower: they do not
#: fit into the cache of a core.
PIECE = 1 << 20

#: An array of ``unsigned long``.
Words: TypeAlias = "memoryview[int] | array[int]"

#: The smallest page size of any kernel, in bytes. Missing ranges of a dump are multiples of it.
SMALLEST_PAGE = 4096

#: The most bytes of one read. A larger length is taken for damaged.
LARGEST = 1 << 30

#: Size of a block, in bytes. A block is in an image as a whole, or not at all.
_BLOCK = SMALLEST_PAGE

#: Blocks that are kept: 8 MiB.
_MOST_BLOCKS = 2048


@cache
def _unpacker(format: str) -> Callable[..., tuple[int, ...]]:
    return Struct(format).unpack_from


class Memory:
    """
    The memory of one program.

    :ivar prog: the program
    :ivar order: byte order of the image
    :ivar word_size: ``sizeof(unsigned long)`` of the image, in bytes
    :ivar reads: number of reads so far
    :ivar bytes_read: number of bytes read so far
    :raises ValueError: if the program has no platform
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

        :param address: virtual address; it wraps around like a pointer in C
        :raises drgn.FaultError: if any of the bytes is not in the image, or if *size* is not a
            plausible length
        """
        self.reads += 1
        self.bytes_read += size
        address %= self._limit
        if address + size > self._limit:
            raise FaultError("the range exceeds the address space", address)
        if not 0 <= size <= LARGEST:
            # The length was read from memory that is damaged, or that changed while it was read.
            raise FaultError(f"{size} bytes is not a plausible length", address)
        try:
            data: bytes = self.prog.read(address, size)
        except OSError as error:  # the file of the image cannot be read there
            raise FaultError(f"cannot be read: {error.strerror or error}", address) from error
        return data

    def word(self, address: int) -> int:
        """
        Read one ``unsigned long``.

        :raises drgn.FaultError: if it is not in the image
        """
        return int.from_bytes(self.read(address, self.word_size), self.order)

    def word_at(self, data: bytes, offset: int) -> int:
        """Return the ``unsigned long`` at a byte offset of *data*."""
        return int.from_bytes(data[offset : offset + self.word_size], self.order)

    def signed_at(self, data: bytes, offset: int) -> int:
        """Return the ``long`` at a byte offset of *data*."""
        return int.from_bytes(data[offset : offset + self.word_size], self.order, signed=True)

    def words(self, data: bytes, start: int = 0, stride: int | None = None) -> list[int]:
        """
        Return a column of ``unsigned long``: the same member of each structure of an array.

        :param data: the array
        :param start: byte offset of the member in the first structure
        :param stride: size of a structure, in bytes; one word if not given
        """
        size = self.word_size
        stride = size if stride is None else stride
        if start % size or stride % size:
            return [
                int.from_bytes(data[at : at + size], self.order)
                for at in range(start, len(data) - size + 1, stride)
            ]
        column: list[int] = self.array(data)[start // size :: stride // size].tolist()
        return column

    def array(self, data: bytes) -> Words:
        """
        Return *data* as an array of ``unsigned long``; bytes after the last whole one are left out.

        Slices of it, with any step, are columns: see :meth:`words`.
        """
        usable = len(data) - len(data) % self.word_size
        if self._native:
            return memoryview(data)[:usable].cast(self._code)
        swapped = array(self._code, data[:usable])
        swapped.byteswap()
        return swapped

    def unpacker(self, words: int, signed: bool = False) -> Callable[..., tuple[int, ...]]:
        """
        Return a function that unpacks words of a structure.

        For one structure, that is faster than :meth:`words()`. The function takes the structure,
        and the byte offset of the first word, which is 0 if not given.

        :param words: number of words to unpack
        :param signed: whether they are of type ``long``, not ``unsigned long``
        """
        order = "<" if self.order == "little" else ">"
        code = self._code.lower() if signed else self._code
        return _unpacker(f"{order}{words}{code}")

    def byte_of_word(self, offset: int, n: int) -> int:
        """
        Return the byte offset of a byte of the word at *offset*.

        :param n: 0 for the least significant byte
        """
        return offset + n if self.order == "little" else offset + self.word_size - 1 - n

    def pieces(self, address: int, size: int, unit: int) -> Iterator[tuple[int, bytes | None]]:
        """
        Read a long range in pieces.

        A piece with a missing page is read again page by page: all other pages are returned.

        :param unit: size of an element of the range, in bytes; no element is split
        :return: byte offset of each piece in the range, and its bytes; ``None`` if it is missing
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
        for part in range(offset, offset + length, step):
            size = min(step, offset + length - part)
            try:
                yield part, self.read(address + part, size)
            except FaultError:
                yield part, None


class Blocks:
    """
    Reads of small structures that lie near each other: a block of memory is read once.

    Memory must not change meanwhile. The last :data:`_MOST_BLOCKS` blocks are kept.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._blocks: OrderedDict[int, bytes | None] = OrderedDict()

    def read(self, address: int, size: int) -> bytes:
        """
        Read *size* bytes at a virtual address.

        :raises drgn.FaultError: as :meth:`Memory.read`
        """
        offset = address % _BLOCK
        block = self._block(address - offset) if offset + size <= _BLOCK else None
        if block is None:
            return self._memory.read(address, size)
        return block[offset : offset + size]

    def word(self, address: int) -> int:
        """
        Return the ``unsigned long`` at a virtual address.

        :raises drgn.FaultError: if it is not in the image
        """
        return self._memory.word_at(self.read(address, self._memory.word_size), 0)

    def _block(self, start: int) -> bytes | None:
        """Return a block; ``None`` if not all of it can be read."""
        if start in self._blocks:
            self._blocks.move_to_end(start)
            return self._blocks[start]
        try:
            block = self._memory.read(start, _BLOCK)
        except FaultError:
            block = None
        self._blocks[start] = block
        if len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)
        return block


def filled(data: bytes, unit: int) -> Iterator[tuple[int, bytes]]:
    """
    Iterate over the pages of *data* that have a byte other than 0.

    :param unit: size of an element of *data*, in bytes; no element is split
    :return: byte offset of each page, and its bytes
    """
    step = max(SMALLEST_PAGE - SMALLEST_PAGE % unit, unit)
    empty = bytes(step)
    for offset in range(0, len(data), step):
        part = data[offset : offset + step]
        if part != empty[: len(part)]:
            yield offset, part
