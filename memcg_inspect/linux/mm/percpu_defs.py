# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Per-CPU pointers
----------------

Mirrors :linux:`include/linux/percpu-defs.h`.
"""

from __future__ import annotations

from drgn import NULL
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.linux.mm.mmzone import possible_cpus

__all__ = ("percpu_offsets",)


@per_image
def percpu_offsets(image: Image) -> dict[int, int]:
    """Return what to add to a ``__percpu`` pointer, for each possible CPU."""
    null = NULL(image.prog, "void *")
    return {cpu: int(per_cpu_ptr(null, cpu).value_()) for cpu in possible_cpus(image)}
