# SPDX-License-Identifier: LGPL-2.1-or-later
"""Slabs, added up by node and cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from memcg_inspect.linux.mm.slab import Slab, SlabCache
from memcg_inspect.linux.mm.slab_groups import SlabGroup
from memcg_inspect.model import SlabUsage

__all__ = ("SlabSum", "SlabTally")


@dataclass
class SlabSum:
    """
    The slabs of one cache on one node.

    :ivar cache: the cache
    :ivar slabs: number of slabs
    :ivar pages: number of pages of the slabs
    :ivar objects: number of objects that the slabs have room for
    :ivar inuse: sum of ``slab->inuse``
    :ivar charged: number of charged objects; ``None`` if the objcgs of a slab are unreadable
    """

    cache: SlabCache
    slabs: int = 0
    pages: int = 0
    objects: int = 0
    inuse: int = 0
    charged: int | None = 0


@dataclass
class SlabTally:
    """
    Slabs, added up.

    :ivar sums: by (node, ``struct kmem_cache *``, whether the slabs are in the pool of kfence)
    """

    sums: dict[tuple[int, int, bool], SlabSum] = field(default_factory=dict)

    def add(self, slab: Slab, kfence: bool) -> None:
        """
        Add a slab.

        :param kfence: whether it is in the pool of kfence
        """
        found = self._sum(slab.cache, (slab.nid, slab.cache.address, kfence))
        found.slabs += 1
        found.pages += 1 << slab.order
        found.objects += slab.objects
        found.inuse += slab.inuse
        if slab.charged is None:
            found.charged = None
        elif slab.charged and found.charged is not None:
            found.charged += sum(slab.charged.values())

    def add_group(self, group: SlabGroup) -> None:
        """Add slabs of one cache and node, none of them in the pool of kfence."""
        found = self._sum(group.cache, (group.nid, group.cache.address, False))
        found.slabs += group.slabs
        found.pages += group.pages
        found.objects += group.objects
        found.inuse += group.inuse
        if found.charged is not None:
            found.charged += group.charged.total()

    def merge(self, other: SlabTally) -> None:
        """Add the slabs of another tally. The two must have no slab in common."""
        for key, theirs in other.sums.items():
            found = self._sum(theirs.cache, key)
            found.slabs += theirs.slabs
            found.pages += theirs.pages
            found.objects += theirs.objects
            found.inuse += theirs.inuse
            is_known = found.charged is not None and theirs.charged is not None
            found.charged = (found.charged or 0) + (theirs.charged or 0) if is_known else None

    def _sum(self, cache: SlabCache, key: tuple[int, int, bool]) -> SlabSum:
        found = self.sums.get(key)
        if found is None:
            found = self.sums[key] = SlabSum(cache)
        return found

    def usage(self) -> tuple[SlabUsage, ...]:
        """Return the sums, sorted by node and name of the cache."""
        usage = [
            SlabUsage(
                nid=nid,
                cache=found.cache.name,
                address=address,
                reclaimable=found.cache.reclaimable,
                kfence=kfence,
                accounts=found.cache.accounts,
                size=found.cache.size,
                charge=found.cache.charge,
                slabs=found.slabs,
                pages=found.pages,
                objects=found.objects,
                inuse=found.inuse,
                charged=found.charged,
            )
            for (nid, address, kfence), found in self.sums.items()
        ]
        return tuple(sorted(usage, key=lambda u: (u.nid, u.cache, u.address)))
