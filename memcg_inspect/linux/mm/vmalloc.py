# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Vmalloc areas and kernel stacks
-------------------------------

Mirrors ``struct vmap_area`` and ``struct vm_struct`` of :linux:`mm/vmalloc.c`, and
``alloc_thread_stack_node()`` of :linux:`kernel/fork.c`.

Kernel stacks are found among the vmalloc areas, not through the task list. The stack of a task
that is being forked, or that has just exited, is charged although no list has the task.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Literal, NamedTuple

from drgn import FaultError, Object, ObjectAbsentError, offsetof, sizeof
from drgn.helpers.linux.mm import virt_to_page
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.sched import idle_task

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import array_length, constant, has_member, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.linux.kernel.sched import find_tasks
from memcg_inspect.linux.lib.list import OnFault, list_entries, raise_fault
from memcg_inspect.linux.mm.debug import page_behind, read_page
from memcg_inspect.linux.mm.mm_types import page_layout
from memcg_inspect.linux.mm.mmzone import mem_map, possible_cpus
from memcg_inspect.model import Coverage

__all__ = (
    "StackUser",
    "VmArea",
    "VmMapping",
    "block_users",
    "check_room",
    "find_mapping",
    "has_restored_areas",
    "linked_areas",
    "nr_vmalloc_pages",
    "stack_blocks",
    "thread_size",
    "vm_areas",
)

#: No kernel has larger stacks, in bytes.
_LARGEST_STACK = 1 << 18
#: ``VM_ALLOC`` and ``VM_NO_GUARD`` of :linux:`include/linux/vmalloc.h`.
VM_ALLOC, VM_NO_GUARD = 0x2, 0x40


#: Who uses a kernel stack: a task that counts it as ``NR_KERNEL_STACK_KB``; ``cached_stacks``, in
#: which it is not counted; or a task that is being forked or is exiting, or RCU, which frees it:
#: then it may be counted or not.
StackUser = Literal["task", "cache", "unknown", ""]


class VmArea(NamedTuple):
    """
    One ``struct vm_struct`` that ``vmalloc()`` made.

    :ivar address: first virtual address
    :ivar pages: ``struct page *`` of each page, as far as they are allocated: vmalloc() may be
        under way, and vrealloc() frees pages
    :ivar is_stack: whether the area is a kernel stack
    :ivar user: who uses a stack; ``""`` for other areas
    :ivar is_counted: whether vmalloc() counts its pages, as ``NR_VMALLOC`` or
        ``nr_vmalloc_pages``
    :ivar caller: address of the code that made the area
    """

    address: int
    pages: list[int]
    is_stack: bool
    user: StackUser = ""
    is_counted: bool = True
    caller: int = 0


#: Macros for ``vm_struct.flags`` in the same file, in words.
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
    The ``struct vmap_area`` of an address.

    :ivar start: first virtual address
    :ivar end: address after the last one; guard pages are included
    :ivar uses: flags of its ``struct vm_struct``, in words
    :ivar caller: address of the code that made the area
    :ivar pages: ``struct page *`` of each page; empty if the area has no list of pages
    """

    start: int
    end: int
    uses: tuple[str, ...]
    caller: int
    pages: list[int]


def find_mapping(image: Image, address: int) -> VmMapping | None:
    """
    Find the area that an address is in, ``find_vmap_area()``.

    All areas are read: a search in their trees may not end if the trees are damaged.

    :param address: ``void *``
    :return: ``None`` if there is none, or if it has no ``struct vm_struct``
    :raises drgn.FaultError: if the area cannot be read
    """

    address, areas = untagged(image, address), _vmap_areas(image, raise_fault)
    area = next((a for a in areas if int(a.va_start) <= address < int(a.va_end)), None)
    vm = area.vm.read_() if area is not None else None
    if not area or not vm:
        return None
    flags, memory = int(vm.flags), image.memory
    pages, count = vm.pages.value_(), int(vm.nr_pages)
    if pages:
        _check_count(image, area, count)
    return VmMapping(
        start=int(area.va_start),
        end=int(area.va_end),
        uses=tuple(name for bit, name in _VM_FLAGS.items() if flags & bit),
        caller=vm.caller.value_(),
        pages=memory.words(memory.read(pages, count * memory.word_size)) if pages else [],
    )


def check_room(image: Image, address: int, size: int) -> None:
    """
    Check the length of an array with the memory that ``kvmalloc()`` or ``vmalloc()`` gave for it.

    Nothing is checked on a running kernel, whose areas come and go while they are read.

    :param address: ``void *`` of the array
    :param size: its length, in bytes
    :raises drgn.FaultError: if the array is longer, or if its memory is not found
    """
    if image.is_moving:
        return
    start, page = untagged(image, address), page_behind(image, address)
    if page is None:
        mapping = find_mapping(image, address)
        end = start if mapping is None else mapping.end
    else:
        found, frames = read_page(image, page), mem_map(image)
        orders = array_length(member_type(image.type("struct zone"), "free_area"))
        if found.order >= orders:
            raise FaultError(f"a page of order {found.order}", found.head)
        end = frames.virt(found.head) + (frames.page_size << found.order)
    if start + size > end:
        raise FaultError(f"an array of {size} bytes in memory of {end - start} bytes", address)


@per_image
def thread_size(image: Image) -> int:
    """
    Return ``THREAD_SIZE``, in bytes.

    It is a macro. The stack of ``init_task`` has that size.

    :raises UnknownKernelError: if its symbols are missing, or are not where they can be
    """
    # Renamed in commit 8f69cba096b5 ("x86: Rename __{start,end}_init_task to
    # __{start,end}_init_stack") (in v6.10).
    for name in ("stack", "task"):
        try:
            start = image.symbol(f"__start_init_{name}").address
            size = int(image.symbol(f"__end_init_{name}").address - start)
        except UnknownKernelError:
            continue
        if 0 < size <= _LARGEST_STACK and not size & size - 1:
            return size
    raise UnknownKernelError("could not find symbol __start_init_stack")


def vm_areas(image: Image, coverage: Coverage, stack_coverage: Coverage) -> Iterator[VmArea]:
    """
    Iterate over all areas that ``vmalloc()`` made, kernel stacks included.

    :param coverage: counts the areas that were read, and those that are unreadable
    :param stack_coverage: counts the tasks whose stacks were read, and those that are unreadable;
        they tell which areas are kernel stacks
    """
    memory = image.memory
    vm_type = image.type("struct vm_struct")
    at = {name: offsetof(vm_type, name) for name in ("addr", "flags", "pages", "nr_pages", "size")}
    # unsigned int in 6.12, unsigned long in 7.2
    count_size = sizeof(member_type(vm_type, "nr_pages"))
    caller, size, word = offsetof(vm_type, "caller"), sizeof(vm_type), memory.word_size
    stacks, uncounted = _stacks(image, stack_coverage), _module_tags(image)
    # Since 7.1, vm_area_alloc_pages() counts pages one by one. Before, __vmalloc_area_node() counts
    # them when it has all.
    counts_each = constant(image, "NR_VMALLOC") is not None

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
            flags = memory.word_at(data, at["flags"])
            if not flags & VM_ALLOC or not pages:
                continue
            if not count and counts_each:
                # It has no page yet, or some. The entries of the others are 0.
                guard = 0 if flags & VM_NO_GUARD else 1
                count = (memory.word_at(data, at["size"]) >> mem_map(image).page_shift) - guard
            if count <= 0:
                continue
            _check_count(image, area, count)
            is_stack = (memory.word_at(data, caller), count) in stacks.kinds
            found = VmArea(
                address=memory.word_at(data, at["addr"]),
                pages=[p for p in memory.words(memory.read(pages, count * word)) if p],
                is_stack=is_stack,
                user=stacks.users.get(vm, "unknown") if is_stack else "",
                is_counted=vm != uncounted,
                caller=memory.word_at(data, caller),
            )
            if found.user == "unknown" and found.pages and _is_charged(image, found.pages[0]):
                # A stack is counted as long as it is charged: exit_task_stack_account().
                found = found._replace(user="task")
            yield found
            coverage.read += 1
        except FaultError as error:
            coverage.miss("vmalloc area", error.address, str(error))


def _is_charged(image: Image, page: int) -> bool:
    return page_layout(image).kmem.is_set(image.memory.read(page, mem_map(image).size))


def _module_tags(image: Image) -> int | None:
    """
    Return the ``struct vm_struct *`` of the call sites of modules.

    ``vm_module_tags_populate()`` allocates its pages itself.
    """
    try:
        area: int = image.object("vm_module_tags").value_()
    except (UnknownKernelError, ObjectAbsentError, FaultError):
        return None
    return area or None


def nr_vmalloc_pages(image: Image) -> int | None:
    """
    Return the number of all pages that vmalloc() has allocated, before they were counted by node.

    :return: ``None`` if the kernel has no such counter (since 7.1)
    :raises drgn.FaultError: if it is not in the image
    """
    try:
        return int(image.object("nr_vmalloc_pages").counter)
    except UnknownKernelError:
        return None


def has_restored_areas(image: Image) -> bool:
    """
    Return whether the kernel may have areas, or had them, that the kernel before it allocated.

    ``kho_restore_vmalloc()`` does not count their pages, and ``vfree()`` takes them off.

    :return: ``True``, too, if that is not in the image
    """
    try:
        return bool(image.object("kho_in").fdt_phys)
    except (UnknownKernelError, ObjectAbsentError):
        return False
    except FaultError:
        return True


def linked_areas(image: Image) -> frozenset[int]:
    """Return the ``struct vm_struct *`` of all areas on lists, as far as these can be read."""
    found: set[int] = set()
    for area in _vmap_areas(image, lambda error: None):
        with suppress(FaultError):
            found.add(area.vm.value_())
    return frozenset(found)


def _vmap_areas(image: Image, on_fault: OnFault) -> Iterator[Object]:
    # Commit d093602919ad ("mm: vmalloc: remove global vmap_area_root rb-tree") (in v6.9) replaced
    # the one list by one for each vmap_node.
    try:
        nodes = image.object("vmap_nodes")
    except UnknownKernelError:
        heads = [image.object("vmap_area_list").address_of_()]
    else:
        # The compiler may remove vmap_nodes and nr_vmap_nodes where there can be only one node.
        # That is the static variable "single".
        try:
            nodes = nodes.read_()
        except ObjectAbsentError:
            nodes = image.object("single", "mm/vmalloc.c").address_of_()
        try:
            number = int(image.object("nr_vmap_nodes").value_())
        except ObjectAbsentError:
            number = 1
        # vmap_init_nodes() makes one for each possible CPU at most.
        if not 0 < number <= len(possible_cpus(image)):
            on_fault(FaultError(f"{number} struct vmap_node", nodes.value_()))
            return
        heads = [nodes[i].busy.head.address_of_() for i in range(number)]
    for head in heads:
        yield from list_entries(image, "struct vmap_area", head, "list", on_fault)


def _check_count(image: Image, area: Object, count: int) -> None:
    """
    Check the number of pages of an area with its size.

    :param area: ``struct vmap_area *``
    :raises drgn.FaultError: if there are more pages than addresses
    """
    size = int(area.va_end) - int(area.va_start)
    if count << mem_map(image).page_shift > size:
        raise FaultError(f"{count} pages in an area of {size} bytes", area.value_())


class _Stacks(NamedTuple):
    """
    The kernel stacks that are vmalloc areas.

    :ivar kinds: ``vm_struct.caller`` and ``vm_struct.nr_pages`` of the stacks of tasks; they tell
        other stacks
    :ivar users: who uses a stack, by ``struct vm_struct *``
    """

    kinds: set[tuple[int, int]]
    users: dict[int, StackUser]


def _stacks(image: Image, coverage: Coverage) -> _Stacks:
    """
    Return what identifies areas that are kernel stacks.

    :return: empty without ``CONFIG_VMAP_STACK``
    """
    stacks = _Stacks(set(), {})
    if not has_member(image, "struct task_struct", "stack_vm_area"):
        return stacks

    def missed(error: FaultError) -> None:
        coverage.miss("stack of a task", error.address, str(error))

    for task in [*find_tasks(image, missed), *_idle_tasks(image, missed)]:
        try:
            area = task.stack_vm_area.read_()
            if area:
                stacks.kinds.add((area.caller.value_(), area.nr_pages.value_()))
                # do_exit() sets exit_state before it calls exit_task_stack_account().
                stacks.users[area.value_()] = "unknown" if task.exit_state else "task"
                coverage.read += 1
        except FaultError as error:
            missed(error)
    stacks.users.update(dict.fromkeys(_cached_stacks(image, missed), "cache"))
    return stacks


def _idle_tasks(image: Image, on_fault: OnFault) -> Iterator[Object]:
    """Return the idle tasks, which have no PID; that of the boot CPU has no area for its stack."""
    for cpu in possible_cpus(image):
        try:
            task = idle_task(image.prog, cpu).read_()
        except FaultError as error:
            on_fault(error)
            continue
        if task:
            yield task


def _cached_stacks(image: Image, on_fault: OnFault) -> Iterator[int]:
    """Return the ``struct vm_struct *`` of stacks that CPUs keep for new tasks."""
    try:
        cached = image.object("cached_stacks")
    except UnknownKernelError:
        return
    for cpu in possible_cpus(image):
        try:
            yield from filter(None, (area.value_() for area in per_cpu(cached, cpu).read_()))
        except FaultError as error:
            on_fault(error)


def stack_blocks(image: Image, coverage: Coverage) -> set[int]:
    """
    Return the kernel stacks that are blocks of pages (``CONFIG_VMAP_STACK=n``).

    ``memcg_data`` of the first page charges the whole block.

    :param coverage: counts the tasks whose stacks were read, and those that are unreadable
    :return: ``struct page *`` of the first page of each stack; empty with ``CONFIG_VMAP_STACK``
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


def block_users(image: Image, coverage: Coverage) -> dict[int, StackUser]:
    """
    Return who uses the kernel stacks that are blocks of pages.

    Stacks that are being freed are not known.

    :param coverage: counts the tasks whose stacks are unreadable
    :return: by ``struct page *`` of the first page of each stack; empty with
        ``CONFIG_VMAP_STACK``
    """
    users: dict[int, StackUser] = {}
    if has_member(image, "struct task_struct", "stack_vm_area"):
        return users

    def missed(error: FaultError) -> None:
        coverage.miss("stack of a task", error.address, str(error))

    init_task = image.object("init_task").address_
    for task in [*find_tasks(image, missed), *_idle_tasks(image, missed)]:
        try:
            stack = task.stack.value_()
            # The stack of init_task is part of the kernel, and not counted.
            if stack and task.value_() != init_task:
                page = virt_to_page(Object(image.prog, "void *", stack)).value_()
                users[page] = "unknown" if task.exit_state else "task"
        except FaultError as error:
            missed(error)
    return users
