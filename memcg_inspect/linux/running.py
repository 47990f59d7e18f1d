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

from drgn import FaultError, Object, Program
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.sched import cpu_curr

from memcg_inspect.model import Running

__all__ = ("read_running",)

#: Frames kept of each CPU's stack.
_MOST_FRAMES = 24


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
        functions = _functions(prog, task)
        if functions is None:
            yield Running(cpu, pid, comm, (), True)
            continue
        # Halted in the idle loop and in no interrupt: nothing is half done.
        is_idle = pid == 0 and bool(functions) and _is_idle(functions[0])
        yield Running(cpu, pid, comm, functions, bool(functions) and not is_idle)


def _functions(prog: Program, task: Object) -> tuple[str, ...] | None:
    """Names of the functions on a CPU's stack, innermost first; empty in user mode."""
    try:
        trace = prog.stack_trace(task)
    except (FaultError, LookupError, ValueError):
        return None
    names: list[str] = []
    for frame in list(trace)[:_MOST_FRAMES]:
        name = frame.name
        if name is None or name.startswith("0x"):
            try:
                name = prog.symbol(frame.pc).name
            except LookupError:
                if not names:
                    return ()  # no function of the kernel: in user mode
                continue
        names.append(name)
    return tuple(names)


def _is_idle(name: str) -> bool:
    return "idle" in name or "halt" in name or "mwait" in name
