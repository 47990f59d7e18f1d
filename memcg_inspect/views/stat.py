# SPDX-License-Identifier: LGPL-2.1-or-later
"""The contents of memory.stat and memory.numa_stat of a memcg after a flush."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from memcg_inspect.checks.counters import Counters, CounterValue
from memcg_inspect.checks.found import FoundAmounts
from memcg_inspect.collect import collect
from memcg_inspect.collect.counters import read_counters
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol import has_node_objcgs, on_default_hierarchy
from memcg_inspect.linux.mm.memcontrol_stat import StatLine, stat_lines
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader, event_slots, reparented_items
from memcg_inspect.model import Memcg
from memcg_inspect.tables import Answer, Field, MemcgAddress, NotRead, Table, Value, columns_of
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import ONE_MEMCG, Argument, View, named

__all__ = ("VIEW", "StatRow", "stat")


@dataclass(frozen=True)
class StatRow:
    """
    One line of ``memory.stat`` or ``memory.numa_stat``.

    With ``--subtree`` it includes the memcgs below, as the kernel's files do.
    """

    memcg: Annotated[str, Field("memcg", "memcg of the counters", shown=False)]
    memcg_address: MemcgAddress
    item: Annotated[str, Field("text", "name in memory.stat")]
    node: Annotated[
        int | None,
        Field("node", "node, as in memory.numa_stat; none for the whole memcg", priority=9),
    ]
    unit: Annotated[str, Field("text", "bytes, or events: a count", priority=8)]
    folded: Annotated[
        Value, Field("count", "what is folded; with --subtree, the value of the file")
    ]
    pending: Annotated[
        Value,
        Field("count", "changes not folded yet; with --subtree, those of the memcgs below, too"),
    ]
    exact: Annotated[
        Value,
        Field(
            "count",
            "sum of both; with --subtree, the value of the file after a flush",
            priority=9,
        ),
    ]
    found: Annotated[
        Value,
        Field(
            "count",
            "what the audit finds in memory for this counter; none if no identity compares it",
            priority=9,
        ),
    ] = None


def stat(
    image: Image, memcg: str, show_all: bool = False, subtree: bool = True, walk: bool = True
) -> Answer:
    """
    Return the counters of a memcg.

    :param memcg: a path, a shell pattern that one path matches, or an address
    :param show_all: whether to include items that are 0 everywhere
    :param subtree: whether to include the memcgs below it, as the kernel's files do. Those of a
        removed memcg are included in any case.
    :param walk: whether to walk all memory, for what is found there
    :raises UsageError: if there is no such memcg
    """
    info, payers = image_info(image), Payers(image)
    chosen, notes = _choose(payers, memcg)
    whole = subtree or chosen.state == "dying"
    counters = _read(image, payers, chosen)
    # No counter of a removed memcg is compared: what is left of it is charged to another.
    truth = _truth(image, payers) if walk and chosen.state != "dying" else None
    rows: list[StatRow] = []
    hidden = 0
    for line in stat_lines(image):
        found = list(_rows(line, chosen, counters, info.nodes, whole))
        if truth is not None:
            of_memcg = truth.subtree if whole else truth.own
            found = [
                replace(row, found=_truth_of(line, of_memcg, chosen.address, row.node))
                for row in found
            ]
        if show_all or any(row.folded or row.pending or row.exact or row.found for row in found):
            rows += found
        else:
            hidden += 1
    if chosen.state == "dying":
        notes.append(_removed(image, payers, chosen))
    if hidden:
        notes.append(f"{hidden} items that are 0 everywhere are left out; --all shows them.")
    if not on_default_hierarchy(image):
        notes.append("This is cgroup v1: names and items are those of cgroup v2.")
    has_children = any(memcg.parent == chosen.address for memcg in payers.memcgs.values())
    title = f"memory.stat of {chosen.path}"
    if has_children:
        title += " and the memcgs below it" if whole else " itself, without the memcgs below it"
    if has_children and not whole:
        notes.append("The kernel's file includes the memcgs below; --subtree does so, too.")
    table = Table("stat", title, columns_of(StatRow), rows)
    return Answer("stat", info, (table,), dict(payers.coverage), tuple(notes))


def _truth(image: Image, payers: Payers) -> FoundAmounts:
    """Return what is found in all memory."""
    snapshot = collect(image, call_sites=False)
    for subject in ("pages", "slab", "user_pages"):
        if subject in snapshot.coverage:
            payers.coverage[subject].add(snapshot.coverage[subject])
    return FoundAmounts(snapshot)


def _truth_of(
    line: StatLine,
    of_memcg: Callable[[int, str, int | None], int | NotRead | None],
    memcg: int,
    nid: int | None,
) -> int | NotRead | None:
    """Return what was found for a line; ``None`` if some of its counters is not compared."""
    total = 0
    for item in line.items:
        found = of_memcg(memcg, item, nid)
        if not isinstance(found, int):
            return found
        total += found * line.scale
    return total


def _removed(image: Image, payers: Payers, memcg: Memcg) -> str:
    """Return a note on which counters of a removed memcg the kernel still updates."""
    payer = payers.memcgs[memcg.payer].path if memcg.payer in payers.memcgs else "its parent"
    # Since 7.1 user pages hold an obj_cgroup, which is reparented with its memcg. Since 7.3, on
    # cgroup v1 since 7.1, mod_memcg_state() counts for the nearest memcg that was not removed.
    still = [] if has_node_objcgs(image) else ["user pages", "page cache"]
    if not reparented_items(image).of_memcgs and on_default_hierarchy(image):
        still.append("sockets")
    what = f"Only {named(still)} still count here" if still else "Nothing counts here any more"
    return (
        f"This memcg was removed. {what}: {payer} pays for the rest of what it was charged for. "
        "The command dying shows what is left of it."
    )


def _choose(payers: Payers, wanted: str) -> tuple[Memcg, list[str]]:
    """Return the memcg of a path that is not removed, and a note about the removed ones."""
    found = sorted(payers.find(wanted), key=lambda memcg: memcg.state != "online")
    rest = ", ".join(f"{memcg.address:#x}" for memcg in found[1:])
    return found[0], [f"Removed memcgs with the same path: {rest}."] if rest else []


def _read(image: Image, payers: Payers, chosen: Memcg) -> Counters:
    """Read the counters of a memcg and its descendants only."""
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
    line: StatLine, memcg: Memcg, counters: Counters, nodes: tuple[int, ...], whole: bool
) -> Iterator[StatRow]:
    for nid in (*((None,) if line.in_stat else ()), *(nodes if line.by_node else ())):
        claim = _claim(line, memcg, counters, nid, whole)
        folded: Value = NotRead("its counter, or that of a memcg below it, is not in the image")
        pending = exact = folded
        if claim is not None:
            folded, pending, exact = claim.folded, claim.pending, sum(claim)
        yield StatRow(
            memcg=memcg.path,
            memcg_address=memcg.address,
            item=line.name,
            node=nid,
            unit=line.unit,
            folded=folded,
            pending=pending,
            exact=exact,
        )


def _claim(
    line: StatLine, memcg: Memcg, counters: Counters, nid: int | None, whole: bool
) -> CounterValue | None:
    total = counters.hierarchical_sum if whole else counters.own_sum
    claim = total(memcg.address, line.items, nid)
    if claim is None:
        return None
    return CounterValue(claim.folded * line.scale, claim.pending * line.scale)


def _run(image: Image, args: Namespace) -> Answer:
    return stat(image, args.memcg_path, args.all, args.subtree)


VIEW = View(
    name="stat",
    description="Shows every item of memory.stat, for the memcg and for each node: what is "
    "folded, what is pending, the exact sum, and what is found in memory. Without --subtree, these "
    "are the parts of the memcg itself, as in slabinfo and percpu. The kernel's files include the "
    "memcgs below.",
    run=_run,
    records=(StatRow,),
    arguments=(
        Argument(("memcg_path",), {"metavar": "MEMCG", "help": ONE_MEMCG}),
        Argument(
            ("--subtree",),
            {"action": "store_true", "help": "include the memcgs below it, as the kernel does"},
        ),
        Argument(
            ("--all",), {"action": "store_true", "help": "show items that are 0 everywhere, too"}
        ),
    ),
    choices=("node", "sort", "fields"),
)
