# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Per-CPU counters
----------------

Mirrors :linux:`lib/percpu_counter.c`. A CPU adds to a part of its own until the part reaches
``percpu_counter_batch``. Then it moves the part to ``count``. So ``count`` differs from the sum by
less than a batch for each CPU.
"""

from __future__ import annotations

from collections.abc import Iterable

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mmzone import online_cpus
from memcg_inspect.linux.mm.percpu_defs import PercpuRange, read_percpu

__all__ = ("percpu_counter_bound", "percpu_counter_parts")

#: ``sizeof(s32)``: the part of a CPU.
PART = 4


def percpu_counter_bound(image: Image) -> int:
    """
    Return how much ``count`` can differ from the sum.

    The part of each online CPU is less than a batch. ``percpu_counter_cpu_dead()`` moves the part
    of a CPU that goes offline.

    :raises UnknownKernelError: if the batch is not known
    """
    batch = int(image.object("percpu_counter_batch").value_())
    return (batch - 1) * len(online_cpus(image))


def percpu_counter_parts(image: Image, pointers: Iterable[int]) -> dict[int, int]:
    """
    Add up the parts of many counters on all possible CPUs, with few reads.

    :param pointers: the ``counters`` of each, ``s32 __percpu *``
    :return: sums by pointer, without the counters that cannot be read
    """
    order, sums = image.memory.order, {}
    for parts, copies in read_percpu(image, (PercpuRange(at, PART) for at in pointers)):
        if not isinstance(copies, FaultError):
            amounts = (int.from_bytes(part, order, signed=True) for part in copies.values())
            sums[parts.pointer] = sum(amounts)
    return sums
