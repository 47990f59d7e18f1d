# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What each CPU was doing
-----------------------

A machine that crashed, or was stopped, stopped its CPUs in the middle of something. Mirrors
the ``curr`` of :linux:`kernel/sched/sched.h`; where a CPU was is told by the registers in the
dump.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from drgn import FaultError, Program, StackTrace
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.sched import cpu_curr

from memcg_inspect.linux.stack import folio_pages, function_at, functions_on, stack_words
from memcg_inspect.model import Running

__all__ = ("read_running",)

#: Frames kept of each CPU's stack.
_MOST_FRAMES = 24
#: Frames that a stack has at least if it was unwound: nothing starts in a leaf.
_UNWOUND = 3


def read_running(prog: Program) -> list[Running]:
    """
    Return what was running on each online CPU.

    A CPU whose registers are not known is taken to have been in the kernel.
    """
    return list(_running(prog))


def _running(prog: Program) -> Iterator[Running]:
    for cpu in for_each_online_cpu(prog):
        try:
            task = cpu_curr(prog, cpu)
            pid, comm = int(task.pid), task.comm.string_().decode(errors="backslashreplace")
        except (FaultError, LookupError):
            yield Running(cpu, -1, "?", (), True)
            continue
        try:
            trace = prog.stack_trace(task)
        except (FaultError, LookupError, ValueError):
            yield Running(cpu, pid, comm, (), True)
            continue
        functions, pages = _functions(prog, trace), None
        # Halted in the idle loop and in no interrupt: nothing is half done.
        is_idle = pid == 0 and bool(functions) and _is_idle(functions[0])
        busy = bool(functions) and not is_idle
        if busy:
            with suppress(FaultError, LookupError):
                words = stack_words(prog, task, trace)
                pages = folio_pages(prog, words)
                if len(functions) < _UNWOUND:
                    functions = tuple(dict.fromkeys((*functions, *functions_on(prog, words))))
        yield Running(cpu, pid, comm, functions, busy, pages)


def _functions(prog: Program, trace: StackTrace) -> tuple[str, ...]:
    """Names of the functions on a CPU's stack, innermost first; empty in user mode."""
    names: list[str] = []
    for frame in list(trace)[:_MOST_FRAMES]:
        name = frame.name
        if name is None or name.startswith("0x"):
            name = function_at(prog, frame.pc)
            if name is None and not names:
                return ()  # no function of the kernel: in user mode
        if name is not None:
            names.append(name)
    return tuple(names)


def _is_idle(name: str) -> bool:
    return "idle" in name or "halt" in name or "mwait" in name
