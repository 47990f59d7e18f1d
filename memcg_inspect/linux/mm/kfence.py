# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The pool of kfence
------------------

Mirrors :linux:`mm/kfence/core.c`. Each object page of the pool is made to look like a slab of
one object, but is in no counter of slabs.
"""

from __future__ import annotations

from typing import NamedTuple

from drgn import FaultError, TypeKind, offsetof, sizeof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.mmzone import mem_map

__all__ = ("KfenceObject", "kfence_object", "kfence_pages")

#: More objects than any pool has: CONFIG_KFENCE_NUM_OBJECTS is at most 65535.
_MOST_OBJECTS = 65535
#: Bytes of the array that may be missing from a dump at one place.
_GAP = 1 << 16


class KfenceObject(NamedTuple):
    """
    The one object of a page of the pool.

    :ivar state: of ``enum kfence_object_state``, without its prefix
    """

    address: int
    size: int
    state: str


def kfence_object(image: Image, page: int) -> KfenceObject | None:
    """
    Return the object of a page of the pool; it begins wherever it suits kfence.

    :param page: ``struct page *``
    :return: ``None`` for guard pages
    :raises drgn.FaultError: if it cannot be read
    """
    number, is_guard = divmod(kfence_pages(image).index(page) - 2, 2)
    if number < 0 or is_guard:
        return None
    metadata = image.object("kfence_metadata")[number].read_()
    state = str(metadata.state.format_(type_name=False))
    return KfenceObject(
        int(metadata.addr), int(metadata.size), state.removeprefix("KFENCE_OBJECT_").lower()
    )


@per_image
def kfence_pages(image: Image) -> range:
    """
    Return the pages of the pool.

    Its length is a macro, but each object's metadata holds the address of its page, every
    second one.

    :return: ``struct page *`` addresses; empty if there is no pool
    """
    try:
        pool = int(image.object("__kfence_pool").value_())
        metadata = image.object("kfence_metadata")
        type_ = image.type("struct kfence_metadata")
    except UnknownKernelError:
        return range(0)
    # An array until commit cabdf74e6b31 ("mm: kfence: allocate kfence_metadata at runtime")
    # (in v6.6).
    is_pointer = metadata.type_.unaliased_kind() == TypeKind.POINTER
    address = metadata.value_() if is_pointer else metadata.address_
    if not pool or not address:
        return range(0)
    memory, frames = image.memory, mem_map(image)
    size, addr, count = sizeof(type_), offsetof(type_, "addr"), 0
    for number in range(_MOST_OBJECTS):
        if (number - count) * size > _GAP:
            break
        try:
            page = memory.word(address + number * size + addr) & ~(frames.page_size - 1)
        except FaultError:
            continue  # the end of the array, or part of it is not in the image
        if page != pool + 2 * (number + 1) * frames.page_size:
            break
        count = number + 1
    first = frames.virt_to_page(pool)
    return range(first, first + 2 * (count + 1) * frames.size, frames.size)
