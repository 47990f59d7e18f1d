# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables of the kernel and of processes, made by hand as those of x86-64.

Every table has a page frame of its own below 16 MiB, where the direct map ends.
"""

from __future__ import annotations

from typing import NoReturn

import pytest
from drgn import FaultError, Object
from support.layouts import FRAMES, MadeImage

from memcg_inspect.linux.arch.page_tables import page_table_geometry
from memcg_inspect.linux.arch.x86 import X86Geometry
from memcg_inspect.linux.lib.list import OnFault
from memcg_inspect.linux.mm import init_mm
from memcg_inspect.linux.mm.init_mm import (
    KernelTables,
    kernel_page,
    top_table_pages,
    user_tables,
)
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.model import Coverage, ImageError

VARIABLES, MISSING = 0xFFFFFFFF82000000, 0xFFFF888000FFF000
DIRECT, VMALLOC = FRAMES.direct_map, 0xFFFFC90000000000
END = 0x1000
PAGE, HUGE, GIANT = 4096, 2 << 20, 1 << 30
#: Entries of a table at the top: of user space, of the direct map, and of vmalloc areas.
OF_USER, OF_DIRECT, OF_VMALLOC = 3, 273, 402
#: Bits of entries.
TABLE, LEAF = 1, 1 | 1 << 7
TOP, USER_TOP, PUD, PMD, PTES, MORE = 0x100, 0x101, 0x110, 0x111, 0x112, 0x113


def memory(pfn: int) -> int:
    """Return the address of a page frame in the direct map."""
    return DIRECT + pfn * PAGE


def table(image: MadeImage, pfn: int, **entries: int) -> None:
    """Write a table: entries by ``n`` and their number."""
    image.write(memory(pfn), bytes(PAGE))
    for name, entry in entries.items():
        image.words(memory(pfn) + 8 * int(name[1:]), entry)


def to(pfn: int, bits: int = TABLE) -> int:
    return pfn * PAGE | bits


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> MadeImage:
    """A kernel with tables of vmalloc areas and of the direct map, and one of user space."""
    image = MadeImage()
    image.declare("""
        struct list_head { struct list_head *next; struct list_head *prev; };
        struct page { unsigned long flags; struct list_head lru; unsigned long more[5]; };
        struct mm_struct { long id; unsigned long *pgd; };
        struct task_struct { struct mm_struct *mm; struct mm_struct *active_mm; };
    """)
    image.given[page_table_geometry] = X86Geometry(4, 0)
    monkeypatch.setattr(init_mm, "page_ranges", lambda _: [PageRange(0, 64), PageRange(512, END)])
    # The table at the top is in the direct map, and drgn needs a kernel to walk it.
    monkeypatch.setattr(init_mm, "kernel_page", lambda _, address: FRAMES.virt_to_page(address))
    image.variable("init_mm", "struct mm_struct", VARIABLES)
    image.words(VARIABLES, 0, memory(TOP))
    top = {f"n{OF_USER}": to(0x1F0), f"n{OF_DIRECT}": to(0x120), f"n{OF_VMALLOC}": to(PUD)}
    table(image, TOP, **top)
    table(image, PUD, n0=to(PMD), n1=to(0x80000, LEAF))
    table(image, PMD, n0=to(PTES), n1=to(0x4000, LEAF), n2=to(MORE), n5=to(PTES))
    table(image, PTES, n0=to(0x301), n1=0, n2=to(0x303), n511=to(0x304))
    table(image, MORE, n0=to(0x305))
    table(image, 0x120, n0=to(0x121), n1=to(0x40000, LEAF))
    table(image, 0x121, n0=to(0x122), n1=to(0x200, LEAF))
    table(image, 0x122)
    return image


OF_KERNEL = {TOP, PUD, PMD, PTES, MORE, 0x120, 0x121, 0x122}


def framed(tables: KernelTables, start: int, size: int) -> list[int]:
    return [pfn for some in tables.frames(start, size) for pfn in some]


def missed(coverage: Coverage) -> list[tuple[str, int]]:
    assert all(one.reason for one in coverage.examples)
    return [(one.what, one.address) for one in coverage.examples]


# The kernel's


def test_tables_of_the_kernel(image: MadeImage) -> None:
    """Those of user space are not of the kernel. One that is mapped twice counts once."""
    coverage = Coverage()
    tables = KernelTables(image, coverage)
    assert tables.pfns == OF_KERNEL
    assert tables.can_read is True
    assert (coverage.read, coverage.unreadable) == (len(OF_KERNEL) - 1, 0)


def test_page_frames_behind_addresses(image: MadeImage) -> None:
    coverage = Coverage()
    tables = KernelTables(image, coverage)
    for start, size, expected in (
        (VMALLOC, PAGE, [0x301]),
        (VMALLOC, 3 * PAGE, [0x301, 0x303]),
        (VMALLOC + PAGE, PAGE, []),
        (VMALLOC + 511 * PAGE, 3 * PAGE, [0x304, 0x4000, 0x4001]),
        (VMALLOC + HUGE + 7 * PAGE, 2 * PAGE, [0x4007, 0x4008]),
        (VMALLOC + 2 * HUGE - PAGE, 2 * PAGE, [0x4000 + 511, 0x305]),
        (VMALLOC + 3 * HUGE, HUGE, []),
        (VMALLOC + 5 * HUGE, PAGE, [0x301]),
        (VMALLOC + GIANT + 513 * PAGE, PAGE, [0x80000 + 513]),
        (VMALLOC + 2 * GIANT - PAGE, 2 * PAGE, [0x80000 + (1 << 18) - 1]),
        (VMALLOC + (1 << 39), PAGE, []),
        (VMALLOC, 0, []),
    ):
        assert framed(tables, start, size) == expected, hex(start)
    assert not coverage.unreadable


def test_the_direct_map(image: MadeImage) -> None:
    """It ends with memory. Its tables are counted, and are not needed."""
    tables = KernelTables(image, Coverage())
    for pfn in (0, 5, END - 1):
        assert framed(tables, memory(pfn), 2 * PAGE) == [pfn, pfn + 1]
    for start in (memory(END), DIRECT - PAGE):
        assert framed(tables, start, PAGE) == []
    assert [list(some) for some in tables.frames(memory(3), 2 * PAGE)] == [[3, 4]]
    assert isinstance(next(iter(tables.frames(memory(3), PAGE))), range)


def test_tables_are_read_once(image: MadeImage, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are kept; then the one that was read first is left out."""
    tables = KernelTables(image, Coverage())

    def reads(*addresses: int) -> int:
        before = image.memory.reads
        for address in addresses:
            framed(tables, address, PAGE)
        return image.memory.reads - before

    first, second = VMALLOC, VMALLOC + 2 * HUGE
    assert reads(first, second, first, second, VMALLOC + HUGE) == 2
    assert reads(first, second) == 0
    monkeypatch.setattr(init_mm, "_MOST_TABLES", 1)
    tables = KernelTables(image, Coverage())
    assert reads(first, first) == 1
    assert reads(second, second) == 1
    assert reads(first, first) == 1


def test_a_table_of_ptes_that_is_not_in_the_image(image: MadeImage) -> None:
    coverage = Coverage()
    tables = KernelTables(image, coverage)
    image.forget(memory(PTES))
    assert framed(tables, VMALLOC, HUGE + PAGE) == [0x4000]
    assert missed(coverage) == [("page table of the kernel", memory(PTES))]
    assert tables.pfns == OF_KERNEL


@pytest.mark.parametrize(("gone", "left"), [(PMD, {PTES, MORE}), (PUD, {PMD, PTES, MORE})])
def test_an_upper_table_that_is_not_in_the_image(
    image: MadeImage, gone: int, left: set[int]
) -> None:
    """Those below it are not found."""
    image.forget(memory(gone))
    coverage = Coverage()
    tables = KernelTables(image, coverage)
    assert tables.pfns == OF_KERNEL - left
    assert missed(coverage) == [("page table of the kernel", memory(gone))]
    assert coverage.read == len(OF_KERNEL - left) - 1
    assert framed(tables, VMALLOC, PAGE) == []


def test_a_top_table_that_is_not_in_the_image(image: MadeImage) -> None:
    image.forget(memory(TOP))
    coverage = Coverage()
    tables = KernelTables(image, coverage)
    assert tables.pfns == set()
    assert missed(coverage) == [("page tables of the kernel", memory(TOP))]
    assert coverage.read == 0
    assert framed(tables, VMALLOC, PAGE) == []


def with_user_half(image: MadeImage) -> None:
    """Add what user space sees: a table of the kernel, and tables for it alone."""
    words = {"boot_cpu_data": VARIABLES + 256}
    image.declare("struct cpuinfo_x86 { unsigned int x86_capability[22]; };")
    image.variable("boot_cpu_data", "struct cpuinfo_x86", words["boot_cpu_data"])
    image.write(words["boot_cpu_data"] + 4 * 7, (1 << 11).to_bytes(4, "little"))  # PTI
    table(image, USER_TOP, n3=to(0x1F1), n402=to(PUD), n510=to(0x180), n511=to(0x1C0, 0))
    table(image, 0x180, n1=to(0x181), n2=to(0x40000, LEAF))
    table(image, 0x181, n2=to(0x182), n3=to(0x200, LEAF))
    table(image, 0x182, n0=to(0x190))


def test_tables_of_what_user_space_sees(image: MadeImage) -> None:
    with_user_half(image)
    coverage = Coverage()
    assert KernelTables(image, coverage).pfns == OF_KERNEL | {0x180, 0x181, 0x182}
    assert (coverage.read, coverage.unreadable) == (len(OF_KERNEL) + 2, 0)


class Stricter(X86Geometry):
    """Entries with bit 60 are not used, whatever they look like."""

    def is_valid(self, entry: int) -> bool:
        return super().is_valid(entry) and not entry >> 60


def test_entries_that_the_processor_does_not_use(image: MadeImage) -> None:
    image.given[page_table_geometry] = Stricter(4, 0)
    with_user_half(image)
    unused = 1 << 60
    image.words(memory(PMD) + 8 * 8, to(0x1A0, unused | TABLE), to(0x1A1, unused | LEAF))
    image.words(memory(0x180) + 8 * 5, to(0x1A2, unused | TABLE))
    tables = KernelTables(image, Coverage())
    assert tables.pfns == OF_KERNEL | {0x180, 0x181, 0x182}
    assert framed(tables, VMALLOC + 9 * HUGE, PAGE) == []


@pytest.mark.parametrize("gone", [USER_TOP, 0x180])
def test_tables_of_what_user_space_sees_that_are_missing(image: MadeImage, gone: int) -> None:
    with_user_half(image)
    image.forget(memory(gone))
    coverage = Coverage()
    assert KernelTables(image, coverage).pfns == OF_KERNEL | ({0x180} if gone == 0x180 else set())
    assert missed(coverage) == [("page tables of user space", memory(gone))]


def test_tables_of_two_levels(image: MadeImage) -> None:
    """As on arm64 with pages of 64 KiB: the table at the top points to those of PTEs."""
    geometry = X86Geometry(4, 0)
    geometry.levels = 2
    image.given[page_table_geometry] = geometry
    table(image, TOP, n255=to(0x1F0), n256=to(PTES), n511=to(MORE))
    tables = KernelTables(image, Coverage())
    assert tables.pfns == {TOP, PTES, MORE}
    assert framed(tables, (1 << 64) - HUGE, PAGE) == [0x305]
    assert framed(tables, (1 << 64) - 256 * HUGE, PAGE) == [0x301]


def unknown(*_: object) -> NoReturn:
    raise ImageError("page tables are not read on this machine")


def test_tables_of_no_known_format(image: MadeImage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is asked for."""
    asked = []

    def page(_: object, address: int) -> int:
        asked.append(address)
        if address == VMALLOC + PAGE:
            raise FaultError("not mapped", address)
        return FRAMES.page(0x400 + len(asked))

    monkeypatch.setattr(init_mm, "page_table_geometry", unknown)
    monkeypatch.setattr(init_mm, "kernel_page", page)
    coverage = Coverage()
    tables = KernelTables(image, coverage)
    assert (tables.pfns, tables.can_read) == (set(), False)
    assert framed(tables, VMALLOC, 3 * PAGE) == [0x401, 0x403]
    assert asked == [VMALLOC, VMALLOC + PAGE, VMALLOC + 2 * PAGE]
    assert framed(tables, memory(3), PAGE) == [3]
    assert coverage == Coverage()
    assert list(user_tables(image, coverage)) == []


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, FaultError])
def test_a_page_that_is_not_mapped(
    image: MadeImage, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """drgn says in several ways that it cannot tell."""

    def fail(mm: Object, address: int) -> NoReturn:
        assert mm.value_() == VARIABLES
        raise error(*("why",), *((address,) if error is FaultError else ()))

    monkeypatch.setattr(init_mm, "follow_page", fail)
    with pytest.raises(FaultError, match="why") as raised:
        kernel_page(image, VMALLOC)
    assert raised.value.address == VMALLOC


def test_the_page_of_an_address(image: MadeImage, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Object(image.prog, "struct page *", FRAMES.page(7))
    monkeypatch.setattr(init_mm, "follow_page", lambda mm, address: page)
    assert kernel_page(image, VMALLOC) == FRAMES.page(7)


# Those of processes

FIRST, SECOND = 0x140, 0x150


def put_processes(image: MadeImage, *tops: int, end: int | None = None) -> None:
    """Make the list of tables at the top; ``end`` is where it leads to."""
    image.variable("pgd_list", "struct list_head", VARIABLES + 512)
    ring = [VARIABLES + 512, *(FRAMES.page(pfn) + 8 for pfn in tops)]
    for n, link in enumerate(ring):
        image.words(link, ring[(n + 1) % len(ring)], ring[n - 1])
    if end is not None:
        image.words(ring[-1], end)


def put_tables(image: MadeImage) -> None:
    table(image, FIRST, n0=to(0x141), n1=0, n2=to(0x40000, LEAF), n255=to(0x142), n256=to(PUD))
    table(image, 0x141, n0=to(0x143))
    table(image, 0x142)
    table(image, SECOND, n7=to(0x151))
    table(image, 0x151, n0=to(0x152), n511=to(0x153))


def test_upper_tables_of_processes(image: MadeImage) -> None:
    """With four levels, those at the top, and those of PUDs."""
    put_processes(image, FIRST, SECOND)
    put_tables(image)
    coverage = Coverage()
    found = list(user_tables(image, coverage))
    assert found == [FIRST, 0x141, 0x142, SECOND, 0x151]
    assert (coverage.read, coverage.unreadable) == (2, 0)
    assert list(top_table_pages(image, coverage)) == []


def test_upper_tables_of_processes_of_five_levels(image: MadeImage) -> None:
    """With those of P4Ds. All entries of these are of user space."""
    image.given[page_table_geometry] = X86Geometry(5, 0)
    put_processes(image, FIRST, SECOND)
    put_tables(image)
    found = list(user_tables(image, Coverage()))
    assert found[0] == FIRST
    assert sorted(found) == [FIRST, 0x141, 0x142, 0x143, SECOND, 0x151, 0x152, 0x153]


def test_tables_at_the_top_that_are_no_pages(image: MadeImage) -> None:
    """On arm64 they may have fewer entries, and are in slabs then."""
    geometry = X86Geometry(4, 0)
    geometry.top = 64
    image.given[page_table_geometry] = geometry
    put_processes(image, FIRST)
    put_tables(image)
    assert list(user_tables(image, Coverage())) == [0x141, 0x142]


def test_tables_of_processes_that_are_not_in_the_image(image: MadeImage) -> None:
    """The page frame of one at the top is known all the same."""
    put_processes(image, FIRST, SECOND)
    put_tables(image)
    image.forget(memory(FIRST))
    coverage = Coverage()
    assert list(user_tables(image, coverage)) == [FIRST, SECOND, 0x151]
    assert missed(coverage) == [("page table", memory(FIRST))]
    assert coverage.read == 1


def test_a_list_of_tables_that_is_broken(image: MadeImage, monkeypatch: pytest.MonkeyPatch) -> None:
    put_tables(image)
    coverage = Coverage()
    put_processes(image, FIRST, SECOND, end=FRAMES.page(FIRST) + 8)  # a circle
    assert list(user_tables(image, coverage)) == [FIRST, 0x141, 0x142, SECOND, 0x151]
    assert not coverage.unreadable
    put_processes(image, FIRST)
    image.variable("pgd_list", "struct list_head", 0xFFFF888077700000)
    assert list(user_tables(image, coverage)) == []
    assert missed(coverage) == [("pgd_list", 0xFFFF888077700000)]
    monkeypatch.setattr(init_mm, "MOST_NODES", 2)
    coverage = Coverage()
    put_processes(image, FIRST, SECOND)
    assert list(user_tables(image, coverage)) == [FIRST, 0x141, 0x142, SECOND, 0x151]
    assert not coverage.unreadable
    monkeypatch.setattr(init_mm, "MOST_NODES", 1)
    assert list(user_tables(image, coverage)) == [FIRST, 0x141, 0x142]
    assert missed(coverage) == [("pgd_list", FRAMES.page(SECOND) + 8)]
    assert coverage.examples[0].reason.startswith("the list does not end")


def test_tables_of_tasks(image: MadeImage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no list: those of each task, and those that a kernel thread has borrowed."""
    places = [memory(0x600) + 64 * n for n in range(8)]
    mms, tasks = places[:3], places[3:]
    for n, mm in enumerate(mms):
        image.make("struct mm_struct", mm, {"pgd": memory(FIRST + n)})
    for task, (mm, active) in zip(
        tasks,
        ((mms[0], mms[0]), (0, VARIABLES), (0, mms[1]), (MISSING, mms[2]), (mms[0], 0)),
        strict=True,
    ):
        image.make("struct task_struct", task, {"mm": mm, "active_mm": active})

    def find(_: object, on_fault: OnFault) -> list[Object]:
        on_fault(FaultError("a task", 5))
        return [Object(image.prog, "struct task_struct *", task) for task in tasks]

    monkeypatch.setattr(init_mm, "find_tasks", find)
    monkeypatch.setattr(init_mm, "page_table_geometry", unknown)
    coverage = Coverage()
    found = list(top_table_pages(image, coverage))
    assert found == [FRAMES.page(FIRST + n) for n in range(3)]
    assert missed(coverage) == [("task", 5), ("task", MISSING + 8)]
