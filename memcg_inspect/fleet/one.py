# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The audit of one dump
---------------------

``python -m memcg_inspect.fleet.one OPTIONS PATH`` audits a dump, and prints a line of JSON.
:func:`audit_dump` runs it in a process of its own: whatever a dump does to that process, others are
audited.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile
from typing import Any

from memcg_inspect.collect import audit
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.model import ImageError, MemcgInspectError
from memcg_inspect.model_fleet import DumpCause, DumpResult, parse_result
from memcg_inspect.render.documents import record_document
from memcg_inspect.report import Report

__all__ = ("audit_dump", "end_audits", "failed", "identity_of")

_STATUS = {"exact": 0, "findings": 1, "incomplete": 3, "moving": 3}
_UNUSABLE, _BUG = 2, 70
_MODULE = "memcg_inspect.fleet.one"


def audit_dump(options: Mapping[str, Any], path: str) -> DumpResult:
    """
    Audit a dump in another process, and wait for it.

    :param options: fields of :class:`~memcg_inspect.image.program.ImageSource`
    :param path: absolute path of the dump
    :raises ImageError: if no process can be started
    """
    began = time.monotonic()
    printed, errors, status = _run(json.dumps(options), path)
    try:
        return parse_result(json.loads(printed))
    except (ValueError, KeyError, TypeError):
        pass
    if status < 0:
        error = f"the audit was ended by {_name_of(-status)}, for lack of memory perhaps"
    else:
        last = errors.strip().rpartition("\n")[2] or "no reason was printed"
        error = f"a bug in memcg-inspect: {last}"
    return failed(path, _BUG, error, time.monotonic() - began)


#: Audits that run. Each ends when the other end of its standard input is closed.
_running: set[subprocess.Popen[str]] = set()


def _run(*words: str) -> tuple[str, str, int]:
    """
    Run this module in another process; return what it printed, and its exit status.

    :raises ImageError: if no process can be started
    """
    try:
        return _communicate([sys.executable, "-m", _MODULE, *words])
    except OSError as error:
        raise ImageError(f"a process cannot be started: {error.strerror}") from None


def _communicate(command: Sequence[str]) -> tuple[str, str, int]:
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


def _result(path: str, report: Report, seconds: float) -> DumpResult:
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
        *(path, *identity_of(path), _STATUS[report.verdict], report.verdict, None),
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
    began = time.monotonic()
    try:
        image = image_of(open_program(ImageSource(core=path, **options)))
        return _result(path, audit(image), time.monotonic() - began)
    except MemcgInspectError as error:
        return failed(path, _UNUSABLE, str(error), time.monotonic() - began)


def _main() -> None:
    options, path = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    result = _audited(json.loads(options), path)
    print(json.dumps(record_document("fleet", result)))


if __name__ == "__main__":
    _main()
