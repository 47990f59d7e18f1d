# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Truncated and damaged dumps in the kdump format
-----------------------------------------------

The format is that of ``makedumpfile`` and ``diskdump``: a ``struct disk_dump_header``, a
``struct kdump_sub_header``, two bitmaps of page frames, and a ``struct page_desc`` for each page
frame in the second bitmap, followed by the pages. Byte order and ``long`` are those of the machine.

libkdumpfile, which reads such dumps for drgn, maps the file. Where the file is shorter than its
headers say, or a page longer than a page can be, the process gets ``SIGBUS``. A line of VMCOREINFO
that begins with a dot ends it by ``SIGSEGV``. :func:`check_kdump` compares the lengths in the
headers with the size of the file first, and looks at these lines.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from typing import BinaryIO, NamedTuple

from memcg_inspect.model import ImageError

__all__ = ("DESC", "KdumpHeader", "bits", "check_kdump", "read_header")

#: ``KDUMP_SIGNATURE`` and ``DISK_DUMP_SIGNATURE``.
_SIGNATURES = (b"KDUMP   ", b"DISKDUMP")
#: Offsets of ``block_size`` in ``struct disk_dump_header``, and of ``split`` in ``struct
#: kdump_sub_header``, for machines whose ``long`` has 8 and 4 bytes. ``start_pfn`` and ``end_pfn``
#: follow ``split``.
_OFFSETS = ((0x1AC, 12), (0x1A0, 8))
#: Since this ``header_version``, ``struct kdump_sub_header`` has ``start_pfn_64``, ``end_pfn_64``
#: and ``max_mapnr_64``, at this offset where ``long`` has 8 bytes. The older members end at 2^32 -
#: 1. A machine whose ``long`` has 4 bytes has fewer page frames.
_WIDE_VERSION, _WIDE_PFNS = 6, 80
#: Offsets in it of ``offset_vmcoreinfo`` and ``offset_note``, which a size follows, and the
#: ``header_version`` since which there are these, where ``long`` has 8 bytes.
_TEXT, _NOTES = (32, 3), (48, 4)
_NAME_OF_TEXT = b"VMCOREINFO\0"
#: The most bytes that notes, or VMCOREINFO, may have: a page, and one for each of many CPUs.
_MOST_TEXT, _MOST_NOTES = 1 << 20, 64 << 20
_BLOCK_SIZES = frozenset(1 << shift for shift in range(12, 19))
#: ``sizeof(struct page_desc)``, and how many of them are read together.
DESC, _DESCS_PER_READ = 24, 1 << 16
#: Bytes of a bitmap that are read together.
_PIECE = 1 << 20


class KdumpHeader(NamedTuple):
    """
    What is used of the headers; sizes in blocks.

    :ivar order: ``<`` for little-endian, ``>`` for big-endian
    :ivar wide: whether ``long`` has 8 bytes
    :ivar version: ``header_version``
    :ivar block: bytes of a block, which is a page
    :ivar sub: size of the second header
    :ivar bitmaps: size of both bitmaps
    :ivar part: the first page frame and the end of those that the file has, if it is one of several
    :ivar frames: page frames of the machine: ``max_mapnr``
    """

    order: str
    wide: bool
    version: int
    block: int
    sub: int
    bitmaps: int
    part: tuple[int, int] | None
    frames: int

    @property
    def is_native(self) -> bool:
        """Return whether this machine has the same byte order."""
        return (self.order == "<") == (sys.byteorder == "little")

    @property
    def bitmaps_at(self) -> int:
        """Return where the bitmaps begin in the file."""
        return (1 + self.sub) * self.block

    @property
    def pages_at(self) -> int:
        """Return where the list of pages begins in the file, which is where the bitmaps end."""
        return self.bitmaps_at + self.bitmaps * self.block


def check_kdump(path: str) -> None:
    """
    Check that the headers, the bitmaps and the list of pages of a dump are in its file.

    :param path: path of the dump; nothing is done for other formats
    :raises ImageError: if the file is truncated or damaged there. The pages may be truncated:
        reading one that is missing is a fault.
    """
    with open(path, "rb") as file:
        header = read_header(file)
        if header is None:
            return  # libkdumpfile does not open it
        _check(_is_parsable(file, header), "its VMCOREINFO is damaged")
        size = file.seek(0, os.SEEK_END)
        end = header.pages_at
        _check(header.sub > 0 and header.bitmaps > 0, "its headers are damaged")
        _check(end <= size, f"its bitmaps end at byte {end:,}, the file has {size:,} bytes")
        half = header.bitmaps * header.block // 2
        pages = bits(file, header.bitmaps_at + half, *(header.part or (0, 8 * half)))
        last = end + DESC * pages
        _check(last <= size, f"its list of pages ends at byte {last:,}, the file has {size:,}")
        _check_pages(file, header, end, pages)


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise ImageError(
            f"the file is truncated or damaged: {what}. Copy it again; if the original is the "
            "same, there was no room where it was written"
        )


def read_header(file: BinaryIO) -> KdumpHeader | None:
    """
    Read the headers of a dump.

    :return: ``None`` if it has another format
    :raises ImageError: if the second header is not in the file, or damaged
    """
    file.seek(0)
    data = file.read(0x1D0)
    if not data.startswith(_SIGNATURES):
        return None
    for order in "<>":
        for at, split in _OFFSETS:
            if len(data) < at + 16:
                continue
            block, sub, bitmaps, mapnr = struct.unpack_from(f"{order}iiII", data, at)
            if block in _BLOCK_SIZES and 0 <= sub < 1 << 16:
                (version,) = struct.unpack_from(f"{order}i", data, 8)
                wide = at == _OFFSETS[0][0]
                header = KdumpHeader(order, wide, version, block, sub, bitmaps, None, mapnr)
                return _with_second(file, header, split)
    return None


def _with_second(file: BinaryIO, header: KdumpHeader, split: int) -> KdumpHeader:
    """
    Add what the second header has.

    :param split: offset of ``split`` in it
    """
    is_part, first, end = _words(file, header, split, f"i{'QQ' if header.wide else 'II'}")
    frames = header.frames
    if header.wide and header.version >= _WIDE_VERSION:
        first, end, frames = _words(file, header, _WIDE_PFNS, "QQQ")
    # Each bitmap has half of the blocks.
    most = 4 * header.bitmaps * header.block
    if is_part:
        _check(first <= end <= most, f"page frames {first} to {end} of {most}")
    return header._replace(part=(first, end) if is_part else None, frames=frames)


def _words(file: BinaryIO, header: KdumpHeader, at: int, form: str) -> tuple[int, ...]:
    """
    Return words of the second header.

    :param at: offset of the first of them
    :param form: of the struct module, without the byte order
    """
    words = struct.Struct(f"{header.order}{form}")
    file.seek(header.block + at)
    data = file.read(words.size)
    _check(len(data) == words.size, "its second header is missing")
    return words.unpack(data)


def _is_parsable(file: BinaryIO, header: KdumpHeader) -> bool:
    """Return whether no line of VMCOREINFO begins with a dot."""
    text = _part(file, header, *_TEXT, _MOST_TEXT)
    # A process has no note of that name, and no other note is text.
    note = _part(file, header, *_NOTES, _MOST_NOTES).partition(_NAME_OF_TEXT)[2]
    lines = (text, note[:_MOST_TEXT].lstrip(b"\0").partition(b"\0")[0])
    return not any(some.startswith(b".") or b"\n." in some for some in lines)


def _part(file: BinaryIO, header: KdumpHeader, at: int, since: int, most: int) -> bytes:
    """
    Return what an offset and a size in the second header refer to.

    :param at: where the offset is
    :param since: the version of the header that has it
    :param most: the most bytes to return
    """
    if not header.wide or header.version < since:
        return b""
    offset, size = _words(file, header, at, "qQ")
    if not 0 < offset < file.seek(0, os.SEEK_END):
        return b""
    file.seek(offset)
    return file.read(min(size, most))


def bits(file: BinaryIO, start: int, first: int, end: int) -> int:
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


def _check_pages(file: BinaryIO, header: KdumpHeader, start: int, pages: int) -> None:
    """Check ``page_desc.size``, the bytes of each page in the file: a block at most."""
    file.seek(start)
    for first in range(0, pages, _DESCS_PER_READ):
        words = array("I", file.read(DESC * min(_DESCS_PER_READ, pages - first)))
        if not header.is_native:
            words.byteswap()
        longest = max(words[2::6], default=0)
        _check(longest <= header.block, f"a page of {longest:,} bytes in its list of pages")
