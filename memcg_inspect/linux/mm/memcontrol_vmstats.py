# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters of memcgs and lruvecs
------------------------------

Mirrors ``struct memcg_vmstats`` and ``struct lruvec_stats`` of :linux:`mm/memcontrol.c`, and
their per-CPU parts ``struct memcg_vmstats_percpu`` and ``struct lruvec_stats_percpu``.

A CPU adds its changes to its own ``state`` and never resets it; ``state_prev`` is the value at
the last flush. ``mem_cgroup_css_rstat_flush()`` adds the difference of the two to the ``state``
of the memcg and to the ``state_pending`` of its parent. A counter is therefore ``state``,
``state_pending``, and the sum of ``state - state_prev`` over all possible CPUs. The flush also adds
the difference to ``state_local``, which excludes descendants.

What differs between kernel releases:

- up to 6.9, the arrays are indexed by the item; since 6.10, by ``mem_cgroup_stats_index[item]``;
- up to 6.9, ``struct mem_cgroup_per_node`` contains ``struct lruvec_stats``; since 6.10, it points
  to it;
- since commit f82e6bf9bb9b ("mm: memcg: use rstat for non-hierarchical stats") (in v6.6),
  ``state_local`` exists; before, the kernel added up ``state`` of all CPUs instead;
- since 6.16, architectures whose per-CPU operations are not safe in an NMI
  (``CONFIG_MEMCG_NMI_SAFETY_REQUIRES_ATOMIC``) count changes made in NMIs in atomics of
  ``struct mem_cgroup`` and ``struct mem_cgroup_per_node``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, count
from operator import or_, sub
from typing import NamedTuple

from drgn import FaultError, Object, SymbolBinding, Type, TypeKind, offsetof, sizeof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import (
    array_length,
    constant,
    has_member,
    member_type,
)
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.memory import Memory
from memcg_inspect.linux.mm.memcontrol import on_default_hierarchy
from memcg_inspect.linux.mm.percpu_defs import Copies, PercpuRange, percpu_offsets, read_percpu
from memcg_inspect.model import ImageError, Stat
from memcg_inspect.model_counters import CounterWord
from memcg_inspect.model_kernel import LocalItems

__all__ = (
    "ByCpu",
    "Cell",
    "StatArrays",
    "StatReader",
    "event_slots",
    "item_names",
    "lruvec_items",
    "memcg_items",
    "node_stat_items",
    "reparented_items",
    "stat_items",
    "slot_names",
    "stat_index",
)

#: Items that kernels up to 6.9 change with ``mod_node_page_state()`` and its like only.
_ONLY_NODES = frozenset(
    {
        "NR_ISOLATED_ANON",
        "NR_ISOLATED_FILE",
        "NR_WRITEBACK_TEMP",
        "NR_VMSCAN_WRITE",
        "NR_VMSCAN_IMMEDIATE",
        "NR_DIRTIED",
        "NR_WRITTEN",
        "NR_THROTTLED_WRITTEN",
        "NR_KERNEL_MISC_RECLAIMABLE",
        "NR_FOLL_PIN_ACQUIRED",
        "NR_FOLL_PIN_RELEASED",
        "NR_KERNEL_SCS_KB",
        "PGPROMOTE_SUCCESS",
        "PGPROMOTE_CANDIDATE",
        "PGDEMOTE_KSWAPD",
        "PGDEMOTE_DIRECT",
        "PGDEMOTE_KHUGEPAGED",
    }
)

#: An index that no array has: ``MEMCG_NR_STAT`` is less than ``U8_MAX``.
_NO_SLOT = 1 << 8

#: Changes that are not flushed, by CPU and item; zeros are left out.
ByCpu = dict[int, dict[str, int]]

#: Whose counters: ``struct mem_cgroup *``, and the node, or ``None`` for the memcg itself.
Cell = tuple[int, int | None]


#: Members of ``struct memcg_vmstats_percpu`` and ``struct lruvec_stats_percpu`` that are arrays.
_ARRAYS = ("state", "events", "state_prev", "events_prev")


class _Layout(NamedTuple):
    """
    Layout of an aggregated structure and its per-CPU part, for one kind of counters.

    All arrays have elements of type ``long`` and the same length.

    :ivar size: ``sizeof()`` the aggregated structure, in bytes
    :ivar state: byte offset of ``state`` (or ``events``) in it
    :ivar pending: byte offset of ``state_pending`` (or ``events_pending``) in it
    :ivar local: byte offset of ``state_local`` (or ``events_local``) in it; ``None`` before 6.6
    :ivar percpu_start: byte offset of the first of the arrays in the per-CPU structure. Pointers
        before it are set for each possible CPU
    :ivar percpu_size: bytes from there to the end of that structure
    :ivar percpu_state: byte offset of ``state`` (or ``events``) from ``percpu_start``
    :ivar percpu_prev: byte offset of ``state_prev`` (or ``events_prev``) from ``percpu_start``
    :ivar length: number of elements of each array
    """

    size: int
    state: int
    pending: int
    local: int | None
    percpu_start: int
    percpu_size: int
    percpu_state: int
    percpu_prev: int
    length: int


def _layout(stats: Type, percpu: Type, member: str = "state") -> _Layout:
    local = f"{member}_local"
    arrays = [name for name in _ARRAYS if percpu.has_member(name)]
    start = min(offsetof(percpu, name) for name in arrays)
    return _Layout(
        size=sizeof(stats),
        state=offsetof(stats, member),
        pending=offsetof(stats, f"{member}_pending"),
        local=offsetof(stats, local) if stats.has_member(local) else None,
        percpu_start=start,
        percpu_size=sizeof(percpu) - start,
        percpu_state=offsetof(percpu, member) - start,
        percpu_prev=offsetof(percpu, f"{member}_prev") - start,
        length=array_length(member_type(percpu, member)),
    )


@dataclass(frozen=True)
class StatArrays:
    """
    The arrays of counters of a memcg, or of a memcg on a node, as read from memory.

    :ivar memory: memory that they were read from
    :ivar layout: layout of both structures
    :ivar data: ``struct memcg_vmstats`` or ``struct lruvec_stats``
    :ivar percpu: the arrays of ``struct memcg_vmstats_percpu``, or those of
        ``struct lruvec_stats_percpu``, by CPU; those that are all zeros are left out
    """

    memory: Memory
    layout: _Layout
    data: bytes
    percpu: Copies

    @property
    def is_zero(self) -> bool:
        """Whether all counters are 0, and all changes of all CPUs."""
        return not self.percpu and self.data.count(0) == len(self.data)

    def state(self) -> tuple[int, ...]:
        """Return ``state``, by index."""
        return self._longs(self.data, self.layout.state)

    def pending(self) -> tuple[int, ...]:
        """Return ``state_pending``, by index."""
        return self._longs(self.data, self.layout.pending)

    def local(self) -> tuple[int, ...] | None:
        """Return ``state_local``, by index; ``None`` on kernels without it."""
        at = self.layout.local
        return None if at is None else self._longs(self.data, at)

    def flushed(self) -> tuple[int, ...]:
        """Return the sum of ``state_prev`` over all CPUs, by index. It wraps around as in C."""
        at, sign = self.layout.percpu_prev, 1 << 8 * self.memory.word_size - 1
        zeros = bytes(self.layout.length * self.memory.word_size)
        of_cpus = [
            self._longs(data, at) for data in self.percpu.values() if not data.startswith(zeros, at)
        ]
        if len(of_cpus) < 2:
            return of_cpus[0] if of_cpus else (0,) * self.layout.length
        sums = map(sum, zip(*of_cpus, strict=True))
        return tuple([(total + sign) % (2 * sign) - sign if total else 0 for total in sums])

    @cached_property
    def changes(self) -> Mapping[int, Mapping[int, int]]:
        """What CPUs have changed since the last flush, by CPU, and by index of the counter."""
        size = self.layout.length * self.memory.word_size
        state, prev = self.layout.percpu_state, self.layout.percpu_prev
        found = {}
        for cpu, data in self.percpu.items():
            if data[state : state + size] != data[prev : prev + size]:
                deltas = map(sub, self._longs(data, state), self._longs(data, prev))
                found[cpu] = {slot: delta for slot, delta in enumerate(deltas) if delta}
        return found

    def is_same(self, cpu: int, other: StatArrays) -> bool:
        """Return whether a CPU's counters are those that were read another time."""
        size = self.layout.length * self.memory.word_size
        zeros = bytes(self.layout.percpu_size)
        mine, others = self.percpu.get(cpu, zeros), other.percpu.get(cpu, zeros)
        return all(
            mine[at : at + size] == others[at : at + size]
            for at in (self.layout.percpu_state, self.layout.percpu_prev)
        )

    def _longs(self, data: bytes, at: int) -> tuple[int, ...]:
        length = self.layout.length
        return self.memory.unpacker(length, signed=True)(data, at)


@per_image
def stat_index(image: Image) -> dict[int, int] | None:
    """
    Return the index of each item in the arrays of counters, ``memcg_stats_index()``.

    :return: by value of ``enum memcg_stat_item`` or ``enum node_stat_item``, without items that
        memcgs do not count; ``None`` where an item is its own index (up to 6.9). Items that share
        an index, as they do in a damaged table only, have one that is beyond the arrays
    :raises ImageError: if an item that memcgs count has no index
    """
    try:
        table = image.object("mem_cgroup_stats_index")
    except UnknownKernelError:
        return None
    values = [int(v) for v in table.read_()]
    if table.type_.type.unaliased().is_signed:
        # 6.10 and 6.11 store the index plus 1, and 0 for items that are not counted.
        index = {item: value - 1 for item, value in enumerate(values) if value > 0}
    else:
        # Later, the index, and U8_MAX (BAD_STAT_IDX()) for items that are not counted.
        index = {item: value for item, value in enumerate(values) if value != 0xFF}
    # init_memcg_stats() gives each element of the arrays to one item.
    length = array_length(member_type(image.type("struct memcg_vmstats"), "state"))
    users = Counter(index.values())
    if len(index) < length and max(users.values(), default=0) <= 1:
        free = min(set(range(length)) - users.keys())
        raise ImageError(f"mem_cgroup_stats_index is damaged: no item has the index {free}")
    return {item: slot if users[slot] == 1 else _NO_SLOT for item, slot in index.items()}


def node_stat_items(image: Image) -> dict[int, str]:
    """Return the enumerators of ``enum node_stat_item`` by value, in order."""
    return stat_items(image, "enum node_stat_item", "NR_VM_NODE_STAT_ITEMS")


def stat_items(image: Image, name: str, last: str) -> dict[int, str]:
    """
    Return the enumerators of an enumeration of counters by value, in order.

    :param name: its type
    :param last: the enumerator after that of the last counter
    """
    names: dict[int, str] = {}
    # Names that end in _BASE have the value of the first of a group, which comes after them.
    for enumerator in image.type(name).enumerators or ():
        names[enumerator.value] = enumerator.name
    end = constant(image, last)
    return {value: name for value, name in sorted(names.items()) if end is None or value < end}


@per_image
def lruvec_items(image: Image) -> tuple[str, ...]:
    """
    Return the counters that the kernel keeps for each memcg and node.

    These are the items of ``memcg_node_stat_items[]``. Up to 6.9 there is no such table, and the
    arrays have an element for every item of nodes; those that only nodes count stay 0.

    :return: enumerators of ``enum node_stat_item``
    """
    items, index = node_stat_items(image), stat_index(image)
    if index is None:
        return tuple(name for name in items.values() if name not in _ONLY_NODES)
    return tuple(name for value, name in items.items() if value in index)


@per_image
def memcg_items(image: Image) -> tuple[str, ...]:
    """
    Return the counters that the kernel keeps for each memcg only.

    :return: enumerators of ``enum memcg_stat_item``
    """
    index = stat_index(image)
    return tuple(
        e.name
        for e in image.type("enum memcg_stat_item").enumerators or ()
        if e.name != "MEMCG_NR_STAT" and (index is None or e.value in index)
    )


@per_image
def slot_names(image: Image) -> dict[int, str]:
    """
    Return the enumerator of each index of the arrays of counters.

    The arrays of a memcg on a node are shorter; their indexes are the same.
    """
    names = item_names(image)
    index = stat_index(image)
    if index is None:
        return names
    return {slot: names[item] for item, slot in index.items() if item in names}


@per_image
def item_names(image: Image) -> dict[int, str]:
    """Return the enumerators of all items that memcgs may count, by value."""
    names: dict[int, str] = {}
    # enum memcg_stat_item begins with MEMCG_SWAP = NR_VM_NODE_STAT_ITEMS: that value is taken
    # from the second enum.
    for enum in ("enum node_stat_item", "enum memcg_stat_item"):
        names |= {e.value: e.name for e in image.type(enum).enumerators or ()}
    return names


#: Lists of the LRU, NR_LRU_BASE + 0 to NR_LRU_LISTS - 1.
LRU_ITEMS = (
    "NR_INACTIVE_ANON",
    "NR_ACTIVE_ANON",
    "NR_INACTIVE_FILE",
    "NR_ACTIVE_FILE",
    "NR_UNEVICTABLE",
)
_SLAB_ITEMS = ("NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B")
#: memcg1_stats[] of mm/memcontrol-v1.c.
_MEMCG1_ITEMS = (
    *("NR_FILE_PAGES", "NR_ANON_MAPPED", "NR_ANON_THPS", "NR_SHMEM", "NR_FILE_MAPPED"),
    *("NR_FILE_DIRTY", "NR_WRITEBACK", "WORKINGSET_REFAULT_ANON", "WORKINGSET_REFAULT_FILE"),
    *("MEMCG_SWAP", "NR_SWAPCACHE"),
)


@per_image
def reparented_items(image: Image) -> LocalItems:
    """
    Return the items whose local counters the kernel gives to the parent of a removed memcg.

    Mirrors ``reparent_state_local()`` of :linux:`mm/memcontrol.c`. The kernel has done that since
    user pages are reparented: since 7.1 on cgroup v1, since 7.3 on cgroup v2.
    """
    try:
        image.symbol("reparent_memcg_lruvec_state_local")
    except UnknownKernelError:
        return LocalItems()
    if not on_default_hierarchy(image):
        return LocalItems(frozenset((*LRU_ITEMS, *_MEMCG1_ITEMS)), frozenset(LRU_ITEMS))
    # 7.2 has the function, too, if it was built with cgroup v1 (CONFIG_MEMCG_V1), and uses it there
    # only. reparent_v2_lruvec_state_local() is inlined; mod_memcg_lruvec_state() became global in
    # 7.3.
    if has_member(image, "struct mem_cgroup", "tcpmem") and not _is_global(
        image, "mod_memcg_lruvec_state"
    ):
        return LocalItems()
    # __mod_memcg_lruvec_state() moves the memcg's counter with that of the node.
    items = frozenset((*LRU_ITEMS, *_SLAB_ITEMS))
    return LocalItems(items, items)


def _is_global(image: Image, function: str) -> bool:
    try:
        return bool(image.symbol(function).binding == SymbolBinding.GLOBAL)
    except UnknownKernelError:
        return False


@per_image
def event_slots(image: Image) -> dict[str, int]:
    """
    Return the index of each event that memcgs count in the arrays of events.

    Mirrors ``memcg_vm_event_stat[]`` of :linux:`mm/memcontrol.c`.

    :return: by enumerator of ``enum vm_event_item``, in the order of the kernel's table
    :raises drgn.FaultError: if the table cannot be read
    :raises ImageError: if it is damaged
    """
    names = {e.value: e.name for e in image.type("enum vm_event_item").enumerators or ()}
    table = image.object("memcg_vm_event_stat")
    length = array_length(member_type(image.type("struct memcg_vmstats"), "events"))
    # With BTF its length comes from kallsyms, which may be damaged.
    if array_length(table.type_) < length:
        raise ImageError("memcg_vm_event_stat is damaged: it is too short")
    values = table.read_()
    events = [int(values[slot]) for slot in range(length)]
    if not names.keys() >= set(events):
        raise ImageError("memcg_vm_event_stat is damaged: it has unknown events")
    if len(set(events)) < length:
        raise ImageError("memcg_vm_event_stat is damaged: it has an event twice")
    return {names[event]: slot for slot, event in enumerate(events)}


class _Items(NamedTuple):
    """
    The items of an array of counters.

    :ivar names: names by index. An item that begins a group has the name of the group, too
    :ivar zeros: the counters, by name, of an array that is all zeros
    """

    names: Mapping[int, tuple[str, ...]]
    zeros: Mapping[str, Stat]


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
        self._named: dict[_Layout, _Items] = {}
        vmstats = image.type("struct memcg_vmstats"), image.type("struct memcg_vmstats_percpu")
        self._memcg = _layout(*vmstats)
        self._events = _layout(*vmstats, "events")
        self._lruvec = _layout(
            image.type("struct lruvec_stats"), image.type("struct lruvec_stats_percpu")
        )
        lruvec_stats = member_type(image.type("struct mem_cgroup_per_node"), "lruvec_stats")
        self._embedded = lruvec_stats.unaliased_kind() != TypeKind.POINTER
        # CONFIG_MEMCG_NMI_SAFETY_REQUIRES_ATOMIC
        self._nmi_memcg = has_member(image, "struct mem_cgroup", "kmem_stat")
        self._nmi_lruvec = has_member(image, "struct mem_cgroup_per_node", "slab_reclaimable")

    def memcg(self, memcg: Object, by_cpu: ByCpu | None = None) -> Mapping[str, Stat]:
        """
        Read the counters of a memcg.

        :param memcg: ``struct mem_cgroup *``
        :param by_cpu: if given, changes that are not flushed are added to it, by CPU and item
        :return: by enumerator, in the unit of the item
        :raises drgn.FaultError: if any of the counters cannot be read
        """
        return self.memcg_stats(memcg, self.memcg_arrays(memcg), by_cpu)

    def memcg_arrays(self, memcg: Object) -> StatArrays:
        """
        Read all arrays of a memcg.

        :param memcg: ``struct mem_cgroup *``
        :raises drgn.FaultError: if any of them cannot be read
        """
        return self._read(*self._of_memcg(memcg))

    def event_arrays(self, arrays: StatArrays) -> StatArrays:
        """Return the arrays of events that are in the same structures as those of a memcg."""
        return replace(arrays, layout=self._events)

    def memcg_stats(
        self, memcg: Object, arrays: StatArrays, by_cpu: ByCpu | None = None
    ) -> Mapping[str, Stat]:
        """
        Return the counters of a memcg from its arrays, as :meth:`memcg()` does.

        :raises drgn.FaultError: if an atomic of the memcg cannot be read
        """
        stats = self._stats(arrays, self.slots, by_cpu)
        if self._event_slots:
            events = self._stats(self.event_arrays(arrays), self._event_slots, by_cpu)
            stats = {**stats, **events}
        if self._nmi_memcg:
            stats = _plus(stats, "MEMCG_KMEM", int(memcg.kmem_stat.counter))
        return stats

    def lruvec(self, pn: Object) -> Mapping[str, Stat]:
        """
        Read the counters of the lruvec of a memcg on a node.

        :param pn: ``struct mem_cgroup_per_node *``
        :return: by enumerator, in the unit of the item
        :raises drgn.FaultError: if any of the counters cannot be read
        """
        return self.lruvec_stats(pn, self.lruvec_arrays(pn))

    def lruvec_arrays(self, pn: Object) -> StatArrays:
        """
        Read all arrays of a memcg on a node.

        :param pn: ``struct mem_cgroup_per_node *``
        :raises drgn.FaultError: if any of them cannot be read
        """
        return self._read(*self._of_lruvec(pn))

    def all_arrays(
        self, holders: Mapping[Cell, Object]
    ) -> Iterator[tuple[Cell, StatArrays | FaultError]]:
        """
        Read all arrays of many memcgs, with few reads.

        :param holders: ``struct mem_cgroup *`` or ``struct mem_cgroup_per_node *``
        :return: in the order of their per-CPU parts; an error for what cannot be read
        """
        held_in: dict[PercpuRange, list[tuple[Cell, int, _Layout]]] = {}
        for cell, holder in holders.items():
            try:
                of = self._of_memcg if cell[1] is None else self._of_lruvec
                address, percpu, layout = of(holder)
            except FaultError as error:
                yield cell, error
                continue
            held_in.setdefault(_range(percpu, layout), []).append((cell, address, layout))
        for percpu_range, copies in read_percpu(self.image, held_in):
            for cell, address, layout in held_in[percpu_range]:
                try:
                    yield cell, self._arrays(address, copies, layout)
                except FaultError as error:
                    yield cell, error

    def _of_memcg(self, memcg: Object) -> tuple[int, int, _Layout]:
        return memcg.vmstats.value_(), memcg.vmstats_percpu.value_(), self._memcg

    def _of_lruvec(self, pn: Object) -> tuple[int, int, _Layout]:
        lruvec_stats = pn.lruvec_stats
        address = lruvec_stats.address_ or 0 if self._embedded else lruvec_stats.value_()
        return address, pn.lruvec_stats_percpu.value_(), self._lruvec

    def lruvec_stats(self, pn: Object, arrays: StatArrays) -> Mapping[str, Stat]:
        """
        Return the counters of a memcg on a node from its arrays, as :meth:`lruvec()` does.

        :raises drgn.FaultError: if an atomic of the memcg on the node cannot be read
        """
        stats = self._stats(arrays, self.slots)
        if self._nmi_lruvec:
            stats = _plus(stats, "NR_SLAB_RECLAIMABLE_B", int(pn.slab_reclaimable.counter))
            stats = _plus(stats, "NR_SLAB_UNRECLAIMABLE_B", int(pn.slab_unreclaimable.counter))
        return stats

    def _stats(
        self, arrays: StatArrays, slots: Mapping[str, int], by_cpu: ByCpu | None = None
    ) -> Mapping[str, Stat]:
        items = self._items(arrays.layout, slots)
        if arrays.is_zero:
            return items.zeros
        deltas: dict[int, int] = {}
        for cpu, changes in arrays.changes.items():
            for slot, delta in changes.items():
                deltas[slot] = deltas.get(slot, 0) + delta
                if by_cpu is not None:
                    by_cpu.setdefault(cpu, {}).update(
                        dict.fromkeys(items.names.get(slot, ()), delta)
                    )
        state, pending, local = arrays.state(), arrays.pending(), arrays.local()
        some = map(or_, state, pending)
        if local is not None:
            some = map(or_, some, local)
        found = {
            name: Stat(
                state=state[slot],
                pending=pending[slot],
                percpu=deltas.get(slot, 0),
                local=None if local is None else local[slot],
            )
            for slot in deltas.keys() | set(compress(count(), some))
            for name in items.names.get(slot, ())
        }
        return {**items.zeros, **found}

    def _items(self, layout: _Layout, slots: Mapping[str, int]) -> _Items:
        if layout not in self._named:
            names: defaultdict[int, tuple[str, ...]] = defaultdict(tuple)
            for name, slot in slots.items():
                if slot < layout.length:
                    names[slot] += (name,)
            zero = Stat(0, 0, 0, None if layout.local is None else 0)
            known = [name for some in names.values() for name in some]
            self._named[layout] = _Items(dict(names), dict.fromkeys(known, zero))
        return self._named[layout]

    def memcg_words(self, memcg: Object) -> Iterator[CounterWord]:
        """
        Yield the words that the counters of a memcg are in.

        :param memcg: ``struct mem_cgroup *``
        :raises drgn.FaultError: if any of the counters cannot be read
        """
        return self._words(*self._of_memcg(memcg))

    def lruvec_words(self, pn: Object) -> Iterator[CounterWord]:
        """
        Yield the words that the counters of a memcg on a node are in.

        :param pn: ``struct mem_cgroup_per_node *``
        :raises drgn.FaultError: if any of the counters cannot be read
        """
        return self._words(*self._of_lruvec(pn))

    def _words(self, address: int, percpu: int, layout: _Layout) -> Iterator[CounterWord]:
        word, signed_at = self.memory.word_size, self.memory.signed_at
        slots = [(name, slot * word) for name, slot in self.slots.items() if slot < layout.length]
        data = self.memory.read(address, layout.size)
        for name, at in slots:
            yield CounterWord("state", name, address + layout.state + at, word)
            start = address + layout.pending
            pending = signed_at(data, layout.pending + at)
            yield CounterWord("state_pending", name, start + at, word, pending=pending)
            if layout.local is not None:
                yield CounterWord("state_local", name, address + layout.local + at, word)
        for cpu, offset in percpu_offsets(self.image).items():
            start = percpu + offset + layout.percpu_start
            state, prev = layout.percpu_state, layout.percpu_prev
            data = self.memory.read(start, layout.percpu_size)
            for name, at in slots:
                pending = signed_at(data, state + at) - signed_at(data, prev + at)
                yield CounterWord(
                    "percpu", name, start + state + at, word, cpu=cpu, pending=pending
                )

    def _read(self, address: int, percpu: int, layout: _Layout) -> StatArrays:
        ((_, copies),) = read_percpu(self.image, [_range(percpu, layout)])
        return self._arrays(address, copies, layout)

    def _arrays(self, address: int, copies: Copies | FaultError, layout: _Layout) -> StatArrays:
        if isinstance(copies, FaultError):
            raise copies
        return StatArrays(self.memory, layout, self.memory.read(address, layout.size), copies)


def _range(percpu: int, layout: _Layout) -> PercpuRange:
    return PercpuRange(percpu + layout.percpu_start, layout.percpu_size)


def _plus(stats: Mapping[str, Stat], name: str, amount: int) -> Mapping[str, Stat]:
    """Return counters, with an amount added to the changes of one of them."""
    if not amount or name not in stats:
        return stats
    return {**stats, name: stats[name]._replace(percpu=stats[name].percpu + amount)}
