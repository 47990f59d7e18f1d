# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Preempt counts
--------------

Mirrors :linux:`include/linux/preempt.h`. The preempt count tells what a CPU is doing: bits 0 to 7
count ``preempt_disable()``, bit 8 is set while softirqs are served, and above the bits of softirqs
are those of hardirqs and NMIs.
"""

from __future__ import annotations

from drgn import Object
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.image.lookup import UnknownKernelError

__all__ = ("in_interrupt_handler",)

#: ``SOFTIRQ_OFFSET``; twice as much is added by ``local_bh_disable()``
_SOFTIRQ_OFFSET = 1 << 8
#: ``HARDIRQ_BITS`` ones
_HARDIRQ_ONES = (1 << 4) - 1
_HARDIRQ_SHIFT = 16
#: ``HARDIRQ_DISABLE_BITS`` come before those of hardirqs in kernels that have
#: ``local_interrupt_disable()`` (7.3 is one).
_DISABLE_BITS = 8


def in_interrupt_handler(image: Image, cpu: int, task: Object) -> bool | None:
    """
    Return whether a CPU was handling a hardirq or a softirq.

    This is ``!in_task()``, but for NMIs. A CPU that a crash stopped is in an NMI, whatever it was
    doing before.

    :param task: ``struct task_struct *`` that the CPU was running
    :return: ``None`` if the preempt count of the CPU is not known
    :raises drgn.FaultError: if it is not in the image
    """
    count = _preempt_count(image, cpu)
    if count is None:
        return None
    softirqs = count
    # CONFIG_PREEMPT_RT
    if has_member(image, "struct task_struct", "softirq_disable_cnt"):
        softirqs = int(task.softirq_disable_cnt)
    shift = _HARDIRQ_SHIFT
    if _has_variable(image, "local_interrupt_disable_state"):
        shift += _DISABLE_BITS
    return bool(softirqs & _SOFTIRQ_OFFSET or count >> shift & _HARDIRQ_ONES)


def _preempt_count(image: Image, cpu: int) -> int | None:
    """Return the preempt count of a CPU, with the other bits that are kept in the same word."""
    if _has_variable(image, "__preempt_count"):  # x86 before 6.2, and since 6.15
        variable = image.object("__preempt_count")
    # Linux kernel commit 64701838bf05 ("x86/percpu: Move preempt_count next to current_task")
    # (in v6.2)
    elif has_member(image, "struct pcpu_hot", "preempt_count"):
        variable = image.object("pcpu_hot").preempt_count
    else:
        return None
    return int(per_cpu_ptr(variable.address_of_(), cpu)[0])


def _has_variable(image: Image, name: str) -> bool:
    try:
        image.object(name)
    except UnknownKernelError:
        return False
    return True
