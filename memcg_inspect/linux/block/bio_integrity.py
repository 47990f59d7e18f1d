# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Reserve of the block layer
--------------------------

Mirrors ``integrity_buf_pool`` of :linux:`block/bio-integrity.c` (since 7.0), a ``mempool_t`` of
blocks of 2 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, ObjectAbsentError

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.model import Coverage

__all__ = ("integrity_pages",)

#: ``BIO_POOL_SIZE`` is 2.
_MOST_ELEMENTS = 64


def integrity_pages(image: Image, coverage: Coverage) -> Iterator[tuple[int, int]]:
    """
    Yield the blocks of pages in the pool.

    :param coverage: counts them, and whether the pool is unreadable
    :return: ``struct page *`` of the first page, order
    """
    try:
        pool = image.object("integrity_buf_pool").read_()
        number, order = int(pool.curr_nr), int(pool.pool_data.value_())
        orders = array_length(member_type(image.type("struct zone"), "free_area"))
        if not 0 <= number <= _MOST_ELEMENTS or not 0 <= order < orders:
            raise FaultError(f"a pool of {number} blocks of order {order}", 0)
        for index in range(number):
            yield pool.elements[index].value_(), order
            coverage.read += 1
    except (UnknownKernelError, ObjectAbsentError):
        return
    except FaultError as error:
        coverage.miss("integrity_buf_pool", error.address, str(error))
