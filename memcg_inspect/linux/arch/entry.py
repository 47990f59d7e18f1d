# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Where the stacks of the kernel begin
------------------------------------

Mirrors :linux:`arch/x86/entry/entry_64.S`, :linux:`arch/x86/kernel/head_64.S` and
:linux:`arch/arm64/kernel/entry.S` for the functions that call the others and were not called.
"""

from __future__ import annotations

import re

__all__ = ("is_outermost",)

#: Entries of system calls, and where tasks and CPUs begin. The entry of an interrupt is not among
#: them, since the interrupt may have come while the kernel was running.
_OUTERMOST = re.compile(
    r"entry_|ret_from_|secondary_startup|common_startup|start_secondary|cpu_startup_entry|el0t?_"
)
#: Entries of exceptions and interrupts of x86-64, where the kernel has the upper half of all
#: addresses.
_X86_EXCEPTION = "asm_"
_X86_KERNEL = 1 << 63


def is_outermost(function: str, pc: int) -> bool:
    """
    Return whether a stack was unwound to its end.

    :param function: outermost function that was found
    :param pc: program counter of the outermost frame, which is in user space if that frame is the
        state that an exception or an interrupt saved
    """
    if _OUTERMOST.match(function):
        return True
    return function.startswith(_X86_EXCEPTION) and 0 < pc < _X86_KERNEL
