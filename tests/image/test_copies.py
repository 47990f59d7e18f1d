# SPDX-License-Identifier: LGPL-2.1-or-later
"""Copies of dumps: complete or absent, within their limit, and never in the way."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from memcg_inspect.image import copies
from memcg_inspect.image.copies import LIMIT, Copies, cache_folder, key_of, write_temporary
from memcg_inspect.image.room import NoRoomError, Output, room
from memcg_inspect.model import ImageError

#: A page of the page cache, so that files have this size on disk, too.
KIB = 1024
SIZE = 64 * KIB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "dumps"


@pytest.fixture(params=["without a name", "with a name"])
def any_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on file systems that have files without a name, and on others."""
    if request.param == "with a name":
        opened = os.open

        def refuse(path: str, flags: int, *more: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(95, "Operation not supported")
            return opened(path, flags, *more)

        monkeypatch.setattr(copies.os, "open", refuse)


def writes(data: bytes) -> Callable[[Output], None]:
    return lambda output: output.write(0, data)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def kept(folder: Path, key: str, size: int = SIZE) -> None:
    with Copies(folder).make(key, size, writes(b"x" * size)):
        pass


def test_the_name_follows_the_files(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    path.write_bytes(b"a")
    first = key_of([str(path)])
    assert key_of([str(path)]) == first
    (tmp_path / "link").symlink_to(path)
    assert key_of([str(tmp_path / "link")]) == first
    other = tmp_path / "other"
    other.write_bytes(b"a")
    assert key_of([str(other)]) != first
    assert key_of([str(path), str(other)]) != first
    keys = {first}
    path.write_bytes(b"ab")
    keys.add(key_of([str(path)]))
    os.utime(path, ns=(1, 1))
    keys.add(key_of([str(path)]))
    # Another file of this size and time in its place.
    other.write_bytes(b"cd")
    os.utime(other, ns=(1, 1))
    other.rename(path)
    keys.add(key_of([str(path)]))
    assert len(keys) == 4
    assert len({key.split("-")[0] for key in keys}) == 1
    path.unlink()
    with pytest.raises(FileNotFoundError):
        key_of([str(path)])


@pytest.mark.usefixtures("any_system")
def test_a_copy_is_found_again(folder: Path) -> None:
    kept_copies = Copies(folder)
    assert kept_copies.find("a-1") is None
    with kept_copies.make("a-1", 5, writes(b"12345")) as file:
        assert file.read() == b"12345"
    assert names(folder) == {"a-1.core"}
    with Copies(folder).find("a-1") or open(os.devnull, "rb") as file:
        assert file.read() == b"12345"
    assert (folder / "a-1.core").stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("any_system")
@pytest.mark.parametrize("error", [ImageError("damaged"), KeyboardInterrupt(), OSError(5, "I/O")])
def test_nothing_is_left_of_what_failed(folder: Path, error: BaseException) -> None:
    def write(output: Output) -> None:
        output.write(0, b"123")
        raise error

    kept_copies = Copies(folder)
    with pytest.raises(type(error)), kept_copies.turn("a-1", lambda: None):
        kept_copies.make("a-1", 5, write)
    with pytest.raises(type(error)):
        write_temporary(str(folder), 5, write)
    assert names(folder) == set()


@pytest.mark.usefixtures("any_system")
def test_a_temporary_copy_has_no_name(folder: Path) -> None:
    folder.mkdir()
    with write_temporary(str(folder), 5, writes(b"12345")) as file:
        assert names(folder) == set()
        assert Path(f"/proc/self/fd/{file.fileno()}").read_bytes() == b"12345"


def test_what_a_killed_process_left_is_removed(folder: Path) -> None:
    folder.mkdir()
    (folder / ".new-1").write_bytes(b"half")
    with (folder / ".new-2").open("wb") as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        kept(folder, "a-1")
        assert names(folder) == {"a-1.core", ".new-2"}


def test_a_copy_of_what_the_file_was_before_is_removed(folder: Path) -> None:
    for key in ("a-1", "b-1", "a-2"):
        kept(folder, key)
    assert names(folder) == {"b-1.core", "a-2.core"}


def test_the_oldest_are_removed_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "200K")
    for age, key in enumerate("cab"):
        kept(folder, f"{key}-1")
        os.utime(folder / f"{key}-1.core", (age, age))
    # It is used, and so the newest.
    found = Copies(folder).find("c-1")
    assert found is not None
    found.close()
    os.utime(folder / "c-1.core", (10, 10))
    kept(folder, "d-1")
    assert names(folder) == {"b-1.core", "c-1.core", "d-1.core"}
    kept(folder, "e-1", 130 * KIB)
    assert names(folder) == {"d-1.core", "e-1.core"}


def test_what_is_in_use_is_not_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "100K")
    kept(folder, "a-1")
    with Copies(folder).find("a-1") or open(os.devnull, "rb"):
        with Copies(folder).make("b-1", SIZE, writes(b"y" * SIZE)) as file:
            assert names(folder) == {"a-1.core"}
            # It is not kept, but can be used.
            assert file.read() == b"y" * SIZE
        with Copies(folder).make("a-2", 10, writes(b"y" * 10)):
            assert names(folder) == {"a-1.core", "a-2.core"}
    kept(folder, "b-1")
    assert names(folder) == {"a-2.core", "b-1.core"}


def test_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "room", lambda folder: 1000 * KIB)
    kept_copies = Copies(folder)
    assert kept_copies.limit() == 500 * KIB
    kept(folder, "a-1")
    assert kept_copies.limit() == (1000 * KIB + SIZE) // 2
    for text, number in (
        ("123", 123),
        ("5k", 5 << 10),
        ("7M", 7 << 20),
        ("20G", 20 << 30),
        ("1T", 1 << 40),
        (" 0 ", 0),
    ):
        monkeypatch.setenv(LIMIT, text)
        assert kept_copies.limit() == number
    for text in ("x", "-1", "1.5G", "5 GiB", "G", "²"):
        monkeypatch.setenv(LIMIT, text)
        with pytest.raises(ImageError, match="not a number of bytes"):
            kept_copies.limit()


def test_what_exceeds_the_limit_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "50K")
    kept(folder, "a-1", 10 * KIB)
    # The size is not known before: only the first bytes are needed.
    with Copies(folder).make("b-1", 10, writes(b"x" * SIZE)) as file:
        assert len(file.read()) == SIZE
    assert "b-1.core" not in names(folder)


def test_no_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "room", lambda folder: 100 * KIB)
    monkeypatch.setenv(LIMIT, "1G")
    for make in (
        lambda least, data: Copies(folder).make("a-1", least, writes(data)),
        lambda least, data: write_temporary(str(folder), least, writes(data)),
    ):
        for least, data in ((200 * KIB, b""), (10, bytes(101 * KIB))):
            with pytest.raises(NoRoomError):
                make(least, data)
    assert names(folder) == set()


def test_old_copies_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "1G")
    kept(folder, "a-1")
    kept(folder, "b-1")

    def left(path: str) -> int:
        return 150 * KIB - sum(file.stat().st_size for file in folder.glob("*.core"))

    monkeypatch.setattr(copies, "room", left)
    kept(folder, "c-1", 80 * KIB)
    assert names(folder) == {"b-1.core", "c-1.core"} or names(folder) == {"a-1.core", "c-1.core"}


def test_the_reserve(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    free = found.f_bavail * found.f_frsize
    assert room(str(tmp_path)) <= free
    with pytest.raises(FileNotFoundError):
        room(str(tmp_path / "missing"))


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for base in (None, "relative"):
        if base is None:
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert cache_folder() == tmp_path / ".cache" / "memcg-inspect" / "dumps"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "memcg-inspect" / "dumps"
    (tmp_path / "x").write_text("no folder")
    with pytest.raises(OSError):
        Copies(cache_folder())


TURN = """
import sys
from pathlib import Path
from memcg_inspect.image.copies import Copies
kept = Copies(Path(sys.argv[1]))
def write(output):
    print("writes", flush=True)
    sys.stdin.readline()
    output.write(0, b"12345")
with kept.turn("a-1", lambda: print("waits", flush=True)):
    file = kept.find("a-1")
    if file is None:
        file = kept.make("a-1", 5, write)
    print(file.read().decode(), flush=True)
"""


def turn(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TURN, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("ends", ["writes it", "is killed"])
def test_two_processes_at_once(folder: Path, ends: str) -> None:
    """One makes the copy. The other waits for it, and makes it only if the first one was killed."""
    with turn(folder) as first:
        assert line(first) == "writes"
        with turn(folder) as second:
            assert line(second) == "waits"
            assert first.stdin is not None and second.stdin is not None
            if ends == "is killed":
                first.send_signal(signal.SIGKILL)
                assert line(second) == "writes"
                second.stdin.write("\n")
                second.stdin.flush()
            else:
                first.stdin.write("\n")
                first.stdin.flush()
                assert line(first) == "12345"
            assert line(second) == "12345"
    assert names(folder) == {"a-1.core"}


def test_a_copy_that_is_replaced_while_it_is_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that has lost its name is no copy: it takes room that nobody sees."""
    kept(folder, "a-1")
    locked = fcntl.flock

    def lock(file: object, how: int) -> None:
        (folder / "a-1.core").unlink(missing_ok=True)
        locked(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(copies.fcntl, "flock", lock)
    assert Copies(folder).find("a-1") is None


def test_the_time_of_the_last_use(folder: Path) -> None:
    kept(folder, "a-1")
    os.utime(folder / "a-1.core", (1, 1))
    before = time.time()
    with Copies(folder).find("a-1") or open(os.devnull, "rb"):
        assert (folder / "a-1.core").stat().st_mtime >= before - 5
