# SPDX-License-Identifier: LGPL-2.1-or-later
"""Loop devices with requests in flight, in memory made as drivers/base/class.c links disks."""

from __future__ import annotations

from drgn import offsetof
from support.layouts import MadeImage

from memcg_inspect.linux.block.loop import busy_loops

VARIABLES, DATA = 0xFFFFFFFF82000000, 0xFFFF888030000000
CLASSES, DEVICES, DISKS = 0xFFFF888000111000, 0xFFFF888000222000, 0xFFFF888000333000
#: ``block_class``, and another class.
BLOCK, OTHER = VARIABLES + 64, VARIABLES + 128
STATS = 0x10000
STRUCTURES = """
    struct list_head { struct list_head *next; struct list_head *prev; };
    struct kobject { void *name; struct list_head entry; };
    struct kset { struct list_head list; struct kobject kobj; };
    struct class { long name; };
    struct klist { long lock; struct list_head k_list; };
    struct klist_node { void *n_klist; struct list_head n_node; };
    struct subsys_private { struct kset subsys; struct class *class; struct klist klist_devices; };
    struct device { long id; };
    struct device_private { struct klist_node knode_class; struct device *device; };
    struct counter { long counter; };
    struct local { struct counter a; };
    struct disk_stats { long nsecs; struct local in_flight[2]; };
    struct gendisk { int major; char disk_name[32]; struct block_device *part0; };
    struct block_device { struct disk_stats *bd_stats; unsigned char bd_partno;
        struct gendisk *bd_disk; struct device bd_device; };
"""


def linked(image: MadeImage, head: int, *links: int) -> None:
    """Make a list."""
    ring = [head, *links]
    for number, link in enumerate(ring):
        image.words(link, ring[(number + 1) % len(ring)], ring[number - 1])


def device(image: MadeImage, number: int, disk: int, partition: int = 0) -> int:
    """Make a block device, and return its link in the list of its class."""
    at, private = DISKS + 0x800 + 128 * number, DEVICES + 128 * number
    members = {"bd_partno": partition, "bd_disk": DISKS + 64 * disk, "bd_stats": STATS + 64 * disk}
    image.make("struct block_device", at, members)
    node = at + offsetof(image.type("struct block_device"), "bd_device")
    image.make("struct device_private", private, {"device": node})
    return private + offsetof(image.type("struct device_private"), "knode_class.n_node")


def machine() -> MadeImage:
    """Return a machine with two loop devices, one of which has a partition, and a disk."""
    image = MadeImage()
    image.declare(STRUCTURES)
    image.variable("__per_cpu_offset", "unsigned long[2]", VARIABLES)
    image.words(VARIABLES, DATA, DATA + 0x100000)
    image.variable("block_class", "struct class", BLOCK)
    image.variable("class_kset", "struct kset *", VARIABLES + 192)
    image.words(VARIABLES + 192, CLASSES)
    image.make("struct kset", CLASSES, {})
    for disk, name in enumerate((b"loop0", b"vda", b"loop\xff")):
        first = DISKS + 0x800 + 128 * disk
        image.make("struct gendisk", DISKS + 64 * disk, {"part0": first})
        image.write(DISKS + 64 * disk + 4, name)
        requests(image, disk, 0, 0, 0, 0)
    links = [device(image, 0, 0), device(image, 1, 1), device(image, 2, 2), device(image, 3, 0, 1)]
    entries = []
    for number, (class_, of_class) in enumerate(((OTHER, [device(image, 4, 2)]), (BLOCK, links))):
        at = CLASSES + 0x400 + 256 * number
        image.make("struct subsys_private", at, {"class": class_})
        private = image.pointer("struct subsys_private *", at)
        entries.append(private.subsys.kobj.entry.address_ or 0)
        linked(image, private.klist_devices.k_list.address_ or 0, *of_class)
    linked(image, CLASSES, *entries)
    return image


def requests(image: MadeImage, disk: int, *counts: int) -> None:
    """Set how many reads and writes of a disk each CPU has begun, less those that it has ended."""
    for cpu in (0, 1):
        at = DATA + 0x100000 * cpu + STATS + 64 * disk
        image.words(at, 5, *(count % (1 << 64) for count in counts[2 * cpu : 2 * cpu + 2]))


def test_loop_devices_with_requests_in_flight() -> None:
    """A request may end on another CPU than the one where it began."""
    image = machine()
    assert list(busy_loops(image)) == []
    requests(image, 1, 1, 0, 0, 0)  # it is no loop device
    assert list(busy_loops(image)) == []
    for counts in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 3, 0), (0, 2, 0, -1), (5, 0, -4, 0)):
        requests(image, 0, *counts)
        assert list(busy_loops(image)) == ["loop0"]
    requests(image, 2, 0, 0, 0, 1)
    assert list(busy_loops(image)) == ["loop0", "loop\\xff"]
    for counts in ((3, 0, -3, 0), (0, 2, 0, -2), (1, -1, 0, 0)):
        requests(image, 0, *counts)
        assert list(busy_loops(image)) == ["loop\\xff"]
