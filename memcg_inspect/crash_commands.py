# SPDX-License-Identifier: LGPL-2.1-or-later
"""The command ``crash``: reports on dumps of kdump, and what makes them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from memcg_inspect.crash.config import Check, checks
from memcg_inspect.crash.dumps import CRASHES, dumps_below, report_name
from memcg_inspect.crash.one import Outcome, report_on
from memcg_inspect.crash.told import MOTD, sentence, tell_journal, write_motd
from memcg_inspect.crash.units import install
from memcg_inspect.escape import printable
from memcg_inspect.fleet_commands import image_options
from memcg_inspect.model import MemcgInspectError
from memcg_inspect.output import output, say
from memcg_inspect.running import signals_unwind

__all__ = ("crash",)

_FINDINGS, _INCOMPLETE = 1, 3


def crash(args: Namespace) -> int:
    """Run ``crash``; return its exit status."""
    actions = {"report": _report, "install": _install, "config": _config}
    return actions[args.action](args)


def _report(args: Namespace) -> int:
    with signals_unwind():  # so that the audit that runs ends, too
        return _report_on(_dumps(args.dumps or [CRASHES], args.settle), args)


def _report_on(dumps: Sequence[Path], args: Namespace) -> int:
    outcomes, failed = list[Outcome](), False
    for dump in dumps:
        if not args.again and os.path.lexists(dump.parent / report_name(dump, "txt")):
            continue
        try:
            outcome = report_on(dump, image_options(args))
        except MemcgInspectError as error:
            say(f"memcg-inspect: {printable(str(error))}")
            failed = True
            continue
        outcomes.append(outcome)
        tell_journal(outcome)
        _print(printable(sentence(outcome)))
    if outcomes and os.path.isdir(os.path.dirname(MOTD)) and os.geteuid() == 0:
        with suppress(MemcgInspectError):
            write_motd(outcomes)
    if any(outcome.verdict == "findings" for outcome in outcomes):
        return _FINDINGS
    return _INCOMPLETE if failed or any(o.verdict != "exact" for o in outcomes) else 0


def _dumps(names: Sequence[str], settle: int) -> list[Path]:
    """
    Return the dumps that are meant.

    :param settle: wait until none of them has changed for this many seconds
    :raises MemcgInspectError: if there is no such file or directory
    """
    dumps = list[Path]()
    for name in map(os.path.abspath, names):
        try:
            if not os.path.isdir(name):
                os.stat(name)
                dumps.append(Path(name))
                continue
            found = dumps_below(name)
            while (age := time.time() - found.newest) < settle:
                time.sleep(min(settle - max(age, 0), settle))
                found = dumps_below(name)
        except OSError as error:
            raise MemcgInspectError(f"{name}: {error.strerror}") from None
        for other in found.others:
            say(f"memcg-inspect: {printable(str(other))} is left out: others can change it")
        dumps += found.dumps
    return dumps


def _install(args: Namespace) -> int:
    made = install(args.root, os.path.abspath(sys.executable))
    for path in made:
        _print(f"wrote {printable(str(path))}")
    if args.root == "/" and os.path.isdir("/run/systemd/system"):
        for words in (["daemon-reload"], ["start", "memcg-inspect-crash.path"]):
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
