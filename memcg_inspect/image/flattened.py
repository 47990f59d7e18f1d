# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Flattened dumps
---------------

``makedumpfile -F`` writes to a pipe, which cannot seek. So its output is a stream of records: a
``struct makedumpfile_header`` in a block of 4096 bytes, and then, for each piece of the dump, a
``struct makedumpfile_data_header`` with its offset and size, and the piece. All numbers are
big-endian. The offset -1 ends the stream. ``makedumpfile -R`` puts the pieces where they belong,
and so does :func:`unflatten`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from memcg_inspect.image.room import Output
from memcg_inspect.model import ImageError

__all__ = ("MAGIC", "Extent", "begins_with", "measure", "read_up_to", "unflatten")

#: ``MAKEDUMPFILE_SIGNATURE``.
MAGIC = b"makedumpfile\0\0\0\0"

#: ``struct makedumpfile_header`` after the signature, and what ``type`` and ``version`` are.
_HEADER, _KNOWN = struct.Struct(">qq"), (1, 1)
_HEADER_SIZE = 4096
#: ``struct makedumpfile_data_header``, and the offset of the last one.
_RECORD, _END = struct.Struct(">qq"), -1
#: Bytes that are copied together.
_PIECE = 1 << 20
#: Bytes of a dump that nothing is written to: what is left of blocks of headers, and of bitmaps.
#: Before the end of the stream, the list of pages may have gaps.
_MOST_GAPS = 1 << 30
#: No dump is larger.
_MOST_SIZE = 1 << 50


class Extent(NamedTuple):
    """
    What the records of a stream say.

    :ivar written: bytes of all pieces
    :ivar size: bytes of the file that they make
    """

    written: int
    size: int


def measure(file: BinaryIO, size: int) -> Extent:
    """
    Follow the records of a flattened dump without reading the pieces.

    :param size: size of the file
    :raises ImageError: if it is truncated or damaged
    """
    file.seek(0)
    _check_header(file.read)
    written, end = 0, 0
    for at, offset, length in _records(file):
        if at + length > size:
            raise _cut(at + length, size)
        written, end = written + length, max(end, offset + length)
    return Extent(written, _size(written, end))


def begins_with(path: str, magic: bytes) -> bool:
    """
    Return whether a file is a flattened dump that begins with these bytes.

    :raises OSError: if it cannot be read
    """
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return False
        # What is damaged is none of this question.
        with suppress(ImageError):
            for at, offset, _ in _records(file):
                if offset == 0:
                    file.seek(at)
                    return file.read(len(magic)) == magic
    return False


def unflatten(
    read: Callable[[int], bytes], output: Output, report: Callable[[int], None] = lambda done: None
) -> None:
    """
    Put the pieces of a flattened dump where they belong.

    :param read: function that returns the next bytes of the stream: as many as asked for, or fewer
        at its end
    :param report: function to call with the number of bytes that are done
    :raises ImageError: if the stream is truncated or damaged
    :raises NoRoomError: if there is no room for what it writes
    """
    _check_header(read)
    read_all(read, _HEADER_SIZE - len(MAGIC) - _HEADER.size)
    at, written, end = _HEADER_SIZE, 0, 0
    while True:
        offset, length = _record(read, at)
        if offset == _END:
            break
        written, end = written + length, max(end, offset + length)
        at += _RECORD.size + length
        for first in range(0, length, _PIECE):
            piece = read_all(read, min(_PIECE, length - first))
            output.write(offset + first, piece)
            report(written - length + first + len(piece))
    output.end_at(_size(written, end))


def _size(written: int, end: int) -> int:
    """Return the size of a dump whose last piece ends there."""
    if end > written + _MOST_GAPS:
        raise _damaged(f"a piece ends at byte {end:,}, all pieces have {written:,}")
    return end


def read_all(read: Callable[[int], bytes], size: int) -> bytes:
    """
    Return the next bytes of a stream.

    :raises ImageError: if there are fewer
    """
    data = read_up_to(read, size)
    if len(data) < size:
        raise ImageError("the stream is truncated: copy it again")
    return data


def read_up_to(read: Callable[[int], bytes], size: int) -> bytes:
    """
    Return the next bytes of a stream, fewer only at its end.

    :param read: function that returns the next bytes, as many as asked for or fewer
    """
    pieces, left = [], size
    while left > 0 and (piece := read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _check_header(read: Callable[[int], bytes]) -> None:
    if read_all(read, len(MAGIC)) != MAGIC:
        raise _damaged("its signature is missing")
    found = _HEADER.unpack(read_all(read, _HEADER.size))
    if found != _KNOWN:
        raise _damaged("type {} and version {} are unknown".format(*found))


def _records(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Return where each piece is in the file, and its offset and size in the dump."""
    at = _HEADER_SIZE
    while True:
        file.seek(at)
        offset, length = _record(file.read, at)
        if offset == _END:
            return
        at += _RECORD.size
        yield at, offset, length
        at += length


def _record(read: Callable[[int], bytes], at: int) -> tuple[int, int]:
    """Return offset and size of the next piece."""
    offset, length = _RECORD.unpack(read_all(read, _RECORD.size))
    is_wrong = offset < 0 or length <= 0 or offset + length > _MOST_SIZE
    if offset != _END and is_wrong:
        raise _damaged(f"a piece of {length:,} bytes at {offset:,}, in the record at {at:,}")
    return offset, length


def _cut(end: int, size: int) -> ImageError:
    return ImageError(
        f"the stream is truncated: a piece ends at byte {end:,}, the file has {size:,} bytes: copy "
        "it again"
    )


def _damaged(what: str) -> ImageError:
    return ImageError(f"the stream is damaged: {what}")
