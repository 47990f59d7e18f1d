# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Names of tasks for traces
-------------------------

Mirrors ``savedcmd`` of :linux:`kernel/trace/trace_sched_switch.c`, up to 6.9 of
:linux:`kernel/trace/trace.c`.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, ObjectAbsentError
from drgn.helpers.linux.mm import in_direct_map

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.model import Coverage

__all__ = ("saved_cmdlines",)


def saved_cmdlines(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Yield the address of the block of pages with the names of tasks, if there is one.

    :param coverage: counts the block, and whether it is unreadable
    :return: ``struct saved_cmdlines_buffer *``
    """
    try:
        address = image.object("savedcmd").value_()
    except (UnknownKernelError, ObjectAbsentError):
        return
    except FaultError as error:
        coverage.miss("savedcmd", error.address, str(error))
        return
    if in_direct_map(image.prog, address):
        coverage.read += 1
        yield address
