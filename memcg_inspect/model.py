# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The nouns of the project
------------------------

Plain, frozen records that every floor shares, and the errors. Nothing here
knows drgn, a kernel or a terminal. Addresses are unsigned integers, amounts are
signed integers in the unit that the record names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = (
    "Accounting",
    "CallSite",
    "ChargeStock",
    "Coverage",
    "Evidence",
    "Features",
    "Finding",
    "Identity",
    "ImageError",
    "ImageInfo",
    "LruLists",
    "Memcg",
    "MemcgInspectError",
    "NUMA_NO_NODE",
    "Misplaced",
    "Moved",
    "NodeStat",
    "ObjStock",
    "PerNodeCharges",
    "PercpuUsage",
    "Objcg",
    "Report",
    "Row",
    "Running",
    "Skew",
    "SlabUsage",
    "Stat",
    "TaskCharge",
    "Transient",
    "Unreadable",
    "Vectors",
    "counted",
)

#: A node that is not known, or a charge that has none; the kernel's own name for it.
NUMA_NO_NODE = -1

Accounting = Literal["memcg", "objcg-per-node", "kmem-per-node"]
RowStatus = Literal["exact", "differs", "in-flight", "moving", "unverifiable"]
IdentityStatus = Literal["exact", "findings", "unverifiable", "not-kept", "moving"]
Verdict = Literal["exact", "findings", "incomplete", "moving"]
Follows = Literal["physical", "posted", "both", "neither"]
#: Charges that accounting by node splits.
SplitKind = Literal["percpu", "zswap"]
Unit = Literal["bytes", "pages", "KiB", "references"]


def counted(number: int, what: str) -> str:
    """
    Write a number of things: ``1 page``, ``2 pages``, ``1 KiB``.

    :param what: in the plural, as units are
    """
    singular = what[:-1] if abs(number) == 1 and what.endswith("s") else what
    return f"{number:,} {singular}"


class MemcgInspectError(Exception):
    """Anything the user can be told in one line."""


class ImageError(MemcgInspectError):
    """The image cannot be opened or is not one this toolkit can read."""


@dataclass(frozen=True)
class ImageInfo:
    """
    What was looked at.

    :ivar debug_info: where its types come from, in words
    """

    release: str
    source: Literal["vmcore", "live", "qemu"]
    nodes: tuple[int, ...]
    cpus: int
    page_size: int
    accounting: Accounting
    debug_info: str = ""


@dataclass(frozen=True)
class Memcg:
    """
    One ``struct mem_cgroup``.

    :ivar payer: address of the memcg whose own counters hold this one's charges
        today: itself, or its nearest ancestor that is not dying.
    :ivar cgroup_id: ``None`` if it could not be read
    :ivar whole: whether all its children could be read
    :ivar offline: whether it was taken offline: what it was charged for is its parent's
    """

    address: int
    path: str
    cgroup_id: int | None
    state: Literal["online", "dying"]
    parent: int | None
    payer: int
    whole: bool = True
    offline: bool = False


@dataclass(frozen=True)
class Objcg:
    """
    One ``struct obj_cgroup``.

    :ivar memcg: ``objcg->memcg`` as it stands.
    :ivar nid: node whose ``mem_cgroup_per_node`` holds it; ``None`` where the
        kernel keeps one objcg for all nodes.
    :ivar nr_charged_bytes: bytes charged, not used and in no CPU's stock.
    :ivar refs: references held, ``refcnt`` summed over CPUs; ``None`` if not read
    :ivar memcg_refs: how many of them are the memcg's own
    :ivar siblings: the objcgs that were made with it, by node, where the kernel keeps them
    """

    address: int
    memcg: int
    nid: int | None
    is_root: bool
    nr_charged_bytes: int
    refs: int | None = None
    memcg_refs: int = 0
    siblings: tuple[int, ...] = ()


class Stat(NamedTuple):
    """
    One counter, in the unit of its item.

    :ivar state: what a reader sees: folded, descendants included
    :ivar pending: what children handed up and the memcg has not added yet
    :ivar percpu: what its own CPUs have not folded yet
    """

    state: int
    pending: int
    percpu: int


class ObjStock(NamedTuple):
    """
    What a CPU's object stock holds for one objcg.

    :ivar objcg: ``struct obj_cgroup *``
    :ivar nr_bytes: bytes of charged pages not handed out
    :ivar nid: node of the slab bytes; ``None`` if this slot has none
    :ivar reclaimable: bytes not yet booked as ``NR_SLAB_RECLAIMABLE_B`` of that node
    :ivar unreclaimable: bytes not yet booked as ``NR_SLAB_UNRECLAIMABLE_B`` of that node
    :ivar locked: whether the CPU was in the middle of using its stock; ``None`` if its lock does
        not tell
    """

    cpu: int
    slot: int
    objcg: int
    nr_bytes: int
    nid: int | None
    reclaimable: int
    unreclaimable: int
    locked: bool | None


class ChargeStock(NamedTuple):
    """
    Pages that a CPU has charged to a memcg in advance.

    :ivar memcg: ``struct mem_cgroup *``
    """

    cpu: int
    memcg: int
    nr_pages: int
    slot: int = 0


class CallSite(NamedTuple):
    """
    A place in the code that allocates memory, ``struct alloc_tag``.

    :ivar address: ``struct codetag *``
    :ivar module: ``None`` for the kernel itself
    :ivar accurate: whether the kernel could refer to it from all that was allocated there
    :ivar counters: its ``struct alloc_tag_counters __percpu *``; 0 for none
    :ivar bytes: what was allocated there and not freed yet; ``None`` if it was not read
    :ivar calls: how many allocations that is
    """

    address: int
    file: str
    line: int
    module: str | None
    function: str
    accurate: bool
    counters: int
    bytes: int | None
    calls: int | None

    @property
    def site(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Features:
    """
    What a kernel keeps, found from its types.

    :ivar items: counters that it keeps, of those that identities ask for
    :ivar lru_holds_objcg: whether user pages hold a reference to an obj_cgroup (7.2); to the
        memcg itself before
    :ivar default_hierarchy: whether the memory controller is on cgroup v2
    :ivar caches_objcg: whether tasks cache an obj_cgroup (6.8)
    :ivar large_kmalloc_type: whether large kmallocs can be told from other compound pages
    :ivar zswap: whether the kernel has zswap
    """

    items: frozenset[str]
    lru_holds_objcg: bool
    default_hierarchy: bool
    caches_objcg: bool
    large_kmalloc_type: bool
    zswap: bool


class NodeStat(NamedTuple):
    """
    A counter of a node, in pages.

    :ivar cpus: what CPUs have not folded yet
    """

    folded: int
    cpus: int


class SlabUsage(NamedTuple):
    """
    The slabs of one cache on one node, whoever pays.

    :ivar address: ``struct kmem_cache *``
    :ivar kfence: whether these are pages of kfence, which no counter of slabs knows
    :ivar size: bytes that an object takes
    :ivar charge: bytes that are charged for an object, if they are
    :ivar objects: how many objects there is room for
    :ivar inuse: how many are taken, those in per-CPU caches included; pages of kfence say 0
    :ivar charged: how many are charged to a memcg; ``None`` if that could not be read
    """

    nid: int
    cache: str
    address: int
    reclaimable: bool
    kfence: bool
    size: int
    charge: int
    slabs: int
    pages: int
    objects: int
    inuse: int
    charged: int | None


class PercpuUsage(NamedTuple):
    """
    Percpu memory on one node, whoever pays.

    :ivar pages: pages that back units of possible CPUs, static ones included
    :ivar allocated: bytes of them that are allocated
    :ivar charged: bytes of them that a memcg pays for
    """

    nid: int
    pages: int
    allocated: int
    charged: int


class LruLists(NamedTuple):
    """
    Pages on LRU lists.

    :ivar pages: found, by payer (0 for nobody), node and the name of the list's counter
    :ivar sizes: claimed, by memcg and node, then by counter, then by place; counters of 0 are
        left out, and memcgs and nodes whose counters could not be read
    :ivar by_generation: whether folios of the multi-gen LRU are told apart by generation
    """

    pages: Mapping[tuple[int, int, str], int]
    sizes: Mapping[tuple[int, int], Mapping[str, Mapping[str, int]]]
    by_generation: bool


class Vectors(NamedTuple):
    """
    Vectors of obj_cgroups that lie outside their slabs, for the slabs of one node.

    :ivar total: how many there are
    :ivar elsewhere: (vector, its node, ``struct slab *``) of those on another node
    """

    total: int
    elsewhere: tuple[tuple[int, int, int], ...]


class Misplaced(NamedTuple):
    """
    A charge whose obj_cgroup is of another node than the memory.

    :ivar charged_nid: node of the obj_cgroup
    :ivar backing_nid: node of the memory
    """

    kind: str
    address: int
    objcg: int
    charged_nid: int | None
    backing_nid: int
    bytes: int


class PerNodeCharges(NamedTuple):
    """
    Where the rules of accounting by node differ; see :mod:`memcg_inspect.checks.pernode`.

    :ivar posted: by kind of charge, then by (``struct obj_cgroup *``, node): the bytes that the
        posted rule books there, less those that the physical rule books
    :ivar straddling: the charges that this comes from
    :ivar misplaced: charges on another node than their obj_cgroup by either rule
    """

    posted: Mapping[SplitKind, Mapping[tuple[int, int], int]]
    straddling: Sequence[Misplaced]
    misplaced: Sequence[Misplaced]


class Running(NamedTuple):
    """
    What a CPU was doing when it stopped.

    :ivar functions: on its stack, innermost first; empty in user mode. Where the stack could not
        be unwound, all that have an address on it
    :ivar busy: whether it was in the kernel, and may have left something half done
    :ivar pages: of all folios that its stack and its registers point to; ``None`` if not known
    """

    cpu: int
    pid: int
    comm: str
    functions: tuple[str, ...]
    busy: bool
    pages: int | None = None


class Transient(NamedTuple):
    """
    Something that is being freed, and may still hold a reference to an obj_cgroup, or not
    any more.
    """

    what: str
    address: int


class TaskCharge(NamedTuple):
    """
    Which memcg a task is in, and what it has cached.

    :ivar memcg: ``struct mem_cgroup *``
    :ivar objcgs: cached ``struct obj_cgroup *``: one, or one for each node
    :ivar stale: whether the update flag is set
    :ivar is_user: whether it has an address space of its own
    :ivar tgid: process that it is a thread of
    """

    address: int
    pid: int
    comm: str
    memcg: int
    objcgs: tuple[int, ...]
    stale: bool
    is_user: bool
    tgid: int = 0


class Moved(NamedTuple):
    """
    How far a row moved between the looks that had it, in its unit.

    :ivar looks: how many looks had it
    :ivar found: most that was found less the least
    :ivar claimed: most that was claimed less the least
    :ivar least, most: range of the differences
    """

    looks: int
    found: int
    claimed: int
    least: int
    most: int


@dataclass(frozen=True)
class Row:
    """
    One equation of one identity.

    :ivar found: what the walk of the objects added up to, by source.
    :ivar claimed: what the kernel's counters say, by place; ``None`` where it
        could not be read.
    :ivar hierarchy: the counter as userspace reads it, descendants included
        (folded), where the row is about such a counter.
    :ivar moved: how far it moved between looks, where its status is ``moving``
    """

    identity: str
    memcg: int | None
    objcg: int | None
    nid: int | None
    item: str
    unit: Unit
    status: RowStatus
    found: Mapping[str, int]
    claimed: Mapping[str, int] | None
    reason: str | None = None
    hierarchy: int | None = None
    moved: Moved | None = None

    @property
    def difference(self) -> int | None:
        """``claimed`` less ``found``, in :attr:`unit`."""
        if self.claimed is None:
            return None
        return sum(self.claimed.values()) - sum(self.found.values())


@dataclass(frozen=True)
class Identity:
    """The outcome of one identity over the whole image."""

    name: str
    status: IdentityStatus
    rows: int
    differing: int
    reason: str | None = None


@dataclass(frozen=True)
class Skew:
    """Charges of one memcg and kind, by charged node and backing node."""

    memcg: int
    kind: str
    charged_nid: int | None
    backing_nid: int
    bytes: int
    count: int


@dataclass(frozen=True)
class Evidence:
    """One object that shows, or may be the cause of, a finding."""

    address: int
    kind: str
    nid: int | None = None
    bytes: int | None = None
    cache: str | None = None
    page: int | None = None
    objcg: int | None = None
    memcg: int | None = None
    note: str | None = None


@dataclass(frozen=True)
class Finding:
    """One place where an identity fails or the kernel's own rule is broken."""

    identity: str
    kind: str
    memcg: int | None
    objcg: int | None
    nid: int | None
    item: str
    unit: Unit
    difference: int | None
    what: str
    evidence_is: Literal["proof", "candidates"]
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class Unreadable:
    """One thing that should have been read and could not be."""

    what: str
    address: int
    reason: str


@dataclass
class Coverage:
    """
    How much of one kind of thing could be read.

    :ivar read: number of things that were read
    :ivar unreadable: number of things that could not be read
    :ivar examples: the :data:`KEEP` of the latter with the lowest addresses, sorted
    """

    read: int = 0
    unreadable: int = 0
    examples: list[Unreadable] = field(default_factory=list)

    #: Number of examples kept.
    KEEP = 10

    def miss(self, what: str, address: int, reason: str) -> None:
        """Count one thing that could not be read."""
        self.unreadable += 1
        if len(self.examples) < self.KEEP or address <= self.examples[-1].address:
            self._keep([Unreadable(what, address, reason)])

    def add(self, other: Coverage) -> None:
        """Add what another one has counted. The order of additions makes no difference."""
        self.read += other.read
        self.unreadable += other.unreadable
        self._keep(other.examples)

    def _keep(self, more: Sequence[Unreadable]) -> None:
        examples = sorted([*self.examples, *more], key=lambda e: (e.address, e.what, e.reason))
        self.examples = examples[: self.KEEP]


@dataclass(frozen=True)
class Report:
    """
    Everything one audit says.

    :ivar follows: which rule of per-node accounting the counters follow, by kind of memory;
        ``None`` on kernels without it
    :ivar slab_usage: slab memory by node and cache, whoever pays
    :ivar percpu_usage: percpu memory by node, whoever pays
    :ivar notes: why parts of the image could not be read, and what to do about it
    :ivar looks: how often it was looked at; what holds still, once
    :ivar interrupted: whether it was cut short
    """

    image: ImageInfo
    verdict: Verdict
    memcgs: tuple[Memcg, ...]
    identities: tuple[Identity, ...]
    rows: tuple[Row, ...]
    skew: tuple[Skew, ...]
    findings: tuple[Finding, ...]
    coverage: Mapping[str, Coverage]
    timings: Mapping[str, float]
    follows: Mapping[str, Follows] | None = None
    notes: tuple[str, ...] = ()
    slab_usage: tuple[SlabUsage, ...] = ()
    percpu_usage: tuple[PercpuUsage, ...] = ()
    looks: int = 1
    interrupted: bool = False
