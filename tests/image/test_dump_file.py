# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which file of a dump is opened: the dump, or a copy of it. The dumps are written by hand."""

from __future__ import annotations

import gzip
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memcg_inspect.image import copies, dump_file, flattened
from memcg_inspect.image.copies import LIMIT
from memcg_inspect.image.dump_file import open_dump
from memcg_inspect.image.flattened import MAGIC
from memcg_inspect.model import ImageError

DUMP = b"\x7fELF" + bytes(range(256)) * 1000
FLAT = (
    (MAGIC + struct.pack(">qq", 1, 1)).ljust(4096, b"\0")
    + struct.pack(">qq", 0, len(DUMP))
    + DUMP
    + struct.pack(">qq", -1, -1)
)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(copies.tempfile, "tempdir", None)
    monkeypatch.delenv(LIMIT, raising=False)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "memcg-inspect" / "dumps"


def opened(*paths: Path) -> bytes:
    """Return what drgn would read."""
    found = open_dump([*map(str, paths)])
    data = Path(found.path).read_bytes()
    if found.file is not None:
        found.file.close()
    return data


def left(tmp_path: Path) -> list[Path]:
    """Return all files in the cache and in the folder of temporary files."""
    return [
        path
        for folder in ("cache", "tmp")
        for path in (tmp_path / folder).rglob("*")
        if path.is_file()
    ]


def formats() -> Iterator[tuple[str, bytes]]:
    for name, data in (("plain", DUMP), ("flattened", FLAT)):
        yield f"{name}.gz", gzip.compress(data)
    yield "flattened", FLAT


@pytest.mark.parametrize(("name", "data"), [*formats()], ids=[name for name, _ in formats()])
def test_a_copy_is_made_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert opened(path) == DUMP
    (copy,) = left(tmp_path)
    assert copy.parent == cache
    # Of the dump, no more is read than its beginning.
    monkeypatch.setattr(flattened, "measure", None)
    monkeypatch.setattr(flattened, "unflatten", None)
    monkeypatch.setattr(dump_file, "unpacked", None)
    assert opened(path) == DUMP
    assert left(tmp_path) == [copy]
    assert path.read_bytes() == data


def test_a_dump_is_opened_itself(tmp_path: Path) -> None:
    path = tmp_path / "core"
    path.write_bytes(DUMP)
    assert open_dump([str(path)]) == (str(path), None)
    assert open_dump(["/dev/null"]) == ("/dev/null", None)
    assert left(tmp_path) == []


def test_zeroes_take_no_room(tmp_path: Path, cache: Path) -> None:
    path, data = tmp_path / "core.gz", DUMP + bytes(1 << 24) + b"end" + bytes(1 << 20)
    path.write_bytes(gzip.compress(data, 1))
    assert opened(path) == data
    (copy,) = left(tmp_path)
    assert copy.stat().st_blocks * 512 < 1 << 20


def test_a_dump_that_changes_has_another_copy(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    path.write_bytes(FLAT)
    assert opened(path) == DUMP
    other = FLAT.replace(bytes(range(256)), bytes(range(255, -1, -1)))
    path.write_bytes(other)
    assert opened(path) == DUMP.replace(bytes(range(256)), bytes(range(255, -1, -1)))
    assert len(left(tmp_path)) == 1


def test_a_dump_that_is_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dump"
    path.write_bytes(FLAT)
    unflatten = flattened.unflatten

    def changing(*args: object) -> None:
        unflatten(*args)  # type: ignore[arg-type]
        path.write_bytes(FLAT + b"more")

    monkeypatch.setattr(flattened, "unflatten", changing)
    with pytest.raises(ImageError, match="dump: it was changed while it was read"):
        opened(path)
    assert left(tmp_path) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """The copy is temporary then, without a name."""
    (tmp_path / "cache").write_text("no folder")
    path = tmp_path / "dump"
    path.write_bytes(FLAT)
    assert opened(path) == DUMP
    assert left(tmp_path) == []


def test_a_cache_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS may be."""

    def flock(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(copies.fcntl, "flock", flock)
    path = tmp_path / "dump"
    path.write_bytes(FLAT)
    for _ in range(2):
        assert opened(path) == DUMP
        assert all(file.suffix != ".core" for file in left(tmp_path))


def test_no_copies_are_kept_if_told_so(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, "0")
    path = tmp_path / "dump"
    path.write_bytes(FLAT)
    assert opened(path) == DUMP
    assert left(tmp_path) == []
    assert not cache.exists()
    monkeypatch.setenv(LIMIT, "much")
    with pytest.raises(ImageError) as error:
        opened(path)
    assert str(error.value).startswith(f"{LIMIT} is 'much', not a number of bytes")


def test_a_dump_on_a_medium_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "medium"
    folder.mkdir()
    (folder / "dump").write_bytes(FLAT)
    (folder / "dump").chmod(0o400)
    folder.chmod(0o500)
    assert opened(folder / "dump") == DUMP
    assert os.listdir(folder) == ["dump"]
    assert stat.S_IMODE((folder / "dump").stat().st_mode) == 0o400
    folder.chmod(0o700)


def no_room(monkeypatch: pytest.MonkeyPatch, **bytes: int) -> None:
    """Leave so much room in the cache and in the folder of temporary files."""

    def room(folder: str) -> int:
        return bytes["tmp" if folder.endswith("/tmp") else "cache"]

    monkeypatch.setattr(copies, "room", room)
    monkeypatch.setattr(dump_file, "room", room)


def test_no_room_for_a_flattened_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room(monkeypatch, cache=1000, tmp=2000)
    path = tmp_path / "my dump"
    path.write_bytes(FLAT)
    with pytest.raises(ImageError) as error:
        opened(path)
    assert str(error.value) == (
        f"{path} must be unflattened first, which takes 256,004 bytes, and there is room for "
        f"1,000 in {tmp_path}/cache/memcg-inspect/dumps and 2,000 in {tmp_path}/tmp: do it where "
        f"there is room (makedumpfile -R vmcore < '{path}') and give the result with -c"
    )
    assert left(tmp_path) == []


def test_no_room_for_what_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much it is is not known before."""
    no_room(monkeypatch, cache=100_000, tmp=100_000)
    path = tmp_path / "dump.gz"
    for data in (DUMP, FLAT):
        path.write_bytes(gzip.compress(data))
        with pytest.raises(ImageError) as error:
            opened(path)
        assert "must be unpacked first, which takes more than " in str(error.value)
        assert f"(gzip -dc {path} > vmcore)" in str(error.value)
        assert left(tmp_path) == []


def test_room_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room(monkeypatch, cache=100_000, tmp=1_000_000)
    path = tmp_path / "dump.gz"
    path.write_bytes(gzip.compress(FLAT))
    assert opened(path) == DUMP
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "words", "said"),
    [
        # Others may have taken the room meanwhile.
        (28, "No space left on device", "must be unflattened first"),
        (5, "Input/output error", "dump cannot be copied: Input/output error"),
    ],
)
def test_a_disk_that_is_full_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str, said: str
) -> None:
    def fail(*args: object) -> int:
        raise OSError(number, words)

    monkeypatch.setattr(os, "pwrite", fail)
    path = tmp_path / "dump"
    path.write_bytes(FLAT)
    with pytest.raises(ImageError, match=said):
        opened(path)
    assert left(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"a text", MAGIC, gzip.compress(DUMP)])
def test_what_is_compressed_must_be_a_dump(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(ImageError, match=r"file.gz: (what is compressed in it is not|the stream)"):
        opened(path)
    assert left(tmp_path) == []


def test_a_part_that_is_compressed(tmp_path: Path) -> None:
    """drgn would open it as if it were the whole."""
    data = bytearray(6 * 4096)
    data[:8] = b"KDUMP   "
    struct.pack_into("<iiI", data, 0x1AC, 4096, 2, 2)
    struct.pack_into("<iQQ", data, 4096 + 12, 1, 0, 50)
    path = tmp_path / "vmcore.0.gz"
    path.write_bytes(gzip.compress(data))
    with pytest.raises(ImageError, match=r"vmcore.0.gz: it is one part of a split dump: unpack"):
        opened(path)
    assert left(tmp_path) == []


def test_a_program_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "dump.lz4"
    path.write_bytes(b"\x04\x22\x4d\x18")
    with pytest.raises(ImageError) as error:
        opened(path)
    assert str(error.value) == (
        f"{path} is compressed by lz4, which is not installed: unpack it where it is (lz4 -dc "
        f"{path} > vmcore), or install it (Debian: lz4)"
    )


#: Waits while a copy is made.
WAITING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from memcg_inspect.image.room import Output
write = Output.write
def slow(*args):
    write(*args)
    print("writing", file=sys.stderr, flush=True)
    time.sleep(60)
Output.write = slow
from memcg_inspect.cli import main
sys.exit(main(["overview", "--json", "-c", sys.argv[1]]))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_leaves_nothing_behind(tmp_path: Path, how: signal.Signals) -> None:
    path = tmp_path / "dump"
    path.write_bytes(FLAT)
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "writing\n"
        process.send_signal(how)
        out, said = process.communicate(timeout=60)
    assert out == ""
    if how == signal.SIGINT:
        assert (process.returncode, said) == (130, "memcg-inspect: interrupted\n")
        assert left(tmp_path) == []
    # Of a process that was killed, the file of its lock is left, which is empty.
    assert sum(file.stat().st_size for file in left(tmp_path)) == 0
    assert opened(path) == DUMP
    assert [file.suffix for file in left(tmp_path)] == [".core"]
