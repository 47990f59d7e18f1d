# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Free slab objects
-----------------

Mirrors the free lists of :linux:`mm/slub.c`. A free object is on the list of its slab
(``slab->freelist``), or in a cache of a CPU or a node:

- up to 6.19, ``kmem_cache_cpu.freelist`` of a CPU (not with ``CONFIG_SLUB_TINY``);
- since commit 2d517aa09bbc ("slab: add opt-in caching layer of percpu sheaves") (in v6.18), the
  sheaves of a CPU, and the full ones of a node. All caches have them since 7.0.

drgn's ``slab_object_info()`` has no bound for the objects of a sheaf, and reads the caches of all
CPUs again for each object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drgn import FaultError, Object, Type, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.linux.lib.list import OnFault, list_entries
from memcg_inspect.linux.mm.mmzone import possible_cpus, possible_nodes
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.linux.mm.slab import Slab, SlabReader

__all__ = ("FreeObjects",)

#: ``MAX_OBJS_PER_PAGE``: no slab has more objects.
_MOST_OBJECTS = 32767
#: How often the lists of a running kernel are read, until they are whole.
_MOST_TRIES = 10


class FreeObjects:
    """Tells which slab objects are free."""

    def __init__(self, image: Image, slabs: SlabReader) -> None:
        self._image = image
        self._memory = image.memory
        self._slabs = slabs
        self._cache_type: Type = image.type("struct kmem_cache")
        self._of_caches: dict[int, tuple[frozenset[int], FaultError | None]] = {}

    def is_free(self, slab: Slab, number: int) -> bool:
        """
        Return whether an object is free.

        ``kfree_rcu()`` frees an object only after a grace period.

        :param number: index of the object in the slab
        :raises drgn.FaultError: if it is in no list that can be read, and not all can
        """
        address, tries = self._slabs.address(slab, number), 1
        while True:
            fault = None
            for found, fault_in_list in (self._of_cache(slab), self._of_slab(slab)):
                if address in found:
                    return True
                fault = fault or fault_in_list
            if fault is None:
                return False
            if not self._image.is_moving or tries == _MOST_TRIES:
                raise fault
            tries += 1

    def kept(self, slab: Slab) -> int:
        """
        Return how many free objects of a slab CPUs and nodes keep. ``slab->inuse`` includes them.

        :raises drgn.FaultError: if not all lists of the cache can be read
        """
        found, fault = self._of_cache(slab)
        if fault is not None:
            raise fault
        return sum(self._slabs.number(slab, address) is not None for address in found)

    def _of_slab(self, slab: Slab) -> tuple[set[int], FaultError | None]:
        """Return the objects on the list of a slab, and why there may be more."""
        found: set[int] = set()
        try:
            first = self._image.pointer("struct slab *", slab.page).freelist.value_()
            self._follow(self._cache(slab), first, found)
        except FaultError as error:
            return found, error
        return found, None

    def _of_cache(self, slab: Slab) -> tuple[frozenset[int], FaultError | None]:
        """Return the objects of a cache that CPUs and nodes keep, and why there may be more."""
        address = slab.cache.address
        known = self._of_caches.get(address)
        if known is None or self._image.is_moving:
            faults: list[FaultError] = []
            found = frozenset(self._kept(self._cache(slab), faults.append))
            known = self._of_caches[address] = found, faults[0] if faults else None
        return known

    def _cache(self, slab: Slab) -> Object:
        return self._image.pointer("struct kmem_cache *", slab.cache.address)

    def _kept(self, cache: Object, on_fault: OnFault) -> Iterator[int]:
        parts: list[Callable[[Object, OnFault], Iterator[int]]] = []
        if self._cache_type.has_member("cpu_slab"):
            parts.append(self._on_lists_of_cpus)
        if self._cache_type.has_member("cpu_sheaves"):
            parts += [self._in_sheaves_of_cpus, self._in_sheaves_of_nodes]
        for part in parts:
            try:
                yield from part(cache, on_fault)
            except FaultError as error:
                on_fault(error)

    def _on_lists_of_cpus(self, cache: Object, on_fault: OnFault) -> Iterator[int]:
        for kept in self._percpu(cache.cpu_slab.read_()):
            slab = kept.slab.read_()
            if slab and slab.slab_cache == cache:
                found: set[int] = set()
                try:
                    self._follow(cache, kept.freelist.value_(), found)
                except FaultError as error:
                    on_fault(error)
                yield from found

    def _in_sheaves_of_cpus(self, cache: Object, on_fault: OnFault) -> Iterator[int]:
        pointer = cache.cpu_sheaves.read_()
        for sheaves in self._percpu(pointer) if pointer else ():
            for sheaf in (sheaves.main.read_(), sheaves.spare.read_()):
                if sheaf:
                    yield from self._in_sheaf(cache, sheaf)

    def _in_sheaves_of_nodes(self, cache: Object, on_fault: OnFault) -> Iterator[int]:
        # Commit 5ba6bc27b1f9 ("slab: decouple pointer to barn from kmem_cache_node") (in v7.1).
        has_pointers = self._cache_type.has_member("per_node")
        for nid in possible_nodes(self._image):
            node = cache.per_node[nid] if has_pointers else cache.node[nid].read_()
            barn = node.barn.read_() if has_pointers or node else None
            if barn:
                head = barn.sheaves_full.address_of_()
                for sheaf in list_entries(
                    self._image, "struct slab_sheaf", head, "barn_list", on_fault
                ):
                    yield from self._in_sheaf(cache, sheaf)

    def _percpu(self, pointer: Object) -> Iterator[Object]:
        for cpu in possible_cpus(self._image):
            offset = percpu_offsets(self._image)[cpu]
            address = (pointer.value_() + offset) % (1 << 8 * self._memory.word_size)
            yield Object(self._image.prog, pointer.type_, address)

    def _in_sheaf(self, cache: Object, sheaf: Object) -> list[int]:
        size, capacity = int(sheaf.size), int(cache.sheaf_capacity)
        if size > capacity:
            raise FaultError(f"{size} objects in a sheaf for {capacity}", sheaf.value_())
        start = sheaf.value_() + offsetof(self._image.type("struct slab_sheaf"), "objects")
        words = self._memory.words(self._memory.read(start, size * self._memory.word_size))
        return [untagged(self._image, word) for word in words]

    def _follow(self, cache: Object, first: int, found: set[int]) -> None:
        """
        Add the objects of a free list.

        :raises drgn.FaultError: if it cannot be read, or has more objects than a slab
        """
        offset, mask, size = int(cache.offset), 0, self._memory.word_size
        is_hardened = self._cache_type.has_member("random")  # CONFIG_SLAB_FREELIST_HARDENED
        if is_hardened:
            mask = int(cache.random)
        address = untagged(self._image, first)
        while address:
            if address in found or len(found) == _MOST_OBJECTS:
                raise FaultError("the list of free objects does not end", address)
            found.add(address)
            at = (address + offset) % (1 << 8 * size)
            address = self._memory.word(at)
            if is_hardened:  # freelist_ptr_decode()
                address ^= mask ^ int.from_bytes(at.to_bytes(size, "little"), "big")
            address = untagged(self._image, address)
