# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Thousands of commands on damaged images.

:func:`run` makes a batch of runs on one kind of image; scripts/fuzz makes as many as it is told to,
and docs/reliability.md has the result. Results are kept (:mod:`support.kept`), so that runs that
were interrupted go on where they were.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from labkit import images
from support import kept
from support.guests import ROOT, Lab

#: Runs of a batch: a few minutes.
BATCH = 250


class Kind(NamedTuple):
    """
    A kind of image, and what of it is damaged.

    :ivar share: of all runs, in percent
    :ivar part: of the image: ``memory``, ``opening`` (types and symbols) or ``headers``
    :ivar options: of the image
    """

    name: str
    share: int
    kernel: str
    part: str = "memory"
    options: Mapping[str, str] = {}


_ONE: Mapping[str, str] = {"nodes": "1", "workload": "mixed"}
_TWO: Mapping[str, str] = {"nodes": "2", "workload": "idle"}
_PROFILED = {**_ONE, "append": "sysctl.vm.mem_profiling=1"}

#: Those of kernels that the lab builds run with --all only.
KINDS = (
    Kind("memory of 7.3", 35, "7.3", options=_ONE),
    Kind("memory of 6.1", 25, "6.1", options=_ONE),
    Kind("memory of 7.3-lab", 10, "7.3-lab", options=_PROFILED),
    Kind("memory of 7.3-pernode", 5, "7.3-pernode", options=_ONE),
    Kind("types and symbols", 5, "7.3", "opening", _ONE),
    Kind("headers of kdump", 15, "7.3", "headers", {**_TWO, "format": "kdump"}),
    Kind("headers of ELF", 5, "7.3", "headers", {**_TWO, "format": "elf"}),
)


class Result(NamedTuple):
    """
    How one run ended.

    :ivar damage: what was changed: one word, or ``several``
    :ivar outcome: a verdict, ``whole``, ``refused``, or how a bad run ended
    """

    seed: int
    command: str
    damage: str
    outcome: str
    bad: bool


class Batch(NamedTuple):
    """A batch of runs on one kind of image, and the command that repeats it."""

    kind: str
    command: str
    results: list[Result]


#: Verdicts by exit status, where only the status is known.
_OUTCOMES = {"status 1": "findings", "status 2": "refused", "status 3": "incomplete"}


def result_of(found: Mapping[str, Any]) -> Result:
    """Return the result from a line of the fuzzer."""
    command, damage = found["command"], found["damage"]
    outcome = found["outcome"]
    if not found["bad"]:
        outcome = _OUTCOMES.get(outcome.partition(":")[0], outcome.partition(":")[0])
        if outcome == "status 0":
            outcome = "exact" if command.startswith("audit") else "whole"
    words = [words.split()[0] for words in damage]
    told = words[0] if len(words) == 1 else "several" if words else "none"
    return Result(found["seed"], command, told, outcome, found["bad"])


def fuzz(kind: Kind, lab: Lab, first: int, number: int) -> Batch:
    """
    Make runs with consecutive seeds.

    :raises RuntimeError: the fuzzer itself failed
    """
    image = lab.image(kind.kernel, **kind.options)
    with images.scratch() as folder:
        command = [sys.executable, str(ROOT / "tests/fuzz/run.py"), str(image.core)]
        if kind.part == "headers":
            command += ["--headers", str(folder)]
        elif kind.part == "opening":
            command.append("--opening")
        command += ["--seed", str(first), "--runs", str(number)]
        path = f"{ROOT / 'tests'}:{ROOT}"
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    results = [result_of(json.loads(line)) for line in done.stdout.splitlines()]
    if len(results) != number:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return Batch(kind.name, " ".join(command), results)


def batches(runs: int) -> list[tuple[Kind, int]]:
    """Return kinds with numbers of batches, of all kinds in turn, for so many runs."""
    found = [
        (number, kind) for kind in KINDS for number in range(-(-runs * kind.share // (100 * BATCH)))
    ]
    return [(kind, number) for number, kind in sorted(found, key=itemgetter(0))]


def run(kind: Kind, lab: Lab, number: int) -> Batch:
    """Return a batch of this code; make its runs unless they are kept."""
    found = kept.load("fuzz", f"{kind.name}-{number}")
    if found is not None:
        name, command, results = found
        return Batch(name, command, [Result(*result) for result in results])
    # Other seeds for other code; the same if a batch is repeated.
    first = zlib.crc32(f"{kept.code()} {kind.name} {number}".encode())
    batch = fuzz(kind, lab, first, BATCH)
    kept.keep("fuzz", f"{kind.name}-{number}", batch)
    return batch


# What docs/reliability.md says

#: In this order; all others are bad.
OUTCOMES = ("exact", "whole", "findings", "incomplete", "refused")
_DAMAGE = {
    "missing": "page is missing",
    "eio": "page gives EIO",
    "zero": "page of zeroes",
    "ones": "page of ones",
    "flip": "one bit",
    "word": "one word",
    "copy": "copy of another",
    "pointer": "another pointer",
    "several": "two or three of them",
}


def _line(name: str, results: Sequence[Result], width: int) -> str:
    ended = Counter("bad" if result.bad else result.outcome for result in results)
    found = [ended[outcome] for outcome in OUTCOMES]
    bad = len(results) - sum(found)
    return f"{name:{width}}" + "".join(f"{n:>12,}" for n in (len(results), *found, bad))


def _table(head: str, rows: Iterable[tuple[str, Sequence[Result]]]) -> list[str]:
    filled = [(name, results) for name, results in rows if results]
    if not filled:
        return []
    every = [result for _, results in filled for result in results]
    width = max(map(len, [head, *(name for name, _ in filled)]))
    names = ("runs", *OUTCOMES, "bad")
    lines = [f"{head:{width}}" + "".join(f"{name:>12}" for name in names)]
    return lines + [_line(name, results, width) for name, results in (*filled, ("all", every))]


def document(done: Sequence[Batch], commit: str, date: str) -> str:
    """Return the outcomes by kind of image, and those of audits by kind of damage."""
    by_kind = {
        kind.name: [r for batch in done if batch.kind == kind.name for r in batch.results]
        for kind in KINDS
    }
    audits = [
        result
        for kind in KINDS
        if kind.part == "memory"
        for result in by_kind[kind.name]
        if result.command.startswith("audit")
    ]
    total = sum(map(len, by_kind.values()))
    bad = sum(result.bad for results in by_kind.values() for result in results)
    by_damage = (
        (told, [result for result in audits if result.damage == name])
        for name, told in _DAMAGE.items()
    )
    lines = [
        f"commit {commit}, {date}: {total:,} runs, {bad} bad",
        "",
        *_table("all commands, by image", by_kind.items()),
        "",
        *_table("audits, by damage to memory", by_damage),
    ]
    return "\n".join(line.rstrip() for line in lines).rstrip()
