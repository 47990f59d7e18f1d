# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The page tables of the kernel and of processes are those that a plain walk of x86-64 finds.

The page frames behind addresses are those of drgn's own walk.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from drgn import FaultError, Program
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mm import follow_phys, page_to_virt, virt_to_pfn
from drgn.helpers.linux.pid import for_each_task
from fuzz.damage import damaged
from support.guests import ARCH, DEBIAN_KERNELS, Lab, isolated
from support.missing_pages import excluded, opened

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm import init_mm
from memcg_inspect.linux.mm.init_mm import (
    KernelTables,
    kernel_page,
    top_table_pages,
    user_tables,
)
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage, ImageError

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]
of_any = pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
of_x86 = pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:] if ARCH == "amd64" else ())

PAGE, ENTRIES = 4096, 512
#: _PAGE_PRESENT and _PAGE_PSE of arch/x86/include/asm/pgtable_types.h.
PRESENT, HUGE = 1, 1 << 7


def levels(prog: Program) -> int:
    """Return the number of levels: the direct map of four begins in the highest 128 TiB."""
    return 4 if mem_map(image_of(prog)).direct_map >> 47 == (1 << 17) - 1 else 5


def tables_below(prog: Program, words: list[int], level: int, lowest: int) -> Iterator[int]:
    """Yield the page frames of the tables below one, down to a level; 1 is that of PTEs."""
    for word in words:
        if not word & PRESENT or level > 1 and word & HUGE or level == lowest:
            continue
        pfn = (word & (1 << 52) - 1) // PAGE
        yield pfn
        if level - 1 > lowest:
            yield from tables_below(prog, entries(prog, pfn), level - 1, lowest)


def entries(prog: Program, pfn: int) -> list[int]:
    data = prog.read(pfn * PAGE, PAGE, True)
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, PAGE, 8)]


def physical(prog: Program, address: int) -> int | None:
    """Return the page frame behind an address of the kernel; ``None`` if it is not mapped."""
    try:
        return int(follow_phys(prog["init_mm"].address_of_(), address)) // PAGE
    except FaultError:
        return None


def behind(prog: Program, start: int, size: int) -> list[int]:
    found = (physical(prog, address) for address in range(start, start + size, PAGE))
    return [pfn for pfn in found if pfn is not None]


def framed(tables: KernelTables, start: int, size: int) -> list[int]:
    return [pfn for some in tables.frames(start, size) for pfn in some]


@of_any
def test_text_is_mapped_by_huge_pages(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel).program()
    frames = mem_map(image_of(prog))
    huge = 512 * frames.page_size
    start = -(-prog.symbol("_text").address // huge) * huge
    coverage = Coverage()
    tables = KernelTables(image_of(prog), coverage)
    found = [pfn for some in tables.frames(start, 2 * huge) for pfn in some]
    table = prog["init_mm"].address_of_()
    addresses = range(start, start + 2 * huge, frames.page_size)
    assert found == [int(follow_phys(table, at)) >> frames.page_shift for at in addresses]
    assert not coverage.unreadable


@of_x86
def test_all_tables_of_the_kernel(lab: Lab, kernel: str) -> None:
    prog, coverage = lab.image(kernel).program(), Coverage()
    top = physical(prog, prog["init_mm"].pgd.value_())
    assert top is not None
    half = entries(prog, top)[ENTRIES // 2 :]
    expected = {top, *tables_below(prog, half, levels(prog), 1)}
    tables = KernelTables(image_of(prog), coverage)
    assert tables.pfns == expected
    assert tables.can_read
    assert (coverage.read, coverage.unreadable) == (len(expected) - 1, 0)


def stacks(prog: Program) -> list[tuple[int, int]]:
    """Return address and size of vmalloc areas, of which the page before each is not mapped."""
    size = 4 * PAGE  # THREAD_SIZE
    found = [task.stack.value_() for task in for_each_task(prog)]
    return [(stack - PAGE, size + PAGE) for stack in found if stack]  # a zombie may have none


def ranges(prog: Program) -> list[tuple[int, int]]:
    """Return ranges of the direct map, of the memory map, and of what is mapped by PTEs."""
    frames = mem_map(image_of(prog))
    base, direct = frames.base, frames.direct_map
    return [
        *stacks(prog),
        (base, 4 << 20),
        (base + 3 * PAGE, 3 << 20),  # it begins and ends in a huge page
        (base + (2 << 20) - PAGE, 2 * PAGE),
        (direct, 16 * PAGE),
        (direct + 77 * PAGE, 2 << 20),
    ]


@of_x86
def test_page_frames_behind_addresses(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel).program()
    tables, coverage = KernelTables(image_of(prog), Coverage()), Coverage()
    total = 0
    for start, size in ranges(prog):
        expected = behind(prog, start, size)
        assert framed(tables, start, size) == expected, hex(start)
        total += len(expected)
    assert total > 2000
    assert not coverage.unreadable
    # Nothing maps addresses of user space, and the page before a stack.
    assert framed(tables, 0, 4 << 20) == []
    start, size = stacks(prog)[0]
    assert len(framed(tables, start, size)) == size // PAGE - 1
    assert framed(tables, start, PAGE) == []


@of_x86
def test_each_page_is_asked_for_where_tables_cannot_be_read(
    lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on powerpc and s390: drgn may know more than this package does."""

    def unknown(image: Image) -> None:
        raise ImageError("page tables are not read on this machine")

    monkeypatch.setattr(init_mm, "page_table_geometry", unknown)
    prog, coverage = lab.image(kernel).program(), Coverage()
    tables = KernelTables(image_of(prog), coverage)
    assert (tables.pfns, tables.can_read, coverage) == (set(), False, Coverage())
    direct = mem_map(image_of(prog)).direct_map
    for start, size in (*stacks(prog)[:20], (direct, 4 * PAGE), (direct + PAGE, PAGE)):
        assert framed(tables, start, size) == behind(prog, start, size)
    assert list(user_tables(image_of(prog), Coverage())) == []
    found = list(top_table_pages(image_of(prog), Coverage()))
    tops = list(list_for_each_entry("struct page", prog["pgd_list"].address_of_(), "lru"))
    assert found == [page.value_() for page in tops]


def table_of(prog: Program, address: int) -> int:
    """Return the page frame of the table of PTEs that maps an address."""
    pfn, level = physical(prog, prog["init_mm"].pgd.value_()), levels(prog)
    assert pfn is not None
    while level > 1:
        word = entries(prog, pfn)[address >> 12 + 9 * (level - 1) & 511]
        assert word & PRESENT and not word & HUGE
        pfn, level = (word & (1 << 52) - 1) // PAGE, level - 1
    return pfn


@of_x86
def test_a_table_that_is_not_in_the_image(lab: Lab, kernel: str) -> None:
    """What one of PTEs maps is not known; those below one above it are not found."""
    image = lab.image(kernel)
    prog = image.program()
    frames, (start, size) = mem_map(image_of(prog)), stacks(prog)[0]
    at = frames.virt(frames.page(table_of(prog, start + PAGE)))
    changed, coverage = damaged(image.core, (at, "missing")), Coverage()
    tables = KernelTables(changed, coverage)
    assert not coverage.unreadable  # it is read when its pages are asked for
    assert framed(tables, start, size) == []
    assert [e.what for e in coverage.examples] == ["page table of the kernel"]
    assert framed(tables, frames.base, PAGE) == behind(prog, frames.base, PAGE)


@of_x86
@pytest.mark.parametrize("table", ["top", "below"])
def test_an_upper_table_that_is_not_in_the_image(lab: Lab, kernel: str, table: str) -> None:
    """Nothing is known of what is below the one at the top, and all of what is beside another."""
    image = lab.image(kernel)
    prog = image.program()
    frames, pgd = mem_map(image_of(prog)), prog["init_mm"].pgd.value_()
    top = frames.pfn(kernel_page(image_of(prog), pgd))
    half, level = entries(prog, top)[ENTRIES // 2 :], levels(prog)
    first = next(word for word in half if word & PRESENT)
    pfn = (first & (1 << 52) - 1) // PAGE
    lost = opened(image.core)
    gone = pgd if table == "top" else frames.virt(frames.page(pfn))
    lost.add_memory_segment(gone, PAGE, excluded, False)
    coverage = Coverage()
    tables = KernelTables(image_of(lost), coverage)
    of_others = [word for word in half if word != first]
    left = {top, pfn, *tables_below(prog, of_others, level, 1)} if table == "below" else set()
    assert tables.pfns == left
    what = "page tables of the kernel" if table == "top" else "page table of the kernel"
    assert [e.what for e in coverage.examples] == [what]
    assert (coverage.read, coverage.unreadable) == (max(len(left) - 1, 0), 1)


@of_x86
def test_what_is_not_mapped_has_no_page(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel).program()
    image, (start, _) = image_of(prog), stacks(prog)[0]
    frames = mem_map(image)
    assert frames.pfn(kernel_page(image, start + PAGE)) == physical(prog, start + PAGE)
    with pytest.raises(FaultError):
        kernel_page(image, start)


@of_x86
def test_the_upper_tables_of_processes(lab: Lab, kernel: str) -> None:
    """Those at the top, and those whose entries map 1 GiB or more each."""
    prog, coverage = lab.image(kernel).program(), Coverage()
    expected = []
    for page in list_for_each_entry("struct page", prog["pgd_list"].address_of_(), "lru"):
        top = int(virt_to_pfn(page_to_virt(page)))
        half = entries(prog, top)[: ENTRIES // 2]
        expected += [top, *tables_below(prog, half, levels(prog), 3)]
    found = list(user_tables(image_of(prog), coverage))
    assert sorted(found) == sorted(expected)
    tops = sum(1 for _ in list_for_each_entry("struct page", prog["pgd_list"].address_of_(), "lru"))
    assert (coverage.read, coverage.unreadable) == (tops, 0)
    assert len(found) > 2 * tops
    assert list(top_table_pages(image_of(prog), coverage)) == []


@of_x86
def test_lists_of_tables_that_are_broken(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel)
    prog = image.program()
    pages = list(list_for_each_entry("struct page", prog["pgd_list"].address_of_(), "lru"))
    second = pages[1].lru.next.address_
    broken = {"pgd_list", "page table"}  # the list, and what would be the third table
    for value, what in ((8, broken), (pages[0].lru.address_, set())):
        coverage = Coverage()
        found = set(user_tables(damaged(image.core, (second, value)), coverage))
        assert {int(virt_to_pfn(page_to_virt(page))) for page in pages[:2]} <= found
        assert coverage.read == 2
        assert {e.what for e in coverage.examples} == what


@of_any
def test_tables_of_tasks(lab: Lab, kernel: str) -> None:
    """Where there is no list: of each task, and those that a kernel thread has borrowed."""
    prog, coverage = lab.image(kernel).program(), Coverage()
    own = prog["init_mm"].address_of_().value_()
    mms = [mm for task in for_each_task(prog) for mm in (task.mm, task.active_mm)]
    expected = {mm.pgd.value_() for mm in mms if mm and mm.value_() != own}
    found = list(init_mm._tops_of_tasks(image_of(prog), coverage))
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert not coverage.unreadable


@of_any
def test_tables_of_user_space_that_are_not_in_the_image(
    lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With page table isolation, the kernel has a second top-level table."""

    def unread(self: KernelTables, geometry: object, pgd: int) -> None:
        raise FaultError("not in the image", pgd)

    image, coverage = image_of(lab.image(kernel).program()), Coverage()
    monkeypatch.setattr(init_mm, "has_user_half", lambda image: True)
    monkeypatch.setattr(KernelTables, "_walk_user", unread)
    assert KernelTables(image, coverage).pfns
    assert coverage.unreadable == 1


@of_x86
def test_tables_of_what_user_space_sees_of_the_kernel(lab: Lab, kernel: str) -> None:
    """pti_init() of arch/x86/mm/pti.c: the table after that of the kernel, and those below it."""
    prog, coverage = isolated(lab, kernel).program(), Coverage()
    top = physical(prog, prog["init_mm"].pgd.value_())
    assert top is not None
    half = ENTRIES // 2
    of_kernel = {top, *tables_below(prog, entries(prog, top)[half:], levels(prog), 1)}
    of_user = set(tables_below(prog, entries(prog, top + 1)[half:], levels(prog), 1))
    assert of_user - of_kernel
    assert KernelTables(image_of(prog), coverage).pfns == of_kernel | of_user
    assert coverage.read == len(of_kernel | of_user) - 1
    assert not coverage.unreadable
