# SPDX-License-Identifier: LGPL-2.1-or-later
"""The errors of memcg counters: the value that is folded, compared with the exact one."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from drgn import FaultError

from memcg_inspect.checks.counters import Counters
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol_flush import FlushRule
from memcg_inspect.linux.mm.memcontrol_stat import StatLine, stat_lines
from memcg_inspect.linux.mm.memcontrol_vmstats import ByCpu, StatReader, event_slots
from memcg_inspect.model import Memcg, Stat
from memcg_inspect.tables import (
    Answer,
    Choice,
    Field,
    MemcgAddress,
    NotRead,
    Table,
    Value,
    columns_of,
    with_subtrees,
)
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import Argument, View

__all__ = ("VIEW", "DriftRow", "drift")

_MOST_CPUS = 8


@dataclass(frozen=True)
class DriftRow:
    """One counter of ``memory.stat`` of one memcg."""

    memcg: Annotated[str, Field("memcg", "memcg of the counter; descendants are included")]
    memcg_address: MemcgAddress
    item: Annotated[str, Field("text", "name in memory.stat", priority=9)]
    unit: Annotated[str, Field("text", "bytes, or events: a count", priority=7)]
    folded: Annotated[Value, Field("count", "value that a reader sees without a flush", priority=8)]
    exact: Annotated[Value, Field("count", "value after a flush", priority=8)]
    error: Annotated[Value, Field("count", "folded less exact", priority=9)]
    bound: Annotated[Value, Field("count", "largest error for which no flush is due", priority=6)]
    due: Annotated[
        Value, Field("flag", "whether the kernel flushes before it shows memory.stat", priority=6)
    ]
    handed_up: Annotated[
        Value, Field("count", "folded for children, but not for this memcg yet", priority=2)
    ]
    cpu: Annotated[
        Value,
        Field("number", "CPU that holds the largest part of the error; none if no CPU holds any"),
    ]
    cpu_holds: Annotated[Value, Field("count", "amount that this CPU holds", priority=4)]
    cpus: Annotated[
        Value,
        Field("text", "the same for up to eight CPUs, as CPU:amount", shown=False),
    ]


_NO_COUNTER = NotRead("its counter, or that of a memcg below it, is not in the image")
_NO_CHANGES = NotRead("the number of changes is not in the image")


def drift(image: Image, show_all: bool = False, choice: Choice | None = None) -> Answer:
    """
    Return the counters of memcgs that are not exact, and their errors.

    :param show_all: whether to include exact counters
    :param choice: which memcgs to show; ``None`` for all
    """
    info, payers = image_info(image), Payers(image)
    choice = with_subtrees(choice or Choice(), payers.memcgs.values())
    view = _Drift(image, payers)
    rows: list[DriftRow] = []
    same = 0
    lines = [line for line in stat_lines(image) if line.in_stat and len(line.items) == 1]
    for one in payers.memcgs.values():
        if not choice.has(one.path, one.address):
            continue
        for row in view.rows(one, lines):
            if show_all or row.error != 0:
                rows.append(row)
            else:
                same += 1
    notes = (f"{same} counters are exact; --all shows them.",) if same else ()
    table = Table(
        "drift", "counters that are not folded", columns_of(DriftRow), rows, empty="all are folded"
    )
    return Answer("drift", info, (table,), dict(payers.coverage), notes)


class _Drift:
    """The counters of all memcgs, and the part of each that CPUs hold, descendants included."""

    def __init__(self, image: Image, payers: Payers) -> None:
        self._image = image
        self._rule = FlushRule(image)
        items = {item for line in stat_lines(image) for item in line.items}
        reader = StatReader(image, items, event_slots(image))
        stats: dict[int, Mapping[str, Stat]] = {}
        self._held: dict[int, Counter[tuple[str, int]]] = {}
        self._handed_up: dict[int, Counter[str]] = {}
        self._coverage = coverage = payers.coverage["counters"]
        for memcg in reversed(list(payers.memcgs.values())):  # children first
            by_cpu: ByCpu = {}
            held = self._held.setdefault(memcg.address, Counter())
            handed_up = self._handed_up.setdefault(memcg.address, Counter())
            try:
                pointer = image.pointer("struct mem_cgroup *", memcg.address)
                found = reader.memcg(pointer, by_cpu)
                stats[memcg.address] = found
                coverage.read += 1
            except FaultError as error:
                coverage.miss("counters of a memcg", error.address, str(error))
                continue  # so its ancestors are not known either
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

    def _is_due(self, memcg: int) -> bool | None:
        try:
            return self._rule.is_due(self._image.pointer("struct mem_cgroup *", memcg))
        except FaultError as error:
            self._coverage.miss("number of changes to flush", error.address, str(error))
            return None

    def rows(self, memcg: Memcg, lines: list[StatLine]) -> Iterator[DriftRow]:
        """Return one row for each line of ``memory.stat``."""
        due = self._is_due(memcg.address)
        held = self._largest(memcg.address)
        for line in lines:
            (item,) = line.items
            row = partial(
                DriftRow,
                memcg=memcg.path,
                memcg_address=memcg.address,
                item=line.name,
                unit=line.unit,
                bound=self._rule.bound(item) * line.scale,
                due=_NO_CHANGES if due is None else due,
            )
            claim = self._counters.hierarchical(memcg.address, item)
            if claim is None:
                yield row(
                    folded=_NO_COUNTER,
                    exact=_NO_COUNTER,
                    error=_NO_COUNTER,
                    handed_up=_NO_COUNTER,
                    cpu=_NO_COUNTER,
                    cpu_holds=_NO_COUNTER,
                    cpus=_NO_COUNTER,
                )
                continue
            parts = [(cpu, amount * line.scale) for cpu, amount in held.get(item, ())]
            cpu, amount = parts[0] if parts else (None, None)
            yield row(
                folded=claim.folded * line.scale,
                exact=sum(claim) * line.scale,
                error=-claim.pending * line.scale,
                handed_up=self._handed_up[memcg.address][item] * line.scale,
                cpu=cpu,
                cpu_holds=amount,
                cpus=",".join(f"{c}:{n}" for c, n in parts[:_MOST_CPUS]) or None,
            )

    def _largest(self, memcg: int) -> dict[str, list[tuple[int, int]]]:
        """Return for each item the CPUs and what they hold, the largest amount first."""
        found: dict[str, list[tuple[int, int]]] = {}
        for (item, cpu), amount in self._held[memcg].items():
            if amount:
                found.setdefault(item, []).append((cpu, amount))
        for parts in found.values():
            parts.sort(key=lambda part: (-abs(part[1]), part[0]))
        return found


def _run(image: Image, args: Namespace) -> Answer:
    return drift(image, args.all, Choice(args.memcg or (), subtree=args.subtree))


VIEW = View(
    name="drift",
    description="Lists the counters of memory.stat that are not folded: the value that a reader "
    "sees without a flush, the exact value, the error and its bound, and the CPU that holds most "
    "of the difference.",
    run=_run,
    records=(DriftRow,),
    arguments=(Argument(("--all",), {"action": "store_true", "help": "show exact counters, too"}),),
    choices=("memcg", "sort", "fields"),
)
