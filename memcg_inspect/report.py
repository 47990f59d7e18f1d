# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Records of a report
-------------------

What an audit returns: a :class:`Report` with the rows of all identities, the outcome of each
identity, the skew, and findings with their evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memcg_inspect.model import (
    NUMA_NO_NODE,
    Address,
    Allowance,
    Coverage,
    Follows,
    ImageInfo,
    Memcg,
    Nid,
    NotAccounted,
    PercpuUsage,
    SlabUsage,
    Unit,
)

__all__ = (
    "EXIT_STATUS",
    "OWN_MACHINE",
    "OWN_MEMCG",
    "WAIT",
    "Charged",
    "Confidence",
    "Diagnosis",
    "Effect",
    "Evidence",
    "Finding",
    "Identity",
    "IdentityStatus",
    "Moved",
    "NotCovered",
    "Reads",
    "Report",
    "Row",
    "RowStatus",
    "Skew",
    "Uncharged",
    "UnchargedSite",
    "Verdict",
)

#: Seconds that a running kernel is given to come to rest.
WAIT = 30.0

#: Reasons of rows that this program itself changes while it reads a running kernel.
OWN_MEMCG = "this program runs in this memcg, or below it, and changes it while it reads"
OWN_MACHINE = "this program runs on this machine, and changes the node while it reads"

RowStatus = Literal["exact", "differs", "in-flight", "moving", "unverifiable"]
IdentityStatus = Literal["exact", "findings", "unverifiable", "not-kept", "moving"]
Verdict = Literal["exact", "findings", "incomplete", "moving"]
#: Exit status of an audit, by verdict.
EXIT_STATUS: Mapping[Verdict, int] = {"exact": 0, "findings": 1, "incomplete": 3, "moving": 3}
Confidence = Literal["proved", "only-explanation", "likely"]


class Moved(NamedTuple):
    """
    How far a row changed between samples, in its unit.

    :ivar looks: number of samples that have the row
    :ivar found: largest less smallest amount found
    :ivar claimed: largest less smallest amount claimed
    :ivar least: smallest difference
    :ivar most: largest difference
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

    :ivar identity: name of the identity
    :ivar memcg: ``struct mem_cgroup *``; ``None`` if the row is not about a memcg
    :ivar objcg: ``struct obj_cgroup *``; ``None`` if the row is not about one obj_cgroup
    :ivar nid: node; ``None`` if the counter is not kept per node
    :ivar item: the kernel's name of the counter
    :ivar unit: unit of all amounts of the row
    :ivar status: the outcome
    :ivar found: sums of the objects found, by source
    :ivar claimed: the kernel's counter, by place; ``None`` if it could not be read
    :ivar reason: why it is ``in-flight``, ``moving`` or ``unverifiable``
    :ivar hierarchy: folded value with descendants, as userspace reads it, if the row is about
        such a counter
    :ivar moved: how far it changed between samples, if its status is ``moving``
    :ivar allowance: the half-done charge of a stopped CPU that accounts for the difference
    """

    identity: str
    memcg: Address | None
    objcg: Address | None
    nid: Nid | None
    item: str
    unit: Unit
    status: RowStatus
    found: Mapping[str, int]
    claimed: Mapping[str, int] | None
    reason: str | None = None
    hierarchy: int | None = None
    moved: Moved | None = None
    allowance: Allowance | None = None

    @property
    def difference(self) -> int | None:
        """``claimed`` less ``found``, in :attr:`unit`."""
        if self.claimed is None:
            return None
        return sum(self.claimed.values()) - sum(self.found.values())

    @property
    def off(self) -> int:
        """:attr:`difference`, 0 if the counter could not be read."""
        return self.difference or 0

    @property
    def is_zero(self) -> bool:
        """Whether it is exact and all its amounts are 0."""
        amounts = (*self.found.values(), *(self.claimed or {}).values())
        return self.status == "exact" and not any(amounts)


@dataclass(frozen=True)
class Identity:
    """
    The outcome of one identity for the whole image.

    :ivar name: name of the identity
    :ivar status: the outcome
    :ivar rows: number of its rows, including those in which everything is 0
    :ivar differing: number of its rows that differ
    :ivar reason: why it is ``unverifiable`` or ``not-kept``
    """

    name: str
    status: IdentityStatus
    rows: int
    differing: int
    reason: str | None = None


@dataclass(frozen=True)
class Skew:
    """
    Charges of one memcg and kind, by charged node and backing node.

    :ivar memcg: ``struct mem_cgroup *`` of the memcg that pays
    :ivar kind: kind of the charges, for example ``slab``
    :ivar charged_nid: node of the obj_cgroup that pays; ``None`` if it has none
    :ivar backing_nid: node of the memory; :data:`~memcg_inspect.model.NUMA_NO_NODE` if it has none
        or the node could not be read
    :ivar bytes: sum of the charges
    :ivar count: number of charges; a charge on several nodes is counted on one of them
    """

    memcg: Address
    kind: str
    charged_nid: int | None
    backing_nid: Nid
    bytes: int
    count: int

    @property
    def reason(self) -> str | None:
        """Why the backing node is not known."""
        return _no_node(self.kind) if self.backing_nid == NUMA_NO_NODE else None


def _no_node(kind: str) -> str:
    if kind == "sock":
        return "a socket charges a number of pages that have no node"
    return "the node is not known: the page could not be read"


@dataclass(frozen=True)
class Evidence:
    """
    One object that proves a finding, or that may be its cause.

    Fields are ``None`` where they do not apply to the object.

    :ivar address: address of the object
    :ivar kind: kind of a charge (``slab``, ``percpu``, ``kmem``, ``zswap``, ``lru``), or
        ``obj_exts``, ``obj_cgroup``, ``mem_cgroup``, ``task``, ``counter``, or ``counters``: a
        range of them
    :ivar nid: node of the memory; :data:`~memcg_inspect.model.NUMA_NO_NODE` if it could not be read
    :ivar bytes: bytes that are charged for it
    :ivar cache: name of its slab cache
    :ivar page: ``struct page *`` of its slab or of its block of pages
    :ivar objcg: ``struct obj_cgroup *`` that it is charged to
    :ivar memcg: ``struct mem_cgroup *`` of the memcg that pays
    :ivar note: details in English; may contain names from the image
    :ivar site: where it was allocated, as ``file:line [module] function()``, on kernels that
        profile allocations
    :ivar rank: of a candidate: 1 and more than the number of candidates that are likelier, so
        equally likely ones have the same rank
    """

    address: Address
    kind: str
    nid: Nid | None = None
    bytes: int | None = None
    cache: str | None = None
    page: Address | None = None
    objcg: Address | None = None
    memcg: Address | None = None
    note: str | None = None
    site: str | None = None
    rank: int | None = None

    @property
    def reason(self) -> str | None:
        """Why the node is not known."""
        return _no_node(self.kind) if self.nid == NUMA_NO_NODE else None


@dataclass(frozen=True)
class Finding:
    """
    One place where an identity does not hold, or where a rule of the kernel is broken.

    :ivar identity: name of the identity, or kind of the charge
    :ivar kind: kind of the finding, for example ``counter-above-objects``
    :ivar memcg: ``struct mem_cgroup *``; ``None`` if it is not about a memcg
    :ivar objcg: ``struct obj_cgroup *``, or the address that a charge has in its place; ``None``
        if it is not about an obj_cgroup
    :ivar nid: node; ``None`` if it is not about one node
    :ivar item: the kernel's name of the counter, or the kind of the charge
    :ivar unit: unit of :attr:`difference`
    :ivar difference: claimed less found, or the amount on the wrong node; ``None`` if it is not
        known
    :ivar what: one sentence in English, without the path of the memcg
    :ivar evidence_is: whether the evidence proves the fault, or lists possible causes
    :ivar evidence: at most ten objects, the likeliest ones first
    :ivar evidence_total: number of objects, also of those that are not listed; ``None`` if it is
        not known
    :ivar evidence_tied: number of candidates that are not listed, and as likely as the last one
        that is; ``None`` if it is not known, and for a proof
    """

    identity: str
    kind: str
    memcg: Address | None
    objcg: Address | None
    nid: Nid | None
    item: str
    unit: Unit
    difference: int | None
    what: str
    evidence_is: Literal["proof", "candidates"]
    evidence: tuple[Evidence, ...] = ()
    evidence_total: int | None = None
    evidence_tied: int | None = None

    @property
    def off(self) -> int:
        """:attr:`difference`, 0 if it is not known."""
        return self.difference or 0


@dataclass(frozen=True)
class Effect:
    """
    What a cause does to one row.

    :ivar identity: name of the identity of the row
    :ivar memcg: ``struct mem_cgroup *`` of the row; ``None`` if it is not about a memcg
    :ivar objcg: ``struct obj_cgroup *`` of the row; ``None`` if it is not about an obj_cgroup
    :ivar nid: node of the row; ``None`` if it is not about one node
    :ivar item: the kernel's name of the counter
    :ivar unit: unit of the amounts
    :ivar amount: what the cause adds to the difference of the row
    :ivar difference: the difference of the row, to which other causes may have added, too
    """

    identity: str
    memcg: Address | None
    objcg: Address | None
    nid: Nid | None
    item: str
    unit: Unit
    amount: int
    difference: int


@dataclass(frozen=True)
class Diagnosis:
    """
    One cause, with the findings that it explains and the evidence for it.

    Confidence is ``proved`` if an address in memory shows the cause, ``only-explanation`` if no
    other cause that is known here, alone or with a second one, adds up to the same rows, and
    ``likely`` otherwise. Pairs of counters that need the same large amount by coincidence
    are not tried (docs/output.md).

    :ivar cause: name of the cause, for example ``object-owner``
    :ivar what: one sentence in English, without paths of memcgs
    :ivar confidence: how sure it is
    :ivar memcgs: ``struct mem_cgroup *`` of the memcgs that it is about, the first one first in
        :attr:`what`
    :ivar nid: node; ``None`` if it is not about one node
    :ivar amount: how much is wrong; ``None`` if that is not known
    :ivar unit: unit of :attr:`amount`
    :ivar evidence: at most ten objects that show the cause, or that may be it, the likeliest first
    :ivar evidence_total: number of objects that may be it, also of those that are not listed;
        ``None`` if it is not known
    :ivar findings: indices in :attr:`Report.findings` of the findings that it explains
    :ivar others: other causes that explain the same findings, one sentence each
    :ivar signature: what it does to each row
    :ivar functions: functions of the kernel in which such a fault is made
    """

    cause: str
    what: str
    confidence: Confidence
    memcgs: tuple[Address, ...]
    nid: Nid | None
    amount: int | None
    unit: Unit
    evidence: tuple[Evidence, ...] = ()
    evidence_total: int | None = None
    findings: tuple[int, ...] = ()
    others: tuple[str, ...] = ()
    signature: tuple[Effect, ...] = ()
    functions: tuple[str, ...] = ()


class UnchargedSite(NamedTuple):
    """
    Objects of one cache and call site that no memcg pays for.

    :ivar site: the call site, as ``/proc/allocinfo`` has it
    :ivar objects: number of objects
    """

    site: str
    objects: int


class Uncharged(NamedTuple):
    """
    Objects of a cache that always accounts, and that no memcg pays for.

    :ivar cache: name of the cache
    :ivar address: ``struct kmem_cache *``
    :ivar objects: the most that there can be: free objects that CPUs hold are among them; ``None``
        if it is not known which objects are charged
    :ivar bytes: their size
    :ivar sites: those that refer to a call site, most objects first; ``None`` on kernels that do
        not profile allocations
    """

    cache: str
    address: Address
    objects: int | None
    bytes: int | None
    sites: tuple[UnchargedSite, ...] | None = None


@dataclass(frozen=True)
class Charged:
    """
    All charges of one kind.

    :ivar kind: kind of the charges, for example ``slab``
    :ivar bytes: their sum
    :ivar count: number of charges
    """

    kind: str
    bytes: int
    count: int


class NotCovered(NamedTuple):
    """
    A counter whose value no identity compares with what was found.

    :ivar item: the kernel's name of the counter
    :ivar reason: what is, or is not, compared instead
    """

    item: str
    reason: str


class Reads(NamedTuple):
    """
    Reads of the memory of an image.

    :ivar reads: number of reads
    :ivar bytes: number of bytes
    """

    reads: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Report:
    """
    The result of an audit.

    :ivar image: the image that was read
    :ivar verdict: the outcome of the whole audit
    :ivar memcgs: all memcgs, parents first
    :ivar findings: places where an identity does not hold, or where a rule is broken
    :ivar identities: outcome of each identity
    :ivar rows: the equations of all identities
    :ivar skew: charges by charged node and backing node
    :ivar coverage: how much could be read, by subject
    :ivar timings: seconds, by step
    :ivar reads: reads of the image in bulk, by the same
    :ivar follows: the rule of per-node accounting that the counters follow, by kind of memory;
        ``None`` on kernels without it
    :ivar notes: why parts of the image could not be read, and what to do about it
    :ivar slab_usage: slab memory by node and cache, charged or not
    :ivar percpu_usage: percpu memory by node, charged or not
    :ivar looks: number of samples; 1 for a frozen image
    :ivar interrupted: whether the user interrupted it
    :ivar not_covered: counters that no identity compares with what was found
    :ivar uncharged: objects that no memcg pays for, of caches that always account
    :ivar diagnoses: causes of the findings, the one that explains most first
    :ivar half_done: causes of the rows in flight, as far as stacks show the charge. They are no
        faults; their :attr:`~Diagnosis.others` are faults that would do the same to these rows
    :ivar charges: all charges that were found, by kind
    :ivar not_accounted: memory that is charged to no memcg, since the kernel was told not to
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
    not_covered: tuple[NotCovered, ...] = ()
    uncharged: tuple[Uncharged, ...] = ()
    diagnoses: tuple[Diagnosis, ...] = ()
    half_done: tuple[Diagnosis, ...] = ()
    charges: tuple[Charged, ...] = ()
    not_accounted: tuple[NotAccounted, ...] = ()
    reads: Mapping[str, Reads] = field(default_factory=dict)

    def __repr__(self) -> str:
        image = f"Linux {self.image.release[:100]} ({self.image.source})"
        counts = (
            f"{len(self.memcgs)} memcgs, {len(self.identities)} identities, "
            f"{len(self.rows)} rows, {len(self.findings)} findings"
        )
        return f"<Report {self.verdict.upper()} of {image}: {counts}>"

    @property
    def nonzero_rows(self) -> tuple[Row, ...]:
        """The rows that are not all zero."""
        return tuple(row for row in self.rows if not row.is_zero)

    @property
    def causes(self) -> tuple[Diagnosis, ...]:
        """The causes of findings and of rows in flight, in the order of their numbers."""
        return self.diagnoses + self.half_done

    @property
    def unexplained(self) -> tuple[int, ...]:
        """Indices of the findings that no diagnosis explains."""
        explained = {index for diagnosis in self.diagnoses for index in diagnosis.findings}
        return tuple(i for i in range(len(self.findings)) if i not in explained)
