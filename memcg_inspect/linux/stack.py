# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What lies on the kernel stack of a CPU
--------------------------------------

What is half done is told by what is being worked on: the folios of a batch that is being
uncharged are in a ``struct folio_batch`` on the stack, a page that is being charged is in a
register or saved on it. Where a stack cannot be unwound, as without debug info, the return
addresses on it still tell which functions it may have been in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from drgn import FaultError, Object, Program, StackTrace, SymbolKind, sizeof

from memcg_inspect.linux.layout import has_member, has_type
from memcg_inspect.linux.memory import SMALLEST_PAGE, memory_of
from memcg_inspect.linux.mmzone import mem_map
from memcg_inspect.linux.page_info import page_at, read_page

__all__ = ("folio_pages", "function_at", "functions_on", "stack_words")

#: Pages of a stack of whose size nothing is known, as of interrupts.
_UNKNOWN_PAGES = 4
#: No page of the allocator has a higher order.
_MAX_ORDER = 30


def stack_words(prog: Program, task: Object, trace: StackTrace) -> list[int]:
    """
    Return the words on the kernel stack of a task that runs, and those in its registers.

    :param task: ``struct task_struct *``
    :raises FaultError: if its stack is not in the image
    :raises LookupError: if it is not known how far it reached
    """
    memory = memory_of(prog)
    frame = trace[0]
    words = list(frame.registers().values())
    start, size = _stack(prog, task)
    inside = start <= frame.sp < start + size
    begin = frame.sp if inside else start
    begin -= begin % memory.word_size
    words += memory.words(memory.read(begin, start + size - begin), 0, memory.word_size)
    if not inside:
        words += _other_stack(prog, frame.sp - frame.sp % memory.word_size)
    return words


def _stack(prog: Program, task: Object) -> tuple[int, int]:
    """Return where a task's stack begins, and its size in bytes."""
    size = _UNKNOWN_PAGES * SMALLEST_PAGE
    if has_type(prog, "union thread_union"):
        size = sizeof(prog.type("union thread_union"))
    # CONFIG_VMAP_STACK
    if has_member(prog, "struct task_struct", "stack_vm_area") and task.stack_vm_area:
        size = int(task.stack_vm_area.nr_pages) << mem_map(prog).page_shift
    return task.stack.value_(), size


def _other_stack(prog: Program, sp: int) -> Iterator[int]:
    """Walk what is on the stack of an interrupt, as far as it can be read."""
    memory, at = memory_of(prog), sp
    for _ in range(_UNKNOWN_PAGES):
        end = at - at % SMALLEST_PAGE + SMALLEST_PAGE
        try:
            yield from memory.words(memory.read(at, end - at), 0, memory.word_size)
        except FaultError:
            return
        at = end


def function_at(prog: Program, address: int) -> str | None:
    """Return the name of the function of the kernel that an address is in."""
    try:
        symbol = prog.symbol(address)
    except LookupError:
        return None
    # Assembly has no kind. The percpu section begins at 0: there, what is no address is found.
    start, end = prog.symbol("_stext").address, prog.symbol("_etext").address
    return symbol.name if symbol.kind == SymbolKind.FUNC or start <= address < end else None


def functions_on(prog: Program, words: Iterable[int]) -> tuple[str, ...]:
    """Return the functions that words are addresses in: of those it was in, and maybe others."""
    start, end = prog.symbol("_stext").address, prog.symbol("_etext").address
    found = (function_at(prog, word) for word in words if start <= word < end)
    return tuple(dict.fromkeys(filter(None, found)))


def folio_pages(prog: Program, words: Iterable[int]) -> int:
    """Return how many pages the folios have that words point to; of free ones, none."""
    folios: dict[int, int] = {}
    for word in set(words):
        page = page_at(prog, word)
        if page is None:
            continue
        with suppress(FaultError):
            found = read_page(prog, page)
            if found.type != "buddy" and found.slab is None and found.order <= _MAX_ORDER:
                folios[found.head] = 1 << found.order
    return sum(folios.values())
