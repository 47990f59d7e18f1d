# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages mapped by processes
-------------------------

Mirrors :linux:`mm/pagewalk.c`, and what :linux:`mm/memory.c` and :linux:`mm/huge_memory.c` count in
``mm_struct.rss_stat``: ``vm_normal_page()``, ``zap_present_ptes()``, ``zap_nonpresent_ptes()`` and
``zap_huge_pmd()``. ``mm_counter()`` of :linux:`include/linux/mm.h` chooses the counter.

Each table is one read.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from drgn import FaultError, ProgramFlags, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, constant, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.arch.page_tables import user_geometry
from memcg_inspect.linux.arch.pgtable import ENTRY_SHIFT, Entry
from memcg_inspect.linux.mm.mm_types import page_layout, page_nids
from memcg_inspect.linux.mm.mm_types_columns import Marker, PageColumns
from memcg_inspect.linux.mm.mm_types_orders import compound_orders, why_not_block
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges
from memcg_inspect.linux.mm.page_flags import page_flags
from memcg_inspect.linux.mm.vma import vmas
from memcg_inspect.model import Coverage

__all__ = ("Mapped", "PageTableReader")

#: ``VM_PFNMAP`` and ``VM_HUGETLB``: ``rss_stat`` does not count huge pages of such areas.
_VM_PFNMAP, _VM_HUGETLB = 0x400, 0x400000
#: Offsets below this belong to markers (``PTE_MARKER_MASK``). No page frame below it is mapped.
_MARKERS = 16
#: ``FOLIO_MAPPING_ANON`` (up to 6.15 ``PAGE_MAPPING_ANON``).
_MAPPING_ANON = 1
#: ``pgtables_bytes`` counts tables of these levels: ``pud_t``, ``pmd_t`` and ``pte_t``.
_COUNTED_LEVELS = 3
_FILE, _ANON, _SHMEM, _MISSING = range(4)
_ITEMS = {_FILE: "file", _ANON: "anon", _SHMEM: "shmem", _MISSING: None}
#: Layout of a kind as a number: bits 0 and 1 are the item, bit 2 is set for pages of a device, and
#: the node begins at bit 3.
_DEVICE_BIT, _NODE_SHIFT = 4, 3


class _PageKind(NamedTuple):
    """
    How a page counts in ``rss_stat``.

    :ivar item: value of :data:`memcg_inspect.linux.mm.rss_stat.ITEMS`; ``None`` if the ``struct
        page`` is not in the image
    :ivar nid: node
    :ivar device: whether the page is memory of a device (``ZONE_DEVICE``)
    """

    item: str | None
    nid: int
    device: bool


class _PageKinds:
    """
    Kinds of many page frames, ``mm_counter()``.

    Each aligned range of page frames is read once, because processes share pages. No folio is
    larger than a range, except gigantic pages of hugetlb, which are not asked for.
    """

    def __init__(self, image: Image) -> None:
        # MAX_PAGE_ORDER
        self._shift = array_length(member_type(image.type("struct zone"), "free_area")) - 1
        self._memory, self._frames, self._layout = image.memory, mem_map(image), page_layout(image)
        mapping = offsetof(image.type("struct page"), "mapping")
        byte = self._memory.byte_of_word(mapping, 0)
        self._anon = Marker(byte, _MAPPING_ANON, _MAPPING_ANON)
        bit = page_flags(image).swapbacked.shift
        byte = self._memory.byte_of_word(self._frames.flags, bit // 8)
        self._swapbacked = Marker(byte, 1 << bit % 8, 1 << bit % 8)
        device = constant(image, "ZONE_DEVICE")
        self._device = bytes((byte == device) * _DEVICE_BIT for byte in range(256))
        self._end = max((end for _, end in page_ranges(image)), default=0)
        self._pieces: dict[int, array[int]] = {}

    def forget(self) -> None:
        """Read every page again. (On a live kernel, pages are freed and allocated again.)"""
        self._pieces.clear()

    def count(self, pfns: Iterable[int]) -> Counter[_PageKind]:
        """Count page frames by kind."""
        found: Counter[int] = Counter()
        pieces, shift = self._pieces, self._shift
        low = (1 << shift) - 1
        for pfn in pfns:
            if pfn >= self._end:
                found[_MISSING] += 1
                continue
            piece = pieces.get(pfn >> shift)
            if piece is None:
                piece = pieces[pfn >> shift] = self._read(pfn >> shift)
            found[piece[pfn & low]] += 1
        return Counter({_kind(number): count for number, count in found.items()})

    def of(self, pfn: int) -> _PageKind:
        """Return the kind of one page frame."""
        return next(iter(self.count([pfn])))

    def _read(self, number: int) -> array[int]:
        size, length = self._frames.size, self._frames.size << self._shift
        # A folio may span a missing range: find the kinds of all pages first, with zeros for what
        # is missing, and mark the missing ones afterwards.
        data, missing, end = bytearray(length), [], 0
        for offset, part in self._memory.pieces(
            self._frames.page(number << self._shift), length, 2 * size
        ):
            if part is not None:
                data[offset : offset + len(part)] = part
                missing.append((end // size, offset // size))
                end = offset + len(part)
        missing.append((end // size, 1 << self._shift))
        kinds = self._find_kinds(number << self._shift, bytes(data))
        for first, last in missing:
            kinds[first:last] = [_MISSING] * (last - first)
        return array("H", kinds)

    def _find_kinds(self, pfn: int, data: bytes) -> list[int]:
        """
        Return the kind of each ``struct page`` in *data*, as a number.

        :param pfn: page frame of the first one
        """
        layout, columns = self._layout, PageColumns(data, self._frames.size)
        count = columns.count
        anon = columns.of(self._anon)
        shmem = columns.of(self._swapbacked) & ~anon
        zones = columns.flags(layout.zone).translate(self._device)
        # One byte per page in one large integer.
        kinds = anon * _ANON | shmem * _SHMEM | int.from_bytes(zones, "little")
        # A tail page has the kind of its head. It is missing if its head is.
        tails = columns.of(layout.tail)
        column = bytearray((kinds | tails * _MISSING).to_bytes(count, "little"))
        heads = columns.of(layout.head) & ~tails

        def why_not(i: int, order: int, tails: bytes) -> str | None:
            return why_not_block(pfn + i, order)

        for i, order in compound_orders(columns, layout.tail, layout.order, heads, why_not=why_not):
            end = min(i + (1 << order), count)
            column[i:end] = bytes([column[i]]) * (end - i)
        nids = page_nids(self._memory, self._frames, columns)
        if isinstance(nids, int):
            return [kind | nids << _NODE_SHIFT for kind in column]
        return [kind | nid << _NODE_SHIFT for kind, nid in zip(column, nids, strict=True)]


def _kind(number: int) -> _PageKind:
    return _PageKind(_ITEMS[number & 3], number >> _NODE_SHIFT, bool(number & _DEVICE_BIT))


class Mapped(NamedTuple):
    """
    The pages that a process has mapped.

    :ivar pages: number of pages by item (:data:`memcg_inspect.linux.mm.rss_stat.ITEMS`) and node;
        the node is ``None`` for swap entries
    :ivar missing: number of tables and pages that are unreadable: more pages may be mapped
    """

    pages: Counter[tuple[str, int | None]]
    missing: int

    def total(self, item: str) -> int:
        """Return the number of pages of an item on all nodes."""
        return sum(pages for (name, _), pages in self.pages.items() if name == item)


class PageTableReader:
    """
    Reader of the page tables of processes.

    :raises ImageError: if the format of the page tables is not known
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self._progress = image.progress
        self._geometry = user_geometry(image)
        self._memory, self._frames = image.memory, mem_map(image)
        self._kinds = _PageKinds(image)
        members = image.type("struct mm_struct")
        self._pgd = offsetof(members, "pgd")
        self._bytes = offsetof(members, "pgtables_bytes")
        # nr_swapfiles needs CONFIG_SWAP, huge_zero_pfn CONFIG_TRANSPARENT_HUGEPAGE.
        self._swapfiles = _number(image, "nr_swapfiles", 0)
        self._huge_zero_pfn = _number(image, "huge_zero_pfn", -1)
        self._hwpoison = constant(image, "PG_hwpoison")  # CONFIG_MEMORY_FAILURE

    def walk(self, mm: int, coverage: Coverage) -> Mapped:
        """
        Count the pages that a process has mapped.

        :param mm: ``struct mm_struct *``
        :param coverage: counts the process as read, and what is unreadable
        """
        if self.image.prog.flags & ProgramFlags.IS_LIVE:
            self._kinds.forget()
        self._mm = mm
        self._coverage = coverage
        self._pages: Counter[tuple[str, int | None]] = Counter()
        self._missing = 0
        self._seen: set[tuple[int, int]] = set()
        self._counted = 0
        self._areas: list[tuple[int, int, int]] | None = None
        try:
            pgd = self._memory.word(mm + self._pgd)
            self._most = self._most_tables(mm)
            self._levels = self._geometry.levels_of(self.image.pointer("struct mm_struct *", mm))
        except FaultError as error:
            self._missed("mm_struct", error.address, str(error))
        else:
            self._table(pgd, self._levels, 0)
            self._coverage.read += 1
        return Mapped(self._pages, self._missing)

    def _most_tables(self, mm: int) -> int | None:
        """
        Return the bytes of the page tables of the lowest levels that a process has.

        ``pgtables_bytes`` counts the tables of ``pud_t``, ``pmd_t`` and ``pte_t``.

        :return: ``None`` on a running kernel, where a process gets new ones while they are read
        :raises drgn.FaultError: if the counter cannot be read
        """
        if self.image.prog.flags & ProgramFlags.IS_LIVE:
            return None
        one = self._geometry.length(_COUNTED_LEVELS, False) << ENTRY_SHIFT
        return self._memory.word(mm + self._bytes) + self._geometry.uncounted * one

    def _missed(self, what: str, address: int, reason: str) -> None:
        self._missing += 1
        self._coverage.miss(what, address, reason)

    def _table(self, table: int, level: int, start: int) -> None:
        """
        Count the pages that a table maps.

        :param table: address of the table
        :param level: 1 for a table of PTEs
        :param start: first user address that the table maps
        """
        if self._progress.stop:
            self._missed("page table", table, STOPPED)
            return
        if (table, level) in self._seen:
            self._missed("page table", table, "it is in the page tables of a process twice")
            return
        self._seen.add((table, level))
        memory, geometry = self._memory, self._geometry
        # The table at the top is not counted, however few levels there are.
        if level <= _COUNTED_LEVELS and level < self._levels:
            self._counted += geometry.length(level, False) << ENTRY_SHIFT
        if self._most is not None and self._counted > self._most:
            self._missed("page table", table, "the process has more page tables than it counts")
            return
        number = geometry.length(level, level == self._levels)
        try:
            entries = geometry.words(memory, memory.read(table, number << ENTRY_SHIFT))
        except FaultError as error:
            self._missed("page table", error.address, str(error))
            return
        if level == 1:
            self._add(geometry.plain_pfns(entries), 1)
            for other in geometry.other_entries(entries):
                self._other(other, 1)
            return
        size = geometry.pages_of(level) << self._frames.page_shift
        for i, word in enumerate(entries):
            entry = geometry.entry(word, level) if word else None
            if entry is None:
                continue
            address = start + i * size
            if entry.kind == "table":
                below = self._frames.virt(self._frames.page(entry.pfn)) + entry.offset
                self._table(below, level - 1, address)
            else:
                self._huge(entry, geometry.pages_of(level), address)

    def _add(self, pfns: Iterable[int], pages: int) -> None:
        for kind, number in self._kinds.count(pfns).items():
            if kind.item is None:
                self._missed("page", 0, f"{number} page frames have no struct page in the image")
            else:
                self._pages[kind.item, kind.nid] += number * pages

    def _other(self, entry: Entry, pages: int) -> None:
        if entry.kind == "page":
            self._add([entry.pfn], pages)
        elif entry.kind == "swap" and entry.type < self._swapfiles:
            self._pages["swapents", None] += pages
        elif entry.kind == "swap" and entry.offset >= _MARKERS:
            # zap_nonpresent_ptes(): pages under migration and pages of a device are counted,
            # hwpoisoned ones are not.
            pfn = entry.offset & self._geometry.swap_pfn_mask
            if not self._is_hwpoisoned(pfn):
                self._add([pfn], pages)

    def _huge(self, entry: Entry, pages: int, address: int) -> None:
        # zap_huge_pmd()
        flags = self._vm_flags(address)
        if flags is None or flags & (_VM_PFNMAP | _VM_HUGETLB):
            return
        if entry.kind == "page" and self._huge_zero_pfn == entry.pfn:
            return
        if entry.kind == "page" and self._kinds.of(entry.pfn).device:
            # Whether rss_stat counts them depends on the release, and no type tells it.
            self._missed("huge page of a device", address, "whether it is counted is not known")
            return
        self._other(entry, pages)

    def _is_hwpoisoned(self, pfn: int) -> bool:
        if self._hwpoison is None:
            return False
        try:
            flags = self._memory.word(self._frames.page(pfn) + self._frames.flags)
        except FaultError:
            return False  # _PageKinds.count() reports that it is missing
        return bool(flags >> self._hwpoison & 1)

    def _vm_flags(self, address: int) -> int | None:
        """Return ``vma->vm_flags`` of an address; ``None`` if they cannot be read."""
        if self._areas is None:
            mm = self.image.pointer("struct mm_struct *", self._mm)
            try:
                self._areas = sorted(
                    (int(vma.vm_start), int(vma.vm_end), int(vma.vm_flags))
                    for vma in vmas(self.image, mm)
                )
            except FaultError as error:
                self._areas = []
                self._coverage.miss("memory areas of a process", error.address, str(error))
        i = bisect_right(self._areas, address, key=itemgetter(0)) - 1
        if i < 0 or address >= self._areas[i][1]:
            self._missed("huge page", address, "it is in no memory area")
            return None
        return self._areas[i][2]


def _number(image: Image, name: str, missing: int) -> int:
    try:
        return int(image.object(name).value_())
    except UnknownKernelError:
        return missing
