# SPDX-License-Identifier: LGPL-2.1-or-later
"""Files that are written as a whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from tempfile import mkstemp

from memcg_inspect.model import MemcgInspectError

__all__ = ("remove_beside", "replace_file", "write_beside", "write_file")

#: Their files may be descriptors of this process, which another file must not replace.
_DEVICES = ("/dev/", "/proc/")


def write_file(name: str, text: str) -> None:
    """
    Write a file. Another program that reads it meanwhile has the old one or the new one whole.

    A device or a pipe is written to. A file that exists keeps its permissions.

    :raises MemcgInspectError: if it cannot be written
    """
    data = text.encode("utf-8", "backslashreplace")
    try:
        target = Path(os.path.realpath(name))
        mode = target.stat().st_mode if target.exists() else None
        is_special = mode is not None and not stat.S_ISREG(mode)
        if is_special or os.path.abspath(name).startswith(_DEVICES):
            with open(name, "ab") as device:
                device.write(data)
            return

        def write(path: Path) -> None:
            path.write_bytes(data)
            path.chmod(0o666 & ~_umask() if mode is None else stat.S_IMODE(mode))

        replace_file(target, write)
    except OSError as error:
        raise MemcgInspectError(f"{name}: {error.strerror}") from None


def replace_file(target: Path, write: Callable[[Path], None]) -> None:
    """
    Make a file anew.

    :param write: writes a temporary file beside it, which takes its place once it is complete
    :raises OSError: if it cannot be written
    """
    handle, name = mkstemp(".tmp", f".{target.name}.", target.parent)
    os.close(handle)
    temporary: Path | None = Path(name)
    try:
        write(Path(name))
        os.replace(name, target)
        temporary = None
    finally:  # on signals, too
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_beside(other: Path, name: str, text: str) -> None:
    """
    Write a file in the directory of another one, with its owner and at most its permissions.

    The directory may be one that other users can write to: no link in it is followed.

    :raises MemcgInspectError: if it cannot be written
    """
    data, temporary = text.encode("utf-8", "backslashreplace"), f".{name}.{token_hex(8)}.tmp"
    try:
        folder = os.open(other.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            found = os.stat(other.name, dir_fd=folder, follow_symlinks=False)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
                try:
                    file.write(data)
                    file.flush()
                    os.fchmod(file.fileno(), _give(file.fileno(), found))
                    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                except BaseException:
                    os.unlink(temporary, dir_fd=folder)
                    raise
        finally:
            os.close(folder)
    except OSError as error:
        raise MemcgInspectError(f"{other.parent / name}: {error.strerror}") from None


def _give(handle: int, other: os.stat_result) -> int:
    """
    Give a file to the owner and the group of another one, as far as this process may.

    :return: the permissions that it may have then
    """
    mode, own = stat.S_IMODE(other.st_mode) & 0o640, os.fstat(handle)
    if (own.st_uid, own.st_gid) == (other.st_uid, other.st_gid) or os.geteuid() != 0:
        return mode if own.st_gid == other.st_gid else mode & 0o600
    try:
        os.fchown(handle, other.st_uid, other.st_gid)
    except PermissionError:  # a service without CAP_CHOWN
        return mode & 0o600
    return mode


def remove_beside(other: Path, name: str) -> None:
    """
    Remove a file in the directory of another one. No link to the directory is followed.

    :raises MemcgInspectError: if it cannot be removed
    """
    try:
        folder = os.open(other.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise MemcgInspectError(f"{other.parent / name}: {error.strerror}") from None


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found
