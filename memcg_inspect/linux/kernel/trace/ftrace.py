# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Records of ftrace
-----------------

Mirrors ``struct ftrace_page`` of :linux:`kernel/trace/ftrace.c`: blocks of pages with the places
that call ftrace, in the kernel and in each module.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, ObjectAbsentError

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, has_member, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.model import Coverage

__all__ = ("ftrace_blocks",)

#: More blocks than all modules together need.
_MOST_BLOCKS = 1 << 20


def ftrace_blocks(image: Image, coverage: Coverage) -> Iterator[tuple[int, int]]:
    """
    Yield the blocks of pages with records.

    :param coverage: counts the blocks that were read, and whether there are more
    :return: address in the direct map, order
    """
    # The order is a member since commit db42523b4f3e ("ftrace: Store the order of pages allocated
    # in ftrace_page") (in v5.13).
    if not has_member(image, "struct ftrace_page", "order"):
        return
    orders = array_length(member_type(image.type("struct zone"), "free_area"))
    seen: set[int] = set()
    try:
        page = image.object("ftrace_pages_start").read_()
        while page:
            if page.value_() in seen or len(seen) == _MOST_BLOCKS:
                raise FaultError("the list of ftrace pages does not end", page.value_())
            seen.add(page.value_())
            records, order = page.records.value_(), int(page.order)
            if not 0 <= order < orders:
                raise FaultError(f"an ftrace page of order {order}", page.value_())
            if records:
                yield records, order
                coverage.read += 1
            page = page.next.read_()
    except (UnknownKernelError, ObjectAbsentError):
        return
    except FaultError as error:
        coverage.miss("ftrace pages", error.address, str(error))
