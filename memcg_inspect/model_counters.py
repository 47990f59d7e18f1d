# SPDX-License-Identifier: LGPL-2.1-or-later
"""Counters: what flushes have done with them, or have not done yet, and where they are."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

__all__ = ("CounterArray", "CounterWord", "LocalStat", "Unfolded")

#: Arrays of counters: of ``struct memcg_vmstats`` or ``struct lruvec_stats``; ``state`` of their
#: per-CPU parts; ``lru_zone_size`` and ``lrugen.nr_pages``; ``pglist_data.vm_stat``; and the
#: ``usage`` of each ``struct page_counter`` of ``struct mem_cgroup``
CounterArray = Literal[
    "state",
    "state_pending",
    "state_local",
    "percpu",
    "lists",
    "vm_stat",
    "zone_stat",
    "page_counter",
]


class LocalStat(NamedTuple):
    """
    What was folded of one counter, descendants excluded, in the unit of its item.

    :ivar local: ``state_local``
    :ivar flushed: sum of ``state_prev`` over all possible CPUs
    """

    local: int
    flushed: int


class Unfolded(NamedTuple):
    """
    Counters of one memcg that have changes that are not folded yet.

    :ivar changed: names of the counters that each CPU has changed, by CPU; CPUs without changes
        are left out
    :ivar pending: names of the counters with ``state_pending``, which children handed up
    :ivar updated: whether the memcg is on the list of updated ones of each possible CPU; CPUs
        whose lists could not be read are left out
    :ivar complete: whether the counters of the memcg and those of all its nodes could be read
    :ivar unsteady: a node that may have had no memory for a time and on which a CPU has such
        changes, by CPU; ``None`` in place of the CPU for ``state_pending``. These changes are not
        among the others
    """

    changed: Mapping[int, tuple[str, ...]]
    pending: tuple[str, ...]
    updated: Mapping[int, bool]
    complete: bool = True
    unsteady: Mapping[int | None, int] = MappingProxyType({})


class CounterWord(NamedTuple):
    """
    A word of memory that is a counter, or a CPU's part of one.

    :ivar array: the array that it is in
    :ivar item: name of the counter
    :ivar address: where it is
    :ivar size: its bytes
    :ivar memcg: ``struct mem_cgroup *``; ``None`` for a counter of a node
    :ivar nid: node; ``None`` for a counter of a memcg
    :ivar cpu: CPU, if it is a CPU's part
    :ivar pending: what the CPU has changed since the last flush, or what ``state_pending`` has, in
        the unit of the counter; ``None`` in other arrays
    """

    array: CounterArray
    item: str
    address: int
    size: int
    memcg: int | None = None
    nid: int | None = None
    cpu: int | None = None
    pending: int | None = None
