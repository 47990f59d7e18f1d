# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What each CPU was doing
-----------------------

A machine that crashed, or was stopped, stopped its CPUs in the middle of something. Mirrors
the ``curr`` of :linux:`kernel/sched/sched.h`; where a CPU was is told by the registers in the
dump.
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

__all__ = (
    "folio_pages",
    "function_at",
    "functions_on",
    "read_running",
    "stack_words",
)

#: Frames kept of each CPU's stack.
_MOST_FRAMES = 24
#: Frames that a stack has at least if it was unwound: nothing starts in a leaf.
_UNWOUND = 3


def read_running(image: Image) -> list[Running]:
    """
    Return what was running on each online CPU.

    A CPU whose registers are not known is taken to have been in the kernel.
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
        try:
            trace = image.prog.stack_trace(task)
        except (FaultError, LookupError, ValueError):
            yield Running(cpu, pid, comm, (), True)
            continue
        functions, pages = _functions(image, trace), None
        # Halted in the idle loop and in no interrupt: nothing is half done.
        is_idle = pid == 0 and bool(functions) and _is_idle(functions[0])
        busy = bool(functions) and not is_idle
        if busy:
            with suppress(FaultError, UnknownKernelError, ValueError):
                words = stack_words(image, task, trace)
                pages = folio_pages(image, words)
                if len(functions) < _UNWOUND:
                    functions = tuple(dict.fromkeys((*functions, *functions_on(image, words))))
        yield Running(cpu, pid, comm, functions, busy, pages)


def _functions(image: Image, trace: StackTrace) -> tuple[str, ...]:
    """Names of the functions on a CPU's stack, innermost first; empty in user mode."""
    names: list[str] = []
    for frame in list(trace)[:_MOST_FRAMES]:
        name = frame.name
        if name is None or name.startswith("0x"):
            name = function_at(image, frame.pc)
            if name is None and not names:
                return ()  # no function of the kernel: in user mode
        if name is not None:
            names.append(name)
    return tuple(names)


def _is_idle(name: str) -> bool:
    return "idle" in name or "halt" in name or "mwait" in name


#: Pages of a stack of whose size nothing is known, as of interrupts.
_UNKNOWN_PAGES = 4
#: No page of the allocator has a higher order.
_MAX_ORDER = 30


def stack_words(image: Image, task: Object, trace: StackTrace) -> list[int]:
    """
    Return the words on the kernel stack of a task that runs, and those in its registers.

    :param task: ``struct task_struct *``
    :raises FaultError: if its stack is not in the image
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
    begin = sp if inside else start
    begin -= begin % memory.word_size
    words += memory.words(memory.read(begin, start + size - begin), 0, memory.word_size)
    if not inside:
        words += _other_stack(image, sp - sp % memory.word_size)
    return words


def _stack(image: Image, task: Object) -> tuple[int, int]:
    """Return where a task's stack begins, and its size in bytes."""
    size = _UNKNOWN_PAGES * SMALLEST_PAGE
    if has_type(image, "union thread_union"):
        size = sizeof(image.type("union thread_union"))
    # CONFIG_VMAP_STACK
    if has_member(image, "struct task_struct", "stack_vm_area") and task.stack_vm_area:
        size = int(task.stack_vm_area.nr_pages) << mem_map(image).page_shift
    return task.stack.value_(), size


def _other_stack(image: Image, sp: int) -> Iterator[int]:
    """Walk what is on the stack of an interrupt, as far as it can be read."""
    memory, at = image.memory, sp
    for _ in range(_UNKNOWN_PAGES):
        end = at - at % SMALLEST_PAGE + SMALLEST_PAGE
        try:
            yield from memory.words(memory.read(at, end - at), 0, memory.word_size)
        except FaultError:
            return
        at = end


def function_at(image: Image, address: int) -> str | None:
    """Return the name of the function of the kernel that an address is in."""
    try:
        symbol = image.symbol(address)
    except UnknownKernelError:
        return None
    # Assembly has no kind. The percpu section begins at 0: there, what is no address is found.
    start, end = image.symbol("_stext").address, image.symbol("_etext").address
    return symbol.name if symbol.kind == SymbolKind.FUNC or start <= address < end else None


def functions_on(image: Image, words: Iterable[int]) -> tuple[str, ...]:
    """Return the functions that words are addresses in: of those it was in, and maybe others."""
    start, end = image.symbol("_stext").address, image.symbol("_etext").address
    found = (function_at(image, word) for word in words if start <= word < end)
    return tuple(dict.fromkeys(filter(None, found)))


def folio_pages(image: Image, words: Iterable[int]) -> int:
    """Return how many pages the folios have that words point to; of free ones, none."""
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
