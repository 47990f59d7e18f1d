# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Bounce buffers
--------------

Mirrors :linux:`kernel/dma/swiotlb.c`: the pool that is reserved at boot.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.model import Coverage

__all__ = ("swiotlb_pools",)


def swiotlb_pools(image: Image, coverage: Coverage) -> Iterator[tuple[int, int]]:
    """
    Yield the physical addresses of bounce buffers: the first, and that after the last one.

    :param coverage: counts pools, and those that are unreadable
    """
    try:
        pool = image.object("io_tlb_default_mem")
    except UnknownKernelError:
        return
    try:
        # Since commit 158dbe9c9a9a ("swiotlb: separate memory pool data from other allocator data")
        # (in v6.6), a member of it.
        if pool.type_.unaliased().has_member("defpool"):
            pool = pool.defpool
        start, end = int(pool.start), int(pool.end)
    except FaultError as error:
        coverage.miss("io_tlb_default_mem", error.address, str(error))
        return
    if end > start:
        coverage.read += 1
        yield start, end
