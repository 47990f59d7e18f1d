# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Lines of memory.stat
--------------------

Mirrors ``memory_stats[]``, ``memcg_vm_event_stat[]`` and ``memcg_stat_format()`` of
:linux:`mm/memcontrol.c`. The tables are taken from the image, so that names and items are
always those of the kernel that is looked at.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from drgn import Program

from memcg_inspect.linux.layout import array_length, constant, member_type, per_program
from memcg_inspect.linux.mmzone import mem_map

__all__ = ("StatLine", "event_slots", "stat_lines")

#: ``memcg_page_state_output_unit()``: counted in pages, or one by one, and shown as they are.
_COUNTED = re.compile(r"(WORKINGSET|PGDEMOTE|PGPROMOTE|PGSTEAL|PGSCAN)_|PGREFILL$")
#: What ``vmstat_text[]`` calls otherwise than the enumerator.
_EVENT_NAMES = {"NUMA_PAGE_MIGRATE": "numa_pages_migrated"}
#: Kept for cgroup v1 only.
_V1_EVENTS = frozenset({"PGPGIN", "PGPGOUT"})


class StatLine(NamedTuple):
    """
    One line of ``memory.stat``.

    :ivar items: enumerators of the items that it is the sum of
    :ivar scale: what an item is multiplied with to be in ``unit``
    :ivar by_node: whether ``memory.numa_stat`` has it
    :ivar in_stat: whether ``memory.stat`` has it
    """

    name: str
    items: tuple[str, ...]
    unit: Literal["bytes", "events"]
    scale: int
    by_node: bool
    in_stat: bool = True


@per_program
def stat_lines(prog: Program) -> tuple[StatLine, ...]:
    """
    Return the lines of ``memory.stat`` and ``memory.numa_stat`` on cgroup v2, in their order.

    :raises drgn.FaultError: if the kernel's tables are not in the image
    """
    names = _item_names(prog)
    node_items = constant(prog, "NR_VM_NODE_STAT_ITEMS") or 0
    lines: list[StatLine] = []
    for entry in prog["memory_stats"].read_():
        number = int(entry.idx)
        item = names[number]
        unit, scale = _unit(item, mem_map(prog).page_size)
        name = entry.name.string_().decode(errors="backslashreplace")
        in_stat = item != "NR_HUGETLB" or _accounts_hugetlb(prog)
        lines.append(StatLine(name, (item,), unit, scale, number < node_items, in_stat))
        if item == "NR_SLAB_UNRECLAIMABLE_B":
            slab = ("NR_SLAB_RECLAIMABLE_B", item)
            lines.append(StatLine("slab", slab, unit, scale, False))
    events = event_slots(prog)
    known = {*names.values(), *events}
    for what in ("PGSCAN", "PGSTEAL"):
        # Those by the kind of page are the same pages told apart otherwise.
        ways = (f"{what}_{way}" for way in ("KSWAPD", "DIRECT", "PROACTIVE", "KHUGEPAGED"))
        items = tuple(item for item in ways if item in known)
        lines.append(StatLine(what.lower(), items, "events", 1, False))
    for event in events:
        if event not in _V1_EVENTS:
            name = _EVENT_NAMES.get(event, event.lower())
            lines.append(StatLine(name, (event,), "events", 1, False))
    return tuple(lines)


# cgroup2 is mounted with memory_hugetlb_accounting, or has no such option (until 6.7, commit
# 8cba9576df60): then there is no such item either. memory.numa_stat does not ask.
def _accounts_hugetlb(prog: Program) -> bool:
    flag = constant(prog, "CGRP_ROOT_MEMORY_HUGETLB_ACCOUNTING")
    return flag is None or bool(prog["cgrp_dfl_root"].flags & flag)


def _item_names(prog: Program) -> dict[int, str]:
    names: dict[int, str] = {}
    # Items of memcgs are numbered after those of nodes, beginning with the number of the latter.
    for enum in ("enum node_stat_item", "enum memcg_stat_item"):
        names |= {e.value: e.name for e in prog.type(enum).enumerators or ()}
    return names


def _unit(item: str, page_size: int) -> tuple[Literal["bytes", "events"], int]:
    if _COUNTED.match(item):
        return "events", 1
    if item.endswith("_B"):
        return "bytes", 1
    return "bytes", 1024 if item.endswith("_KB") else page_size


@per_program
def event_slots(prog: Program) -> dict[str, int]:
    """
    Return the events that the kernel counts for memcgs, enumerators of
    ``enum vm_event_item``, and their slots in the arrays of events.

    :raises drgn.FaultError: if the kernel's table is not in the image
    """
    names = {e.value: e.name for e in prog.type("enum vm_event_item").enumerators or ()}
    table = prog["memcg_vm_event_stat"].read_()
    length = array_length(member_type(prog.type("struct memcg_vmstats"), "events"))
    return {names[int(table[slot])]: slot for slot in range(length)}
