# SPDX-License-Identifier: LGPL-2.1-or-later
"""Vmalloc areas and kernel stacks are those that a plain walk of the lists finds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from drgn import FaultError, Object, Program
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mm import page_to_virt
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import find_task, for_each_task
from drgn.helpers.linux.sched import idle_task
from support.guests import DEBIAN_KERNELS, Lab
from support.layouts import MadeImage
from support.missing_pages import excluded
from support.planting import Overlay, Write

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.vmalloc import (
    block_users,
    check_room,
    find_mapping,
    has_restored_areas,
    linked_areas,
    nr_vmalloc_pages,
    stack_blocks,
    thread_size,
    vm_areas,
)
from memcg_inspect.linux.mm.vmalloc_vfree import PartialAreaReader
from memcg_inspect.model import Coverage, PagesOfArea, PartialArea

KERNEL = pytest.mark.parametrize("kernel", DEBIAN_KERNELS)

PAGE, STACK = 4096, 16 << 10
#: Bits of ``vm_struct.flags`` of include/linux/vmalloc.h
FLAGS = {
    0x1: "ioremap",
    0x2: "vmalloc",
    0x4: "vmap",
    0x8: "mapped to user space",
    0x10: "coherent DMA",
    0x1000: "percpu or other sparse area",
}
VM_ALLOC = 0x2


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def heads(prog: Program) -> list[Object]:
    """Return the heads of the lists of areas: one up to 6.8, then one for each vmap_node."""
    try:
        return [prog["vmap_area_list"].address_of_()]
    except KeyError:
        nodes, number = prog["vmap_nodes"], int(prog["nr_vmap_nodes"])
        return [nodes[i].busy.head.address_of_() for i in range(number)]


def areas(prog: Program) -> Iterator[Object]:
    for head in heads(prog):
        yield from list_for_each_entry("struct vmap_area", head, "list")


def pages_of(vm: Object) -> list[int]:
    return [vm.pages[i].value_() for i in range(int(vm.nr_pages))] if vm.pages else []


def with_area(prog: Program) -> list[Object]:
    """Return the tasks whose stacks are areas: that of the boot CPU has none."""
    idle = [idle_task(prog, cpu) for cpu in for_each_possible_cpu(prog)]
    return [task for task in [*for_each_task(prog), *idle] if task.stack_vm_area]


def users(prog: Program) -> dict[int, str]:
    """Return who uses a stack, by the address of its ``struct vm_struct``."""
    found = {}
    for task in with_area(prog):
        found[task.stack_vm_area.value_()] = "unknown" if task.exit_state else "task"
    for cpu in for_each_possible_cpu(prog):
        for area in per_cpu(prog["cached_stacks"], cpu):
            if area:
                found[area.value_()] = "cache"
    return found


@pytest.mark.image
@pytest.mark.each_kernel
@KERNEL
def test_areas_are_those_on_the_lists(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").own_program()
    # One stack, at least, is kept for new tasks.
    kept = per_cpu(prog["cached_stacks"], 1)[0].address_ or 0
    stack = find_task(prog, 1).stack_vm_area.value_()
    Overlay(prog).write((Write(kept, word(stack)),))
    vms = [area.vm for area in areas(prog) if area.vm]
    made = [vm for vm in vms if int(vm.flags) & VM_ALLOC and vm.pages]
    coverage, tasks = Coverage(), Coverage()
    found = list(vm_areas(image_of(prog), coverage, tasks))
    assert [(a.address, a.pages, a.caller) for a in found] == [
        (vm.addr.value_(), pages_of(vm), vm.caller.value_()) for vm in made
    ]
    assert (coverage.read, coverage.unreadable) == (len(found), 0)
    known = users(prog)
    assert (tasks.read, tasks.unreadable) == (len(with_area(prog)), 0)
    stacks = {(t.stack_vm_area.caller.value_(), STACK // PAGE) for t in with_area(prog)}
    for area, vm in zip(found, made, strict=True):
        assert area.is_stack == ((vm.caller.value_(), vm.nr_pages.value_()) in stacks)
        # That of the task that was cached before is nobody's now.
        is_charged = payer_and_node(prog, area.pages[0])[0]
        left = ("task" if is_charged else "unknown") if area.is_stack else ""
        assert area.user == known.get(vm.value_(), left)
        assert area.is_counted
        assert not area.is_stack or len(area.pages) == STACK // PAGE
    assert {area.user for area in found} >= {"task", "cache", ""}
    assert linked_areas(image_of(prog)) == {area.vm.value_() for area in areas(prog)}


@pytest.mark.image
@pytest.mark.each_kernel
@KERNEL
def test_an_area_that_is_being_made(lab: Lab, kernel: str) -> None:
    """Since 7.1 each page is counted as it comes: some are there, and ``nr_pages`` is 0."""
    prog = lab.image(kernel, "4", "mixed").own_program()
    area = an_area(prog)
    vm, pages = area.vm.read_(), pages_of(area.vm)
    entries, address = vm.pages.value_(), int(vm.addr)
    counts_each = "NR_VMALLOC" in {e.name for e in prog.type("enum node_stat_item").enumerators}
    overlay = Overlay(prog)

    def found(*writes: Write) -> list[list[int]]:
        overlay.write(writes)
        read = vm_areas(image_of(prog), Coverage(), Coverage())
        try:
            return [one.pages for one in read if one.address == address]
        finally:
            overlay.clear()

    def put(member: str, value: int) -> Write:
        place = vm.member_(member)
        return Write(place.address_ or 0, value.to_bytes(place.type_.size, "little"))

    assert found() == [pages]
    missing = [Write(entries + 8 * n, word(0)) for n in (1, len(pages) - 1)]
    some = [page for n, page in enumerate(pages) if n not in (1, len(pages) - 1)]
    assert found(*missing) == [some]
    none = put("nr_pages", 0)
    size = (len(pages) + 1) * PAGE  # with a guard page
    assert found(none, put("size", size), *missing) == ([some] if counts_each else [])
    flags = put("flags", int(vm.flags) | 0x40)  # VM_NO_GUARD
    assert found(none, flags, put("size", size - PAGE)) == ([pages] if counts_each else [])
    assert found(none, put("size", PAGE)) == []
    assert found(put("nr_pages", 1)) == [pages[:1]]
    # No more pages than addresses
    room = int(area.va_end - area.va_start) // PAGE
    assert [len(p) >= len(pages) for p in found(put("nr_pages", room))] == [True]
    assert found(put("nr_pages", room + 1)) == []


@pytest.mark.image
@pytest.mark.each_kernel
@KERNEL
def test_areas_whose_structures_are_missing(lab: Lab, kernel: str) -> None:
    """An area, and a task whose stack then belongs to nobody that is known."""
    prog = lab.image(kernel, "4", "mixed").own_program()
    task = find_task(prog, 1)
    stack = task.stack_vm_area.value_()
    other = next(a.vm for a in areas(prog) if a.vm and a.vm.flags.value_() & 1)
    before = list(vm_areas(image_of(prog), Coverage(), Coverage()))
    prog.add_memory_segment(task.stack_vm_area.address_ or 0, 8, excluded, False)
    prog.add_memory_segment(other.value_(), 8, excluded, False)
    coverage, tasks = Coverage(), Coverage()
    after = list(vm_areas(image_of(prog), coverage, tasks))
    assert (coverage.unreadable, tasks.unreadable) == (1, 1)
    assert [area.address for area in after] == [area.address for area in before]
    address = Object(prog, "struct vm_struct *", stack).addr.value_()
    # What is charged is counted: a task has it, even if it is not known which.
    [changed] = [area for area in after if area.address == address]
    is_charged = payer_and_node(prog, changed.pages[0])[0]
    assert (changed.is_stack, changed.user) == (True, "task" if is_charged else "unknown")


@pytest.mark.image
@pytest.mark.each_kernel
@KERNEL
def test_the_area_of_an_address(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    image, seen = image_of(prog), set()
    every = [area for area in areas(prog) if area.vm]
    by_flags = {int(area.vm.flags): area for area in every}
    for flags, area in by_flags.items():
        start, end, vm = int(area.va_start), int(area.va_end), area.vm
        for address in (start, end - 1):
            found = find_mapping(image, address)
            assert found is not None
            assert (found.start, found.end, found.pages) == (start, end, pages_of(vm))
            assert found.caller == vm.caller.value_()
            assert found.uses == tuple(name for bit, name in FLAGS.items() if flags & bit)
            seen.update(found.uses)
    assert {"vmalloc", "ioremap"} <= seen
    starts = {int(area.va_start) for area in areas(prog)}
    gap = next(int(a.va_end) for a in every if int(a.va_end) not in starts)
    assert find_mapping(image, gap) is None
    assert find_mapping(image, 0x1000) is None


@pytest.mark.image
@pytest.mark.each_kernel
@KERNEL
def test_the_room_for_an_array(lab: Lab, kernel: str) -> None:
    """In a slab, in a vmalloc area, and nowhere."""
    prog = lab.image(kernel, "4", "mixed").program()
    image = image_of(prog)
    area = next(a for a in areas(prog) if a.vm and a.vm.flags.value_() & VM_ALLOC)
    start, size = int(area.va_start), int(area.va_end - area.va_start)
    check_room(image, start, size)
    check_room(image, start + 8, size - 8)
    with pytest.raises(FaultError, match=f"{size + 1} bytes in memory of {size} bytes") as raised:
        check_room(image, start, size + 1)
    assert raised.value.address == start
    with pytest.raises(FaultError, match="8 bytes in memory of 0 bytes"):
        check_room(image, 0xFFFFFE0000000000, 8)
    # In a page of its own, and in a slab of several pages
    task = find_task(prog, 1)
    first = next(a.vm for a in areas(prog) if a.vm and a.vm.pages and int(a.vm.nr_pages) == 4)
    virt = page_to_virt(first.pages[0]).value_()
    check_room(image, virt + 8, PAGE - 8)
    with pytest.raises(FaultError, match=f"{PAGE} bytes in memory of {PAGE - 8} bytes"):
        check_room(image, virt + 8, PAGE)
    check_room(image, task.value_(), task.type_.type.size)


@pytest.mark.image
@pytest.mark.each_kernel
@KERNEL
def test_small_numbers_about_areas(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").own_program()
    image = image_of(prog)
    assert thread_size(image) == STACK
    try:
        expected: int | None = int(prog["nr_vmalloc_pages"].counter)
    except KeyError:
        expected = None  # since 7.1
    assert nr_vmalloc_pages(image) == expected
    assert not has_restored_areas(image)
    # All stacks are areas here, with CONFIG_VMAP_STACK.
    assert stack_blocks(image, Coverage()) == set()
    assert block_users(image, Coverage()) == {}


def test_areas_that_the_kernel_before_handed_over() -> None:
    """kho_in of kernel/liveupdate/kexec_handover.c."""
    image, place = MadeImage(), 0xFFFFFFFF82000000
    assert not has_restored_areas(image)
    image.declare("struct kho_in { unsigned long fdt_phys; };")
    image.variable("kho_in", "struct kho_in", place)
    assert has_restored_areas(image)  # it cannot be read
    image.words(place, PAGE)
    assert has_restored_areas(image)
    image.words(place, 0)
    assert not has_restored_areas(image)


# Areas that are being freed


def payer_and_node(prog: Program, page: int) -> tuple[int, int]:
    """Return the payer of a page of kernel memory, and its node."""
    found = Object(prog, "struct page *", page)
    data = found.memcg_data.value_()
    flags = found.flags.f if hasattr(found.flags, "f") else found.flags
    return (data & ~3 if data & 3 == 2 else 0), int(flags) >> 54


def runs(places: list[tuple[int, int]]) -> tuple[PagesOfArea, ...]:
    found: list[PagesOfArea] = []
    for payer, nid in places:
        if found and found[-1][:2] == (payer, nid):
            found[-1] = found[-1]._replace(pages=found[-1].pages + 1)
        else:
            found.append(PagesOfArea(payer, nid, 1))
    return tuple(found)


def an_area(prog: Program) -> Object:
    """Return an area of some pages that vmalloc() made."""
    return next(a for a in areas(prog) if a.vm and a.vm.pages and 20 < int(a.vm.nr_pages) < 70)


@pytest.mark.image
@pytest.mark.each_kernel
@KERNEL
def test_an_area_that_is_being_freed(lab: Lab, kernel: str) -> None:
    """It is on no list any more. The task is at the page that its registers and its stack say."""
    prog = lab.image(kernel, "4", "mixed").own_program()
    area = an_area(prog)
    vm, count = area.vm.read_(), int(area.vm.nr_pages)
    pages, entries = pages_of(vm), vm.pages.value_()
    # Kernel memory of two payers, and user memory, whose payer does not matter
    data = {2: 0x5002, 3: 0x5002, 4: 0x6002, 5: 0x7000, count - 1: 0x6002}
    places = {n: Object(prog, "struct page *", pages[n]).memcg_data.address_ or 0 for n in data}
    charged = [Write(places[n], word(value)) for n, value in data.items()]
    Overlay(prog).write((Write(area.vm.address_ or 0, word(0)), *charged))
    reader = PartialAreaReader(image_of(prog))
    assert payer_and_node(prog, pages[4])[0] == 0x6000
    left = runs([payer_and_node(prog, page) for page in pages])

    def stops(*words: int) -> tuple[int, ...]:
        [found] = reader.read([vm.value_(), 0x1000, vm.value_()], words)
        assert found == PartialArea(vm.value_(), count, False, True, left, found.stops)
        return found.stops

    assert stops() == (0, count)
    # An index, a pointer to an entry, or to the page of one: the page at hand, or the next one
    assert stops(5) == (0, 4, 5, 6, count)
    assert stops(1) == (0, 1, 2, count)
    assert stops(entries + 8 * 9) == (0, 8, 9, 10, count)
    assert stops(pages[12]) == (0, 11, 12, 13, count)
    assert stops(entries) == (0, 1, count)
    assert stops(count) == stops(entries + 8 * count) == (0, count - 1, count)
    assert stops(0, count + 1, entries - 8, entries + 8 * (count + 1)) == (0, count)


@pytest.mark.image
@pytest.mark.each_kernel
@KERNEL
def test_pages_of_an_area_that_are_gone(lab: Lab, kernel: str) -> None:
    """A page without references was freed, and so were those before it."""
    prog = lab.image(kernel, "4", "mixed").own_program()
    area = an_area(prog)
    vm, count = area.vm.read_(), int(area.vm.nr_pages)
    pages = pages_of(vm)
    freed = Object(prog, "struct page *", pages[6])._refcount.counter.address_ or 0
    Overlay(prog).write((Write(area.vm.address_ or 0, word(0)), Write(freed, bytes(4))))
    [found] = PartialAreaReader(image_of(prog)).read([vm.value_()], [3, 8])
    assert found.left == runs([payer_and_node(prog, page) for page in pages[7:]])
    assert found.stops == (7, 8, 9, count)
    # An entry that was never filled, and one that is no page
    for value in (0, 0x1000, pages[11] + 8):
        Overlay(prog).write((Write(vm.pages.value_() + 8 * 10, word(value)),))
        [found] = PartialAreaReader(image_of(prog)).read([vm.value_()], [0, value])
        assert found.left == runs([payer_and_node(prog, page) for page in pages[11:]])
        assert found.stops == (11, count)


@pytest.mark.image
@pytest.mark.each_kernel
@KERNEL
def test_what_is_no_area_that_is_being_freed(lab: Lab, kernel: str) -> None:
    """One on the list is counted page by page since 7.1. Before, its pages may be half counted."""
    prog = lab.image(kernel, "4", "mixed").own_program()
    area = an_area(prog)
    vm = area.vm.read_()
    found = PartialAreaReader(image_of(prog)).read([vm.value_()], [])
    counts_each = "NR_VMALLOC" in {e.name for e in prog.type("enum node_stat_item").enumerators}
    assert [(f.is_linked, f.is_counted) for f in found] == ([] if counts_each else [(True, True)])
    overlay, gone = Overlay(prog), Write(area.vm.address_ or 0, word(0))

    def after(member: str, value: int) -> list[bool]:
        place = vm.member_(member)
        data = value.to_bytes(place.type_.size, "little")
        overlay.write((gone, Write(place.address_ or 0, data)))
        read = PartialAreaReader(image_of(prog)).read([vm.value_()], [])
        overlay.clear()
        return [f.is_counted for f in read]

    flags, size = int(vm.flags), int(vm.size)
    assert after("flags", flags) == [True]
    assert after("flags", flags | 0x1) == [True]
    assert after("flags", flags | 0x200) == [False]  # VM_MAP_PUT_PAGES
    assert after("flags", flags & ~VM_ALLOC) == []
    assert after("pages", 0) == []
    assert after("addr", int(vm.addr) + 8) == after("size", size + 8) == []
    assert after("nr_pages", 0) == []
    assert after("nr_pages", 1) == [True]
    assert after("nr_pages", size // PAGE + 1) == []
    assert after("pages", 0x1000) == []
