# SPDX-License-Identifier: LGPL-2.1-or-later
"""Memory that allocation profiling itself takes."""

from __future__ import annotations

from typing import NamedTuple

from drgn import FaultError, offsetof, sizeof
from drgn.helpers.linux.mm import totalram_pages
from drgn.helpers.linux.mmzone import section_nr_to_pfn

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.alloc_tag import read_call_sites, tag_ranges
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map, possible_cpus, present_sections
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.pgalloc_tag import PAGE_EXT_INVALID, page_ext_bytes
from memcg_inspect.linux.mm.show_mem import miss_lost_pages
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.model import Coverage

__all__ = ("Cost", "read_costs", "total_memory")


class Cost(NamedTuple):
    """
    Memory that one part of allocation profiling takes.

    :ivar what: ``tags``, ``counters``, ``page_ext``, ``slab_exts``, ``slab_exts_inside`` or
        ``percpu_exts``
    :ivar number: number of elements
    :ivar bytes: bytes of all elements
    """

    what: str
    number: int
    bytes: int


def total_memory(image: Image) -> int:
    """Return the memory that the kernel manages, ``MemTotal``, in bytes."""
    return int(totalram_pages(image.prog)) << mem_map(image).page_shift


def read_costs(image: Image, coverage: dict[str, Coverage]) -> list[Cost]:
    """Return the memory that each part of profiling takes, including parts that take none."""
    return [*_tags(image, coverage), _page_ext(image, coverage), *_exts(image, coverage)]


def _tags(image: Image, coverage: dict[str, Coverage]) -> list[Cost]:
    listed = coverage["call_sites"] = Coverage()
    sites = read_call_sites(image, listed)
    counters = {site.counters for site in sites.values() if site.counters}
    size = sizeof(image.type("struct alloc_tag_counters")) * len(possible_cpus(image))
    tags = sum(stop - start for start, stop in tag_ranges(image, Coverage()))
    return [
        Cost("tags", len(sites), tags),
        Cost("counters", len(counters), size * len(counters)),
    ]


def _page_ext(image: Image, coverage: dict[str, Coverage]) -> Cost:
    sections = coverage["sections"] = Coverage()
    size, pages = page_ext_bytes(image), 0
    if size:
        each = int(section_nr_to_pfn(image.prog, 1))
        offset = offsetof(image.type("struct mem_section"), "page_ext")
        try:
            for section in present_sections(image):
                base = image.memory.word_at(section, offset)
                sections.read += 1
                pages += each if base and not base & PAGE_EXT_INVALID else 0
        except FaultError as error:
            sections.miss("sections of page frames", error.address, str(error))
    return Cost("page_ext", pages, pages * size)


def _exts(image: Image, coverage: dict[str, Coverage]) -> list[Cost]:
    """Return the vectors of codetags of slab objects and percpu allocations."""
    word, slabs = image.memory.word_size, SlabReader(image)
    apart = inside = 0
    pages = coverage["pages"] = Coverage()
    for piece in scan_pages(image):
        pages.read += piece.pages
        if piece.unreadable is not None:
            pages.miss("struct pages", piece.unreadable, "not in the image")
        for wrong in piece.wrong:
            if wrong.kind == "slab":
                pages.miss("order of a compound page", wrong.page, wrong.reason)
        for slab in filter(None, map(slabs.slab, piece.slabs)):
            vector = slabs.codetags(slab)
            if vector is not None:
                is_inside = slabs.page_of(slab, vector) is None
                inside += slab.objects if is_inside else 0
                apart += 0 if is_inside else slab.objects
    miss_lost_pages(image, pages)
    percpu = PercpuReader(image)
    units = sum(percpu.units(chunk) for chunk in percpu.chunks() if chunk.vector)
    coverage["slab"], coverage["percpu"] = slabs.coverage, percpu.coverage
    return [
        Cost("slab_exts", apart, apart * word),
        # Since 7.0: in the unused space of a slab, or in the objects, which are then larger.
        Cost("slab_exts_inside", inside, inside * word),
        Cost("percpu_exts", units, units * word),
    ]
