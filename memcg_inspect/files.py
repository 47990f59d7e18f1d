# SPDX-License-Identifier: LGPL-2.1-or-later
"""Files that are written as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import mkstemp

from memcg_inspect.model import MemcgInspectError

__all__ = ("replace_file", "write_file")


def write_file(name: str, text: str, mode: int = 0o644) -> None:
    """
    Write a file. Another program that reads it meanwhile has the old one or the new one whole.

    A device or a pipe is written to.

    :param mode: its permissions, less those of the umask
    :raises MemcgInspectError: if it cannot be written
    """
    data = text.encode("utf-8", "backslashreplace")

    def write(path: Path) -> None:
        path.write_bytes(data)
        path.chmod(mode & ~_umask())

    try:
        target = Path(os.path.realpath(name))
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
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


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found
