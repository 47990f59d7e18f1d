# SPDX-License-Identifier: LGPL-2.1-or-later
"""Blocks of pages of block devices, virtio, DMA and others, made as the kernel fills them."""

from __future__ import annotations

import re

import pytest
from support.guests import DEBIAN_KERNELS, Lab
from support.layouts import MadeImage

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.block import blk_mq
from memcg_inspect.linux.block.bio_integrity import integrity_pages
from memcg_inspect.linux.block.blk_mq import request_blocks
from memcg_inspect.linux.drivers.random import boot_id
from memcg_inspect.linux.drivers.virtio_ring import virtqueue_rings
from memcg_inspect.linux.kernel.dma.pool import atomic_pools
from memcg_inspect.linux.kernel.dma.swiotlb import swiotlb_pools
from memcg_inspect.linux.kernel.vmcore_info import vmcoreinfo_pages
from memcg_inspect.model import Coverage

AT, MISSING = 0xFFFFFFFF82000000, 0xFFFF888077700000
THINGS, MORE, PAGES = 0xFFFF888000111000, 0xFFFF888000222000, 0xFFFFEA0000100000
LISTS = "struct list_head { struct list_head *next; struct list_head *prev; };"
ZONE = "struct free_area { long nr_free; }; struct zone { struct free_area free_area[11]; };"


def linked(image: MadeImage, head: int, *links: int) -> None:
    """Make a list."""
    ring = [head, *links]
    for number, link in enumerate(ring):
        image.words(link, ring[(number + 1) % len(ring)], ring[number - 1])


def pool(number: int, order: int) -> tuple[MadeImage, Coverage]:
    """Return a machine with a pool of blocks."""
    image = MadeImage()
    image.declare(
        ZONE + "struct mempool { int min_nr; int curr_nr; void **elements; void *pool_data; };"
    )
    image.variable("integrity_buf_pool", "struct mempool", AT)
    fields = {"curr_nr": number % (1 << 32), "elements": THINGS, "pool_data": order}
    image.make("struct mempool", AT, fields | {"min_nr": 2})
    image.words(THINGS, *(PAGES + 64 * n for n in range(70)))
    return image, Coverage()


@pytest.mark.parametrize(("number", "order"), [(0, 9), (2, 9), (1, 0), (64, 10)])
def test_blocks_of_a_pool(number: int, order: int) -> None:
    image, coverage = pool(number, order)
    assert list(integrity_pages(image, coverage)) == [
        (PAGES + 64 * n, order) for n in range(number)
    ]
    assert coverage == Coverage(read=number)


@pytest.mark.parametrize(("number", "order"), [(65, 9), (-1, 9), (2, 11)])
def test_a_pool_that_cannot_be_one(number: int, order: int) -> None:
    image, coverage = pool(number, order)
    assert list(integrity_pages(image, coverage)) == []
    assert (coverage.read, coverage.unreadable) == (0, 1)
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("integrity_buf_pool", 0)
    assert missed.reason.startswith(f"a pool of {number} blocks of order {order}")


def test_a_pool_that_is_not_in_the_image() -> None:
    image, coverage = pool(2, 9)
    image.words(AT + 8, MISSING)
    assert list(integrity_pages(image, coverage)) == []
    assert coverage.unreadable == 1
    assert list(integrity_pages(MadeImage(), Coverage())) == []


DISKS = (
    LISTS
    + ZONE
    + """
    struct page { long flags; struct list_head lru; void *mapping; long index; long private; };
    struct blk_mq_tags { int nr_tags; struct list_head page_list; };
    struct blk_mq_tag_set { int nr_hw_queues; struct blk_mq_tags **tags; };
    struct request_queue { long limits; struct blk_mq_tag_set *tag_set; };
    struct block_device { int bd_dev; struct request_queue *bd_queue; };
    struct inode { int i_mode; struct list_head i_sb_list; };
    struct bdev_inode { struct block_device bdev; struct inode vfs_inode; };
    struct super_block { long s_dev; struct list_head s_inodes; };
    """
)
INODES, QUEUES, SETS, TAGS = THINGS, THINGS + 0x1000, THINGS + 0x2000, THINGS + 0x3000


def disks(*sets: int | None) -> tuple[MadeImage, Coverage]:
    """Return a machine with devices that use these sets of tags; ``None`` for no queue."""
    image = MadeImage()
    image.declare(DISKS)
    image.variable("blockdev_superblock", "struct super_block *", AT)
    image.words(AT, AT + 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    for number, one in enumerate(sets):
        queue = QUEUES + 64 * number
        bdev = INODES + 128 * number
        image.make("struct bdev_inode", bdev, {"bdev.bd_queue": 0 if one is None else queue})
        image.words(queue, 0, SETS + 64 * one if one else 0)
    linked(image, AT + 72, *(INODES + 128 * n + 24 for n in range(len(sets))))
    return image, Coverage()


def tags(image: MadeImage, of_set: int, *queues: int, count: int | None = None) -> None:
    """Make a set whose hardware queues use these tags; 0 for none."""
    at = SETS + 64 * of_set
    length = len(queues) if count is None else count
    image.make("struct blk_mq_tag_set", at, {"nr_hw_queues": length, "tags": at + 32})
    image.words(at + 32, *(TAGS + 64 * one if one else 0 for one in queues))


def blocks(image: MadeImage, of_tags: int, *orders: int) -> list[tuple[int, int]]:
    """Make the blocks of requests of a hardware queue."""
    found = [(PAGES + 0x1000 * of_tags + 64 * n, order) for n, order in enumerate(orders)]
    for page, order in found:
        image.make("struct page", page, {"private": order})
    linked(image, TAGS + 64 * of_tags + 8, *(page + 8 for page, _ in found))
    return found


def test_blocks_of_requests() -> None:
    """Devices can share queues, and queues can share tags."""
    image, coverage = disks(1, None, 0, 2, 1)
    tags(image, 1, 1, 0, 2, 1)
    tags(image, 2, 3, 2)
    wanted = [blocks(image, 1, 0, 10), blocks(image, 2, 4), blocks(image, 3, 2, 2, 2)]
    found = list(request_blocks(image, coverage))
    assert found == [*wanted[0], *wanted[1], *wanted[2], *wanted[1]]
    assert coverage == Coverage(read=2)


def test_blocks_of_requests_that_cannot_be_right() -> None:
    image, coverage = disks(1, 2, 3)
    tags(image, 1, 1, count=(1 << 14) + 1)
    tags(image, 2, 2)
    tags(image, 3, 3)
    blocks(image, 1, 1)
    blocks(image, 2, 5, 11, 1)
    last = blocks(image, 3, 3)
    assert list(request_blocks(image, coverage)) == [(PAGES + 0x2000, 5), *last]
    assert (coverage.read, coverage.unreadable) == (1, 2)
    assert {one.what for one in coverage.examples} == {"queues of a block device"}
    assert {one.address for one in coverage.examples} == {SETS + 64, PAGES + 0x2000 + 64}


def test_a_device_with_the_most_hardware_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blk_mq._MOST_QUEUES == 16 * 1024
    image, coverage = disks(1)
    tags(image, 1, 1, 2, 3)
    wanted = [block for n in (1, 2, 3) for block in blocks(image, n, 0)]
    monkeypatch.setattr(blk_mq, "_MOST_QUEUES", 3)
    assert list(request_blocks(image, coverage)) == wanted
    monkeypatch.setattr(blk_mq, "_MOST_QUEUES", 2)
    assert list(request_blocks(image, coverage)) == []
    [missed] = coverage.examples
    assert missed.what == "queues of a block device"
    assert missed.reason.startswith("3 hardware queues")


def test_devices_that_are_not_in_the_image() -> None:
    image, coverage = disks(1, 1)
    image.words(AT + 72, MISSING, MISSING)
    assert list(request_blocks(image, coverage)) == []
    assert coverage.unreadable >= 1
    image, coverage = disks(1)
    image.words(AT, MISSING)
    assert list(request_blocks(image, coverage)) == []
    assert coverage.unreadable == 1
    image, coverage = disks(1)
    image.variable("blockdev_superblock", "struct super_block *", MISSING)
    assert list(request_blocks(image, coverage)) == []
    assert coverage.unreadable == 1
    image, coverage = disks(1)  # its set is not
    image.words(QUEUES + 8, MISSING)
    assert list(request_blocks(image, coverage)) == []
    assert (coverage.read, coverage.unreadable) == (0, 1)


def test_kernels_without_queues() -> None:
    assert list(request_blocks(MadeImage(), Coverage())) == []
    image, coverage = MadeImage(), Coverage()
    image.declare(DISKS)
    assert list(request_blocks(image, coverage)) == []
    assert coverage == Coverage()


VIRTIO = (
    LISTS
    + """
    struct device { int id; };
    struct virtio_device { int index; struct device dev; struct list_head vqs; };
    struct virtqueue { struct list_head list; int index; };
    struct kobject { void *name; struct list_head entry; };
    struct kset { struct list_head list; struct kobject kobj; };
    struct klist { long lock; struct list_head k_list; };
    struct klist_node { void *n_klist; struct list_head n_node; };
    struct device_private { struct klist_node knode_bus; struct device *device; };
    struct subsys_private { struct kset subsys; void *bus; struct klist klist_devices; };
    struct vring { int num; void *desc; };
    struct packed { int num; void *desc; void *driver; void *device; };
    struct vring_virtqueue_split { struct vring vring; long queue_size_in_bytes; };
    struct vring_virtqueue_packed { struct packed vring; long ring_size_in_bytes;
        long event_size_in_bytes; };
    """
)


def virtio(release: str, rings: list[dict[str, int]]) -> tuple[MadeImage, Coverage]:
    """Return a machine with a virtio device that has these rings."""
    image = MadeImage()
    layout = "unsigned char packed_ring;" if release == "6.12" else "int layout;"
    image.declare(
        VIRTIO
        + f"struct vring_virtqueue {{ struct virtqueue vq; {layout} unsigned char we_own_ring;"
        " struct vring_virtqueue_split split; struct vring_virtqueue_packed packed; };"
    )
    if release != "6.12":
        image.enum(
            "vq_layout",
            VQ_LAYOUT_SPLIT=0,
            VQ_LAYOUT_PACKED=1,
            VQ_LAYOUT_SPLIT_IN_ORDER=2,
            VQ_LAYOUT_PACKED_IN_ORDER=3,
        )
    image.variable("bus_kset", "struct kset *", AT)
    image.symbol_at("virtio_bus", AT + 0x800)
    image.make("struct kset", AT + 64, {})
    image.words(AT, AT + 64)
    for number, bus in enumerate((AT + 0x700, AT + 0x800)):
        at = THINGS + 256 * number
        image.make("struct subsys_private", at, {"bus": bus})
        private = image.pointer("struct subsys_private *", at)
        device = THINGS + 0x800 + 256 * number
        image.make("struct device_private", device, {"device": MORE + 0x8000 * number + 4})
        linked(image, private.klist_devices.k_list.address_ or 0, device + 8)
    kobjects = [
        image.pointer("struct subsys_private *", THINGS + 256 * n).subsys.kobj.entry.address_ or 0
        for n in (0, 1)
    ]
    linked(image, AT + 64, *kobjects)
    for number in (0, 1):
        image.make("struct virtio_device", MORE + 0x8000 * number, {})
        linked(image, MORE + 0x8000 * number + 8)
    for number, ring in enumerate(rings):
        fields = {"we_own_ring": 1} | {key.replace("__", "."): v for key, v in ring.items()}
        image.make("struct vring_virtqueue", MORE + 0x8000 + 256 * (number + 1), fields)
    linked(image, MORE + 0x8008, *(MORE + 0x8000 + 256 * (n + 1) for n in range(len(rings))))
    return image, Coverage()


SPLIT = {"split__vring__desc": 0xFFFF888001000000, "split__queue_size_in_bytes": 0x2800}
PACKED = {
    "packed__vring__desc": 0xFFFF888002000000,
    "packed__vring__driver": 0xFFFF888003000000,
    "packed__vring__device": 0xFFFF888004000000,
    "packed__ring_size_in_bytes": 0x2000,
    "packed__event_size_in_bytes": 4,
}
OF_SPLIT = [0xFFFF888001000000, 0xFFFF888001001000, 0xFFFF888001002000]
OF_PACKED = [
    *(0xFFFF888002000000, 0xFFFF888002001000),
    *(0xFFFF888003000000, 0xFFFF888004000000),
]


@pytest.mark.parametrize("release", ["6.12", "7.3"])
def test_pages_of_virtio_rings(release: str) -> None:
    member = "packed_ring" if release == "6.12" else "layout"
    packed = [PACKED | SPLIT | {member: one} for one in ((1,) if release == "6.12" else (1, 3))]
    split = [SPLIT | PACKED | {member: one} for one in ((0,) if release == "6.12" else (0, 2))]
    foreign = SPLIT | {"we_own_ring": 0}
    image, coverage = virtio(release, [*packed, foreign, *split, {}])
    found = list(virtqueue_rings(image, coverage))
    assert found == OF_PACKED * len(packed) + OF_SPLIT * len(split)
    assert coverage == Coverage(read=len(packed) + len(split) + 1)


def test_devices_of_a_bus_that_are_not_in_the_image() -> None:
    """Both what a list refers to and the list itself are missed."""
    private = THINGS + 0x900 + 8  # the link of the device of the second bus
    for link in (AT + 64, private):
        image, coverage = virtio("7.3", [SPLIT])
        image.words(link, MISSING)
        # The list is walked from the other end.
        assert list(virtqueue_rings(image, coverage)) == OF_SPLIT
        assert (coverage.read, coverage.unreadable) == (1, 2)
    image, coverage = virtio("7.3", [SPLIT])
    image.words(private + 16, MISSING)
    image.words(THINGS + 0x900 + 24, MISSING)
    assert list(virtqueue_rings(image, coverage)) == []
    assert coverage.unreadable >= 1
    image, coverage = virtio("7.3", [SPLIT])
    image.variable("bus_kset", "struct kset *", MISSING)
    assert list(virtqueue_rings(image, coverage)) == []
    assert coverage.unreadable == 1
    assert [one.what for one in coverage.examples] == ["rings of virtio"]


def test_a_bus_before_its_first_device() -> None:
    """buses_init() has not made ``bus_kset``, or device_add() has not set the device."""
    image, coverage = virtio("7.3", [SPLIT])
    image.words(AT, 0)
    assert list(virtqueue_rings(image, coverage)) == []
    image.words(AT, AT + 64)
    assert list(virtqueue_rings(image, coverage)) == OF_SPLIT
    device = image.pointer("struct device_private *", THINGS + 0x900).device
    image.words(device.address_ or 0, 0)
    assert list(virtqueue_rings(image, coverage)) == []
    assert coverage.unreadable == 0


@pytest.mark.parametrize("size", [(1 << 20) + 1, (1 << 64) - 1])
def test_a_ring_of_an_impossible_size(size: int) -> None:
    rings = [SPLIT | {"split__queue_size_in_bytes": size}, SPLIT]
    image, coverage = virtio("7.3", rings)
    assert list(virtqueue_rings(image, coverage)) == OF_SPLIT
    assert (coverage.read, coverage.unreadable) == (1, 1)
    [example] = coverage.examples
    assert (example.what, example.address) == ("rings of virtio", MORE + 0x8100)
    image, coverage = virtio("7.3", [SPLIT | {"split__queue_size_in_bytes": 1 << 20}])
    assert len(list(virtqueue_rings(image, coverage))) == 256


def test_kernels_without_virtio() -> None:
    assert list(virtqueue_rings(MadeImage(), Coverage())) == []
    image, coverage = MadeImage(), Coverage()
    image.declare(
        LISTS + "struct vring_virtqueue { int vq; }; struct virtio_device { int index; };"
    )
    assert list(virtqueue_rings(image, coverage)) == []


def test_parts_of_pools_for_dma() -> None:
    """gen_pool_add_virt(): the end is the last address, and the start one of virtual memory."""
    for is_pointer in (True, False):
        image, coverage = MadeImage(), Coverage()
        image.declare(
            LISTS
            + "struct gen_pool { int lock; struct list_head chunks; };"
            + "struct dma_gen_pool { unsigned int gfp; struct gen_pool *pool; };"
            + "struct gen_pool_chunk { struct list_head next_chunk; long avail; long phys_addr;"
            + " void *owner; unsigned long start_addr; unsigned long end_addr; };"
        )
        kind = "struct gen_pool *" if is_pointer else "struct dma_gen_pool"
        for number, name in enumerate(
            ("atomic_pool_dma", "atomic_pool_kernel", "atomic_pool_dma32")
        ):
            image.variable(name, kind, AT + 16 * number)
            image.words(AT + 16 * number, 0, 0)
        pools = (THINGS, THINGS + 256)
        for at, one in zip((AT, AT + 32), pools, strict=True):
            image.words(at if is_pointer else at + 8, one)
        chunks = [MORE + 64 * n for n in range(3)]
        for number, chunk in enumerate(chunks):
            start = 0xFFFF888000000000 + 0x100000 * number
            fields = {"phys_addr": 0x100000 * (number + 1), "start_addr": start}
            image.make("struct gen_pool_chunk", chunk, fields | {"end_addr": start + 0x1FFFF})
        linked(image, pools[0] + 8, *chunks[:2])
        linked(image, pools[1] + 8, chunks[2])
        wanted = [(0x100000 * n, 0x100000 * n + 0x20000) for n in (1, 2, 3)]
        assert list(atomic_pools(image, coverage)) == wanted
        assert coverage == Coverage(read=3)
        image.words(chunks[0], MISSING)
        assert set(atomic_pools(image, coverage)) == set(wanted)
        assert coverage.unreadable == 2  # the part that is missing, and the list
        image.variable("atomic_pool_dma32", kind, MISSING)
        coverage = Coverage()
        assert set(atomic_pools(image, coverage)) == set(wanted[:2])
        assert coverage.unreadable == 3
        image.variable("atomic_pool_dma32", kind, AT + 32)
        image.words(AT if is_pointer else AT + 8, MISSING)
        coverage = Coverage()
        assert list(atomic_pools(image, coverage)) == wanted[2:]
        assert coverage.unreadable == 1
        assert [one.what for one in coverage.examples] == ["pool for coherent DMA"]
    assert list(atomic_pools(MadeImage(), Coverage())) == []


@pytest.mark.parametrize("has_pool", [True, False])
def test_bounce_buffers(has_pool: bool) -> None:
    image = MadeImage()
    image.declare("struct io_tlb_pool { long nslabs; long start; long end; };")
    image.declare("struct io_tlb_mem { int for_alloc; struct io_tlb_pool defpool; };")
    name, at = ("struct io_tlb_mem", AT + 8) if has_pool else ("struct io_tlb_pool", AT)
    image.variable("io_tlb_default_mem", name, AT)
    coverage = Coverage()
    assert list(swiotlb_pools(image, coverage)) == []
    assert (coverage.read, coverage.unreadable) == (0, 1)
    assert coverage.examples[0].what == "io_tlb_default_mem"
    image.words(at, 4, 0x1000000, 0x1000000)
    coverage = Coverage()
    assert list(swiotlb_pools(image, coverage)) == []
    assert coverage == Coverage()
    image.words(at, 4, 0x1000000, 0x5000000)
    assert list(swiotlb_pools(image, coverage)) == [(0x1000000, 0x5000000)]
    assert coverage == Coverage(read=1)
    assert list(swiotlb_pools(MadeImage(), Coverage())) == []


def test_pages_of_vmcoreinfo() -> None:
    image, coverage = MadeImage(), Coverage()
    assert list(vmcoreinfo_pages(image, coverage)) == []
    image.symbol_at("vmcoreinfo_note", AT)
    image.words(AT, THINGS, MORE)
    assert list(vmcoreinfo_pages(image, coverage)) == [THINGS]
    image.symbol_at("vmcoreinfo_data", AT + 8)
    assert list(vmcoreinfo_pages(image, coverage)) == [MORE, THINGS]
    assert coverage == Coverage()
    image.symbol_at("vmcoreinfo_data", MISSING)
    assert list(vmcoreinfo_pages(image, coverage)) == [THINGS]
    assert [one.what for one in coverage.examples] == ["vmcoreinfo_data"]


def test_the_id_of_a_boot() -> None:
    image = MadeImage()
    assert boot_id(image) == ""
    image.symbol_at("sysctl_bootid", AT, 16)
    assert boot_id(image) == ""  # it is not in the image
    image.write(AT, bytes(16) + b"\x01")
    assert boot_id(image) == ""  # nobody has asked for it
    image.write(AT, bytes(range(15)) + b"\xff")
    assert boot_id(image) == "00010203-0405-0607-0809-0a0b0c0d0eff"


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_text_of_vmcoreinfo_and_its_note(lab: Lab, kernel: str) -> None:
    """The text is VMCOREINFO, and the note begins with an ELF header that says so."""
    prog, coverage = lab.image(kernel).program(), Coverage()
    text, note = vmcoreinfo_pages(image_of(prog), coverage)
    assert re.match(rb"OSRELEASE=\S+\n", prog.read(text, 100))
    assert prog.read(note + 12, 10) == b"VMCOREINFO"
    assert coverage == Coverage()
