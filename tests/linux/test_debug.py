# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is told of a page is what drgn's helpers, and the lists of free pages, say of it."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from drgn import FaultError, Object, Program
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mm import (
    PageReserved,
    PageSlab,
    PageSwapBacked,
    PageTail,
    compound_head,
    compound_order,
    page_to_pfn,
    page_to_virt,
    pfn_to_page,
)
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from fuzz.damage import damaged
from support.guests import ARCH, DEBIAN_KERNELS, Lab, series
from support.planting import Overlay, Write

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.debug import is_kmalloc_page, page_at, page_behind, read_page
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]
each_kernel = pytest.mark.parametrize("kernel", DEBIAN_KERNELS)

#: Of include/linux/page-flags.h, in ``page_type`` of a page table: ``PGTY_table << 24``, and
#: ``PAGE_TYPE_BASE`` without ``PG_table``.
TABLES, OLD_TABLES = (0xFF000000, 0xF2000000), (0xF0000200, 0xF0000000)


@each_kernel
def test_flags_and_counts_of_pages(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel).program()
    reserved = {True: 0, False: 0}
    for part in page_ranges(image_of(prog)):
        for pfn in range(part.start, part.end, 61):
            page = pfn_to_page(prog, pfn)
            told = read_page(image_of(prog), page.value_())
            assert told.pfn == pfn == int(page_to_pfn(page))
            assert told.reserved == bool(PageReserved(page)), hex(pfn)
            assert told.refs == int(compound_head(page)._refcount.counter)
            reserved[told.reserved] += 1
    assert min(reserved.values()) > 10


def free_blocks(prog: Program) -> dict[int, int]:
    """Return the order of each free block by its first page frame, from the lists of zones."""
    return {
        int(page_to_pfn(page)): order
        for pgdat in for_each_online_pgdat(prog)
        for zone in pgdat.node_zones
        if zone.present_pages  # else its lists were never made
        for order, area in enumerate(zone.free_area)
        for head in area.free_list
        for page in list_for_each_entry("struct page", head.address_of_(), "lru")
    }


def nodes(prog: Program) -> dict[int, range]:
    return {
        int(pgdat.node_id): range(
            int(pgdat.node_start_pfn), int(pgdat.node_start_pfn + pgdat.node_spanned_pages)
        )
        for pgdat in for_each_online_pgdat(prog)
    }


def chosen(prog: Program) -> list[int]:
    """Return page frames: some of all, and some of each kind that is rare."""
    image = image_of(prog)
    frames, pieces = mem_map(image), list(scan_pages(image))
    tables = (k.page for piece in pieces for k in piece.kmem if k.type == "table")
    tails = (
        piece.raw.page + (i + 1) * frames.size
        for piece in pieces
        if piece.raw is not None
        for i in piece.raw.orders
    )
    rare = [frames.pfn(page) for some in (tables, tails) for page in islice(some, 20)]
    return rare + [pfn for part in page_ranges(image) for pfn in range(part.start, part.end, 211)]


@each_kernel
def test_what_a_page_belongs_to(lab: Lab, kernel: str) -> None:
    """The compound page or free block, its type, node and owner, and the place in a file."""
    prog = lab.image(kernel, "4", "mixed").program()
    free, spans, seen = free_blocks(prog), nodes(prog), Counter[str]()
    in_swap_cache = 1 << prog["PG_swapcache"].value_()
    mask, is_table = OLD_TABLES if series(kernel) == "6.1" else TABLES
    for pfn in chosen(prog):
        page, told = pfn_to_page(prog, pfn), read_page(image_of(prog), _address(prog, pfn))
        head = compound_head(page)
        order = int(compound_order(head))
        for size in range(11):
            if free.get(pfn >> size << size) == size:
                head, order = pfn_to_page(prog, pfn >> size << size), size
                seen["buddy"] += 1
                assert told.type == "buddy"
        word, flags, is_slab = head.memcg_data.value_(), _flags(head), bool(PageSlab(head))
        assert (told.page, told.head, told.order) == (page.value_(), head.value_(), order)
        # Page frame 0 is of no node: the firmware has it.
        assert pfn in spans[told.nid] or not any(pfn in span for span in spans.values())
        assert (told.slab is not None) == (told.type == "slab") == is_slab
        if told.slab is not None:
            raw = prog.read(head, mem_map(image_of(prog)).size)
            assert told.slab == (head.value_(), told.nid, order, raw)
        assert (told.is_kmem, told.payer) == ((False, 0) if is_slab else (word & 7 == 2, word & ~7))
        index = head.member_("__folio_index" if kernel[0] == "7" else "index").value_()
        assert told.mapping == head.mapping.value_()
        assert told.pgoff == index + pfn - int(page_to_pfn(head))
        swap_backed = bool(PageSwapBacked(head))
        assert told.swap_cache == (swap_backed and bool(flags & in_swap_cache))
        table = not is_slab and head.page_type.value_() & mask == is_table
        assert (told.type == "table") == table
        seen.update(table=table, slab=is_slab, user=bool(word) and not word & 7)
        seen.update(tail=bool(PageTail(page)), kmem=told.is_kmem)
    assert min(seen[kind] for kind in ("buddy", "slab", "table", "user", "tail", "kmem")) > 5


def _address(prog: Program, pfn: int) -> int:
    return int(pfn_to_page(prog, pfn).value_())


def _flags(page: Object) -> int:
    flags = page.flags
    return int((flags.f if hasattr(flags, "f") else flags).value_())


def block_of(prog: Program, order: int) -> int:
    """Return the first page frame of a free block of an order, or of a higher one."""
    return min((o, pfn) for pfn, o in free_blocks(prog).items() if o >= order)[1]


@each_kernel
def test_a_free_block_ends_where_its_order_says(lab: Lab, kernel: str) -> None:
    """``buddy_order()`` is ``private``; an order that cannot be marks no block."""
    prog = lab.image(kernel, "4", "mixed").own_program()
    pfn, overlay = block_of(prog, 3), Overlay(prog)
    first = _address(prog, pfn)
    private = int(pfn_to_page(prog, pfn).private.address_ or 0)
    orders = len(prog["node_data"][0].node_zones[0].free_area)
    for order, last, head in (
        (1, pfn + 1, pfn),
        (1, pfn + 2, pfn + 2),
        (orders - 1, pfn + 7, pfn),
        (orders, pfn + 1, pfn + 1),
        (1 << 40, pfn + 1, pfn + 1),
    ):
        overlay.write((Write(private, order.to_bytes(8, "little")),))
        told = read_page(Image(prog), first)
        assert (told.head, told.order) == (first, order if order < orders else 0)
        assert read_page(Image(prog), _address(prog, last)).head == _address(prog, head)


@each_kernel
def test_pages_that_are_not_in_the_image(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    prog = image.program()
    gone = _address(prog, block_of(prog, 0))
    changed = damaged(image.core, (gone, "missing"))
    with pytest.raises(FaultError):
        read_page(changed, gone)
    assert is_kmalloc_page(changed, gone)
    assert not is_kmalloc_page(image_of(prog), gone)


@each_kernel
def test_pages_that_can_hold_what_kmalloc_returned(lab: Lab, kernel: str) -> None:
    """Slabs, and since 6.15 large kmallocs; before, any compound page."""
    prog = lab.image(kernel, "4", "mixed").program()
    seen = Counter[tuple[bool, bool]]()
    for pfn in chosen(prog):
        page = pfn_to_page(prog, pfn)
        head = compound_head(page)
        can = bool(PageSlab(head))
        if kernel[0] == "7":
            can = can or head.page_type.value_() >> 24 == 0xF8  # PGTY_large_kmalloc
        else:
            can = can or int(compound_order(head)) > 0
        assert is_kmalloc_page(image_of(prog), page.value_()) == can
        seen[can, bool(PageSlab(head))] += 1
    assert seen[True, True] and seen[False, False]


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS if ARCH == "amd64" else ())
def test_addresses_that_have_a_page(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    image, frames, inside = image_of(prog), mem_map(image_of(prog)), range(frames_of(prog))
    for pfn in (0, 1, inside.stop - 1, inside.stop):
        page = _address(prog, pfn)
        found = page if pfn in inside else None
        assert [page_at(image, page + byte) for byte in (0, 1, frames.size - 1)] == [found] * 3
    assert page_at(image, frames.base - 1) is None
    assert page_at(image, frames.base - frames.size) is None
    # Memory ends before the last section of the memory map does.
    for pfn in (1, int(prog["max_low_pfn"]) - 1):
        memory = page_to_virt(pfn_to_page(prog, pfn)).value_()
        assert [page_behind(image, memory + byte) for byte in (0, 4095)] == [
            _address(prog, pfn)
        ] * 2
    for address in (0, 4096, prog.symbol("init_task").address, frames.base):
        assert page_behind(image, address) is None


def frames_of(prog: Program) -> int:
    """Return the number of page frames in the sections of the guest, which has no holes."""
    last = int(prog["__highest_present_section_nr"])
    return (last + 1) << int(prog["SECTION_SIZE_BITS"]) - int(prog["PAGE_SHIFT"])
