# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Rings of virtio devices
-----------------------

Mirrors ``vring_alloc_queue()`` of :linux:`drivers/virtio/virtio_ring.c`. Devices are found through
their bus (:linux:`drivers/virtio/virtio.c`). Both can be modules.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from drgn import FaultError, Object, container_of

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import constant, has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.drivers.base import devices_of_bus
from memcg_inspect.linux.lib.list import list_entries
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage

__all__ = ("virtqueue_rings",)

#: Values of ``enum vq_layout`` for packed rings.
_PACKED = ("VQ_LAYOUT_PACKED", "VQ_LAYOUT_PACKED_IN_ORDER")
#: More bytes than a ring of 32,768 entries, the most that virtio allows, has.
_MOST_BYTES = 1 << 20


def virtqueue_rings(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages of the rings that the kernel allocated.

    :param coverage: counts the queues that were read, and those that are unreadable
    :return: the address of each page. A ring of a device behind an IOMMU can be in a vmalloc area.
    """
    if not has_type(image, "struct vring_virtqueue") or not has_type(image, "struct virtio_device"):
        return  # CONFIG_VIRTIO=n, or a module without types
    try:
        bus = image.symbol("virtio_bus").address
    except UnknownKernelError:
        return

    def missed(error: FaultError) -> None:
        coverage.miss("rings of virtio", error.address, str(error))

    page_size = mem_map(image).page_size
    packed = {constant(image, name) for name in _PACKED}
    for device in devices_of_bus(image, bus, missed):
        virtio = container_of(device, "struct virtio_device", "dev")
        queues = virtio.vqs.address_of_()
        for queue in list_entries(image, "struct virtqueue", queues, "list", missed):
            ring = container_of(queue, "struct vring_virtqueue", "vq")
            try:
                if not ring.we_own_ring:
                    continue
                for start, size in _parts(ring, packed):
                    if not 0 <= size <= _MOST_BYTES:
                        raise FaultError(f"a ring of {size} bytes", queue.value_())
                    if start:
                        yield from range(start, start + size, page_size)
                coverage.read += 1
            except FaultError as error:
                missed(error)


def _parts(ring: Object, packed: Container[int | None]) -> Iterator[tuple[int, int]]:
    """
    Return the parts of a ``struct vring_virtqueue *``: address and number of bytes.

    :param packed: values of ``enum vq_layout`` for packed rings
    :raises drgn.FaultError: if it cannot be read
    """
    # A bool up to 6.12. Since then, enum vq_layout also tells whether buffers are used in order.
    if ring.type_.type.has_member("packed_ring"):
        is_packed = bool(ring.packed_ring)
    else:
        is_packed = int(ring.layout) in packed
    if is_packed:
        vring = ring.packed.vring
        yield vring.desc.value_(), int(ring.packed.ring_size_in_bytes)
        yield vring.driver.value_(), int(ring.packed.event_size_in_bytes)
        yield vring.device.value_(), int(ring.packed.event_size_in_bytes)
    else:
        yield ring.split.vring.desc.value_(), int(ring.split.queue_size_in_bytes)
