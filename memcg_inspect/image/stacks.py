# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Kernel stacks
-------------

drgn unwinds stacks with debug info, or with the kernel's own ORC tables if it knows where the text
of the kernel is.
"""

from __future__ import annotations

from contextlib import suppress

from drgn import Object, StackTrace

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError

__all__ = ("stack_trace",)


def stack_trace(image: Image, task: Object) -> StackTrace:
    """
    Unwind the kernel stack of a task, also without debug info.

    :param task: ``struct task_struct *``
    :raises drgn.FaultError: if the task is not in the image
    :raises ValueError: if its registers are not known
    """
    image.once(_make_main_module)
    return image.prog.stack_trace(task)


def _make_main_module(image: Image) -> None:
    """Make the module of the kernel itself, which drgn makes when it loads debug info."""
    # Modules stay unknown: drgn follows their list without a bound.
    with suppress(UnknownKernelError, LookupError, ValueError):
        main = image.prog.main_module("kernel", create=True)
        if not main.address_ranges:
            start, end = (image.symbol(name).address for name in ("_stext", "_end"))
            main.address_ranges = [(start, end)]
