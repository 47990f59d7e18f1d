# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The report on one dump
----------------------

``python -m memcg_inspect.crash.one DUMP FOLDER`` audits a dump in a process of its own, so that
whatever a dump does to it, the others are audited. It writes the files of the report, and a line of
JSON for its parent.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from memcg_inspect.collect import audit
from memcg_inspect.crash.config import advice
from memcg_inspect.crash.dumps import report_name
from memcg_inspect.escape import printable
from memcg_inspect.files import write_beside
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

__all__ = ("Outcome", "report_on")

#: Columns of the text, which is read on consoles.
_COLUMNS = 80


class Outcome(NamedTuple):
    """
    What a report says.

    :ivar dump: the dump
    :ivar verdict: of the audit; ``None`` if there is none
    :ivar findings: number of findings
    :ivar what: in one sentence: the first diagnosis, or why there is no verdict; may be empty
    """

    dump: str
    verdict: str | None
    findings: int
    what: str


def report_on(dump: Path, options: dict[str, Any]) -> Outcome:
    """
    Audit a dump in another process, and write the report beside it.

    Its text is there at once, and says that the audit has begun: if the machine goes down
    meanwhile, the dump is not tried again at each boot.

    :param options: fields of :class:`~memcg_inspect.image.program.ImageSource`
    :raises MemcgInspectError: if the report cannot be written
    """
    _write(
        dump,
        "txt",
        f"The audit of {printable(dump.name)} has begun and did not end. To repeat it:\n"
        f"    memcg-inspect crash report --again {printable(str(dump))}\n",
    )
    command = [sys.executable, "-m", __spec__.name, str(dump), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found = Outcome(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        last = done.stderr.strip().rpartition("\n")[2]
        why = f"a bug in memcg-inspect: {last or 'no reason was printed'}"
        if done.returncode < 0:
            why = f"the audit was ended by signal {-done.returncode}, for lack of memory perhaps"
        found = Outcome(str(dump), None, 0, why)
    if found.verdict is None:
        text = f"{printable(dump.name)}: no report: {printable(found.what)}\n\n{advice()}"
        _write(dump, "txt", text)
        document = {"schema": SCHEMA, "verdict": None, "error": found.what}
        _write(dump, "json", json.dumps(document, indent=1) + "\n")
    return found


def _write(dump: Path, kind: str, text: str) -> None:
    write_beside(dump, report_name(dump, kind), text)


def _audited(dump: Path, options: dict[str, Any]) -> Outcome:
    """Audit a dump, and write the report."""
    image = image_of(open_program(ImageSource(core=str(dump), **options)))
    report = audit(image)
    typed = Typed("memcg-inspect", ("-c", str(dump)))
    screen, whole = plain_output(_COLUMNS), plain_output(None)
    first_screen(report, screen, typed)
    report_lines(report, whole)
    text = f"{screen.text}\n{whole.text}" if report.findings else screen.text
    # The text is the least, and what tells most.
    _write(dump, "txt", text if report.verdict != "incomplete" else f"{text}\n{advice()}")
    failed = ""
    try:
        _write(dump, "json", to_json(report_document(report, False)))
        _write(dump, "html", report_page(report, screen.text))
    except MemcgInspectError as error:
        failed = f"not all files of the report could be written: {error}"
    causes = [diagnosis.what for diagnosis in report.diagnoses]
    what = causes[0] if causes else report.findings[0].what if report.findings else ""
    told = [what or " ".join(report.notes), failed]
    return Outcome(str(dump), report.verdict, len(report.findings), "; ".join(filter(None, told)))


def main() -> int:
    """Audit the dump of the arguments; return the exit status."""
    dump, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    try:
        found = _audited(dump, options)
    except MemcgInspectError as error:
        found = Outcome(str(dump), None, 0, str(error))
    print(json.dumps(found._asdict()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
