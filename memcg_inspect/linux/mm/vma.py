# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memory areas of processes
-------------------------

Mirrors ``for_each_vma()`` of :linux:`include/linux/mm.h`, for the tree that :linux:`mm/vma.c`
keeps. drgn's helper of that name does not end where damaged pointers make a circle.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object

from memcg_inspect.image.image import Image
from memcg_inspect.linux.lib.maple_tree import maple_entries

__all__ = ("vmas",)


def vmas(image: Image, mm: Object) -> Iterator[Object]:
    """
    Iterate over the memory areas of a process, in no particular order.

    :param mm: ``struct mm_struct *``
    :return: ``struct vm_area_struct *``
    :raises drgn.FaultError: if they cannot be read, or if their tree or list is broken
    """
    # Commit 763ecb035029 ("mm: remove the vma linked list") (in v6.1).
    if mm.type_.type.has_member("mm_mt"):
        for entry in maple_entries(image, mm.mm_mt.address_of_()):
            yield image.pointer("struct vm_area_struct *", entry)
        return
    area, seen = mm.mmap.read_(), set[int]()
    while area:
        if area.value_() in seen:
            raise FaultError("the list of memory areas is a circle", area.value_())
        seen.add(area.value_())
        yield area
        area = area.vm_next.read_()
