# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages for kvfree_rcu()
----------------------

Mirrors ``struct kfree_rcu_cpu`` of :linux:`mm/slab_common.c`, up to 6.14 of
:linux:`kernel/rcu/tree.c`. Each CPU has pages with arrays of pointers to free, which it is still
filling or which wait for readers, and keeps a few pages for more.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object, offsetof
from drgn.helpers.linux.percpu import per_cpu

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import list_entries, raise_fault
from memcg_inspect.linux.mm.mmzone import possible_cpus
from memcg_inspect.model import Coverage

__all__ = ("kvfree_rcu_pages",)

#: More pages than a list has.
_MOST_PAGES = 1 << 16


def kvfree_rcu_pages(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages that CPUs have.

    :param coverage: counts the CPUs that were read, and those that are unreadable
    :return: address of each page
    """
    if not has_member(image, "struct kfree_rcu_cpu", "bkvcache"):
        return
    try:
        caches = image.object("krc")
    except UnknownKernelError:
        return
    for cpu in possible_cpus(image):
        try:
            cache = per_cpu(caches, cpu)
            # A block begins with its link.
            yield from _linked(image, cache.bkvcache.first.value_(), 0)
            yield from _waiting(image, cache)
            coverage.read += 1
        except FaultError as error:
            coverage.miss("pages for kvfree_rcu()", error.address, str(error))


def _linked(image: Image, first: int, link: int) -> Iterator[int]:
    """
    Return the pages of a list that ends with ``NULL``.

    :param link: offset of the link in each page
    :raises drgn.FaultError: if it cannot be read, or does not end
    """
    seen: set[int] = set()
    while first:
        if first in seen or len(seen) == _MOST_PAGES:
            raise FaultError("the list does not end", first)
        seen.add(first)
        yield first
        first = image.memory.word(first + link)


def _waiting(image: Image, cache: Object) -> Iterator[int]:
    """
    Return the pages of a ``struct kfree_rcu_cpu`` with pointers.

    :raises drgn.FaultError: if a list cannot be read
    """
    # Lists with a head since v6.3.
    if not cache.type_.has_member("bulk_head"):
        link = offsetof(image.type("struct kvfree_rcu_bulk_data"), "next")
        for heads in (cache.bkvhead, *(work.bkvhead_free for work in cache.krw_arr)):
            for first in heads:
                yield from _linked(image, first.value_(), link)
        return
    for heads in (cache.bulk_head, *(work.bulk_head_free for work in cache.krw_arr)):
        for head in heads:
            for block in list_entries(
                image, "struct kvfree_rcu_bulk_data", head.address_of_(), "list", raise_fault
            ):
                yield block.value_()
