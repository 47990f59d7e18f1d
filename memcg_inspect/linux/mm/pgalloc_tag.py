# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Call sites of pages
-------------------

Mirrors :linux:`include/linux/pgalloc_tag.h` and :linux:`mm/page_ext.c`. The first page of
every block that was allocated refers to its call site: in its ``page_ext``, or, compressed, by
an index in the flags of the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import compress, repeat
from typing import NamedTuple

from drgn import FaultError, offsetof
from drgn.helpers.linux.mmzone import pfn_to_section, pfn_to_section_nr, section_nr_to_pfn

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import has_type, static_key_enabled
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.alloc_tag import alloc_tag_size
from memcg_inspect.linux.mm.mm_types import (
    MEMCG_DATA_FLAGS,
    MEMCG_DATA_KMEM,
    Marker,
    PagePiece,
    RawPiece,
    page_layout,
    positions,
)
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.page_alloc import cached_free_pages
from memcg_inspect.linux.mm.slab import CODETAG_EMPTY
from memcg_inspect.model import Coverage, ImageError

__all__ = ("PAGE_EXT_INVALID", "PageTagReader", "TaggedPages", "page_ext_bytes")

#: ``PAGE_EXT_INVALID``.
PAGE_EXT_INVALID = 1
#: ``CODETAG_ID_FIRST``: indexes below it stand for no tag.
_FIRST_INDEX = 2
#: What is in the type of a page that has none.
_NO_TYPE = 0xFF


class TaggedPages(NamedTuple):
    """
    Blocks of pages that are alike.

    :ivar codetag: of their call site, ``struct codetag *``
    :ivar kind: ``slab_page``, ``kmem``, ``lru``, or ``page`` for what no memcg pays for
    :ivar payer: ``struct obj_cgroup *``, before 7.2 for user pages ``struct mem_cgroup *``; 0
        for nobody
    :ivar calls: how many blocks
    :ivar pages: how many pages
    """

    codetag: int
    kind: str
    payer: int
    nid: int
    calls: int
    pages: int


class _Sections:
    """Finds the ``page_ext`` of page frames."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self.size = int(image.object("page_ext_size"))
        self.offset = int(image.object("page_alloc_tagging_ops").offset)
        if not has_type(image, "struct mem_section"):
            raise ImageError("page_ext is known here with CONFIG_SPARSEMEM only")

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """
        Split page frames up by section.

        :return: first page frame, the one behind the last, and where the tag of page frame 0
            would be, 0 if the section has none
        """
        while start < end:
            number = pfn_to_section_nr(self._image.prog, start)
            upto = min(end, int(section_nr_to_pfn(self._image.prog, number + 1)))
            base = int(pfn_to_section(self._image.prog, start).page_ext.value_())
            has_none = not base or base & PAGE_EXT_INVALID
            yield start, upto, 0 if has_none else base + self.offset
            start = upto


class _Indexes:
    """
    Finds tags by the index in the flags of a page.

    Since v6.13 ("alloc_tag: support for page allocation tag compression").
    """

    def __init__(self, image: Image) -> None:
        self.shift = int(image.object("alloc_tag_ref_offs"))
        self.mask = int(image.object("alloc_tag_ref_mask"))
        self._size = alloc_tag_size(image)
        self._kernel = int(image.object("kernel_tags").first_tag.value_())
        self._count = int(image.object("kernel_tags").count)
        try:
            self._modules = int(image.object("module_tags").first_tag.value_())
        except UnknownKernelError:
            self._modules = 0  # CONFIG_MODULES=n

    def codetag(self, flags: int) -> int:
        """Return the ``struct codetag *`` that a flags word refers to, or 0."""
        index = (flags >> self.shift & self.mask) - _FIRST_INDEX
        if index < 0:
            return 0
        if index < self._count:
            return self._kernel + index * self._size
        return self._modules + (index - self._count) * self._size


@per_image
def _indexes(image: Image) -> _Indexes | None:
    return _Indexes(image) if static_key_enabled(image, "mem_profiling_compressed") else None


def page_ext_bytes(image: Image) -> int:
    """Return the bytes that each page has for its tag, beside its ``struct page``."""
    return 0 if _indexes(image) else int(image.object("page_alloc_tagging_ops").size)


class PageTagReader:
    """
    Reads which call sites pages refer to.

    :ivar coverage: pages read and pages whose tags could not be read
    :ivar free: lists of free pages, which tell where blocks end that are not compound
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self.coverage = Coverage()
        self.free = Coverage()
        self.memory, self.frames, self.layout = image.memory, mem_map(image), page_layout(image)
        self._indexes = _indexes(image)
        self._sections = None if self._indexes else _Sections(image)
        count = offsetof(image.type("struct page"), "_refcount")
        #: Pages that nobody holds, and that have no type: free ones, and all but the first one
        #: of blocks that are not compound.
        self._bare = [
            *(Marker(count + n, 0xFF, 0) for n in range(4)),
            *(Marker(self.layout.page_type + n, 0xFF, _NO_TYPE) for n in range(4)),
        ]

    @cached_property
    def _cached(self) -> set[int]:
        return cached_free_pages(self.image, self.free)

    def codetag(self, page: int) -> int:
        """
        Return the call site of a block of pages.

        :param page: its first ``struct page *``
        :return: ``struct codetag *``; 0 if it refers to none
        :raises drgn.FaultError: if that cannot be read
        """
        if self._indexes is not None:
            return self._indexes.codetag(self.memory.word(page + self.frames.flags))
        assert self._sections is not None
        pfn = self.frames.pfn(page)
        ((_, _, base),) = self._sections.runs(pfn, pfn + 1)
        codetag = self.memory.word(base + pfn * self._sections.size) if base else 0
        return codetag if codetag > CODETAG_EMPTY else 0

    def read(self, piece: PagePiece) -> Iterator[TaggedPages]:
        """Return the blocks of pages that begin in a piece of the memory map."""
        raw = piece.raw
        if raw is None:
            self.coverage.miss("struct pages", piece.unreadable or 0, "not in the image")
            return
        tags = self._tags(raw)
        size, count = self.frames.size, len(tags)
        words = self.memory.words(raw.data, self.layout.memcg_data, size)
        slabs = {(slab.page - raw.page) // size for slab in piece.slabs}
        blocks = self._blocks(raw, tags)
        apart = slabs | raw.orders.keys() | blocks.keys()
        for i in apart:
            if tags[i]:
                kind, payer = ("slab_page", 0) if i in slabs else _owner(words[i])
                order = blocks[i] if i in blocks else raw.orders.get(i, 0)
                yield TaggedPages(tags[i], kind, payer, raw.nid(i), 1, 1 << order)
        for i in apart:
            tags[i] = 0
        nids = repeat(raw.nids, count) if isinstance(raw.nids, int) else raw.nids
        alike = Counter(compress(zip(tags, words, nids, strict=True), tags))
        for (tag, word, nid), number in alike.items():
            kind, payer = _owner(word)
            yield TaggedPages(tag, kind, payer, nid, number, number)

    def _tags(self, raw: RawPiece) -> list[int]:
        """The ``struct codetag *`` of each page, 0 for none."""
        size = self.frames.size
        count = len(raw.data) // size
        if self._indexes is not None:
            known: dict[int, int] = {}
            mask = self._indexes.mask << self._indexes.shift
            tags = []
            for word in self.memory.words(raw.data, self.frames.flags, size):
                word &= mask
                tag = known.get(word)
                if tag is None:
                    tag = known[word] = self._indexes.codetag(word)
                tags.append(tag)
            self.coverage.read += count
            return tags
        start = self.frames.pfn(raw.page)
        tags = []
        assert self._sections is not None
        try:
            runs = list(self._sections.runs(start, start + count))
        except FaultError as error:
            self.coverage.miss("page_ext of pages", raw.page, str(error))
            return [0] * count
        for first, end, base in runs:
            tags += self._read_ext(base, first, end) if base else [0] * (end - first)
        return tags

    def _read_ext(self, base: int, first: int, end: int) -> list[int]:
        assert self._sections is not None
        size, word = self._sections.size, self.memory.word_size
        length = (end - first) * size - (size - word)
        tags: list[int] = []
        for offset, data in self.memory.pieces(base + first * size, length, size):
            if data is None:
                parts = min(end - first - len(tags), max(4096 // size, 1))
                self.coverage.miss("page_ext of pages", base + first * size + offset, "missing")
                tags += [0] * parts
            else:
                words = self.memory.words(data, 0, size)
                tags += words
                self.coverage.read += len(words)
        return [tag if tag > CODETAG_EMPTY else 0 for tag in tags]

    def _blocks(self, raw: RawPiece, tags: list[int]) -> dict[int, int]:
        """
        Find blocks of several pages that are not compound: nothing stores their order.

        Only their first page is held and refers to a call site. A block of order n is followed
        by another one at the page 2^n behind its first: what begins there is held, has a type
        or a tag, or is free. A page of which nothing of this is true is inside the block.

        :return: orders, by the index of the first page
        """
        size, count = self.frames.size, len(tags)
        bare = int.from_bytes(b"\1" * count, "little")
        for marker in self._bare:
            bare &= marker.column(raw.data, size)
        bare &= ~self.layout.tail.column(raw.data, size)
        tagged = int.from_bytes(bytes(map(bool, tags)), "little")
        orders: dict[int, int] = {}
        for i in positions(tagged & ~bare & bare >> 8, count):
            first = raw.page + i * size
            if i in raw.orders or self.frames.pfn(first) & 1:
                continue
            order = self._order(first)
            if order:
                orders[i] = order
        return orders

    def _order(self, first: int) -> int:
        pfn, order = self.frames.pfn(first), 0
        # Where not all free pages are known, a free one would be taken for a part of the block.
        cached = self._cached
        if self.free.unreadable:
            return 0
        while not pfn >> order & 1:
            if self._begins(first + (self.frames.size << order), cached):
                break
            order += 1
        return order

    def _begins(self, page: int, cached: set[int]) -> bool:
        """Whether a page is the first of some block."""
        if page in cached:
            return True
        try:
            raw = self.memory.read(page, self.frames.size)
            is_bare = all(raw[m.offset] & m.mask == m.value for m in self._bare)
            return not is_bare or bool(self.codetag(page))
        except FaultError:
            return True  # the end of the memory map


def _owner(word: int) -> tuple[str, int]:
    payer = word & ~MEMCG_DATA_FLAGS
    if word & MEMCG_DATA_FLAGS == MEMCG_DATA_KMEM:
        return "kmem", payer
    if payer and not word & MEMCG_DATA_FLAGS:
        return "lru", payer
    return "page", 0
