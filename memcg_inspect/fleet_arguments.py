# SPDX-License-Identifier: LGPL-2.1-or-later
"""The arguments of the commands for many dumps."""

from __future__ import annotations

import argparse

from memcg_inspect.arguments import CommonOptions, Parser, number_of_jobs
from memcg_inspect.subcommands import add_view

__all__ = ("fill",)


def fill(name: str, parser: Parser, common: CommonOptions) -> None:
    """
    Add the arguments of a command to its parser.

    :param name: of the command
    """
    if name == "summary":
        _add_summary(parser)
        return
    _add_fleet(parser)
    common.types(parser)


def _add_fleet(fleet: Parser) -> None:
    fleet.description = (
        "Audits dumps, several at a time, each in a process of its own. Prints one "
        "line of JSON for each when it is done; one that cannot be read has a line that says why. "
        "Exit status: 0 all exact, 1 at least one has findings, 3 none has, but one could not be "
        "read, or not all of it; 2 the command could not be run, 130 interrupted, 70 a bug in this "
        "program."
    )
    fleet.add_argument(
        "dumps", nargs="+", metavar="DUMP", help="a vmcore; -: read paths from standard input, one "
        "in each line"
    )  # fmt: skip
    fleet.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="add the lines to this file. Dumps that have a line in it are not audited again, "
        "unless they have changed",
    )
    fleet.add_argument(
        "--retry",
        action="store_true",
        help="with -o: audit those again that could not be read",
    )
    where = fleet.add_mutually_exclusive_group()
    where.add_argument(
        "--jobs",
        metavar="N",
        type=number_of_jobs,
        default=argparse.SUPPRESS,
        help="number of dumps that are audited at a time (default: that of the cores)",
    )
    where.add_argument(
        "--dask",
        metavar="ADDRESS",
        default=argparse.SUPPRESS,
        help="let the workers of this dask scheduler, such as tcp://HOST:8786, audit the dumps; "
        "each must be able to read them at the same paths",
    )
    fleet.set_defaults(run=_fleet)


def _add_summary(parser: Parser) -> None:
    from memcg_inspect.fleet.summary import SUMMARY

    add_view(parser, SUMMARY)
    parser.set_defaults(run=_summary)


def _fleet(args: argparse.Namespace) -> int:
    from memcg_inspect.fleet_commands import fleet

    return fleet(args)


def _summary(args: argparse.Namespace) -> int:
    from memcg_inspect.fleet_commands import summary

    return summary(args)
