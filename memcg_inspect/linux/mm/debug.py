# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Description of one page
-----------------------

Mirrors ``dump_page()`` of :linux:`mm/debug.c`: node, order, page type, mapping, and who pays for
a page. Page types are those of :linux:`include/linux/page-flags.h`. Free blocks are found as in
:linux:`mm/page_alloc.c`.

What differs between kernel releases:

- up to 6.9, page types are macros; since commit ff202303c398 ("mm: convert page type macros to
  enum") (in v6.10), they are enumerators;
- up to 6.11, a page type is a bit of ``page_type`` that is clear; since commit 4ffca5a96678 ("mm:
  support only one page_type per page") (in v6.12), it is the highest byte;
- since commit acc53a0b4c15 ("mm: rename page->index to page->__folio_index") (in v6.16), the index
  in the mapping has another name.

This module reads one page at a time. :mod:`memcg_inspect.linux.mm.mm_types` reads many.
"""

from __future__ import annotations

from typing import NamedTuple

from drgn import FaultError, offsetof
from drgn.helpers.linux.mm import compound_head, in_direct_map

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import array_length, constant, has_type, member_type
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.linux.mm.memcg_data import swap_cache_bits
from memcg_inspect.linux.mm.mm_types import (
    MEMCG_DATA_FLAGS,
    MEMCG_DATA_KMEM,
    page_layout,
    page_type_base,
)
from memcg_inspect.linux.mm.mm_types_slabs import SlabPage
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges

__all__ = ("PageInfo", "is_kmalloc_page", "page_at", "page_behind", "read_page")

#: ``PG_buddy`` etc. (up to 6.9). A page of a type has this bit of ``page_type`` clear.
_PAGE_TYPE_MACROS = {"buddy": 0x80, "offline": 0x100, "table": 0x200, "guard": 0x400}


class PageInfo(NamedTuple):
    """
    One page.

    All but ``page`` and ``pfn`` are of the compound page or the free block that the page is in.

    :ivar page: ``struct page *``
    :ivar pfn: page frame number
    :ivar nid: node
    :ivar head: ``struct page *`` of the first page of the compound page or free block
    :ivar order: order of the compound page or free block
    :ivar type: name in ``enum pagetype``, in lower case and without prefix; ``""`` for none
    :ivar reserved: whether ``PG_reserved`` is set
    :ivar refs: ``_refcount``
    :ivar is_kmem: whether ``MEMCG_DATA_KMEM`` is set
    :ivar payer: ``struct obj_cgroup *``, up to 7.0 ``struct mem_cgroup *`` for user pages; 0 if
        no memcg pays
    :ivar mapping: ``page->mapping`` with its flags; has a meaning for user pages only
    :ivar pgoff: ``page_pgoff()``: index of the page in its mapping, in pages
    :ivar swap_cache: whether the page is in the swap cache, ``folio_test_swapcache()``
    :ivar slab: the slab that the page belongs to; ``None`` for other pages
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
    Return the page that an address in the direct map belongs to, ``virt_to_page()``.

    :param address: ``void *``
    :return: ``struct page *``; ``None`` if the address is not in the direct map, or has no page
    """
    if not in_direct_map(image.prog, untagged(image, address)):
        return None
    page = mem_map(image).virt_to_page(address)
    return page if _is_valid(image, page) else None


def page_at(image: Image, address: int) -> int | None:
    """
    Return the ``struct page`` that contains an address.

    :param address: address of any byte of a ``struct page``
    :return: ``struct page *``; ``None`` if the address is not in the memory map
    """
    frames = mem_map(image)
    page = address - (address - frames.base) % frames.size
    return page if address >= frames.base and _is_valid(image, page) else None


def _is_valid(image: Image, page: int) -> bool:
    pfn = mem_map(image).pfn(page)
    return any(start <= pfn < end for start, end in page_ranges(image))


def is_kmalloc_page(image: Image, page: int) -> bool:
    """
    Return whether a page can hold memory that ``kmalloc()`` returned: it is of a slab or of a large
    kmalloc. Kernels up to 6.14 do not mark large kmallocs: there, any compound page can.

    :param page: ``struct page *``
    :return: also ``True`` if its ``struct page``, or that of its head, cannot be read
    """
    layout = page_layout(image)
    try:
        head = compound_head(image.pointer("struct page *", page)).value_()
        raw = image.memory.read(head, mem_map(image).size)
    except FaultError:
        return True
    if all(marker.is_set(raw) for marker in layout.slab):
        return True
    return (layout.large_kmalloc or layout.head).is_set(raw)


def read_page(image: Image, page: int) -> PageInfo:
    """
    Describe a page.

    :param page: ``struct page *``
    :raises drgn.FaultError: if its ``struct page``, or that of its head, cannot be read
    """
    memory, frames, layout = image.memory, mem_map(image), page_layout(image)
    head = compound_head(image.pointer("struct page *", page)).value_()
    raw, order = memory.read(head, frames.size), 0
    if layout.head.is_set(raw):
        order = memory.read(head + frames.size + layout.order, 1)[0]
    free = _free_block(image, page)
    if free is not None:
        head, order = free
        raw = memory.read(head, frames.size)
    flags, data = memory.word_at(raw, frames.flags), memory.word_at(raw, layout.memcg_data)
    nid, swap_cache = frames.nid(flags), swap_cache_bits(image)
    is_slab = all(marker.is_set(raw) for marker in layout.slab)
    page_type = image.type("struct page")
    refcount = offsetof(page_type, "_refcount")
    return PageInfo(
        page=page,
        pfn=frames.pfn(page),
        nid=nid,
        head=head,
        order=order,
        type="slab" if is_slab else _page_type(image, raw),
        reserved=bool(flags >> (constant(image, "PG_reserved") or 0) & 1),
        refs=int.from_bytes(raw[refcount : refcount + 4], memory.order, signed=True),
        is_kmem=data & MEMCG_DATA_FLAGS == MEMCG_DATA_KMEM and not is_slab,
        payer=0 if is_slab else data & ~MEMCG_DATA_FLAGS,
        mapping=memory.word_at(raw, offsetof(page_type, "mapping")),
        pgoff=memory.word_at(raw, _index_offset(image)) + (page - head) // frames.size,
        swap_cache=flags & swap_cache == swap_cache,
        slab=SlabPage(head, nid, order, raw) if is_slab else None,
    )


def _index_offset(image: Image) -> int:
    page = image.type("struct page")
    return int(offsetof(page, "index" if page.has_member("index") else "__folio_index"))


@per_image
def _page_types(image: Image) -> tuple[dict[int, str], dict[int, str]]:
    """
    Return the names of page types.

    One of the two results is empty.

    :return: by the highest byte of ``page_type`` (since 6.12), and by the bit of it that is
        clear (up to 6.11)
    """
    names = {}
    if has_type(image, "enum pagetype"):
        names = {e.value: e.name for e in image.type("enum pagetype").enumerators or ()}
    if any(name.startswith("PGTY_") for name in names.values()):
        types = {value: name.removeprefix("PGTY_").lower() for value, name in names.items()}
        # PGTY_mapcount_underflow marks the end of the page types.
        return {v: name for v, name in types.items() if name != "mapcount_underflow"}, {}
    if names:
        return {}, {v: name[3:].lower() for v, name in names.items() if name.startswith("PG_")}
    return {}, {bit: name for name, bit in _PAGE_TYPE_MACROS.items()}


def _page_type(image: Image, raw: bytes) -> str:
    offset, (by_byte, by_bit) = page_layout(image).page_type, _page_types(image)
    page_type = int.from_bytes(raw[offset : offset + 4], image.memory.order)
    if by_byte:
        return by_byte.get(page_type >> 24, "")
    base = page_type_base(image)
    if page_type & base != base:
        return ""
    return next((name for bit, name in by_bit.items() if not page_type & bit), "")


def _free_block(image: Image, page: int) -> tuple[int, int] | None:
    """
    Return the first page and the order of the free block that a page is in.

    Only the first page of a free block is marked. It is aligned to the block's order, which its
    ``private`` holds (``buddy_order()``).
    """
    memory, frames = image.memory, mem_map(image)
    private = offsetof(image.type("struct page"), "private")
    pfn = frames.pfn(page)
    orders = array_length(member_type(image.type("struct zone"), "free_area"))
    for order in range(orders):
        first = frames.page(pfn >> order << order)
        try:
            raw = memory.read(first, frames.size)
        except FaultError:
            return None
        if _page_type(image, raw) == "buddy" and order <= memory.word_at(raw, private) < orders:
            return first, memory.word_at(raw, private)
    return None
