# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The audit of one dump
---------------------

:func:`audit_dump` audits a dump in a process of its own: whatever the dump does to that process,
others are audited. :func:`main` is what that process runs.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile
from typing import Any

from memcg_inspect.collect import audit
from memcg_inspect.image.image import image_of
from memcg_inspect.image.place import code_of_program
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.model import ImageError, MemcgInspectError
from memcg_inspect.model_fleet import DumpCause, DumpResult, parse_result
from memcg_inspect.render.documents import record_document
from memcg_inspect.report import EXIT_STATUS, Report

__all__ = ("audit_dump", "end_audits", "failed", "identity_of", "main")

_UNUSABLE, _BUG = 2, 70
#: Python looks for modules in the current directory, which is anybody's.
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from memcg_inspect.fleet.one import main; main()"
)


def audit_dump(options: Mapping[str, Any], path: str, code: str) -> DumpResult:
    """
    Audit a dump in another process, and wait for it.

    :param options: fields of :class:`~memcg_inspect.image.program.ImageSource`
    :param path: absolute path of the dump
    :param code: hash of the program that wants to know,
        :func:`~memcg_inspect.image.place.code_of_program`
    :raises ImageError: if no process can be started, or if this is another version
    """
    if code != code_of_program():
        raise ImageError(f"{os.uname().nodename} has another version of memcg-inspect")
    began = time.monotonic()
    try:
        printed, errors, status = _communicate(
            [sys.executable, "-c", _PROGRAM, json.dumps(options), path]
        )
    except OSError as error:
        if error.errno == errno.E2BIG:
            return failed(path, _UNUSABLE, "its path is too long")
        raise ImageError(f"a process cannot be started: {error.strerror}") from None
    try:
        return parse_result(json.loads(printed))
    except (ValueError, KeyError, TypeError):
        pass
    if status < 0:
        why = f"the audit was ended by {_name_of(-status)}, for lack of memory perhaps"
    else:
        last = errors.strip().rpartition("\n")[2] or "no reason was printed"
        why = f"a bug in memcg-inspect: {last}"
    return failed(path, _BUG, why, time.monotonic() - began)


#: Audits that run. Each ends when the other end of its standard input is closed.
_running: set[subprocess.Popen[str]] = set()


def _communicate(command: Sequence[str]) -> tuple[str, str, int]:
    """Run a command; return what it printed, and its exit status."""
    with (
        TemporaryFile("w+", errors="backslashreplace") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process
        ) as process,
    ):
        assert process.stdout is not None
        _running.add(process)
        printed = process.stdout.read()
        status = process.wait()
        _running.discard(process)
        errors.seek(0)
        return printed, errors.read(), status


def end_audits() -> None:
    """End all audits that run in other processes."""
    for process in [*_running]:
        process.kill()


def _end_with_parent() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def failed(path: str, status: int, error: str, seconds: float = 0.0) -> DumpResult:
    """Return the result of a dump without a report."""
    return DumpResult(path, *identity_of(path), status, None, error, seconds=round(seconds, 3))


def identity_of(path: str) -> tuple[int | None, int | None]:
    """Return the size of a file, and the time at which it was last written; ``None`` if none."""
    try:
        found = os.stat(path)
    except OSError:
        return None, None
    return found.st_size, found.st_mtime_ns


def _result(
    path: str, identity: tuple[int | None, int | None], report: Report, seconds: float
) -> DumpResult:
    paths = {memcg.address: memcg.path for memcg in report.memcgs}
    causes = [
        DumpCause(
            cause=found.cause,
            what=found.what,
            confidence=found.confidence,
            memcg_paths=tuple(paths.get(address) for address in found.memcgs),
            node=None if found.nid is None or found.nid < 0 else found.nid,
            amount=found.amount,
            unit=found.unit,
            findings=len(found.findings),
        )
        for found in report.diagnoses
    ]
    return DumpResult(
        *(path, *identity, EXIT_STATUS[report.verdict], report.verdict, None),
        host=report.image.host,
        release=report.image.release,
        memcgs=len(report.memcgs),
        rows=sum(identity.rows for identity in report.identities),
        findings=len(report.findings),
        unexplained=len(report.unexplained),
        unreadable=sum(c.unreadable for c in report.coverage.values()),
        causes=tuple(causes),
        seconds=round(seconds, 3),
    )


def _audited(options: Mapping[str, Any], path: str) -> DumpResult:
    began, identity = time.monotonic(), identity_of(path)
    try:
        mode = os.stat(path).st_mode if identity[0] is not None else stat.S_IFREG
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode):
            return failed(path, _UNUSABLE, f"{path} is no regular file")
        image = image_of(open_program(ImageSource(core=path, **options)))
        found = _result(path, identity, audit(image), time.monotonic() - began)
    except (MemcgInspectError, OSError) as error:
        return failed(path, _UNUSABLE, str(error), time.monotonic() - began)
    if identity_of(path) != identity:
        return failed(path, _UNUSABLE, f"{path} was changed while it was read")
    return found


def main() -> None:
    """Audit the dump that the arguments name, and print a line of JSON."""
    options, path = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    result = _audited(json.loads(options), path)
    print(json.dumps(record_document("fleet", result)))
