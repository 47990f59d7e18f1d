# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Loop devices
------------

Mirrors :linux:`drivers/block/loop.c`. ``loop_queue_rq()`` takes a reference to the memcg of a
request. ``loop_handle_cmd()`` drops it. Requests are not read one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn.helpers.linux.block import disk_name, for_each_disk
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.image.image import Image
from memcg_inspect.linux.lib.list import distinct
from memcg_inspect.linux.mm.mmzone import possible_cpus

__all__ = ("busy_loops",)


def busy_loops(image: Image) -> Iterator[str]:
    """
    Return the names of loop devices that have requests in flight.

    :raises drgn.FaultError: if a disk cannot be read
    """
    for disk in distinct(for_each_disk(image.prog)):
        name = disk_name(disk).decode(errors="backslashreplace")
        if not name.startswith("loop"):
            continue
        stats = disk.part0.bd_stats.read_()
        in_flight = sum(
            int(number.a.counter)
            for cpu in possible_cpus(image)
            for number in per_cpu_ptr(stats, cpu).in_flight
        )
        if in_flight:
            yield name
