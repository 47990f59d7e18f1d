# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Addresses of the kernel
-----------------------

Tells addresses of the kernel from those of user space, as ``TASK_SIZE`` of
:linux:`arch/arm64/include/asm/processor.h` and of :linux:`arch/riscv/include/asm/pgtable.h`, and
``TASK_SIZE_MAX`` of :linux:`arch/x86/include/asm/page_64_types.h` do.
"""

from __future__ import annotations

from drgn import Program

from memcg_inspect.image.elf import HIGH_HALF

__all__ = ("is_kernel_address",)


def is_kernel_address(prog: Program, address: int) -> bool:
    """
    Return whether an address is one of the kernel, and not of user space.

    Elsewhere than on architectures whose kernel has the upper half of all addresses, every address
    counts as one of the kernel.
    """
    platform = prog.platform
    if platform is None or platform.arch not in HIGH_HALF:
        return True
    return bool(address >> 63)
