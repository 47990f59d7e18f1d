# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Devices of a bus
----------------

Mirrors ``struct subsys_private`` of :linux:`drivers/base/base.h`.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object, container_of

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import OnFault, list_entries

__all__ = ("devices_of_bus",)


def devices_of_bus(image: Image, bus: int, on_fault: OnFault) -> Iterator[Object]:
    """
    Iterate over the devices of a bus, ``bus_for_each_dev()``.

    :param bus: ``const struct bus_type *``
    :param on_fault: called for each list that is broken
    :return: ``struct device *``
    """
    if not has_type(image, "struct subsys_private"):
        return
    try:
        buses = image.object("bus_kset").read_()
    except UnknownKernelError:
        return
    except FaultError as error:
        on_fault(error)
        return
    if not buses:
        return
    private = image.type("struct subsys_private")
    head = buses.list.address_of_()
    for kobject in list_entries(image, "struct kobject", head, "entry", on_fault):
        try:
            subsys = container_of(kobject, private, "subsys.kobj")
            if subsys.bus.value_() != bus:
                continue
            devices = subsys.klist_devices.k_list.address_of_()
        except FaultError as error:
            on_fault(error)
            continue
        nodes = list_entries(image, "struct klist_node", devices, "n_node", on_fault)
        for node in nodes:
            try:
                device = container_of(node, "struct device_private", "knode_bus").device.read_()
            except FaultError as error:
                on_fault(error)
                continue
            if device:
                yield device
