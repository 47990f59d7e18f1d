# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Physical addresses
------------------

Mirrors the tree of ``struct resource`` of :linux:`kernel/resource.c`, which ``/proc/iomem`` shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from drgn import FaultError, Object

from memcg_inspect.image.image import Image
from memcg_inspect.image.strings import c_string, text

__all__ = ("MemoryResource", "memory_resources", "system_ram")

#: ``IORESOURCE_SYSRAM`` of :linux:`include/linux/ioport.h`.
IORESOURCE_SYSRAM = 0x01000000
#: More resources than any machine has.
_MOST_RESOURCES = 1 << 18


class MemoryResource(NamedTuple):
    """
    One ``struct resource`` of memory.

    :ivar name: its name
    :ivar start: first physical address
    :ivar end: physical address after the last one
    :ivar is_ram: whether it is memory that the kernel has, or had, pages of (``System RAM``)
    :ivar in_ram: whether it is part of such memory
    """

    name: str
    start: int
    end: int
    is_ram: bool
    in_ram: bool


def memory_resources(image: Image) -> Iterator[MemoryResource]:
    """
    Iterate over the resources below ``iomem_resource``, parents before their children.

    :raises drgn.FaultError: if one cannot be read, or if the tree does not end
    """
    root = image.object("iomem_resource")
    todo: list[tuple[Object, bool]] = [(root.child.read_(), False)]
    seen: set[int] = set()
    while todo:
        resource, in_ram = todo.pop()
        if not resource:
            continue
        if resource.value_() in seen or len(seen) == _MOST_RESOURCES:
            raise FaultError("the tree of resources does not end", resource.value_())
        seen.add(resource.value_())
        is_ram = bool(int(resource.flags) & IORESOURCE_SYSRAM)
        name = text(c_string(resource.name)) if resource.name else ""
        start, end = int(resource.start), int(resource.end) + 1
        yield MemoryResource(name, start, end, is_ram, in_ram)
        todo.append((resource.sibling.read_(), in_ram))
        todo.append((resource.child.read_(), in_ram or is_ram))


def system_ram(image: Image, page_shift: int) -> list[tuple[int, int]]:
    """
    Return the page frames that are memory, not holes between memory.

    ``memblock`` joins ranges that are next to each other, then rounds them to whole pages:
    ``memblock_merge_regions()``, ``memblock_region_memory_base_pfn()``. The border of two resources
    can be inside a page: up to 6.14, ``e820__reserve_setup_data()`` splits memory where data of the
    boot loader begins and ends, at any byte. Both parts are memory.

    :return: first page frame, page frame after the last one; in ascending order
    :raises drgn.FaultError: if the tree of resources cannot be read
    """
    round_up = (1 << page_shift) - 1
    ranges = _joined(
        (resource.start, resource.end)
        for resource in memory_resources(image)
        if resource.is_ram and not resource.in_ram
    )
    pages = ((start + round_up >> page_shift, end >> page_shift) for start, end in ranges)
    return [(start, end) for start, end in pages if start < end]


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that are next to each other, or overlap. Return them in ascending order."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
