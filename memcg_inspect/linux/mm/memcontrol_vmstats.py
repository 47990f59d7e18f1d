# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters of memcgs and lruvecs
------------------------------

Mirrors ``struct memcg_vmstats`` and ``struct lruvec_stats`` of :linux:`mm/memcontrol.c`, and
their per-CPU parts ``struct memcg_vmstats_percpu`` and ``struct lruvec_stats_percpu``.

A CPU adds its changes to its own ``state`` and never resets it; ``state_prev`` is the value at
the last flush. ``mem_cgroup_css_rstat_flush()`` adds the difference of the two to the ``state``
of the memcg and to the ``state_pending`` of its parent. A counter is therefore ``state``,
``state_pending``, and the sum of ``state - state_prev`` over all possible CPUs.

What differs between kernel releases:

- up to 6.9, the arrays are indexed by the item; since 6.10, by ``mem_cgroup_stats_index[item]``;
- 6.1 embeds ``struct lruvec_stats`` in ``struct mem_cgroup_per_node``; later kernels point to it;
- since 6.16, architectures whose per-CPU operations are not safe in an NMI
  (``CONFIG_MEMCG_NMI_SAFETY_REQUIRES_ATOMIC``) count changes made in NMIs in atomics of
  ``struct mem_cgroup`` and ``struct mem_cgroup_per_node``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from drgn import FaultError, Object, Type, TypeKind, offsetof, sizeof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import (
    array_length,
    constant,
    has_member,
    member_type,
)
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.model import Stat

__all__ = ("ByCpu", "StatReader", "event_slots", "stat_index")

#: Changes that are not flushed, by CPU and item; zeros are left out.
ByCpu = dict[int, dict[str, int]]


class _StatArrays(NamedTuple):
    """
    Layout of an aggregated structure and its per-CPU part, for one kind of counters.

    All arrays have elements of type ``long`` and the same length.

    :ivar size: ``sizeof()`` the aggregated structure, in bytes
    :ivar state: byte offset of ``state`` (or ``events``) in it
    :ivar pending: byte offset of ``state_pending`` (or ``events_pending``) in it
    :ivar percpu_size: ``sizeof()`` the per-CPU structure, in bytes
    :ivar percpu_state: byte offset of ``state`` (or ``events``) in it
    :ivar percpu_prev: byte offset of ``state_prev`` (or ``events_prev``) in it
    :ivar length: number of elements of each array
    """

    size: int
    state: int
    pending: int
    percpu_size: int
    percpu_state: int
    percpu_prev: int
    length: int


def _stat_arrays(stats: Type, percpu: Type, member: str = "state") -> _StatArrays:
    return _StatArrays(
        size=sizeof(stats),
        state=offsetof(stats, member),
        pending=offsetof(stats, f"{member}_pending"),
        percpu_size=sizeof(percpu),
        percpu_state=offsetof(percpu, member),
        percpu_prev=offsetof(percpu, f"{member}_prev"),
        length=array_length(member_type(percpu, member)),
    )


@per_image
def stat_index(image: Image) -> dict[int, int] | None:
    """
    Return the index of each item in the arrays of counters, ``memcg_stats_index()``.

    :return: by value of ``enum memcg_stat_item`` or ``enum node_stat_item``, without items that
        memcgs do not count; ``None`` where an item is its own index (up to 6.9)
    """
    try:
        table = image.object("mem_cgroup_stats_index")
    except UnknownKernelError:
        return None
    values = [int(v) for v in table.read_()]
    if table.type_.type.unaliased().is_signed:
        # 6.10 and 6.11 store the index plus 1, and 0 for items that are not counted.
        return {item: value - 1 for item, value in enumerate(values) if value > 0}
    # Later kernels store the index, and U8_MAX (BAD_STAT_IDX()) for items that are not counted.
    return {item: value for item, value in enumerate(values) if value != 0xFF}


@per_image
def event_slots(image: Image) -> dict[str, int]:
    """
    Return the index of each event that memcgs count in the arrays of events.

    Mirrors ``memcg_vm_event_stat[]`` of :linux:`mm/memcontrol.c`.

    :return: by enumerator of ``enum vm_event_item``, in the order of the kernel's table
    :raises drgn.FaultError: if the table cannot be read
    """
    names = {e.value: e.name for e in image.type("enum vm_event_item").enumerators or ()}
    table = image.object("memcg_vm_event_stat")
    length = array_length(member_type(image.type("struct memcg_vmstats"), "events"))
    values = table.read_()
    events = [int(values[slot]) for slot in range(length)]
    if not names.keys() >= set(events):
        raise FaultError("memcg_vm_event_stat has unknown events", table.address_ or 0)
    return {names[event]: slot for slot, event in enumerate(events)}


class StatReader:
    """
    Reader of the counters of memcgs and lruvecs.

    :param items: enumerators of ``enum memcg_stat_item`` or ``enum node_stat_item`` to read;
        those that the kernel does not define or does not count are left out
    :param events: enumerators of ``enum vm_event_item`` to read, with their indexes; see
        :func:`event_slots()`
    :ivar slots: index of each item that is read
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
        self._memcg = _stat_arrays(*vmstats)
        self._events = _stat_arrays(*vmstats, "events") if events else None
        self._lruvec = _stat_arrays(
            image.type("struct lruvec_stats"), image.type("struct lruvec_stats_percpu")
        )
        lruvec_stats = member_type(image.type("struct mem_cgroup_per_node"), "lruvec_stats")
        self._embedded = lruvec_stats.unaliased_kind() != TypeKind.POINTER
        # CONFIG_MEMCG_NMI_SAFETY_REQUIRES_ATOMIC
        self._nmi_memcg = has_member(image, "struct mem_cgroup", "kmem_stat")
        self._nmi_lruvec = has_member(image, "struct mem_cgroup_per_node", "slab_reclaimable")

    def memcg(self, memcg: Object, by_cpu: ByCpu | None = None) -> dict[str, Stat]:
        """
        Read the counters of a memcg.

        :param memcg: ``struct mem_cgroup *``
        :param by_cpu: if given, changes that are not flushed are added to it, by CPU and item
        :return: by enumerator, in the unit of the item
        :raises drgn.FaultError: if any of the counters cannot be read
        """
        vmstats, percpu = memcg.vmstats.value_(), memcg.vmstats_percpu.value_()
        stats = self._read(vmstats, percpu, self._memcg, self.slots, by_cpu)
        if self._events is not None:
            stats |= self._read(vmstats, percpu, self._events, self._event_slots, by_cpu)
        if self._nmi_memcg:
            _add(stats, "MEMCG_KMEM", int(memcg.kmem_stat.counter))
        return stats

    def lruvec(self, pn: Object) -> dict[str, Stat]:
        """
        Read the counters of the lruvec of a memcg on a node.

        :param pn: ``struct mem_cgroup_per_node *``
        :return: by enumerator, in the unit of the item
        :raises drgn.FaultError: if any of the counters cannot be read
        """
        lruvec_stats = pn.lruvec_stats
        address = lruvec_stats.address_ if self._embedded else lruvec_stats.value_()
        if address is None:
            raise FaultError("lruvec_stats has no address", 0)
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
        arrays: _StatArrays,
        slots: Mapping[str, int],
        by_cpu: ByCpu | None = None,
    ) -> dict[str, Stat]:
        memory = self.memory
        word = memory.word_size
        slots = {name: slot for name, slot in slots.items() if slot < arrays.length}
        data = memory.read(address, arrays.size)
        deltas = dict.fromkeys(slots, 0)
        array_size = arrays.length * word
        for cpu, percpu_offset in percpu_offsets(self.image).items():
            local = memory.read(percpu + percpu_offset, arrays.percpu_size)
            state = local[arrays.percpu_state : arrays.percpu_state + array_size]
            prev = local[arrays.percpu_prev : arrays.percpu_prev + array_size]
            if state == prev:
                continue
            for name, slot in slots.items():
                offset = slot * word
                delta = memory.signed_at(state, offset) - memory.signed_at(prev, offset)
                deltas[name] += delta
                if delta and by_cpu is not None:
                    by_cpu.setdefault(cpu, {})[name] = delta
        return {
            name: Stat(
                state=memory.signed_at(data, arrays.state + slot * word),
                pending=memory.signed_at(data, arrays.pending + slot * word),
                percpu=deltas[name],
            )
            for name, slot in slots.items()
        }


def _add(stats: dict[str, Stat], name: str, amount: int) -> None:
    if name in stats:
        stats[name] = stats[name]._replace(percpu=stats[name].percpu + amount)
