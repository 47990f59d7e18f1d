# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Per-CPU counters
----------------

Mirrors :linux:`lib/percpu_counter.c`. A CPU adds to a part of its own until the part reaches
``percpu_counter_batch``. Then it moves the part to ``count``. So ``count`` differs from the sum by
less than a batch for each CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mmzone import online_cpus
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets

__all__ = ("percpu_counter_bound", "percpu_counter_parts")

#: ``sizeof(s32)``: the part of a CPU.
PART = 4
#: Parts this close to each other, in bytes, are read together.
_NEAR = 256
#: Bytes that are read together at most.
_MOST = 64 << 10


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
    memory = image.memory
    sums: dict[int, int] = {}
    for run in _runs(sorted(set(pointers))):
        first, length = run[0], run[-1] - run[0] + PART
        found = dict.fromkeys(run, 0)
        unreadable: set[int] = set()
        for offset in percpu_offsets(image).values():
            try:
                data = memory.read(first + offset, length)
            except FaultError:
                unreadable |= _add_one_by_one(image, found, offset)
                continue
            for at in run:
                part = data[at - first : at - first + PART]
                found[at] += int.from_bytes(part, memory.order, signed=True)
        sums |= {at: value for at, value in found.items() if at not in unreadable}
    return sums


def _runs(pointers: Sequence[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for at in pointers:
        if run and (at - run[-1] > _NEAR or at - run[0] > _MOST):
            yield run
            run = []
        run.append(at)
    if run:
        yield run


def _add_one_by_one(image: Image, found: dict[int, int], offset: int) -> set[int]:
    memory, unreadable = image.memory, set()
    for at in found:
        try:
            part = memory.read(at + offset, PART)
        except FaultError:
            unreadable.add(at)
            continue
        found[at] += int.from_bytes(part, memory.order, signed=True)
    return unreadable
