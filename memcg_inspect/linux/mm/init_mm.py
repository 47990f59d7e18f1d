# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables of the kernel
-------------------------

Mirrors ``init_mm.pgd`` (:linux:`mm/init-mm.c`), ``pgd_list`` of :linux:`arch/x86/mm/pgtable.c`,
which has the top-level tables of all processes, and ``mm_struct.pgd`` where there is no such list.

A table is read once, however often it is mapped. (The shadow of KASAN maps the same tables again
and again.) Tables of the direct map are counted, and not read: they may be many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drgn import FaultError, offsetof
from drgn.helpers.linux.mm import follow_page

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.arch.page_tables import has_user_half, page_table_geometry
from memcg_inspect.linux.arch.pgtable import Entry, Geometry
from memcg_inspect.linux.kernel.sched import find_tasks
from memcg_inspect.linux.lib.xarray import MOST_NODES
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges
from memcg_inspect.model import Coverage, ImageError

__all__ = ("KernelTables", "kernel_page", "top_table_pages", "user_tables")


#: Tables of this level have entries that map huge pages, and those above it have none.
_HUGE_LEVEL = 3
#: Tables of PTEs that are kept: 5 MiB of memory.
_MOST_TABLES = 256


class KernelTables:
    """
    The page tables of the kernel.

    :ivar pfns: page frames of the tables; empty on machines whose tables cannot be read
    :ivar can_read: whether the format of the tables is known
    :param coverage: counts the tables that were read, and those that are unreadable
    """

    def __init__(self, image: Image, coverage: Coverage) -> None:
        self._image, self._memory, self._frames = image, image.memory, mem_map(image)
        self._coverage = coverage
        self.pfns: set[int] = set()
        self._tables: dict[int, tuple[int, ...]] = {}
        # The entries of the two lowest levels above PTEs, by their part of the address.
        self._entries: dict[tuple[int, int], Entry] = {}
        end = max((part.end for part in page_ranges(image)), default=0)
        direct = self._frames.direct_map
        self._direct = range(direct, direct + (end << self._frames.page_shift))
        try:
            self._geometry: Geometry | None = page_table_geometry(image)
        except ImageError:
            self._geometry = None
        self.can_read = self._geometry is not None
        if self._geometry is not None:
            self._walk(self._geometry)

    def _walk(self, geometry: Geometry) -> None:
        pgd = self._image.object("init_mm").pgd.value_()
        try:
            words = self._memory.words(self._memory.read(pgd, self._frames.page_size))
            self.pfns.add(self._frames.pfn(kernel_page(self._image, pgd)))
        except FaultError as error:
            self._coverage.miss("page tables of the kernel", pgd, str(error))
            return
        self._walk_upper(geometry, words)
        try:
            if has_user_half(self._image):
                self._walk_user(geometry, pgd + self._frames.page_size)
        except FaultError as error:
            self._coverage.miss("page tables of user space", error.address, str(error))

    def _walk_upper(self, geometry: Geometry, words: list[int]) -> None:
        """:param words: the top-level table"""
        todo = [(geometry.levels, geometry.kernel_base(), words[: geometry.top])]
        while todo:
            level, base, words = todo.pop()
            for number, word in enumerate(words):
                if level == geometry.levels and number < geometry.kernel:
                    continue
                entry = geometry.entry(word, level) if geometry.is_valid(word) else None
                if entry is not None:
                    address = base + (number << geometry.shift(level))
                    todo += self._below(geometry, entry, level, address)

    def _walk_user(self, geometry: Geometry, pgd: int) -> None:
        """
        Add what user space sees of the kernel, ``pti_init()`` of :linux:`arch/x86/mm/pti.c`.

        :param pgd: the table for user space, which follows the top-level table of the kernel
        :raises drgn.FaultError: if a table cannot be read
        """
        words = self._memory.words(self._memory.read(pgd, self._frames.page_size))
        todo = [(geometry.levels, words[geometry.kernel :])]
        while todo:
            level, words = todo.pop()
            for word in words:
                entry = geometry.entry(word, level) if geometry.is_valid(word) else None
                # Some tables of the kernel are shared.
                if entry is None or entry.kind != "table" or entry.pfn in self.pfns:
                    continue
                self.pfns.add(entry.pfn)
                self._coverage.read += 1
                if level > 2:
                    todo.append((level - 1, list(self._table(entry.pfn))))

    def _below(
        self, geometry: Geometry, entry: Entry, level: int, address: int
    ) -> list[tuple[int, int, list[int]]]:
        """Note an entry. Return the table that it points to if it is to be read."""
        is_direct = address in self._direct
        if level <= _HUGE_LEVEL and not is_direct:
            self._entries[level, address >> geometry.shift(level)] = entry
        if entry.kind != "table" or entry.pfn in self.pfns:
            return []
        self.pfns.add(entry.pfn)
        self._coverage.read += 1
        if level == 2:
            return []  # a table of PTEs is read if its pages are asked for
        try:
            return [(level - 1, address, list(self._table(entry.pfn)))]
        except FaultError as error:
            self._coverage.miss("page table of the kernel", error.address, str(error))
            return []

    def _table(self, pfn: int) -> tuple[int, ...]:
        address = self._frames.virt(self._frames.page(pfn))
        return tuple(self._memory.words(self._memory.read(address, self._frames.page_size)))

    def frames(self, start: int, size: int) -> Iterator[Sequence[int]]:
        """
        Yield the page frames behind a range of kernel addresses, as far as any are mapped.

        :param start: ``void *``, aligned to a page
        :param size: in bytes
        :return: one page frame for each page, in the order of the addresses; a ``range`` of those
            that an entry maps together
        """
        shift = self._frames.page_shift
        if start in self._direct:
            first = self._frames.pfn(self._frames.virt_to_page(start))
            yield range(first, first + (size >> shift))
            return
        geometry = self._geometry
        if geometry is None:
            yield list(self._one_by_one(start, size >> shift))
            return
        address, end, block = start, start + size, geometry.shift(2)
        while address < end:
            limit = min(end, (address >> block) + 1 << block)
            yield self._in_block(geometry, address, limit - address >> shift)
            address = limit

    def _in_block(self, geometry: Geometry, address: int, count: int) -> Sequence[int]:
        """:param count: pages, none of them beyond what a table of PTEs maps"""
        shift = self._frames.page_shift
        table = 0
        for level in range(min(_HUGE_LEVEL, geometry.levels), 1, -1):
            entry = self._entries.get((level, address >> geometry.shift(level)))
            if entry is None:
                return ()
            if entry.kind != "table":
                inside = address & (1 << geometry.shift(level)) - 1
                first = entry.pfn + (inside >> shift)
                return range(first, first + count)
            table = entry.pfn
        try:
            words = self._tables.get(table)
            if words is None:
                words = self._tables[table] = self._table(table)
                if len(self._tables) > _MOST_TABLES:
                    del self._tables[next(iter(self._tables))]
        except FaultError as error:
            self._coverage.miss("page table of the kernel", error.address, str(error))
            return ()
        number = (address >> shift) % geometry.entries
        return geometry.plain_pfns(words[number : number + count])

    def _one_by_one(self, address: int, count: int) -> Iterator[int]:
        for start in range(
            address, address + count * self._frames.page_size, self._frames.page_size
        ):
            try:
                yield self._frames.pfn(kernel_page(self._image, start))
            except FaultError:
                continue  # not mapped


def kernel_page(image: Image, address: int) -> int:
    """
    Return the page that a kernel address is mapped to, as ``vmalloc_to_page()`` does.

    :return: ``struct page *``
    :raises drgn.FaultError: the address is not mapped, or a page table is unreadable
    """
    try:
        return int(follow_page(image.object("init_mm").address_of_(), address).value_())
    except (NotImplementedError, ValueError) as error:
        raise FaultError(str(error), address) from error


def user_tables(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Yield the page frames of the two upper levels of the page tables of processes.

    Up to 6.15, these have no page type. The levels below have one in each kernel.

    :param coverage: counts the top-level tables, and those that are unreadable
    :return: nothing on machines whose page tables cannot be read
    """
    try:
        geometry = page_table_geometry(image)
    except ImageError:
        return
    frames = mem_map(image)
    for pgd in _tops(image, coverage):
        try:
            # On arm64, a table at the top that is less than a page is in a slab.
            if geometry.top == geometry.entries:
                yield frames.pfn(frames.virt_to_page(pgd))
            yield from _lower_tables(image, geometry, pgd)
            coverage.read += 1
        except FaultError as error:
            coverage.miss("page table", error.address, str(error))


def top_table_pages(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Yield the pages of the top-level tables of processes that may be compound.

    On s390 each has four pages, ``crst_table_alloc()`` of :linux:`arch/s390/mm/pgalloc.c`. They are
    charged, and have no page type before commit d95936a2267c ("mm: introduce ctor/dtor at PGD
    level") (in v6.14).

    :param coverage: counts the tasks whose tables are unreadable
    :return: ``struct page *``; nothing on machines whose tables are known to be single pages
    """
    try:
        page_table_geometry(image)
    except ImageError:
        frames = mem_map(image)
        yield from map(frames.virt_to_page, _tops(image, coverage))


def _tops(image: Image, coverage: Coverage) -> Iterator[int]:
    """Yield the addresses of the top-level tables of processes."""
    try:
        head = image.object("pgd_list").address_of_().value_()
    except UnknownKernelError:  # not on x86
        yield from _tops_of_tasks(image, coverage)
        return
    memory, frames = image.memory, mem_map(image)
    # pgd_list_add(): page->lru, since 6.7 ptdesc->pt_list.
    link = offsetof(image.type("struct page"), "lru")
    at, seen = head, {head}
    try:
        while (at := memory.word(at)) not in seen:
            if len(seen) > MOST_NODES:
                raise FaultError("the list does not end", at)
            seen.add(at)
            yield frames.virt(at - link)
    except FaultError as error:
        coverage.miss("pgd_list", error.address, str(error))


def _tops_of_tasks(image: Image, coverage: Coverage) -> Iterator[int]:
    """Yield the top-level tables of all tasks, and of those that kernel threads have borrowed."""

    def missed(error: FaultError) -> None:
        coverage.miss("task", error.address, str(error))

    seen = {0, int(image.object("init_mm").address_of_())}
    for task in find_tasks(image, missed):
        for member in ("mm", "active_mm"):
            try:
                mm = task.member_(member)
                if mm.value_() in seen:
                    continue
                seen.add(mm.value_())
                yield mm.pgd.value_()
            except FaultError as error:
                missed(error)


def _lower_tables(image: Image, geometry: Geometry, pgd: int) -> Iterator[int]:
    """Yield the tables of P4Ds and PUDs below a top-level table that map user space."""
    memory, frames = image.memory, mem_map(image)
    # The levels above those of PTEs and PMDs.
    todo = [(geometry.levels, pgd, geometry.user)]
    while todo:
        level, table, count = todo.pop()
        data = memory.read(table, count * memory.word_size)
        for word in filter(None, memory.words(data)):
            entry = geometry.entry(word, level)
            if entry is not None and entry.kind == "table" and level > _HUGE_LEVEL:
                yield entry.pfn
                below = frames.virt(frames.page(entry.pfn))
                if level - 1 > _HUGE_LEVEL:
                    todo.append((level - 1, below, geometry.entries))
