# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pools for coherent DMA
----------------------

Mirrors :linux:`kernel/dma/pool.c`: memory for ``dma_alloc_coherent()`` in atomic context.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, ObjectAbsentError

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import list_entries
from memcg_inspect.model import Coverage

__all__ = ("atomic_pools",)

_POOLS = ("atomic_pool_dma", "atomic_pool_dma32", "atomic_pool_kernel")


def atomic_pools(image: Image, coverage: Coverage) -> Iterator[tuple[int, int]]:
    """
    Yield the physical addresses of the pools: the first, and that after the last one.

    :param coverage: counts the parts of pools, and those that are unreadable
    """

    def missed(error: FaultError) -> None:
        coverage.miss("pool for coherent DMA", error.address, str(error))

    for name in _POOLS:
        try:
            pool = image.object(name)
            # A struct gen_pool * up to 7.2.
            if pool.type_.unaliased_kind().name != "POINTER":
                pool = pool.pool
            pool = pool.read_()
        except (UnknownKernelError, ObjectAbsentError):
            continue
        except FaultError as error:
            missed(error)
            continue
        if not pool:
            continue
        head = pool.chunks.address_of_()
        for chunk in list_entries(image, "struct gen_pool_chunk", head, "next_chunk", missed):
            try:
                start = int(chunk.phys_addr)
                yield start, start + int(chunk.end_addr) + 1 - int(chunk.start_addr)
                coverage.read += 1
            except FaultError as error:
                missed(error)
