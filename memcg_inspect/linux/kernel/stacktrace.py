# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What each CPU was running
-------------------------

Mirrors :linux:`kernel/stacktrace.c` for the task that each CPU runs (``cpu_curr()`` of
:linux:`kernel/sched/sched.h`). A crash, or stopping a machine, stops each CPU at any point. The
registers in the dump show the function, and the stack shows what it was charging.

Without debug info, drgn unwinds stacks with the kernel's ORC tables, which do not tell what was
inlined. A stack that it cannot unwind to its end counts as one with all functions that have an
address on it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress

from drgn import FaultError, Object, StackTrace, SymbolKind
from drgn.helpers.linux.sched import cpu_curr, task_cpu

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.strings import text
from memcg_inspect.linux.arch.entry import has_exact_pc, is_idle, is_outermost
from memcg_inspect.linux.arch.processor import is_kernel_address
from memcg_inspect.linux.kernel.sched import find_tasks_and_dead
from memcg_inspect.linux.kernel.sched_load import unread_at_work
from memcg_inspect.linux.kernel.stacktrace_pointers import PointerReader
from memcg_inspect.linux.kernel.stacktrace_words import (
    as_written,
    functions_in,
    is_on_own_stack,
    stack_words,
    unwind,
    whole_stack,
)
from memcg_inspect.linux.mm.mmzone import online_cpus
from memcg_inspect.model import Coverage, Running

__all__ = ("read_running", "read_waiting")

#: The most frames that are kept of a stack.
_MOST_FRAMES = 64
#: The most unreadable tasks that may each have left a charge half done, so that a row is not off by
#: any amount without a finding.
_MOST_UNKNOWN = 64
#: Functions that allocate and free percpu memory.
_PERCPU = re.compile(r"pcpu_|free_percpu")
#: ``TASK_UNINTERRUPTIBLE`` and ``TASK_NOLOAD`` of include/linux/sched.h. Idle threads of the kernel
#: have both.
_UNINTERRUPTIBLE, _NOLOAD = 2, 0x400
#: ``TASK_WAKING``: the task is on its way to a queue. ``TASK_RTLOCK_WAIT``: it waits for a spinlock
#: or a local_lock, which sleep with CONFIG_PREEMPT_RT.
_WAKING, _RTLOCK_WAIT = 0x200, 0x1000


def read_running(
    image: Image,
    memcgs: Collection[int] = (),
    objcgs: Collection[int] = (),
    released: Collection[int] = (),
    coverage: Coverage | None = None,
) -> list[Running]:
    """
    Return what was running on each online CPU, and what was preempted or blocked in the kernel.

    A task that was preempted, or that waits without being interruptible, can have left a charge
    half done, too: pcpu_alloc_noprof() charges before it takes pcpu_alloc_mutex.

    A CPU whose registers are not in the image is assumed to have been in the kernel.

    :param memcgs: memcgs to find pointers to, ``struct mem_cgroup *``
    :param objcgs: obj_cgroups to find pointers to, ``struct obj_cgroup *``
    :param released: memcgs that are in no list any more, ``struct mem_cgroup *``
    :param coverage: where CPUs are counted whose runqueue or task cannot be read, and tasks that
        were on no CPU if they or their stacks cannot be read. All of them are assumed to have been
        in the kernel
    """
    reader = _Reader(image, memcgs, objcgs, released)
    coverage = Coverage() if coverage is None else coverage
    return [*reader.on_cpus(coverage), *reader.waiting(coverage)]


def read_waiting(
    image: Image,
    memcgs: Collection[int] = (),
    objcgs: Collection[int] = (),
    released: Collection[int] = (),
) -> list[Running]:
    """
    Return what was preempted or blocked in a running kernel. The parameters are as above.

    Tasks on CPUs move, and have no stack that could be read.
    """
    reader = _Reader(image, memcgs, objcgs, released)
    return [task for task in reader.waiting(Coverage()) if task.held is not None]


class _Reader:
    def __init__(
        self,
        image: Image,
        memcgs: Collection[int],
        objcgs: Collection[int],
        released: Collection[int],
    ) -> None:
        self.image = image
        self._wanted = (memcgs, objcgs, released)
        self._pointers: PointerReader | None = None
        self._current: set[int] = set()

    def on_cpus(self, coverage: Coverage) -> Iterator[Running]:
        """Return what each online CPU was running."""
        for cpu in online_cpus(self.image):
            try:
                task = cpu_curr(self.image.prog, cpu)
                self._current.add(task.value_())
                running = _named(task, cpu)
            except (FaultError, LookupError) as error:
                address = error.address if isinstance(error, FaultError) else 0
                coverage.miss("task that a CPU was running", address, f"CPU {cpu}: {error}")
                yield Running(cpu, -1, "?", (), True)
                continue
            yield self._with_stack(task, running)

    def waiting(self, coverage: Coverage) -> Iterator[Running]:
        """Return the tasks that were stopped in the kernel and were on no CPU."""
        faults: list[Exception] = []
        unread: dict[int, Exception] = {}
        tasks = find_tasks_and_dead(self.image, faults.append)
        for task in tasks:
            try:
                if task.value_() in self._current or not _may_be_at_work(task):
                    continue
                running = _named(task, int(task_cpu(task)))._replace(waiting=True)
            except (FaultError, LookupError) as error:
                unread[task.value_()] = error
                continue
            found = self._with_stack(task, running)
            # drgn cannot unwind its stack. In a running kernel, it may have begun to run.
            if found.held is None and not self.image.is_moving:
                found = self._with_all_words(task, running)
            # Any other task has not run yet: copy_thread() makes it begin in ret_from_fork().
            if any(name.startswith("__schedule") for name in found.functions):
                yield found
            elif not found.functions and not self.image.is_moving:
                whose = f"that of {running.comm} ({running.pid}) is not in the image"
                coverage.miss("stack of a task", task.value_(), whose)
                yield found
        # The tasks of a running kernel come and go. It is read several times.
        if (faults or unread) and not self.image.is_moving:
            why = [*unread.values(), *faults]
            # A part of the tables of tasks that cannot be read may have had any number of them.
            most = _MOST_UNKNOWN if faults else len(unread)
            known = [task for task in tasks if task.value_() not in unread]
            for number in range(self._unread_at_work(known, unread, most)):
                fault = why[min(number, len(why) - 1)]
                address = fault.address if isinstance(fault, FaultError) else 0
                coverage.miss("task that was not running", address, str(fault))
                yield Running(-1, -1, "?", (), True, waiting=True)

    def _unread_at_work(self, known: list[Object], unread: Collection[int], most: int) -> int:
        """Return how many tasks that cannot be read may be in the middle of a charge."""
        number = None
        with suppress(FaultError, LookupError, UnknownKernelError):
            number = unread_at_work(self.image, known, unread)
        return min(most if number is None else number, _MOST_UNKNOWN)

    def _with_stack(self, task: Object, running: Running) -> Running:
        image = self.image
        try:
            trace = unwind(image, task)
            functions = _functions(image, trace)
        except (FaultError, LookupError, ValueError):
            return running._replace(busy=True)
        # A CPU that halted in the idle loop, outside of interrupts, has finished what it was doing.
        if not functions or (running.pid == 0 and is_idle(functions)):
            return running._replace(functions=functions)
        try:
            is_own = is_on_own_stack(image, task, trace)
            # __schedule() had switched to the stack of the next task, which is read as such.
            # finish_task() had not cleared on_cpu: drgn unwinds from the registers of the CPU.
            if running.waiting and not is_own:
                return self._with_all_words(task, running)
            words = stack_words(image, task, trace)
        except (FaultError, ValueError):
            return running._replace(functions=functions, busy=True)
        if not (is_own and _is_whole(trace, functions)):
            functions = tuple(dict.fromkeys((*functions, *functions_in(image, words))))
        return self._with_words(running, functions, words)

    def _with_all_words(self, task: Object, running: Running) -> Running:
        try:
            words = whole_stack(self.image, task)
        except FaultError:
            return running._replace(busy=True)
        return self._with_words(running, functions_in(self.image, words), words)

    def _with_words(
        self, running: Running, functions: tuple[str, ...], words: list[int]
    ) -> Running:
        running = running._replace(functions=functions, busy=True)
        with suppress(FaultError, UnknownKernelError, ValueError):
            pointers = self._pointers = self._pointers or PointerReader(self.image, *self._wanted)
            held = pointers.read(words)
            areas = pointers.areas(held, words)
            if any(map(_PERCPU.match, functions)):
                held += tuple(pointers.percpu(words))
            return running._replace(held=held, numbers=pointers.numbers(words), areas=areas)
        return running


def _named(task: Object, cpu: int) -> Running:
    comm = text(task.comm.string_())
    return Running(cpu, int(task.pid), comm, (), False)


def _may_be_at_work(task: Object) -> bool:
    """Return whether a task that is on no CPU may be in the middle of a charge."""
    state = int(task.member_("__state"))
    if state in (0, _WAKING, _RTLOCK_WAIT):
        return True
    return bool(state & _UNINTERRUPTIBLE and not state & _NOLOAD)


def _functions(image: Image, trace: StackTrace) -> tuple[str, ...]:
    """Return the functions on the stack of a CPU, innermost first; empty in user mode."""
    names: list[str] = []
    for frame in list(trace)[:_MOST_FRAMES]:
        name = frame.name
        if name is None or name.startswith("0x"):
            name = _function_at(image, frame.pc)
            if name is None and not names:
                if not is_kernel_address(image.prog, frame.pc):
                    return ()  # user mode
                name = f"{frame.pc:#x}"  # a module without debug info, or a BPF program
        if name is not None:
            names.append(as_written(name))
    return tuple(names)


def _is_whole(trace: StackTrace, functions: tuple[str, ...]) -> bool:
    """Return whether the functions are all that were on a stack."""
    if len(trace) > _MOST_FRAMES or not has_exact_pc(functions[0]):
        return False
    return is_outermost(trace.prog, functions[-1], trace[-1].pc)


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
