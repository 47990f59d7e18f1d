# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Vmalloc areas and kernel stacks
-------------------------------

Mirrors ``struct vm_struct`` of :linux:`include/linux/vmalloc.h`, and the stacks that
:linux:`kernel/fork.c` allocates.

Stacks are taken from their areas rather than from the task list: the stack of a task that
is just being forked, or has just exited, is charged while no list has the task.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from drgn import FaultError, Object, ObjectAbsentError, offsetof, sizeof
from drgn.helpers.linux.mm import find_vmap_area, virt_to_page

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import has_member, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.sched import find_tasks
from memcg_inspect.linux.lib.list import OnFault, list_entries
from memcg_inspect.model import Coverage

__all__ = ("VmArea", "VmMapping", "find_mapping", "stack_blocks", "thread_size", "vm_areas")

#: ``VM_ALLOC``, of :linux:`include/linux/vmalloc.h`.
VM_ALLOC = 0x2


class VmArea(NamedTuple):
    """
    One ``struct vm_struct`` with pages.

    :ivar address: first virtual address
    :ivar pages: its ``struct page *``, one for each page
    :ivar is_stack: whether it is a kernel stack
    """

    address: int
    pages: list[int]
    is_stack: bool


#: Flags in ``vm_struct.flags``, of the same file; they are macros.
_VM_FLAGS = {
    0x1: "ioremap",
    VM_ALLOC: "vmalloc",
    0x4: "vmap",
    0x8: "mapped to user space",
    0x10: "coherent DMA",
    0x1000: "percpu or other sparse area",
}


class VmMapping(NamedTuple):
    """
    The area that an address is in.

    :ivar start, end: addresses, the guard page included in it
    :ivar uses: what its flags say
    :ivar caller: address in the code that asked for it
    :ivar pages: its ``struct page *``, one for each page; empty where it keeps no list of them
    """

    start: int
    end: int
    uses: tuple[str, ...]
    caller: int
    pages: list[int]


def find_mapping(image: Image, address: int) -> VmMapping | None:
    """
    Find the area that an address is in, through the kernel's tree.

    :raises drgn.FaultError: if it cannot be read
    """
    area = find_vmap_area(image.prog, address)
    vm = area.vm.read_() if area else None
    if not vm:
        return None
    flags, memory = int(vm.flags), image.memory
    pages, count = vm.pages.value_(), int(vm.nr_pages)
    return VmMapping(
        start=int(area.va_start),
        end=int(area.va_end),
        uses=tuple(name for bit, name in _VM_FLAGS.items() if flags & bit),
        caller=vm.caller.value_(),
        pages=memory.words(memory.read(pages, count * memory.word_size)) if pages else [],
    )


@per_image
def thread_size(image: Image) -> int:
    """
    Return ``THREAD_SIZE``, in bytes: the size of the first task's stack.

    :raises UnknownKernelError: if its symbols are missing
    """
    # Renamed in commit 8f69cba096b5 ("x86: Rename __{start,end}_init_task to
    # __{start,end}_init_stack") (in v6.10).
    for name in ("stack", "task"):
        try:
            start = image.symbol(f"__start_init_{name}").address
            return int(image.symbol(f"__end_init_{name}").address - start)
        except UnknownKernelError:
            continue
    raise UnknownKernelError("could not find symbol __start_init_stack")


def vm_areas(image: Image, coverage: Coverage, stack_coverage: Coverage) -> Iterator[VmArea]:
    """
    Walk the areas made by vmalloc, kernel stacks among them.

    :param stack_coverage: tasks whose stacks tell which areas are stacks
    """
    memory = image.memory
    vm_type = image.type("struct vm_struct")
    at = {name: offsetof(vm_type, name) for name in ("addr", "flags", "pages", "nr_pages")}
    # An unsigned long since 7.2, an unsigned int before.
    count_size = sizeof(member_type(vm_type, "nr_pages"))
    caller, size, word = offsetof(vm_type, "caller"), sizeof(vm_type), memory.word_size
    stacks = _stacks(image, stack_coverage)

    def missed(error: FaultError) -> None:
        coverage.miss("list of vmalloc areas", error.address, str(error))

    for area in _vmap_areas(image, missed):
        try:
            vm = area.vm.value_()
            if not vm:
                continue
            data = memory.read(vm, size)
            pages = memory.word_at(data, at["pages"])
            count = int.from_bytes(data[at["nr_pages"] :][:count_size], memory.order)
            if not memory.word_at(data, at["flags"]) & VM_ALLOC or not pages or not count:
                continue
            yield VmArea(
                address=memory.word_at(data, at["addr"]),
                pages=memory.words(memory.read(pages, count * word)),
                is_stack=(memory.word_at(data, caller), count) in stacks,
            )
            coverage.read += 1
        except FaultError as error:
            coverage.miss("vmalloc area", error.address, str(error))


def _vmap_areas(image: Image, on_fault: OnFault) -> Iterator[Object]:
    # Commit d093602919ad ("mm: vmalloc: remove global vmap_area_root rb-tree") (in v6.9) split
    # the list up.
    try:
        nodes = image.object("vmap_nodes")
    except UnknownKernelError:
        heads = [image.object("vmap_area_list").address_of_()]
    else:
        # Compilers optimize the pointer away where there is but one.
        try:
            nodes = nodes.read_()
        except ObjectAbsentError:
            nodes = image.prog.variable("single", "mm/vmalloc.c").address_of_()
        try:
            number = int(image.object("nr_vmap_nodes").value_())
        except ObjectAbsentError:
            number = 1
        heads = [nodes[i].busy.head.address_of_() for i in range(number)]
    for head in heads:
        yield from list_entries("struct vmap_area", head, "list", on_fault)


def _stacks(image: Image, coverage: Coverage) -> set[tuple[int, int]]:
    """From where in the kernel's text, and with how many pages, tasks' stacks were made."""
    stacks: set[tuple[int, int]] = set()
    if not has_member(image, "struct task_struct", "stack_vm_area"):
        return stacks

    def missed(error: FaultError) -> None:
        coverage.miss("stack of a task", error.address, str(error))

    for task in find_tasks(image, missed):
        try:
            area = task.stack_vm_area.read_()
            if area:
                stacks.add((area.caller.value_(), area.nr_pages.value_()))
                coverage.read += 1
        except FaultError as error:
            missed(error)
    return stacks


def stack_blocks(image: Image, coverage: Coverage) -> set[int]:
    """
    Return the first pages of kernel stacks that are blocks of pages, not vmalloc areas
    (``CONFIG_VMAP_STACK=n``). Such a block is charged whole, through its first page.

    :return: ``struct page *`` addresses; empty where stacks are vmalloc areas
    """
    pages: set[int] = set()
    if has_member(image, "struct task_struct", "stack_vm_area"):
        return pages

    def missed(error: FaultError) -> None:
        coverage.miss("stack of a task", error.address, str(error))

    for task in find_tasks(image, missed):
        try:
            pages.add(virt_to_page(Object(image.prog, "void *", task.stack.value_())).value_())
            coverage.read += 1
        except FaultError as error:
            missed(error)
    return pages
