# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages that a process has mapped, in page tables made by hand.

The tables have four levels, as on x86-64, and what they map is written down here.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from drgn import Object, ProgramFlags
from support.layouts import FRAMES, NODE_1
from support.made_pages import NO_TYPE, TYPES, kernel_with_pages, put, put_compound

from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.mm import pagewalk
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.pagewalk import Mapped, PageTableReader
from memcg_inspect.model import Coverage

MM, AREA, VARIABLES = 0xFFFF888030000000, 0xFFFF888030001000, 0xFFFFFFFF82000000
#: Page frames of page tables. Those below have a ``struct page``.
FIRST_TABLE, PAGES = 0x1000, 640
#: Bits of an entry: _PAGE_PRESENT, _PAGE_PSE, _PAGE_SPECIAL.
PRESENT, PSE, SPECIAL = 1, 1 << 7, 1 << 9
SWAPBACKED, HWPOISON = 1 << 19, 1 << 21
#: The zone of device memory, below the node.
DEVICE = 2 << 61
VM_PFNMAP, VM_HUGETLB = 0x400, 0x400000
MAPPING, MISSING = 0xFFFF888031000000, 0xFFFF888077700000
PTE, PMD, PUD = 1, 2, 3


def swap(kind: int, offset: int) -> int:
    """Return a swap entry, as ``swp_entry_to_pte()`` of x86-64."""
    return kind << 59 | (~offset & (1 << 50) - 1) << 9


class Process:
    """
    A process of a made kernel, which has a table at the top and no other.

    :param levels: number of levels of its tables
    :param is_small: whether the kernel has no swap, no huge pages and no CONFIG_MEMORY_FAILURE
    """

    def __init__(self, levels: int = 4, is_small: bool = False) -> None:
        self.levels = levels
        image = self.image = kernel_with_pages(TYPES["7.1"])
        image.declare(
            """
            struct free_area { long nr_free; };
            struct zone { struct free_area free_area[8]; };
            struct vm_area_struct { unsigned long vm_start; unsigned long vm_end;
                                    struct vm_area_struct *vm_next; unsigned long vm_flags; };
            struct mm_struct { struct vm_area_struct *mmap; unsigned long *pgd;
                               long pgtables_bytes; };
            """
        )
        image.enum("zone_type", ZONE_DMA=0, ZONE_NORMAL=1, ZONE_DEVICE=2, __MAX_NR_ZONES=3)
        if not is_small:
            image.enum(None, PG_hwpoison=21)
        for pfn in range(PAGES):
            put(image, pfn, 0, NO_TYPE, 0)
        self.number, self.areas = 0, 0
        self.tables: dict[tuple[int, int], int] = {}
        top = self.table(levels, 0)
        image.make("struct mm_struct", MM, {"pgd": self.address(top)})
        if levels == 5:
            image.variable("VMCOREINFO", "char[64]", VARIABLES + 64)
            image.write(VARIABLES + 64, b"NUMBER(pgtable_l5_enabled)=1\n\0")
        if not is_small:
            for n, (name, value) in enumerate(
                {"nr_swapfiles": 2, "huge_zero_pfn": 0x20000}.items()
            ):
                image.variable(name, "unsigned long", VARIABLES + 8 * n)
                image.words(VARIABLES + 8 * n, value)

    def address(self, pfn: int) -> int:
        return FRAMES.virt(FRAMES.page(pfn))

    def table(self, level: int, address: int) -> int:
        """Return the page frame of the table of a level that maps an address."""
        key = level, address >> 12 + 9 * level
        if key not in self.tables:
            self.tables[key] = FIRST_TABLE + len(self.tables)
            self.image.write(self.address(self.tables[key]), bytes(4096))
            if level < self.levels:
                self.number += level <= PUD
                self.count(self.number)
                self.put(address, self.tables[key] << 12 | PRESENT, level + 1)
        return self.tables[key]

    def count(self, tables: int) -> None:
        """Say how many tables there are besides that at the top."""
        self.image.words(MM + 16, tables << 12)

    def put(self, address: int, entry: int, level: int = PTE) -> None:
        table, index = self.table(level, address), address >> 3 + 9 * level & 511
        self.image.words(self.address(table) + 8 * index, entry)

    def area(self, start: int, end: int, flags: int = 0) -> None:
        """Add a memory area, which can be read and written."""
        self.areas += 1
        flags |= 0x33
        at, before = AREA + 64 * self.areas, AREA + 64 * (self.areas - 1)
        members = {"vm_start": start, "vm_end": end, "vm_flags": flags}
        self.image.make("struct vm_area_struct", at, members)
        self.image.words(MM if self.areas == 1 else before + 16, at)

    def page(self, pfn: int, mapping: int, flags: int = 0) -> None:
        """Set what tells the kind of a page that is not compound."""
        put(self.image, pfn, flags, NO_TYPE, 0)
        self.image.words(FRAMES.page(pfn) + 24, mapping)

    def walk(self) -> tuple[Mapped, Coverage]:
        coverage = Coverage()
        return PageTableReader(self.image).walk(MM, coverage), coverage

    def pages(self) -> dict[tuple[str, int | None], int]:
        """Return the pages that are mapped. All that is mapped must be readable."""
        mapped, coverage = self.walk()
        assert (mapped.missing, coverage.unreadable, coverage.read) == (0, 0, 1), coverage.examples
        return dict(mapped.pages)

    def missed(self) -> tuple[dict[tuple[str, int | None], int], set[tuple[str, int]]]:
        """Return the pages that are mapped, and what is missing with its address."""
        mapped, coverage = self.walk()
        assert mapped.missing == coverage.unreadable
        return dict(mapped.pages), {(one.what, one.address) for one in coverage.examples}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(pagewalk, "page_ranges", lambda image: [PageRange(0, PAGES)])
    return Process()


def test_a_page_counts_by_its_mapping_and_its_node(process: Process) -> None:
    """mm_counter(): anonymous pages, those of files, and those of files that swap space backs."""
    process.page(3, MAPPING | 1, SWAPBACKED)
    process.page(4, MAPPING, 0)
    process.page(5, MAPPING, SWAPBACKED)
    process.page(6, MAPPING | 1, SWAPBACKED | NODE_1)
    process.page(7, 0, NODE_1)
    for n, pfn in enumerate((3, 4, 5, 6, 7, 3)):
        process.put(0x7F0000000000 + n * 0x40201000, pfn << 12 | PRESENT)
    mapped = process.walk()[0]
    assert mapped.pages == {
        ("anon", 0): 2, ("anon", 1): 1, ("file", 0): 1, ("file", 1): 1, ("shmem", 0): 1,
    }  # fmt: skip
    assert (mapped.total("anon"), mapped.total("file"), mapped.total("swapents")) == (3, 2, 0)
    assert process.pages() == mapped.pages


def test_each_page_of_a_folio_counts_as_the_folio(process: Process) -> None:
    put_compound(process.image, TYPES["7.1"], 64, 2, SWAPBACKED | NODE_1, NO_TYPE, 0)
    process.image.words(FRAMES.page(64) + 24, MAPPING | 1)
    put_compound(process.image, TYPES["7.1"], 68, 1, 0, NO_TYPE, 0)
    for n in range(8):
        process.put(0x1000 * n, 63 + n << 12 | PRESENT)
    assert process.pages() == {("anon", 1): 4, ("file", 0): 4}


def test_entries_that_are_not_present(process: Process) -> None:
    """zap_nonpresent_ptes() counts swap entries, and pages that are on their way."""
    process.page(9, MAPPING | 1, SWAPBACKED)
    process.page(18, MAPPING | 1, SWAPBACKED | HWPOISON)
    entries = [
        swap(0, 9),  # on the first swap device
        swap(1, 9),  # on the last one
        swap(31, 9),  # a marker (PTE_MARKER_MASK)
        swap(31, 15),
        9 << 12 | PRESENT | SPECIAL,
        0,
    ]
    for n, entry in enumerate(entries):
        process.put(0x1000 * n, entry)
    assert process.pages() == {("swapents", None): 2}
    for n, pfn in enumerate((16, 17, 18)):  # offsets below 16 are no page frames
        process.put(0x100000 + 0x1000 * n, swap(2 + n, pfn))
    assert process.pages() == {("swapents", None): 2, ("file", 0): 2}


@pytest.mark.usefixtures("process")
def test_kernels_without_swap_and_broken_memory() -> None:
    """Every entry that is not present, and is no marker, is that of a page on its way."""
    process = Process(is_small=True)
    process.page(20, MAPPING | 1, SWAPBACKED | HWPOISON)
    process.put(0, swap(0, 20))
    process.page(512, MAPPING, NODE_1)
    process.area(1 << 21, 2 << 21)
    process.put(1 << 21, 512 << 12 | PRESENT | PSE, PMD)
    assert process.pages() == {("anon", 0): 1, ("file", 1): 512}


def test_huge_pages(process: Process) -> None:
    """zap_huge_pmd(): those of hugetlb and of devices are not counted, nor is that of zeroes."""
    process.page(0, MAPPING | 1, SWAPBACKED)
    huge, size = PRESENT | PSE, 1 << 21
    process.area(0x40000000, 0x40000000 + 4 * size)
    process.area(0x40000000 + 4 * size, 0x40000000 + 5 * size, VM_HUGETLB)
    process.area(0x40000000 + 5 * size, 0x40000000 + 6 * size, VM_PFNMAP)
    process.put(0x40000000, huge, PMD)
    process.put(0x40000000 + size, huge | SPECIAL, PMD)
    process.put(0x40000000 + 2 * size, 0x20000 << 12 | huge, PMD)
    process.put(0x40000000 + 4 * size, huge, PMD)
    process.put(0x40000000 + 5 * size, huge, PMD)
    assert process.pages() == {("anon", 0): 512}
    # One on its way counts with all of its pages.
    process.page(64, MAPPING | 1, SWAPBACKED | NODE_1)
    process.put(0x40000000 + 3 * size, swap(30, 64), PMD)
    assert process.pages() == {("anon", 0): 512, ("anon", 1): 512}
    process.area(0x80000000, 0xC0000000)
    process.put(0x80000000, huge, PUD)
    assert process.pages() == {("anon", 0): 512 + 512 * 512, ("anon", 1): 512}


def test_huge_pages_that_may_count_or_not(process: Process) -> None:
    """No type tells whether those of devices do, and what is in no memory area has no flags."""
    process.page(0, MAPPING | 1, SWAPBACKED)
    process.page(512, MAPPING, DEVICE)
    size = 1 << 21
    process.area(size, 3 * size)
    for address, pfn in ((0, 0), (size, 0), (2 * size, 512), (3 * size, 0)):
        process.put(address, pfn << 12 | PRESENT | PSE, PMD)
    pages, missing = process.missed()
    assert pages == {("anon", 0): 512}
    device = "huge page of a device", 2 * size
    assert missing == {("huge page", 0), device, ("huge page", 3 * size)}
    _, coverage = process.walk()
    reasons = {one.what: one.reason for one in coverage.examples}
    assert reasons["huge page of a device"] == "whether it is counted is not known"
    # Small pages of devices count as others do.
    process.put(0x40000000, 512 << 12 | PRESENT)
    assert process.missed()[0] == {("anon", 0): 512, ("file", 0): 1}


def test_memory_areas_that_are_not_in_the_image(process: Process) -> None:
    process.put(0, PRESENT | PSE, PMD)
    process.image.words(MM, 0xFFFF888077700000)
    mapped, coverage = process.walk()
    assert not mapped.pages
    assert {one.what for one in coverage.examples} == {"memory areas of a process", "huge page"}


def test_pages_whose_struct_page_is_not_in_the_image(process: Process) -> None:
    """Of a folio, the pages with the missing part are missing; without its head, all of it is."""
    types = TYPES["7.1"]
    put_compound(process.image, types, 0, 7, 0, NO_TYPE, 0)
    put_compound(process.image, types, 128, 7, 0, NO_TYPE, 0)
    for pfn in (64, 128, 256):
        process.image.forget(FRAMES.page(pfn))
    # What the memory map has behind the last page that is online may be anything.
    process.page(PAGES, MAPPING | 1)
    for n, pfn in enumerate((0, 1, 63, 64, 127, 128, 191, 192, 255, 319, 320, PAGES, 1 << 39)):
        process.put(0x1000 * n, pfn << 12 | PRESENT)
    mapped, coverage = process.walk()
    assert mapped.pages == {("file", 0): 4}
    [example] = coverage.examples
    assert (example.what, example.address) == ("page", 0)
    assert "9 page frames" in example.reason


@pytest.mark.parametrize("order", [3, 7, 0x82])
def test_a_folio_that_says_no_order(process: Process, order: int) -> None:
    """Its tails are missing. The pages behind it are what they are."""
    types = TYPES["7.1"]
    put_compound(process.image, types, 68, 2, SWAPBACKED, NO_TYPE, 0)
    process.image.words(FRAMES.page(68) + 24, MAPPING | 1)
    process.image.write(FRAMES.page(69), bytes([order]))
    put_compound(process.image, types, 72, 2, 0, NO_TYPE, 0)
    for n in range(12):
        process.put(0x1000 * n, 64 + n << 12 | PRESENT)
    mapped, coverage = process.walk()
    assert mapped.pages == {("file", 0): 8, ("anon", 0): 1}
    [example] = coverage.examples
    assert "3 page frames" in example.reason


def test_tables_that_are_not_in_the_image(process: Process) -> None:
    process.put(0x1000, 3 << 12 | PRESENT)
    process.put(0x200000, 4 << 12 | PRESENT)
    gone = process.address(process.table(PTE, 0x200000))
    process.image.forget(gone)
    assert process.missed() == ({("file", 0): 1}, {("page table", gone)})
    process.image.words(MM + 8, 0xFFFF888077700000)
    assert process.missed() == ({}, {("page table", 0xFFFF888077700000)})
    process.image.forget(MM)
    mapped, coverage = process.walk()
    assert (mapped.missing, coverage.read) == (1, 0)
    assert coverage.examples[0].what == "mm_struct"


def test_a_table_that_two_entries_lead_to(process: Process) -> None:
    """No table of a process is in its page tables twice."""
    process.put(0x1000, 3 << 12 | PRESENT)
    table = process.table(PTE, 0x1000)
    process.put(0x40000000, table << 12 | PRESENT, PMD)
    pages, missing = process.missed()
    assert pages == {("file", 0): 1}
    assert missing == {("page table", process.address(table))}


def test_more_tables_than_the_process_counts(process: Process) -> None:
    """pgtables_bytes includes every table but that at the top: others are of a damaged entry."""
    process.put(0x1000, 3 << 12 | PRESENT)
    process.put(0x8000000000, 3 << 12 | PRESENT)
    assert process.pages() == {("file", 0): 2}
    process.count(5)
    pages, missing = process.missed()
    assert pages == {("file", 0): 1}
    assert missing == {("page table", process.address(process.table(PTE, 0x8000000000)))}


@pytest.mark.usefixtures("process")
def test_tables_that_no_process_counts() -> None:
    """pgtables_bytes has none of p4d_t, which there are with five levels."""
    process = Process(levels=5)
    for address in (0, 1 << 48):
        process.put(address, 3 << 12 | PRESENT)
    assert process.pages() == {("file", 0): 2}
    process.count(5)
    assert process.missed()[0] == {("file", 0): 1}


def test_a_running_kernel(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may get new tables while they are read, and pages are allocated again."""
    process.put(0x1000, 3 << 12 | PRESENT)
    reader = PageTableReader(process.image)
    assert reader.walk(MM, Coverage()).pages == {("file", 0): 1}
    process.page(3, MAPPING | 1, SWAPBACKED)
    assert reader.walk(MM, Coverage()).pages == {("file", 0): 1}  # it is read once
    process.count(1)

    prog, image = process.image.prog, process.image

    def pointer(name: str, address: int) -> Object:
        return Object(prog, image.type(name), value=address)

    monkeypatch.setattr(image, "pointer", pointer)
    monkeypatch.setattr(image, "prog", SimpleNamespace(flags=ProgramFlags.IS_LIVE))
    assert reader.walk(MM, Coverage()).pages == {("anon", 0): 1}


def test_a_walk_that_is_stopped(process: Process) -> None:
    process.put(0x1000, 3 << 12 | PRESENT)
    process.image.progress.stop = True
    mapped, coverage = process.walk()
    assert (mapped.pages, mapped.missing) == (Counter(), 1)
    assert coverage.examples[0].what == "page table"


def why(process: Process) -> list[tuple[str, int, str]]:
    """Return what is missing, where, and why."""
    _, coverage = process.walk()
    return [(one.what, one.address, one.reason) for one in coverage.examples]


def test_why_pages_are_missing(process: Process) -> None:
    process.put(0, 3 << 12 | PRESENT)
    table = process.address(process.table(PTE, 0))
    assert why(process) == []
    process.put(0x1000, PAGES << 12 | PRESENT)
    process.put(0x2000, PAGES - 1 << 12 | PRESENT)
    lost = "page", 0, "1 page frames have no struct page in the image"
    assert why(process) == [lost]
    process.put(0x40000000, (table - FRAMES.direct_map) | PRESENT, PMD)
    twice = "page table", table, "it is in the page tables of a process twice"
    assert why(process) == [lost, twice]
    process.put(0x40000000, PRESENT | PSE, PMD)
    assert why(process) == [lost, ("huge page", 0x40000000, "it is in no memory area")]
    process.put(0x40000000, 0, PMD)
    process.count(2)
    more = "the process has more page tables than it counts"
    assert why(process)[0] == ("page table", table, more)
    process.image.progress.stop = True
    top = process.address(process.table(4, 0))
    assert why(process) == [("page table", top, STOPPED)]


def test_structures_of_a_process_that_are_missing(process: Process) -> None:
    process.put(0, PRESENT | PSE, PMD)
    process.put(1 << 21, PRESENT | PSE, PMD)
    process.image.words(MM, MISSING)
    mapped, coverage = process.walk()
    assert (mapped.missing, coverage.unreadable, coverage.read) == (2, 3, 1)
    assert why(process) == [
        ("huge page", 0, "it is in no memory area"),
        ("huge page", 1 << 21, "it is in no memory area"),
        ("memory areas of a process", MISSING, f"not made: {MISSING:#x}"),
    ]
    process.image.words(MM + 8, MISSING)
    assert why(process) == [("page table", MISSING, f"not made: {MISSING:#x}")]
    process.image.forget(MM)
    assert why(process) == [("mm_struct", MM + 8, f"not made: {MM + 8:#x}")]


def test_a_reader_forgets_the_process_before(process: Process) -> None:
    """Tables, areas and pages of one process are not those of the next one."""
    process.put(0, 3 << 12 | PRESENT)
    process.put(1 << 21, PRESENT | PSE, PMD)
    process.area(1 << 21, 2 << 21)
    reader, found = PageTableReader(process.image), []
    for _ in range(2):
        coverage = Coverage()
        found.append(reader.walk(MM, coverage))
        assert (coverage.read, coverage.unreadable) == (1, 0)
    assert found[0] == found[1] == Mapped(Counter({("file", 0): 513}), 0)
    process.area(8 << 21, 9 << 21)
    process.put(8 << 21, PRESENT | PSE, PMD)
    assert reader.walk(MM, Coverage()) == Mapped(Counter({("file", 0): 1025}), 0)


def test_broken_memory_whose_struct_page_is_missing(process: Process) -> None:
    """Of a page on its way, nobody can tell whether it is broken: it is missing."""
    process.image.forget(FRAMES.page(128))
    process.put(0, swap(31, 130))
    assert why(process) == [("page", 0, "1 page frames have no struct page in the image")]


def test_a_kernel_without_pages(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no memory is online, no page frame has a ``struct page``; the first one has none, too."""
    monkeypatch.setattr(pagewalk, "page_ranges", lambda image: [])
    process.put(0x1000, PRESENT)
    assert why(process) == [("page", 0, "1 page frames have no struct page in the image")]
