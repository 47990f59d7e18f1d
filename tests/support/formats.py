# SPDX-License-Identifier: LGPL-2.1-or-later
"""An image in each format that makedumpfile and kdump-tools write."""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
import struct
import subprocess
import zlib
from array import array
from collections.abc import Callable
from functools import cache as cache_of_calls
from pathlib import Path

import drgn
from labkit.elf import program_headers_first

#: ``DUMP_DH_COMPRESSED_*`` of ``status`` in the header, and of ``flags`` of a page.
ZLIB, SNAPPY, ZSTD = 0x1, 0x4, 0x20
#: What makedumpfile leaves out that no audit reads: user data is not among it.
LEVEL = "23"
PARTS = 3


def makedumpfile(*words: object, into: Path | None = None) -> None:
    """:param into: file for standard output"""
    command = ["makedumpfile", *map(str, words)]
    if into is None:
        subprocess.run(command, check=True, capture_output=True)
        return
    with into.open("wb") as out:
        subprocess.run(command, check=True, stdout=out, stderr=subprocess.DEVNULL)


class Formats:
    """
    One image in many formats.

    :ivar elf: as QEMU wrote it
    """

    def __init__(self, core: Path, folder: Path) -> None:
        self.folder = folder
        self.elf = folder / "elf"
        shutil.copyfile(core, self.elf)
        program_headers_first(self.elf)

    def file(self, name: str) -> Path:
        """Return the image in a format, which is made when a test first needs it."""
        path = self.folder / name
        if not path.exists():
            getattr(self, f"_{name.replace('.', '_')}")(path)
        return path

    def _zlib(self, path: Path) -> None:
        makedumpfile("-c", "-d", LEVEL, self.elf, path)

    def _lzo(self, path: Path) -> None:
        makedumpfile("-l", "-d", LEVEL, self.elf, path)

    def _snappy(self, path: Path) -> None:
        _compress_pages(self.file("zlib"), path, SNAPPY, _snappy_compress)

    def _zstd(self, path: Path) -> None:
        _compress_pages(self.file("zlib"), path, ZSTD, _zstd_compress)

    def _flattened(self, path: Path) -> None:
        makedumpfile("-F", "-c", "-d", LEVEL, self.elf, into=path)

    def _flattened_elf(self, path: Path) -> None:
        # At higher levels, no ELF dump has pages of zeroes.
        makedumpfile("-F", "-E", "-d", 0, self.elf, into=path)

    def _filtered_elf(self, path: Path) -> None:
        makedumpfile("-F", "-E", "-d", LEVEL, self.elf, into=path)

    def _dump_gz(self, path: Path) -> None:
        self._by_program(path, "gzip", "-1c")

    def _dump_xz(self, path: Path) -> None:
        self._by_program(path, "xz", "-0c")

    def _dump_bz2(self, path: Path) -> None:
        self._by_program(path, "bzip2", "-1c")

    def _dump_lz4(self, path: Path) -> None:
        self._by_program(path, "lz4", "-c")

    def _by_program(self, path: Path, *command: str) -> None:
        # As kdump-config does: makedumpfile -F | compress > dump.STAMP.EXTENSION
        with self.file("flattened").open("rb") as data, path.open("wb") as out:
            subprocess.run(command, stdin=data, stdout=out, check=True)

    def parts(self) -> list[Path]:
        """Return the parts of the split image."""
        paths = [self.folder / f"vmcore.{number}" for number in range(PARTS)]
        if not paths[0].exists():
            # Without a size of blocks, all of a small image is in the first part.
            words = ("--split", "--splitblock-size", 1024)
            makedumpfile("-l", "-d", LEVEL, *words, self.elf, *paths)
        return paths


@cache_of_calls
def _library(name: str) -> ctypes.CDLL:
    """Return a library of the system, or else the one that drgn brings."""
    found = ctypes.util.find_library(name)
    if found is None:
        folder = Path(drgn.__file__).parent.parent / "drgn.libs"
        found = str(next(folder.glob(f"lib{name}-*.so*")))
    return ctypes.CDLL(found)


def _snappy_compress(data: bytes) -> bytes:
    snappy = _library("snappy")
    out = ctypes.create_string_buffer(2 * len(data) + 100)
    size = ctypes.c_size_t(len(out))
    assert snappy.snappy_compress(data, ctypes.c_size_t(len(data)), out, ctypes.byref(size)) == 0
    return out.raw[: size.value]


def _zstd_compress(data: bytes) -> bytes:
    zstd = _library("zstd")
    zstd.ZSTD_compress.restype = ctypes.c_size_t
    out = ctypes.create_string_buffer(2 * len(data) + 100)
    sizes = (ctypes.c_size_t(len(out)), ctypes.c_size_t(len(data)))
    size = zstd.ZSTD_compress(out, sizes[0], data, sizes[1], 1)
    assert 0 < size <= len(out)
    return out.raw[:size]


def _compress_pages(zlib_dump: Path, path: Path, flag: int, pack: Callable[[bytes], bytes]) -> None:
    """Write a dump with pages in another format: Debian's makedumpfile cannot."""
    data = bytearray(zlib_dump.read_bytes())
    block, sub, bitmaps = struct.unpack_from("<iiI", data, 0x1AC)
    half = bitmaps * block // 2
    start = (1 + sub) * block
    count = int.from_bytes(data[start + half : start + 2 * half], "little").bit_count()
    at = start + 2 * half
    end = at + 24 * count
    words = array("Q", bytes(data[at:end]))
    pages, new = [], end
    packed: dict[int, tuple[int, int]] = {}
    for page in range(count):
        offset, word = words[3 * page], words[3 * page + 1]
        if offset not in packed:
            stored = bytes(data[offset : offset + (word & 0xFFFFFFFF)])
            content = zlib.decompress(stored) if word >> 32 & ZLIB else stored
            small = pack(content)
            flags = flag if len(small) < block else 0
            pages.append(small if flags else content)
            packed[offset] = (new, flags << 32 | len(pages[-1]))
            new += len(pages[-1])
        words[3 * page], words[3 * page + 1] = packed[offset]
    (status,) = struct.unpack_from("<I", data, 0x1A8)
    struct.pack_into("<I", data, 0x1A8, status & ~ZLIB | flag)
    path.write_bytes(bytes(data[:at]) + words.tobytes() + b"".join(pages))
