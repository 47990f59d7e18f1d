# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Per-CPU pointers
----------------

Mirrors ``per_cpu_ptr()`` of :linux:`include/linux/percpu-defs.h`, for pointers that are plain
integers. drgn's :func:`~drgn.helpers.linux.percpu.per_cpu_ptr()` takes objects.

A machine has millions of copies: one of each allocation for each possible CPU. Allocations that lie
near each other are near each other on each CPU, so :func:`read_percpu()` reads them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from drgn import NULL, FaultError
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.memory import SMALLEST_PAGE
from memcg_inspect.linux.mm.mmzone import possible_cpus
from memcg_inspect.model import ImageError

__all__ = ("Copies", "PercpuRange", "percpu_offsets", "read_percpu")

#: The most bytes of the copies of all CPUs that are held at a time, and of those of one CPU.
_MOST, _MOST_OF_CPU = 8 << 20, 64 << 10

#: The copies of an allocation, by CPU. Copies that are all zeros are left out.
Copies = dict[int, bytes]


class PercpuRange(NamedTuple):
    """
    A range of percpu memory.

    :ivar pointer: ``__percpu`` pointer to it
    :ivar size: bytes for each CPU
    """

    pointer: int
    size: int


@per_image
def percpu_offsets(image: Image) -> dict[int, int]:
    """
    Return ``per_cpu_offset()`` of each possible CPU.

    :return: bytes to add to a ``__percpu`` pointer, by CPU
    :raises ImageError: if two CPUs have the same, or that of one is not the one of its unit
    """
    null = NULL(image.prog, "void *")
    found = {cpu: int(per_cpu_ptr(null, cpu).value_()) for cpu in possible_cpus(image)}
    if len(set(found.values())) != len(found):
        raise ImageError(
            "two CPUs have the same percpu memory: __per_cpu_offset or __cpu_possible_mask is "
            "damaged"
        )
    _check_units(image, found)
    return found


def _check_units(image: Image, offsets: Mapping[int, int]) -> None:
    """
    Check that each CPU has the percpu memory of its unit.

    ``setup_per_cpu_areas()`` adds ``pcpu_base_addr - __per_cpu_start`` to each of
    ``pcpu_unit_offsets``, on all architectures. Kernels with ``CONFIG_SMP=n`` add nothing.
    """
    with suppress(FaultError, UnknownKernelError):
        image.object("__per_cpu_offset")
        units = image.object("pcpu_unit_offsets").read_()
        base = image.object("pcpu_base_addr").value_() - image.symbol("__per_cpu_start").address
        for cpu, offset in offsets.items():
            if (base + int(units[cpu]) - offset) % (1 << 8 * image.memory.word_size):
                raise ImageError(
                    f"CPU {cpu} has not the percpu memory of its unit: __per_cpu_offset[{cpu}], "
                    f"pcpu_unit_offsets[{cpu}] or pcpu_base_addr is damaged"
                )


def read_percpu(
    image: Image, ranges: Iterable[PercpuRange]
) -> Iterator[tuple[PercpuRange, Copies | FaultError]]:
    """
    Read the copies that all possible CPUs have of many ranges, with few reads.

    :return: each range once, in the order of the pointers, and its copies, or why one of them
        cannot be read
    """
    most = min(max(_MOST // max(len(percpu_offsets(image)), 1), SMALLEST_PAGE), _MOST_OF_CPU)
    for run in _runs(sorted(set(ranges)), most):
        yield from _copies(image, run)


def _runs(ranges: Sequence[PercpuRange], most: int) -> Iterator[list[PercpuRange]]:
    """
    Yield ranges that are read together.

    There is less than a page between them, so each page has a part of one: all of them have memory.
    """
    run: list[PercpuRange] = []
    start = end = 0
    for one in ranges:
        after = one.pointer + one.size
        if run and (one.pointer - end >= SMALLEST_PAGE or after - start > most):
            yield run
            run = []
        if not run:
            start = end = one.pointer
        run.append(one)
        end = max(end, after)
    if run:
        yield run


def _copies(
    image: Image, run: Sequence[PercpuRange]
) -> Iterator[tuple[PercpuRange, Copies | FaultError]]:
    start = run[0].pointer
    length = max(one.pointer + one.size for one in run) - start
    found: dict[PercpuRange, Copies] = {one: {} for one in run}
    places: list[tuple[int, int, bytes, Copies]] = []
    empty = b""
    for cpu, offset in percpu_offsets(image).items():
        try:
            data = image.memory.read(start + offset, length)
        except FaultError as error:
            if len(run) == 1:
                yield run[0], error
                return
            for one in run:
                yield from _copies(image, [one])
            return
        if data == empty:
            continue
        if not places:  # the length is known to be plausible now
            zeros = {one.size: bytes(one.size) for one in run}
            for one, copies in found.items():
                at = one.pointer - start
                places.append((at, at + one.size, zeros[one.size], copies))
        has_any = False
        for at, end, zero, copies in places:
            if not data.startswith(zero, at):
                copies[cpu] = data[at:end]
                has_any = True
        if not has_any:
            # What is between the ranges is often the same on all CPUs that were never online.
            empty = data
    yield from found.items()
