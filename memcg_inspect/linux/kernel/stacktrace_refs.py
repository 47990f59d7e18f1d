# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pointers on kernel stacks
-------------------------

Reads the stacks that :linux:`kernel/stacktrace.c` unwinds. A task in the kernel may hold a
reference that only its stack and registers show:
``get_mem_cgroup_from_mm()`` for a charge, ``mem_cgroup_iter()`` while it reclaims memory, or
``mem_cgroup_handle_over_high()`` while it sleeps. ``css`` is the first member of
``struct mem_cgroup``, so both have the same address.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress

from drgn import FaultError, Object, sizeof
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.sched import cpu_curr

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member, has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.strings import text
from memcg_inspect.linux.kernel.sched import find_tasks
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage, StackRef

__all__ = ("stack_refs",)

#: No kernel has larger stacks, in bytes.
_LARGEST_STACK = 1 << 18


def stack_refs(
    image: Image, wanted: Set[int], coverage: Coverage
) -> dict[int, tuple[StackRef, ...]]:
    """
    Find the tasks whose kernel stack or registers contain some addresses.

    :param wanted: the addresses
    :param coverage: counts the stacks that were read, and those that are unreadable
    :return: tasks by address
    """

    def missed(error: FaultError) -> None:
        coverage.miss("kernel stack", error.address, str(error))

    cpus = _cpus(image)
    tasks = {task.value_(): task for task in find_tasks(image, missed)}
    # The idle tasks are in no list.
    for address in cpus.keys() - tasks.keys():
        tasks[address] = Object(image.prog, "struct task_struct *", address)
    found: defaultdict[int, list[StackRef]] = defaultdict(list)
    for address, task in tasks.items():
        try:
            for word, ref in _of_task(image, task, cpus.get(address), wanted):
                found[word].append(ref)
            coverage.read += 1
        except FaultError as error:
            missed(error)
    return {word: tuple(refs) for word, refs in found.items()}


def _cpus(image: Image) -> dict[int, int]:
    """Return the CPU of each running task, by ``struct task_struct *``."""
    cpus: dict[int, int] = {}
    for cpu in for_each_online_cpu(image.prog):
        with suppress(FaultError, LookupError):
            cpus[cpu_curr(image.prog, cpu).value_()] = cpu
    return cpus


def _of_task(
    image: Image, task: Object, cpu: int | None, wanted: Set[int]
) -> Iterator[tuple[int, StackRef]]:
    start, size = _stack(image, task)
    if not start:
        return  # the task has exited
    memory = image.memory
    words = memory.words(memory.read(start, size))
    # To unwind a stack takes far longer than to read it.
    if cpu is None and wanted.isdisjoint(words):
        return
    live, known = _live(image, task, start, words)
    counts = Counter(word for word in live if word in wanted)
    if not counts:
        return
    functions = tuple(dict.fromkeys(_functions(image, live)))
    pid, comm = int(task.pid), text(task.comm.to_bytes_())
    for word, number in counts.items():
        yield word, StackRef(pid, comm, cpu, number, functions if known else ())


def _live(
    image: Image, task: Object, start: int, words: Sequence[int]
) -> tuple[Sequence[int], bool]:
    """
    Return the words in the registers and in the used part of the stack of a task.

    :return: all words of the stack and ``False``, if the stack pointer is not known
    """
    try:
        frame = image.prog.stack_trace(task)[0]
        registers, sp, pc = frame.registers().values(), frame.sp, frame.pc
    except (FaultError, LookupError, ValueError):
        return words, False
    first = (sp - start) // image.memory.word_size
    if not 0 <= first < len(words):
        # In user mode, or on the stack of an interrupt.
        in_user_mode = pc < image.symbol("_stext").address
        return [] if in_user_mode else [*registers, *words], True
    return [*registers, *words[first:]], True


def _stack(image: Image, task: Object) -> tuple[int, int]:
    """Return the lowest address of the stack of a task, and its size in bytes."""
    size = _LARGEST_STACK
    if has_type(image, "union thread_union"):
        size = sizeof(image.type("union thread_union"))
    # CONFIG_VMAP_STACK
    if has_member(image, "struct task_struct", "stack_vm_area") and task.stack_vm_area:
        size = int(task.stack_vm_area.nr_pages) << mem_map(image).page_shift
    return task.stack.value_(), min(size, _LARGEST_STACK)


def _functions(image: Image, words: Sequence[int]) -> Iterator[str]:
    """Return the functions that words point into. Not all of them are callers."""
    start, end = image.symbol("_stext").address, image.symbol("_etext").address
    for word in words:
        if start <= word < end:
            with suppress(UnknownKernelError):
                yield image.symbol(word).name
