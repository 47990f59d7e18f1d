# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Words on kernel stacks
----------------------

Reads the stacks that :linux:`kernel/stacktrace.c` unwinds: ``task_stack_page()`` of
include/linux/sched/task_stack.h, and the stack of an interrupt that came upon it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import product

from drgn import FaultError, Object, StackTrace, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member, has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.memory import SMALLEST_PAGE
from memcg_inspect.linux.arch.processor import code_addresses, is_kernel_address
from memcg_inspect.linux.mm.mmzone import mem_map

__all__ = (
    "as_written",
    "functions_in",
    "is_on_own_stack",
    "other_stack",
    "places_in",
    "stack_of",
    "stack_words",
    "unwind",
    "whole_stack",
)

#: Pages to read of a stack whose size is not known, e.g. the stack of an interrupt.
_UNKNOWN_PAGES = 4
#: No kernel has larger stacks, in bytes.
_LARGEST_STACK = 1 << 18
#: No function has more bytes.
_LONGEST = 1 << 16
#: What GCC adds to the name of a function: copies for some arguments, a part of one, and what is
#: rarely called of each.
_COPIES = (
    *(".isra.0", ".constprop.0", ".part.0", ".isra.1", ".constprop.1", ".part.1"),
    *(".isra.0.constprop.0", ".part.0.constprop.0", ".part.0.isra.0"),
)
_SUFFIXES = ["".join(parts) for parts in product(("", *_COPIES), ("", ".cold"))]
#: The most stacks of interrupts and exceptions that a CPU may be on at the same time.
_MOST_STACKS = 8


def places_in(image: Image, names: Iterable[str]) -> frozenset[int]:
    """
    Return the addresses in some functions, with their copies and parts that compilers make.

    :param names: names of the functions; those that the kernel does not have are left out, e.g.
        because they are inlined
    """
    places: set[int] = set()
    for name, suffix in product(names, _SUFFIXES):
        with suppress(UnknownKernelError):
            symbol = image.symbol(name + suffix)
            places.update(range(symbol.address, symbol.address + min(symbol.size, _LONGEST)))
    return frozenset(places)


def unwind(image: Image, task: Object) -> StackTrace:
    """
    Unwind the kernel stack of a task.

    :param task: ``struct task_struct *``
    :raises drgn.FaultError: if the stack is not in the image
    :raises LookupError: if the registers are not in the image
    :raises ValueError: if the task runs in a live kernel, or if the kernel's tables are damaged
    """
    try:
        return image.prog.stack_trace(task)
    except (FaultError, LookupError, ValueError):
        raise
    except Exception as error:  # drgn raises Exception for tables that it cannot parse
        raise ValueError(str(error)) from error


def stack_words(image: Image, task: Object, trace: StackTrace) -> list[int]:
    """
    Return the words in the registers and on the kernel stack of a task.

    If the CPU was on other stacks, e.g. that of an interrupt, the words on them are included.

    :param task: ``struct task_struct *``
    :raises drgn.FaultError: if the stack is not in the image
    :raises ValueError: if the stack pointer is not known
    """
    memory = image.memory
    words = list(trace[0].registers().values())
    start, size = stack_of(image, task)
    pointers = _stack_pointers(image, trace)
    first = pointers[0] if start <= pointers[0] < start + size else start
    words += memory.words(memory.read(first, start + size - first), 0, memory.word_size)
    known = [(start, start + size)]
    for sp in pointers:
        if len(known) > _MOST_STACKS or any(low <= sp < high for low, high in known):
            continue
        other = list(other_stack(image, sp))
        known.append((sp, sp + max(1, len(other)) * memory.word_size))
        words += other
    return words


def _stack_pointers(image: Image, trace: StackTrace) -> list[int]:
    """
    Return the stack pointers of the frames in the kernel, innermost first.

    :raises ValueError: if that of the innermost frame is not known
    """
    pointers: list[int] = []
    for frame in trace:
        try:
            if pointers and not is_kernel_address(image.prog, frame.pc):
                break  # user mode
            sp = frame.sp
        except LookupError as error:
            if not pointers:
                raise ValueError(str(error)) from error
            continue
        pointers.append(sp - sp % image.memory.word_size)
    return pointers


def is_on_own_stack(image: Image, task: Object, trace: StackTrace) -> bool:
    """
    Return whether any function of a stack trace is on the stack of the task.

    ``__schedule()`` of kernel/sched/core.c makes the next task that of the CPU, and switches stacks
    afterwards: in between, the CPU is on the stack of the previous task.

    :param task: ``struct task_struct *``
    :raises drgn.FaultError: if the task is not in the image
    :raises ValueError: if the stack pointer is not known
    """
    start, size = stack_of(image, task)
    return any(start <= sp < start + size for sp in _stack_pointers(image, trace))


def whole_stack(image: Image, task: Object) -> list[int]:
    """
    Return all words on the kernel stack of a task, those left over from earlier calls, too.

    There are none if the task has exited and its stack is freed.

    :param task: ``struct task_struct *``
    :raises drgn.FaultError: if the stack is not in the image
    """
    start, size = stack_of(image, task)
    return image.memory.words(image.memory.read(start, size)) if start else []


def stack_of(image: Image, task: Object) -> tuple[int, int]:
    """
    Return the lowest address of the stack of a task, and its size in bytes.

    The address is 0 if the task has exited and its stack is freed.

    :param task: ``struct task_struct *``
    :raises drgn.FaultError: if the task is not in the image
    """
    size = _UNKNOWN_PAGES * SMALLEST_PAGE
    if has_type(image, "union thread_union"):
        size = sizeof(image.type("union thread_union"))
    # CONFIG_VMAP_STACK
    if has_member(image, "struct task_struct", "stack_vm_area") and task.stack_vm_area:
        size = int(task.stack_vm_area.nr_pages) << mem_map(image).page_shift
    return task.stack.value_(), min(size, _LARGEST_STACK)


def other_stack(image: Image, sp: int) -> Iterator[int]:
    """
    Return the words on a stack of unknown size, as far as they can be read.

    :param sp: stack pointer, a multiple of the size of a word
    """
    memory, address = image.memory, sp
    for _ in range(_UNKNOWN_PAGES):
        end = address - address % SMALLEST_PAGE + SMALLEST_PAGE
        try:
            yield from memory.words(memory.read(address, end - address), 0, memory.word_size)
        except FaultError:
            return
        address = end


def as_written(name: str) -> str:
    """
    Return the name that a function has in the source.

    Compilers name parts and clones of functions ``dput.part.0``, ``alloc_slab_obj_exts.isra.0``.
    """
    return name.partition(".")[0]


def functions_in(image: Image, words: Iterable[int]) -> tuple[str, ...]:
    """
    Return the functions that words point into.

    As for frames that the kernel prints with a question mark, not all of them are callers.
    """
    start, end = image.symbol("_stext").address, image.symbol("_etext").address
    names: dict[str, None] = {}
    for word in code_addresses(image, words):
        if start <= word < end:
            with suppress(UnknownKernelError):
                names[as_written(image.symbol(word).name)] = None
    return tuple(names)
