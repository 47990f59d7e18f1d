# SPDX-License-Identifier: LGPL-2.1-or-later
"""
One page, told in full
----------------------

Mirrors :linux:`include/linux/page-flags.h` and the free lists of :linux:`mm/page_alloc.c`.
The pass over all pages takes columns out of many; this looks at a single one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from typing import NamedTuple

from drgn import FaultError, Object, offsetof
from drgn.helpers.linux.mm import compound_head, in_direct_map

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import array_length, constant, has_type, member_type
from memcg_inspect.linux.mm.mm_types import (
    MEMCG_DATA_FLAGS,
    MEMCG_DATA_KMEM,
    RawPiece,
    SlabPage,
    page_layout,
)
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges
from memcg_inspect.linux.mm.page_flags import page_flags
from memcg_inspect.model import Coverage

__all__ = (
    "Folio",
    "PageInfo",
    "count_payers",
    "folios_of",
    "page_at",
    "page_behind",
    "read_page",
    "swap_cache_bits",
)

#: Page types while they were macros, before commit ff202303c398 ("mm: convert page type macros
#: to enum") (in v6.10): bits of ``page_type`` that are clear.
_MACROS = {"buddy": 0x80, "offline": 0x100, "table": 0x200, "guard": 0x400}
#: ``PAGE_TYPE_BASE``: set in all types that are such bits.
_BASE = 0xF0000000


class PageInfo(NamedTuple):
    """
    A page frame.

    :ivar page: its ``struct page *``
    :ivar head: that of the first page of the compound page, or of the free block, that it is in
    :ivar order: of that block
    :ivar type: name in ``enum pagetype``; ``""`` if it has none
    :ivar reserved: ``PG_reserved``
    :ivar refs: ``_refcount`` of the head
    :ivar is_kmem: ``MEMCG_DATA_KMEM``
    :ivar payer: ``struct obj_cgroup *``; of user pages before 7.2 ``struct mem_cgroup *``; 0 for
        nobody
    :ivar mapping, pgoff: what it is of, and which page of that, if it is a user page
    :ivar slab: what reads slabs, if it is one
    """

    page: int
    pfn: int
    nid: int
    head: int
    order: int
    type: str
    reserved: bool
    refs: int
    is_kmem: bool
    payer: int
    mapping: int
    pgoff: int
    swap_cache: bool
    slab: SlabPage | None


def page_behind(image: Image, address: int) -> int | None:
    """
    Return the page that an address in the direct map is on.

    :return: ``struct page *``; ``None`` if there is none
    """
    if not in_direct_map(image.prog, address):
        return None
    page = mem_map(image).virt_to_page(address)
    return page if _is_valid(image, page) else None


def page_at(image: Image, address: int) -> int | None:
    """
    Return the ``struct page *`` that an address is in.

    :return: ``None`` if it is not in the memory map
    """
    frames = mem_map(image)
    page = address - (address - frames.base) % frames.size
    return page if address >= frames.base and _is_valid(image, page) else None


def _is_valid(image: Image, page: int) -> bool:
    pfn = mem_map(image).pfn(page)
    return any(start <= pfn < end for start, end in page_ranges(image))


def read_page(image: Image, page: int) -> PageInfo:
    """
    Read a page.

    :param page: ``struct page *``
    :raises drgn.FaultError: if it cannot be read
    """
    memory, frames, layout = image.memory, mem_map(image), page_layout(image)
    head = compound_head(Object(image.prog, "struct page *", page)).value_()
    raw, order = memory.read(head, frames.size), 0
    if layout.head.is_set(raw):
        order = memory.read(head + frames.size + layout.order, 1)[0]
    free = _free_block(image, page)
    if free is not None:
        head, order = free
        raw = memory.read(head, frames.size)
    flags, data = memory.word_at(raw, frames.flags), memory.word_at(raw, layout.memcg_data)
    struct, nid = image.type("struct page"), frames.nid(memory.word_at(raw, frames.flags))
    is_slab, bits = all(marker.is_set(raw) for marker in layout.slab), swap_cache_bits(image)
    count = offsetof(struct, "_refcount")
    return PageInfo(
        page=page,
        pfn=frames.pfn(page),
        nid=nid,
        head=head,
        order=order,
        type="slab" if is_slab else _type_of(image, raw),
        reserved=bool(flags >> (constant(image, "PG_reserved") or 0) & 1),
        refs=int.from_bytes(raw[count : count + 4], memory.order, signed=True),
        is_kmem=data & MEMCG_DATA_FLAGS == MEMCG_DATA_KMEM and not is_slab,
        payer=0 if is_slab else data & ~MEMCG_DATA_FLAGS,
        mapping=memory.word_at(raw, offsetof(struct, "mapping")),
        pgoff=memory.word_at(raw, _index_offset(image)) + (page - head) // frames.size,
        swap_cache=flags & bits == bits,
        slab=SlabPage(head, nid, order, raw) if is_slab else None,
    )


def _index_offset(image: Image) -> int:
    page = image.type("struct page")
    # Renamed in commit acc53a0b4c15 ("mm: rename page->index to page->__folio_index") (in v6.16).
    return int(offsetof(page, "index" if page.has_member("index") else "__folio_index"))


def count_payers(image: Image, pages: list[int], coverage: Coverage) -> Counter[tuple[int, int]]:
    """
    Count kernel pages by ``struct obj_cgroup *``, 0 for nobody, and node.

    :param pages: ``struct page *``
    :param coverage: counts those that could be read, and those that could not
    """
    memory, frames, layout = image.memory, mem_map(image), page_layout(image)
    found: Counter[tuple[int, int]] = Counter()
    for first, count in _runs(sorted(pages), frames.size):
        for offset, data in memory.pieces(first, count * frames.size, frames.size):
            if data is None:
                coverage.miss("struct pages", first + offset, "not in the image")
                continue
            words = memory.words(data, layout.memcg_data, frames.size)
            flags = memory.words(data, frames.flags, frames.size)
            coverage.read += len(words)
            found.update(
                (
                    word & ~MEMCG_DATA_FLAGS if word & MEMCG_DATA_FLAGS == MEMCG_DATA_KMEM else 0,
                    frames.nid(flag),
                )
                for word, flag in zip(words, flags, strict=True)
            )
    return found


def _runs(pages: list[int], size: int) -> Iterator[tuple[int, int]]:
    """Pages that lie side by side: the first one, and how many."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + size:
            yield pages[start], i - start
            start = i


@per_image
def _types(image: Image) -> tuple[dict[int, str], dict[int, str]]:
    """Names of page types: by the highest byte, and by the bit that is clear."""
    names = {}
    if has_type(image, "enum pagetype"):
        names = {e.value: e.name for e in image.type("enum pagetype").enumerators or ()}
    if any(name.startswith("PGTY_") for name in names.values()):
        # Commit 4ffca5a96678 ("mm: support only one page_type per page") (in v6.12).
        named = {value: name[5:].lower() for value, name in names.items()}
        return {v: name for v, name in named.items() if name != "mapcount_underflow"}, {}
    if names:
        return {}, {v: name[3:].lower() for v, name in names.items() if name.startswith("PG_")}
    return {}, {bit: name for name, bit in _MACROS.items()}


def _type_of(image: Image, raw: bytes) -> str:
    at, (bytes_, bits) = page_layout(image).page_type, _types(image)
    word = int.from_bytes(raw[at : at + 4], image.memory.order)
    if bytes_:
        return bytes_.get(word >> 24, "")
    if word & _BASE != _BASE:
        return ""
    return next((name for bit, name in bits.items() if not word & bit), "")


def _free_block(image: Image, page: int) -> tuple[int, int] | None:
    """The free block that a page is in, and its order: only the first page of one is marked."""
    memory, frames = image.memory, mem_map(image)
    private = offsetof(image.type("struct page"), "private")
    pfn = frames.pfn(page)
    for order in range(array_length(member_type(image.type("struct zone"), "free_area"))):
        first = frames.page(pfn >> order << order)
        try:
            raw = memory.read(first, frames.size)
        except FaultError:
            return None
        if _type_of(image, raw) == "buddy" and memory.word_at(raw, private) >= order:
            return first, memory.word_at(raw, private)
    return None


class Folio(NamedTuple):
    """
    A user page, or a compound one.

    :ivar page: ``struct page *``, of the head
    :ivar payer: ``struct obj_cgroup *``, before 7.2 ``struct mem_cgroup *``
    :ivar mapping: ``folio->mapping``, with its flags
    :ivar swap_cache: whether it is in the swap cache: ``folio_test_swapcache()``
    """

    page: int
    nid: int
    order: int
    payer: int
    mapping: int
    swap_cache: bool


@per_image
def swap_cache_bits(image: Image) -> int:
    """Return the flags that a page of the swap cache has, all of them."""
    # PG_swapcache means something else to pages without PG_swapbacked.
    bit = constant(image, "PG_swapcache") or 0
    return 1 << bit | 1 << page_flags(image).swapbacked.shift


def folios_of(image: Image, piece: RawPiece, payers: Set[int]) -> Iterator[Folio]:
    """
    Return the user pages in a piece of the memory map that are charged to some payers.

    :param payers: ``struct obj_cgroup *``, before 7.2 ``struct mem_cgroup *``
    """
    memory, frames, layout = image.memory, mem_map(image), page_layout(image)
    size, bits = frames.size, swap_cache_bits(image)
    words = memory.words(piece.data, layout.memcg_data, size)
    if payers.isdisjoint(words):
        return
    mapping = offsetof(image.type("struct page"), "mapping")
    for i, word in enumerate(words):
        if word not in payers or layout.tail.is_set(raw := piece.data[i * size : (i + 1) * size]):
            continue
        yield Folio(
            page=piece.page + i * size,
            nid=piece.nid(i),
            order=piece.orders.get(i, 0),
            payer=word,
            mapping=memory.word_at(raw, mapping),
            swap_cache=memory.word_at(raw, frames.flags) & bits == bits,
        )
