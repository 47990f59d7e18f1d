# SPDX-License-Identifier: LGPL-2.1-or-later
"""
PID namespaces
--------------

Mirrors ``struct pid`` of :linux:`include/linux/pid.h`.
"""

from __future__ import annotations

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.sched import find_tasks

__all__ = ("task_in_namespace",)


def task_in_namespace(image: Image, pid: int, namespace: int) -> int | None:
    """
    Return the task that has a PID in its own PID namespace.

    :param pid: as ``getpid()`` in this namespace returns it
    :param namespace: inode number of the namespace, that of ``/proc/PID/ns/pid``
    :return: ``struct task_struct *`` of the thread group leader; ``None`` if there is none
    """
    for task in find_tasks(image, lambda _: None):  # whoever reads all tasks tells what is missing
        try:
            of_task = task.thread_pid.read_()
            if not of_task:
                continue  # release_task() has taken it
            number = of_task.numbers[int(of_task.level)]
            if number.nr == pid and number.ns.ns.inum == namespace:
                return int(task.value_())
        except FaultError:
            continue  # it has exited meanwhile
    return None
