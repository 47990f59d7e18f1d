# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What words point to
-------------------

A function that charges memory has pointers to what it charges and to who pays in registers or on
its stack, which :linux:`kernel/stacktrace.c` walks. :class:`PointerReader` finds them: memcgs and
obj_cgroups by their addresses, slab objects by the pages they are on, and pages by their
``struct page``. Of zswap entries it finds those that are being stored or freed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from functools import cached_property

from drgn import FaultError, container_of, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.linux.lib.list import list_entries
from memcg_inspect.linux.mm.debug import PageInfo, page_at, page_behind, read_page
from memcg_inspect.linux.mm.memcontrol import accounting, nodeinfo
from memcg_inspect.linux.mm.memcontrol_limits import read_limits
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import MIN_ALLOC_SIZE, largest_percpu_size, percpu_charge
from memcg_inspect.linux.mm.slab import SlabCache, SlabReader
from memcg_inspect.linux.mm.vmalloc_vfree import PartialAreaReader
from memcg_inspect.linux.mm.zswap import ZswapReader, zswap_entry_cache
from memcg_inspect.model import NUMA_NO_NODE, Held, HeldKind, PartialArea

__all__ = ("PointerReader",)

#: No allocation of the page allocator has a higher order. A higher value is not an order.
_MAX_ORDER = 30


class PointerReader:
    """
    Finds what words point to.

    :param memcgs: all memcgs, ``struct mem_cgroup *``
    :param objcgs: all obj_cgroups, ``struct obj_cgroup *``
    :param released: memcgs that are in no list any more, ``struct mem_cgroup *``. Their parents
        pay for them.
    """

    def __init__(
        self,
        image: Image,
        memcgs: Collection[int],
        objcgs: Collection[int],
        released: Collection[int] = (),
    ) -> None:
        self.image = image
        self._slabs = SlabReader(image)
        size = sizeof(image.type("struct obj_cgroup"))
        ranges = [(o, o + size, Held("objcg", o, o)) for o in objcgs]
        ranges += self._memcg_ranges(memcgs)
        for address in released:
            with suppress(FaultError):
                ranges += self._released_ranges(address)
        self._ranges = sorted(ranges, key=lambda found: found[0])
        self._starts = [start for start, _, _ in self._ranges]
        self._payers = frozenset(memcgs) | frozenset(objcgs)
        self._gather = _gather(image)
        self._limits = read_limits(image)
        self._most = self._limits.folio_batch * self._limits.block
        self._caches = self._read_caches()
        self._tags = self._call_sites()
        self._areas = PartialAreaReader(image)
        self._zswap, self._zswap_cache = ZswapReader(image), zswap_entry_cache(image)

    def _memcg_ranges(self, memcgs: Collection[int]) -> Iterator[tuple[int, int, Held]]:
        size = sizeof(self.image.type("struct mem_cgroup"))
        node_size = sizeof(self.image.type("struct mem_cgroup_per_node"))
        for address in memcgs:
            held = Held("memcg", address, address)
            yield address, address + size, held
            memcg = self.image.pointer("struct mem_cgroup *", address)
            for nid, node in nodeinfo(self.image, memcg, lambda error: None):
                yield node.value_(), node.value_() + node_size, held._replace(nid=nid)

    def _released_ranges(self, address: int) -> list[tuple[int, int, Held]]:
        css = self.image.pointer("struct mem_cgroup *", address).css
        parent = container_of(css.parent, "struct mem_cgroup", "css").value_()
        return [
            (start, end, held._replace(payer=parent))
            for start, end, held in self._memcg_ranges([address])
        ]

    def _read_caches(self) -> dict[int, SlabCache]:
        caches: dict[int, SlabCache] = {}
        head = self.image.object("slab_caches").address_of_()
        found = list_entries(self.image, "struct kmem_cache", head, "list", lambda error: None)
        for cache in found:
            with suppress(FaultError):
                caches[cache.value_()] = self._slabs.cache(cache.value_())
        return caches

    def _call_sites(self) -> range:
        """Return the addresses of the kernel's own ``struct alloc_tag``; empty if it has none."""
        try:
            start = self.image.symbol("__start_alloc_tags").address
            stop = self.image.symbol("__stop_alloc_tags").address
            return range(start, stop, sizeof(self.image.type("struct alloc_tag")))
        except UnknownKernelError:
            return range(0)

    def read(self, words: Iterable[int]) -> tuple[Held, ...]:
        """
        Return what words point to, each thing once. Words that are no pointers are skipped.

        :param words: those of a stack in their order
        """
        words = list(words)
        found: dict[Held, None] = dict.fromkeys(self._batches(words))
        for word in dict.fromkeys(words):
            with suppress(FaultError):
                found |= dict.fromkeys(self._held(word))
        return tuple(found)

    def _held(self, word: int) -> Iterator[Held]:
        at = bisect_right(self._starts, word) - 1
        if at >= 0 and word < self._ranges[at][1]:
            yield self._ranges[at][2]
        elif word in self._caches:
            yield self._cache(self._caches[word], NUMA_NO_NODE)
        elif self._tags and self._tags.start <= word < self._tags.stop:
            number = (word - self._tags.start) // self._tags.step
            yield Held("call site", self._tags[number])
        else:
            page = page_at(self.image, word)
            if page is not None:
                yield from self._page(read_page(self.image, page))
            else:
                yield from self._memory(word)

    def areas(self, held: Iterable[Held], words: Sequence[int]) -> tuple[PartialArea, ...]:
        """Return the vmalloc areas among what words point to, if pages of them may be counted."""
        return self._areas.read([h.address for h in held if h.kind == "object"], words)

    def numbers(self, words: Iterable[int]) -> frozenset[int]:
        """Return the absolute values of integers that may be slab bytes which were in a stock."""
        page_size, limit = mem_map(self.image).page_size, 1 << 8 * self.image.memory.word_size
        half, most = 1 << 31, self._limits.slab_stock + self._limits.slab_object
        # An int in a register is zero-extended or sign-extended.
        values = (word - limit if word >= limit - half else word for word in words)
        values = (value - 2 * half if half <= value < 2 * half else value for value in values)
        return frozenset(abs(value) for value in values if page_size < abs(value) <= most)

    def percpu(self, words: Iterable[int]) -> Iterator[Held]:
        """
        Return the percpu allocations that integers may be the sizes of.

        ``pcpu_alloc()`` has charged an allocation, and nothing points to it before the function
        returns. A kernel that accounts by node charges it in parts, which are not returned.
        """
        if accounting(self.image) == "kmem-per-node":
            return
        most = largest_percpu_size(self.image)
        for size in sorted(word for word in set(words) if 0 < word <= most):
            if size % MIN_ALLOC_SIZE == 0:
                yield Held("percpu", size, bytes=percpu_charge(self.image, size))

    def _batches(self, words: Sequence[int]) -> Iterator[Held]:
        """
        Return the pages that uncharge_batch() is about to uncharge.

        uncharge_folio() adds them up in a ``struct uncharge_gather`` on the stack, and takes the
        folios' memcg away.
        """
        page_size = mem_map(self.image).page_size
        for at, word in enumerate(words):
            if word not in self._payers or at + max(self._gather, default=0) >= len(words):
                continue
            counts = [words[at + offset] for offset in self._gather]
            if counts and 0 < counts[0] <= self._most and max(counts) == counts[0]:
                for pages in dict.fromkeys(filter(None, counts)):
                    yield Held("batch", word, word, bytes=pages * page_size)

    def _page(self, page: PageInfo) -> Iterator[Held]:
        if page.slab is not None:
            slab = self._slabs.slab(page.slab)
            if slab is not None:
                yield self._cache(slab.cache, slab.nid)
        elif page.type != "buddy" and page.order <= _MAX_ORDER:
            kind: HeldKind = "kmem" if page.is_kmem or page.type == "large_kmalloc" else "folio"
            size = mem_map(self.image).page_size << page.order
            # It may be a large kmalloc: a compound page, for more than the largest cache has.
            detail = "unreclaimable" if kind == "kmem" and page.order else ""
            yield Held(kind, page.head, page.payer, page.nid, size, detail)

    def _memory(self, word: int) -> Iterator[Held]:
        page = page_behind(self.image, word)
        if page is None:
            return
        info = read_page(self.image, page)
        slab = None if info.slab is None else self._slabs.slab(info.slab)
        if slab is None:
            if info.is_kmem or info.type == "large_kmalloc":
                yield from self._page(info)
            return
        number = self._slabs.number(slab, word)
        if number is not None:
            found = self._cache(slab.cache, slab.nid)._replace(
                kind="object",
                address=self._slabs.address(slab, number),
                payer=self._slabs.objcg(slab, number),
            )
            yield found
            if slab.cache.address == self._zswap_cache:
                yield from self._zswap_entry(found.address)

    @cached_property
    def _zswap_entries(self) -> Set[int]:
        """All entries in the trees of zswap, ``struct zswap_entry *``."""
        return frozenset(untagged(self.image, entry) for entry in self._zswap.addresses())

    def _zswap_entry(self, address: int) -> Iterator[Held]:
        """
        Return an entry if it is being stored or freed.

        zswap_entry_free() is called when it is in no tree any more. While it is being stored, what
        it has for its obj_cgroup may be anything.

        :param address: address of an object that may be a ``struct zswap_entry``
        """
        entry, page_size = self._zswap.entry(address), mem_map(self.image).page_size
        stored = address in self._zswap_entries
        if (stored and entry.listed) or not 0 < entry.length <= page_size:
            return
        payer = 0 if stored or entry.objcg not in self._payers else entry.objcg
        detail = "incompressible" if entry.length == page_size else "compressed"
        yield Held("zswap", address, payer, NUMA_NO_NODE, entry.length, detail)

    def _cache(self, cache: SlabCache, nid: int) -> Held:
        detail = "reclaimable" if cache.reclaimable else "unreclaimable"
        return Held("cache", cache.address, 0, nid, cache.charge, detail)


def _gather(image: Image) -> tuple[int, ...]:
    """
    Return where ``struct uncharge_gather`` has its counts, in words from the pointer to the payer.

    :return: of ``nr_memory``, which is the sum of all, then of ``pgpgout`` and ``nr_kmem``; empty
        if the kernel has no such type
    """
    if not has_type(image, "struct uncharge_gather"):
        return ()
    gather = image.type("struct uncharge_gather")
    # User pages refer to an obj_cgroup since 7.1.
    start = offsetof(gather, "objcg" if gather.has_member("objcg") else "memcg")
    size = image.memory.word_size
    return tuple(
        (offsetof(gather, name) - start) // size for name in ("nr_memory", "pgpgout", "nr_kmem")
    )
