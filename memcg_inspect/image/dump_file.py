# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Files of a dump
---------------

Returns the one file that drgn can open: the dump itself, or a copy of a dump that is flattened,
split or compressed. drgn reads flattened dumps, too, but follows all records each time, and takes
pages that a flattened ELF dump leaves out for zeroes.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from memcg_inspect.image import copies, flattened, split
from memcg_inspect.image.compressed import Compression, Read, compression_of, unpacked
from memcg_inspect.image.file_format import HEAD, is_dump
from memcg_inspect.image.room import NoRoomError, Output, room
from memcg_inspect.model import ImageError

__all__ = ("DumpFile", "Report", "nothing_to_report", "open_dump")

#: Zeroes of a dump that are not written, since its file may be mostly zeroes.
_PIECE = 1 << 16

Report = Callable[[str, float], None]


def nothing_to_report(what: str, share: float) -> None:
    """Show no progress."""


class DumpFile(NamedTuple):
    """
    A file that drgn can open.

    :ivar path: its path
    :ivar file: a copy, which must be open as long as the path is used; ``None`` for the dump itself
    """

    path: str
    file: BinaryIO | None


class _Work(NamedTuple):
    """
    How a copy is made.

    :ivar paths: what it is made of
    :ivar needed: what must be done, for a message
    :ivar command: the command that does it
    :ivar measure: function that returns how many bytes the copy takes, exactly or at least
    :ivar is_exact: which of both
    :ivar write: function that writes it
    """

    paths: tuple[str, ...]
    needed: str
    command: str
    measure: Callable[[], int]
    is_exact: bool
    write: Callable[[Output, Report], None]


def open_dump(paths: Sequence[str], report: Report = nothing_to_report) -> DumpFile:
    """
    Return the file that drgn can open.

    :param paths: path of a dump, or paths of parts of a split dump
    :param report: function to call with what is done, and the share of it that is done
    :raises ImageError: if it is truncated or damaged, if parts are missing, or if there is no room
        for a copy. The message says which command makes a copy elsewhere.
    """
    copies.given_limit()  # an error in it is none of the dump
    work = _work(paths)
    if work is None:
        return DumpFile(paths[0], None)
    try:
        file = _copy(work, report)
    except NoRoomError as error:
        raise ImageError(_no_room(work, error.needed)) from None
    except ImageError as error:
        raise ImageError(f"{work.paths[0]}: {error}") from None
    except OSError as error:
        raise ImageError(f"{work.paths[0]} cannot be copied: {error.strerror or error}") from None
    return DumpFile(_of_descriptor(file.fileno()), file)


def _work(paths: Sequence[str]) -> _Work | None:
    """Return how to make a copy; ``None`` if drgn can open the file."""
    first = paths[0]
    with open(first, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        start = file.read(HEAD)
        size = os.fstat(file.fileno()).st_size
    if len(paths) > 1 or _is_part(first):
        return _joining(paths)
    compression = compression_of(start)
    if compression is not None:
        return _unpacking(first, size, compression)
    return _unflattening(first, size) if start.startswith(flattened.MAGIC) else None


def _is_part(path: str) -> bool:
    try:
        return split.part_of(path) is not None
    except ImageError:
        return False  # whoever opens it finds the same


def _joining(paths: Sequence[str]) -> _Work:
    parts = split.find_set(paths)
    least = split.joined_size(parts)

    def write(output: Output, report: Report) -> None:
        split.join(parts, output, lambda done: report("parts of the dump", done / least))

    names = tuple(part.path for part in parts)
    command = f"makedumpfile --reassemble {shlex.join(names)} vmcore"
    return _Work(names, "joined", command, lambda: least, True, write)


def _unflattening(path: str, size: int) -> _Work:
    def measure() -> int:
        with open(path, "rb") as file:
            return flattened.measure(file, size).written

    def write(output: Output, report: Report) -> None:
        def done(written: int) -> None:
            report("the flattened dump", written / size)

        with open(path, "rb") as file:
            flattened.unflatten(file.read, output, done)

    command = f"makedumpfile -R vmcore < {shlex.quote(path)}"
    return _Work((path,), "unflattened", command, measure, True, write)


def _unpacking(path: str, size: int, compression: Compression) -> _Work:
    def write(output: Output, report: Report) -> None:
        with open(path, "rb", buffering=0) as file, unpacked(file, compression) as read:

            def done() -> None:
                report(
                    "the compressed dump", min(1.0, os.lseek(file.fileno(), 0, os.SEEK_CUR) / size)
                )

            _write_unpacked(read, output, done)

    command = f"{compression.command} {shlex.quote(path)} > vmcore"
    if not compression.is_there:
        raise ImageError(
            f"{path} is compressed by {compression.program}, which is not installed: unpack it "
            f"where it is ({command}), or install it (Debian: {compression.program})"
        )
    # What it unpacks to is not known before. If it is a dump, it is hardly ever smaller.
    return _Work((path,), "unpacked", command, lambda: size, False, write)


def _write_unpacked(read: Read, output: Output, done: Callable[[], None]) -> None:
    start = flattened.read_up_to(read, HEAD)
    if start.startswith(flattened.MAGIC):
        flattened.unflatten(_Again(start, read).read, output, lambda written: done())
    elif not is_dump(start):
        raise ImageError("what is compressed in it is not a dump")
    else:
        _write_plain(_Again(start, read).read, output, done)


class _Again:
    """Reads what was read before, and then the rest."""

    def __init__(self, start: bytes, read: Read) -> None:
        self._start = start
        self._read = read

    def read(self, size: int) -> bytes:
        if self._start:
            data, self._start = self._start[:size], self._start[size:]
            return data
        return self._read(size)


def _write_plain(read: Read, output: Output, done: Callable[[], None]) -> None:
    at, zeroes = 0, bytes(_PIECE)
    while piece := flattened.read_up_to(read, _PIECE):
        if piece != zeroes:
            output.write(at, piece)
        at += len(piece)
        done()
    output.end_at(at)


def _copy(work: _Work, report: Report) -> BinaryIO:
    """Return the copy in the cache, or else a temporary one."""
    key = copies.key_of(work.paths)

    def write(output: Output) -> None:
        work.write(output, report)
        if copies.key_of(work.paths) != key:
            raise ImageError("it was changed while it was read")
        if split.part_of(_of_descriptor(output.descriptor)) is not None:
            raise ImageError(
                "it is one part of a split dump: unpack all parts, and give them with -c"
            )

    kept = None if copies.given_limit() == 0 else _kept()
    if kept is not None:
        # A file system may not have locks, or fail. There may be another for temporary files.
        with suppress(OSError):
            try:
                return _kept_copy(kept, key, work, write, report)
            except NoRoomError:
                if room(copies.temporary_folder()) <= room(str(copies.cache_folder())):
                    raise
    return copies.write_temporary(copies.temporary_folder(), work.measure(), write)


def _kept_copy(
    kept: copies.Copies, key: str, work: _Work, write: copies.Write, report: Report
) -> BinaryIO:
    """Return the copy in the cache, which is made if it is not there."""
    file = kept.find(key)
    if file is not None:
        return file
    with kept.turn(key, lambda: report("the dump, which another process copies", 0.0)):
        return kept.find(key) or kept.make(key, work.measure(), write)


def _kept() -> copies.Copies | None:
    """Return the copies in the cache; ``None`` if it cannot be written."""
    try:
        return copies.Copies(copies.cache_folder())
    except OSError:
        return None


def _of_descriptor(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _no_room(work: _Work, needed: int) -> str:
    folders = [copies.temporary_folder()]
    if copies.given_limit() != 0 and _kept() is not None:
        folders.insert(0, str(copies.cache_folder()))
    there = " and ".join(f"{room(folder):,} in {folder}" for folder in folders)
    need = f"{work.measure():,} bytes" if work.is_exact else f"more than {needed:,} bytes"
    names = ", ".join(work.paths)
    return (
        f"{names} must be {work.needed} first, which takes {need}, and there is room for {there}: "
        f"do it where there is room ({work.command}) and give the result with -c"
    )
