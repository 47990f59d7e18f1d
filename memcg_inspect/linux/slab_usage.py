# SPDX-License-Identifier: LGPL-2.1-or-later
"""How much slab memory each cache has on each node, and how much of it memcgs pay for."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from drgn import Program

from memcg_inspect.linux.kfence import kfence_pages
from memcg_inspect.linux.slab import Slab, SlabCache
from memcg_inspect.model import SlabUsage

__all__ = ("SlabTally",)


class _Key(NamedTuple):
    nid: int
    cache: SlabCache
    kfence: bool


class _Sum:
    """What slabs of one key amount to."""

    __slots__ = ("charged", "inuse", "objects", "pages", "slabs")

    def __init__(self) -> None:
        self.slabs = self.pages = self.objects = self.inuse = 0
        self.charged: int | None = 0


class SlabTally:
    """Adds slabs up by node and cache."""

    def __init__(self, prog: Program) -> None:
        self._kfence = kfence_pages(prog)
        self._sums: defaultdict[_Key, _Sum] = defaultdict(_Sum)

    def add(self, slab: Slab) -> None:
        """Add a slab."""
        found = self._sums[_Key(slab.nid, slab.cache, slab.page in self._kfence)]
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
                cache=cache.name,
                address=cache.address,
                reclaimable=cache.reclaimable,
                kfence=kfence,
                size=cache.size,
                charge=cache.charge,
                slabs=found.slabs,
                pages=found.pages,
                objects=found.objects,
                inuse=found.inuse,
                charged=found.charged,
            )
            for (nid, cache, kfence), found in self._sums.items()
        ]
        return tuple(sorted(usage, key=lambda u: (u.nid, u.cache, u.address)))
