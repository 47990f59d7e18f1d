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
from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

from drgn import FaultError, Object
from drgn.helpers.linux.sched import cpu_curr

from memcg_inspect.image.image import Image
from memcg_inspect.image.strings import text
from memcg_inspect.linux.arch.processor import is_kernel_address
from memcg_inspect.linux.kernel.sched import find_tasks_and_dead
from memcg_inspect.linux.kernel.stacktrace_words import (
    functions_in,
    stack_words,
    unwind,
    whole_stack,
)
from memcg_inspect.linux.lib.list import OnFault
from memcg_inspect.linux.mm.mmzone import online_cpus
from memcg_inspect.model import Coverage, StackRef

__all__ = ("Freeing", "stack_refs")


class Freeing(NamedTuple):
    """
    Objects that hold a reference until a task has freed them.

    :ivar places: addresses in the functions that free them
    :ivar refers_to: returns what the object at an address refers to; ``None`` if none is there
    """

    places: frozenset[int]
    refers_to: Callable[[int], int | None]


def stack_refs(
    image: Image, wanted: Set[int], coverage: Coverage, freeing: Sequence[Freeing] = ()
) -> dict[int, tuple[StackRef, ...]]:
    """
    Find the tasks whose kernel stack or registers contain some addresses.

    If the registers of a CPU are not known, they may contain all of them. A running kernel is read
    several times instead.

    :param wanted: the addresses
    :param freeing: objects that refer to one of the addresses while a task frees them
    :param coverage: counts the stacks that were read, and those that are unreadable
    :return: tasks by address
    """

    def missed(error: FaultError) -> None:
        coverage.miss("kernel stack", error.address, str(error))

    cpus = _cpus(image, missed)
    tasks = {task.value_(): task for task in find_tasks_and_dead(image, missed)}
    # The idle tasks are in no list.
    for address in cpus.keys() - tasks.keys():
        tasks[address] = image.pointer("struct task_struct *", address)
    found: defaultdict[int, list[StackRef]] = defaultdict(list)
    stacks = _Stacks(image, wanted, freeing)
    for address, task in tasks.items():
        try:
            for word, ref in stacks.of_task(task, cpus.get(address)):
                found[word].append(ref)
            coverage.read += 1
        except FaultError as error:
            missed(error)
    return {word: tuple(refs) for word, refs in found.items()}


def _cpus(image: Image, on_fault: OnFault) -> dict[int, int]:
    """Return the CPU of each running task, by ``struct task_struct *``."""
    cpus: dict[int, int] = {}
    for cpu in online_cpus(image):
        try:
            cpus[cpu_curr(image.prog, cpu).value_()] = cpu
        except FaultError as error:
            on_fault(error)
        except LookupError as error:  # no runqueues
            on_fault(FaultError(str(error), 0))
    return cpus


class _Stacks:
    """Reads the stack and registers of tasks. The parameters are those of :func:`stack_refs`."""

    def __init__(self, image: Image, wanted: Set[int], freeing: Sequence[Freeing]) -> None:
        self._image, self._wanted, self._freeing = image, wanted, freeing
        self._freed_at = frozenset[int]().union(*(some.places for some in freeing))

    def of_task(self, task: Object, cpu: int | None) -> Iterator[tuple[int, StackRef]]:
        """
        Return the addresses that a task refers to.

        :param task: ``struct task_struct *``
        :param cpu: the CPU that it runs on; ``None`` if it does not run
        :raises drgn.FaultError: if its stack is not in the image
        """
        image = self._image
        words = whole_stack(image, task)
        if not words:
            return  # the task has exited
        # To unwind a stack takes far longer than to read it.
        if cpu is None and self._wanted.isdisjoint(words) and self._freed_at.isdisjoint(words):
            return
        live = _live(image, task)
        counts = Counter(word for word in (words if live is None else live) if word in self._wanted)
        functions: tuple[str, ...] = ()
        if live is None:
            if cpu is not None and not image.is_moving:
                counts.update(self._wanted)  # a register may contain each of them
        elif not self._freed_at.isdisjoint(live):
            counts += self._freed(live)
        if live is not None and counts:
            functions = functions_in(image, live)
        pid, comm = int(task.pid), text(task.comm.to_bytes_())
        for word, number in counts.items():
            yield word, StackRef(pid, comm, cpu, number, functions)

    def _freed(self, words: Sequence[int]) -> Counter[int]:
        """Return what the objects refer to that a task may be freeing."""
        found: Counter[int] = Counter()
        for some in self._freeing:
            if not some.places.isdisjoint(words):
                refers = map(some.refers_to, dict.fromkeys(words))
                found.update(word for word in refers if word is not None and word in self._wanted)
        return found


def _live(image: Image, task: Object) -> Sequence[int] | None:
    """
    Return the words in the registers and in the used part of the stack of a task.

    :return: none of them if it was in user mode; ``None`` if the registers are not known: those of
        CPUs of a QEMU guest, and of a task that drgn cannot unwind
    """
    try:
        trace = unwind(image, task)
        if not is_kernel_address(image.prog, trace[0].pc):
            return []  # user mode
        return stack_words(image, task, trace)
    except (FaultError, LookupError, ValueError):
        return None
