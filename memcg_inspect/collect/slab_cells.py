# SPDX-License-Identifier: LGPL-2.1-or-later
"""Slab objects, added up by the memcgs that pay for them, by cache and by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mm_types import KmemPage, PagePiece
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import Slab, SlabCache

__all__ = ("LARGE_KMALLOC", "UNKNOWN_PAYER", "SlabCell", "SlabCells", "SlabKey")

LARGE_KMALLOC = "(large kmalloc)"
#: Payer of a charge whose obj_cgroup is not known; no memcg has this address.
UNKNOWN_PAYER = 0


class SlabKey(NamedTuple):
    """
    What the objects of a cell have in common; ``None``: it is not told apart.

    :ivar payer: ``struct mem_cgroup *``; also ``None`` if no memcg pays
    :ivar cache: ``struct kmem_cache *``; for large kmallocs, their size as a negative number
    :ivar nid: node
    """

    payer: int | None
    cache: int | None
    nid: int | None


@dataclass
class SlabCell:
    """
    Sums over objects.

    :ivar bytes: of all objects, also those in the pool of KFENCE, which are in no slab of a cache
    :ivar in_slabs: bytes of the objects in slabs
    :ivar room: bytes of all objects that these slabs can hold
    :ivar shared: slabs among these that also hold objects of other payers
    :ivar others: these payers
    :ivar has_large: whether it includes large kmallocs
    :ivar has_uncounted: whether it includes large kmallocs whose number is not known
    """

    objects: int = 0
    bytes: int = 0
    charged: int = 0
    in_slabs: int = 0
    slabs: int = 0
    pages: int = 0
    room: int = 0
    shared: int = 0
    others: set[int | None] = field(default_factory=set)
    has_large: bool = False
    has_uncounted: bool = False

    def add_objects(self, count: int, slab: Slab, is_charged: bool) -> None:
        """Add objects of a slab."""
        self.objects += count
        self.bytes += count * slab.cache.size
        self.charged += count * slab.cache.charge if is_charged else 0

    def add_slab(self, slab: Slab) -> None:
        """Add a slab that has objects in it."""
        self.slabs += 1
        self.pages += 1 << slab.order
        self.room += slab.objects * slab.cache.size

    def merge_objects(self, other: SlabCell) -> None:
        """Add the objects of a cell."""
        self.objects += other.objects
        self.bytes += other.bytes
        self.charged += other.charged
        self.in_slabs += other.in_slabs
        self.has_large |= other.has_large
        self.has_uncounted |= other.has_uncounted

    def merge_slabs(self, other: SlabCell) -> None:
        """Add the slabs of a cell. They must be others."""
        self.slabs += other.slabs
        self.pages += other.pages
        self.room += other.room
        self.shared += other.shared
        self.others |= other.others


def _merge(cell: SlabCell, other: SlabCell) -> None:
    cell.merge_objects(other)
    cell.merge_slabs(other)


class SlabCells:
    """
    The cells of an image, or of a part of it.

    :ivar cells: sums by payer, cache and node
    :ivar slabs: the slabs of a cache on a node, each of them once
    :ivar unread: objects in use in slabs whose obj_cgroups could not be read, by cache and node
    :ivar nodes: by node and kind: bytes of slabs (``slab_bytes``), of objects that a memcg pays for
        (``paid``) and of others (``unpaid``), and number of slabs whose obj_cgroups could not be
        read (``unknown``)
    :ivar caches: by ``struct kmem_cache *``
    :ivar has_unknown: whether the payer of some charge is not known
    """

    def __init__(self, image: Image, payer: Callable[[int], int | None]) -> None:
        """:param payer: returns the memcg that pays for the charges to an obj_cgroup"""
        self.cells: dict[SlabKey, SlabCell] = {}
        self.slabs: dict[tuple[int, int], SlabCell] = {}
        self.unread: dict[tuple[int, int], SlabCell] = {}
        self.nodes: dict[tuple[int, str], Counter[str]] = {}
        self.caches: dict[int, SlabCache] = {}
        self.has_unknown = False
        self._kfence = kfence_pages(image)
        self._page_size = mem_map(image).page_size
        self._payer_of = payer
        self._payers: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Sums can be pickled. The function cannot: only the process that has it can add to them.
        return self.__dict__ | {"_payer_of": None}

    def merge(self, other: SlabCells) -> None:
        """Add another part of the image. It must have no slab in common."""
        for key, cell in other.cells.items():
            _merge(self.cells.setdefault(key, SlabCell()), cell)
        for mine, theirs in ((self.slabs, other.slabs), (self.unread, other.unread)):
            for place, cell in theirs.items():
                _merge(mine.setdefault(place, SlabCell()), cell)
        for node, sums in other.nodes.items():
            self._node(*node).update(sums)
        self.caches |= other.caches
        self.has_unknown |= other.has_unknown

    @property
    def are_all_known(self) -> bool:
        """Whether all payers are known."""
        return not self.unread and not self.has_unknown

    def _payer(self, objcg: int) -> int:
        payer = self._payers.get(objcg)
        if payer is None:
            payer = self._payers[objcg] = self._payer_of(objcg) or UNKNOWN_PAYER
            self.has_unknown |= payer == UNKNOWN_PAYER
        return payer

    def _cell(self, payer: int | None, cache: int, nid: int) -> SlabCell:
        return self.cells.setdefault(SlabKey(payer, cache, nid), SlabCell())

    def _node(self, nid: int, kind: str) -> Counter[str]:
        return self.nodes.setdefault((nid, kind), Counter())

    def add(self, slab: Slab) -> None:
        """Add a slab."""
        cache, owners = slab.cache, Counter[int | None]()
        self.caches[cache.address] = cache
        for objcg, count in (slab.charged or {}).items():
            owners[self._payer(objcg)] += count
        if slab.page in self._kfence:
            # No counter of slabs includes it, and slab->inuse does not count its object.
            for payer, count in owners.items():
                self._cell(payer, cache.address, slab.nid).add_objects(count, slab, True)
            return
        node = self._node(slab.nid, "reclaimable" if cache.reclaimable else "unreclaimable")
        node["slab_bytes"] += self._page_size << slab.order
        paid = owners.total()
        if slab.inuse > paid:
            owners[None] = slab.inuse - paid
        node["paid"] += paid * cache.size
        node["unpaid"] += owners[None] * cache.size
        owners = +owners
        if owners:
            self.slabs.setdefault((cache.address, slab.nid), SlabCell()).add_slab(slab)
        if slab.charged is None:
            node["unknown"] += 1
            cell = self.unread.setdefault((cache.address, slab.nid), SlabCell())
            cell.add_objects(slab.inuse, slab, False)
            cell.in_slabs += slab.inuse * cache.size
            return
        for payer, count in owners.items():
            cell = self._cell(payer, cache.address, slab.nid)
            cell.add_objects(count, slab, payer is not None)
            cell.in_slabs += count * cache.size
            cell.add_slab(slab)
            if len(owners) > 1:
                cell.shared += 1
                cell.others |= owners.keys()

    def add_large(self, kmem: KmemPage, pages: int) -> None:
        """Add a large kmalloc that a memcg pays for."""
        self.add_larges(kmem.objcg, kmem.nid, pages, 1)

    def add_larges(self, objcg: int, nid: int, pages: int, count: int) -> None:
        """
        Add large kmallocs of one size that a memcg pays for.

        :param objcg: ``struct obj_cgroup *``
        :param pages: size of each of them
        """
        size = pages * self._page_size
        cell = self._cell(self._payer(objcg), -size, nid)
        cell.objects += count
        cell.slabs += count
        cell.pages += count * pages
        cell.bytes += count * size
        cell.charged += count * size
        cell.in_slabs += count * size
        cell.room += count * size
        cell.has_large = True
        self._node(nid, LARGE_KMALLOC)["paid"] += count * size

    def add_all_large(self, piece: PagePiece) -> None:
        """Add the pages of all large kmallocs, where the kernel marks them (PGTY_large_kmalloc)."""
        for nid, pages in piece.large_kmalloc.items():
            self._node(nid, LARGE_KMALLOC)["slab_bytes"] += pages * self._page_size

    def unpaid_large(self) -> dict[int, SlabCell]:
        """Return the large kmallocs that no memcg pays for, by node. They are the rest."""
        found = {}
        for (nid, kind), node in self.nodes.items():
            size = node["slab_bytes"] - node["paid"]
            if kind == LARGE_KMALLOC and size > 0:
                found[nid] = SlabCell(
                    bytes=size,
                    in_slabs=size,
                    pages=size // self._page_size,
                    room=size,
                    has_large=True,
                    has_uncounted=True,
                )
        return found
