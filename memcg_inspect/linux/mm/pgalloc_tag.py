# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Call sites of pages
-------------------

Mirrors :linux:`include/linux/pgalloc_tag.h` and :linux:`mm/page_ext.c`. The first page of each
block that was allocated refers to its call site (:mod:`memcg_inspect.linux.mm.alloc_tag`):

- by a ``union codetag_ref`` in its ``struct page_ext``;
- since v6.13 ("alloc_tag: support for page allocation tag compression"), with
  ``sysctl.vm.mem_profiling=1,compressed``, by an index in the flags of the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import compress, repeat
from typing import NamedTuple

from drgn import FaultError
from drgn.helpers.linux.mmzone import pfn_to_section, pfn_to_section_nr, section_nr_to_pfn

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import has_type, static_key_enabled
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.alloc_tag import alloc_tag_size
from memcg_inspect.linux.mm.mm_types import (
    MEMCG_DATA_FLAGS,
    MEMCG_DATA_KMEM,
    PagePiece,
    RawPiece,
    page_layout,
)
from memcg_inspect.linux.mm.mm_types_columns import positions
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.page_alloc import BlockReader, bare_markers
from memcg_inspect.linux.mm.slab import CODETAG_EMPTY
from memcg_inspect.model import Coverage, ImageError

__all__ = ("PAGE_EXT_INVALID", "PageTagReader", "TaggedPages", "page_ext_bytes")

#: ``PAGE_EXT_INVALID``.
PAGE_EXT_INVALID = 1
#: ``CODETAG_ID_FIRST``. Lower indexes, ``CODETAG_ID_NULL`` and ``CODETAG_ID_EMPTY``, are no tags.
_FIRST_INDEX = 2
#: A page frame number after that of any page.
_END = 1 << 64


class TaggedPages(NamedTuple):
    """
    Blocks of pages with the same call site, kind, payer and node.

    :ivar codetag: ``struct codetag *`` of their call site
    :ivar kind: ``slab_page``, ``kmem``, ``lru``, or ``page`` for pages that no memcg pays for
    :ivar payer: ``struct obj_cgroup *``, up to 7.0 ``struct mem_cgroup *`` for user pages; 0 if
        no memcg pays
    :ivar nid: node
    :ivar calls: number of blocks, each of which is one allocation
    :ivar pages: number of pages
    """

    codetag: int
    kind: str
    payer: int
    nid: int
    calls: int
    pages: int


class _PageExt:
    """
    Finder of ``struct page_ext``, ``lookup_page_ext()``.

    :ivar size: ``page_ext_size``, in bytes
    :ivar offset: byte offset of the ``union codetag_ref`` in ``struct page_ext``
    :raises ImageError: if the kernel has no sections, or if the sizes cannot be right
    """

    def __init__(self, image: Image) -> None:
        self._image = image
        self.size = int(image.object("page_ext_size"))
        self.offset = int(image.object("page_alloc_tagging_ops").offset)
        most = mem_map(image).page_size
        if not 0 <= self.offset <= self.size - image.memory.word_size <= most:
            raise ImageError(
                f"page_ext_size is {self.size}, and the offset of call sites in it {self.offset}: "
                "one of them is damaged"
            )
        if not has_type(image, "struct mem_section"):
            raise ImageError("page_ext is known here with CONFIG_SPARSEMEM only")

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """
        Split a range of page frames by section.

        ``section->page_ext`` is biased: it is the address of the ``page_ext`` that page frame 0
        would have.

        :return: first page frame, last page frame plus 1, and the address of the ``union
            codetag_ref`` of page frame 0; 0 for a section without ``page_ext``
        :raises drgn.FaultError: if a section cannot be read
        """
        while start < end:
            number = pfn_to_section_nr(self._image.prog, start)
            section_end = min(end, int(section_nr_to_pfn(self._image.prog, number + 1)))
            page_ext = int(pfn_to_section(self._image.prog, start).page_ext.value_())
            has_none = not page_ext or page_ext & PAGE_EXT_INVALID
            yield start, section_end, 0 if has_none else page_ext + self.offset
            start = section_end


class _Indexes:
    """
    Finder of tags by the index in the flags of a page, ``idx_to_ref()``.

    Tags are numbered: first those of the kernel, then those of modules.

    :ivar shift: ``alloc_tag_ref_offs``: lowest bit of the index in the flags
    :ivar mask: ``alloc_tag_ref_mask``: mask of the index, after the shift
    :raises ImageError: if the shift cannot be right
    """

    def __init__(self, image: Image) -> None:
        self.shift = int(image.object("alloc_tag_ref_offs"))
        self.mask = int(image.object("alloc_tag_ref_mask"))
        if not 0 <= self.shift < 8 * image.memory.word_size:
            raise ImageError(f"alloc_tag_ref_offs is damaged: {self.shift}")
        self._size = alloc_tag_size(image)
        self._kernel = int(image.object("kernel_tags").first_tag.value_())
        self._count = int(image.object("kernel_tags").count)
        try:
            self._modules = int(image.object("module_tags").first_tag.value_())
        except UnknownKernelError:
            self._modules = 0  # CONFIG_MODULES=n

    def codetag(self, flags: int) -> int:
        """
        Return the tag that the flags of a page refer to.

        :param flags: ``page->flags``
        :return: ``struct codetag *``; 0 for none
        """
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
    """Return the bytes of ``struct page_ext`` that each page needs for its tag."""
    return 0 if _indexes(image) else int(image.object("page_alloc_tagging_ops").size)


class PageTagReader:
    """
    Reader of the call sites of pages.

    :ivar coverage: counts the pages whose tags were read, and those that are unreadable
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self.coverage = Coverage()
        self.memory, self.frames, self.layout = image.memory, mem_map(image), page_layout(image)
        self._indexes = _indexes(image)
        self._page_ext = None if self._indexes else _PageExt(image)
        #: The run that the last page was in.
        self._run = (0, 0, 0)
        self._bare = bare_markers(image)
        self._plain = BlockReader(image, self._is_tagged, self._miss_list)

    def codetag(self, page: int) -> int:
        """
        Return the call site of a block of pages, ``pgalloc_tag_get()``.

        :param page: ``struct page *`` of the first page
        :return: ``struct codetag *``; 0 for none
        :raises drgn.FaultError: if the reference to the tag cannot be read
        """
        if self._indexes is not None:
            return self._indexes.codetag(self.memory.word(page + self.frames.flags))
        assert self._page_ext is not None
        pfn = self.frames.pfn(page)
        start, end, base = self._run
        if not start <= pfn < end:
            start, end, base = self._run = next(self._page_ext.runs(pfn, _END))
        codetag = self.memory.word(base + pfn * self._page_ext.size) if base else 0
        return codetag if codetag > CODETAG_EMPTY else 0

    def read(self, piece: PagePiece) -> Iterator[TaggedPages]:
        """Return the blocks of pages that begin in a piece of the memory map, grouped."""
        raw = piece.raw
        if raw is None:
            self.coverage.miss("struct pages", piece.unreadable or 0, "not in the image")
            return
        tags = self._tags(raw)
        size, count = self.frames.size, len(tags)
        words = self.memory.words(raw.data, self.layout.memcg_data, size)
        slabs = {(slab.page - raw.page) // size for slab in piece.slabs}
        blocks = self._blocks(raw, tags)
        # Most blocks are single pages: they are counted all at once. Others come first.
        not_single = slabs | raw.orders.keys() | blocks.keys()
        for i in not_single:
            if tags[i]:
                kind, payer = ("slab_page", 0) if i in slabs else _owner(words[i])
                order = blocks[i] if i in blocks else raw.orders.get(i, 0)
                yield TaggedPages(tags[i], kind, payer, raw.nid(i), 1, 1 << order)
        for i in not_single:
            tags[i] = 0
        nids = repeat(raw.nids, count) if isinstance(raw.nids, int) else raw.nids
        singles = Counter(compress(zip(tags, words, nids, strict=True), tags))
        for (tag, word, nid), number in singles.items():
            kind, payer = _owner(word)
            yield TaggedPages(tag, kind, payer, nid, number, number)

    def _tags(self, raw: RawPiece) -> list[int]:
        """Return the ``struct codetag *`` of each page, 0 for none."""
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
        assert self._page_ext is not None
        try:
            runs = list(self._page_ext.runs(start, start + count))
        except FaultError as error:
            self.coverage.miss("page_ext of pages", raw.page, str(error))
            return [0] * count
        for first, end, base in runs:
            tags += self._read_ext(base, first, end) if base else [0] * (end - first)
        return tags

    def _read_ext(self, base: int, first: int, end: int) -> list[int]:
        assert self._page_ext is not None
        size, word = self._page_ext.size, self.memory.word_size
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
        Find the blocks of several pages that are not compound (allocated without ``__GFP_COMP``).

        Only the first page of such a block has a refcount and a tag. So a page that has a tag
        begins a block.

        :return: orders, by index of the first page in the piece
        """
        size, count, columns = self.frames.size, len(tags), raw.columns
        bare = columns.all_of(self._bare) & ~columns.of(self.layout.tail)
        tagged = int.from_bytes(bytes(map(bool, tags)), "little")
        # Candidates have a tag, are not bare, and are followed by a bare page. (One byte per page.)
        orders: dict[int, int] = {}
        for i in positions(tagged & ~bare & bare >> 8, count):
            first = raw.page + i * size
            if i in raw.orders or self.frames.pfn(first) & 1:
                continue
            order = self._plain.order(first)
            if order:
                orders[i] = order
        return orders

    def _miss_list(self, page: int, reason: str) -> None:
        self.coverage.miss("list of free pages", page, reason)

    def _is_tagged(self, page: int) -> bool:
        try:
            return bool(self.codetag(page))
        except FaultError:
            return True  # nothing is known of the page


def _owner(word: int) -> tuple[str, int]:
    payer = word & ~MEMCG_DATA_FLAGS
    if word & MEMCG_DATA_FLAGS == MEMCG_DATA_KMEM:
        return "kmem", payer
    if payer and not word & MEMCG_DATA_FLAGS:
        return "lru", payer
    return "page", 0
