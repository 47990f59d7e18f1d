# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A plain walk of percpu allocations, one bit at a time.

It shares no code with the package.
"""

from __future__ import annotations

from typing import NamedTuple

from drgn import Object, Program
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mm import follow_page, page_to_pfn

from support.charge_module import PAGE


class PlainArea(NamedTuple):
    """
    An allocation.

    :ivar chunk: ``struct pcpu_chunk *``
    :ivar base: ``chunk->base_addr``
    :ivar offset: bytes from the start of the chunk
    :ivar size: bytes of one copy
    :ivar objcg: ``struct obj_cgroup *``; 0 if it is not charged
    """

    chunk: int
    base: int
    offset: int
    size: int
    objcg: int


def _bit(word: Object, index: int) -> bool:
    return bool(word[index // 64].value_() >> index % 64 & 1)


def plain_areas(prog: Program) -> list[PlainArea]:
    """Return all allocations, found one bit at a time."""
    found: list[PlainArea] = []
    for slot in range(prog["pcpu_nr_slots"].value_()):
        head = prog["pcpu_chunk_lists"][slot].address_of_()
        for chunk in list_for_each_entry("struct pcpu_chunk", head, "list"):
            units = chunk.nr_pages.value_() * PAGE // 4
            bounds = [unit for unit in range(units + 1) if _bit(chunk.bound_map, unit)]
            for start, end in zip(bounds, bounds[1:], strict=False):
                if not _bit(chunk.alloc_map, start):
                    continue
                if start * 4 < chunk.start_offset.value_():
                    continue
                if start * 4 >= units * 4 - chunk.end_offset.value_():
                    continue
                objcg = 0
                if hasattr(chunk, "obj_exts") and chunk.obj_exts:
                    objcg = chunk.obj_exts[start].cgroup.value_()
                elif hasattr(chunk, "obj_cgroups") and chunk.obj_cgroups:
                    objcg = chunk.obj_cgroups[start].value_()
                base = chunk.base_addr.value_()
                found.append(PlainArea(chunk.value_(), base, start * 4, (end - start) * 4, objcg))
    return found


def nid_of(prog: Program, spans: list[tuple[int, int, int]], address: int) -> int:
    page = address // PAGE
    known = prog.cache.setdefault("nids of the test", {})
    if page not in known:
        pfn = page_to_pfn(follow_page(prog["init_mm"].address_of_(), page * PAGE)).value_()
        known[page] = next(nid for start, end, nid in spans if start <= pfn < end)
    return int(known[page])
