# SPDX-License-Identifier: LGPL-2.1-or-later
"""All slabs and large kmallocs of an image, by payer, cache and node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from memcg_inspect.collect.collector import kept_slabs
from memcg_inspect.collect.page_uses import compound_pages_of_others, page_uses
from memcg_inspect.collect.ranges import walk_ranges
from memcg_inspect.collect.slab_cells import SlabCells
from memcg_inspect.image.image import Image
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.mm.mm_types import scan_range
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.page_alloc import BlockReader
from memcg_inspect.linux.mm.show_mem import miss_lost_pages
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.model import Coverage

__all__ = ("read_slabs",)


def read_slabs(
    image: Image, payer: Callable[[int], int | None], coverage: defaultdict[str, Coverage]
) -> SlabCells:
    """
    Read all slabs and large kmallocs, unless an earlier command of a session has done so.

    :param payer: returns the memcg that pays, ``struct mem_cgroup *``, for a ``struct obj_cgroup
        *``
    :param coverage: counts what was read, by subject
    """
    kept = kept_slabs(image)
    if kept is not None:
        for subject in ("vmalloc", "stacks", "compound", "pages", "slab"):
            coverage[subject].add(kept[1].get(subject, Coverage()))
        return kept[0]
    found, reader = SlabCells(image, payer), _RangeReader(image, payer, coverage)
    unnamed: dict[int, str] = {}
    for part in walk_ranges(image, reader):
        found.merge(part.cells)
        coverage["pages"].add(part.pages)
        coverage["slab"].add(part.slabs)
        unnamed |= part.unnamed
    miss_lost_pages(image, coverage["pages"])
    for address, reason in unnamed.items():
        coverage["names"].miss("name of a kmem_cache", address, reason)
    return found


class _Part(NamedTuple):
    """
    The slabs and large kmallocs of a range of page frames.

    :ivar cells: sums
    :ivar pages: counts the ``struct page`` that were read
    :ivar slabs: counts the slabs that were read
    :ivar unnamed: why the name of a cache could not be read, by ``struct kmem_cache *``
    """

    cells: SlabCells
    pages: Coverage
    slabs: Coverage
    unnamed: Mapping[int, str]


class _RangeReader:
    """Reads ranges of page frames."""

    def __init__(
        self, image: Image, payer: Callable[[int], int | None], coverage: defaultdict[str, Coverage]
    ) -> None:
        self._image, self._payer = image, payer
        self._uses, self._slabs = page_uses(image, coverage), SlabReader(image)
        self._others = compound_pages_of_others(image, coverage["compound"])
        self._blocks = BlockReader(image)

    def __call__(self, part: PageRange) -> _Part:
        """Read a range."""
        image, found = self._image, SlabCells(self._image, self._payer)
        pages, self._slabs.coverage = Coverage(), Coverage()
        for piece in scan_range(image, part):
            pages.read += piece.pages
            if piece.unreadable is not None:
                why = STOPPED if image.progress.stop else "not in the image"
                pages.miss("struct pages", piece.unreadable, why)
            for wrong in piece.wrong:
                if wrong.kind in ("slab", "kmem"):
                    pages.miss("order of a compound page", wrong.page, wrong.reason)
            for page in piece.slabs:
                slab = self._slabs.slab(page)
                if slab is not None:
                    found.add(slab)
            for kmem in piece.kmem:
                use, size = self._uses.of(kmem, self._blocks)
                if use == "large_kmalloc" and kmem.page not in self._others:
                    found.add_large(kmem, size)
            found.add_all_large(piece)
        return _Part(found, pages, self._slabs.coverage, self._slabs.unnamed)
