# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Compressed files
----------------

Reads files that a program such as ``gzip`` compressed as a whole: kdump-tools does so with
``KDUMP_COMPRESSION``. gzip, bzip2 and xz are in Python's library. For lz4 and zstd, the programs of
these names are run.

However small the file, what it unpacks to may be larger than any disk. So a stream returns no more
than it is asked for.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from memcg_inspect.model import ImageError

if TYPE_CHECKING:
    import lzma

__all__ = ("Compression", "compression_of", "unpacked")

#: Bytes of a compressed file that are read together.
_PIECE = 1 << 18
#: Memory for a dictionary of xz. ``xz -9`` takes 65 MiB, and a file may ask for 4 GiB.
_MOST_MEMORY = 1 << 30

Read = Callable[[int], bytes]


class Compression(NamedTuple):
    """
    A format.

    :ivar magic: how a file begins
    :ivar program: what wrote it
    :ivar module: module of Python's library that reads it; ``None`` if the program is needed.
        Debian's package has the name of the program.
    """

    magic: bytes
    program: str
    module: str | None = None

    @property
    def command(self) -> str:
        """Return the command that unpacks to standard output."""
        return f"{self.program} -dc"

    @property
    def is_there(self) -> bool:
        """Return whether it can be read here."""
        return self.is_in_library or shutil.which(self.program) is not None

    @property
    def is_in_library(self) -> bool:
        """Return whether Python's library reads it."""
        # Python may have been built without these.
        return self.module is not None and importlib.util.find_spec(self.module) is not None


_KNOWN = (
    Compression(b"\x1f\x8b", "gzip", "zlib"),
    Compression(b"\xfd7zXZ\0", "xz", "_lzma"),
    Compression(b"BZh", "bzip2", "_bz2"),
    Compression(b"\x28\xb5\x2f\xfd", "zstd"),
    Compression(b"\x04\x22\x4d\x18", "lz4"),
)


def compression_of(start: bytes) -> Compression | None:
    """
    Return the format of a file.

    :param start: its first bytes
    """
    return next((known for known in _KNOWN if start.startswith(known.magic)), None)


@contextmanager
def unpacked(file: BinaryIO, compression: Compression) -> Iterator[Read]:
    """
    Unpack a file.

    :param file: unbuffered; how much of it is done is the offset of its descriptor
    :return: function that returns the next bytes, as many as asked for or fewer; none at the end
    :raises ImageError: if the file is truncated or damaged, or the program that is needed is
        missing
    """
    file.seek(0)
    if compression.is_in_library:
        yield _checked(_of_library(file, compression.program), compression)
        return
    with _run(file, compression) as read:
        yield read


def _of_library(file: BinaryIO, program: str) -> Read:
    if program == "gzip":
        import gzip

        return gzip.GzipFile(fileobj=file).read
    if program == "bzip2":
        import bz2

        return bz2.BZ2File(file).read
    return _Xz(file).read


class _Xz:
    """Reads xz as :class:`lzma.LZMAFile` does, but limits the memory."""

    def __init__(self, file: BinaryIO) -> None:
        import lzma

        self._lzma = lzma
        self._file = file
        self._stream = self._make()

    def _make(self) -> lzma.LZMADecompressor:
        return self._lzma.LZMADecompressor(self._lzma.FORMAT_XZ, _MOST_MEMORY)

    def read(self, size: int) -> bytes:
        while True:
            if self._stream.eof:
                data = self._next_stream()
                if not data:
                    return b""
                self._stream = self._make()
            else:
                data = self._more() if self._stream.needs_input else b""
                if self._stream.needs_input and not data:
                    raise EOFError("it ends early")
            found = self._stream.decompress(data, size)
            if found:
                return found

    def _next_stream(self) -> bytes:
        """Return the beginning of what follows a stream: zeroes are skipped."""
        data = self._stream.unused_data.lstrip(b"\0")
        while not data and (more := self._more()):
            data = more.lstrip(b"\0")
        return data

    def _more(self) -> bytes:
        return self._file.read(_PIECE)


def _checked(read: Read, compression: Compression) -> Read:
    """Raise an ImageError for whatever a decompressor raises."""

    def checked(size: int) -> bytes:
        try:
            return read(size)
        except EOFError:
            raise ImageError(
                f"the {compression.program} stream is truncated: copy it again"
            ) from None
        except MemoryError:
            raise
        except Exception as error:  # OSError, zlib.error, LZMAError, ValueError
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk
            raise ImageError(f"the {compression.program} stream is damaged ({error})") from None

    return checked


@contextmanager
def _run(file: BinaryIO, compression: Compression) -> Iterator[Read]:
    program = shutil.which(compression.program)
    if program is None:
        raise ImageError(f"the program {compression.program} is needed to unpack it")
    with tempfile.TemporaryFile() as said:
        # The program reads the descriptor, and so moves its offset.
        process = subprocess.Popen(
            [program, "-dc"],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=said,
            env={**os.environ, "LC_ALL": "C"},
        )
        assert process.stdout is not None
        stream = process.stdout

        def read(size: int) -> bytes:
            data = stream.read(size)
            if not data and process.wait() != 0:
                said.seek(0)
                words = said.read(1000).decode(errors="replace").split()
                raise ImageError(
                    f"the {compression.program} stream is truncated or damaged ({' '.join(words)})"
                )
            return data

        try:
            yield read
        finally:
            process.kill()
            process.wait()
            stream.close()
