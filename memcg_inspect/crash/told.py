# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Who is told of a crash
----------------------

One line goes to the journal, with fields that ``journalctl`` can match, in its native protocol
(https://systemd.io/JOURNAL_NATIVE_PROTOCOL/). :manpage:`pam_motd(8)` shows the files of
``/run/motd.d`` at the next login.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from memcg_inspect.crash.dumps import report_name
from memcg_inspect.crash.one import Outcome
from memcg_inspect.escape import printable
from memcg_inspect.files import write_file

__all__ = ("JOURNAL", "MOTD", "sentence", "tell_journal", "write_motd")

JOURNAL = "/run/systemd/journal/socket"
MOTD = "/run/motd.d/memcg-inspect"
#: ``LOG_WARNING`` and ``LOG_NOTICE``.
_WARNING, _NOTICE = 4, 5
#: The most crashes that the message of the day names.
_MOST_CRASHES = 5


def sentence(outcome: Outcome) -> str:
    """Return what a report says, in one line."""
    if outcome.verdict is None:
        return f"{outcome.dump}: no report: {outcome.what}"
    what = f": {outcome.what}" if outcome.what else ""
    counted = f" ({outcome.findings:,} findings)" if outcome.findings else ""
    return f"{outcome.dump}: memory accounting is {outcome.verdict}{counted}{what}"


def _report_of(outcome: Outcome) -> str:
    dump = Path(outcome.dump)
    return str(dump.parent / report_name(dump, "txt"))


def tell_journal(outcome: Outcome, path: str = JOURNAL) -> bool:
    """Send a line to the journal; return whether it is there."""
    fields = {
        "MESSAGE": printable(sentence(outcome)),
        "PRIORITY": str(_NOTICE if outcome.verdict == "exact" else _WARNING),
        "SYSLOG_IDENTIFIER": "memcg-inspect",
        "MEMCG_INSPECT_DUMP": outcome.dump,
        "MEMCG_INSPECT_REPORT": _report_of(outcome),
        "MEMCG_INSPECT_VERDICT": outcome.verdict or "",
        "MEMCG_INSPECT_FINDINGS": str(outcome.findings),
    }
    message = b"".join(_field(name, value) for name, value in fields.items())
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.sendto(message, path)
        return True
    return False


def _field(name: str, value: str) -> bytes:
    """Return a field, with its length, so that it may have line feeds."""
    data = os.fsencode(value)
    return name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"


def write_motd(outcomes: list[Outcome], path: str = MOTD) -> None:
    """
    Say at the next login what was found, the newest crash first.

    :raises MemcgInspectError: if the file cannot be written
    """
    lines = ["memcg-inspect has looked at new crash dumps:"]
    for outcome in outcomes[:_MOST_CRASHES]:
        when = ""
        with suppress(OSError):
            seconds = os.stat(outcome.dump).st_mtime
            when = f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}  "
        lines.append(f"  {when}{printable(sentence(outcome))}")
        lines.append(f"    report: {printable(_report_of(outcome))}")
    left = len(outcomes) - _MOST_CRASHES
    if left > 0:
        lines.append(f"  and {left:,} more")
    write_file(path, "".join(f"{line}\n" for line in lines))
