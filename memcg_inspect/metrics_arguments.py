# SPDX-License-Identifier: LGPL-2.1-or-later
"""The arguments of ``metrics``."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from memcg_inspect.arguments import CommonOptions, Parser, number_between, period

__all__ = ("Address", "fill")

_MOST = 1_000_000


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not colon or not name or "[" in name or "]" in name or not is_port:
        raise argparse.ArgumentTypeError(f"{text!r} is no ADDRESS:PORT")
    return Address(name, int(port))


def fill(name: str, parser: Parser, common: CommonOptions) -> None:
    """
    Add the arguments of a command to its parser.

    :param name: of the command
    """
    common.image(parser)
    _add(parser)


def _add(parser: Parser) -> None:
    parser.description = (
        "Audits, and prints figures for Prometheus: what memcgs are charged for by node and kind, "
        "charges on other nodes than those that pay, changes that memory.stat does not show yet, "
        "removed memcgs, the verdict and the number of findings. The format is that of the "
        "textfile collector of the node exporter. Exit status: 0 done, 2 the command could not be "
        "run, 3 something could not be read, 130 interrupted, 70 a bug in this program."
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--out",
        metavar="FILE",
        help="write to this file, which is replaced as a whole: a name that ends with .prom, in "
        "the directory of the textfile collector",
    )
    where.add_argument(
        "--listen",
        metavar="ADDRESS:PORT",
        type=_address,
        help="serve http://ADDRESS:PORT/metrics until Ctrl-C, such as 127.0.0.1:9917, also in "
        "the format of OpenMetrics; audits are made one after the other meanwhile",
    )
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=period,
        default=60,
        help="with --listen: time from one audit to the next (default: 60); the pause between two "
        "is at least nine times as long as the CPU time of an audit",
    )
    parser.add_argument(
        "--depth",
        metavar="N",
        type=number_between(0, _MOST),
        help="memcgs deeper than this count for the one above them at this depth; 1: those below "
        "the root (default: no limit)",
    )
    parser.add_argument(
        "--top",
        metavar="N",
        type=number_between(1, _MOST),
        default=200,
        help="only the N memcgs that are charged for most have figures of their own; the others "
        "are added up as memcg=other (default: 200)",
    )
    parser.add_argument(
        "--pages",
        action="store_true",
        help="read all pages, too, for kernel memory by node that memcgs pay for, and that they do "
        "not",
    )
    parser.set_defaults(run=_run, opens=True)


def _run(args: argparse.Namespace) -> int:
    from memcg_inspect.metrics_commands import metrics

    return metrics(args)
