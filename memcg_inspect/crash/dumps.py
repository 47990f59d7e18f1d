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
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ("CRASHES", "Found", "arriving", "dumps_below", "shares_directory")

#: Where kdump leaves dumps.
CRASHES = "/var/crash"

_DUMP = re.compile(r"(dump\.\d{8,14}|vmcore(\.\d{8,14}|\.flat)?)(\.(gz|xz|lz4|bz2|zst))?")
#: How often a dump is looked at while it may still be written, in seconds.
_LOOK = 5
#: After this many times as long as a dump must stand still, those that do not are left for later.
_MOST_WAITS = 10


class Found(NamedTuple):
    """
    What is in a directory of crashes.

    :ivar dumps: finished dumps, the newest first, with what changes while one is written
    :ivar others: dumps of other users, which are left alone
    """

    dumps: dict[Path, os.stat_result]
    others: list[Path]


def dumps_below(folder: str) -> Found:
    """
    Find the dumps in a directory, and in the directories in it.

    :raises OSError: if it cannot be read. What is in it, and cannot be, is left out
    """
    dumps, others = list[tuple[Path, os.stat_result]](), list[Path]()
    for path, found in _files(folder):
        if _DUMP.fullmatch(path.name) is None:
            continue
        if _is_ours(path.parent, found):
            dumps.append((path, found))
        else:
            others.append(path)
    return Found(dict(sorted(dumps, key=lambda pair: (-pair[1].st_mtime, pair[0]))), others)


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
        can_group = bool(parent.st_mode & stat.S_IWGRP) and parent.st_gid != 0
        can_others = can_group or bool(parent.st_mode & stat.S_IWOTH)
        # In a directory such as /tmp, others cannot replace files of ours.
        is_safe = not can_others or bool(parent.st_mode & stat.S_ISVTX)
        return is_safe and {parent.st_uid, found.st_uid} <= ours and found.st_nlink == 1
    return False


def shares_directory(dump: Path) -> bool:
    """Return whether there are other dumps in the directory of a dump."""
    with suppress(OSError):
        dumps = [name for name in os.listdir(dump.parent) if _DUMP.fullmatch(name)]
        return dumps != [dump.name]
    return True


def arriving(
    folder: str,
    settle: float,
    is_wanted: Callable[[Path], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Path]:
    """
    Return the dumps of a directory, each once, also those that arrive meanwhile.

    A dump that may still be written is waited for. That it changes is seen by its size and its
    time. Its time alone tells nothing: the clock of the kernel that saved it may be wrong.

    :param settle: for how many seconds a dump must not have changed
    :param is_wanted: whether a dump is to be returned
    :raises OSError: if the directory cannot be read
    """
    seen: dict[Path, tuple[tuple[int, int], float]] = {}
    done, began = set[Path](), time.monotonic()
    while True:
        now = time.monotonic()
        waiting = False
        for path, found in dumps_below(folder).dumps.items():
            if path in done or not is_wanted(path):
                continue
            state = found.st_size, found.st_mtime_ns
            if path not in seen or seen[path][0] != state:
                seen[path] = state, now
            stood = max(now - seen[path][1], time.time() - found.st_mtime)
            if stood >= settle:
                done.add(path)
                yield path
                break
            waiting = True
        else:
            if not waiting or now - began > _MOST_WAITS * settle:
                return
            sleep(min(_LOOK, settle))
