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
#: The most bytes of it.
_LARGEST = 1 << 16
_TITLE = "memcg-inspect has looked at new crash dumps:"
_MORE = "  and others: journalctl -t memcg-inspect"


def sentence(outcome: Outcome) -> str:
    """Return what a report says, in one line."""
    if outcome.verdict is None:
        return f"{outcome.dump}: no report: {outcome.what}"
    what = f": {outcome.what}" if outcome.what else ""
    counted = f" ({outcome.findings:,} findings)" if outcome.findings else ""
    return f"{outcome.dump}: memory accounting is {outcome.verdict}{counted}{what}"


def tell_journal(outcome: Outcome, path: str = JOURNAL) -> bool:
    """Send a line to the journal; return whether it is there."""
    fields = {
        "MESSAGE": printable(sentence(outcome)),
        "PRIORITY": str(_NOTICE if outcome.verdict == "exact" else _WARNING),
        "SYSLOG_IDENTIFIER": "memcg-inspect",
        "MEMCG_INSPECT_DUMP": outcome.dump,
        "MEMCG_INSPECT_REPORT": outcome.report or "",
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
    Say at the next login what was found, the last report first.

    What earlier runs since the boot have said stays.

    :raises MemcgInspectError: if the file cannot be written
    """
    said = list(map(_said, outcomes))
    dumps = {lines[0].partition(": ")[0].split("  ")[-1] for lines in said}
    before = _said_before(path)
    had_more = [_MORE] in before
    for lines in before:
        if lines == [_MORE]:
            continue
        if lines[0].partition(": ")[0].split("  ")[-1] not in dumps:
            said.append(lines)
    text = [_TITLE, *(line for lines in said[:_MOST_CRASHES] for line in lines)]
    if had_more or len(said) > _MOST_CRASHES:
        text.append(_MORE)
    write_file(path, "".join(f"{line}\n" for line in text))


def _said(outcome: Outcome) -> list[str]:
    """Return the lines for one report."""
    when = ""
    with suppress(OSError):
        seconds = os.stat(outcome.dump).st_mtime
        when = f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}  "
    lines = [f"  {when}{printable(sentence(outcome))}"]
    return [*lines, f"    report: {printable(outcome.report)}"] if outcome.report else lines


def _said_before(path: str) -> list[list[str]]:
    """Return the lines for each report that a message of the day names, and the last line."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            title, *lines = file.read(_LARGEST).splitlines()
    except (OSError, ValueError):
        return []
    said: list[list[str]] = []
    for line in lines if title == _TITLE else []:
        if line.startswith("    ") and said:
            said[-1].append(line)
        else:
            said.append([line])
    return said
