# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The inventory of all page frames
--------------------------------

Each page frame is of one kind. :mod:`memcg_inspect.collect.inventory_range` finds the kinds of
ranges of page frames, in as many processes as the image says. What has no kind then is found here:
free pages that CPUs keep, the rest of blocks that are not compound, and pages that only their
owners know.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable

from drgn import FaultError, offsetof

from memcg_inspect.collect.inventory_part import BarePage, Head, InventoryPart
from memcg_inspect.collect.inventory_range import RangeInventory
from memcg_inspect.collect.page_owners import Owners
from memcg_inspect.collect.ranges import page_parts, walk_ranges
from memcg_inspect.collect.site import SiteFinder
from memcg_inspect.collect.unmarked_owners import UnmarkedOwners
from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, member_type
from memcg_inspect.linux.mm.debug import read_page
from memcg_inspect.linux.mm.internal import ZonePageReader
from memcg_inspect.linux.mm.mmzone import PageRange, mem_map
from memcg_inspect.linux.mm.page_alloc import bare_markers
from memcg_inspect.linux.mm.show_mem import FreeList, counted_memmap, free_lists, read_zones
from memcg_inspect.model import Coverage
from memcg_inspect.model_pages import (
    KINDS,
    NEVER,
    NOBODY,
    UNKNOWN_PAYER,
    UNUSED,
    Inventory,
    Place,
)

__all__ = ("read_inventory", "whole_blocks")

#: How often a list of free pages is read that changes while it is read.
_MOST_TRIES = 16


def read_inventory(
    image: Image,
    memcgs: Container[int],
    payer: Callable[[int], int | None],
    coverage: defaultdict[str, Coverage],
) -> Inventory:
    """
    Read all page frames.

    :param memcgs: ``struct mem_cgroup *`` of all memcgs
    :param payer: returns the memcg that pays, ``struct mem_cgroup *``, for a ``struct obj_cgroup
        *`` or ``struct mem_cgroup *``
    :param coverage: counts what was read, by subject
    """
    inventory = Inventory(zones=read_zones(image, coverage["zones"]))
    try:
        inventory.memmap = counted_memmap(image)
    except FaultError as error:
        coverage["zones"].miss("nr_memmap_pages", error.address, str(error))
    owners = Owners(image, coverage)
    reader = RangeInventory(image, owners, memcgs, coverage)
    found = InventoryPart(PageRange(0, 0), mem_map(image).page_size)
    for part in walk_ranges(image, reader, parts=whole_blocks(image, page_parts(image))):
        found.merge(part)
    for address, reason in found.unnamed.items():
        coverage["names"].miss("name of a kmem_cache", address, reason)
    for subject, counts in found.coverage.items():
        coverage[subject].add(counts)
    _Rest(image, found, coverage).add()
    inventory.pages, inventory.holes = found.pages, found.holes
    payers = {owner: _payer(owner, payer) for owner in {owner for _, owner in found.bytes}}
    for (place, owner), size in found.bytes.items():
        inventory.bytes[place, payers[owner]] += size
    inventory.conflicts = _conflicts(image, owners, found, memcgs)
    for number, before, claimed in inventory.conflicts[:10]:
        reason = f"marked or claimed as {before}, and claimed as {claimed}"
        coverage["owners"].miss("page", mem_map(image).page(number), reason)
    coverage["owners"].read += len(owners.claims)
    return inventory


def _conflicts(
    image: Image, owners: Owners, found: InventoryPart, memcgs: Container[int]
) -> list[tuple[int, str, str]]:
    """
    Return the conflicts of owners with each other, and with the marks of pages.

    While a kernel runs, an owner that has been read can free a page, and another owner can take it
    before that one is read, or before the ``struct page`` is. So the owners are read again, and
    after them the marks of pages that are claimed again. A conflict counts if the same owners claim
    the page then, against its marks. All count if an owner cannot be read: it may be one of them.
    """
    conflicts = owners.conflicts + found.conflicts
    if not conflicts or not image.is_moving or image.progress.stop:
        return conflicts
    coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
    again = Owners(image, coverage)
    if image.progress.stop or any(counts.unreadable for counts in coverage.values()):
        return conflicts
    twice: defaultdict[int, set[str]] = defaultdict(set)
    for pfn, first, second in again.conflicts:
        twice[pfn] |= {first, second}

    def is_claimed(pfn: int, kind: str) -> bool:
        return kind in twice[pfn] or any(kind == claim.kind for claim in again.within(pfn, pfn + 1))

    claimed = [conflict for conflict in found.conflicts if is_claimed(conflict[0], conflict[2])]
    marked: set[tuple[int, str]] = set()
    if claimed:
        reader = RangeInventory(image, again, memcgs, coverage)
        marked = _marked_otherwise(image, reader, [pfn for pfn, _, _ in claimed])
    return [
        *(conflict for conflict in owners.conflicts if {*conflict[1:]} <= twice[conflict[0]]),
        *(conflict for conflict in claimed if (conflict[0], conflict[2]) in marked),
    ]


def _marked_otherwise(
    image: Image, reader: RangeInventory, pages: Collection[int]
) -> set[tuple[int, str]]:
    """
    Read the ranges that some page frames are in.

    :return: page frames, and the kind of an owner that claims one against its marks
    """
    found: set[tuple[int, str]] = set()
    for part in whole_blocks(image, page_parts(image)):
        if any(part.start <= pfn < part.end for pfn in pages):
            found |= {(pfn, kind) for pfn, _, kind in reader(part).conflicts}
    return found


def whole_blocks(image: Image, parts: Iterable[PageRange]) -> list[PageRange]:
    """
    Make each block of pages part of one range: that of its first page.

    :param parts: ranges of page frames, in ascending order
    :return: the same page frames
    """
    found: list[PageRange] = []
    for part in parts:
        first = part.start
        if found and found[-1].end == part.start and part.start + 1 < part.end:
            first = _first_of_block(image, part.start)
        while found and found[-1].end == part.start and found[-1].start >= first:
            part = PageRange(found.pop().start, part.end)
        if first < part.start and found and found[-1].end == part.start:
            found[-1] = PageRange(found[-1].start, first)
            part = PageRange(first, part.end)
        found.append(part)
    return found


def _first_of_block(image: Image, pfn: int) -> int:
    """Return the first page frame of the block of pages that a page frame, not its first, is in."""
    frames = mem_map(image)
    try:
        # The second page of two never looks like a head, as those of hugetlb pages can.
        page = read_page(image, frames.page(pfn + 1))
    except FaultError:
        return pfn
    first = frames.pfn(page.head)
    if first < pfn < first + (1 << min(page.order, 63)) and not first & 1:
        return first
    try:
        return ZonePageReader(image).first_page(pfn)
    except FaultError:
        return pfn


def _payer(owner: int, payer: Callable[[int], int | None]) -> int:
    """Return who pays for what an owner was charged for."""
    return owner if owner <= NOBODY else payer(owner) or UNKNOWN_PAYER


class _Rest:
    """
    Adds the pages that have no kind yet.

    :param found: all ranges
    :param coverage: counts what was read, by subject
    """

    def __init__(
        self, image: Image, found: InventoryPart, coverage: defaultdict[str, Coverage]
    ) -> None:
        self._image, self._memory, self._frames = image, image.memory, mem_map(image)
        self._found, self._coverage = found, coverage
        self._sites = SiteFinder(image)
        #: Orders of blocks that nothing marks, that are not compound, and are no single pages.
        self._orders_found: dict[int, int] = {}
        self._orders = array_length(member_type(image.type("struct zone"), "free_area"))
        page = image.type("struct page")
        self._link, self._private = offsetof(page, "lru"), offsetof(page, "private")
        self._markers = bare_markers(image)

    def add(self) -> None:
        """Add the pages that nothing marks: free pages of CPUs, and parts of blocks."""
        found, coverage = self._found, self._coverage
        add = self._add_free_now if self._image.is_moving else self._add_free
        for free in free_lists(self._image, coverage["free_lists"]):
            try:
                add(free)
            except FaultError as error:
                coverage["free_lists"].miss("free pages", error.address, str(error))
        for first in sorted(found.heads):
            self._add_block(first, found.heads[first])
        self._add_unmarked()
        coverage["call_sites"].add(self._sites.coverage)
        for nid, zone, _ in found.bare.values():
            found.count(Place(nid, zone, "unknown", 0), 1, NEVER)

    def _add_free(self, found: FreeList) -> None:
        """
        Add the blocks of a list of free pages.

        :raises drgn.FaultError: if it leads to what is not a free page. A list in a cycle leads to
            a page that has been counted.
        """
        at = found.first
        while at != found.end:
            bare = self._take(found, at)
            if bare is None:
                raise FaultError(
                    f"the list at {found.head:#x} leads to what is not a free page", at
                )
            at = bare.link
        self._coverage["free_lists"].read += 1

    def _add_free_now(self, found: FreeList) -> None:
        """
        Add the blocks of a list that changes while it is read.

        A page that was freed to it after the page's ``struct page`` was read has been counted as
        what it was. If a page is taken from it, the list is read again from its first page. As soon
        as somebody has ``zone->lock`` and frees a page, ``zone->trylock_free_pages`` is empty.

        :raises drgn.FaultError: if it leads to what is not a free page each time
        """
        at = found.first
        for _ in range(_MOST_TRIES):
            wrong = self._follow(found, at)
            if self._image.progress.stop:
                return
            if wrong is None:
                self._coverage["free_lists"].read += 1
                return
            at = self._memory.word(found.head)
        reason = f"the list at {found.head:#x} led to what is not a free page {_MOST_TRIES} times"
        raise FaultError(reason, wrong or 0)

    def _follow(self, found: FreeList, at: int) -> int | None:
        """
        Add the blocks of a list that changes while it is read.

        :param at: address of the ``struct list_head`` of its first page
        :return: the link that is wrong: it is in no free page, or was followed before. ``None`` if
            the end of the list was found
        """
        seen: set[int] = set()
        while at != found.end:
            if at in seen or self._image.progress.stop:
                return at
            seen.add(at)
            try:
                # The list led to it: if it is in use now, it was free when it was called so.
                self._take(found, at)
                raw = self._memory.read(at - self._link, self._frames.size)
            except FaultError:
                return at
            if not all(marker.is_set(raw) for marker in self._markers):
                return at
            at = self._memory.word_at(raw, self._link)
        return None

    def _take(self, free: FreeList, link: int) -> BarePage | None:
        """
        Count a block of free pages.

        :param link: address of the ``struct list_head`` of its first page
        :return: its first page; ``None`` if one of its pages is not free
        :raises drgn.FaultError: if its order cannot be read
        """
        address, order, pages = link - self._link, free.order, self._found.bare
        pfn = self._frames.pfn(address)
        bare = pages.get(pfn)
        if bare is None or address != self._frames.page(pfn):
            return None
        if order is None:
            order = self._memory.word(address + self._private)
        block = range(pfn, pfn + (1 << min(order, 32)))
        if order > 32 or any(each not in pages for each in block):
            return None
        for each in block:
            del pages[each]
        self._found.count(Place(free.nid, free.zone, "free_pcp", order), len(block), UNUSED)
        return bare

    def _add_block(self, first: int, head: Head) -> None:
        """
        Add the other pages of a block that is not compound.

        It is aligned to its size, and ends before the next page that is not bare:
        :meth:`memcg_inspect.linux.mm.page_alloc.BlockReader.order()`.

        :param first: page frame of its first page, which has been counted
        """
        order, bare = 0, self._found.bare
        while not first >> order & 1 and first + (1 << order) in bare:
            order += 1
        size = 1 << order
        tails = [pfn for pfn in range(first + 1, first + size) if pfn in bare]
        if len(tails) != size - 1:
            return
        if head.place.order is not None:
            self._orders_found[first] = order
        else:
            self._found.count(head.place, size - 1, head.owner)
        for pfn in tails:
            del bare[pfn]

    def _add_unmarked(self) -> None:
        """Count the blocks that nothing marks, by their owners."""
        owners = UnmarkedOwners(self._image, self._found.in_slabs, self._coverage).find()
        wanted: dict[int, dict[int, str]] = {
            order: {pfn >> order << order: kind for pfn, kind in owners.items()}
            for order in range(self._orders)
        }
        for (place, payer), blocks in self._found.unmarked.items():
            found: Counter[tuple[int, str, str | None]] = Counter()
            for pfn in blocks:
                order = self._orders_found.get(pfn, place.order or 0)
                kind = wanted[order].get(pfn, place.kind) if order < self._orders else place.kind
                # Who pays for a page of a kind that is never charged cannot be told.
                is_other = payer != NEVER and not KINDS[kind].is_charged
                kind = place.kind if is_other else kind
                found[order, kind, self._site(pfn) if kind == "unknown" else None] += 1
            for (order, kind, site), number in found.items():
                paid_by = NOBODY if payer == NEVER and KINDS[kind].is_charged else payer
                is_of = place._replace(kind=kind, order=order, caller=site)
                self._found.count(is_of, number << order, paid_by)

    def _site(self, pfn: int) -> str | None:
        """Return the line of code that allocated a block, on kernels that profile allocations."""
        if self._sites.why_not:
            return None
        site = self._sites.of_page(self._frames.page(pfn))
        return site.place if site is not None else None
