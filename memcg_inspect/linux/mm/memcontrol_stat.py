# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Lines of memory.stat
--------------------

Mirrors ``memory_stats[]``, ``memcg_stat_format()`` and ``memory_numa_stat_show()`` of
:linux:`mm/memcontrol.c`.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from drgn import FaultError

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import constant
from memcg_inspect.image.strings import c_string, text
from memcg_inspect.linux.mm.memcontrol_vmstats import event_slots, item_names
from memcg_inspect.linux.mm.mmzone import mem_map

__all__ = ("StatLine", "accounts_hugetlb", "stat_lines")

#: Items that ``memcg_page_state_output_unit()`` shows as they are counted, without converting
#: them to bytes.
_UNCONVERTED = re.compile(r"(WORKINGSET|PGDEMOTE|PGPROMOTE|PGSTEAL|PGSCAN)_|PGREFILL$")
#: Events whose name in ``vmstat_text[]`` is not the enumerator in lower case.
_EVENT_NAMES = {"NUMA_PAGE_MIGRATE": "numa_pages_migrated"}
#: Events that are shown on cgroup v1 only.
_V1_EVENTS = frozenset({"PGPGIN", "PGPGOUT"})


class StatLine(NamedTuple):
    """
    One line of ``memory.stat``.

    :ivar name: first word of the line
    :ivar items: enumerators of the items whose sum the line shows
    :ivar unit: unit of the value
    :ivar scale: factor from the unit of the items to ``unit``
    :ivar by_node: whether the line is in ``memory.numa_stat``
    :ivar in_stat: whether the line is in ``memory.stat``
    """

    name: str
    items: tuple[str, ...]
    unit: Literal["bytes", "events"]
    scale: int
    by_node: bool
    in_stat: bool = True


@per_image
def stat_lines(image: Image) -> tuple[StatLine, ...]:
    """
    Return the lines of ``memory.stat`` and ``memory.numa_stat`` on cgroup v2, in their order.

    :raises drgn.FaultError: if the kernel's tables cannot be read
    """
    names = item_names(image)
    node_items = constant(image, "NR_VM_NODE_STAT_ITEMS") or 0
    lines: list[StatLine] = []
    table = image.object("memory_stats")
    for entry in table.read_():
        number = int(entry.idx)
        item = names.get(number)
        if item is None:
            raise FaultError(f"memory_stats has an unknown item {number}", table.address_ or 0)
        unit, scale = _unit(item, mem_map(image).page_size)
        name = text(c_string(entry.name))
        # memory.numa_stat shows NR_HUGETLB in any case.
        in_stat = item != "NR_HUGETLB" or accounts_hugetlb(image)
        lines.append(StatLine(name, (item,), unit, scale, number < node_items, in_stat))
        if item == "NR_SLAB_UNRECLAIMABLE_B":
            slab = ("NR_SLAB_RECLAIMABLE_B", item)
            lines.append(StatLine("slab", slab, unit, scale, False))
    events = event_slots(image)
    known = {*names.values(), *events}
    for event in ("PGSCAN", "PGSTEAL"):
        # PGSCAN_ANON and PGSCAN_FILE are left out: they count the same pages again.
        reclaimers = ("KSWAPD", "DIRECT", "PROACTIVE", "KHUGEPAGED")
        items = tuple(item for by in reclaimers if (item := f"{event}_{by}") in known)
        lines.append(StatLine(event.lower(), items, "events", 1, False))
    for event in events:
        if event not in _V1_EVENTS:
            name = _EVENT_NAMES.get(event, event.lower())
            lines.append(StatLine(name, (event,), "events", 1, False))
    return tuple(lines)


def accounts_hugetlb(image: Image) -> bool:
    """Return whether huge pages of hugetlb are charged to memcgs, or may be."""
    # memcg_accounts_hugetlb(). Before commit 8cba9576df60 (in v6.7) there was neither the mount
    # option memory_hugetlb_accounting nor the item.
    flag = constant(image, "CGRP_ROOT_MEMORY_HUGETLB_ACCOUNTING")
    return flag is None or bool(image.object("cgrp_dfl_root").flags & flag)


def _unit(item: str, page_size: int) -> tuple[Literal["bytes", "events"], int]:
    if _UNCONVERTED.match(item):
        return "events", 1
    if item.endswith("_B"):
        return "bytes", 1
    return "bytes", 1024 if item.endswith("_KB") else page_size
