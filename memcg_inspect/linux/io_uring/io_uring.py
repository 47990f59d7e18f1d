# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Rings of io_uring
-----------------

Mirrors ``struct io_ring_ctx`` of :linux:`io_uring/io_uring.c`. The rings are charged compound
pages.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, cast
from drgn.helpers.linux.fs import for_each_file

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.sched import find_tasks
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage

__all__ = ("io_uring_pages",)


def io_uring_pages(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the rings of all io_uring instances that tasks have open.

    :param coverage: counts the tasks whose files are unreadable
    :return: ``struct page *`` of the first page of each ring
    """
    if not has_type(image, "struct io_ring_ctx"):
        return
    try:
        operations = image.symbol("io_uring_fops").address
    except UnknownKernelError:
        return
    frames, seen = mem_map(image), set()

    def missed(error: FaultError) -> None:
        coverage.miss("files of a task", error.address, str(error))

    for task in find_tasks(image, missed):
        try:
            files = task.files.value_()
            if not files or files in seen:
                continue
            seen.add(files)
            for _, file in for_each_file(task):
                # Between get_unused_fd_flags() and fd_install(), a descriptor has no file.
                if not file or file.f_op.value_() != operations:
                    continue
                context = cast("struct io_ring_ctx *", file.private_data)
                for area in (context.rings, context.sq_sqes):
                    if area:
                        yield frames.virt_to_page(area.value_())
        except FaultError as error:
            missed(error)
