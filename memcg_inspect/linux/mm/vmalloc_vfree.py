# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Vmalloc areas that are being freed
----------------------------------

Mirrors ``vfree()`` of :linux:`mm/vmalloc.c` (``__vunmap()`` up to 6.2) and
``__vmalloc_area_node()``.

``vfree()`` takes an area off the list of all areas before it frees its pages, and takes them out of
``NR_VMALLOC`` or ``MEMCG_VMALLOC`` one by one. Until it is done, only the stack of the task that
runs it points to the ``struct vm_struct``. Up to 7.0, ``__vmalloc_area_node()`` adds the pages to
``MEMCG_VMALLOC`` one by one, after all of them are in the area, which is on the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby

from drgn import FaultError, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import constant, member_type
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.linux.mm.debug import page_at
from memcg_inspect.linux.mm.mm_types import MEMCG_DATA_FLAGS, MEMCG_DATA_KMEM, page_layout
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges
from memcg_inspect.linux.mm.vmalloc import VM_ALLOC, linked_areas
from memcg_inspect.model import PagesOfArea, PartialArea

__all__ = ("PartialAreaReader",)

#: ``VM_MAP_PUT_PAGES`` of :linux:`include/linux/vmalloc.h`: ``vfree()`` frees the pages, which
#: ``vmap()`` did not count.
_VM_MAP_PUT_PAGES = 0x200


class PartialAreaReader:
    """Finds vmalloc areas whose pages a task is counting or freeing."""

    def __init__(self, image: Image) -> None:
        self._image = image
        vm_type = image.type("struct vm_struct")
        names = ("addr", "size", "flags", "pages", "nr_pages")
        self._at = {name: offsetof(vm_type, name) for name in names}
        self._size = sizeof(vm_type)
        # unsigned int in 6.12, unsigned long in 7.2
        self._count_size = sizeof(member_type(vm_type, "nr_pages"))
        self._linked = {untagged(image, area) for area in linked_areas(image)}
        self._most = sum(part.end - part.start for part in page_ranges(image))
        # Since 7.1, the pages of an area on the list are counted.
        self._counts_each = constant(image, "NR_VMALLOC") is not None

    def read(self, objects: Iterable[int], words: Sequence[int]) -> tuple[PartialArea, ...]:
        """
        Return the areas among some slab objects.

        :param objects: addresses of the objects that the registers and the stack of a task point to
        :param words: its registers and its stack
        """
        found = []
        for address in dict.fromkeys(objects):
            with suppress(FaultError):
                area = self._area(address, words)
                if area is not None:
                    found.append(area)
        return tuple(found)

    def _area(self, address: int, words: Sequence[int]) -> PartialArea | None:
        memory, frames, at = self._image.memory, mem_map(self._image), self._at
        is_linked = untagged(self._image, address) in self._linked
        data = memory.read(address, self._size)
        pages, flags = memory.word_at(data, at["pages"]), memory.word_at(data, at["flags"])
        start, size = memory.word_at(data, at["addr"]), memory.word_at(data, at["size"])
        count = int.from_bytes(data[at["nr_pages"] :][: self._count_size], memory.order)
        if not flags & VM_ALLOC or not pages or (is_linked and self._counts_each):
            return None
        if start % frames.page_size or size % frames.page_size:
            return None  # another object than a struct vm_struct
        if not 0 < count <= min(self._most, size >> frames.page_shift):
            return None
        entries = memory.words(memory.read(pages, count * memory.word_size))
        left = self._left(entries)
        first = count - sum(run.pages for run in left)
        return PartialArea(
            address=address,
            nr_pages=count,
            is_linked=is_linked,
            is_counted=not flags & _VM_MAP_PUT_PAGES,
            left=left,
            stops=self._stops(pages, entries, first, words),
        )

    def _left(self, entries: Sequence[int]) -> tuple[PagesOfArea, ...]:
        """
        Return the last pages of an area, as far as all of them are allocated.

        The pages are freed in their order. A page that was freed may be in use again.
        """
        found: list[tuple[int, int]] = []
        for page in reversed(entries):
            place = self._page(page)
            if place is None:
                break
            found.append(place)
        return tuple(
            PagesOfArea(payer, nid, len(list(some)))
            for (payer, nid), some in groupby(reversed(found))
        )

    def _page(self, page: int) -> tuple[int, int] | None:
        """Return who pays for a page, and its node; ``None`` if it is not allocated by itself."""
        image, frames, layout = self._image, mem_map(self._image), page_layout(self._image)
        if not page or page_at(image, page) != page:
            return None
        raw = image.memory.read(page, frames.size)
        if not any(raw[layout.refcount : layout.refcount + 4]) or layout.head.is_set(raw):
            return None
        data = image.memory.word_at(raw, layout.memcg_data)
        is_kmem = data & MEMCG_DATA_FLAGS == MEMCG_DATA_KMEM
        nid = frames.nid(image.memory.word_at(raw, frames.flags))
        return data & ~MEMCG_DATA_FLAGS if is_kmem else 0, nid

    def _stops(
        self, pages: int, entries: Sequence[int], first: int, words: Sequence[int]
    ) -> tuple[int, ...]:
        """
        Return the indexes that the task may have come to, by its registers and its stack.

        These have the index itself, or a pointer to an entry of ``vm_struct.pages``, or to the page
        of an entry: that of the page at hand, or of the next one. The page at hand may be counted
        already, or not.

        :param pages: ``vm_struct.pages``
        :param first: index of the first page of those that are left
        """
        size, count = self._image.memory.word_size, len(entries)
        index_of = {page: i for i, page in enumerate(entries) if page}
        found = {first, count}
        for word in words:
            index = index_of.get(word, -1)
            if pages <= word <= pages + count * size:
                index = (word - pages) // size
            elif 0 < word <= count:
                index = word
            if index >= 0:
                found |= {index - 1, index, index + 1}
        return tuple(sorted(i for i in found if first <= i <= count))
