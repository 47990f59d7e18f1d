# SPDX-License-Identifier: LGPL-2.1-or-later
"""The commands for many dumps: ``fleet`` and ``summary``. Neither takes an image with ``-c``."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any

from memcg_inspect.answers import check_arguments, chosen, exit_status, show
from memcg_inspect.fleet.results import ResultFile, line_of, result_file
from memcg_inspect.fleet.run import fleet_status, left_to_do, run_fleet
from memcg_inspect.fleet.summary import summary_of
from memcg_inspect.image.processes import available_cores
from memcg_inspect.model import counted
from memcg_inspect.model_fleet import DumpResult
from memcg_inspect.output import is_written, output
from memcg_inspect.render.progress import progress_bar
from memcg_inspect.render.typed import Typed
from memcg_inspect.tables import UsageError

__all__ = ("fleet", "image_options", "summary")


def summary(args: Namespace) -> int:
    """Run ``summary``; return its exit status."""
    check_arguments(args)
    found = chosen(summary_of(args), args)
    output(lambda: show(found, args, Typed("memcg-inspect")))
    return exit_status(found)


def fleet(args: Namespace) -> int:
    """Run ``fleet``; return its exit status."""
    if args.retry and args.output is None:
        raise UsageError("fleet: --retry needs -o")
    if args.dask is not None and (args.jobs is not None or args.nice):
        raise UsageError("fleet: --dask cannot be used with --jobs or --nice")
    with nullcontext() if args.output is None else result_file(args.output) as file:
        results, audited, wanted = _audit_all(args, file)
    if file is not None:
        output(lambda: print(_summed_up(results, audited), flush=True))
    # Nobody may have wanted all of them.
    return fleet_status(results) if len(results) == wanted else fleet_status(results) or 3


def _audit_all(args: Namespace, file: ResultFile | None) -> tuple[Sequence[DumpResult], int, int]:
    """Return the results of dumps that were named, how many were audited now, and named."""
    wanted = dict.fromkeys(os.path.abspath(path) for path in _paths(args.dumps))
    results = {} if file is None else file.done
    paths = left_to_do(wanted, results, args.retry)
    jobs = args.jobs or (1 if args.nice else available_cores())
    running = run_fleet(paths, image_options(args), jobs, args.dask)
    with closing(running), progress_bar(lambda: False) as report:
        for number, result in enumerate(running, 1):
            results[result.dump] = result
            if file is not None:
                file.add(result)
            elif not is_written(line_of(result)):
                break
            report("dumps", number / len(paths))
    return [results[path] for path in wanted if path in results], len(paths), len(wanted)


def _paths(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if name == "-":
            if sys.stdin is None:
                raise UsageError("fleet: standard input is closed")
            text = sys.stdin.read()
            yield from filter(None, text.split("\0" if "\0" in text else "\n"))  # find -print0
        else:
            yield name


def image_options(args: Namespace) -> dict[str, Any]:
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
