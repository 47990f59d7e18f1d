# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Truncated and damaged dumps in the kdump format
-----------------------------------------------

The format is that of ``makedumpfile`` and ``diskdump``: a ``struct disk_dump_header``, a
``struct kdump_sub_header``, two bitmaps of page frames, and a ``struct page_desc`` for each page
frame in the second bitmap, followed by the pages. Byte order and ``long`` are those of the machine.

libkdumpfile, which reads such dumps for drgn, maps the file. Where the file is shorter than its
headers say, or a page longer than a page can be, the process gets ``SIGBUS``.
:func:`check_kdump` compares the lengths in the headers with the size of the file first.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from typing import BinaryIO, NamedTuple

from memcg_inspect.model import ImageError

__all__ = ("check_kdump",)

#: ``KDUMP_SIGNATURE`` and ``DISK_DUMP_SIGNATURE``.
_SIGNATURES = (b"KDUMP   ", b"DISKDUMP")
#: Offsets of ``block_size`` in ``struct disk_dump_header``, and of ``split`` in ``struct
#: kdump_sub_header``, for machines whose ``long`` has 8 and 4 bytes. ``start_pfn`` and ``end_pfn``
#: follow ``split``.
_OFFSETS = ((0x1AC, 12), (0x1A0, 8))
_BLOCK_SIZES = frozenset(1 << shift for shift in range(12, 19))
#: ``sizeof(struct page_desc)``, and how many of them are read together.
_DESC, _DESCS_PER_READ = 24, 1 << 16
#: Bytes of a bitmap that are read together.
_PIECE = 1 << 20


class _Header(NamedTuple):
    """
    What is used of the headers; sizes in blocks.

    :ivar part: the first page frame and the end of those that the file has, if it is one of several
    """

    order: str
    block: int
    sub: int
    bitmaps: int
    part: tuple[int, int] | None


def check_kdump(path: str) -> None:
    """
    Check that the headers, the bitmaps and the list of pages of a dump are in its file.

    :param path: path of the dump; nothing is done for other formats
    :raises ImageError: if the file is truncated or damaged there. The pages may be truncated:
        reading one that is missing is a fault.
    """
    with open(path, "rb") as file:
        if file.read(8) not in _SIGNATURES:
            return
        size = file.seek(0, os.SEEK_END)
        header = _header(file)
        if header is None:
            return  # libkdumpfile does not open it
        start = (1 + header.sub) * header.block
        end = start + header.bitmaps * header.block
        _check(header.sub > 0 and header.bitmaps > 0, "its headers are damaged")
        _check(end <= size, f"its bitmaps end at byte {end:,}, the file has {size:,} bytes")
        half = header.bitmaps * header.block // 2
        pages = _bits(file, start + half, *(header.part or (0, 8 * half)))
        last = end + _DESC * pages
        _check(last <= size, f"its list of pages ends at byte {last:,}, the file has {size:,}")
        _check_pages(file, header, end, pages)


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise ImageError(
            f"the file is truncated or damaged: {what}. Copy it again; if the original is the "
            "same, there was no room where it was written"
        )


def _header(file: BinaryIO) -> _Header | None:
    file.seek(0)
    data = file.read(0x1D0)
    for order in "<>":
        for at, split in _OFFSETS:
            if len(data) < at + 12:
                continue
            block, sub, bitmaps = struct.unpack_from(f"{order}iiI", data, at)
            if block in _BLOCK_SIZES and 0 <= sub < 1 << 16:
                form = struct.Struct(f"{order}i{'QQ' if at == _OFFSETS[0][0] else 'II'}")
                file.seek(block + split)
                words = file.read(form.size)
                _check(len(words) == form.size, "its second header is missing")
                is_part, first, end = form.unpack(words)
                # Each bitmap has half of the blocks.
                frames = 4 * bitmaps * block
                if is_part:
                    _check(first <= end <= frames, f"page frames {first} to {end} of {frames}")
                return _Header(order, block, sub, bitmaps, (first, end) if is_part else None)
    return None


def _bits(file: BinaryIO, start: int, first: int, end: int) -> int:
    """
    Return the number of bits that are set in a part of a bitmap.

    :param start: where the bitmap begins in the file
    :param first: the first bit of the part
    :param end: the bit after the last one
    """
    number, skipped = 0, first % 8
    file.seek(start + first // 8)
    for at in range(first - skipped, end, 8 * _PIECE):
        length = min(end - at, 8 * _PIECE)
        bits = int.from_bytes(file.read(-(-length // 8)), "little") & (1 << length) - 1
        number += (bits >> skipped).bit_count()
        skipped = 0
    return number


def _check_pages(file: BinaryIO, header: _Header, start: int, pages: int) -> None:
    """Check ``page_desc.size``, the bytes of each page in the file: a block at most."""
    file.seek(start)
    native = (header.order == "<") == (sys.byteorder == "little")
    for first in range(0, pages, _DESCS_PER_READ):
        words = array("I", file.read(_DESC * min(_DESCS_PER_READ, pages - first)))
        if not native:
            words.byteswap()
        longest = max(words[2::6], default=0)
        _check(longest <= header.block, f"a page of {longest:,} bytes in its list of pages")
