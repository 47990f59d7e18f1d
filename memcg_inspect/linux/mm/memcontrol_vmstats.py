# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters of memcgs
------------------

Mirrors ``struct memcg_vmstats``, ``struct lruvec_stats`` and their per-CPU halves in
:linux:`mm/memcontrol.c`.

A per-CPU ``state`` only grows and is never reset; what was folded of it is in
``state_prev``. A flush adds the difference to the memcg's ``state`` and to its parent's
``state_pending``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from drgn import FaultError, Object, Type, TypeKind, offsetof, sizeof
from drgn.helpers.linux.cpumask import for_each_online_cpu

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import (
    array_length,
    constant,
    has_member,
    member_type,
)
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.mmzone import mem_map, possible_cpus
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.model import Stat

__all__ = (
    "ByCpu",
    "FlushRule",
    "StatBlock",
    "StatLine",
    "StatReader",
    "event_slots",
    "stat_index",
    "stat_lines",
)

#: By CPU and item, what is not folded; zeros are left out.
ByCpu = dict[int, dict[str, int]]


class StatBlock(NamedTuple):
    """
    Where the arrays of one kind of counters are.

    :ivar size: bytes of the aggregated structure
    :ivar percpu_size: bytes of the per-CPU structure
    :ivar length: slots in each array
    """

    size: int
    state: int
    pending: int
    percpu_size: int
    percpu_state: int
    percpu_prev: int
    length: int


@per_image
def stat_index(image: Image) -> dict[int, int] | None:
    """
    Return the slot of each item.

    :return: ``None`` where an item is its own slot (6.9 and older)
    """
    try:
        table = image.object("mem_cgroup_stats_index")
    except UnknownKernelError:
        return None
    values = [int(v) for v in table.read_()]
    if table.type_.type.unaliased().is_signed:
        # 6.10 and 6.11: one more than the slot, 0 for none.
        return {item: slot - 1 for item, slot in enumerate(values) if slot > 0}
    return {item: slot for item, slot in enumerate(values) if slot != 0xFF}


def _block(stats: Type, percpu: Type, array: str = "state") -> StatBlock:
    return StatBlock(
        size=sizeof(stats),
        state=offsetof(stats, array),
        pending=offsetof(stats, f"{array}_pending"),
        percpu_size=sizeof(percpu),
        percpu_state=offsetof(percpu, array),
        percpu_prev=offsetof(percpu, f"{array}_prev"),
        length=array_length(member_type(percpu, array)),
    )


class StatReader:
    """
    Reads counters of memcgs and of their lruvecs.

    :param items: enumerators of ``enum memcg_stat_item`` or ``enum node_stat_item``;
        those that the kernel does not have, or does not keep, are left out
    :param events: enumerators of ``enum vm_event_item``, by their slots
    """

    def __init__(
        self, image: Image, items: Iterable[str], events: Mapping[str, int] | None = None
    ) -> None:
        self.image = image
        self.memory = image.memory
        self.slots: dict[str, int] = {}
        index = stat_index(image)
        for name in items:
            item = constant(image, name)
            slot = item if item is None or index is None else index.get(item)
            if slot is not None:
                self.slots[name] = slot
        self._event_slots = events or {}
        vmstats = image.type("struct memcg_vmstats"), image.type("struct memcg_vmstats_percpu")
        self._memcg = _block(*vmstats)
        self._events = _block(*vmstats, "events") if events else None
        self._lruvec = _block(
            image.type("struct lruvec_stats"), image.type("struct lruvec_stats_percpu")
        )
        # 6.1 embeds the lruvec's in mem_cgroup_per_node, later kernels point to it.
        pointer = member_type(image.type("struct mem_cgroup_per_node"), "lruvec_stats")
        self._embedded = pointer.unaliased_kind() != TypeKind.POINTER
        # Counters that an NMI may change stand apart on some architectures
        # (CONFIG_MEMCG_NMI_SAFETY_REQUIRES_ATOMIC, 6.16).
        self._nmi_memcg = has_member(image, "struct mem_cgroup", "kmem_stat")
        self._nmi_lruvec = has_member(image, "struct mem_cgroup_per_node", "slab_reclaimable")

    def memcg(self, memcg: Object, by_cpu: ByCpu | None = None) -> dict[str, Stat]:
        """
        Read a memcg's counters.

        :param memcg: ``struct mem_cgroup *``
        :param by_cpu: what CPUs have not folded is put into it
        :raises drgn.FaultError: if any part of them cannot be read
        """
        places = memcg.vmstats.value_(), memcg.vmstats_percpu.value_()
        stats = self._read(*places, self._memcg, self.slots, by_cpu)
        if self._events is not None:
            stats |= self._read(*places, self._events, self._event_slots, by_cpu)
        if self._nmi_memcg:
            _add(stats, "MEMCG_KMEM", int(memcg.kmem_stat.counter))
        return stats

    def lruvec(self, pn: Object) -> dict[str, Stat]:
        """
        Read the counters of a memcg on a node.

        :param pn: ``struct mem_cgroup_per_node *``
        :raises drgn.FaultError: if any part of them cannot be read
        """
        aggregated = pn.lruvec_stats
        address = aggregated.address_ if self._embedded else aggregated.value_()
        if address is None:
            raise FaultError("counters of a lruvec have no address", 0)
        percpu = pn.lruvec_stats_percpu.value_()
        stats = self._read(address, percpu, self._lruvec, self.slots)
        if self._nmi_lruvec:
            _add(stats, "NR_SLAB_RECLAIMABLE_B", int(pn.slab_reclaimable.counter))
            _add(stats, "NR_SLAB_UNRECLAIMABLE_B", int(pn.slab_unreclaimable.counter))
        return stats

    def _read(
        self,
        address: int,
        percpu: int,
        block: StatBlock,
        slots: Mapping[str, int],
        by_cpu: ByCpu | None = None,
    ) -> dict[str, Stat]:
        memory = self.memory
        word = memory.word_size
        slots = {name: slot for name, slot in slots.items() if slot < block.length}
        data = memory.read(address, block.size)
        deltas = dict.fromkeys(slots, 0)
        length = block.length * word
        for cpu, offset in percpu_offsets(self.image).items():
            local = memory.read(percpu + offset, block.percpu_size)
            state = local[block.percpu_state : block.percpu_state + length]
            prev = local[block.percpu_prev : block.percpu_prev + length]
            if state == prev:
                continue
            for name, slot in slots.items():
                at = slot * word
                delta = memory.signed_at(state, at) - memory.signed_at(prev, at)
                deltas[name] += delta
                if delta and by_cpu is not None:
                    by_cpu.setdefault(cpu, {})[name] = delta
        return {
            name: Stat(
                state=memory.signed_at(data, block.state + slot * word),
                pending=memory.signed_at(data, block.pending + slot * word),
                percpu=deltas[name],
            )
            for name, slot in slots.items()
        }


def _add(stats: dict[str, Stat], name: str, amount: int) -> None:
    if name in stats:
        stats[name] = stats[name]._replace(percpu=stats[name].percpu + amount)


#: ``MEMCG_CHARGE_BATCH`` (6.1).
_BATCH = 64


class FlushRule:
    """
    What a kernel lets pass before it folds counters for a reader.

    :ivar most_changes: changes that may be there without a reader folding them
    """

    def __init__(self, image: Image) -> None:
        self._image = image
        self._online = sum(1 for _ in for_each_online_cpu(image.prog))
        cpus = len(possible_cpus(image))
        # Commit 8d59d2214c23 ("mm: memcg: make stats flushing threshold per-memcg") (in v6.8).
        self._is_own = has_member(image, "struct memcg_vmstats", "stats_updates")
        if self._is_own:
            # In the memcg's own number, and what CPUs have not added to that.
            self.most_changes = _BATCH * self._online + (_BATCH - 1) * cpus
        else:
            # One number for all memcgs, which counts full batches. What was more than one and
            # less than two went in as one, and a CPU adds when it is over the batch.
            self.most_changes = (2 * _BATCH - 1) * self._online + _BATCH * cpus

    def is_due(self, memcg: Object) -> bool | None:
        """
        Return whether counters are folded before a reader of a memcg sees them.

        :param memcg: ``struct mem_cgroup *``
        :return: ``None`` if that is not in the image
        """
        try:
            if self._is_own:
                changes = int(memcg.vmstats.stats_updates.counter)
                return changes > _BATCH * self._online
            return int(self._image.object("stats_flush_threshold").counter) > self._online
        except (FaultError, UnknownKernelError):
            return None

    def bound(self, item: str) -> int:
        """
        Return how far the counter of an item may be off where no folding is due.

        A change of bytes or KiB counts as so many whole pages, or as one: as half of what it
        is at least. (Up to 6.6 it counted as so many bytes, and the bound was not reached.)

        :param item: an enumerator
        :return: in the unit of the item
        """
        if item.endswith("_B"):
            return self.most_changes * 2 * mem_map(self._image).page_size
        if item.endswith("_KB"):
            return self.most_changes * 2 * mem_map(self._image).page_size // 1024
        return self.most_changes


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


@per_image
def stat_lines(image: Image) -> tuple[StatLine, ...]:
    """
    Return the lines of ``memory.stat`` and ``memory.numa_stat`` on cgroup v2, in their order.

    :raises drgn.FaultError: if the kernel's tables are not in the image
    """
    names = _item_names(image)
    node_items = constant(image, "NR_VM_NODE_STAT_ITEMS") or 0
    lines: list[StatLine] = []
    for entry in image.object("memory_stats").read_():
        number = int(entry.idx)
        item = names[number]
        unit, scale = _unit(item, mem_map(image).page_size)
        name = entry.name.string_().decode(errors="backslashreplace")
        in_stat = item != "NR_HUGETLB" or _accounts_hugetlb(image)
        lines.append(StatLine(name, (item,), unit, scale, number < node_items, in_stat))
        if item == "NR_SLAB_UNRECLAIMABLE_B":
            slab = ("NR_SLAB_RECLAIMABLE_B", item)
            lines.append(StatLine("slab", slab, unit, scale, False))
    events = event_slots(image)
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
def _accounts_hugetlb(image: Image) -> bool:
    flag = constant(image, "CGRP_ROOT_MEMORY_HUGETLB_ACCOUNTING")
    return flag is None or bool(image.object("cgrp_dfl_root").flags & flag)


def _item_names(image: Image) -> dict[int, str]:
    names: dict[int, str] = {}
    # Items of memcgs are numbered after those of nodes, beginning with the number of the latter.
    for enum in ("enum node_stat_item", "enum memcg_stat_item"):
        names |= {e.value: e.name for e in image.type(enum).enumerators or ()}
    return names


def _unit(item: str, page_size: int) -> tuple[Literal["bytes", "events"], int]:
    if _COUNTED.match(item):
        return "events", 1
    if item.endswith("_B"):
        return "bytes", 1
    return "bytes", 1024 if item.endswith("_KB") else page_size


@per_image
def event_slots(image: Image) -> dict[str, int]:
    """
    Return the events that the kernel counts for memcgs, enumerators of
    ``enum vm_event_item``, and their slots in the arrays of events.

    :raises drgn.FaultError: if the kernel's table is not in the image
    """
    names = {e.value: e.name for e in image.type("enum vm_event_item").enumerators or ()}
    table = image.object("memcg_vm_event_stat").read_()
    length = array_length(member_type(image.type("struct memcg_vmstats"), "events"))
    return {names[int(table[slot])]: slot for slot in range(length)}
