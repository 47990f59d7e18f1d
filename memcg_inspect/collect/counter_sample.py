# SPDX-License-Identifier: LGPL-2.1-or-later
"""The counters of all memcgs, exact as after a flush. No objects are walked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memcg_inspect.checks.counters import Counters
from memcg_inspect.collect.counters import read_counters, read_usage
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol import read_memcgs
from memcg_inspect.linux.mm.memcontrol_stat import StatLine, stat_lines
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage, ImageInfo, Memcg

__all__ = ("CURRENT", "Sample", "item_names", "take_sample")

#: The page counter.
CURRENT = "current"


@dataclass(frozen=True)
class Sample:
    """
    The counters of all memcgs at one time.

    :ivar image: the image that was read
    :ivar seconds: when, by a clock that is never set
    :ivar clock: when, in seconds since 1970
    :ivar memcgs: by ``struct mem_cgroup *``, parents first
    :ivar lines: lines of ``memory.stat`` in bytes, by name
    :ivar nodes: nodes that memcgs have counters for
    :ivar unread: number of memcgs and counters that could not be read
    """

    image: ImageInfo
    seconds: float
    clock: float
    memcgs: Mapping[int, Memcg]
    lines: Mapping[str, StatLine]
    nodes: tuple[int, ...]
    unread: int
    _usage: Mapping[int, int]
    _counters: Counters

    def amount(self, memcg: int, item: str, nid: int | None = None) -> int | None:
        """
        Return what a memcg and its descendants use, in bytes.

        :param memcg: ``struct mem_cgroup *``
        :param item: line of ``memory.stat``, or :data:`CURRENT`
        :param nid: node; ``None`` for all nodes
        :return: ``None`` if it is not counted, or not read
        """
        if item == CURRENT:
            return self._usage.get(memcg) if nid is None else None
        line = self.lines.get(item)
        if line is None:
            return None
        value = self._counters.hierarchical_sum(memcg, line.items, nid)
        return None if value is None else value.exact * line.scale


def take_sample(image: Image) -> Sample:
    """
    Read the counters of all memcgs.

    :raises ImageError: if the kernel has no memcgs
    :raises drgn.FaultError: if what all of them depend on cannot be read
    """
    coverage, began, clock = Coverage(), time.monotonic(), time.time()
    memcgs = read_memcgs(image, coverage)
    lines = {line.name: line for line in stat_lines(image) if line.unit == "bytes"}
    reader = StatReader(image, dict.fromkeys(_items(lines.values())))
    counters = read_counters(image, reader, memcgs, coverage)
    page_size = mem_map(image).page_size
    usage = read_usage(image, memcgs, coverage)
    return Sample(
        image=image_info(image),
        seconds=began,
        clock=clock,
        memcgs=memcgs,
        lines=lines,
        nodes=counters.nids,
        unread=coverage.unreadable,
        _usage={memcg: pages * page_size for memcg, pages in usage.items()},
        _counters=counters,
    )


def _items(lines: Iterable[StatLine]) -> Iterable[str]:
    return (item for line in lines for item in line.items)


def item_names(sample: Sample) -> tuple[str, ...]:
    """Return what can be shown: kernel memory first, as far as the kernel counts it."""
    first = ("slab", CURRENT, "kernel", "kernel_stack", "pagetables", "percpu", "sock", "vmalloc")
    known = [name for name in first if name == CURRENT or name in sample.lines]
    return (*known, *(name for name in sample.lines if name not in first))
