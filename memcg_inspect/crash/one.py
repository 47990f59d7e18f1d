# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The report on one dump
----------------------

:func:`report_on` audits a dump in a process of its own, so that whatever a dump does to it, the
others are audited. :func:`main` is what that process runs. It writes the files of the report, and a
line of JSON for its parent.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from memcg_inspect.collect import audit
from memcg_inspect.crash.config import advice
from memcg_inspect.crash.reports import ReportFiles
from memcg_inspect.escape import printable
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.model import MemcgInspectError
from memcg_inspect.render.documents import report_document, to_json
from memcg_inspect.render.first_screen import first_screen
from memcg_inspect.render.page import report_page
from memcg_inspect.render.report import report_lines
from memcg_inspect.render.text import plain_output
from memcg_inspect.render.typed import Typed
from memcg_inspect.tables import SCHEMA

__all__ = ("Outcome", "main", "report_on")

#: Columns of the text, which is read on consoles.
_COLUMNS = 80
#: Python looks for modules in the current directory, which is anybody's.
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from memcg_inspect.crash.one import main; main()"
)
_INTERRUPTED = "an earlier audit of it did not end: the machine went down, or the audit was killed"


class Outcome(NamedTuple):
    """
    What a report says.

    :ivar dump: the dump
    :ivar verdict: of the audit; ``None`` if there is none
    :ivar findings: number of findings
    :ivar what: in one sentence: the first diagnosis, or why there is no verdict; may be empty
    :ivar report: the text of the report; ``None`` if it could not be written
    """

    dump: str
    verdict: str | None
    findings: int
    what: str
    report: str | None = None


def report_on(dump: Path, options: dict[str, Any], again: bool = False) -> Outcome | None:
    """
    Audit a dump in another process, and write the report beside it.

    Its text is there at once, and says that the audit has begun: if the machine goes down
    meanwhile, the next run says so, and does not try the dump again at each boot. If this process
    is told to end, nothing is left, and the next run begins anew.

    :param options: fields of :class:`~memcg_inspect.image.program.ImageSource`
    :param again: also if an earlier audit did not end
    :return: ``None`` if another process audits the dump now
    :raises MemcgInspectError: if the dump cannot be opened
    """
    with _held(dump) as is_held:
        if not is_held:
            return None
        files = ReportFiles(dump)
        if files.state() == "begun" and not again:
            return _without(files, _INTERRUPTED)
        # If there is no room for a report, the journal may have some.
        with suppress(MemcgInspectError):
            files.begin()
        try:
            found = _in_process(files, options)
        except BaseException:
            files.forget()
            raise
        if found.verdict is None:
            return _without(files, found.what)
        if found.report is None:
            files.forget()
        return found


def _in_process(files: ReportFiles, options: dict[str, Any]) -> Outcome:
    """Audit a dump in another process."""
    words = [str(files.dump), files.prefix, json.dumps(options)]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *words], capture_output=True, text=True, check=False
    )
    try:
        return Outcome(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        last = done.stderr.strip().rpartition("\n")[2]
        why = f"a bug in memcg-inspect: {last or 'no reason was printed'}"
        if done.returncode < 0:
            why = f"the audit was ended by signal {-done.returncode}, for lack of memory perhaps"
        return Outcome(str(files.dump), None, 0, why)


def _without(files: ReportFiles, why: str) -> Outcome:
    """Write that there is no report."""
    name, path = printable(files.dump.name), printable(str(files.dump))
    repeat = f"To try again:\n    memcg-inspect crash report --again {path}\n"
    document = {"schema": SCHEMA, "verdict": None, "error": why}
    found = Outcome(str(files.dump), None, 0, why, str(files.text))
    try:
        files.write("txt", f"{name}: no report: {printable(why)}\n\n{advice()}\n{repeat}")
        files.write("json", json.dumps(document, indent=1) + "\n")
    except MemcgInspectError as error:
        return _unwritten(found, error)
    return found


def _unwritten(found: Outcome, error: MemcgInspectError) -> Outcome:
    what = f"the report could not be written: {error}"
    return found._replace(what="; ".join(filter(None, [found.what, what])), report=None)


@contextmanager
def _held(dump: Path) -> Iterator[bool]:
    """
    Hold a lock on a dump, and tell whether it could be had.

    :raises MemcgInspectError: if the dump cannot be opened
    """
    try:
        handle = os.open(dump, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MemcgInspectError(f"{dump}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        except OSError:
            yield True  # a file system without locks
        else:
            yield True
    finally:
        os.close(handle)


def _audited(files: ReportFiles, options: dict[str, Any]) -> Outcome:
    """Audit a dump, and write the report."""
    image = image_of(open_program(ImageSource(core=str(files.dump), **options)))
    report = audit(image)
    typed = Typed("memcg-inspect", ("-c", str(files.dump)))
    screen, whole = plain_output(_COLUMNS), plain_output(None)
    first_screen(report, screen, typed)
    report_lines(report, whole)
    text = f"{screen.text}\n{whole.text}" if report.findings else screen.text
    text = text if report.verdict != "incomplete" else f"{text}\n{advice()}"
    causes = [diagnosis.what for diagnosis in report.diagnoses]
    what = causes[0] if causes else report.findings[0].what if report.findings else ""
    found = Outcome(
        str(files.dump),
        report.verdict,
        len(report.findings),
        what or " ".join(report.notes),
        str(files.text),
    )
    # The text is the least, and what tells most. On a full disk, some of it may find room.
    for kept in (text, screen.text, screen.text.partition("\n")[0]):
        try:
            files.write("txt", kept)
            break
        except MemcgInspectError as error:
            unwritten = _unwritten(found, error)
    else:
        return unwritten
    try:
        files.write("json", to_json(report_document(report, False)))
        files.write("html", report_page(report, screen.text))
    except MemcgInspectError as error:
        return _unwritten(found, error)._replace(report=found.report)
    return found


def main() -> None:
    """Audit the dump of the arguments."""
    files, options = ReportFiles(Path(sys.argv[1])), json.loads(sys.argv[3])
    files.prefix = sys.argv[2]
    try:
        found = _audited(files, options)
    except MemcgInspectError as error:
        found = Outcome(str(files.dump), None, 0, str(error))
    print(json.dumps(found._asdict()), flush=True)
