# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages for kvfree_rcu()
----------------------

Mirrors ``struct kfree_rcu_cpu`` of :linux:`mm/slab_common.c`, up to 6.14 of
:linux:`kernel/rcu/tree.c`: each CPU keeps a few pages for arrays of pointers.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError
from drgn.helpers.linux.percpu import per_cpu

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.mmzone import possible_cpus
from memcg_inspect.model import Coverage

__all__ = ("kvfree_rcu_pages",)

#: More pages than ``rcu_min_cached_objs`` asks for.
_MOST_PAGES = 1 << 16


def kvfree_rcu_pages(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages that CPUs keep.

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
        seen: set[int] = set()
        try:
            # A block begins with its link.
            address = per_cpu(caches, cpu).bkvcache.first.value_()
            while address:
                if address in seen or len(seen) == _MOST_PAGES:
                    raise FaultError("the list does not end", address)
                seen.add(address)
                yield address
                address = image.memory.word(address)
            coverage.read += 1
        except FaultError as error:
            coverage.miss("pages for kvfree_rcu()", error.address, str(error))
