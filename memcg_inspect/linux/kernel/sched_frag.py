# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page fragments of tasks
-----------------------

Mirrors ``task_struct.task_frag`` (:linux:`include/linux/sched.h`), from which ``sk_page_frag()``
takes the memory of socket buffers.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.sched import find_tasks
from memcg_inspect.linux.net.skbuff import fragments
from memcg_inspect.model import Coverage

__all__ = ("task_fragments",)


def task_fragments(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages that tasks take their next fragments from.

    :param coverage: counts the tasks that are unreadable
    :return: ``struct page *``
    """

    def missed(error: FaultError) -> None:
        coverage.miss("page fragment of a task", error.address, str(error))

    for task in find_tasks(image, missed):
        try:
            yield from fragments(task.task_frag)
        except FaultError as error:
            missed(error)
