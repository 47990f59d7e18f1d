# SPDX-License-Identifier: LGPL-2.1-or-later
"""How much slab memory each cache has on each node, and how much of it memcgs pay for."""

from __future__ import annotations

from typing import NamedTuple

from drgn import Program

from memcg_inspect.linux.kfence import kfence_pages
from memcg_inspect.linux.slab import Slab
from memcg_inspect.model import SlabUsage

__all__ = ("SlabTally",)


class _Key(NamedTuple):
    nid: int
    cache: int
    kfence: bool


class SlabTally:
    """Adds slabs up by node and cache."""

    def __init__(self, prog: Program) -> None:
        self._kfence = kfence_pages(prog)
        self._usage: dict[_Key, SlabUsage] = {}

    def add(self, slab: Slab) -> None:
        """Add a slab."""
        cache = slab.cache
        key = _Key(slab.nid, cache.address, slab.page in self._kfence)
        known = self._usage.get(key)
        if known is None:
            known = SlabUsage(
                nid=slab.nid,
                cache=cache.name,
                address=cache.address,
                reclaimable=cache.reclaimable,
                kfence=key.kfence,
                size=cache.size,
                charge=cache.charge,
                slabs=0,
                pages=0,
                objects=0,
                inuse=0,
                charged=0,
            )
        charged = None
        if known.charged is not None and slab.charged is not None:
            charged = known.charged + sum(slab.charged.values())
        self._usage[key] = known._replace(
            slabs=known.slabs + 1,
            pages=known.pages + (1 << slab.order),
            objects=known.objects + slab.objects,
            inuse=known.inuse + slab.inuse,
            charged=charged,
        )

    def usage(self) -> tuple[SlabUsage, ...]:
        """Return what was added up, by node and name of the cache."""
        return tuple(sorted(self._usage.values(), key=lambda u: (u.nid, u.cache, u.address)))
