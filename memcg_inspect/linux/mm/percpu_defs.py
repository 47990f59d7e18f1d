# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Per-CPU pointers
----------------

Mirrors ``per_cpu_ptr()`` of :linux:`include/linux/percpu-defs.h`, for pointers that are plain
integers. drgn's :func:`~drgn.helpers.linux.percpu.per_cpu_ptr()` takes objects.
"""

from __future__ import annotations

from drgn import NULL
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.linux.mm.mmzone import possible_cpus

__all__ = ("percpu_offsets",)


@per_image
def percpu_offsets(image: Image) -> dict[int, int]:
    """
    Return ``per_cpu_offset()`` of each possible CPU.

    :return: bytes to add to a ``__percpu`` pointer, by CPU
    """
    null = NULL(image.prog, "void *")
    return {cpu: int(per_cpu_ptr(null, cpu).value_()) for cpu in possible_cpus(image)}
