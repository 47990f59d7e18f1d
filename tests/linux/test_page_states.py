# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The counters that user pages in each state count in, on memory maps made by hand.

What each counts is in mm/filemap.c (``filemap_unaccount_folio()``) and mm/rmap.c.
"""

from __future__ import annotations

from itertools import product

import pytest
from support.layouts import FRAMES, NODE_1, MadeImage
from support.made_pages import NO_TYPE, TYPES, kernel_with_pages, put, put_compound

from memcg_inspect.linux.mm.filemap import PagesByItem, UserPageReader
from memcg_inspect.linux.mm.mm_types import scan_range
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.model import ImageError

FLAGS = {"PG_dirty": 3, "PG_writeback": 1, "PG_swapcache": 10}
DIRTY, WRITEBACK, SWAPCACHE, SWAPBACKED = 1 << 3, 1 << 1, 1 << 10, 1 << 19
PAYER, OTHER = 0xFFFF888000111000, 0xFFFF888000222000
#: Mappings: of a file that is written back, of one that is not, and of anonymous memory.
FILE, NOT_WRITTEN = 0xFFFF888000300000, 0xFFFF888000301000
ANON = 0xFFFF888000302001
GONE = 0xFFFF88807FFF0000
KMEM = 2
NOT_MAPPED, MAPPED = NO_TYPE, 0
HUGE = 9
#: Offsets in ``struct folio``, of the counts of mappings that are below 0 if there are none.
LARGE_MAPCOUNT, ENTIRE_MAPCOUNT = 80, 88


def kernel() -> MadeImage:
    image = kernel_with_pages(TYPES["7.1"])
    image.enum(None, **FLAGS, PAGE_SHIFT=12)
    image.declare("""
        struct folio { struct page page; unsigned long _flags_1; unsigned long _head_1;
                       int _large_mapcount; int _nr_pages_mapped; int _entire_mapcount; };
        struct backing_dev_info { unsigned int capabilities; };
        struct super_block { unsigned long s_magic; struct backing_dev_info *s_bdi; };
        struct inode { struct super_block *i_sb; };
        struct address_space { struct inode *host; };
    """)
    for mapping, writes_back in ((FILE, 1), (NOT_WRITTEN, 0)):
        image.words(mapping, mapping + 64)
        image.words(mapping + 64, mapping + 128)
        image.words(mapping + 128, 0xEF53, mapping + 256)
        image.words(mapping + 256, writes_back)
    return image


def put_page(
    image: MadeImage, pfn: int, flags: int, mapping: int, mapcount: int, data: int = PAYER
) -> None:
    put(image, pfn, flags, mapcount, data)
    image.words(FRAMES.page(pfn) + 24, mapping)


def put_folio(
    image: MadeImage,
    pfn: int,
    order: int,
    flags: int,
    mapping: int,
    *,
    mapped: tuple[int, ...] = (),
    entire: bool = False,
    large: bool = False,
    data: int = PAYER,
) -> None:
    """Put a large folio; *mapped* are the indexes of pages that are mapped by PTEs."""
    put_compound(image, TYPES["7.1"], pfn, order, flags, NO_TYPE, data)
    image.words(FRAMES.page(pfn) + 24, mapping)
    for i in mapped:
        image.write(FRAMES.page(pfn + i) + 48, bytes(4))
    for offset, is_mapped in ((LARGE_MAPCOUNT, large), (ENTIRE_MAPCOUNT, entire)):
        count = 0 if is_mapped else -1
        image.write(FRAMES.page(pfn) + offset, count.to_bytes(4, "little", signed=True))


def items(image: MadeImage, pages: int) -> tuple[PagesByItem, UserPageReader]:
    reader, found = UserPageReader(image), PagesByItem()
    for piece in scan_range(image, PageRange(0, pages)):
        assert piece.raw is not None
        found += reader.read(piece.raw)
    return found, reader


def of_small_page(flags: int, mapping: int, mapcount: int) -> set[str]:
    """Return the counters of a small page, by the words of the kernel's own source."""
    found = set()
    is_anon = mapping & 1
    if mapping and not mapping & 3:  # folio_mapping() of a file
        found.add("NR_FILE_PAGES")
        if flags & SWAPBACKED:
            found.add("NR_SHMEM")
        elif flags & DIRTY and mapping == FILE:
            found.add("NR_FILE_DIRTY")
    if flags & SWAPCACHE and flags & SWAPBACKED:
        found.add("NR_SWAPCACHE")
    if flags & WRITEBACK:
        found.add("NR_WRITEBACK")
    if mapcount == MAPPED:
        found.add("NR_ANON_MAPPED" if is_anon else "NR_FILE_MAPPED")
    return found


@pytest.mark.parametrize("mapping", [0, FILE, NOT_WRITTEN, ANON, FILE | 2])
@pytest.mark.parametrize("step", [1, 3, 16])
def test_small_pages_in_each_state(mapping: int, step: int) -> None:
    """Many of the pages of a piece, and few, which are looked at one by one."""
    image, expected, pfn = kernel(), PagesByItem(), 0
    bits = (DIRTY, WRITEBACK, SWAPCACHE, SWAPBACKED)
    for chosen, mapcount in product(product((0, 1), repeat=4), (NOT_MAPPED, MAPPED)):
        flags = sum(bit for bit, is_set in zip(bits, chosen, strict=True) if is_set)
        node = pfn // step % 2
        put_page(image, pfn, flags | NODE_1 * node, mapping, mapcount)
        for other in range(pfn + 1, pfn + step):
            put_page(image, other, 0, 0, NOT_MAPPED, data=0)
        for item in of_small_page(flags, mapping, mapcount):
            expected[PAYER, node, item] += 1
        pfn += step
    found, reader = items(image, pfn)
    assert found == expected
    assert not reader.coverage.unreadable


def test_pages_of_one_node() -> None:
    """Then the node is the same for all, in a piece with few and in one with many."""
    for others in (0, 63):
        image = kernel()
        put_page(image, 0, 0, FILE, MAPPED)
        put_page(image, 1, DIRTY, FILE, NOT_MAPPED, data=OTHER)
        for pfn in range(2, 2 + others):
            put_page(image, pfn, 0, 0, NOT_MAPPED, data=0)
        assert items(image, 2 + others)[0] == PagesByItem(
            {
                (PAYER, 0, "NR_FILE_PAGES"): 1,
                (PAYER, 0, "NR_FILE_MAPPED"): 1,
                (OTHER, 0, "NR_FILE_PAGES"): 1,
                (OTHER, 0, "NR_FILE_DIRTY"): 1,
            }
        )


def test_pages_that_nobody_pays_for_do_not_count() -> None:
    image = kernel()
    put_page(image, 0, WRITEBACK, FILE, MAPPED, data=0)
    put_page(image, 1, WRITEBACK, FILE, MAPPED, data=PAYER | 1)  # a slab
    assert items(image, 2)[0] == PagesByItem()


def test_kernel_memory_that_is_mapped() -> None:
    """It counts as a file, and in nothing else."""
    image = kernel()
    put_page(image, 0, WRITEBACK | DIRTY, FILE, MAPPED, data=PAYER | KMEM)
    put_page(image, 1, NODE_1, 0, NOT_MAPPED, data=PAYER | KMEM)
    put_folio(image, 2, 1, NODE_1, 0, mapped=(0, 1), data=OTHER | KMEM)
    put_folio(image, 4, 2, 0, 0, data=OTHER | KMEM)
    assert items(image, 8)[0] == PagesByItem(
        {(PAYER, 0, "NR_FILE_MAPPED"): 1, (OTHER, 1, "NR_FILE_MAPPED"): 2}
    )


@pytest.mark.parametrize("order", [2, HUGE - 1, HUGE])
def test_large_folios_of_files(order: int) -> None:
    """All of their pages count; those as large as a PMD maps count as huge, too."""
    image, pages = kernel(), 1 << order
    put_folio(image, 0, order, DIRTY | WRITEBACK, FILE, mapped=(0, 2), large=True)
    put_folio(image, pages, order, SWAPBACKED | DIRTY | NODE_1, NOT_WRITTEN, entire=True)
    expected = PagesByItem(
        {
            (PAYER, 0, "NR_FILE_PAGES"): pages,
            (PAYER, 0, "NR_FILE_DIRTY"): pages,
            (PAYER, 0, "NR_WRITEBACK"): pages,
            (PAYER, 0, "NR_FILE_MAPPED"): 2,
            (PAYER, 1, "NR_FILE_PAGES"): pages,
            (PAYER, 1, "NR_SHMEM"): pages,
            (PAYER, 1, "NR_FILE_MAPPED"): pages,
        }
    )
    if order == HUGE:
        expected[PAYER, 0, "NR_FILE_THPS"] = expected[PAYER, 1, "NR_SHMEM_THPS"] = pages
    assert items(image, 2 * pages)[0] == expected


def test_large_folios_of_anonymous_memory() -> None:
    """Those that are mapped as a whole count as huge pages."""
    image = kernel()
    put_folio(image, 0, 2, SWAPBACKED | SWAPCACHE, ANON, mapped=(1, 2, 3), large=True)
    put_folio(image, 4, 2, SWAPBACKED | NODE_1, ANON, entire=True, large=True)
    put_folio(image, 8, 2, SWAPBACKED, ANON)  # not mapped now
    put_folio(image, 12, 1, SWAPBACKED, ANON, large=True, data=OTHER)
    put(image, 14, 0, NO_TYPE, 0)
    put(image, 15, 0, NO_TYPE, 0)
    assert items(image, 16)[0] == PagesByItem(
        {
            (PAYER, 0, "NR_SWAPCACHE"): 4,
            (PAYER, 0, "NR_ANON_MAPPED"): 3,
            (PAYER, 1, "NR_ANON_MAPPED"): 4,
            (PAYER, 1, "NR_ANON_THPS"): 4,
            # With CONFIG_NO_PAGE_MAPCOUNT, no page of it has a count of its own.
            (OTHER, 0, "NR_ANON_MAPPED"): 2,
        }
    )


def test_folios_of_hugetlb_count_in_nothing_else() -> None:
    image = kernel()
    image.enum(None, PGTY_hugetlb=0xF4)
    put_folio(image, 0, 2, DIRTY | WRITEBACK | NODE_1, FILE, entire=True, mapped=(1,))
    put_folio(image, 4, 2, 0, FILE, entire=True, data=0)
    for pfn in (0, 4):
        image.write(FRAMES.page(pfn) + 48, (0xF4FFFFFF).to_bytes(4, "little"))
    assert items(image, 8)[0] == PagesByItem({(PAYER, 1, "NR_HUGETLB"): 4})


def test_files_of_dirty_pages_that_are_not_in_the_image() -> None:
    image = kernel()
    put_page(image, 0, DIRTY | WRITEBACK, GONE, NOT_MAPPED)
    put_page(image, 1, DIRTY, FILE, NOT_MAPPED)
    found, reader = items(image, 2)
    assert found == PagesByItem(
        {
            (PAYER, 0, "NR_FILE_PAGES"): 2,
            (PAYER, 0, "NR_WRITEBACK"): 1,
            (PAYER, 0, "NR_FILE_DIRTY"): 1,
        }
    )
    assert [(e.what, e.address) for e in reader.coverage.examples] == [
        ("file of a dirty page", GONE)
    ]


def test_the_rest_of_a_folio_that_is_not_in_the_image() -> None:
    """It begins in the last page of memory that is there."""
    image = kernel()
    for pfn in range(64):
        put(image, pfn, 0, NO_TYPE, 0)
    put_folio(image, 0, 6, 0, FILE, mapped=(0, 1))
    image.write(FRAMES.page(1), bytes([7]))  # its order: pages 64 to 127 are missing
    reader, found = UserPageReader(image), PagesByItem()
    [piece] = scan_range(image, PageRange(0, 64))
    assert piece.raw is not None
    found += reader.read(piece.raw)
    assert found == PagesByItem({(PAYER, 0, "NR_FILE_PAGES"): 128})
    assert [(e.what, e.address) for e in reader.coverage.examples] == [
        ("pages of a folio", FRAMES.page(64))
    ]


@pytest.mark.parametrize("name", FLAGS)
def test_kernels_without_a_flag(name: str) -> None:
    image = kernel()
    del image._objects[name]
    with pytest.raises(ImageError, match=f"enum pageflags has no {name}: this kernel cannot"):
        UserPageReader(image)
