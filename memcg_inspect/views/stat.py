# SPDX-License-Identifier: LGPL-2.1-or-later
"""memory.stat and memory.numa_stat of a memcg as they would read after a flush."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterator

from memcg_inspect.checks.counters import Counters, CounterValue
from memcg_inspect.collect.counters import read_counters
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol import has_node_objcgs, on_default_hierarchy
from memcg_inspect.linux.mm.memcontrol_stat import StatLine, stat_lines
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader, event_slots
from memcg_inspect.model import Memcg
from memcg_inspect.tables import Answer, Column, NotRead, Table, Value
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import Argument, View

__all__ = ("VIEW", "stat")

COLUMNS = (
    Column("memcg", "memcg", "whose counters these are", shown=False),
    Column("memcg_address", "address", "struct mem_cgroup *", shown=False),
    Column("item", "text", "name in memory.stat"),
    Column("node", "node", "node, as in memory.numa_stat; none for the memcg as a whole"),
    Column("unit", "text", "bytes, or events: a count"),
    Column("folded", "count", "what readers see who do not flush before"),
    Column("pending", "count", "not folded yet, of the memcg and of all below it"),
    Column("exact", "count", "the sum of both: what the file reads after a flush"),
)


def stat(image: Image, memcg: str, show_all: bool = False) -> Answer:
    """
    Return the counters of a memcg, those below it included.

    :param memcg: its path or its address
    :param show_all: items that are 0 everywhere, too
    :raises UsageError: if there is no such memcg
    """
    info, payers = image_info(image), Payers(image)
    chosen, notes = _choose(payers, memcg)
    counters = _read(image, payers, chosen)
    rows: list[tuple[Value, ...]] = []
    hidden = 0
    for line in stat_lines(image):
        found = list(_rows(line, chosen, counters, info.nodes))
        if show_all or any(value for row in found for value in row[-3:]):
            rows += found
        else:
            hidden += 1
    if chosen.state == "dying":
        notes.append(_removed(image, payers, chosen))
    if hidden:
        notes.append(f"{hidden} items that are 0 everywhere are left out; --all shows them.")
    if not on_default_hierarchy(image):
        notes.append("This is cgroup v1: names and items are those that v2 would show.")
    table = Table("stat", f"memory.stat of {chosen.path}", COLUMNS, rows)
    return Answer("stat", info, (table,), dict(payers.coverage), tuple(notes))


def _removed(image: Image, payers: Payers, memcg: Memcg) -> str:
    """What the kernel still keeps of the counters of a removed memcg."""
    payer = payers.memcgs[memcg.payer].path if memcg.payer in payers.memcgs else "its parent"
    # Since 7.2 user pages hold an obj_cgroup, and go to the parent with it.
    kept = "" if has_node_objcgs(image) else "; user pages, page cache and sockets still count here"
    what = "what" if has_node_objcgs(image) else "kernel memory"
    return (
        f"This memcg was removed, and these counters are not kept up: {what} it was charged for "
        f"counts for {payer} since, whether what was booked here was moved there or stayed{kept}. "
        "dying shows what is left."
    )


def _choose(payers: Payers, wanted: str) -> tuple[Memcg, list[str]]:
    """Of memcgs of one path, the one that is not removed."""
    found = sorted(payers.find(wanted), key=lambda memcg: memcg.state != "online")
    rest = ", ".join(f"{memcg.address:#x}" for memcg in found[1:])
    return found[0], [f"Other memcgs of this path, which were removed: {rest}."] if rest else []


def _read(image: Image, payers: Payers, chosen: Memcg) -> Counters:
    """Read the counters of a memcg and of all below it; no others are needed."""
    reader = StatReader(
        image, {item for line in stat_lines(image) for item in line.items}, event_slots(image)
    )
    coverage = payers.coverage["counters"]
    return read_counters(image, reader, payers.memcgs, coverage, _subtree(payers, chosen))


def _subtree(payers: Payers, top: Memcg) -> Collection[int]:
    found = {top.address}
    for memcg in payers.memcgs.values():  # parents first
        if memcg.parent in found:
            found.add(memcg.address)
    return found


def _rows(
    line: StatLine, memcg: Memcg, counters: Counters, nodes: tuple[int, ...]
) -> Iterator[tuple[Value, ...]]:
    for nid in (*((None,) if line.in_stat else ()), *(nodes if line.by_node else ())):
        claim = _claim(line, memcg, counters, nid)
        values: tuple[Value, ...]
        if claim is None:
            values = (NotRead("its counter, or that of a memcg below it, is not in the image"),) * 3
        else:
            values = (claim.folded, claim.pending, sum(claim))
        yield (memcg.path, memcg.address, line.name, nid, line.unit, *values)


def _claim(
    line: StatLine, memcg: Memcg, counters: Counters, nid: int | None
) -> CounterValue | None:
    folded = pending = 0
    for item in line.items:
        claim = counters.hierarchical(memcg.address, item, nid)
        if claim is None:
            return None
        folded += claim.folded * line.scale
        pending += claim.pending * line.scale
    return CounterValue(folded, pending)


def _run(image: Image, args: Namespace) -> Answer:
    return stat(image, args.memcg_path, args.all)


VIEW = View(
    name="stat",
    help="memory.stat and memory.numa_stat of a memcg as they would read after a flush",
    description="Shows every item of memory.stat, for the memcg and for each node: what is "
    "folded, what is pending, and the exact sum. The memcg's descendants are included.",
    run=_run,
    arguments=(
        Argument(("memcg_path",), {"metavar": "MEMCG", "help": "a path, or an address"}),
        Argument(("--all",), {"action": "store_true", "help": "show items that are all 0, too"}),
    ),
    choices=("node", "sort", "fields"),
)
