# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The largest charges
-------------------

How much one operation of :linux:`mm/memcontrol.c` charges at the most, from the types and the
caches of the image.
"""

from __future__ import annotations

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.hugetlb import huge_page_orders
from memcg_inspect.linux.mm.memcontrol_stat import accounts_hugetlb
from memcg_inspect.linux.mm.memcontrol_stock import (
    MEMCG_CHARGE_BATCH,
    largest_slab_charge,
    slab_bytes_bound,
)
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import largest_percpu_charge
from memcg_inspect.linux.mm.vmalloc import thread_size
from memcg_inspect.model import Coverage
from memcg_inspect.model_kernel import Limits

__all__ = ("read_limits",)

#: A stack is at most this many pages: ``THREAD_SIZE_ORDER`` is 3 with KASAN, and 2 otherwise.
_STACK_PAGES = 8


def read_limits(image: Image) -> Limits:
    """Return the most that one operation charges, or moves from one counter to another."""
    page_size = mem_map(image).page_size
    block = 1 << array_length(member_type(image.type("struct zone"), "free_area")) - 1
    # Larger objects than the caches have are large kmallocs. If the caches could not be read, any
    # object may be as large.
    slab_object = largest_slab_charge(image, Coverage())
    stock = slab_bytes_bound(image, Coverage()).each
    try:
        stack = thread_size(image)
    except UnknownKernelError:
        stack = _STACK_PAGES * page_size
    return Limits(
        charge_batch=MEMCG_CHARGE_BATCH,
        folio_batch=_folio_batch(image),
        block=block,
        stack=stack,
        slab_object=block * page_size if slab_object is None else slab_object,
        slab_stock=block * page_size if stock is None else stock,
        percpu=largest_percpu_charge(image),
        hugetlb=_hugetlb(image),
    )


def _hugetlb(image: Image) -> tuple[int, ...]:
    """Return the pages of a huge page of each size, if they are charged before there is one."""
    try:
        image.symbol("mem_cgroup_hugetlb_try_charge")  # 6.7 to 6.13
        if not accounts_hugetlb(image):
            return ()
        return tuple(1 << order for order in huge_page_orders(image))
    except (FaultError, UnknownKernelError):
        return ()


def _folio_batch(image: Image) -> int:
    """Return ``PAGEVEC_SIZE`` (``FOLIO_BATCH_SIZE`` since 7.1), from its array."""
    return array_length(member_type(image.type("struct folio_batch"), "folios"))
