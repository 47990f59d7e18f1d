# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``placement`` must name."""

from __future__ import annotations

from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import SlabReader
from support.free_pages import free_page
from support.planting import Fault, NoVictim, Planter, Subject, Write


def dangling(subject: Subject, _: int) -> Fault:
    """Copy a vector into a free page, and let its slab point to the copy."""
    memory, slabs = subject.image.memory, SlabReader(subject.image)
    for piece in scan_pages(subject.image):
        for slab in filter(None, map(slabs.slab, piece.slabs)):
            if (
                slab.charged
                and slabs.vector_page(slab) is not None
                and slab.objects <= 64
                and slab.vector.stride in (8, 16)
            ):
                vector = memory.read(slab.vector.address, slab.vector.stride * slab.objects)
                # A copy on another node is as wrong, and its page is found all the same.
                many = len(subject.report.image.nodes) > 1
                page = free_page(subject.prog, other_than=slab.nid if many else -1)
                target = mem_map(subject.image).virt(page)
                word = slab.page + slabs.layout.exts.word * memory.word_size
                return Fault(
                    (Write(target, vector), subject.put(word, target | memory.word(word) & 7)),
                    (),
                    {("?", slab.nid, "obj_exts", 1)},
                )
    raise NoVictim("no slab has a vector outside itself")


PLANTERS = (Planter("the place of a vector", dangling),)
