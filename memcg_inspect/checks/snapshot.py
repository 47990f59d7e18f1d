# SPDX-License-Identifier: LGPL-2.1-or-later
"""Everything that was read of one image, ready to be judged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from memcg_inspect.checks.counters import Counters, CounterValue
from memcg_inspect.checks.ledger import Amount, ChargeKind, Ledger
from memcg_inspect.checks.profile import Profile
from memcg_inspect.model import (
    ChargeStock,
    Coverage,
    Features,
    ImageInfo,
    LruLists,
    Memcg,
    NodeStat,
    Objcg,
    ObjStock,
    PercpuUsage,
    PerNodeCharges,
    Running,
    SlabUsage,
    TaskCharge,
    Transient,
    Vectors,
)

__all__ = ("OBJECTS", "Snapshot")

#: Kinds of charges that are bytes, not pages.
OBJECTS: tuple[ChargeKind, ...] = ("slab", "percpu", "zswap")


@dataclass(frozen=True)
class Snapshot:
    """
    One image, collected.

    :ivar usage: page counters by memcg, in pages, descendants included
    :ivar references: references to obj_cgroups that are no charges, by holder and obj_cgroup
    :ivar transients: what is being freed and may hold a reference, by obj_cgroup
    :ivar running: what each CPU was doing; empty until a row differs, and while it moves
    :ivar per_node: charges whose node needs a closer look, for
        :mod:`memcg_inspect.checks.pernode`; ``None`` on kernels that do not account by node
    :ivar vectors: where the vectors of slabs are, by node of the slab
    :ivar slab_usage: slab memory by node and cache, whoever pays
    :ivar percpu_usage: percpu memory by node, whoever pays
    :ivar large_kmalloc: pages of large kmallocs by node, whoever pays
    :ivar node_stats: counters of nodes, by node and item
    :ivar lru: folios on LRU lists, and how many there are said to be
    :ivar profile: what refers to call sites; ``None`` if that was not asked for
    :ivar coverage: what could be read, by subject
    :ivar unreadable: live memcgs some of whose obj_cgroups, or those of the removed memcgs that
        they pay for, could not be read
    """

    image: ImageInfo
    features: Features
    memcgs: Mapping[int, Memcg]
    objcgs: Mapping[int, Objcg]
    ledger: Ledger
    counters: Counters
    stocks: Sequence[ObjStock] = ()
    charge_stocks: Sequence[ChargeStock] = ()
    usage: Mapping[int, int] = field(default_factory=dict)
    references: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    transients: Mapping[int, Sequence[Transient]] = field(default_factory=dict)
    running: Sequence[Running] = ()
    per_node: PerNodeCharges | None = None
    tasks: Sequence[TaskCharge] = ()
    vectors: Mapping[int, Vectors] = field(default_factory=dict)
    lru: LruLists | None = None
    slab_usage: tuple[SlabUsage, ...] = ()
    percpu_usage: tuple[PercpuUsage, ...] = ()
    large_kmalloc: Mapping[int, int] = field(default_factory=dict)
    node_stats: Mapping[tuple[int, str], NodeStat] = field(default_factory=dict)
    profile: Profile | None = None
    coverage: Mapping[str, Coverage] = field(default_factory=dict)
    unreadable: frozenset[int] = frozenset()

    @cached_property
    def _orphans(self) -> frozenset[tuple[ChargeKind, str, int]]:
        # Charges of an obj_cgroup that could not be read may be anybody's. What is charged to a
        # memcg itself is not: if that could not be read, its parent is known to be partial.
        if self.complete("memcgs", "objcgs"):
            return frozenset()
        to_memcgs = ("sock",) if self.features.lru_holds_objcg else ("sock", "lru")
        return frozenset(
            (entry.kind, entry.detail, entry.nid)
            for entry, _ in self.ledger
            if entry.payer not in self.objcgs and entry.kind not in to_memcgs
        )

    def why_missing(
        self, kind: ChargeKind, detail: str | None = None, nid: int | None = None
    ) -> str | None:
        """
        Return why charges of a kind may be missing from what was found of a memcg.

        :param detail: ``None`` for any
        :param nid: ``None`` for any
        """
        if self.ledger.may_miss(kind, detail, nid):
            return f"{kind} memory is not all in the image"
        for orphan_kind, orphan_detail, orphan_nid in self._orphans:
            if (
                kind == orphan_kind
                and detail in (None, orphan_detail)
                and nid in (None, orphan_nid)
            ):
                return f"{kind} memory is charged to obj_cgroups that are not in the image"
        return None

    def why_objects_missing(self, memcg: int) -> str | None:
        """Return why bytes of objects may be missing from what was found of a memcg."""
        for kind in OBJECTS:
            missing = self.why_missing(kind)
            if missing is not None:
                return missing
        if not self.complete("stock"):
            return "object stocks are not all in the image"
        return "its obj_cgroups are not all in the image" if memcg in self.unreadable else None

    @cached_property
    def objcg_bytes(self) -> Mapping[int, dict[str, int]]:
        """Bytes charged to each obj_cgroup, by where they are."""
        found: dict[int, dict[str, int]] = {
            address: dict.fromkeys(OBJECTS, 0)
            | {"stock": 0, "nr_charged_bytes": objcg.nr_charged_bytes}
            for address, objcg in self.objcgs.items()
        }
        for entry, amount in self.ledger:
            if entry.kind in OBJECTS and entry.payer in found:
                found[entry.payer][entry.kind] += amount.bytes
        for stock in self.stocks:
            if stock.objcg in found:
                found[stock.objcg]["stock"] += stock.nr_bytes
        return found

    def unread(self, memcg: int) -> str:
        """Return why what a memcg claims for itself is not known, if it is not."""
        if memcg in self.counters.partial:
            return "memcgs below this one, whose share is not its own, are not all in the image"
        return "its counter, or that of a memcg below it, is not in the image"

    def complete(self, *subjects: str) -> bool:
        """Return whether everything on these subjects could be read."""
        return not any(self.coverage[s].unreadable for s in subjects if s in self.coverage)

    def payer(self, address: int) -> int | None:
        """
        Return the live memcg that a charge counts for today.

        :param address: of an obj_cgroup or of a mem_cgroup
        :return: ``None`` if there is no such obj_cgroup or memcg
        """
        objcg = self.objcgs.get(address)
        memcg = self.memcgs.get(address if objcg is None else objcg.memcg)
        return None if memcg is None else memcg.payer

    def live(self) -> list[Memcg]:
        """Return the memcgs that pay for themselves, parents first."""
        return [m for m in self.memcgs.values() if m.payer == m.address]

    def by_memcg(self, kind: ChargeKind, detail: str | None = None) -> Mapping[int, Amount]:
        """Return what was found of a kind, by live memcg."""
        found: defaultdict[int, Amount] = defaultdict(lambda: Amount(0, 0))
        for (memcg, _), amount in self.by_node(kind, detail).items():
            found[memcg] = found[memcg].plus(amount)
        return found

    def by_node(
        self, kind: ChargeKind, detail: str | None = None
    ) -> Mapping[tuple[int, int], Amount]:
        """Return what was found of a kind, by live memcg and backing node."""
        found: defaultdict[tuple[int, int], Amount] = defaultdict(lambda: Amount(0, 0))
        for entry, amount in self.ledger:
            if entry.kind == kind and detail in (None, entry.detail):
                payer = self.payer(entry.payer)
                if payer is not None:
                    found[payer, entry.nid] = found[payer, entry.nid].plus(amount)
        return found

    def own(self, memcg: int, item: str, nid: int | None = None) -> dict[str, int] | None:
        """Return what a live memcg claims for itself, in the two parts that rows show."""
        claim = self.counters.own(memcg, item, nid)
        return None if claim is None else split(claim)

    def folded(self, memcg: int, item: str, nid: int | None = None) -> int | None:
        """Return a counter as its readers see it, descendants included."""
        stat = self.counters.stat(memcg, item, nid)
        return None if stat is None else stat.state


def split(claim: CounterValue) -> dict[str, int]:
    """Name the parts of a claim as rows do."""
    return {"folded": claim.folded, "pending_cpu": claim.pending}
