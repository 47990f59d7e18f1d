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

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from drgn import FaultError, Object, Program, Type, TypeKind, offsetof, sizeof

from memcg_inspect.linux.layout import (
    array_length,
    constant,
    has_member,
    member_type,
    per_program,
)
from memcg_inspect.linux.memory import memory_of
from memcg_inspect.linux.percpu_defs import percpu_offsets
from memcg_inspect.model import Stat

__all__ = ("ByCpu", "StatBlock", "StatReader", "stat_index")

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


@per_program
def stat_index(prog: Program) -> dict[int, int] | None:
    """
    Return the slot of each item.

    :return: ``None`` where an item is its own slot (6.9 and older)
    """
    try:
        table = prog["mem_cgroup_stats_index"]
    except KeyError:
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
        self, prog: Program, items: Iterable[str], events: Mapping[str, int] | None = None
    ) -> None:
        self.prog = prog
        self.memory = memory_of(prog)
        self.slots: dict[str, int] = {}
        index = stat_index(prog)
        for name in items:
            item = constant(prog, name)
            slot = item if item is None or index is None else index.get(item)
            if slot is not None:
                self.slots[name] = slot
        self._event_slots = events or {}
        vmstats = prog.type("struct memcg_vmstats"), prog.type("struct memcg_vmstats_percpu")
        self._memcg = _block(*vmstats)
        self._events = _block(*vmstats, "events") if events else None
        self._lruvec = _block(
            prog.type("struct lruvec_stats"), prog.type("struct lruvec_stats_percpu")
        )
        # 6.1 embeds the lruvec's in mem_cgroup_per_node, later kernels point to it.
        pointer = member_type(prog.type("struct mem_cgroup_per_node"), "lruvec_stats")
        self._embedded = pointer.unaliased_kind() != TypeKind.POINTER
        # Counters that an NMI may change stand apart on some architectures
        # (CONFIG_MEMCG_NMI_SAFETY_REQUIRES_ATOMIC, 6.16).
        self._nmi_memcg = has_member(prog, "struct mem_cgroup", "kmem_stat")
        self._nmi_lruvec = has_member(prog, "struct mem_cgroup_per_node", "slab_reclaimable")

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
        for cpu, offset in percpu_offsets(self.prog).items():
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
