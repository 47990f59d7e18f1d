# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Data model
----------

Frozen records that all layers share, and the errors. This module imports neither drgn nor any
other module of the package. Addresses are unsigned integers. Amounts are signed integers in the
unit that the record names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

__all__ = (
    "Accounting",
    "Address",
    "CallSite",
    "ChargeStock",
    "Coverage",
    "Features",
    "ImageError",
    "ImageInfo",
    "LruLists",
    "Memcg",
    "MemcgInspectError",
    "NUMA_NO_NODE",
    "Nid",
    "Misplaced",
    "NodeStat",
    "ObjStock",
    "PerNodeCharges",
    "PercpuUsage",
    "Objcg",
    "Running",
    "SlabUsage",
    "Stat",
    "TaskCharge",
    "Transient",
    "Unreadable",
    "Vectors",
    "counted",
)

#: Node of a charge that has none, or whose node is not known. Named as in include/linux/nodemask.h.
NUMA_NO_NODE = -1

#: An address in kernel memory. In JSON it is a hexadecimal string.
Address = Annotated[int, "address"]
#: A node, or :data:`NUMA_NO_NODE`, which is ``null`` in JSON.
Nid = Annotated[int, "nid"]

Accounting = Literal["memcg", "objcg-per-node", "kmem-per-node"]
Follows = Literal["physical", "posted", "both", "neither"]
#: Charges that accounting by node splits.
SplitKind = Literal["percpu", "zswap"]
Unit = Literal["bytes", "pages", "KiB", "references"]


def counted(number: int, what: str) -> str:
    """
    Format a number with its unit: ``1 page``, ``2 pages``, ``1 KiB``.

    :param what: the unit, in the plural
    """
    singular = what[:-1] if abs(number) == 1 and what.endswith("s") else what
    return f"{number:,} {singular}"


class MemcgInspectError(Exception):
    """Base class of errors that are reported to the user in one line."""


class ImageError(MemcgInspectError):
    """The image cannot be opened, or its kernel is not supported."""


@dataclass(frozen=True)
class ImageInfo:
    """
    The image that was read.

    :ivar release: kernel release, as in ``uname -r``
    :ivar source: kind of image
    :ivar nodes: nodes that are online
    :ivar cpus: number of possible CPUs
    :ivar page_size: ``PAGE_SIZE``, in bytes
    :ivar accounting: how the kernel accounts kernel memory
    :ivar debug_info: source of types and symbols, in words
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

    :ivar address: ``struct mem_cgroup *``
    :ivar path: path in the cgroup hierarchy; bytes that are not UTF-8 are escaped
    :ivar cgroup_id: inode number of its cgroup; ``None`` if it could not be read
    :ivar state: ``dying`` if it was removed, see ``css_is_dying()``
    :ivar parent: ``struct mem_cgroup *``; ``None`` for the root
    :ivar payer: ``struct mem_cgroup *`` of the memcg whose counters hold its charges now: itself,
        or its nearest ancestor that is not dying
    :ivar whole: whether all its children could be read
    :ivar offline: whether mem_cgroup_css_offline() has run, which reparents its charges
    """

    address: Address
    path: str
    cgroup_id: int | None
    state: Literal["online", "dying"]
    parent: Address | None
    payer: Address
    whole: bool = True
    offline: bool = False


@dataclass(frozen=True)
class Objcg:
    """
    One ``struct obj_cgroup``.

    :ivar address: ``struct obj_cgroup *``
    :ivar memcg: ``objcg->memcg``
    :ivar nid: node whose ``mem_cgroup_per_node`` holds it; ``None`` on kernels with one objcg
        for all nodes
    :ivar is_root: ``objcg->is_root``: whether it belongs to the root memcg, which is not charged;
        ``False`` on kernels that do not have such obj_cgroups
    :ivar nr_charged_bytes: ``objcg->nr_charged_bytes``: bytes that are charged, not used, and in
        no stock
    :ivar refs: sum of ``refcnt`` over all CPUs; ``None`` if it could not be read
    :ivar memcg_refs: references that the memcg itself holds
    :ivar siblings: the objcgs of the same memcg by node, on kernels that have one per node
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
    One counter of a memcg (``struct memcg_vmstats``), in the unit of its item.

    :ivar state: folded value, descendants included
    :ivar pending: ``state_pending``: flushed by children, not added by the memcg yet
    :ivar percpu: per-CPU changes of the memcg itself that are not flushed yet
    """

    state: int
    pending: int
    percpu: int


class ObjStock(NamedTuple):
    """
    What the object stock of a CPU (``obj_stock``) holds for one objcg.

    :ivar cpu: the CPU
    :ivar slot: index in the stock; 0 on kernels whose stock has one slot (up to 7.1)
    :ivar objcg: ``struct obj_cgroup *``
    :ivar nr_bytes: bytes of charged pages that are not used
    :ivar nid: node of the slab bytes; ``None`` if this slot has none
    :ivar reclaimable: bytes not booked yet as ``NR_SLAB_RECLAIMABLE_B`` of that node
    :ivar unreclaimable: bytes not booked yet as ``NR_SLAB_UNRECLAIMABLE_B`` of that node
    :ivar locked: whether the CPU held the lock of its stock; ``None`` on kernels whose lock does
        not record it
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
    Pages that a CPU has charged to a memcg in advance (``memcg_stock``).

    :ivar cpu: the CPU
    :ivar memcg: ``struct mem_cgroup *``
    :ivar nr_pages: number of pages
    :ivar slot: index in the stock; 0 on kernels whose stock has one slot (up to 6.15)
    """

    cpu: int
    memcg: int
    nr_pages: int
    slot: int = 0


class CallSite(NamedTuple):
    """
    A line of code that allocates memory (``struct alloc_tag``).

    :ivar address: ``struct codetag *``
    :ivar file: source file
    :ivar line: line in the file
    :ivar module: name of the module; ``None`` for the kernel itself
    :ivar function: function that allocates
    :ivar accurate: whether all memory allocated there refers to it (``CODETAG_FLAG_INACCURATE``)
    :ivar counters: ``struct alloc_tag_counters __percpu *``; 0 for none
    :ivar bytes: bytes allocated there and not freed yet; ``None`` if they could not be read
    :ivar calls: number of these allocations
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
        """``file:line``."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Features:
    """
    What a kernel supports, found from its types.

    :ivar items: the counters it keeps, of those that identities need
    :ivar lru_holds_objcg: whether user pages hold a reference to an obj_cgroup (7.2), and not to
        the memcg itself
    :ivar default_hierarchy: whether the memory controller is on cgroup v2
    :ivar caches_objcg: whether tasks cache an obj_cgroup (6.8)
    :ivar large_kmalloc_type: whether large kmallocs have a page type, ``PGTY_large_kmalloc``
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

    :ivar folded: ``pgdat->vm_stat``
    :ivar cpus: changes that CPUs have not folded yet
    """

    folded: int
    cpus: int


class SlabUsage(NamedTuple):
    """
    The slabs of one cache on one node, charged or not.

    :ivar nid: node
    :ivar cache: name of the cache
    :ivar address: ``struct kmem_cache *``
    :ivar reclaimable: whether the objects count as ``NR_SLAB_RECLAIMABLE_B``
    :ivar kfence: whether these are pages of kfence, which no counter of slabs includes
    :ivar size: size of an object in the slab, in bytes
    :ivar charge: bytes charged for an object that is charged
    :ivar slabs: number of slabs
    :ivar pages: number of pages of the slabs
    :ivar objects: objects that fit into the slabs
    :ivar inuse: objects taken, those in per-CPU caches included; 0 for pages of kfence
    :ivar charged: objects charged to a memcg; ``None`` if that could not be read
    """

    nid: int
    cache: str
    address: Address
    reclaimable: bool
    kfence: bool
    size: int
    charge: int
    slabs: int
    pages: int
    objects: int
    inuse: int
    charged: int | None

    @property
    def charged_bytes(self) -> int | None:
        """Bytes charged for all charged objects; ``None`` if that could not be read."""
        return None if self.charged is None else self.charged * self.charge


class PercpuUsage(NamedTuple):
    """
    Percpu memory on one node, charged or not.

    :ivar nid: node
    :ivar pages: pages that back units of possible CPUs, static ones included
    :ivar allocated: bytes of them that are allocated
    :ivar charged: bytes of them that a memcg pays for
    """

    nid: Nid
    pages: int
    allocated: int
    charged: int


class LruLists(NamedTuple):
    """
    Pages on LRU lists.

    :ivar pages: pages found, by payer (0 for none), node and name of the list's counter
    :ivar sizes: pages claimed, by memcg and node, then by counter, then by place. Counters of 0
        are left out, and so are memcgs and nodes whose counters could not be read.
    :ivar by_generation: whether the pages are listed by generation of the multi-gen LRU
    """

    pages: Mapping[tuple[int, int, str], int]
    sizes: Mapping[tuple[int, int], Mapping[str, Mapping[str, int]]]
    by_generation: bool


class Vectors(NamedTuple):
    """
    Vectors of obj_cgroup pointers (``slab->obj_exts``) of the slabs of one node.

    Vectors inside their own slab are not counted.

    :ivar total: number of vectors
    :ivar elsewhere: number of those on another node
    :ivar dangling: (vector, its node, ``struct slab *``) of those in memory that is not allocated,
        or that is not of ``kmalloc()``
    """

    total: int
    elsewhere: int = 0
    dangling: tuple[tuple[int, int, int], ...] = ()


class Misplaced(NamedTuple):
    """
    A charge whose obj_cgroup belongs to another node than its memory.

    :ivar kind: kind of the charge
    :ivar address: address of the object
    :ivar objcg: ``struct obj_cgroup *``
    :ivar charged_nid: node of the obj_cgroup
    :ivar backing_nid: node of the memory
    :ivar bytes: bytes of the charge
    """

    kind: str
    address: int
    objcg: int
    charged_nid: int | None
    backing_nid: int
    bytes: int


class PerNodeCharges(NamedTuple):
    """
    Differences between the rules of accounting by node; see
    :mod:`memcg_inspect.checks.pernode`.

    :ivar posted: bytes that the posted rule books, less bytes that the physical rule books; by kind
        of charge, then by (``struct obj_cgroup *``, node)
    :ivar straddling: the charges for which the rules differ
    :ivar misplaced: charges that by both rules are on another node than their obj_cgroup
    """

    posted: Mapping[SplitKind, Mapping[tuple[int, int], int]]
    straddling: Sequence[Misplaced]
    misplaced: Sequence[Misplaced]


class Running(NamedTuple):
    """
    What a CPU was running when it was stopped.

    :ivar cpu: the CPU
    :ivar pid: PID of the task; 0 for the idle task
    :ivar comm: name of the task
    :ivar functions: functions on its stack, innermost first; empty in user mode. If the stack
        could not be unwound, all functions that have an address on it.
    :ivar busy: whether it was in the kernel, where it may have been charging memory
    :ivar pages: number of pages of all folios that its stack and registers point to; ``None`` if
        unknown
    """

    cpu: int
    pid: int
    comm: str
    functions: tuple[str, ...]
    busy: bool
    pages: int | None = None


class Transient(NamedTuple):
    """
    An object that is being freed, and that may still hold a reference to an obj_cgroup.

    :ivar what: kind of the object, in words
    :ivar address: address of the object
    """

    what: str
    address: int


class TaskCharge(NamedTuple):
    """
    The memcg of a task, and the obj_cgroup that it has cached.

    :ivar address: ``struct task_struct *``
    :ivar pid: thread ID
    :ivar comm: name of the task
    :ivar memcg: ``struct mem_cgroup *``
    :ivar objcgs: ``task->objcg``: one ``struct obj_cgroup *``, or one for each node
    :ivar stale: whether CURRENT_OBJCG_UPDATE_FLAG is set
    :ivar is_user: whether it has an mm
    :ivar tgid: pid of its thread group leader
    """

    address: int
    pid: int
    comm: str
    memcg: int
    objcgs: tuple[int, ...]
    stale: bool
    is_user: bool
    tgid: int = 0


@dataclass(frozen=True)
class Unreadable:
    """
    One object that could not be read.

    :ivar what: kind of the object, in words
    :ivar address: its address
    :ivar reason: why it could not be read
    """

    what: str
    address: Address
    reason: str


@dataclass
class Coverage:
    """
    How many objects of one kind could be read.

    :ivar read: number of objects that were read
    :ivar unreadable: number of objects that could not be read
    :ivar examples: the :data:`KEEP` unreadable objects with the lowest addresses, sorted
    """

    read: int = 0
    unreadable: int = 0
    examples: list[Unreadable] = field(default_factory=list)

    #: Number of examples kept.
    KEEP = 10

    def miss(self, what: str, address: int, reason: str) -> None:
        """Count one object that could not be read."""
        self.unreadable += 1
        if len(self.examples) < self.KEEP or address <= self.examples[-1].address:
            self._keep([Unreadable(what, address, reason)])

    def add(self, other: Coverage) -> None:
        """Add another coverage. The order of additions makes no difference."""
        self.read += other.read
        self.unreadable += other.unreadable
        self._keep(other.examples)

    def _keep(self, more: Sequence[Unreadable]) -> None:
        examples = sorted([*self.examples, *more], key=lambda e: (e.address, e.what, e.reason))
        self.examples = examples[: self.KEEP]
