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

from drgn import FaultError, Object, StackTrace, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member, has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.memory import SMALLEST_PAGE
from memcg_inspect.linux.mm.mmzone import mem_map

__all__ = ("as_written", "functions_in", "other_stack", "places_in", "stack_of", "stack_words")

#: Pages to read of a stack whose size is not known, e.g. the stack of an interrupt.
_UNKNOWN_PAGES = 4
#: No kernel has larger stacks, in bytes.
_LARGEST_STACK = 1 << 18
#: No function has more bytes.
_LONGEST = 1 << 16


def places_in(image: Image, names: Iterable[str]) -> frozenset[int]:
    """
    Return the addresses in some functions.

    :param names: names of the functions; those that the kernel does not have are left out, e.g.
        because they are inlined
    """
    places: set[int] = set()
    for name in names:
        with suppress(UnknownKernelError):
            symbol = image.symbol(name)
            places.update(range(symbol.address, symbol.address + min(symbol.size, _LONGEST)))
    return frozenset(places)


def stack_words(image: Image, task: Object, trace: StackTrace) -> list[int]:
    """
    Return the words in the registers and on the kernel stack of a task.

    If the CPU was on another stack, e.g. that of an interrupt, the words on it are included.

    :param task: ``struct task_struct *``
    :raises drgn.FaultError: if the stack is not in the image
    :raises ValueError: if the stack pointer is not known
    """
    memory = image.memory
    frame = trace[0]
    words = list(frame.registers().values())
    start, size = stack_of(image, task)
    try:
        sp = frame.sp
    except LookupError as error:
        raise ValueError(str(error)) from error
    inside = start <= sp < start + size
    first = sp if inside else start
    first -= first % memory.word_size
    words += memory.words(memory.read(first, start + size - first), 0, memory.word_size)
    if not inside:
        words += other_stack(image, sp - sp % memory.word_size)
    return words


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
    for word in words:
        if start <= word < end:
            with suppress(UnknownKernelError):
                names[as_written(image.symbol(word).name)] = None
    return tuple(names)
