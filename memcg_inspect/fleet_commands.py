# SPDX-License-Identifier: LGPL-2.1-or-later
"""The commands for many dumps: ``fleet`` and ``summary``. Neither takes an image with ``-c``."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any

from memcg_inspect.arguments import number_of_jobs
from memcg_inspect.fleet.results import ResultFile, line_of, result_file
from memcg_inspect.fleet.summary import SUMMARY, summary_of
from memcg_inspect.model import counted
from memcg_inspect.model_fleet import DumpResult
from memcg_inspect.render.typed import Typed
from memcg_inspect.subcommands import add_view, check_arguments, chosen, exit_status, show
from memcg_inspect.tables import UsageError

__all__ = ("FLEET_COMMANDS", "add_fleet")

_HELP = "audit many dumps; one line of JSON each"
#: The commands, and one line of help.
FLEET_COMMANDS = {"fleet": _HELP, SUMMARY.name: SUMMARY.help}


def add_fleet(commands: Any, add_types: Callable[[argparse.ArgumentParser], None]) -> None:
    """
    Add the commands to a parser.

    :param commands: what ``ArgumentParser.add_subparsers()`` returned
    :param add_types: adds the options that say where types are
    """
    fleet = commands.add_parser(
        "fleet",
        help=_HELP,
        description="Audits dumps, several at a time, each in a process of its own. Prints one "
        "line of JSON for each when it is done; one that cannot be read has a line that says why. "
        "Exit status: 0 all exact, 1 at least one has findings, 3 none has, but one could not be "
        "read, or not all of it; 2 the command could not be run, 130 interrupted, 70 a bug in this "
        "program.",
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
    add_types(fleet)
    fleet.set_defaults(run=_fleet)
    add_view(commands, SUMMARY)
    commands.choices[SUMMARY.name].set_defaults(run=_summary)


def _summary(args: argparse.Namespace) -> int:
    check_arguments(args)
    found = chosen(summary_of(args), args)
    show(found, args, Typed("memcg-inspect"))
    return exit_status(found)


def _fleet(args: argparse.Namespace) -> int:
    # Most commands need none of these modules.
    from memcg_inspect.fleet.run import fleet_status

    if args.retry and args.output is None:
        raise UsageError("fleet: --retry needs -o")
    with nullcontext() if args.output is None else result_file(args.output) as file:
        results, audited = _audit_all(args, file)
    if file is not None:
        print(_summed_up(results, audited))
    return fleet_status(results)


def _audit_all(
    args: argparse.Namespace, file: ResultFile | None
) -> tuple[Sequence[DumpResult], int]:
    """Return the results of all dumps that were named, and how many were audited now."""
    from memcg_inspect.fleet.run import left_to_do, run_fleet
    from memcg_inspect.image.processes import available_cores
    from memcg_inspect.render.progress import progress_bar

    wanted = dict.fromkeys(os.path.abspath(path) for path in _paths(args.dumps))
    paths = left_to_do(wanted, () if file is None else file.done, args.retry)
    results = {} if file is None else {result.dump: result for result in file.done}
    running = run_fleet(paths, _options(args), args.jobs or available_cores(), args.dask)
    with closing(running), progress_bar(lambda: False) as report:
        for number, result in enumerate(running, 1):
            results[result.dump] = result
            if file is None:
                sys.stdout.write(line_of(result))
                sys.stdout.flush()
            else:
                file.add(result)
            report("dumps", number / len(paths))
    return [results[path] for path in wanted], len(paths)


def _paths(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if name == "-":
            yield from filter(None, (line.rstrip("\n") for line in sys.stdin))
        else:
            yield name


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of :class:`~memcg_inspect.image.program.ImageSource` for each dump."""
    return {
        "symbols": [os.path.abspath(path) for path in args.symbols],
        "default_symbols": not args.no_default_symbols,
        "debug_directories": [os.path.abspath(path) for path in args.debug_directory],
        "architecture": args.architecture,
        "vmcoreinfo": None if args.vmcoreinfo is None else os.path.abspath(args.vmcoreinfo),
        "debuginfo": args.debuginfo,
    }


def _summed_up(results: Sequence[DumpResult], audited: int) -> str:
    """
    Return one line about all dumps.

    :param audited: how many of them were audited now
    """
    ended = Counter("not read" if r.error is not None else r.verdict for r in results)
    verdicts = ", ".join(f"{number:,} {verdict}" for verdict, number in sorted(ended.items()))
    line = f"{counted(len(results), 'dumps')}: {verdicts}" if results else "no dumps"
    earlier = len(results) - audited
    return line + (f"; {earlier:,} had been audited before" if earlier else "")
