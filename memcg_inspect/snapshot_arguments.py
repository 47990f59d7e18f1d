# SPDX-License-Identifier: LGPL-2.1-or-later
"""The arguments of the commands that make and compare snapshots."""

from __future__ import annotations

import argparse

from memcg_inspect.arguments import CommonOptions, Parser, number_between, period

__all__ = ("fill",)

#: The most snapshots that watch keeps, and compares.
_MOST_KEPT = 1000


def fill(name: str, parser: Parser, common: CommonOptions) -> None:
    """
    Add the arguments of a command to its parser.

    :param name: of the command
    """
    if name == "diff":
        _add_diff(parser)
        common.types(parser)
        return
    common.image(parser)
    if name == "snapshot":
        _add_snapshot(parser)
    else:
        _add_watch(parser)


def _add_snapshot(parser: Parser) -> None:
    parser.description = (
        "Writes a small file with what each memcg is charged for, by node, kind, slab cache and "
        "line of code, and with the counters of memcgs. memcg-inspect diff compares such files. "
        "Exit status: 0 done, 2 the command could not be run, 3 something could not be read, and "
        "the file says so, 130 interrupted, 70 a bug in this program."
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the file; one that exists is replaced (default: HOST-TIME.memcg, in this directory)",
    )
    parser.set_defaults(run=_snapshot, opens=True)


def _add_diff(parser: Parser) -> None:
    from memcg_inspect.snapshots.diff import DIFF
    from memcg_inspect.subcommands import add_view

    add_view(parser, DIFF)
    parser.set_defaults(run=_diff)


def _add_watch(parser: Parser) -> None:
    from memcg_inspect.snapshots.diff import WATCH
    from memcg_inspect.subcommands import add_view

    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="keep the snapshots in this directory (default: a temporary one, which is removed)",
    )
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=period,
        default=60,
        help="time from one snapshot to the next (default: 60)",
    )
    parser.add_argument(
        "--count",
        metavar="N",
        type=number_between(2, _MOST_KEPT),
        help="end after this many snapshots (default: only Ctrl-C ends it)",
    )
    parser.add_argument(
        "--keep",
        metavar="N",
        type=number_between(4, _MOST_KEPT),
        default=60,
        help="keep this many; of more, every other one is removed, so that those that are left "
        "cover all of the time (default: 60)",
    )
    add_view(parser, WATCH)
    parser.set_defaults(run=_watch, opens=True)


def _snapshot(args: argparse.Namespace) -> int:
    from memcg_inspect.snapshot_commands import snapshot

    return snapshot(args)


def _diff(args: argparse.Namespace) -> int:
    from memcg_inspect.snapshot_commands import diff

    return diff(args)


def _watch(args: argparse.Namespace) -> int:
    from memcg_inspect.snapshot_commands import watch

    return watch(args)
