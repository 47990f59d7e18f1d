# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page frames by use
------------------

Every page frame of a node is of exactly one kind. :data:`KINDS` lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from memcg_inspect.model import NodeStat

__all__ = (
    "KINDS",
    "NEVER",
    "NOBODY",
    "UNKNOWN_PAYER",
    "UNUSED",
    "Group",
    "Inventory",
    "Kind",
    "Place",
    "UserPages",
    "Zone",
    "ZoneUse",
    "Zones",
)

#: What the pages of a kind are: free, of user space, of the kernel, or not known.
Group = Literal["free", "user", "kernel", "other", "unknown"]


class Kind(NamedTuple):
    """
    A kind of page frames.

    :ivar group: what its pages are
    :ivar is_charged: whether memcgs can be charged for its pages
    :ivar help: what it means
    """

    group: Group
    is_charged: bool
    help: str


KINDS: dict[str, Kind] = {
    "free": Kind("free", False, "free blocks of the buddy allocator"),
    "free_pcp": Kind("free", False, "free blocks that CPUs keep"),
    "unaccepted": Kind("free", False, "free, and not accepted by the guest yet"),
    "anon": Kind("user", True, "anonymous pages of processes"),
    "file": Kind("user", True, "page cache of files"),
    "shmem": Kind("user", True, "shared memory and files of tmpfs"),
    "secretmem": Kind("user", True, "secret memory, which the kernel itself cannot read"),
    "user": Kind("user", True, "user pages in the swap cache only, or in no mapping yet"),
    "hugetlb": Kind("user", True, "huge pages of hugetlb that are in use"),
    "hugetlb_free": Kind("other", False, "huge pages of hugetlb that are free"),
    "slab": Kind("kernel", True, "slabs"),
    "large_kmalloc": Kind("kernel", True, "kmalloc() of more than a slab holds"),
    "stack": Kind("kernel", True, "kernel stacks"),
    "pagetables": Kind("kernel", True, "page tables of processes"),
    "kernel_pagetables": Kind("kernel", False, "page tables of the kernel"),
    "percpu": Kind("kernel", True, "chunks of percpu memory"),
    "percpu_first": Kind("kernel", False, "static percpu variables, and the first chunk"),
    "vmalloc": Kind("kernel", True, "vmalloc areas"),
    "text": Kind("kernel", True, "code and data of modules, and code of BPF"),
    "zsmalloc": Kind("kernel", True, "compressed pages of zswap and zram"),
    "page_pool": Kind("kernel", False, "buffers of network drivers (page_pool)"),
    "page_frag": Kind("kernel", False, "fragments of socket buffers, which sockets pay for"),
    "huge_zero": Kind("kernel", False, "the huge page of zeroes"),
    "pipe": Kind("kernel", True, "buffers of pipes"),
    "swap_cgroup": Kind("kernel", False, "memcgs that pay for swap entries (up to 6.13)"),
    "trace": Kind("kernel", False, "ftrace: its ring buffers, places to patch, names of tasks"),
    "perf": Kind("kernel", False, "ring buffers of perf that user space maps"),
    "virtqueue": Kind("kernel", False, "rings of virtio devices"),
    "dma_pool": Kind("kernel", False, "pools for coherent DMA in atomic context"),
    "mempool": Kind("kernel", False, "reserve of the block layer for bio integrity"),
    "blk_mq": Kind("kernel", False, "requests of block devices"),
    "kvfree_rcu": Kind("kernel", False, "pages of kvfree_rcu(), which CPUs fill and keep"),
    "hash_table": Kind("kernel", False, "hash tables of the kernel, on machines with one node"),
    "vmcoreinfo": Kind("kernel", False, "notes for crash dumps"),
    "kmem": Kind("kernel", True, "other pages that memcgs are charged for as kernel memory"),
    "memmap": Kind("kernel", False, "the memory map: struct page of all page frames"),
    "page_ext": Kind("kernel", False, "extensions of struct page"),
    "kfence": Kind("kernel", False, "pool of KFENCE"),
    "swiotlb": Kind("kernel", False, "bounce buffers for DMA"),
    "image": Kind("kernel", False, "the kernel: code, data and bss"),
    "crash_kernel": Kind("other", False, "reserved for the crash kernel"),
    "reserved": Kind("kernel", False, "reserved at boot, and never freed"),
    "offline": Kind("other", False, "given back to the hypervisor (balloon)"),
    "guard": Kind("other", False, "guard pages of debug_pagealloc"),
    "hwpoison": Kind("other", False, "pages with errors of the hardware"),
    "unknown": Kind("unknown", False, "allocated, and nothing marks them"),
}

#: Payers that are not addresses of memcgs. In use, and no memcg pays.
NOBODY = 0
#: In use, and of a kind that no memcg can pay for.
NEVER = -1
#: Free memory, and the free part of slabs and percpu memory.
UNUSED = -2
#: Charged to an ``obj_cgroup`` that is not known.
UNKNOWN_PAYER = -3


class Zone(NamedTuple):
    """
    One ``struct zone`` with pages.

    :ivar nid: node
    :ivar number: value of ``enum zone_type``
    :ivar name: its name
    :ivar present: ``present_pages``
    :ivar managed: ``managed_pages``
    :ivar free_blocks: ``free_area[].nr_free``: number of free blocks, by order
    :ivar isolated: free pages of isolated blocks, which ``NR_FREE_PAGES`` leaves out
    :ivar isolates: whether blocks are isolated (``nr_isolate_pageblock``), with free pages or not
    :ivar stats: its counters, by enumerator of ``enum zone_stat_item``, in pages
    :ivar is_locked: whether a CPU holds ``zone->lock``, and so may be changing lists and counters;
        ``None`` if that cannot be told
    """

    nid: int
    number: int
    name: str
    present: int
    managed: int
    free_blocks: tuple[int, ...]
    isolated: int
    isolates: bool
    stats: Mapping[str, NodeStat]
    is_locked: bool | None

    def counter(self, item: str) -> int | None:
        """
        Return a counter, with the changes that CPUs have not added yet.

        :return: ``None`` if the kernel has no such counter
        """
        stat = self.stats.get(item)
        return None if stat is None else sum(stat)


#: Pages that a mark tells, and that zones count.
ZoneUse = Literal["mlocked", "zsmalloc", "unaccepted"]


class Zones(NamedTuple):
    """
    The zones of all nodes, and the pages that they count.

    :ivar zones: the zones that have pages, by node and number
    :ivar names: enumerators of ``enum zone_type`` by value
    :ivar totals: totals of the counters of zones (``vm_zone_stat``) by enumerator of
        ``enum zone_stat_item``
    :ivar sums: sums of ``vm_stat`` over all zones, by the same
    :ivar free: number of free blocks in buddy lists, by node, zone and order
    :ivar pages: pages with a mark, by use, node and zone
    :ivar marks: uses that this kernel marks
    :ivar listed: pages on LRU lists, by node, zone and enumerator of ``enum zone_stat_item``
    :ivar has_generations: whether folios are on lists of the multi-gen LRU, which do not tell
        active ones from others
    """

    zones: Mapping[tuple[int, int], Zone] = MappingProxyType({})
    names: Mapping[int, str] = MappingProxyType({})
    totals: Mapping[str, int] = MappingProxyType({})
    sums: Mapping[str, int] = MappingProxyType({})
    free: Mapping[tuple[int, int, int], int] = MappingProxyType({})
    pages: Mapping[tuple[ZoneUse, int, int], int] = MappingProxyType({})
    marks: frozenset[ZoneUse] = frozenset()
    listed: Mapping[tuple[int, int, str], int] = MappingProxyType({})
    has_generations: bool = False

    def name(self, number: int) -> str:
        """Return the enumerator of ``enum zone_type`` of a value."""
        return self.names.get(number, str(number))


class Place(NamedTuple):
    """
    What page frames are.

    :ivar nid: node
    :ivar zone: value of ``enum zone_type``
    :ivar kind: key of :data:`KINDS`
    :ivar order: order of the block or compound page; ``None`` if it has no meaning
    :ivar cache: name of the cache of a slab
    :ivar caller: function that made a vmalloc area; line of code that allocated pages of no known
        use, on kernels that profile allocations
    :ivar lru: LRU list of user pages: ``active``, ``inactive``, ``multi-gen``, ``unevictable``,
        ``mlocked`` (unevictable since a process locked it), or ``none``
    """

    nid: int
    zone: int
    kind: str
    order: int | None = None
    cache: str | None = None
    caller: str | None = None
    lru: str | None = None


@dataclass
class Inventory:
    """
    All page frames of a machine.

    :ivar zones: the zones that have pages, by node and number
    :ivar pages: number of page frames, by what they are
    :ivar bytes: bytes of these pages, by what they are and who pays: ``struct mem_cgroup *``,
        or one of :data:`NOBODY`, :data:`NEVER`, :data:`UNUSED` and :data:`UNKNOWN_PAYER`
    :ivar holes: page frames of the memory map that are no memory, by node and zone
    :ivar conflicts: page frame number, and the two kinds that claim it
    :ivar memmap: pages of the memory map and of page_ext that the kernel counts; ``None`` if it
        does not count them
    """

    zones: dict[tuple[int, int], Zone] = field(default_factory=dict)
    pages: Counter[Place] = field(default_factory=Counter)
    bytes: Counter[tuple[Place, int]] = field(default_factory=Counter)
    holes: Counter[tuple[int, int]] = field(default_factory=Counter)
    conflicts: list[tuple[int, str, str]] = field(default_factory=list)
    memmap: int | None = None

    def present(self) -> Counter[tuple[int, int]]:
        """Return the page frames found, by node and zone."""
        found: Counter[tuple[int, int]] = Counter()
        for place, pages in self.pages.items():
            found[place.nid, place.zone] += pages
        return found


class UserPages(NamedTuple):
    """
    User pages, by the counters of memcgs that they count in.

    :ivar pages: number of pages by payer (``struct obj_cgroup *``; of user pages up to 7.0
        ``struct mem_cgroup *``), node and enumerator of the counter
    :ivar may_have_collapsed_files: whether the kernel may have put pages of files together to huge
        pages, and has counted that for the wrong memcgs and nodes
    """

    pages: Mapping[tuple[int, int, str], int] = MappingProxyType({})
    may_have_collapsed_files: bool = False
