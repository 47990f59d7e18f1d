# SPDX-License-Identifier: LGPL-2.1-or-later
"""How far the counters of memcgs are from what they would be if everything were folded."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator

from drgn import FaultError, Object

from memcg_inspect.checks.counters import Counters
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol_flush import FlushRule
from memcg_inspect.linux.mm.memcontrol_stat import StatLine, stat_lines
from memcg_inspect.linux.mm.memcontrol_vmstats import ByCpu, StatReader, event_slots
from memcg_inspect.model import Memcg, Stat
from memcg_inspect.tables import Answer, Column, NotRead, Table, Value, matches
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import Argument, View

__all__ = ("VIEW", "drift")

COLUMNS = (
    Column("memcg", "memcg", "whose counter it is; those below it are included"),
    Column("memcg_address", "address", "struct mem_cgroup *", shown=False),
    Column("item", "text", "name in memory.stat"),
    Column("unit", "text", "bytes, or events: a count"),
    Column("folded", "count", "what readers see who do not flush before"),
    Column("exact", "count", "what they would see after a flush"),
    Column("error", "count", "folded less exact"),
    Column("bound", "count", "how large the error can be where no flush is due"),
    Column("due", "flag", "whether the kernel flushes before it shows memory.stat"),
    Column("handed_up", "count", "folded for children, and not for this memcg yet"),
    Column("cpu", "number", "CPU that holds most of what is not folded; none if none does"),
    Column("cpu_holds", "count", "how much that one holds"),
    Column("cpus", "text", "the same of up to eight CPUs, as CPU:amount", shown=False),
)
_MOST_CPUS = 8


def drift(image: Image, show_all: bool = False, memcg: str | None = None) -> Answer:
    """
    Return the errors of the counters of memcgs.

    :param show_all: counters without an error, too
    :param memcg: a path, a pattern of the shell for paths, or an address; ``None`` for all
    """
    info, payers = image_info(image), Payers(image)
    view = _Drift(image, payers)
    rows: list[tuple[Value, ...]] = []
    same = 0
    lines = [line for line in stat_lines(image) if line.in_stat and len(line.items) == 1]
    for one in payers.memcgs.values():
        if memcg is not None and not matches(memcg, one.path, one.address):
            continue
        for row in view.rows(one, lines):
            if show_all or row[_ERROR] != 0:
                rows.append(row)
            else:
                same += 1
    notes = (f"{same} counters are exact; --all shows them.",) if same else ()
    table = Table("drift", "counters that are not folded", COLUMNS, rows, empty="all are folded")
    return Answer("drift", info, (table,), dict(payers.coverage), notes)


_ERROR = next(i for i, column in enumerate(COLUMNS) if column.name == "error")


class _Drift:
    """The counters of all memcgs, and what CPUs hold of each, and of those below it."""

    def __init__(self, image: Image, payers: Payers) -> None:
        self._image = image
        self._rule = FlushRule(image)
        items = {item for line in stat_lines(image) for item in line.items}
        reader = StatReader(image, items, event_slots(image))
        stats: dict[int, dict[str, Stat]] = {}
        self._held: dict[int, Counter[tuple[str, int]]] = {}
        self._handed_up: dict[int, Counter[str]] = {}
        coverage = payers.coverage["counters"]
        for memcg in reversed(list(payers.memcgs.values())):  # children first
            by_cpu: ByCpu = {}
            held = self._held.setdefault(memcg.address, Counter())
            handed_up = self._handed_up.setdefault(memcg.address, Counter())
            try:
                pointer = Object(image.prog, "struct mem_cgroup *", memcg.address)
                found = reader.memcg(pointer, by_cpu)
                stats[memcg.address] = found
                coverage.read += 1
            except FaultError as error:
                coverage.miss("counters of a memcg", error.address, str(error))
                continue  # what is above it is not known either
            for cpu, amounts in by_cpu.items():
                for item, amount in amounts.items():
                    held[item, cpu] += amount
            for item, stat in found.items():
                if stat.pending:
                    handed_up[item] += stat.pending
            if memcg.parent is not None:
                self._held.setdefault(memcg.parent, Counter()).update(held)
                self._handed_up.setdefault(memcg.parent, Counter()).update(handed_up)
        self._counters = Counters(payers.memcgs, stats, {})

    def rows(self, memcg: Memcg, lines: list[StatLine]) -> Iterator[tuple[Value, ...]]:
        """One row for each line of ``memory.stat``."""
        due = self._rule.is_due(Object(self._image.prog, "struct mem_cgroup *", memcg.address))
        held = self._largest(memcg.address)
        for line in lines:
            (item,) = line.items
            where = (memcg.path, memcg.address, line.name, line.unit)
            claim = self._counters.hierarchical(memcg.address, item)
            if claim is None:
                lost = NotRead("its counter, or that of a memcg below it, is not in the image")
                yield (*where, *[lost] * 3, self._rule.bound(item) * line.scale, _flag(due),
                       lost, lost, lost, lost)  # fmt: skip
                continue
            parts = [(cpu, amount * line.scale) for cpu, amount in held.get(item, ())]
            cpu, amount = parts[0] if parts else (None, None)
            yield (
                *where, claim.folded * line.scale, sum(claim) * line.scale,
                -claim.pending * line.scale, self._rule.bound(item) * line.scale, _flag(due),
                self._handed_up[memcg.address][item] * line.scale,
                cpu, amount, ",".join(f"{c}:{n}" for c, n in parts[:_MOST_CPUS]) or None,
            )  # fmt: skip

    def _largest(self, memcg: int) -> dict[str, list[tuple[int, int]]]:
        """By item, the CPUs and what they hold, the largest amount first."""
        found: dict[str, list[tuple[int, int]]] = {}
        for (item, cpu), amount in self._held[memcg].items():
            if amount:
                found.setdefault(item, []).append((cpu, amount))
        for parts in found.values():
            parts.sort(key=lambda part: (-abs(part[1]), part[0]))
        return found


def _flag(due: bool | None) -> Value:
    return NotRead("the number of changes is not in the image") if due is None else due


def _run(image: Image, args: Namespace) -> Answer:
    return drift(image, args.all, args.memcg)


VIEW = View(
    name="drift",
    help="how far counters of memcgs are from what a flush would make of them",
    description="Lists the counters of memory.stat that are not folded: what readers see without "
    "a flush, the exact value, the error and its bound, and the CPU that holds most of it.",
    run=_run,
    arguments=(Argument(("--all",), {"action": "store_true", "help": "show exact counters, too"}),),
    choices=("memcg", "sort", "fields"),
)
