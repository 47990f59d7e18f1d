# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memory of devices
-----------------

Mirrors :linux:`mm/memremap.c`. A driver gives the memory of its device pages with
``memremap_pages()``. Their sections are never online.
"""

from __future__ import annotations

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import constant
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.xarray import xa_entries

__all__ = ("has_user_pages_on_devices",)


def has_user_pages_on_devices(image: Image) -> bool:
    """
    Return whether anonymous pages of processes can be in the memory of a device.

    Pages that HMM moved there (``MEMORY_DEVICE_PRIVATE``, and since 5.19
    ``MEMORY_DEVICE_COHERENT``) stay charged to their memcg. No other device memory is charged.

    :raises drgn.FaultError: if ``pgmap_array`` cannot be read
    """
    try:
        pgmaps = image.object("pgmap_array")
    except UnknownKernelError:
        return False  # without CONFIG_ZONE_DEVICE
    types = {constant(image, name) for name in ("MEMORY_DEVICE_PRIVATE", "MEMORY_DEVICE_COHERENT")}
    return any(
        int(image.pointer("struct dev_pagemap *", pgmap).type) in types
        for pgmap in xa_entries(image, pgmaps.address_of_())
    )
