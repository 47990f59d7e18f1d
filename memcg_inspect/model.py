# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Data model
----------

Frozen records that all layers share, and the errors. This module imports neither drgn nor any
other layer of the package. Addresses are unsigned integers. Amounts are signed integers in the
unit that the record names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

__all__ = (
    "Accounting",
    "Address",
    "Allowance",
    "CallSite",
    "ChargeStock",
    "Coverage",
    "CssRefs",
    "FreedPage",
    "Held",
    "HeldKind",
    "ImageError",
    "ImageInfo",
    "LruLists",
    "Memcg",
    "MemcgInspectError",
    "Misplaced",
    "NUMA_NO_NODE",
    "Nid",
    "NodeStat",
    "NodeUse",
    "Nodes",
    "ObjStock",
    "Objcg",
    "ObjcgSet",
    "PagesOfArea",
    "PartialArea",
    "PerNodeCharges",
    "PercpuUsage",
    "Running",
    "SlabUsage",
    "StackRef",
    "Stat",
    "Unreadable",
    "Vectors",
    "counted",
    "first_of",
)

#: Node of a charge that has none, or whose node is not known. Named as in include/linux/nodemask.h.
NUMA_NO_NODE = -1

#: Names in a list that says how many more there are.
_MOST_NAMES = 3

#: An address in kernel memory. In JSON it is a hexadecimal string.
Address = Annotated[int, "address"]
#: A node, or :data:`NUMA_NO_NODE`, which is ``null`` in JSON.
Nid = Annotated[int, "nid"]

Accounting = Literal["memcg", "objcg-per-node", "kmem-per-node"]
#: Members of a memcg, or of ``struct mem_cgroup_per_node``, that refer to obj_cgroups.
ObjcgMember = Literal["objcg", "orig_objcg", "objcg_list"]
Follows = Literal["physical", "posted", "both", "neither"]
#: Charges that accounting by node splits.
SplitKind = Literal["percpu", "zswap"]
#: Memory that a kernel can be told not to charge.
NotAccounted = Literal["kernel memory", "BPF", "sockets"]
Unit = Literal["bytes", "pages", "KiB", "references"]


def counted(number: int, what: str) -> str:
    """
    Format a number with its unit: ``1 page``, ``2 pages``, ``1 KiB``.

    :param what: the unit, in the plural
    """
    singular = what[:-1] if abs(number) == 1 and what.endswith("s") else what
    return f"{number:,} {singular}"


def first_of(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are: ``a, b, c and 2 more``."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


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
    :ivar host: name of the machine, as in ``uname -n``; empty if it could not be read
    """

    release: str
    source: Literal["vmcore", "live", "qemu"]
    nodes: tuple[int, ...]
    cpus: int
    page_size: int
    accounting: Accounting
    debug_info: str = ""
    host: str = ""


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


class ObjcgPlace(NamedTuple):
    """
    A pointer to an obj_cgroup in a memcg.

    :ivar memcg: ``struct mem_cgroup *``
    :ivar nid: node of the ``mem_cgroup_per_node`` that has it; ``None`` on kernels with one objcg
        for all nodes
    :ivar member: ``objcg``, ``orig_objcg`` or ``objcg_list``
    """

    memcg: Address
    nid: Nid | None
    member: ObjcgMember


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
    :ivar set: ``struct obj_cgroup_set *``, on kernels that account kernel memory by node; else 0
    :ivar places: where memcgs refer to it
    """

    address: int
    memcg: int
    nid: int | None
    is_root: bool
    nr_charged_bytes: int
    refs: int | None = None
    memcg_refs: int = 0
    siblings: tuple[int, ...] = ()
    set: int = 0
    places: tuple[ObjcgPlace, ...] = ()


class ObjcgSet(NamedTuple):
    """
    One ``struct obj_cgroup_set``: the objcgs that were made for one memcg.

    :ivar address: ``struct obj_cgroup_set *``
    :ivar refs: ``refcnt``
    :ivar entries: ``struct obj_cgroup *`` by node; 0 where the objcg was released
    """

    address: int
    refs: int
    entries: Mapping[int, int]


class CssRefs(NamedTuple):
    """
    References to one memcg, and holders of them.

    :ivar refs: number of all references, ``css.refcnt``
    :ivar id: ``memcg->id.id``, which swap entries keep
    :ivar id_refs: ``memcg->id.ref``. As long as there are any, they hold one reference together.
    :ivar is_online: whether the memcg is online (``CSS_ONLINE``), which holds one of *id_refs*
    :ivar base: references of the memcg itself, which its removal drops
    :ivar css_sets: ``struct css_set *`` of tasks in the memcg, dead tasks included; each holds one
    :ivar mms: ``struct mm_struct *`` on the list of the multi-gen LRU; each holds one
    :ivar writebacks: ``struct bdi_writeback *``; each holds one
    :ivar events: number of events of cgroup v1; each holds one
    :ivar whole: whether all lists of holders could be read
    """

    refs: int
    id: int
    id_refs: int
    is_online: bool
    base: int
    css_sets: tuple[int, ...] = ()
    mms: tuple[int, ...] = ()
    writebacks: tuple[int, ...] = ()
    events: int = 0
    whole: bool = True


class Stat(NamedTuple):
    """
    One counter of a memcg (``struct memcg_vmstats``), in the unit of its item.

    :ivar state: folded value, descendants included
    :ivar pending: ``state_pending``: flushed by children, not added by the memcg yet
    :ivar percpu: per-CPU changes of the memcg itself that are not flushed yet
    :ivar local: ``state_local``: folded value, descendants excluded; ``None`` on kernels without it
    """

    state: int
    pending: int
    percpu: int
    local: int | None = None


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
    :ivar nr_pages: number of pages. A slot that has none can still refer to the memcg (up to 6.15).
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

    @property
    def place(self) -> str:
        """``file:line [module] function()``."""
        module = f" [{self.module}]" if self.module else ""
        return f"{self.site}{module} {self.function}()"


class NodeStat(NamedTuple):
    """
    A counter of a node, in pages.

    :ivar folded: ``pgdat->vm_stat``
    :ivar cpus: changes that CPUs have not folded yet
    """

    folded: int
    cpus: int


class Nodes(NamedTuple):
    """
    What the kernel keeps for all nodes together.

    :ivar totals: totals of the counters of nodes (``vm_node_stat``) by enumerator
    :ivar with_memory: nodes that have memory (``N_MEMORY``); ``None`` if they are not known
    :ivar unsteady: nodes that may have had no memory for a time
    :ivar vmalloc_pages: ``nr_vmalloc_pages``; ``None`` if the kernel counts them by node
    :ivar vmalloc_restored: whether the kernel before this one may have handed over vmalloc areas
    :ivar writeback_by_nfs: whether an NFS client may count pages in ``NR_WRITEBACK`` of nodes only
    """

    totals: Mapping[str, int] = MappingProxyType({})
    with_memory: frozenset[int] | None = None
    unsteady: frozenset[int] = frozenset()
    vmalloc_pages: int | None = None
    vmalloc_restored: bool = False
    writeback_by_nfs: bool = False


#: What nodes count pages for. They may or may not count the pages of stacks of unknown users.
NodeUse = Literal["table", "vmalloc", "stack", "unknown stack"]


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
    :ivar accounts: whether the cache always accounts (``SLAB_ACCOUNT``)
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
    accounts: bool = False

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


HeldKind = Literal[
    "memcg", "objcg", "object", "cache", "kmem", "folio", "batch", "zswap", "percpu", "call site"
]


class Held(NamedTuple):
    """
    Something that is charged, that pays, or that counts, and to which a stack or a register points.

    :ivar kind: ``memcg`` (a ``struct mem_cgroup`` or one of its ``struct mem_cgroup_per_node``),
        ``objcg``, ``object`` (of a slab), ``cache`` (a ``struct kmem_cache``), ``kmem`` (a block of
        pages with MEMCG_DATA_KMEM), ``folio`` (other pages), ``batch`` (pages that are uncharged
        together, ``struct uncharge_gather``), ``zswap`` (a ``struct zswap_entry`` that is being
        stored or freed), ``percpu`` (an allocation of that size), ``call site`` (``struct
        codetag``)
    :ivar address: ``struct page *`` of pages, bytes for each CPU of a percpu allocation, or its own
    :ivar payer: ``struct mem_cgroup *`` or ``struct obj_cgroup *`` that it is, or that pays for
        it; 0 if none does, or not yet, or no longer
    :ivar nid: its node; :data:`NUMA_NO_NODE` if it has none
    :ivar bytes: bytes charged for one of it; 0 if nothing is charged for it
    :ivar detail: of objects and caches, ``reclaimable`` or ``unreclaimable``; of kmem that may be
        a large kmalloc, ``unreclaimable``; of zswap entries, ``compressed`` or ``incompressible``
    """

    kind: HeldKind
    address: int
    payer: int = 0
    nid: Nid = NUMA_NO_NODE
    bytes: int = 0
    detail: str = ""


class FreedPage(NamedTuple):
    """
    A free page that is still charged as kernel memory.

    :ivar page: ``struct page *``
    :ivar objcg: ``struct obj_cgroup *`` that pays
    :ivar nid: its node
    """

    page: Address
    objcg: Address
    nid: Nid


class PagesOfArea(NamedTuple):
    """
    Consecutive pages of a vmalloc area.

    :ivar payer: ``struct obj_cgroup *``; 0 if no memcg pays for them
    :ivar nid: their node
    :ivar pages: their number
    """

    payer: int
    nid: Nid
    pages: int


class PartialArea(NamedTuple):
    """
    A vmalloc area whose pages a task is counting or freeing, one by one.

    :ivar address: ``struct vm_struct *``
    :ivar nr_pages: number of its pages
    :ivar is_linked: whether the area is on the list of all areas. If not, ``vfree()`` is freeing it
    :ivar is_counted: whether vmalloc() counted its pages
    :ivar left: its last pages, which are not freed, in their order
    :ivar stops: indexes of pages that the task may have come to, in order
    """

    address: int
    nr_pages: int
    is_linked: bool
    is_counted: bool
    left: tuple[PagesOfArea, ...]
    stops: tuple[int, ...]


class Running(NamedTuple):
    """
    What a CPU was running when it was stopped, or a task that was preempted or blocked.

    :ivar cpu: the CPU; of a task that was not running, the one it ran on last
    :ivar pid: PID of the task; 0 for the idle task, -1 if the task cannot be read
    :ivar comm: name of the task
    :ivar functions: functions on its stack, innermost first, by their names in the source; none in
        user mode. If the stack could not be unwound: all functions that have an address on it
    :ivar busy: whether it was in the kernel, where it may have been charging memory
    :ivar held: what its registers and its stack point to; ``None`` if they could not be read
    :ivar numbers: absolute values of the integers in its registers and on its stack that may be
        slab bytes which were in a stock: larger than a page, and no larger than a stock holds
    :ivar waiting: whether the task was on no CPU
    :ivar areas: vmalloc areas that its registers and its stack point to, and whose pages it may be
        counting or freeing
    """

    cpu: int
    pid: int
    comm: str
    functions: tuple[str, ...]
    busy: bool
    held: tuple[Held, ...] | None = None
    numbers: frozenset[int] = frozenset()
    waiting: bool = False
    areas: tuple[PartialArea, ...] = ()


class Allowance(NamedTuple):
    """
    One charge that a stopped CPU left half done: booked in one place and not yet in another.

    :ivar cpu: the CPU
    :ivar pid: PID of the task that it was running
    :ivar comm: name of the task
    :ivar function: the innermost function on its stack that makes such charges
    :ivar held: what is charged; ``None`` if the amount is known from what the function does
    :ivar memcg: ``struct mem_cgroup *`` of the row that shows it; ``None`` if it has none
    :ivar amount: claimed less found, in :attr:`unit`
    :ivar unit: unit of the amount
    :ivar identity: name of the identity
    :ivar nid: node of the row; ``None`` if the counter is not kept by node
    :ivar item: counter of the row
    """

    cpu: int
    pid: int
    comm: str
    function: str
    held: Held | None
    memcg: int | None
    amount: int
    unit: Unit
    identity: str
    nid: int | None
    item: str


class StackRef(NamedTuple):
    """
    A task whose kernel stack or registers contain, or may contain, an address.

    :ivar pid: its PID
    :ivar comm: its name
    :ivar cpu: the CPU that it was running on; ``None`` if it was not running
    :ivar words: how often they contain the address. Registers that are not known count once.
    :ivar functions: functions that they also point into; empty if the registers are not known
    """

    pid: int
    comm: str
    cpu: int | None
    words: int
    functions: tuple[str, ...]


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
