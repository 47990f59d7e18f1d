# SPDX-License-Identifier: LGPL-2.1-or-later
"""The arguments of ``crash``."""

from __future__ import annotations

import argparse

from memcg_inspect.arguments import CommonOptions, Parser, number_between

__all__ = ("fill",)

_HELP = {
    "report": "audit the dumps that kdump has left, and write a report beside each",
    "install": "have systemd do that after each crash",
    "config": "check whether a crash would leave what an audit needs",
}


def fill(name: str, parser: Parser, common: CommonOptions) -> None:
    """
    Add the arguments of a command to its parser.

    :param name: of the command
    """
    parser.description = (
        "Reports on crash dumps of kdump. Exit status: 0 done, 2 the command could not be run, "
        "130 interrupted, 70 a bug in this program. Of report: 1 at least one dump has "
        "findings, 3 none has, but one could not be read, or not all of it. Of config: 1 a "
        "crash would not leave what an audit needs, 3 it cannot be told."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    report = actions.add_parser("report", help=_HELP["report"], description=_REPORT)
    _add_report(report)
    common.types(report)
    install = actions.add_parser("install", help=_HELP["install"], description=_INSTALL)
    _add_install(install)
    config = actions.add_parser("config", help=_HELP["config"], description=_CONFIG)
    _add_config(config)


_REPORT = (
    "Audits finished dumps that have no report yet, each in a process of its own, and writes "
    "report.txt, report.json and report.html beside each. Tells the journal of systemd, and the "
    "message of the day."
)
_INSTALL = (
    "Writes memcg-inspect-crash.service, .timer and .path to /etc/systemd/system, and enables the "
    "last two: after the boot that follows a crash, systemd runs memcg-inspect crash report, with "
    "idle priority and in a sandbox."
)
_CONFIG = (
    "Looks at this machine's kdump: whether it is set up and loaded, the memory that is reserved, "
    "where dumps are saved, and the level of makedumpfile."
)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dumps",
        nargs="*",
        metavar="DUMP",
        help="a dump, or a directory whose dumps are meant, and those of the directories in it "
        "(default: /var/crash)",
    )
    parser.add_argument("--again", action="store_true", help="also dumps that have a report")
    parser.add_argument(
        "--settle",
        metavar="SECONDS",
        type=number_between(0, 3600),
        default=0,
        help="of directories: wait until a dump has not changed for this long (default: 0)",
    )
    parser.set_defaults(run=_crash)


def _add_install(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root",
        metavar="DIR",
        default="/",
        help="write below this directory, of an image of a system (default: /)",
    )
    parser.set_defaults(run=_crash)


def _add_config(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--check", action="store_true", help="print what was found (what is done without options)"
    )
    which.add_argument(
        "--fix", action="store_true", help="print only what to do, a line for each thing"
    )
    parser.add_argument(
        "--root",
        metavar="DIR",
        default="/",
        help="look at the files below this directory (default: /)",
    )
    parser.set_defaults(run=_crash)


def _crash(args: argparse.Namespace) -> int:
    from memcg_inspect.crash_commands import crash

    return crash(args)
