# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Run commands on a damaged image: ``python tests/fuzz/run.py IMAGE [--seed N] [--runs N]``.

Each run damages a few bytes of the image, chosen by its seed, and runs one command in a process of
its own (:mod:`fuzz.attempt`).

``--headers`` damages the headers of copies instead: see :mod:`fuzz.headers`. ``--opening`` damages
types and symbols: see :mod:`fuzz.opening`.

It prints a line of JSON for each run. Its seed repeats the run while the readers are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drgn
from fuzz import headers, opening
from fuzz.attempt import AUDIT, VIEWS, ExactError, in_child, opened, run
from fuzz.damage import Chooser, Memory, Trace

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.sched import find_tasks
from memcg_inspect.linux.mm.memcontrol import root_memcg
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.model import MemcgInspectError

#: Caches whose objects ``who`` tells the use of.
_CACHES = ("task_struct", "dentry", "filp", "zswap_entry", "UNIX", "mem_cgroup", "kmalloc-cg-64")


def addresses(image: Image) -> Iterator[int]:
    """Return the addresses of one thing of each kind."""
    tasks = find_tasks(image, lambda error: None)
    yield tasks[0].stack.value_()
    memcg = root_memcg(image)
    yield memcg.value_()
    yield memcg.vmstats_percpu.value_()
    frames, slabs = mem_map(image), SlabReader(image)
    found: dict[str, int] = {}
    for piece in scan_pages(image):
        for slab in filter(None, map(slabs.slab, piece.slabs)):
            if slab.objects:
                found.setdefault(slab.cache.name, slabs.address(slab, slab.objects // 2))
        for page in piece.kmem:
            found.setdefault(f"kmem {page.type}", page.page)
            found.setdefault(f"memory of kmem {page.type}", frames.virt(page.page))
    for name, address in found.items():
        if name in _CACHES or "kmem " in name:
            yield address


class Fuzz:
    """Damaged runs of the commands on one image."""

    def __init__(self, core: Path) -> None:
        self.core = core
        self.under = opened(core)
        traced, self.types = opened(core), set[str]()
        traced.register_type_finder("names", self._name, enable_index=0)
        trace = Trace(traced, self.under)
        self.choosers = {}
        things = [f"{address:#x}" for address in addresses(Image(self.under))]
        for arguments in (AUDIT, *VIEWS):
            if arguments[0] == "who":
                arguments = (*arguments, *things)
            trace.begin()
            try:
                run(Image(traced), arguments)
            except MemcgInspectError:
                continue
            self.choosers[arguments] = Chooser(trace.lines, self.under)
        self.views = [arguments for arguments in self.choosers if arguments != AUDIT]
        self.prog = opened(core)
        self.memory = Memory(self.prog, self.under)
        for name in sorted(self.types):
            with contextlib.suppress(LookupError):
                self.prog.type(name)
        gc.freeze()  # what each run inherits need not be looked at again in each

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
        arguments = AUDIT if seed % 2 else self.views[seed // 2 % len(self.views)]
        changes = self.choosers[arguments].changes(seed)

        def attempt() -> str:
            self.memory.apply(changes)
            outcome = run(Image(self.prog), arguments)
            if outcome == "exact" and self.memory.faults:
                raise ExactError(f"{self.memory.faults} reads failed")
            return outcome

        result = in_child(attempt)
        command = " ".join(arguments[:2])
        return {"seed": seed, "command": command, **result, "damage": list(map(str, changes))}


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
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--headers", metavar="FOLDER", type=Path, help="where to make copies")
    where.add_argument("--opening", action="store_true", help="damage types and symbols")
    args = parser.parse_args()
    outcomes: Counter[str] = Counter()
    bad, seeds = 0, range(args.seed, args.seed + args.runs)
    if args.headers is not None:
        every = headers.runs(args.image, args.headers, seeds)
    else:
        every = (opening.runs if args.opening else runs)(args.image, seeds)
    for found in every:
        print(json.dumps(found), flush=True)
        bad += found["bad"]
        outcomes["bad" if found["bad"] else found["outcome"].partition(":")[0]] += 1
    print(dict(outcomes), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
