# SPDX-License-Identifier: LGPL-2.1-or-later
"""
An image in each format that makedumpfile and kdump-tools write.

The audit of each must be that of the image itself, byte for byte. One part of a split dump is never
audited alone.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import filecmp
import json
import shutil
import struct
import subprocess
import zlib
from array import array
from collections.abc import Callable, Iterator
from functools import cache as cache_of_calls
from pathlib import Path
from typing import Any

import drgn
import pytest
from labkit.elf import program_headers_first
from support.guests import GuestImage, Lab
from support.sessions import converse

import memcg_inspect
from memcg_inspect.cli import main
from memcg_inspect.image import dump_file
from memcg_inspect.image.image import image_of
from memcg_inspect.image.split import part_of
from memcg_inspect.model import ImageError

pytestmark = pytest.mark.image

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


@pytest.fixture(scope="module")
def formats(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Formats]:
    folder = tmp_path_factory.mktemp("formats")
    yield Formats(lab.image("7.3", "1", "idle").core, folder)
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MEMCG_INSPECT_COPIES", raising=False)
    yield tmp_path / "memcg-inspect" / "dumps"
    shutil.rmtree(tmp_path / "memcg-inspect", ignore_errors=True)


def audited(capsys: pytest.CaptureFixture[str], *paths: Path) -> str:
    """Return the document of an audit without its times."""
    words = [word for path in paths for word in ("-c", str(path))]
    status = main(["audit", "--json", "--all", "--debuginfo", "btf", *words])
    shown = capsys.readouterr()
    assert (status, shown.err) == (0, "")
    document: dict[str, Any] = json.loads(shown.out)
    assert document["verdict"] == "exact"
    return json.dumps({**document, "timings": None})


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The document of the image itself."""
    return {}


NAMES = ["zlib", "lzo", "snappy", "zstd", "flattened", "flattened_elf"]
NAMES += ["dump.gz", "dump.xz", "dump.bz2", "dump.lz4", "split"]


@pytest.mark.parametrize("name", NAMES)
def test_each_format_says_the_same(
    formats: Formats,
    expected: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    cache: Path,
    name: str,
) -> None:
    if not expected:
        expected["elf"] = audited(capsys, formats.elf)
    path = formats.parts()[-1] if name == "split" else formats.file(name)
    assert audited(capsys, path) == expected["elf"]
    is_copied = name not in ("zlib", "lzo", "snappy", "zstd")
    assert cache.exists() is is_copied
    if is_copied:
        assert [file.suffix for file in cache.iterdir()] == [".core"]


def test_a_copy_is_what_makedumpfile_makes(formats: Formats, tmp_path: Path) -> None:
    for name in ("flattened", "flattened_elf"):
        by_tool = tmp_path / f"{name}.by-tool"
        with formats.file(name).open("rb") as data:
            subprocess.run(
                ["makedumpfile", "-R", by_tool], stdin=data, check=True, capture_output=True
            )
        found = dump_file.open_dump([str(formats.file(name))])
        assert filecmp.cmp(found.path, by_tool, shallow=False)
        by_tool.unlink()


def test_a_joined_dump_is_what_makedumpfile_makes(formats: Formats, tmp_path: Path) -> None:
    """At level 0, it keeps no page of zeroes for all parts."""
    paths = [tmp_path / f"vmcore.{number}" for number in range(PARTS)]
    makedumpfile("-l", "-d", 0, "--split", "--splitblock-size", 1024, formats.elf, *paths)
    makedumpfile("--reassemble", *paths, tmp_path / "by-tool")
    found = dump_file.open_dump([str(paths[1])])
    assert filecmp.cmp(found.path, tmp_path / "by-tool", shallow=False)
    for path in (*paths, tmp_path / "by-tool"):
        path.unlink()


def test_what_a_flattened_elf_dump_leaves_out_is_not_zero(
    formats: Formats, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """libkdumpfile, which opens it, takes it for zeroes."""
    flattened = formats.file("filtered_elf")
    by_tool = tmp_path / "by-tool"
    with flattened.open("rb") as data:
        subprocess.run(["makedumpfile", "-R", by_tool], stdin=data, check=True, capture_output=True)
    said = []
    for path in (by_tool, flattened):
        status = main(["audit", "--json", "--debuginfo", "btf", "-c", str(path)])
        said.append((status, {**json.loads(capsys.readouterr().out), "timings": None}))
    assert said[0] == said[1]
    assert (said[0][0], said[0][1]["verdict"]) == (3, "incomplete")
    by_tool.unlink()


def test_all_parts_have_pages(formats: Formats) -> None:
    """Or else these tests would test nothing."""
    parts = [part_of(str(path)) for path in formats.parts()]
    assert all(part and part.range[0] < part.range[1] for part in parts)
    assert all(path.stat().st_blocks * 512 > 100_000 for path in formats.parts())


@pytest.mark.parametrize("number", range(PARTS))
def test_one_part_alone_is_refused(
    formats: Formats, capsys: pytest.CaptureFixture[str], tmp_path: Path, number: int
) -> None:
    path = tmp_path / "vmcore"
    path.symlink_to(formats.parts()[number])
    for words in (["--debuginfo", "btf"], []):
        assert main(["audit", "-c", str(path), *words]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert "is one part of a split dump" in line
        assert "give all parts" in line


@pytest.mark.parametrize("number", range(PARTS))
def test_one_part_alone_is_refused_in_a_session(formats: Formats, number: int) -> None:
    """drgn opens it."""
    prog = drgn.Program()
    prog.set_core_dump(formats.parts()[number])
    for ask in (image_of, memcg_inspect.audit):
        with pytest.raises(ImageError, match="is one part of a split dump"):
            ask(prog)


def test_commands_of_a_session_refuse_one_part(formats: Formats) -> None:
    said = converse(GuestImage(formats.parts()[0]), "%memcg audit", "%memcg overview")
    for text in said:
        assert "is one part of a split dump" in text
        assert "Traceback" not in text


def test_parts_that_are_truncated_are_not_exact(
    formats: Formats, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A page that is missing is not zero."""
    paths = []
    for path in formats.parts():
        paths.append(tmp_path / path.name)
        shutil.copyfile(path, paths[-1])
        with paths[-1].open("r+b") as file:
            file.truncate(path.stat().st_size * 9 // 10)
    status = main(["audit", "--debuginfo", "btf", "-c", str(paths[0])])
    shown = capsys.readouterr()
    assert status in (2, 3)
    assert "EXACT" not in shown.out
    for path in paths:
        path.unlink()


def test_a_session_opens_them(formats: Formats) -> None:
    for given in (formats.file("dump.gz"), formats.parts(), str(formats.parts()[0])):
        prog = memcg_inspect.open(given, debuginfo="btf")
        assert prog["init_task"].comm.string_() == b"swapper/0"
