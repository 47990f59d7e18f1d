# SPDX-License-Identifier: LGPL-2.1-or-later
"""Files that were compressed as a whole."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from memcg_inspect.image import compressed
from memcg_inspect.image.compressed import Compression, compression_of, unpacked
from memcg_inspect.model import ImageError


def by_program(name: str) -> Callable[[bytes], bytes]:
    def pack(data: bytes) -> bytes:
        return subprocess.run([name, "-c"], input=data, capture_output=True, check=True).stdout

    return pack


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "lz4": by_program("lz4"),
    "zstd": by_program("zstd"),
}
each = pytest.mark.parametrize("program", PACKED)
#: What compresses little, and what compresses well.
DATA = os.urandom(100_000) + bytes(300_000)


def found(data: bytes) -> Compression:
    compression = compression_of(data)
    assert compression is not None
    return compression


def unpack(path: Path, data: bytes) -> bytes:
    path.write_bytes(data)
    pieces = []
    with path.open("rb", buffering=0) as file, unpacked(file, found(data)) as read:
        while piece := read(10_000):
            assert len(piece) <= 10_000
            pieces.append(piece)
    return b"".join(pieces)


@each
def test_each_format(tmp_path: Path, program: str) -> None:
    data = PACKED[program](DATA)
    assert found(data).program == program
    assert found(data).is_there
    assert unpack(tmp_path / "file", data) == DATA


@each
def test_several_in_a_row(tmp_path: Path, program: str) -> None:
    """As ``cat a.gz b.gz`` makes it, and as programs that use all CPUs write."""
    pack = PACKED[program]
    assert unpack(tmp_path / "file", pack(b"one") + pack(DATA)) == b"one" + DATA


@pytest.mark.parametrize("program", ["gzip", "xz"])
def test_zeroes_may_follow(tmp_path: Path, program: str) -> None:
    data = PACKED[program](b"one") + bytes(512) + PACKED[program](b"two") + bytes(1 << 20)
    assert unpack(tmp_path / "file", data) == b"onetwo"


@each
def test_wherever_it_is_cut(tmp_path: Path, program: str) -> None:
    data = PACKED[program](DATA)
    for size in (8, 20, len(data) // 2, len(data) - 1):
        with pytest.raises(ImageError, match=f"the {program} stream is (truncated|damaged)"):
            unpack(tmp_path / "file", data[:size])


@each
def test_damaged(tmp_path: Path, program: str) -> None:
    data = bytearray(PACKED[program](DATA))
    data[len(data) // 2 : len(data) // 2 + 50] = bytes(50)
    with pytest.raises(ImageError, match=f"the {program} stream is .*damaged"):
        unpack(tmp_path / "file", bytes(data))


def test_a_dictionary_that_takes_too_much_memory(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}]
    data = bytearray(lzma.compress(DATA, check=lzma.CHECK_NONE, filters=filters))
    # The block header: its size, flags, the filter, one byte of properties.
    assert (data[12:16], data[16]) == (b"\x02\x00\x21\x01", 16)
    data[16] = 39  # 3 GiB
    crc = __import__("zlib").crc32(data[12:20])
    data[20:24] = crc.to_bytes(4, "little")
    with pytest.raises(ImageError, match="the xz stream is damaged .*[Mm]emory"):
        unpack(tmp_path / "file", bytes(data))


@each
def test_only_what_is_asked_for_is_unpacked(tmp_path: Path, program: str) -> None:
    """1 GiB of zeroes in a small file takes no more than what is read of it."""
    path = tmp_path / "bomb"
    block = PACKED[program](bytes(1 << 24))
    path.write_bytes(block * 64)
    with path.open("rb", buffering=0) as file, unpacked(file, found(block)) as read:
        for _ in range(8):
            assert 0 < len(read(1 << 16)) <= 1 << 16


def test_a_program_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = PACKED["lz4"](DATA)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not found(data).is_there
    with pytest.raises(ImageError, match="the program lz4 is needed"):
        unpack(tmp_path / "file", data)


@pytest.mark.parametrize("program", ["gzip", "bzip2", "xz"])
def test_a_python_without_the_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    """Then the program is run."""
    monkeypatch.setattr(compressed.importlib.util, "find_spec", lambda name: None)
    data = PACKED[program](DATA)
    assert not found(data).is_in_library
    assert unpack(tmp_path / "file", data) == DATA


def test_what_is_no_compressed_file() -> None:
    for start in (b"", b"\x7fELF", b"KDUMP   ", b"makedumpfile\0\0\0\0", b"a text"):
        assert compression_of(start) is None
