# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Split dumps
-----------

``makedumpfile --split`` writes several files at once, each with the pages of a range of page
frames. They are in the kdump format, with the same headers but for the range. drgn opens one file,
so
:func:`join` makes one of them, as ``makedumpfile --reassemble`` does: the headers, the bitmaps, the
    list
of all pages, and the pages of one part after the other.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from memcg_inspect.image.kdump import DESC, KdumpHeader, bits, check_kdump, read_header
from memcg_inspect.image.room import Output
from memcg_inspect.model import ImageError

__all__ = ("Part", "check_no_part", "find_set", "join", "joined_size", "part_of")

#: Bytes that are copied together, a multiple of the size of ``struct page_desc``.
_PIECE = DESC << 15
#: Offset of ``status`` in ``struct disk_dump_header``, by whether ``long`` has 8 bytes.
_STATUS = {True: 0x1A8, False: 0x19C}
_STATUS_FORM = "I"
#: Offsets and sizes in ``struct kdump_sub_header`` of what says that a file is a part: ``split``,
#: ``start_pfn``, ``end_pfn`` and the same in 64 bits; and of ``offset_eraseinfo`` and
#: ``size_eraseinfo``, which the joined file does not have; by the same.
_OF_PART = {True: ((12, 20), (64, 32)), False: ((8, 12),)}
#: Offset and size of what may differ between parts. Where ``long`` has 4 bytes, offsets of what
#: follows ``end_pfn`` differ between architectures.
_DIFFERS = {True: _OF_PART[True], False: ((8, 100),)}
#: Headers with the notes of each CPU, at most.
_MOST_HEADERS = 64 << 20
#: Files in one folder that are looked at.
_MOST_FILES = 10_000


class Part(NamedTuple):
    """
    One file of a split dump.

    :ivar path: path of the file
    :ivar header: its headers
    :ivar common: hash of what all parts of one dump have in common: the headers, with the kernel's
        release, the time of the crash, the registers of each CPU, and VMCOREINFO
    :ivar size: size of the file
    :ivar stored: bytes of it that are on its disk: the list of pages has room for all pages of the
        machine
    """

    path: str
    header: KdumpHeader
    common: str
    size: int
    stored: int

    @property
    def range(self) -> tuple[int, int]:
        """Return the first page frame and the end of those that it has."""
        return self.header.part or (0, 0)


def part_of(path: str) -> Part | None:
    """
    Read what a file is part of.

    :return: ``None`` if it is no part of a split dump
    :raises ImageError: if its headers are damaged
    :raises OSError: if it cannot be read
    """
    with open(path, "rb") as file:
        header = read_header(file)
        if header is None or header.part is None:
            return None
        file.seek(0)
        data = bytearray(file.read(min(header.bitmaps_at, _MOST_HEADERS)))
        found = os.fstat(file.fileno())
    # Only a part that had no room is marked so in its status.
    other = [(_STATUS[header.wide], 4)]
    other += [(header.block + at, length) for at, length in _DIFFERS[header.wide]]
    for at, length in other:
        data[at : at + length] = bytes(length)
    stored = min(found.st_size, 512 * found.st_blocks)
    return Part(path, header, hashlib.sha256(data).hexdigest(), found.st_size, stored)


def check_no_part(path: str) -> None:
    """
    Check that a file is not one part of a split dump: without the others, nothing can be verified.

    :raises ImageError: if it is
    """
    part = None
    # What cannot be read is none of this check.
    with suppress(OSError, ImageError):
        part = part_of(path)
    if part is not None:
        raise ImageError(f"{_says(part)}: {_GIVE}")


#: What to do.
_GIVE = (
    "give all parts, e.g. memcg-inspect audit -c PART -c PART, or in Python "
    "memcg_inspect.open([PART, PART])"
)


def _says(part: Part) -> str:
    first, end = part.range
    return (
        f"{part.path} is one part of a split dump (makedumpfile --split): it has the page frames "
        f"from {first:,} to {end:,} of {part.header.frames:,}"
    )


def find_set(paths: Sequence[str]) -> tuple[Part, ...]:
    """
    Return all parts of a split dump, in the order of their page frames.

    Parts that were not given are looked for beside these, under names that differ in
    numbers only.

    :param paths: paths of files, of which at least one is a part
    :raises ImageError: if a file is no part, or of another dump, or if parts are missing
    """
    given: list[Part] = []
    for path in paths:
        try:
            part = part_of(path)
        except ImageError as error:
            raise ImageError(f"{path}: {error}") from None
        if part is None:
            raise ImageError(
                f"{path} is no part of a split dump: more than one file can be given of those only "
                "that makedumpfile --split wrote"
            )
        if given and part.common != given[0].common:
            raise ImageError(f"{path} and {given[0].path} are parts of different dumps")
        given.append(part)
    ordered = _in_order(given)
    if _missing(ordered):
        ordered = _in_order([*given, *(other for part in given for other in _beside(part))])
    missing = _missing(ordered)
    if missing:
        what = " and ".join(f"from {first:,} to {end:,}" for first, end in missing)
        raise ImageError(
            f"{_says(given[0])}, and those {what} are in no part that was given or is beside it: "
            f"{_GIVE}"
        )
    return ordered


def _in_order(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Sort parts by page frames, and leave out those that others have."""
    by_range: dict[tuple[int, int], Part] = {}
    for part in parts:
        by_range.setdefault(part.range, part)
    ordered = [by_range[key] for key in sorted(by_range)]
    for part, after in zip(ordered, ordered[1:], strict=False):
        if after.range[0] < part.range[1]:
            raise ImageError(f"{part.path} and {after.path} have page frames in common")
    return tuple(ordered)


def _missing(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Return the ranges of page frames that no part has."""
    gaps, at = [], 0
    for part in parts:
        first, end = part.range
        if first > at:
            gaps.append((at, first))
        at = end
    if at < parts[0].header.frames:
        gaps.append((at, parts[0].header.frames))
    return gaps


def _beside(part: Part) -> Iterator[Part]:
    """Return the parts of the same dump in the same folder."""
    folder, name = os.path.split(part.path)
    pattern = re.compile(r"[0-9]+".join(map(re.escape, re.split(r"[0-9]+", name))))
    with suppress(OSError):
        others = {other for other in os.listdir(folder or ".") if pattern.fullmatch(other)}
        for other in sorted(others - {name})[:_MOST_FILES]:
            with suppress(OSError, ImageError):
                found = part_of(os.path.join(folder, other))
                if found is not None and found.common == part.common:
                    yield found


def joined_size(parts: Sequence[Part]) -> int:
    """Return the bytes that the joined file takes, or a few more."""
    return sum(part.stored for part in parts)


def join(parts: Sequence[Part], output: Output, report: Callable[[int], None]) -> None:
    """
    Join the parts of a split dump.

    :param parts: all parts, in the order of their page frames
    :param report: function to call with the number of bytes that are done
    :raises ImageError: if a part is truncated or damaged. Of pages that are truncated, none is in
        the result, as if they had been left out.
    :raises NoRoomError: if there is no room for it
    """
    for part in parts:
        try:
            check_kdump(part.path)
        except ImageError as error:
            raise ImageError(f"{part.path}: {error}") from None
    header = parts[0].header
    half = header.bitmaps * header.block // 2
    counts = []
    edges: dict[int, int] = {}
    for part in parts:
        with open(part.path, "rb") as file:
            counts.append(bits(file, header.bitmaps_at + half, *part.range))
            for start in (header.bitmaps_at, header.bitmaps_at + half):
                _copy_bits(file, start, part.range, output, edges)
    for at, byte in edges.items():
        output.write(at, bytes([byte]))
    _write_headers(parts, output)
    list_at = header.pages_at
    data_at = list_at + DESC * sum(counts)
    for part, count in zip(parts, counts, strict=True):
        with open(part.path, "rb") as file:
            begin = _begin(file, part, count)
            moved = data_at - begin
            for words, sizes in _lists(file, part, count):
                _move(words, sizes, begin, part.size, moved)
                if not part.header.is_native:
                    words.byteswap()
                output.write(list_at, words.tobytes())
                list_at += DESC * len(sizes)
            _copy(file, begin, part.size, output, data_at, report)
        data_at += part.size - begin
    output.end_at(data_at)


def _copy(
    file: BinaryIO, first: int, end: int, output: Output, to: int, report: Callable[[int], None]
) -> None:
    file.seek(first)
    while first < end:
        data = file.read(min(_PIECE, end - first))
        if not data:
            raise ImageError(f"{file.name} became shorter while it was read")
        output.write(to, data)
        first, to = first + len(data), to + len(data)
        report(output.written)


def _copy_bits(
    file: BinaryIO, start: int, range: tuple[int, int], output: Output, edges: dict[int, int]
) -> None:
    """
    Copy a range of a bitmap.

    :param start: where the bitmap is in both files
    :param edges: bytes that belong to two parts, by offset: the bits of this part are added
    """
    first, end = range
    whole, whole_end = -(-first // 8), end // 8
    for at in {first // 8, whole_end}:
        low, high = max(first, 8 * at), min(end, 8 * at + 8)
        if low < high and (low, high) != (8 * at, 8 * at + 8):
            file.seek(start + at)
            mask = (1 << high - 8 * at) - (1 << low - 8 * at)
            edges[start + at] = edges.get(start + at, 0) | file.read(1)[0] & mask
    if whole < whole_end:
        _copy(file, start + whole, start + whole_end, output, start + whole, lambda done: None)


def _write_headers(parts: Sequence[Part], output: Output) -> None:
    header = parts[0].header
    at, form = _STATUS[header.wide], struct.Struct(f"{header.order}{_STATUS_FORM}")
    status = 0
    for part in parts:
        with open(part.path, "rb") as file:
            file.seek(at)
            # DUMP_DH_COMPRESSED_INCOMPLETE of any part is that of the whole.
            status |= form.unpack(file.read(form.size))[0]
    with open(parts[0].path, "rb") as file:
        _copy(file, 0, header.bitmaps_at, output, 0, lambda done: None)
    output.write(at, form.pack(status))
    for offset, size in _OF_PART[header.wide]:
        output.write(header.block + offset, bytes(size))


def _lists(file: BinaryIO, part: Part, count: int) -> Iterator[tuple[array[int], array[int]]]:
    """
    Read the list of pages of a part, many at a time.

    :param count: number of its pages
    :return: the three words of each page, of which the first is the offset, and the sizes
    """
    file.seek(part.header.pages_at)
    left = DESC * count
    while left:
        data = file.read(min(_PIECE, left))
        if not data or len(data) % DESC:
            raise ImageError(f"{part.path} became shorter while it was read")
        words, sizes = array("Q", data), array("I", data)[2::6]
        if not part.header.is_native:
            words.byteswap()
            sizes.byteswap()
        yield words, sizes
        left -= len(data)


def _begin(file: BinaryIO, part: Part, count: int) -> int:
    """Return where the pages of a part begin. There may be a gap behind the list of pages."""
    low, begin = part.header.pages_at + DESC * count, part.size
    for words, _ in _lists(file, part, count):
        first = min(words[0::3])
        if first < low:
            first = min((offset for offset in words[0::3] if offset >= low), default=begin)
        begin = min(begin, first)
    return max(low, begin)


def _move(words: array[int], sizes: array[int], begin: int, end: int, moved: int) -> None:
    """
    Move the pages that are in the file. The others get no offset and no size: they fault.

    :param begin: where pages begin in the file
    :param end: size of the file
    """
    offsets = words[0::3]
    if min(offsets) >= begin and max(map(int.__add__, offsets, sizes)) <= end:
        words[0::3] = array("Q", [offset + moved for offset in offsets])
        return
    for page, size in enumerate(sizes):
        offset = words[3 * page]
        if begin <= offset and offset + size <= end:
            words[3 * page] = offset + moved
        else:
            words[3 * page] = words[3 * page + 1] = 0
