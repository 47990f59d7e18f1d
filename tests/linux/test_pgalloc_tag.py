# SPDX-License-Identifier: LGPL-2.1-or-later
"""Call sites of pages, in memory maps made by hand: from page_ext, and from flags of the page."""

from __future__ import annotations

from collections import Counter

import pytest
from drgn import FaultError, Object, TypeKind
from support.layouts import FRAMES, NODE_1, MadeImage
from support.made_pages import NO_TYPE, TYPES, kernel_with_pages, put, put_compound

from memcg_inspect.linux.mm import page_alloc, pgalloc_tag
from memcg_inspect.linux.mm.mm_types import scan_range
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.pgalloc_tag import PageTagReader, TaggedPages, page_ext_bytes
from memcg_inspect.model import ImageError

VARIABLES, SECTIONS = 0xFFFFFFFF82000000, 0xFFFF888031000000
TAG, PAYER, PAGES = 0xFFFFFFFF83000000, 0xFFFF888000111000, 512
#: Page frames of a section, and the ``page_ext`` of page frame 0. Each has 24 bytes, and the
#: reference to a tag is at offset 16.
SECTION, PAGE_EXT, SIZE, OFFSET = 256, 0xFFFF888032000000, 24, 16
KERNEL_TAGS, MODULE_TAGS, STEP = 0xFFFFFFFF84000000, 0xFFFFFFFFC0000000, 40
#: ``alloc_tag_ref_offs``
SHIFT = 40


def kernel(monkeypatch: pytest.MonkeyPatch) -> MadeImage:
    image = kernel_with_pages(TYPES["7.1"])
    image.declare(
        """
        struct list_head { struct list_head *next; struct list_head *prev; };
        struct free_area { long nr_free; };
        struct zone { struct free_area free_area[8]; };
        struct page_ext { unsigned long flags; };
        struct mem_section { struct page_ext *page_ext; };
        struct page_ext_operations { unsigned long offset; unsigned long size; };
        struct codetag { unsigned int flags; unsigned int lineno;
                         char *modname; char *function; char *filename; };
        struct alloc_tag { struct codetag ct; void *counters; };
        struct tags { struct alloc_tag *first_tag; unsigned long count; };
        struct atomic { int counter; };
        struct static_key { struct atomic enabled; };
        struct static_key_false { struct static_key key; };
        """
    )
    for pfn in range(PAGES):
        image.make("struct page", FRAMES.page(pfn), {"page_type": NO_TYPE})
    variables = {
        "page_ext_size": "unsigned long",
        "page_alloc_tagging_ops": "struct page_ext_operations",
        "mem_profiling_compressed": "struct static_key_false",
        "alloc_tag_ref_offs": "int",
        "alloc_tag_ref_mask": "unsigned long",
        "kernel_tags": "struct tags",
        "module_tags": "struct tags",
    }
    for n, (name, type_) in enumerate(variables.items()):
        image.variable(name, type_, VARIABLES + 64 * n)
    image.words(VARIABLES, SIZE)
    image.words(VARIABLES + 64, OFFSET, 8)
    monkeypatch.setattr(page_alloc, "page_ranges", lambda image: [PageRange(0, PAGES)])
    monkeypatch.setattr(page_alloc, "page_at", lambda image, at: None)
    monkeypatch.setattr(page_alloc, "page_behind", lambda image, at: None)
    return image


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> MadeImage:
    """A kernel whose pages have their tags in page_ext, of which all are empty."""
    image = kernel(monkeypatch)

    def section(prog: object, pfn: int) -> Object:
        return image.pointer("struct mem_section *", SECTIONS + 8 * (pfn // SECTION))

    monkeypatch.setattr(pgalloc_tag, "pfn_to_section", section)
    monkeypatch.setattr(pgalloc_tag, "pfn_to_section_nr", lambda prog, pfn: pfn // SECTION)
    monkeypatch.setattr(pgalloc_tag, "section_nr_to_pfn", lambda prog, number: number * SECTION)
    image.words(SECTIONS, *[PAGE_EXT] * (PAGES // SECTION))
    image.write(PAGE_EXT, bytes(PAGES * SIZE))
    return image


@pytest.fixture
def compressed(monkeypatch: pytest.MonkeyPatch) -> MadeImage:
    """A kernel whose pages have the index of their tag in the flags."""
    image = kernel(monkeypatch)
    image.words(VARIABLES + 128, 1)
    image.words(VARIABLES + 192, SHIFT)
    image.words(VARIABLES + 256, 0xFFF)
    image.words(VARIABLES + 320, KERNEL_TAGS, 3)
    image.words(VARIABLES + 384, MODULE_TAGS, 2)
    return image


def tag(image: MadeImage, pfn: int, codetag: int = TAG) -> None:
    image.words(PAGE_EXT + pfn * SIZE + OFFSET, codetag)


def read(reader: PageTagReader, end: int = PAGES) -> Counter[TaggedPages]:
    found: Counter[TaggedPages] = Counter()
    for piece in scan_range(reader.image, PageRange(0, end)):
        found.update(reader.read(piece))
    return found


def test_pages_are_grouped_by_site_use_payer_and_node(image: MadeImage) -> None:
    slab = TYPES["7.1"].slab
    uses = [
        (1, 0, NO_TYPE, PAYER | 2),
        (2, 0, NO_TYPE, PAYER | 2),
        (3, NODE_1, NO_TYPE, PAYER | 2),
        (4, 0, NO_TYPE, PAYER),
        (5, 0, NO_TYPE, 0),
        (6, 0, slab, PAYER | 1),
        (7, 0, NO_TYPE, PAYER | 4),
        (8, 0, NO_TYPE, 0),  # without a tag
    ]
    for pfn, *use in uses:
        put(image, pfn, *use)
        tag(image, pfn)
    tag(image, 2, TAG + STEP)
    tag(image, 7, 1)  # CODETAG_EMPTY
    tag(image, 8, 0)
    put_compound(image, TYPES["7.1"], 16, 2, 0, slab, PAYER | 1)
    put_compound(image, TYPES["7.1"], 32, 3, 0, NO_TYPE, PAYER | 2)
    for pfn in (16, 32):
        tag(image, pfn)
    reader = PageTagReader(image)
    assert read(reader) == Counter(
        [
            TaggedPages(TAG, "kmem", PAYER, 0, 1, 1),
            TaggedPages(TAG + STEP, "kmem", PAYER, 0, 1, 1),
            TaggedPages(TAG, "kmem", PAYER, 1, 1, 1),
            TaggedPages(TAG, "lru", PAYER, 0, 1, 1),
            TaggedPages(TAG, "page", 0, 0, 1, 1),
            TaggedPages(TAG, "slab_page", 0, 0, 1, 1),
            TaggedPages(TAG, "slab_page", 0, 0, 1, 4),
            TaggedPages(TAG, "kmem", PAYER, 0, 1, 8),
        ]
    )
    assert (reader.coverage.read, reader.coverage.unreadable) == (PAGES, 0)
    codetags = [reader.codetag(FRAMES.page(pfn)) for pfn in (1, 2, 7, 8, 9)]
    assert codetags == [TAG, TAG + STEP, 0, 0, 0]
    assert page_ext_bytes(image) == 8


def test_equal_pages_are_counted_together(image: MadeImage) -> None:
    for pfn in range(0, 60, 2):
        put(image, pfn, NODE_1, NO_TYPE, PAYER)
        put(image, pfn + 1, NODE_1, NO_TYPE, PAYER)
        tag(image, pfn)
    assert list(read(PageTagReader(image))) == [TaggedPages(TAG, "lru", PAYER, 1, 30, 30)]


def test_blocks_that_are_not_compound(image: MadeImage) -> None:
    """Only the first page has a refcount and a tag. The next page with a tag begins a block."""
    for pfn in range(64, 80):
        image.make("struct page", FRAMES.page(pfn), {"page_type": NO_TYPE})
    for pfn in (64, 72, 76, 78, 80, 81, 83):
        put(image, pfn, 0, NO_TYPE, 0)
    for pfn in (64, 68, 72, 76, 80, 81, 83):
        tag(image, pfn)
    # From 64 to 67, then one that is being freed, and from 72 to 75 and to 77. 78 is of no site.
    assert read(PageTagReader(image)) == {
        TaggedPages(TAG, "page", 0, 0, 1, 4): 2,
        TaggedPages(TAG, "page", 0, 0, 1, 2): 1,
        TaggedPages(TAG, "page", 0, 0, 4, 4): 1,
    }


def test_sections_without_page_ext(image: MadeImage) -> None:
    """PAGE_EXT_INVALID marks one that is offline."""
    for pfn in (5, 261):
        put(image, pfn, 0, NO_TYPE, 0)
        tag(image, pfn)
    for none in (0, PAGE_EXT | 1):
        image.words(SECTIONS + 8, none)
        reader = PageTagReader(image)
        assert read(reader) == {TaggedPages(TAG, "page", 0, 0, 1, 1): 1}
        assert reader.coverage.unreadable == 0
        assert [reader.codetag(FRAMES.page(pfn)) for pfn in (5, 261, 5)] == [TAG, 0, TAG]
    # Each section has its own.
    image.words(SECTIONS + 8, PAGE_EXT + 0x10000)
    image.write(PAGE_EXT + 0x10000 + SECTION * SIZE, bytes(SECTION * SIZE))
    image.words(PAGE_EXT + 0x10000 + 261 * SIZE + OFFSET, TAG + STEP)
    reader = PageTagReader(image)
    assert set(read(reader)) == {
        TaggedPages(site, "page", 0, 0, 1, 1) for site in (TAG, TAG + STEP)
    }
    codetags = [reader.codetag(FRAMES.page(pfn)) for pfn in (255, 256, 261, 5)]
    assert codetags == [0, 0, TAG + STEP, TAG]
    # The first page of a section, after one of the section before.
    image.words(PAGE_EXT + 0x10000 + SECTION * SIZE + OFFSET, TAG + 2 * STEP)
    reader = PageTagReader(image)
    codetags = [reader.codetag(FRAMES.page(pfn)) for pfn in (5, 256, 5, 255, 256)]
    assert codetags == [TAG, TAG + 2 * STEP, TAG, 0, TAG + 2 * STEP]


def test_page_ext_that_is_not_in_the_image(image: MadeImage) -> None:
    """The pages that the missing part is about have no site, and all others have theirs."""
    for pfn in (3, 169, 170, 171, 261):
        put(image, pfn, 0, NO_TYPE, 0)
        tag(image, pfn)
    image.forget(PAGE_EXT)
    reader = PageTagReader(image)
    # The first one that is there is of page 170.
    assert read(reader) == {TaggedPages(TAG, "page", 0, 0, 3, 3): 1}
    assert (reader.coverage.read, reader.coverage.unreadable) == (PAGES - 170, 1)
    assert reader.coverage.examples[0].what == "page_ext of pages"
    assert reader.coverage.examples[0].address == PAGE_EXT + OFFSET
    with pytest.raises(FaultError):
        reader.codetag(FRAMES.page(3))
    image.forget(SECTIONS)
    reader = PageTagReader(image)
    assert not read(reader)
    assert (reader.coverage.read, reader.coverage.unreadable) == (0, 1)


def test_pages_that_are_not_in_the_image(image: MadeImage) -> None:
    put(image, 3, 0, NO_TYPE, 0)
    tag(image, 3)
    image.forget(FRAMES.page(64))
    reader = PageTagReader(image)
    assert read(reader) == {TaggedPages(TAG, "page", 0, 0, 1, 1): 1}
    assert {one.what for one in reader.coverage.examples} == {"struct pages"}


@pytest.mark.parametrize(("size", "offset"), [(24, 24), (24, 17), (1 << 20, 16), (0, 0)])
def test_sizes_that_cannot_be_right(image: MadeImage, size: int, offset: int) -> None:
    image.words(VARIABLES, size)
    image.words(VARIABLES + 64, offset)
    with pytest.raises(ImageError, match=f"page_ext_size is {size}"):
        PageTagReader(image)


@pytest.mark.parametrize(("size", "offset"), [(8, 0), (4096 + 8, 4096), (24, 16)])
def test_the_largest_sizes(image: MadeImage, size: int, offset: int) -> None:
    image.words(VARIABLES, size)
    image.words(VARIABLES + 64, offset)
    image.words(PAGE_EXT + 3 * size + offset, TAG)
    assert PageTagReader(image).codetag(FRAMES.page(3)) == TAG


def test_tags_in_the_flags_of_pages(compressed: MadeImage) -> None:
    """Indexes 0 and 1 are no tags. Those of modules follow those of the kernel."""
    sites = {
        0: 0,
        1: 0,
        2: KERNEL_TAGS,
        4: KERNEL_TAGS + 2 * STEP,
        5: MODULE_TAGS,
        6: MODULE_TAGS + STEP,
    }
    for pfn, index in enumerate(sites):
        put(compressed, pfn, NODE_1 | index << SHIFT | 1 << 3, NO_TYPE, PAYER)
    reader = PageTagReader(compressed)
    tags = {reader.codetag(FRAMES.page(pfn)): index for pfn, index in enumerate(sites)}
    assert tags.keys() == set(sites.values())
    assert read(reader) == {
        TaggedPages(site, "lru", PAYER, 1, 1, 1): 1 for site in sites.values() if site
    }
    assert (reader.coverage.read, reader.coverage.unreadable) == (PAGES, 0)
    assert page_ext_bytes(compressed) == 0


@pytest.mark.parametrize("shift", [-1, 64])
def test_a_shift_that_cannot_be_right(compressed: MadeImage, shift: int) -> None:
    compressed.words(VARIABLES + 192, shift % (1 << 32))
    with pytest.raises(ImageError, match=f"alloc_tag_ref_offs is damaged: {shift}"):
        PageTagReader(compressed)


def missed(reader: PageTagReader) -> list[tuple[str, int, str]]:
    return [(one.what, one.address, one.reason) for one in reader.coverage.examples]


def test_why_call_sites_are_missing(image: MadeImage) -> None:
    image.forget(PAGE_EXT)
    reader = PageTagReader(image)
    read(reader)
    assert missed(reader) == [("page_ext of pages", PAGE_EXT + OFFSET, "missing")]
    reader = PageTagReader(image)
    for piece in scan_range(image, PageRange(64, 256)):
        assert not list(reader.read(piece))
    assert missed(reader) == [("page_ext of pages", PAGE_EXT + 64 * SIZE + OFFSET, "missing")]
    image.forget(SECTIONS)
    reader = PageTagReader(image)
    read(reader)
    why = f"not made: {SECTIONS:#x}"
    assert missed(reader) == [("page_ext of pages", FRAMES.page(0), why)]
    image.forget(FRAMES.page(0))
    reader = PageTagReader(image)
    read(reader, 64)
    assert missed(reader) == [("struct pages", FRAMES.page(0), "not in the image")]


def test_a_block_ends_where_the_call_site_is_missing(image: MadeImage) -> None:
    """Nothing is known of that page. The page_ext of the pages 170 to 340 is not in the image."""
    put(image, 128, 0, NO_TYPE, 0)
    for pfn in range(129, 257):
        image.make("struct page", FRAMES.page(pfn), {"page_type": NO_TYPE})
    tag(image, 128)
    assert read(PageTagReader(image)) == {TaggedPages(TAG, "page", 0, 0, 1, 128): 1}
    image.forget(PAGE_EXT + 4096)
    assert read(PageTagReader(image)) == {TaggedPages(TAG, "page", 0, 0, 1, 64): 1}


def test_a_list_of_free_pages_that_is_broken(
    image: MadeImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that may be on it ends a block."""
    put(image, 128, 0, NO_TYPE, 0)
    for pfn in range(129, 257):
        image.make("struct page", FRAMES.page(pfn), {"page_type": NO_TYPE})
    tag(image, 128)
    missing = 0xFFFF888077700000
    image.words(FRAMES.page(132) + 8, missing, missing)
    monkeypatch.setattr(page_alloc, "page_behind", lambda image, at: at >= missing or None)
    reader = PageTagReader(image)
    assert read(reader) == {TaggedPages(TAG, "page", 0, 0, 1, 4): 1}
    [why] = missed(reader)
    assert why[:2] == ("list of free pages", FRAMES.page(132))


def test_kernels_without_sections(image: MadeImage) -> None:
    del image._types[TypeKind.STRUCT, "mem_section"]
    with pytest.raises(ImageError, match="^page_ext is known here with CONFIG_SPARSEMEM only$"):
        PageTagReader(image)


def test_kernels_without_modules(compressed: MadeImage) -> None:
    """An index behind the tags of the kernel is damaged. It leads to no module."""
    del compressed._objects["module_tags"]
    put(compressed, 0, 4 << SHIFT, NO_TYPE, 0)
    put(compressed, 1, 5 << SHIFT, NO_TYPE, 0)
    reader = PageTagReader(compressed)
    assert [reader.codetag(FRAMES.page(pfn)) for pfn in (0, 1)] == [KERNEL_TAGS + 2 * STEP, 0]


def test_sizes_that_are_damaged(image: MadeImage) -> None:
    image.words(VARIABLES + 64, 17)
    why = "^page_ext_size is 24, and the offset of call sites in it 17: one of them is damaged$"
    with pytest.raises(ImageError, match=why):
        PageTagReader(image)


def test_kernels_that_do_not_compress_tags(image: MadeImage) -> None:
    """Up to 6.12 there is no such key."""
    del image._objects["mem_profiling_compressed"]
    tag(image, 3)
    assert PageTagReader(image).codetag(FRAMES.page(3)) == TAG
    assert page_ext_bytes(image) == 8


def test_the_last_page_of_a_section(image: MadeImage) -> None:
    """The tags of two sections are read in two pieces, each from its own table."""
    second = PAGE_EXT + 0x10000
    image.words(SECTIONS + 8, second)
    image.write(second + SECTION * SIZE, bytes(SECTION * SIZE))
    for pfn in (255, 256, 257, 511):
        put(image, pfn, 0, NO_TYPE, 0)
    tag(image, 255)
    image.words(second + 256 * SIZE + OFFSET, TAG + STEP)
    image.words(second + 511 * SIZE + OFFSET, TAG + 2 * STEP)
    reader = PageTagReader(image)
    assert read(reader) == {TaggedPages(TAG + STEP * n, "page", 0, 0, 1, 1): 1 for n in range(3)}
    assert (reader.coverage.read, reader.coverage.unreadable) == (PAGES, 0)
