# SPDX-License-Identifier: LGPL-2.1-or-later
"""Devices of a bus, where lists of the driver core are not in the image."""

from __future__ import annotations

import pytest
from drgn import FaultError
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import excluded, opened

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.drivers.base import devices_of_bus


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_devices_of_a_bus(lab: Lab, kernel: str) -> None:
    """The guest has four CPUs, and each is a device (register_cpu())."""
    image, faults = lab.image(kernel), list[FaultError]()
    bus = image.program().symbol("cpu_subsys").address
    devices = list(devices_of_bus(image_of(image.program()), bus, faults.append))
    assert len(devices) == 4
    assert faults == []
    prog = opened(image.core)
    prog.add_memory_segment(prog.symbol("bus_kset").address, 8, excluded, False)
    assert list(devices_of_bus(image_of(prog), bus, faults.append)) == []
    assert len(faults) == 1
