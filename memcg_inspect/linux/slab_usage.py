# SPDX-License-Identifier: LGPL-2.1-or-later
"""How much slab memory each cache has on each node, and how much of it memcgs pay for."""

from __future__ import annotations

from drgn import Program

from memcg_inspect.linux.kfence import kfence_pages
from memcg_inspect.linux.slab import Slab, SlabCache
from memcg_inspect.model import SlabUsage

__all__ = ("SlabTally",)


class _Sum:
    """What the slabs of a cache on a node amount to; those in the pool of kfence apart."""

    __slots__ = ("cache", "charged", "inuse", "objects", "pages", "slabs")

    def __init__(self, cache: SlabCache) -> None:
        self.cache = cache
        self.slabs = self.pages = self.objects = self.inuse = 0
        self.charged: int | None = 0


class SlabTally:
    """Adds slabs up by node and cache."""

    def __init__(self, prog: Program) -> None:
        self._kfence = kfence_pages(prog)
        self._sums: dict[tuple[int, int, bool], _Sum] = {}

    def add(self, slab: Slab) -> None:
        """Add a slab."""
        key = slab.nid, slab.cache.address, slab.page in self._kfence
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = _Sum(slab.cache)
        found.slabs += 1
        found.pages += 1 << slab.order
        found.objects += slab.objects
        found.inuse += slab.inuse
        if slab.charged is None:
            found.charged = None
        elif slab.charged and found.charged is not None:
            found.charged += sum(slab.charged.values())

    def usage(self) -> tuple[SlabUsage, ...]:
        """Return what was added up, by node and name of the cache."""
        usage = [
            SlabUsage(
                nid=nid,
                cache=found.cache.name,
                address=address,
                reclaimable=found.cache.reclaimable,
                kfence=kfence,
                size=found.cache.size,
                charge=found.cache.charge,
                slabs=found.slabs,
                pages=found.pages,
                objects=found.objects,
                inuse=found.inuse,
                charged=found.charged,
            )
            for (nid, address, kfence), found in self._sums.items()
        ]
        return tuple(sorted(usage, key=lambda u: (u.nid, u.cache, u.address)))
