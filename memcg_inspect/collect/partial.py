# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Partial result of a range of page frames
----------------------------------------

A :class:`Partial` is plain data: it can be pickled, so a range can be read by another process or
another machine. Merging is associative and commutative.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from memcg_inspect.checks.ledger import Amount, Entry, Ledger
from memcg_inspect.checks.profile import Use
from memcg_inspect.checks.sockets import SockRemainder, SockUsage, UnknownSock
from memcg_inspect.collect.slab_tally import SlabTally
from memcg_inspect.linux.fs.file_table import OpenFile
from memcg_inspect.linux.mm.mm_types import LruFlags
from memcg_inspect.model import Coverage, FreedPage, NodeUse, Vectors
from memcg_inspect.model_freeing import Transient
from memcg_inspect.model_pages import ZoneUse

__all__ = ("Partial", "merged")


@dataclass
class Partial:
    """
    Sums, coverage and evidence from a range of page frames.

    :ivar start: first page frame
    :ivar ledger: charges
    :ivar coverage: how much could be read, by subject
    :ivar transients: objects that are being freed, with the ``struct obj_cgroup *`` to which
        each can hold a reference
    :ivar vectors: number of vectors of obj_cgroups outside their slabs, by node of the slab
    :ivar vectors_elsewhere: number of those on another node, by node of the slab
    :ivar vectors_dangling: (node of the slab, vector, its node, ``struct slab *``) of those in
        memory that is not of ``kmalloc()``
    :ivar sockets: sockets whose protocols account memory, by ``struct mem_cgroup *``
    :ivar sock_remainders: by ``struct mem_cgroup *``, those that have not charged whole pages
    :ivar unknown_socks: by ``struct mem_cgroup *``, why the memory of others is not known
    :ivar groups: groups of inotify and fanotify, by ``struct mem_cgroup *``
    :ivar released: memcgs that were released and are not freed yet, by the parent,
        ``struct mem_cgroup *``
    :ivar slabs: slabs, by node and cache
    :ivar large_kmalloc: pages of large kmallocs, by node
    :ivar compound: charged compound pages, ``struct page *``, that are large kmallocs if no other
        owner is found: their charge, and bytes
    :ivar unplaced: pages of a running kernel, ``struct page *``, of no use that was known when the
        owners of pages were read: their charge, and bytes
    :ivar freed: free pages that are still charged as kernel memory
    :ivar files: files that can own such pages
    :ivar node_pages: pages that nodes count, charged or not, by use and node
    :ivar zone_free: free blocks in buddy lists, by node, zone and order
    :ivar zone_pages: pages that zones count, by use, node and zone
    :ivar lru: pages on LRU lists, by payer (0 if not charged), node, zone and flags
    :ivar user_pages: pages that count in counters of user pages, by payer, node and item
    :ivar hugetlb: pages of huge pages that are charged, by ``struct hugetlb_cgroup *``, order, node
    :ivar uses: references to call sites
    :ivar uncharged: objects with a call site that no memcg pays for, of caches that always account,
        by ``struct kmem_cache *`` and ``struct codetag *``
    :ivar unnamed: why the name of a cache could not be read, by ``struct kmem_cache *``
    """

    start: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    coverage: defaultdict[str, Coverage] = field(default_factory=lambda: defaultdict(Coverage))
    transients: set[tuple[int, Transient]] = field(default_factory=set)
    vectors: Counter[int] = field(default_factory=Counter)
    vectors_elsewhere: Counter[int] = field(default_factory=Counter)
    vectors_dangling: set[tuple[int, int, int, int]] = field(default_factory=set)
    sockets: Counter[int] = field(default_factory=Counter)
    sock_remainders: set[tuple[int, SockRemainder]] = field(default_factory=set)
    unknown_socks: set[tuple[int, UnknownSock]] = field(default_factory=set)
    groups: Counter[int] = field(default_factory=Counter)
    released: Counter[int] = field(default_factory=Counter)
    slabs: SlabTally = field(default_factory=SlabTally)
    large_kmalloc: Counter[int] = field(default_factory=Counter)
    node_pages: Counter[tuple[NodeUse, int]] = field(default_factory=Counter)
    compound: dict[int, tuple[Entry, int]] = field(default_factory=dict)
    unplaced: dict[int, tuple[Entry, int]] = field(default_factory=dict)
    freed: set[FreedPage] = field(default_factory=set)
    files: set[OpenFile] = field(default_factory=set)
    zone_free: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    zone_pages: Counter[tuple[ZoneUse, int, int]] = field(default_factory=Counter)
    lru: Counter[tuple[int, int, int, LruFlags]] = field(default_factory=Counter)
    user_pages: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    hugetlb: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    uses: dict[Use, Amount] = field(default_factory=dict)
    uncharged: Counter[tuple[int, int]] = field(default_factory=Counter)
    unnamed: dict[int, str] = field(default_factory=dict)

    def use(self, use: Use, size: int, calls: int) -> None:
        """Add *calls* allocations, of *size* bytes in total, that refer to a call site."""
        self.uses[use] = self.uses.get(use, Amount(0, 0)).plus(Amount(size, calls))

    def merge(self, other: Partial) -> None:
        """Add another range. Both must be of the same image and have no page frame in common."""
        self.start = min(self.start, other.start)
        self.ledger.merge(other.ledger)
        for subject, coverage in other.coverage.items():
            self.coverage[subject].add(coverage)
        self.transients |= other.transients
        self.vectors += other.vectors
        self.vectors_elsewhere += other.vectors_elsewhere
        self.vectors_dangling |= other.vectors_dangling
        self.sockets += other.sockets
        self.sock_remainders |= other.sock_remainders
        self.unknown_socks |= other.unknown_socks
        self.groups += other.groups
        self.released += other.released
        self.slabs.merge(other.slabs)
        self.large_kmalloc += other.large_kmalloc
        self.node_pages += other.node_pages
        self.compound |= other.compound
        self.unplaced |= other.unplaced
        self.freed |= other.freed
        self.files |= other.files
        self.zone_free += other.zone_free
        self.zone_pages += other.zone_pages
        self.lru += other.lru
        self.user_pages += other.user_pages
        self.hugetlb += other.hugetlb
        for use, amount in other.uses.items():
            self.use(use, amount.bytes, amount.charges)
        self.uncharged += other.uncharged
        self.unnamed |= other.unnamed

    def transients_by_objcg(self) -> dict[int, list[Transient]]:
        """Return the objects that are being freed by ``struct obj_cgroup *``."""
        found: dict[int, list[Transient]] = {}
        for objcg, transient in sorted(self.transients, key=lambda pair: pair[1].address):
            found.setdefault(objcg, []).append(transient)
        return found

    def sockets_by_memcg(self) -> dict[int, SockUsage]:
        """Return the sockets whose protocols account memory by ``struct mem_cgroup *``."""
        remainders: defaultdict[int, list[SockRemainder]] = defaultdict(list)
        for memcg, remainder in sorted(self.sock_remainders):
            remainders[memcg].append(remainder)
        unknown: defaultdict[int, list[UnknownSock]] = defaultdict(list)
        for memcg, sock in sorted(self.unknown_socks):
            unknown[memcg].append(sock)
        return {
            memcg: SockUsage(total, tuple(remainders[memcg]), tuple(unknown[memcg]))
            for memcg, total in self.sockets.items()
        }

    def vectors_by_node(self) -> dict[int, Vectors]:
        """Return the vectors outside their slabs by node of the slab."""
        dangling = sorted(self.vectors_dangling, key=lambda found: found[3])
        return {
            nid: Vectors(
                total,
                self.vectors_elsewhere[nid],
                tuple(found[1:] for found in dangling if found[0] == nid),
            )
            for nid, total in self.vectors.items()
        }


def merged(partials: Iterable[Partial]) -> Partial:
    """
    Merge ranges in the order of their page frames.

    The order makes no difference to sums. It determines the order of keys in dictionaries.
    """
    total, *others = sorted(partials, key=lambda partial: partial.start)
    for partial in others:
        total.merge(partial)
    return total
