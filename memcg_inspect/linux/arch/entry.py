# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Where the stacks of the kernel begin and end
--------------------------------------------

Mirrors :linux:`arch/x86/entry/entry_64.S`, :linux:`arch/x86/kernel/head_64.S`,
:linux:`arch/arm64/kernel/entry.S`, :linux:`arch/s390/kernel/entry.S` and
:linux:`arch/powerpc/kernel/interrupt_64.S` for the functions that call the others and were not
called, and :linux:`drivers/cpuidle/cpuidle-pseries.c` for how an idle CPU waits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from drgn import Program

from memcg_inspect.linux.arch.processor import is_kernel_address

__all__ = ("has_exact_pc", "is_idle", "is_outermost")

#: Entries of system calls, and where tasks and CPUs begin. The entry of an interrupt is not among
#: them, since the interrupt may have come while the kernel was running.
_OUTERMOST = re.compile(
    r"entry_|ret_from_|secondary_startup|common_startup|start_secondary|cpu_startup_entry|el0t?_"
    r"|system_call|restart_int_handler|start_here_common"
)
#: Functions in which an idle CPU waits for an interrupt.
_IDLE = re.compile("idle|halt|mwait|cede_loop")
#: A call of the hypervisor of pseries. An idle CPU gives up its processor by one.
_HYPERCALL = re.compile("plpar_hcall_norets")
#: Entries of exceptions and interrupts of x86-64.
_X86_EXCEPTION = "asm_"
#: The function that crash_setup_regs() of arch/x86/include/asm/kexec.h is inlined in.
_X86_SAVES_ITS_OWN = "__crash_kexec"


def has_exact_pc(function: str) -> bool:
    """
    Return whether the saved program counter is where the function saved its registers.

    It is a label in x86-64 when the kernel panics, and compilers move the label. So the stack
    pointer that was saved with it need not fit the tables for unwinding.

    :param function: innermost function of a stack
    """
    return function != _X86_SAVES_ITS_OWN


def is_idle(functions: Sequence[str]) -> bool:
    """
    Return whether an idle task waits for an interrupt.

    :param functions: those of its stack, the innermost first
    """
    waits = functions[1:] if functions and _HYPERCALL.match(functions[0]) else functions
    return bool(waits) and _IDLE.search(waits[0]) is not None


def is_outermost(prog: Program, function: str, pc: int) -> bool:
    """
    Return whether a stack was unwound to its end.

    :param function: outermost function that was found
    :param pc: program counter of the outermost frame, which is in user space if that frame is the
        state that an exception or an interrupt saved
    """
    if _OUTERMOST.match(function):
        return True
    return function.startswith(_X86_EXCEPTION) and pc > 0 and not is_kernel_address(prog, pc)
