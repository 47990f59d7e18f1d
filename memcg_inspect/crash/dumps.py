# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Dumps that kdump has left
-------------------------

Each crash has a directory of its own below ``/var/crash``:

- Debian: ``YYYYMMDDHHMM/dump.YYYYMMDDHHMM``, with ``.gz`` and the like if it is compressed, or
  ``vmcore.YYYYMMDDHHMM`` if makedumpfile failed;
- Fedora: ``HOST-DATE/vmcore``, or ``vmcore.flat``; SUSE: ``DATE/vmcore``.

A dump that is being written, or was never finished, has ``incomplete`` in its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ("CRASHES", "NAMES", "dumps_below", "has_report")

#: Where kdump leaves dumps.
CRASHES = "/var/crash"
#: The files of a report, in the directory of the dump. The first one is written first.
NAMES = ("report.txt", "report.json", "report.html")

_DUMP = re.compile(r"(dump\.\d{8,14}|vmcore(\.\d{8,14}|\.flat)?)(\.(gz|xz|lz4|bz2|zst))?")


def dumps_below(folder: str) -> Iterator[Path]:
    """
    Find the finished dumps in a directory, and in the directories in it, the newest first.

    :raises OSError: if it cannot be read
    """
    found = []
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            found += [other for other in os.scandir(entry) if _is_dump(other)]
        elif _is_dump(entry):
            found.append(entry)
    found.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    return (Path(entry.path) for entry in found)


def _is_dump(entry: os.DirEntry[str]) -> bool:
    return entry.is_file() and _DUMP.fullmatch(entry.name) is not None


def has_report(dump: Path) -> bool:
    """Return whether a report on a dump was begun."""
    return (dump.parent / NAMES[0]).exists()
