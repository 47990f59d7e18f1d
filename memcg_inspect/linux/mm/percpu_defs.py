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
from memcg_inspect.model import ImageError

__all__ = ("percpu_offsets",)


@per_image
def percpu_offsets(image: Image) -> dict[int, int]:
    """
    Return ``per_cpu_offset()`` of each possible CPU.

    :return: bytes to add to a ``__percpu`` pointer, by CPU
    :raises ImageError: if two CPUs have the same
    """
    null = NULL(image.prog, "void *")
    found = {cpu: int(per_cpu_ptr(null, cpu).value_()) for cpu in possible_cpus(image)}
    if len(set(found.values())) != len(found):
        raise ImageError(
            "two CPUs have the same percpu memory: __per_cpu_offset or __cpu_possible_mask is "
            "damaged"
        )
    return found
