# SPDX-License-Identifier: LGPL-2.1-or-later
"""What many dumps have in common: verdicts by kernel, and causes by kernel and host."""

from __future__ import annotations

import os
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, NamedTuple

from memcg_inspect.fleet.results import latest, results_in
from memcg_inspect.model_fleet import DumpCause, DumpResult
from memcg_inspect.tables import Answer, Field, Table, Value, columns_of
from memcg_inspect.views.view import Argument, View, by_argument, named

__all__ = ("SUMMARY", "CauseRow", "FailedRow", "KernelRow", "summary", "summary_of")

_UNEXPLAINED = "(unexplained)"


@dataclass(frozen=True)
class KernelRow:
    """Dumps of one kernel, by verdict."""

    release: Annotated[str, Field("text", "release of the kernel", priority=9)]
    hosts: Annotated[int, Field("count", "number of machines", priority=4)]
    dumps: Annotated[int, Field("count", "number of dumps", total=True, priority=8)]
    exact: Annotated[int, Field("count", "dumps without a finding", total=True)]
    findings: Annotated[int, Field("count", "dumps with findings", total=True, priority=8)]
    incomplete: Annotated[
        int, Field("count", "dumps without a finding that could not be read whole", total=True)
    ]
    unread: Annotated[int, Field("count", "dumps that could not be read at all", total=True)]


@dataclass(frozen=True)
class CauseRow:
    """Findings with one cause."""

    release: Annotated[Value, Field("text", "release of the kernel", priority=6)]
    host: Annotated[Value, Field("text", "name of the machine", priority=6)]
    cause: Annotated[
        Value, Field("text", "cause that the audit names; (unexplained): it names none", priority=9)
    ]
    memcg: Annotated[Value, Field("memcg", "first memcg that the cause is about", priority=7)]
    node: Annotated[Value, Field("node", "node that the cause is about", priority=5)]
    hosts: Annotated[int, Field("count", "number of machines that have it", priority=6)]
    dumps: Annotated[int, Field("count", "number of dumps that have it", priority=8)]
    findings: Annotated[int, Field("count", "findings that it explains", total=True, priority=8)]
    first: Annotated[str, Field("text", "a dump that has it", priority=3)]


@dataclass(frozen=True)
class FailedRow:
    """A dump that could not be read."""

    dump: Annotated[str, Field("text", "path of the dump", priority=8)]
    error: Annotated[str, Field("text", "why it could not be read", priority=9)]


class _Found(NamedTuple):
    """A cause in one dump."""

    result: DumpResult
    cause: str
    memcg: str | None
    node: int | None
    findings: int


#: What causes can be summed up by.
_DIMENSIONS: Mapping[str, Callable[[_Found], Value]] = {
    "release": lambda found: found.result.release,
    "host": lambda found: found.result.host,
    "cause": lambda found: found.cause,
    "memcg": lambda found: found.memcg,
    "node": lambda found: found.node,
}
_BY = ("release", "host", "cause")


def summary(results: Iterable[DumpResult], by: Sequence[str] = _BY) -> Answer:
    """
    Sum up the results of many dumps, one for each.

    :param by: what to sum causes up by: ``release``, ``host``, ``cause``, ``memcg``, ``node``
    """
    last = list(results)
    causes = [found for result in last for found in _causes(result)]
    return Answer(
        "summary",
        None,
        (
            Table(
                "kernels",
                f"{len(last):,} dumps by kernel",
                columns_of(KernelRow),
                _kernels(last),
                empty="no dumps",
            ),
            Table(
                "causes",
                f"findings by {named(by)}",
                columns_of(CauseRow, omit=[name for name in _DIMENSIONS if name not in by]),
                _summed(causes, by),
                empty="no findings",
                is_ranked=True,
            ),
            Table(
                "not_read",
                "dumps that could not be read",
                columns_of(FailedRow),
                [FailedRow(r.dump, r.error) for r in last if r.error is not None],
                empty="all dumps could be read",
            ),
        ),
        unanswered=any(result.error is not None for result in last),
    )


def _causes(result: DumpResult) -> Iterator[_Found]:
    for cause in result.causes:
        yield _Found(result, cause.cause, _first_memcg(cause), cause.node, cause.findings)
    if result.unexplained:
        yield _Found(result, _UNEXPLAINED, None, None, result.unexplained)


def _first_memcg(cause: DumpCause) -> str | None:
    return cause.memcg_paths[0] if cause.memcg_paths else None


def _kernels(results: Iterable[DumpResult]) -> list[KernelRow]:
    hosts: defaultdict[str, set[str]] = defaultdict(set)
    ended: defaultdict[str, Counter[str | None]] = defaultdict(Counter)
    for result in results:
        ended[result.release][result.verdict] += 1
        if result.host:
            hosts[result.release].add(result.host)
    return [
        KernelRow(
            release=release or "(not known)",
            hosts=len(hosts[release]),
            dumps=verdicts.total(),
            exact=verdicts["exact"],
            findings=verdicts["findings"],
            incomplete=verdicts["incomplete"],
            unread=verdicts[None],
        )
        for release, verdicts in sorted(ended.items())
    ]


def _summed(causes: Iterable[_Found], by: Sequence[str]) -> list[CauseRow]:
    groups: defaultdict[tuple[Value, ...], list[_Found]] = defaultdict(list)
    for found in causes:
        groups[tuple(_DIMENSIONS[name](found) for name in by)].append(found)
    rows = [
        CauseRow(
            **{**dict.fromkeys(_DIMENSIONS), **dict(zip(by, key, strict=True))},
            hosts=len({found.result.host for found in group}),
            dumps=len({found.result.dump for found in group}),
            findings=sum(found.findings for found in group),
            first=group[0].result.dump,
        )
        for key, group in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.dumps, -row.findings))


def summary_of(args: Namespace) -> Answer:
    """
    Sum up the files that the arguments name.

    :raises MemcgInspectError: if one cannot be read
    """
    # Dumps of several machines may have the same path.
    names = {os.path.realpath(name): name for name in args.results}.values()
    files = (latest(results_in(name)).values() for name in names)
    return summary(chain.from_iterable(files), args.by or _BY)


SUMMARY = View(
    name="summary",
    description="Reads files that memcg-inspect fleet made, and sums them up. If a dump has "
    "more than one line in a file, the last one counts.",
    run=lambda image, args: summary_of(args),
    records=(KernelRow, CauseRow, FailedRow),
    arguments=(
        Argument(("results",), {"nargs": "+", "metavar": "FILE", "help": "what fleet printed"}),
        by_argument(_DIMENSIONS),
    ),
    choices=("sort", "fields", "top"),
    incomplete="one of the dumps could not be read",
    compares=False,
)
