# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Vmalloc areas and kernel stacks in memory made by hand: kernels of other settings, and damage.

``tests/linux/test_vmalloc.py`` compares those of images with a plain walk of the lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from drgn import FaultError, Object
from support.layouts import FRAMES, MadeImage
from support.made_pages import NO_TYPE, TYPES, kernel_with_pages, put

from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import OnFault
from memcg_inspect.linux.mm import vmalloc
from memcg_inspect.linux.mm.vmalloc import (
    VmArea,
    VmMapping,
    block_users,
    check_room,
    find_mapping,
    linked_areas,
    nr_vmalloc_pages,
    stack_blocks,
    thread_size,
    vm_areas,
)
from memcg_inspect.model import Coverage

VARIABLES, NODES, MISSING = 0xFFFFFFFF82000000, 0xFFFF888030000000, 0xFFFF888077700000
#: A ``struct vmap_area``, a ``struct vm_struct`` and an array of pages each.
AREAS, VMS, ARRAYS, TASKS = (0xFFFF888031000000 + 0x100000 * n for n in range(4))
#: Where areas begin. Each has 64 KiB of addresses.
START, ROOM, PAGE = 0xFFFFC90000000000, 0x10000, 4096
CALLER, FORK = 0xFFFFFFFF81001000, 0xFFFFFFFF81002000
VM_ALLOC, VM_NO_GUARD = 0x2, 0x40
PAYER = 0xFFFF888000111000


class Kernel:
    """
    A kernel with one list of areas, or one for each of two nodes.

    :ivar tasks: tasks, ``struct task_struct *``
    :ivar idle: idle tasks by CPU; ``None`` for one that cannot be read
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, heads: int = 2, vmap: bool = True):
        self.image = image = kernel_with_pages(TYPES["7.1"])
        image.declare(
            f"""
            struct list_head {{ struct list_head *next; struct list_head *prev; }};
            struct vm_struct {{ struct vm_struct *next; void *addr; unsigned long size;
                               unsigned long flags; struct page **pages; unsigned int nr_pages;
                               void *caller; }};
            struct vmap_area {{ unsigned long va_start; unsigned long va_end;
                               struct list_head list; struct vm_struct *vm; }};
            struct rb_list {{ long lock; struct list_head head; }};
            struct vmap_node {{ long pool; struct rb_list busy; }};
            struct task_struct {{ void *stack; int exit_state;
                                 {"struct vm_struct *stack_vm_area;" if vmap else ""} }};
            struct free_area {{ long nr_free; }};
            struct zone {{ struct free_area free_area[8]; }};
            struct atomic_long {{ long counter; }};
            """
        )
        self.heads = [NODES + 32 * n + 16 for n in range(heads)]
        self.entries: list[list[int]] = [[] for _ in range(heads)]
        self.tasks: list[Object] = []
        self.idle: list[Object | None] = [image.pointer("struct task_struct *", 0)] * 2
        image.variable("vmap_nodes", "struct vmap_node *", VARIABLES)
        image.variable("nr_vmap_nodes", "int", VARIABLES + 8)
        image.words(VARIABLES, NODES, heads)
        for pfn in range(32):
            put(image, pfn, 0, NO_TYPE, 0)
        for head in self.heads:
            image.words(head, head, head)
        monkeypatch.setattr(vmalloc, "find_tasks", self.find_tasks)
        monkeypatch.setattr(vmalloc, "idle_task", self.idle_task)
        self.number = 0

    def find_tasks(self, image: MadeImage, on_fault: OnFault) -> Iterator[Object]:
        yield from self.tasks
        if len(self.tasks) > 5:
            on_fault(FaultError("no more tasks", 7))

    def idle_task(self, prog: object, cpu: int) -> SimpleNamespace:
        task = self.idle[cpu]

        def read() -> Object:
            if task is None:
                raise FaultError("no runqueue", cpu)
            return task

        return SimpleNamespace(read_=read)

    def area(self, pages: int = 4, node: int = 0, **members: int) -> int:
        """Add an area of some pages; return the ``struct vm_struct *``."""
        n, self.number = self.number, self.number + 1
        image, vm, start = self.image, VMS + 64 * n, START + 0x100000 * n
        given = {"addr": start, "size": (pages + 1) * PAGE, "flags": VM_ALLOC, "caller": CALLER}
        given |= {"pages": ARRAYS + 1024 * n, "nr_pages": pages} | members
        image.make("struct vm_struct", vm, given)
        image.words(ARRAYS + 1024 * n, *self.pages(n, pages))
        self.entries[node].append(AREAS + 64 * n)
        image.words(AREAS + 64 * n, start, start + ROOM, 0, 0, vm)
        ring = [self.heads[node], *(entry + 16 for entry in self.entries[node])]
        for before, at, after in zip(ring[-1:] + ring, ring, ring[1:] + ring[:1], strict=False):
            image.words(at, after, before)
        return vm

    def pages(self, n: int, count: int) -> list[int]:
        return [FRAMES.page(4 * n + i) for i in range(count)]

    def task(self, vm: int, exit_state: int = 0) -> Object:
        at = TASKS + 64 * (len(self.tasks) + 1)
        members = {"stack_vm_area": vm, "exit_state": exit_state}
        self.image.make("struct task_struct", at, members)
        return self.image.pointer("struct task_struct *", at)

    def read(self) -> tuple[list[VmArea], Coverage, Coverage]:
        areas, stacks = Coverage(), Coverage()
        return list(vm_areas(self.image, areas, stacks)), areas, stacks


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def missed(coverage: Coverage) -> list[tuple[str, int, str]]:
    return [(one.what, one.address, one.reason) for one in coverage.examples]


def test_areas_that_vmalloc_made(kernel: Kernel) -> None:
    """Others on the lists are of other kinds, or have no pages or no ``struct vm_struct`` yet."""
    kernel.area(4)
    kernel.area(2, node=1)
    kernel.area(flags=0x4)
    kernel.area(pages=0)
    kernel.area()
    kernel.image.words(AREAS + 64 * 4 + 32, 0)
    kernel.area(flags=VM_ALLOC | 0x1)
    kernel.image.words(VMS + 64 * 5 + 32, 0)
    found, areas, _ = kernel.read()
    assert found == [
        VmArea(START, kernel.pages(0, 4), False, "", True, CALLER),
        VmArea(START + 0x100000, kernel.pages(1, 2), False, "", True, CALLER),
    ]
    assert (areas.read, areas.unreadable) == (2, 0)
    assert linked_areas(kernel.image) == {*(VMS + 64 * n for n in (0, 1, 2, 3, 5)), 0}


def test_areas_that_are_not_in_the_image(kernel: Kernel) -> None:
    kernel.area()
    kernel.area()
    kernel.image.words(AREAS + 64 + 32, MISSING)
    kernel.image.words(kernel.heads[1], MISSING + 64, MISSING + 64)
    found, areas, _ = kernel.read()
    assert [area.address for area in found] == [START]
    at = MISSING + 64
    # An entry that cannot be read is on the list, and no other can be found behind it.
    assert ("vmalloc area", MISSING, f"not made: {MISSING:#x}") in missed(areas)
    assert ("list of vmalloc areas", at, f"not made: {at:#x}") in missed(areas)
    assert linked_areas(kernel.image) == {VMS, MISSING}


def test_pages_that_are_no_more_than_the_addresses(kernel: Kernel) -> None:
    kernel.area(16)
    kernel.area(17)
    found, areas, _ = kernel.read()
    assert [len(area.pages) for area in found] == [16]
    at = AREAS + 64
    why = f"17 pages in an area of 65536 bytes: {at:#x}"
    assert missed(areas) == [("vmalloc area", at, why)]


#: All flags but VM_NO_GUARD, which has to do with the size.
OTHER_FLAGS = 0xFFFF & ~VM_NO_GUARD


@pytest.mark.parametrize(("flags", "count"), [(0, 4), (OTHER_FLAGS, 4), (VM_NO_GUARD, 5)])
@pytest.mark.parametrize("counts_each", [False, True])
def test_an_area_without_its_number_of_pages(
    kernel: Kernel, flags: int, count: int, counts_each: bool
) -> None:
    """Since 7.1 its pages are counted while it gets them. The size includes a guard page."""
    if counts_each:
        kernel.image.enum(None, NR_VMALLOC=7)
    kernel.area(5, size=5 * PAGE, nr_pages=0, flags=VM_ALLOC | flags)
    kernel.area(1, size=PAGE, nr_pages=0)
    found, areas, _ = kernel.read()
    assert [area.pages for area in found] == ([kernel.pages(0, count)] if counts_each else [])
    assert areas.unreadable == 0
    if counts_each:
        kernel.image.words(ARRAYS, FRAMES.page(0), 0, FRAMES.page(2), 0, 0)
        assert kernel.read()[0][0].pages == [FRAMES.page(0), FRAMES.page(2)]


def test_an_area_that_vmalloc_does_not_count(kernel: Kernel) -> None:
    """vm_module_tags_populate() allocates the pages of the call sites of modules."""
    vm = kernel.area()
    kernel.area()
    image = kernel.image
    image.variable("vm_module_tags", "struct vm_struct *", VARIABLES + 64)
    for value, expected in ((vm, [False, True]), (0, [True, True])):
        image.words(VARIABLES + 64, value)
        assert [area.is_counted for area in kernel.read()[0]] == expected
    assert VmArea(START, [], False).is_counted  # unless it is said that it is not
    image.variable("vm_module_tags", "struct vm_struct *", MISSING)
    assert [area.is_counted for area in kernel.read()[0]] == [True, True]


def test_users_of_stacks(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with the caller and the size of the stacks of tasks are stacks, too."""
    vms = [kernel.area(caller=FORK) for _ in range(6)]
    kernel.area(3, caller=FORK)
    kernel.area(4)
    kernel.tasks = [kernel.task(vms[0])]
    kernel.tasks.append(kernel.task(vms[1], exit_state=16))
    kernel.tasks.append(kernel.task(0))
    kernel.idle = [kernel.image.pointer("struct task_struct *", 0), kernel.task(vms[2])]
    image = kernel.image
    image.variable("cached_stacks", "struct vm_struct *[2]", VARIABLES + 128)

    def per_cpu(cached: Object, cpu: int) -> SimpleNamespace:
        if cpu:
            raise FaultError("no memory of the CPU", cpu)
        return SimpleNamespace(read_=cached.read_)

    monkeypatch.setattr(vmalloc, "per_cpu", per_cpu)
    image.words(VARIABLES + 128, vms[3], 0)
    # A stack whose first page is charged is counted.
    put(image, 16, 0, NO_TYPE, PAYER | 2)
    put(image, 20, 0, NO_TYPE, PAYER)
    found, _, stacks = kernel.read()
    users = ["task", "unknown", "task", "cache", "task", "unknown", "", ""]
    assert [area.user for area in found] == users
    assert [area.is_stack for area in found] == [True] * 6 + [False] * 2
    assert stacks.read == 3
    assert missed(stacks) == [("stack of a task", 1, "no memory of the CPU: 0x1")]


def test_tasks_whose_stacks_are_not_known(kernel: Kernel) -> None:
    vm = kernel.area(caller=FORK)
    kernel.tasks = [kernel.image.pointer("struct task_struct *", MISSING)]
    kernel.tasks += [kernel.task(vm) for _ in range(5)]
    kernel.idle = [None, None]
    [area], _, stacks = kernel.read()
    assert (area.is_stack, area.user) == (True, "task")
    at = MISSING + 16
    assert missed(stacks) == [
        ("stack of a task", 0, "no runqueue: 0x0"),
        ("stack of a task", 1, "no runqueue: 0x1"),
        ("stack of a task", 7, "no more tasks: 0x7"),
        ("stack of a task", at, f"not made: {at:#x}"),
    ]
    assert stacks.read == 5


# Lists


def test_kernels_with_one_list(kernel: Kernel) -> None:
    """Up to 6.8."""
    kernel.area()
    kernel.area(node=1)
    image = kernel.image
    del image._objects["vmap_nodes"]
    image.variable("vmap_area_list", "struct list_head", kernel.heads[1])
    assert [area.address for area in kernel.read()[0]] == [START + 0x100000]


def test_kernels_with_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler may remove both variables. The node is a static variable then."""
    kernel = Kernel(monkeypatch, heads=1)
    kernel.area()
    image = kernel.image
    for name in ("vmap_nodes", "nr_vmap_nodes"):
        image._objects[name] = Object(image.prog, image._objects[name].type_)
    image.variable("single", "struct vmap_node", NODES)
    found, areas, _ = kernel.read()
    assert ([area.address for area in found], areas.unreadable) == ([START], 0)


@pytest.mark.parametrize(("number", "found"), [(-1, 0), (0, 0), (1, 1), (2, 2), (3, 0)])
def test_numbers_of_nodes(kernel: Kernel, number: int, found: int) -> None:
    """vmap_init_nodes() makes one for each possible CPU at most. Here are two."""
    kernel.area()
    kernel.area(node=1)
    kernel.image.words(VARIABLES + 8, number % (1 << 32))
    read, areas, _ = kernel.read()
    assert len(read) == found
    why = ("list of vmalloc areas", NODES, f"{number} struct vmap_node: {NODES:#x}")
    assert missed(areas) == ([] if found else [why])


# Areas of addresses


def test_the_area_of_an_address(kernel: Kernel) -> None:
    vm = kernel.area(3, flags=0x1 | 0x10)
    kernel.area(pages=0, flags=0x8, nr_pages=99)
    kernel.image.words(VMS + 64 + 32, 0)  # it has no list of pages
    second = START + 0x100000
    first = VmMapping(START, START + ROOM, ("ioremap", "coherent DMA"), CALLER, kernel.pages(0, 3))
    for at in (0, ROOM - 1):
        assert find_mapping(kernel.image, START + at) == first
        assert find_mapping(kernel.image, second + at) == VmMapping(
            second, second + ROOM, ("mapped to user space",), CALLER, []
        )
    assert find_mapping(kernel.image, START - 1) is None
    assert find_mapping(kernel.image, START + ROOM) is None
    kernel.image.words(AREAS + 32, 0)
    assert find_mapping(kernel.image, START) is None
    kernel.image.words(AREAS + 32, vm)
    kernel.image.write(vm + 40, bytes([17, 0, 0, 0]))
    with pytest.raises(FaultError, match="17 pages in an area of 65536 bytes"):
        find_mapping(kernel.image, START)


@pytest.mark.parametrize(
    ("flags", "uses"),
    [
        (0x1, ("ioremap",)),
        (0x2, ("vmalloc",)),
        (0x4, ("vmap",)),
        (0x8, ("mapped to user space",)),
        (0x10, ("coherent DMA",)),
        (0x1000, ("percpu or other sparse area",)),
        (0x100A, ("vmalloc", "mapped to user space", "percpu or other sparse area")),
        (0x40, ()),
    ],
)
def test_uses_of_areas(kernel: Kernel, flags: int, uses: tuple[str, ...]) -> None:
    """VM_IOREMAP and the like of include/linux/vmalloc.h."""
    kernel.area(flags=flags)
    found = find_mapping(kernel.image, START)
    assert found is not None and found.uses == uses


def refused(image: MadeImage, address: int, size: int) -> str | None:
    """Return why an array is refused."""
    try:
        check_room(image, address, size)
    except FaultError as error:
        return str(error)
    return None


def test_room_in_pages(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of an order that no block has is a sign of damage. Here are 8 orders."""
    image, head, order = kernel.image, FRAMES.page(8), 2
    virt = FRAMES.virt(head)
    monkeypatch.setattr(vmalloc, "page_behind", lambda image, at: head + 64)
    monkeypatch.setattr(
        vmalloc, "read_page", lambda image, page: SimpleNamespace(order=order, head=head)
    )
    assert refused(image, virt, 4 * PAGE) is None
    assert refused(image, virt + 8, 4 * PAGE - 8) is None
    why = f"an array of {4 * PAGE + 1} bytes in memory of {4 * PAGE} bytes: {virt:#x}"
    assert refused(image, virt, 4 * PAGE + 1) == why
    order = 7
    assert refused(image, virt, 128 * PAGE) is None
    order = 8
    assert refused(image, virt, 8) == f"a page of order 8: {head:#x}"


def test_room_in_areas(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vmalloc, "page_behind", lambda image, at: None)
    kernel.area()
    image = kernel.image
    assert refused(image, START + 16, ROOM - 16) is None
    at = START + 16
    why = f"an array of {ROOM - 15} bytes in memory of {ROOM - 16} bytes: {at:#x}"
    assert refused(image, at, ROOM - 15) == why
    assert refused(image, MISSING, 0) is None
    assert refused(image, MISSING, 1) == f"an array of 1 bytes in memory of 0 bytes: {MISSING:#x}"
    monkeypatch.setattr(MadeImage, "is_moving", True)
    assert refused(image, MISSING, 1) is None


# Small numbers


@pytest.mark.parametrize(
    ("name", "size", "is_right"),
    [
        ("stack", 0x4000, True),
        ("task", 0x4000, True),
        ("stack", 1 << 18, True),
        ("stack", 1 << 19, False),
        ("stack", 0x6000, False),
        ("stack", 0, False),
    ],
)
def test_sizes_of_stacks(name: str, size: int, is_right: bool) -> None:
    """THREAD_SIZE is a power of 2."""
    image = MadeImage()
    image.symbol_at(f"__start_init_{name}", VARIABLES)
    image.symbol_at(f"__end_init_{name}", VARIABLES + size)
    if is_right:
        assert thread_size(image) == size
        return
    with pytest.raises(UnknownKernelError, match="could not find symbol __start_init_stack"):
        thread_size(image)


@pytest.mark.parametrize(
    ("of_stack", "of_task", "size"), [(0x4000, 0x8000, 0x4000), (0x4001, 0x8000, 0x8000)]
)
def test_symbols_of_two_releases(of_stack: int, of_task: int, size: int) -> None:
    """Those of 6.10 come first, if they can be right."""
    image = MadeImage()
    for name, value in (("stack", of_stack), ("task", of_task)):
        image.symbol_at(f"__start_init_{name}", VARIABLES)
        image.symbol_at(f"__end_init_{name}", VARIABLES + value)
    assert thread_size(image) == size


def test_a_stack_whose_end_is_not_known() -> None:
    image = MadeImage()
    image.symbol_at("__start_init_stack", VARIABLES)
    with pytest.raises(UnknownKernelError, match="__start_init_stack"):
        thread_size(image)
    image.symbol_at("__start_init_task", VARIABLES)
    image.symbol_at("__end_init_task", VARIABLES + 0x2000)
    assert thread_size(image) == 0x2000


def test_the_number_of_pages_of_all_areas(kernel: Kernel) -> None:
    image = kernel.image
    assert nr_vmalloc_pages(image) is None
    image.variable("nr_vmalloc_pages", "struct atomic_long", VARIABLES + 256)
    image.words(VARIABLES + 256, 1234)
    assert nr_vmalloc_pages(image) == 1234


# Stacks that are blocks of pages (CONFIG_VMAP_STACK=n)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel whose first task is ``init_task``, and whose fourth one cannot be read."""
    kernel = Kernel(monkeypatch, vmap=False)
    image = kernel.image
    image.variable("init_task", "struct task_struct", TASKS)
    places = [TASKS + 64 * n for n in range(3)]
    for n, place in enumerate(places):
        stack = FRAMES.virt(FRAMES.page(4 + 4 * n))
        image.make("struct task_struct", place, {"stack": stack, "exit_state": 32 * (n == 2)})
    places.append(MISSING)
    kernel.tasks = [image.pointer("struct task_struct *", place) for place in places]

    def virt_to_page(pointer: Object) -> Object:
        page = FRAMES.page((pointer.value_() - FRAMES.direct_map) >> 12)
        return Object(image.prog, "void *", page)

    monkeypatch.setattr(vmalloc, "virt_to_page", virt_to_page)
    return kernel


def test_stacks_that_are_blocks(blocks: Kernel) -> None:
    coverage = Coverage()
    assert stack_blocks(blocks.image, coverage) == {FRAMES.page(pfn) for pfn in (4, 8, 12)}
    assert coverage.read == 3
    assert missed(coverage) == [("stack of a task", MISSING, f"not made: {MISSING:#x}")]
    _, _, stacks = blocks.read()
    assert (stacks.read, stacks.unreadable) == (0, 0)


def test_users_of_stacks_that_are_blocks(blocks: Kernel) -> None:
    """That of init_task is part of the kernel. A task that has exited may have freed its stack."""
    coverage, image = Coverage(), blocks.image
    at = TASKS + 64 * 8
    image.make("struct task_struct", at, {"stack": FRAMES.virt(FRAMES.page(16))})
    image.make("struct task_struct", at + 64, {"stack": 0})
    blocks.tasks.append(image.pointer("struct task_struct *", at + 64))
    blocks.idle = [image.pointer("struct task_struct *", at), None]
    users = {FRAMES.page(8): "task", FRAMES.page(12): "unknown", FRAMES.page(16): "task"}
    assert block_users(image, coverage) == users
    assert missed(coverage) == [
        ("stack of a task", 1, "no runqueue: 0x1"),
        ("stack of a task", MISSING, f"not made: {MISSING:#x}"),
    ]


def test_kernels_whose_stacks_are_areas(kernel: Kernel) -> None:
    kernel.tasks = [kernel.task(kernel.area())]
    coverage = Coverage()
    assert stack_blocks(kernel.image, coverage) == set()
    assert block_users(kernel.image, coverage) == {}
    assert coverage == Coverage()
