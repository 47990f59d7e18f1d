# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Loop devices
------------

Mirrors :linux:`drivers/block/loop.c`. ``loop_queue_rq()`` takes a reference to the memcg of a
request. ``loop_handle_cmd()`` drops it. Requests are not read one by one.

Disks are the devices of ``block_class`` that are not partitions (:linux:`drivers/base/class.c`).
drgn's ``for_each_disk()`` does not end where damaged pointers make a circle.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import Object, container_of
from drgn.helpers.linux.block import bdev_partno, disk_name
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.image.image import Image
from memcg_inspect.image.strings import text
from memcg_inspect.linux.lib.list import list_entries, raise_fault
from memcg_inspect.linux.mm.mmzone import possible_cpus

__all__ = ("busy_loops",)


def busy_loops(image: Image) -> Iterator[str]:
    """
    Return the names of loop devices that have requests in flight.

    :raises drgn.FaultError: if a disk cannot be read
    :raises UnknownKernelError: if the kernel has no disks (``CONFIG_BLOCK=n``)
    """
    for disk in _disks(image):
        name = text(disk_name(disk))
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


def _disks(image: Image) -> Iterator[Object]:
    """
    Iterate over all disks, ``struct gendisk *``.

    :raises drgn.FaultError: if a list is broken
    """
    block = image.object("block_class").address_of_()
    classes = image.object("class_kset").list.address_of_()
    for subsys in list_entries(
        image, "struct subsys_private", classes, "subsys.kobj.entry", raise_fault
    ):
        if subsys.member_("class") != block:
            continue
        devices = subsys.klist_devices.k_list.address_of_()
        for private in list_entries(
            image, "struct device_private", devices, "knode_class.n_node", raise_fault
        ):
            bdev = container_of(private.device.read_(), "struct block_device", "bd_device")
            if not bdev_partno(bdev):
                yield bdev.bd_disk.read_()
