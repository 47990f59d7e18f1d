# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Run commands on a damaged image: ``python tests/fuzz/run.py IMAGE [--seed N] [--runs N]``.

Each run damages a few bytes of the image, chosen by its seed, and runs one command in a process of
its own. A run is bad if

- the command ends in a traceback (exit status 70), or is killed by a signal;
- it makes more than :data:`~fuzz.damage.MOST_READS` reads, needs more memory than :data:`MEMORY`,
  or more than :data:`SECONDS` seconds of a CPU;
- ``audit`` says ``exact`` although a page that it tried to read was missing.

``--headers`` damages the headers of copies instead: see :mod:`fuzz.headers`.

It prints a line of JSON for each run. Its seed repeats the run while the readers are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import drgn
from fuzz import headers
from fuzz.damage import MOST_READS, Chooser, HangError, Memory, Trace

from memcg_inspect.image.image import Image
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.model import MemcgInspectError
from memcg_inspect.report import Report
from memcg_inspect.subcommands import add_subcommands, answer, check_arguments, show

#: Bytes of memory that a command may need more than the undamaged one.
MEMORY = 1 << 30
#: Seconds of CPU time of a run.
SECONDS = 100

AUDIT = ("audit", "--json")
VIEWS: tuple[tuple[str, ...], ...] = (
    ("dying", "--json"),
    ("percpu", "--each", "--json"),
    ("rss", "--json"),
    ("slabinfo", "--by-node", "--json"),
    ("stat", "/", "--all", "--json"),
    ("stock", "--json"),
    ("tasks", "--json"),
)


def opened(core: Path) -> drgn.Program:
    return open_program(ImageSource(core=str(core), debuginfo="btf"))


def run(image: Image, arguments: Sequence[str]) -> str:
    """Run a command as the program does; return the verdict, or how it ended."""
    parser = argparse.ArgumentParser()
    add_subcommands(parser)
    args = parser.parse_args(list(arguments))
    check_arguments(args)
    with contextlib.redirect_stdout(io.StringIO()):
        result = answer(image, args)
        show(result, args)
        args.json = False
        show(result, args)
    if isinstance(result, Report):
        return result.verdict
    return "whole" if result.is_whole else "incomplete"


class Fuzz:
    """Damaged runs of the commands on one image."""

    def __init__(self, core: Path) -> None:
        self.core = core
        self.under = opened(core)
        traced, self.types = opened(core), set[str]()
        traced.register_type_finder("names", self._name, enable_index=0)
        trace = Trace(traced, self.under)
        self.choosers = {}
        for arguments in (AUDIT, *VIEWS):
            trace.begin()
            run(Image(traced), arguments)
            self.choosers[arguments] = Chooser(trace.lines, self.under)
        self.prog = opened(core)
        self.memory = Memory(self.prog, core)
        for name in sorted(self.types):
            with contextlib.suppress(LookupError):
                self.prog.type(name)
        self.memory.most = MOST_READS

    def _name(
        self, prog: drgn.Program, kinds: Any, name: str, filename: str | None
    ) -> drgn.Type | None:
        prefixes = {drgn.TypeKind.STRUCT: "struct ", drgn.TypeKind.UNION: "union "}
        for kind in kinds:
            if kind in prefixes:
                self.types.add(prefixes[kind] + name)
        return None

    def run(self, seed: int) -> dict[str, Any]:
        """Damage the image by a seed, and run one command."""
        arguments = AUDIT if seed % 2 else VIEWS[seed // 2 % len(VIEWS)]
        changes = self.choosers[arguments].changes(seed)
        result = self._forked(changes, arguments)
        return {
            "seed": seed,
            "command": arguments[0],
            **result,
            "damage": [
                f"{c.kind} {c.read.line} {c.address:#x} ({c.read.address:#x}+{c.read.size}) "
                f"{'' if c.data is None else c.data[:16].hex()}"
                for c in changes
            ],
        }

    def _forked(self, changes: Sequence[Any], arguments: Sequence[str]) -> dict[str, Any]:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            result = self._limited(changes, arguments)
            os.write(theirs, json.dumps(result).encode())
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return {"outcome": f"killed by {name}", "bad": True, "reads": 0}
        found: dict[str, Any] = json.loads(said)
        return found

    def _limited(self, changes: Sequence[Any], arguments: Sequence[str]) -> dict[str, Any]:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 2)
        self.memory.apply(changes)
        bad, lines = False, ""
        try:
            outcome = run(Image(self.prog), arguments)
            if outcome == "exact" and self.memory.faults:
                bad = True
        except MemcgInspectError as error:
            outcome, lines = f"refused: {error}", traceback.format_exc(limit=-6)
        except HangError as error:
            outcome, bad = f"hangs in {error}", True
            lines = traceback.format_exc(limit=-12)
        except Exception as error:
            outcome, bad = f"{type(error).__name__}: {error}", True
            lines = traceback.format_exc(limit=-8)
        return {
            "outcome": outcome[:300],
            "bad": bad,
            "reads": self.memory.reads,
            "lines": lines[-3000:],
        }


def runs(core: Path, seeds: range) -> Iterator[dict[str, Any]]:
    """Run all seeds on an image."""
    fuzz = Fuzz(core)
    for seed in seeds:
        yield fuzz.run(seed)


def main() -> int:
    parser = argparse.ArgumentParser(description="run commands on a damaged image")
    parser.add_argument("image", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--headers", metavar="FOLDER", type=Path, help="where to make copies")
    args = parser.parse_args()
    outcomes: Counter[str] = Counter()
    bad, seeds = 0, range(args.seed, args.seed + args.runs)
    memory = args.headers is None
    for found in (
        runs(args.image, seeds) if memory else headers.runs(args.image, args.headers, seeds)
    ):
        print(json.dumps(found), flush=True)
        bad += found["bad"]
        outcomes["bad" if found["bad"] else found["outcome"].partition(":")[0]] += 1
    print(dict(outcomes), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
