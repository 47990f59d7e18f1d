# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Files of reports
----------------

A dump has its report beside it, in ``report.txt``, ``report.json`` and ``report.html``. If it
shares its directory with other dumps, its name comes first: ``NAME.report.txt``.

The last line of the text names the dump. While the dump is audited, the text says that this has
begun.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from memcg_inspect.crash.dumps import shares_directory
from memcg_inspect.escape import printable
from memcg_inspect.files import remove_beside, write_beside
from memcg_inspect.model import MemcgInspectError

__all__ = ("ReportFiles",)

_BEGUN = "The audit of this dump has begun."
_LAST = "Dump: "
#: Bytes at the end of a text that have its last line, and at the beginning that have the first.
_TAIL = 4096

State = Literal["none", "begun", "done"]


class ReportFiles:
    """
    The files of the report on a dump.

    :ivar dump: the dump
    :ivar prefix: of the names of the files. It stays, also if other dumps arrive meanwhile
    """

    def __init__(self, dump: Path) -> None:
        self.dump = dump
        self.prefix = f"{dump.name}.report" if shares_directory(dump) else "report"

    @property
    def text(self) -> Path:
        """Path of the text."""
        return self.dump.parent / f"{self.prefix}.txt"

    def state(self) -> State:
        """
        Return whether there is a report.

        Links, files of other users, reports on other dumps, and those that are older than the dump
        do not count.
        """
        for name in ("report.txt", f"{self.dump.name}.report.txt"):
            text = self._text(self.dump.parent / name)
            if text is None:
                continue
            last = text.rstrip("\n").rpartition("\n")[2]
            if last == _LAST + printable(self.dump.name):
                return "begun" if text.startswith(_BEGUN) else "done"
        return "none"

    def _text(self, path: Path) -> str | None:
        """Return the beginning and the end of a text of ours; ``None`` if it is none."""
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(handle, "rb") as file:
                found, dump = os.fstat(handle), os.lstat(self.dump)
                is_ours = stat.S_ISREG(found.st_mode) and found.st_uid in {
                    0,
                    os.geteuid(),
                    dump.st_uid,
                }
                # The clock of the kernel that saved the dump may be ahead.
                is_older = found.st_mtime < dump.st_mtime < time.time()
                if not is_ours or is_older:
                    return None
                data = file.read(_TAIL)
                if found.st_size > _TAIL:
                    file.seek(-_TAIL, os.SEEK_END)
                    data += file.read(_TAIL)
                return data.decode(errors="replace")
        return None

    def begin(self) -> None:
        """
        Say that the audit has begun.

        :raises MemcgInspectError: if the file cannot be written
        """
        again = f"memcg-inspect crash report --again {printable(str(self.dump))}"
        self.write("txt", f"{_BEGUN} If it does not end, repeat it:\n    {again}\n")

    def forget(self) -> None:
        """Remove the text if it says no more than that the audit has begun."""
        if self.state() == "begun":
            with suppress(MemcgInspectError):
                remove_beside(self.dump, self.text.name)

    def write(self, kind: str, text: str) -> None:
        """
        Write a file.

        :param kind: ``txt``, ``json`` or ``html``
        :raises MemcgInspectError: if it cannot be written
        """
        if kind == "txt":
            text = f"{text.rstrip()}\n\n{_LAST}{printable(self.dump.name)}\n"
        write_beside(self.dump, f"{self.prefix}.{kind}", text)
