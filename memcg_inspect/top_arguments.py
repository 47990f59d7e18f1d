# SPDX-License-Identifier: LGPL-2.1-or-later
"""The arguments of ``top``."""

from __future__ import annotations

import argparse

from memcg_inspect.arguments import CommonOptions, Parser, number_between, period

__all__ = ("fill",)

_MOST = 1_000_000


def fill(name: str, parser: Parser, common: CommonOptions) -> None:
    """
    Add the arguments of a command to its parser.

    :param name: of the command
    """
    common.image(parser)
    parser.description = (
        "Shows what the memcgs of a running machine use, by node, and how fast that grows. Amounts "
        "are those of memory.stat after a flush. Press h for the keys. Exit status: 0 done, 2 the "
        "command could not be run, 3 something could not be read, 130 interrupted, 70 a bug in "
        "this program."
    )
    parser.add_argument(
        "-d",
        "--every",
        metavar="SECONDS",
        type=period,
        default=5,
        help="time from one read to the next (default: 5); the pause between two is at least nine "
        "times as long as the CPU time of a read",
    )
    parser.add_argument(
        "--item",
        default="slab",
        help="the item to begin with: a line of memory.stat in bytes, or current (default: slab)",
    )
    parser.add_argument(
        "--sort",
        metavar="COLUMN[:asc|desc]",
        default="total",
        help='column to sort by: name, total, rate, or a node, such as "node 1" (default: total)',
    )
    parser.add_argument(
        "--filter", metavar="TEXT", default="", help="show only memcgs whose path has this text"
    )
    parser.add_argument(
        "-b",
        "--batch",
        action="store_true",
        help="print one page after the other, with all lines, and read no keys",
    )
    parser.add_argument(
        "-n",
        "--count",
        metavar="N",
        type=number_between(1, _MOST),
        help="end after N reads (default: without end)",
    )
    parser.set_defaults(run=_run, opens=True)


def _run(args: argparse.Namespace) -> int:
    from memcg_inspect.top_commands import top

    return top(args)
