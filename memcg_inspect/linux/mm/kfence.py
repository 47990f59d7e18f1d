# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pool of KFENCE
--------------

Mirrors :linux:`mm/kfence/core.c`. ``kfence_init_pool()`` marks each object page of the pool as a
slab, and the page then looks like a slab with one object. The counters of slab memory do not
include it.
"""

from __future__ import annotations

from typing import NamedTuple

from drgn import FaultError, TypeKind, offsetof, sizeof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.mm_types import page_layout
from memcg_inspect.linux.mm.mmzone import mem_map

__all__ = ("KfenceObject", "KfencePool", "kfence_object", "kfence_pages", "kfence_pool")

#: The most that ``CONFIG_KFENCE_NUM_OBJECTS`` can be.
_MOST_OBJECTS = 65535
#: The largest missing range of the array of metadata that is stepped over, in bytes.
_MOST_MISSING = 1 << 16


class KfenceObject(NamedTuple):
    """
    The object of an object page.

    :ivar address: address of the object
    :ivar size: its size, in bytes
    :ivar state: name in ``enum kfence_object_state``, in lower case and without prefix
    """

    address: int
    size: int
    state: str


def kfence_object(image: Image, page: int) -> KfenceObject | None:
    """
    Return the object of a page of the pool, ``addr_to_metadata()``.

    An object begins at the start of its page, or is aligned to the end of it.

    :param page: ``struct page *`` of a page of the pool
    :return: ``None`` for guard pages
    :raises drgn.FaultError: if the metadata of the object cannot be read
    :raises ValueError: if the page is not of the pool
    """
    # Two guard pages come first. Then each object page is followed by a guard page.
    number, is_guard = divmod(kfence_pages(image).index(page) - 2, 2)
    if number < 0 or is_guard:
        return None
    metadata = image.object("kfence_metadata")[number].read_()
    state = str(metadata.state.format_(type_name=False))
    return KfenceObject(
        int(metadata.addr), int(metadata.size), state.removeprefix("KFENCE_OBJECT_").lower()
    )


class KfencePool(NamedTuple):
    """
    The pool.

    :ivar pages: ``struct page *`` of all pages, guard pages included; empty if there is no pool
    :ivar unreadable: addresses of ``struct kfence_metadata`` of its objects that cannot be read
    """

    pages: range = range(0)
    unreadable: tuple[int, ...] = ()


def kfence_pages(image: Image) -> range:
    """Return the pages of the pool; see :attr:`KfencePool.pages`."""
    return kfence_pool(image).pages


@per_image
def kfence_pool(image: Image) -> KfencePool:
    """
    Return the pool.

    Its size is a macro, ``KFENCE_POOL_SIZE``. It is found from the metadata of the objects: object
    ``n`` must be in page ``2 * (n + 1)`` of the pool. Where that cannot be read, the page must be
    marked as a slab.
    """
    try:
        pool = int(image.object("__kfence_pool").value_())
        metadata = image.object("kfence_metadata")
        type_ = image.type("struct kfence_metadata")
    except UnknownKernelError:
        return KfencePool()
    # An array until commit cabdf74e6b31 ("mm: kfence: allocate kfence_metadata at runtime")
    # (in v6.6).
    is_pointer = metadata.type_.unaliased_kind() == TypeKind.POINTER
    address = metadata.value_() if is_pointer else metadata.address_
    if not pool or not address:
        return KfencePool()
    memory, frames, unreadable = image.memory, mem_map(image), list[int]()
    first = frames.virt_to_page(pool)
    size, addr, count = sizeof(type_), offsetof(type_, "addr"), 0
    for number in range(_MOST_OBJECTS):
        if (number - count) * size > _MOST_MISSING:
            break
        try:
            page = memory.word(address + number * size + addr) & ~(frames.page_size - 1)
        except FaultError:
            # It is the end of the array, or a part of it is missing.
            if _is_slab(image, first + 2 * (number + 1) * frames.size):
                unreadable.append(address + number * size)
                count = number + 1
            continue
        if page != pool + 2 * (number + 1) * frames.page_size:
            break
        count = number + 1
    pages = range(first, first + 2 * (count + 1) * frames.size, frames.size)
    return KfencePool(pages, tuple(unreadable))


def _is_slab(image: Image, page: int) -> bool:
    try:
        raw = image.memory.read(page, mem_map(image).size)
    except FaultError:
        return False
    return all(marker.is_set(raw) for marker in page_layout(image).slab)
