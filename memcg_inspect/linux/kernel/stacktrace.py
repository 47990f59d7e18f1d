# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What each CPU was running
-------------------------

Mirrors :linux:`kernel/stacktrace.c` for the task that each CPU runs (``cpu_curr()`` of
:linux:`kernel/sched/sched.h`). A crash, or stopping a machine, stops each CPU at any point. The
registers in the dump show the function, and the stack shows which folios it was using.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from drgn import FaultError, Object, StackTrace, SymbolKind, sizeof
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.sched import cpu_curr

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member, has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.memory import SMALLEST_PAGE
from memcg_inspect.linux.mm.debug import page_at, read_page
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Running

__all__ = ("read_running",)

#: The most frames that are kept of a stack.
_MOST_FRAMES = 24
#: A stack with fewer frames was not unwound: there are several callers between an entry into the
#: kernel and code that uses memory.
_LEAST_FRAMES = 3
#: Pages to read of a stack whose size is not known, e.g. the stack of an interrupt.
_UNKNOWN_PAGES = 4
#: No allocation of the page allocator has a higher order. A higher value is not an order.
_MAX_ORDER = 30


def read_running(image: Image) -> list[Running]:
    """
    Return what was running on each online CPU.

    A CPU whose registers are not in the image is assumed to have been in the kernel.
    """
    return list(_running(image))


def _running(image: Image) -> Iterator[Running]:
    for cpu in for_each_online_cpu(image.prog):
        try:
            task = cpu_curr(image.prog, cpu)
            pid, comm = int(task.pid), task.comm.string_().decode(errors="backslashreplace")
        except (FaultError, LookupError):
            yield Running(cpu, -1, "?", (), True)
            continue
        pages = None
        try:
            trace = image.prog.stack_trace(task)
            functions = _functions(image, trace)
        except (FaultError, LookupError, ValueError):
            yield Running(cpu, pid, comm, (), True)
            continue
        # A CPU that halted in the idle loop, outside of interrupts, has finished what it was doing.
        is_idle = pid == 0 and bool(functions) and _is_idle(functions[0])
        busy = bool(functions) and not is_idle
        if busy:
            with suppress(FaultError, UnknownKernelError, ValueError):
                words = _stack_words(image, task, trace)
                pages = _folio_pages(image, words)
                if len(functions) < _LEAST_FRAMES:
                    functions = tuple(dict.fromkeys((*functions, *_functions_in(image, words))))
        yield Running(cpu, pid, comm, functions, busy, pages)


def _functions(image: Image, trace: StackTrace) -> tuple[str, ...]:
    """Return the functions on the stack of a CPU, innermost first; empty in user mode."""
    names: list[str] = []
    for frame in list(trace)[:_MOST_FRAMES]:
        name = frame.name
        if name is None or name.startswith("0x"):
            name = _function_at(image, frame.pc)
            if name is None and not names:
                return ()  # the innermost frame is not in the kernel: user mode
        if name is not None:
            names.append(name)
    return tuple(names)


def _is_idle(name: str) -> bool:
    return "idle" in name or "halt" in name or "mwait" in name


def _stack_words(image: Image, task: Object, trace: StackTrace) -> list[int]:
    """
    Return the words in the registers and on the kernel stack of a running task.

    If the CPU was on another stack, e.g. that of an interrupt, the words on it are included.

    :param task: ``struct task_struct *``
    :raises drgn.FaultError: if the stack is not in the image
    :raises ValueError: if the stack pointer is not known
    """
    memory = image.memory
    frame = trace[0]
    words = list(frame.registers().values())
    start, size = _stack(image, task)
    try:
        sp = frame.sp
    except LookupError as error:
        raise ValueError(str(error)) from error
    inside = start <= sp < start + size
    first = sp if inside else start
    first -= first % memory.word_size
    words += memory.words(memory.read(first, start + size - first), 0, memory.word_size)
    if not inside:
        words += _other_stack(image, sp - sp % memory.word_size)
    return words


def _stack(image: Image, task: Object) -> tuple[int, int]:
    """Return the lowest address of the stack of a task, and its size in bytes."""
    size = _UNKNOWN_PAGES * SMALLEST_PAGE
    if has_type(image, "union thread_union"):
        size = sizeof(image.type("union thread_union"))
    # CONFIG_VMAP_STACK
    if has_member(image, "struct task_struct", "stack_vm_area") and task.stack_vm_area:
        size = int(task.stack_vm_area.nr_pages) << mem_map(image).page_shift
    return task.stack.value_(), size


def _other_stack(image: Image, sp: int) -> Iterator[int]:
    """Return the words on a stack of unknown size, as far as they can be read."""
    memory, address = image.memory, sp
    for _ in range(_UNKNOWN_PAGES):
        end = address - address % SMALLEST_PAGE + SMALLEST_PAGE
        try:
            yield from memory.words(memory.read(address, end - address), 0, memory.word_size)
        except FaultError:
            return
        address = end


def _function_at(image: Image, address: int) -> str | None:
    """Return the name of the kernel function that an address is in."""
    try:
        symbol = image.symbol(address)
    except UnknownKernelError:
        return None
    # Functions written in assembly may have a symbol without a kind. Outside of the kernel's text,
    # such a symbol is not a function: the per-CPU section begins at 0, and small numbers are in it.
    start, end = image.symbol("_stext").address, image.symbol("_etext").address
    return symbol.name if symbol.kind == SymbolKind.FUNC or start <= address < end else None


def _functions_in(image: Image, words: Iterable[int]) -> tuple[str, ...]:
    """
    Return the functions that words point into.

    As for frames that the kernel prints with a question mark, not all of them are callers.
    """
    start, end = image.symbol("_stext").address, image.symbol("_etext").address
    found = (_function_at(image, word) for word in words if start <= word < end)
    return tuple(dict.fromkeys(filter(None, found)))


def _folio_pages(image: Image, words: Iterable[int]) -> int:
    """
    Return the number of pages of all folios whose ``struct page`` words point to.

    Free pages and slabs do not count.
    """
    folios: dict[int, int] = {}
    for word in set(words):
        page = page_at(image, word)
        if page is None:
            continue
        with suppress(FaultError):
            found = read_page(image, page)
            if found.type != "buddy" and found.slab is None and found.order <= _MAX_ORDER:
                folios[found.head] = 1 << found.order
    return sum(folios.values())
