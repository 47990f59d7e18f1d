# SPDX-License-Identifier: LGPL-2.1-or-later
"""The command ``crash``: reports on dumps of kdump, and what makes them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from memcg_inspect.crash.config import Check, checks
from memcg_inspect.crash.dumps import CRASHES, arriving, dumps_below
from memcg_inspect.crash.one import Outcome, report_on
from memcg_inspect.crash.reports import ReportFiles
from memcg_inspect.crash.told import MOTD, sentence, tell_journal, write_motd
from memcg_inspect.crash.units import STARTED, install
from memcg_inspect.escape import printable
from memcg_inspect.fleet_commands import image_options
from memcg_inspect.model import MemcgInspectError
from memcg_inspect.output import output, say
from memcg_inspect.running import signals_unwind

__all__ = ("crash",)

_FINDINGS, _INCOMPLETE = 1, 3
#: The most dumps of other users that are named.
_MOST_OTHERS = 10


def crash(args: Namespace) -> int:
    """Run ``crash``; return its exit status."""
    actions = {"report": _report, "install": _install, "config": _config}
    return actions[args.action](args)


def _report(args: Namespace) -> int:
    with signals_unwind():  # so that the audit that runs ends, too
        return _Run(args).all()


class _Run:
    """
    Reports on dumps, as they come.

    :ivar outcomes: of all dumps so far
    :ivar failed: whether something could not be done
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self.outcomes: list[Outcome] = []
        self.failed = False

    def all(self) -> int:
        """Report on what the arguments say; return the exit status."""
        for dump in self._dumps():
            try:
                outcome = report_on(dump, image_options(self._args), self._args.again)
            except MemcgInspectError as error:
                self._miss(printable(str(error)))
                continue
            if outcome is not None:  # else another process has it
                self._tell(outcome)
        if any(outcome.verdict == "findings" for outcome in self.outcomes):
            return _FINDINGS
        whole = all(o.verdict == "exact" and o.report for o in self.outcomes)
        return 0 if whole and not self.failed else _INCOMPLETE

    def _miss(self, why: str) -> None:
        say(f"memcg-inspect: {why}")
        self.failed = True

    def _tell(self, outcome: Outcome) -> None:
        """Tell whoever wants to know, at once: the next dump may take hours."""
        self.outcomes.append(outcome)
        is_told = tell_journal(outcome)
        # What a service prints is in the journal, too.
        if not (is_told and "JOURNAL_STREAM" in os.environ and not os.isatty(1)):
            try:
                _print(printable(sentence(outcome)))
            except MemcgInspectError as error:
                self._miss(str(error))
        if os.path.isdir(os.path.dirname(MOTD)) and os.geteuid() == 0:
            with suppress(MemcgInspectError):
                write_motd([outcome])

    def _dumps(self) -> Iterator[Path]:
        """
        Return the dumps that are meant.

        :raises MemcgInspectError: if there is no such file or directory
        """
        for name in self._args.dumps or [CRASHES]:
            path = os.path.realpath(name)
            try:
                if os.path.isdir(path):
                    self._leave_out(dumps_below(path).others)
                    yield from arriving(path, self._args.settle, self._is_wanted)
                elif not stat.S_ISREG(os.stat(path).st_mode):
                    raise MemcgInspectError(f"{name} is neither a file nor a directory")
                elif self._is_wanted(Path(path)):
                    yield Path(path)
            except OSError as error:
                raise MemcgInspectError(f"{name}: {error.strerror}") from None

    def _is_wanted(self, dump: Path) -> bool:
        return self._args.again or ReportFiles(dump).state() != "done"

    def _leave_out(self, dumps: Sequence[Path]) -> None:
        for dump in dumps[:_MOST_OTHERS]:
            self._miss(f"{printable(str(dump))} is left out: others can change it")
        if len(dumps) > _MOST_OTHERS:
            self._miss(f"{len(dumps) - _MOST_OTHERS:,} more are left out")


def _install(args: Namespace) -> int:
    made = install(args.root, os.path.abspath(sys.executable))
    for path in made:
        _print(f"wrote {printable(str(path))}")
    if args.root == "/" and os.path.isdir("/run/systemd/system"):
        for words in (["daemon-reload"], ["start", *STARTED]):
            done = subprocess.run(
                ["systemctl", *words], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise MemcgInspectError(f"systemctl {words[0]}: {done.stderr.strip()}")
    return 0


def _config(args: Namespace) -> int:
    found = list(checks(args.root))
    for check in found:
        _print(check.fix if args.fix else _line(check), is_wanted=not args.fix or bool(check.fix))
    values = {check.is_good for check in found}
    if False in values:
        status, verdict = _FINDINGS, "A crash would not leave what an audit needs."
    elif None in values:
        status, verdict = _INCOMPLETE, "It cannot be told whether a crash leaves what is needed."
    else:
        status, verdict = 0, "A crash leaves what an audit needs."
    _print(verdict, is_wanted=not args.fix)
    return status


def _line(check: Check) -> str:
    sign = {True: "good", False: "BAD", None: "?"}[check.is_good]
    fix = f"\n{'':24}{check.fix}" if check.fix else ""
    return f"{sign:6}{check.name:18}{check.found}{fix}"


def _print(line: str, is_wanted: bool = True) -> None:
    if is_wanted:
        output(lambda: print(line, flush=True))
