# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Requests of block devices
-------------------------

Mirrors ``blk_mq_alloc_rqs()`` of :linux:`block/blk-mq.c`: the requests of a hardware queue are in
blocks of pages, which ``struct blk_mq_tags`` lists. Queues are found through the inodes of block
devices (:linux:`block/bdev.c`).
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object, container_of, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, has_member, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import list_entries, raise_fault
from memcg_inspect.model import Coverage

__all__ = ("request_blocks",)

#: More hardware queues than any device has.
_MOST_QUEUES = 1 << 14


def request_blocks(image: Image, coverage: Coverage) -> Iterator[tuple[int, int]]:
    """
    Iterate over the blocks of pages with requests.

    :param coverage: counts the sets of queues that were read, and those that are unreadable
    :return: ``struct page *`` of the first page, order
    """
    if not has_member(image, "struct request_queue", "tag_set"):
        return

    def missed(error: FaultError) -> None:
        coverage.miss("queues of a block device", error.address, str(error))

    seen: set[int] = set()
    try:
        inodes = image.object("blockdev_superblock").s_inodes.address_of_()
        bdev_inode = image.type("struct bdev_inode")
    except UnknownKernelError:
        return  # CONFIG_BLOCK=n
    except FaultError as error:
        missed(error)
        return
    for inode in list_entries(image, "struct inode", inodes, "i_sb_list", missed):
        try:
            queue = container_of(inode, bdev_inode, "vfs_inode").bdev.bd_queue.read_()
            tag_set = queue.tag_set.read_() if queue else None
            if not tag_set or tag_set.value_() in seen:
                continue
            seen.add(tag_set.value_())
            yield from _of_set(image, tag_set)
            coverage.read += 1
        except FaultError as error:
            missed(error)


def _of_set(image: Image, tag_set: Object) -> Iterator[tuple[int, int]]:
    """
    Return the blocks of a ``struct blk_mq_tag_set *``.

    :raises drgn.FaultError: if it cannot be read
    """
    count, seen = int(tag_set.nr_hw_queues), set[int]()
    if count > _MOST_QUEUES:
        raise FaultError(f"{count} hardware queues", tag_set.value_())
    private = offsetof(image.type("struct page"), "private")
    orders = array_length(member_type(image.type("struct zone"), "free_area"))
    for number in range(count):
        tags = tag_set.tags[number].read_()
        if not tags or tags.value_() in seen:
            continue  # queues may share tags
        seen.add(tags.value_())
        head = tags.page_list.address_of_()
        for page in list_entries(image, "struct page", head, "lru", raise_fault):
            order = image.memory.word(page.value_() + private)
            if order >= orders:
                raise FaultError(f"a block of order {order}", page.value_())
            yield page.value_(), order
