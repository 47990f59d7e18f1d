# SPDX-License-Identifier: LGPL-2.1-or-later
"""The memcgs that this program changes while it reads a running kernel."""

from __future__ import annotations

import os

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.image.image import Image, per_image
from memcg_inspect.linux.kernel.pid import task_in_namespace

__all__ = ("own_memcgs",)


def own_memcgs(image: Image, snapshot: Snapshot) -> list[int]:
    """
    Return the memcg that this program runs in, and its ancestors, on a running kernel.

    :return: ``struct mem_cgroup *``
    """
    if snapshot.image.source != "live":
        return []
    address = _own_task(image)
    own = next((task.memcg for task in snapshot.tasks if task.address == address), None)
    found: list[int] = []
    while own is not None and own in snapshot.memcgs:
        found.append(own)
        own = snapshot.memcgs[own].parent
    return found


@per_image
def _own_task(image: Image) -> int | None:
    # In a container, another task of the machine has the PID that this program knows of itself.
    return task_in_namespace(image, os.getpid(), os.stat("/proc/self/ns/pid").st_ino)
