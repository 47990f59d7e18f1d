# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a kernel supports, how much one operation of it charges at the most, and what it moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from memcg_inspect.model import Address, NotAccounted

__all__ = ("Features", "Limits", "LocalItems", "Moving")


class LocalItems(NamedTuple):
    """
    Items whose local counters a kernel keeps when memcgs are removed.

    :ivar of_memcgs: items of ``memcg_vmstats.state_local``
    :ivar of_nodes: items of ``lruvec_stats.state_local``
    """

    of_memcgs: frozenset[str] = frozenset()
    of_nodes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Features:
    """
    What a kernel supports, found from its types.

    :ivar items: the counters it keeps, of those that identities need
    :ivar lru_holds_objcg: whether user pages hold a reference to an obj_cgroup (7.1), and not to
        the memcg itself
    :ivar lru_charged_to_own_node: whether user pages are charged to the obj_cgroup of their own
        node (7.2)
    :ivar default_hierarchy: whether the memory controller is on cgroup v2
    :ivar caches_objcg: whether tasks cache an obj_cgroup (6.7)
    :ivar large_kmalloc_type: whether large kmallocs have a page type, ``PGTY_large_kmalloc``
    :ivar zswap: whether the kernel has zswap
    :ivar memcg_items: enumerators of the counters that it keeps for each memcg only
    :ivar lruvec_items: enumerators of the counters that it keeps for each memcg, and for each memcg
        on each node
    :ivar node_items: enumerators of all counters of nodes
    :ivar page_counters: members of ``struct mem_cgroup`` that are page counters in use
    :ivar local: items whose local counters the kernel reparents
    :ivar has_local: whether the kernel has local counters, ``state_local``
    :ivar not_accounted: memory that is charged to no memcg, since the kernel was told not to
    """

    items: frozenset[str]
    lru_holds_objcg: bool
    lru_charged_to_own_node: bool
    default_hierarchy: bool
    caches_objcg: bool
    large_kmalloc_type: bool
    zswap: bool
    memcg_items: tuple[str, ...] = ()
    lruvec_items: tuple[str, ...] = ()
    node_items: tuple[str, ...] = ()
    page_counters: tuple[str, ...] = ()
    local: LocalItems = LocalItems()
    has_local: bool = False
    not_accounted: tuple[NotAccounted, ...] = ()


class Limits(NamedTuple):
    """
    The most that one operation of the kernel charges, or moves from one counter to another.

    :ivar charge_batch: ``MEMCG_CHARGE_BATCH``, in pages
    :ivar folio_batch: folios that a CPU adds to LRU lists, or uncharges, together
    :ivar block: pages of the largest block of the page allocator, thus of a folio and of a large
        kmalloc
    :ivar stack: bytes of a kernel stack, ``THREAD_SIZE``
    :ivar slab_object: most bytes charged for one slab object
    :ivar slab_stock: most bytes of ``NR_SLAB_*_B`` that an object stock holds back
    :ivar percpu: most bytes charged for one percpu allocation
    :ivar hugetlb: pages of huge pages of hugetlb, by size, if these are charged before there is one
    """

    charge_batch: int
    folio_batch: int
    block: int
    stack: int
    slab_object: int
    slab_stock: int
    percpu: int
    hugetlb: tuple[int, ...] = ()


class Moving(NamedTuple):
    """
    What a task takes along that moves to another memcg (``mc`` of :linux:`mm/memcontrol.c`).

    :ivar source: ``struct mem_cgroup *`` that it leaves
    :ivar target: ``struct mem_cgroup *`` that it enters
    :ivar precharged: pages that the target has charged, and that have not changed their owner
    :ivar moved: pages that have, and that the source has not uncharged
    :ivar moved_swap: swap entries that have. The target has charged pages for them
    """

    source: Address
    target: Address
    precharged: int
    moved: int
    moved_swap: int
