# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Dumps that kdump has left
-------------------------

Each crash has a directory of its own below ``/var/crash``:

- Debian: ``YYYYMMDDHHMM/dump.YYYYMMDDHHMM``, with ``.gz`` and the like if it is compressed, or
  ``vmcore.YYYYMMDDHHMM`` if makedumpfile failed;
- Fedora: ``HOST-DATE/vmcore``, or ``vmcore.flat``; SUSE: ``DATE/vmcore``.

A dump that is being written, or was never finished, has ``incomplete`` in its name.

Other users may be able to write to ``/var/crash``: Ubuntu lets all. Links are not followed, and the
directories and dumps of other users are left alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ("CRASHES", "Found", "dumps_below", "report_name")

#: Where kdump leaves dumps.
CRASHES = "/var/crash"

_DUMP = re.compile(r"(dump\.\d{8,14}|vmcore(\.\d{8,14}|\.flat)?)(\.(gz|xz|lz4|bz2|zst))?")


class Found(NamedTuple):
    """
    What is in a directory of crashes.

    :ivar dumps: finished dumps, the newest first
    :ivar newest: when the last file of a dump was changed, finished or not, in seconds since 1970
    :ivar others: dumps of other users, which are left alone
    """

    dumps: list[Path]
    newest: float
    others: list[Path]


def dumps_below(folder: str) -> Found:
    """
    Find the dumps in a directory, and in the directories in it.

    :raises OSError: if it cannot be read. What is in it, and cannot be, is left out
    """
    dumps, others, newest = list[tuple[float, Path]](), list[Path](), 0.0
    for path, found in _files(folder):
        is_dump = _DUMP.fullmatch(path.name) is not None
        if is_dump or "incomplete" in path.name:
            newest = max(newest, found.st_mtime)
        if is_dump and _is_ours(path.parent, found):
            dumps.append((found.st_mtime, path))
        elif is_dump:
            others.append(path)
    ranked = sorted(dumps, key=lambda pair: (-pair[0], pair[1]))
    return Found([path for _, path in ranked], newest, others)


def _files(folder: str) -> Iterator[tuple[Path, os.stat_result]]:
    """Return the regular files in a directory, and in the directories in it."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                for other in sorted(os.scandir(entry), key=lambda entry: entry.name):
                    with suppress(OSError):
                        if other.is_file(follow_symlinks=False):
                            yield Path(other.path), other.stat(follow_symlinks=False)
            elif entry.is_file(follow_symlinks=False):
                yield Path(entry.path), entry.stat(follow_symlinks=False)


def _is_ours(folder: Path, found: os.stat_result) -> bool:
    """Return whether a dump belongs to this user, or to root, and nobody else can replace it."""
    with suppress(OSError):
        parent, ours = folder.stat(), {0, os.geteuid()}
        can_others = parent.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # In a directory such as /tmp, others cannot replace files of ours.
        is_safe = not can_others or bool(parent.st_mode & stat.S_ISVTX)
        return is_safe and {parent.st_uid, found.st_uid} <= ours and found.st_nlink == 1
    return False


def report_name(dump: Path, kind: str) -> str:
    """
    Return the name of a file of the report on a dump.

    Dumps that share a directory have reports with their names.

    :param kind: ``txt``, ``json`` or ``html``
    """
    with suppress(OSError):
        dumps = [name for name in os.listdir(dump.parent) if _DUMP.fullmatch(name)]
        if dumps == [dump.name]:
            return f"report.{kind}"
    return f"{dump.name}.report.{kind}"
