# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Open images whose types and symbols are damaged, and run the program on them.

The memory that is damaged is what opening an image reads: the tables of kallsyms and the BTF. A run
is bad if it ends in a traceback or by a signal, or needs too much time or memory. What the program
finds with a type that is not that of the kernel is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import drgn
from fuzz.attempt import AUDIT, VIEWS, in_child, opened, run
from fuzz.damage import Chooser, Memory, Read, Trace

from memcg_inspect.btf import load_btf
from memcg_inspect.image.elf import unmap_low_addresses
from memcg_inspect.image.image import Image
from memcg_inspect.image.missing import as_image_errors

#: Commands that are run in turn.
COMMANDS = (AUDIT, *(view for view in VIEWS if view[0] in ("stock", "tasks")))
#: Where reads belong that opening an image makes.
_READERS = "btf/"


def _without_types(core: Path) -> drgn.Program:
    prog = drgn.Program()
    prog.set_core_dump(core)
    unmap_low_addresses(prog, str(core))
    return prog


def _reads(core: Path, under: drgn.Program) -> dict[str, list[Read]]:
    """Return what opening an image and looking up types and symbols reads, by line."""
    prog = _without_types(core)
    trace = Trace(prog, under)
    load_btf(prog)
    run(Image(prog), COMMANDS[-1])
    return {line: some for line, some in trace.lines.items() if line.startswith(_READERS)}


def runs(core: Path, seeds: range) -> Iterator[dict[str, Any]]:
    """Run all seeds on an image."""
    under = opened(core)
    chooser = Chooser(_reads(core, under), under)
    for seed in seeds:
        changes, arguments = chooser.changes(seed), COMMANDS[seed % len(COMMANDS)]
        prog = _without_types(core)
        Memory(prog, under).apply(changes)
        result = in_child(partial(_attempt, prog, arguments))
        yield {"seed": seed, "command": arguments[0], **result, "damage": list(map(str, changes))}


def _attempt(prog: drgn.Program, arguments: Sequence[str]) -> str:
    with as_image_errors():
        load_btf(prog)
        return run(Image(prog), arguments)
