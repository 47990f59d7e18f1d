# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Copies of dumps
---------------

drgn reads a dump from one file, and some dumps have to be copied to one first. A copy is kept in
the user's cache, so that the next command finds it. It is complete or absent: it has no name until
it is complete, and it is not the copy of another dump: its name is made of path, inode, size and
times of the files that it was made of.

All copies together have a limit. Those that were not used for the longest time are removed for a
new one, except those that a process has open. A copy that is not kept has no name, and ends with
the process, however that ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from memcg_inspect.image.room import NoRoomError, Output, room
from memcg_inspect.model import ImageError

__all__ = (
    "LIMIT",
    "Copies",
    "Write",
    "cache_folder",
    "given_limit",
    "key_of",
    "temporary_folder",
    "write_temporary",
)

#: Variable of the environment with the bytes that all copies may take.
LIMIT = "MEMCG_INSPECT_COPIES"

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
#: Names of copies, and of files that will be one if the file system has no files without a name.
_COPY, _NEW = ".core", ".new-"

Write = Callable[[Output], None]


def cache_folder() -> Path:
    """Return the folder of the copies that are kept, which may not be there."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "memcg-inspect" / "dumps"


def temporary_folder() -> str:
    """Return the folder of copies that are not kept: ``TMPDIR``, or else that of large files."""
    if "TMPDIR" not in os.environ and os.access("/var/tmp", os.W_OK | os.X_OK):
        return "/var/tmp"
    return tempfile.gettempdir()


def key_of(paths: Sequence[str]) -> str:
    """
    Return the name of the copy of these files, which changes if one of them does.

    :raises OSError: if one is missing
    """
    names, states = [], []
    for path in paths:
        found = os.stat(path)
        names.append(os.path.realpath(path))
        states.append(
            (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        )
    return f"{_hash(names)}-{_hash(states)}"


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode(errors="surrogateescape")).hexdigest()[:20]


class Copies:
    """
    The copies in the user's cache.

    :param folder: where they are
    :raises OSError: if it cannot be made or written
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
        self._folder = folder

    @contextmanager
    def turn(self, key: str, wait: Callable[[], None]) -> Iterator[None]:
        """
        Let one process at a time make a copy. The others find it then.

        :param wait: function to call if another process makes it
        :raises OSError: if the file of the lock cannot be made
        """
        path = self._folder / f"{key}.lock"
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    wait()
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                # Who had the lock has removed the file.
                is_there = _is_at(descriptor, path)
            except BaseException:
                os.close(descriptor)
                raise
            if is_there:
                break
            os.close(descriptor)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)

    def find(self, key: str) -> BinaryIO | None:
        """
        Open a copy. As long as the file is open, the copy is not removed.

        :return: ``None`` if there is none
        :raises OSError: if it cannot be locked
        """
        path = self._path(key)
        try:
            file = path.open("rb", buffering=0)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            is_there = _is_at(file.fileno(), path)
        except BaseException:
            file.close()
            raise
        if not is_there:
            file.close()
            return None
        with suppress(OSError):
            os.utime(path)  # the time of its last use
        return file

    def make(self, key: str, least: int, write: Write) -> BinaryIO:
        """
        Make a copy, and keep it if the limit allows it.

        :param least: bytes that it takes at least
        :param write: function that writes it
        :raises NoRoomError: if there is no room for it
        :raises ImageError: of *write*
        :raises OSError: if it cannot be written
        """
        self._remove_others(key)
        self._remove_down_to(least)
        with _new_file(str(self._folder)) as (descriptor, name):
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            _write(descriptor, str(self._folder), least, write)
            size = os.fstat(descriptor).st_blocks * 512
            self._remove_down_to(size, is_written=True)
            if self._used() + size <= self.limit(size):
                # Without this, it may have a name but no content after a power failure.
                os.fsync(descriptor)
                self._name(key, descriptor, name)
            file = _reopened(descriptor)
            # A file that was just named may be removed by another process, which is no harm.
            fcntl.flock(file, fcntl.LOCK_SH)
            return file

    def limit(self, written: int = 0) -> int:
        """
        Return how many bytes all copies may take.

        By default, they take at most half of what would be free without them.

        :param written: bytes of a file that may become a copy
        :raises ImageError: if the environment says it wrongly
        """
        given = given_limit()
        if given is not None:
            return given
        return (room(str(self._folder)) + self._used() + written) // 2

    def _used(self) -> int:
        return sum(map(_size, self._all()))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_COPY}"

    def _all(self) -> list[Path]:
        """Return all copies, those first that were not used for the longest time."""
        found = [path for path in self._folder.glob(f"*{_COPY}") if not path.is_symlink()]
        return sorted(found, key=_time)

    def _remove_others(self, key: str) -> None:
        """Remove copies of what the files were before, and what processes left that were killed."""
        name = key.split("-")[0]
        for path in self._all():
            if path.name.startswith(name) and path != self._path(key):
                _remove_unused(path)
        for path in self._folder.glob(f"{_NEW}*"):
            _remove_unused(path)

    def _remove_down_to(self, size: int, is_written: bool = False) -> None:
        """Remove the oldest copies until one of this size has room, and can be kept if ever."""
        for path in self._all():
            limit = self.limit(size if is_written else 0)
            has_room = is_written or room(str(self._folder)) >= size
            if has_room and (size > limit or self._used() + size <= limit):
                return
            _remove_unused(path)

    def _name(self, key: str, descriptor: int, name: str | None) -> None:
        path = self._path(key)
        with suppress(FileNotFoundError):
            path.unlink()
        if name is not None:
            os.rename(name, path)
            return
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # With a folder, Python calls linkat(), which follows the symbolic link.
            os.link(_descriptor_path(descriptor), path.name, dst_dir_fd=folder)
        finally:
            os.close(folder)


def write_temporary(folder: str, least: int, write: Write) -> BinaryIO:
    """
    Make a copy that has no name, and is gone when it is closed.

    :raises NoRoomError: if there is no room for it
    :raises ImageError: of *write*
    :raises OSError: if it cannot be written
    """
    with _new_file(folder) as (descriptor, name):
        if name is not None:
            os.unlink(name)
        _write(descriptor, folder, least, write)
        return _reopened(descriptor)


def given_limit() -> int | None:
    """
    Return the limit that the environment sets, in bytes.

    :raises ImageError: if it is no number of bytes
    """
    given = os.environ.get(LIMIT, "").strip()
    if not given:
        return None
    unit = given[-1].upper()
    number, unit = (given[:-1], unit) if unit in _UNITS else (given, "")
    if not (number.isascii() and number.isdigit()):
        raise ImageError(f"{LIMIT} is {given!r}, not a number of bytes such as 500M or 20G")
    return int(number) * _UNITS[unit]


def _write(descriptor: int, folder: str, least: int, write: Write) -> None:
    most = room(folder)
    if least > most:
        raise NoRoomError(least)
    write(Output(descriptor, most))


@contextmanager
def _new_file(folder: str) -> Iterator[tuple[int, str | None]]:
    """
    Make a file that nobody else can read.

    :return: a file descriptor, and the name, if it has one: then it is removed at the end, unless
        it was renamed
    """
    name = None
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # not all file systems have files without a name
        descriptor, name = tempfile.mkstemp(prefix=_NEW, dir=folder)
    try:
        yield descriptor, name
    finally:
        if name is not None:
            with suppress(OSError):
                os.unlink(name)
        os.close(descriptor)


def _reopened(descriptor: int) -> BinaryIO:
    return open(_descriptor_path(descriptor), "rb", buffering=0)


def _descriptor_path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _remove_unused(path: Path) -> None:
    """Remove a file that no process has open for reading or writing."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file still has its name."""
    try:
        there = os.stat(path)
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), there) and stat.S_ISREG(there.st_mode)


def _time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0
