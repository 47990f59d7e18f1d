# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Zones and their free pages
--------------------------

Mirrors ``show_free_areas()`` of :linux:`mm/show_mem.c`, and the lists of free pages of
:linux:`mm/page_alloc.c`. A free block of pages is in one of three places:

- on a list of ``zone->free_area``. The first page of the block has the type ``buddy``;
- on a list of a CPU, ``zone->per_cpu_pageset``. No page of the block is marked. The list tells the
  order of its blocks, ``pindex_to_order()``;
- on ``zone->trylock_free_pages`` (since 6.15), if a lock could not be taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from drgn import FaultError, Object, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, constant, has_member, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.strings import c_string, text
from memcg_inspect.linux.arch.page_tables import huge_page_order
from memcg_inspect.linux.kernel.locking import spin_is_locked
from memcg_inspect.linux.lib.list import list_entries, raise_fault
from memcg_inspect.linux.mm.mmzone import online_pgdats, page_ranges
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.linux.mm.vmstat import zone_stats
from memcg_inspect.model import Coverage
from memcg_inspect.model_pages import Zone

__all__ = (
    "FreeList",
    "LostPages",
    "counted_memmap",
    "free_lists",
    "lost_pages",
    "miss_lost_pages",
    "read_zones",
)

#: ``PAGE_ALLOC_COSTLY_ORDER``. CPUs keep blocks of orders up to this, and huge pages.
_COSTLY_ORDER = 3


class FreeList(NamedTuple):
    """
    A list of free blocks that are not marked.

    :ivar nid: node
    :ivar zone: value of ``enum zone_type``
    :ivar order: order of its blocks; ``None`` if each block stores it in ``page->private``
    :ivar head: address of the pointer to the first link, ``struct list_head *`` or ``struct
        llist_head *``
    :ivar first: address of the first link, in a ``struct page``
    :ivar end: what the last link points to: the head, or 0 for a ``struct llist_head``
    """

    nid: int
    zone: int
    order: int | None
    head: int
    first: int
    end: int


class LostPages(NamedTuple):
    """
    Pages of a zone that have no memory map.

    :ivar zone: ``struct zone *``
    :ivar nid: node
    :ivar present: ``zone->present_pages``
    :ivar valid: page frames of the zone that are valid, holes included
    """

    zone: int
    nid: int
    present: int
    valid: int

    @property
    def reason(self) -> str:
        """Why they are not known."""
        return f"it has {self.present:,} pages, and {self.valid:,} page frames are valid"


def _zones(image: Image) -> Iterator[tuple[int, int, Object]]:
    """Return node, index and ``struct zone`` of all zones that have pages."""
    for pgdat in online_pgdats(image):
        zones = pgdat.node_zones
        for number in range(array_length(zones.type_)):
            zone = zones[number]
            if zone.present_pages:
                yield int(pgdat.node_id), number, zone


def lost_pages(image: Image) -> Iterator[LostPages]:
    """
    Return the zones that have more pages than valid page frames.

    A damaged ``struct mem_section`` hides its page frames. ``adjust_present_page_count()`` counts a
    page when its section goes online, and no longer counts it when that goes offline. Memory of
    devices is not counted.

    :raises drgn.FaultError: if a zone cannot be read
    """
    ranges = page_ranges(image)
    for nid, _, zone in _zones(image):
        start, present = int(zone.zone_start_pfn), int(zone.present_pages)
        end = start + int(zone.spanned_pages)
        valid = sum(max(0, min(part.end, end) - max(part.start, start)) for part in ranges)
        if present > valid:
            yield LostPages(zone.address_ or 0, nid, present, valid)


def miss_lost_pages(image: Image, pages: Coverage) -> list[LostPages]:
    """
    Return what :func:`lost_pages` finds, and count it as unreadable.

    While a kernel runs, memory can go online or offline between the two numbers. So a zone must
    have lost pages twice.

    :param pages: counts what was read of the memory map
    """
    found: list[LostPages] = []
    try:
        found += lost_pages(image)
        if found and image.is_moving:
            again = {lost.zone for lost in lost_pages(image)}
            found = [lost for lost in found if lost.zone in again]
    except FaultError as error:
        pages.miss("zone", error.address, str(error))
    for lost in found:
        pages.miss("memory map of a zone", lost.zone, lost.reason)
    return found


def read_zones(image: Image, coverage: Coverage) -> dict[tuple[int, int], Zone]:
    """
    Read the zones that have pages.

    :param coverage: counts the zones that were read
    :return: by node and value of ``enum zone_type``
    """
    found: dict[tuple[int, int], Zone] = {}
    try:
        for nid, number, zone in _zones(image):
            found[nid, number] = Zone(
                nid=nid,
                number=number,
                name=text(c_string(zone.name)),
                present=int(zone.present_pages),
                managed=int(zone.managed_pages.counter),
                free_blocks=tuple(int(area.nr_free) for area in zone.free_area),
                isolated=_isolated(image, zone),
                isolates=_isolates(image, zone),
                stats=zone_stats(image, zone),
                is_locked=spin_is_locked(image, zone.lock),
            )
            coverage.read += 1
    except FaultError as error:
        coverage.miss("zone", error.address, str(error))
    return found


def _isolates(image: Image, zone: Object) -> bool:
    """Return whether blocks of a zone are isolated; with ``CONFIG_MEMORY_ISOLATION``."""
    if not has_member(image, "struct zone", "nr_isolate_pageblock"):
        return False
    return bool(zone.nr_isolate_pageblock)


def _isolated(image: Image, zone: Object) -> int:
    """
    Return the free pages of isolated pageblocks.

    :raises drgn.FaultError: if a list is broken
    """
    migratetype = constant(image, "MIGRATE_ISOLATE")
    if migratetype is None:
        return 0  # CONFIG_MEMORY_ISOLATION=n
    pages = 0
    for order, area in enumerate(zone.free_area):
        head = area.free_list[migratetype].address_of_()
        blocks = list_entries(image, "struct page", head, "lru", raise_fault)
        pages += sum(1 for _ in blocks) << order
    return pages


def counted_memmap(image: Image) -> int | None:
    """
    Return the pages of the memory map and of page_ext that the kernel counts.

    :return: ``None`` if it does not count them for all nodes together (before 6.11)
    :raises drgn.FaultError: if a counter cannot be read
    """
    try:
        counters = [image.symbol(f"nr_memmap_{name}pages").address for name in ("", "boot_")]
    except UnknownKernelError:
        return None
    return sum(map(image.memory.word, counters))


def free_lists(image: Image, coverage: Coverage) -> Iterator[FreeList]:
    """
    Iterate over the lists of free blocks that are not marked, except those that are empty.

    :param coverage: counts the lists that are unreadable
    """
    try:
        for nid, number, zone in _zones(image):
            yield from _cpu_lists(image, nid, number, zone, coverage)
            # Commit 8c57b687e833 ("mm, bpf: Introduce free_pages_nolock()") (in v6.15).
            if has_member(image, "struct zone", "trylock_free_pages"):
                link = zone.trylock_free_pages.first
                first = link.value_()
                if first:
                    head = link.address_of_().value_()
                    yield FreeList(nid, number, None, head, first, end=0)
    except FaultError as error:
        coverage.miss("lists of free pages", error.address, str(error))


def _cpu_lists(
    image: Image, nid: int, number: int, zone: Object, coverage: Coverage
) -> Iterator[FreeList]:
    """
    Return the lists of all CPUs in a zone that are not empty.

    :raises drgn.FaultError: if the zone cannot be read
    """
    pages = image.type("struct per_cpu_pages")
    lists = offsetof(pages, "lists")
    count = array_length(member_type(pages, "lists"))
    each = sizeof(image.type("struct list_head"))
    memory = image.memory
    start = zone.per_cpu_pageset.value_() + lists
    for offset in percpu_offsets(image).values():
        head = (start + offset) % (1 << 8 * memory.word_size)
        try:
            links = memory.words(memory.read(head, count * each), 0, each)
        except FaultError as error:
            coverage.miss("free pages of a CPU", error.address, str(error))
            continue
        for index, first in enumerate(links):
            at = head + index * each
            if first != at:
                yield FreeList(nid, number, _order_of(image, index), at, first, end=at)


def _order_of(image: Image, index: int) -> int:
    """Return the order of the blocks of a list of a CPU, ``pindex_to_order()``."""
    types = constant(image, "MIGRATE_PCPTYPES") or 3
    order = index // types
    if order <= _COSTLY_ORDER:
        return order
    return huge_page_order(image)
