# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Entries of zswap and their data in zsmalloc, made as in mm/zswap.c and mm/zsmalloc.c of 6.18.

``tests/linux/test_layouts_zswap.py`` has trees and allocators of older releases.
"""

from __future__ import annotations

import pytest
from drgn import FaultError
from support.layouts import FRAMES, NODE_1, MadeImage

from memcg_inspect.linux.mm.zswap import (
    ZswapEntry,
    ZswapPart,
    ZswapReader,
    zswap_cursors,
    zswap_entry_cache,
)

OBJCG, MISSING, VARIABLES = 0xFFFF888000111000, 0xFFFF888077700000, 0xFFFFFFFF82000000
TREES, INFO, ZSPAGE, ZS_POOL, CLASS, SLOTS, POOL = (0xFFFF888010000000 + n * 4096 for n in range(7))
ENTRIES = 0xFFFF888020000000
#: Page frames of a zspage, of which every second one is on node 1.
PFNS = (0x100, 0x201, 0x102, 0x203)
#: MAX_POSSIBLE_PHYSMEM_BITS of x86-64: a page frame number is above that many bits of a location.
SHIFT = 64 - (52 - 12)
#: ZSWAP_ADDRESS_SPACE_PAGES
PAGES_OF_TREE = 1 << 14

TYPES = """
    struct list_head { struct list_head *next; struct list_head *prev; };
    struct xarray { unsigned int lock; unsigned int flags; void *xa_head; };
    struct xa_node { void *head[5]; void *slots[64]; };
    struct page { unsigned long flags; unsigned long lru[2]; void *mapping; unsigned long index;
                  unsigned long private; unsigned long rest[2]; };
    struct zpdesc { unsigned long flags; unsigned long lru[2]; void *movable_ops;
                    struct zpdesc *next; struct zspage *zspage; };
    struct swap_info_struct { unsigned long flags; unsigned int max; };
    struct size_class { int size; int objs_per_zspage; int pages_per_zspage; };
    struct zs_pool { char *name; struct size_class *size_class[255]; };
    struct zspage {
        struct { unsigned int huge:1; unsigned int fullness:4; unsigned int class:9; };
        unsigned int inuse; unsigned int freeobj; struct zpdesc *first_zpdesc;
        unsigned long list[2]; struct zs_pool *pool;
    };
"""
ENTRY = """
    struct zswap_entry { unsigned long swpentry; unsigned int length; struct zswap_pool *pool;
                         unsigned long handle; struct obj_cgroup *objcg; %s };
"""


def kernel(more: str = "") -> MadeImage:
    """Return a kernel with a swap device of three trees that are empty."""
    image = MadeImage()
    image.declare(TYPES + ENTRY % more)
    image.variable("zswap_trees", "struct xarray *[2]", VARIABLES)
    image.words(VARIABLES, TREES, 0)
    image.variable("nr_zswap_trees", "unsigned int[2]", VARIABLES + 64)
    image.words(VARIABLES + 64, 3)
    image.variable("swap_info", "struct swap_info_struct *[2]", VARIABLES + 128)
    image.words(VARIABLES + 128, INFO, 0)
    image.make("struct swap_info_struct", INFO, {"max": 2 * PAGES_OF_TREE + 1})
    for n in range(3):
        image.make("struct xarray", TREES + 16 * n, {})
    return image


def put_entry(image: MadeImage, number: int, **members: int) -> int:
    address = ENTRIES + number * 128
    given = {"length": 100, "objcg": OBJCG, "pool": POOL} | members
    image.make("struct zswap_entry", address, given)
    return address


def put_tree(image: MadeImage, number: int, entry: int) -> None:
    image.words(TREES + 16 * number + 8, entry)


def put_zspage(image: MadeImage, size: int, pages: int = len(PFNS)) -> None:
    places = [FRAMES.page(pfn) for pfn in PFNS]
    for page, after in zip(places, [*places[1:], 0], strict=True):
        image.make("struct zpdesc", page, {"next": after, "zspage": ZSPAGE})
        image.words(page, NODE_1 * (FRAMES.pfn(page) & 1))
    image.make("struct zspage", ZSPAGE, {"class": 7, "first_zpdesc": places[0], "pool": ZS_POOL})
    image.make("struct zs_pool", ZS_POOL, {})
    image.words(ZS_POOL + 8 * 8, CLASS)
    image.make("struct size_class", CLASS, {"size": size, "pages_per_zspage": pages})


def put_object(image: MadeImage, number: int, page: int, offset: int, low: int, shift: int) -> int:
    """Write the header of an object; return its handle."""
    handle, pfn = SLOTS + 8 * number, PFNS[page]
    image.words(handle, pfn << shift | low)
    image.words(FRAMES.virt(FRAMES.page(pfn)) + offset, handle | 1)
    return handle


def parts(image: MadeImage, handle: int, length: int = 100) -> list[ZswapPart] | None:
    return ZswapReader(image).parts(ZswapEntry(ENTRIES, length, handle, OBJCG, POOL))


def part(page: int, offset: int, length: int) -> ZswapPart:
    return ZswapPart(FRAMES.page(PFNS[page]), PFNS[page] & 1, offset, length)


def test_entries_of_all_trees() -> None:
    image = kernel()
    entries = [put_entry(image, n, objcg=OBJCG | n) for n in range(2)]
    put_tree(image, 0, entries[0])
    put_tree(image, 2, entries[1])
    reader = ZswapReader(image)
    # Flags are no part of the pointer to the obj_cgroup.
    assert list(reader.entries()) == [ZswapEntry(entry, 100, 0, OBJCG, POOL) for entry in entries]
    assert (reader.coverage.read, reader.coverage.unreadable) == (2, 0)
    assert zswap_entry_cache(image) == 0
    image.variable("zswap_entry_cache", "void *", VARIABLES + 256)
    image.words(VARIABLES + 256, ENTRIES)
    assert zswap_entry_cache(image) == ENTRIES


def test_entries_that_are_not_in_the_image() -> None:
    image = kernel()
    put_tree(image, 0, MISSING)
    put_tree(image, 1, MISSING + 2)  # a node
    entry = put_entry(image, 0)
    put_tree(image, 2, entry)
    reader = ZswapReader(image)
    assert [found.address for found in reader.entries()] == [entry]
    assert (reader.coverage.read, reader.coverage.unreadable) == (1, 2)
    missed = {(one.what, one.address) for one in reader.coverage.examples}
    assert ("zswap entry", MISSING) in missed
    assert {what for what, _ in missed} == {"zswap entry", "tree of zswap entries"}


@pytest.mark.parametrize(("max_pages", "is_right"), [(2, False), (2.5, True), (3, True)])
def test_trees_are_as_many_as_the_device_needs(max_pages: float, is_right: bool) -> None:
    """The last one is for fewer pages. More are the sign of damage."""
    image = kernel()
    put_tree(image, 2, put_entry(image, 0))
    size = int(max_pages * PAGES_OF_TREE)
    image.make("struct swap_info_struct", INFO, {"max": size})
    reader = ZswapReader(image)
    assert len(list(reader.entries())) == is_right
    assert reader.coverage.unreadable == (not is_right)


def test_trees_of_a_device_that_is_gone() -> None:
    image = kernel()
    image.words(VARIABLES + 128, 0)
    reader = ZswapReader(image)
    assert list(reader.entries()) == []
    assert reader.coverage.unreadable == 1


def test_trees_that_are_not_in_the_image() -> None:
    """Those of the other device are read."""
    image = kernel()
    image.words(VARIABLES, MISSING, TREES)
    image.words(VARIABLES + 68, 3)
    image.words(VARIABLES + 136, INFO)
    entry = put_entry(image, 0)
    put_tree(image, 2, entry)
    reader = ZswapReader(image)
    assert [found.address for found in reader.entries()] == [entry]
    missed = [(one.what, one.address) for one in reader.coverage.examples]
    assert missed == [("tree of zswap entries", MISSING + 16 * n + 8) for n in range(3)]


def test_what_is_behind_the_links_of_an_entry() -> None:
    """It is no part of them."""
    image = kernel("struct list_head lru; unsigned long more")
    entry = put_entry(image, 0, more=0x1234)
    links = entry + 40
    image.words(links, TREES + 512, 0)
    image.words(TREES + 512, 0, links)
    assert ZswapReader(image).entry(entry).listed
    image.words(TREES + 512, 0, 0)
    assert not ZswapReader(image).entry(entry).listed


def test_entries_take_few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in slabs, one near the other. Those of a running kernel are read one by one."""
    image = kernel()
    entries = [put_entry(image, n) for n in range(30)]
    for is_moving in (False, True):
        monkeypatch.setattr(MadeImage, "is_moving", is_moving)
        reader, before = ZswapReader(image), image.memory.reads
        assert {reader.entry(entry).length for entry in entries} == {100}
        assert image.memory.reads - before == (30 if is_moving else 1)


def test_kernels_without_zswap() -> None:
    reader = ZswapReader(MadeImage())
    assert (reader.has_zswap, reader.entry_size, list(reader.entries())) == (False, 0, [])
    image = MadeImage()
    image.declare(TYPES + ENTRY % "")
    assert list(ZswapReader(image).entries()) == []


@pytest.mark.parametrize(("beyond", "is_right"), [(0, False), (1, True), (99, True), (100, False)])
def test_bytes_that_another_obj_cgroup_pays_for(beyond: int, is_right: bool) -> None:
    """Per-node series: a part of the data, neither none nor all of it."""
    image = kernel("unsigned int beyond; int beyond_nid;")
    entry = put_entry(image, 0, beyond=beyond, beyond_nid=1)
    found = ZswapReader(image).entry(entry)
    assert (found.beyond, found.beyond_nid) == ((beyond, 1) if is_right else (0, -1))


@pytest.mark.parametrize("shift", [64 - (bits - 12) for bits in (52, 46, 48, 50)])
def test_where_the_page_frame_number_is_in_a_location(shift: int) -> None:
    """MAX_POSSIBLE_PHYSMEM_BITS depends on the machine; elsewhere it is MAX_PHYSMEM_BITS."""
    image = kernel()
    image.variable("VMCOREINFO", "char[64]", VARIABLES + 512)
    image.write(VARIABLES + 512, b"NUMBER(MAX_PHYSMEM_BITS)=50\n\0")
    put_zspage(image, 512)
    handle = put_object(image, 0, 0, 512 * 3, 3, shift)
    reader = ZswapReader(image)
    entry = ZswapEntry(ENTRIES, 100, handle, OBJCG, POOL)
    assert reader.parts(entry) == [part(0, 512 * 3 + 8, 100)]
    # It is the same for all handles of a kernel.
    other = put_object(image, 1, 0, 512 * 5, 5, shift + 1)
    assert reader.parts(entry._replace(handle=other)) is None
    assert (reader.placement.read, reader.placement.unreadable) == (1, 1)


@pytest.mark.parametrize("low", [13, 13 << 1, 13 << 2, 7 << 15 | 13])
def test_an_object_on_several_pages(low: int) -> None:
    """Of 1,040 bytes each, number 13 begins in the fourth page, and number 3 goes over to two."""
    image = kernel()
    put_zspage(image, 1040)
    handle = put_object(image, 0, 3, 13 * 1040 - 3 * 4096, low, SHIFT)
    assert parts(image, handle) == [part(3, 13 * 1040 - 3 * 4096 + 8, 100)]
    # The second page, from which the object goes on in the third one
    handle = put_object(image, 1, 1, 7 * 1040 - 4096, 7, SHIFT)
    start = 7 * 1040 - 4096 + 8
    assert parts(image, handle, 1032) == [
        part(1, start, 4096 - start),
        part(2, 0, start + 1032 - 4096),
    ]
    assert parts(image, handle, 4096 - start) == [part(1, start, 4096 - start)]
    # The whole of three pages, as no object has: the zspage ends before.
    end = 4 * 4096 - 7 * 1040 - 8
    found = parts(image, handle, end)
    assert found is not None and len(found) == 3 and sum(one.length for one in found) == end
    assert parts(image, handle, end + 1) is None


def test_an_object_that_is_a_whole_page() -> None:
    """ZsHugePage(): it is alone in its zspage, and has no header."""
    image = kernel()
    put_zspage(image, 4096, pages=1)
    image.words(SLOTS, PFNS[0] << SHIFT)
    assert parts(image, SLOTS, 3900) == [part(0, 0, 3900)]
    # Others have one.
    image.make("struct size_class", CLASS, {"size": 4096, "pages_per_zspage": 2})
    assert parts(image, SLOTS, 3900) is None
    image.make("struct size_class", CLASS, {"size": 2048, "pages_per_zspage": 1})
    assert parts(image, SLOTS, 1900) is None
    handle = put_object(image, 0, 0, 2048, 1, SHIFT)
    assert parts(image, handle, 1900) == [part(0, 2048 + 8, 1900)]


@pytest.mark.parametrize(("pages", "is_right"), [(0, False), (16, True), (17, False)])
def test_a_zspage_has_at_most_16_pages(pages: int, is_right: bool) -> None:
    """CONFIG_ZSMALLOC_CHAIN_SIZE"""
    image = kernel()
    put_zspage(image, 512, pages)
    image.words(FRAMES.page(PFNS[-1]) + 32, FRAMES.page(PFNS[-1]))  # more pages behind the last
    handle = put_object(image, 0, 0, 512, 1, SHIFT)
    assert parts(image, handle) == ([part(0, 520, 100)] if is_right else None)


def test_a_handle_of_another_object() -> None:
    """The slot was freed, and its object is that of another handle now."""
    image = kernel()
    put_zspage(image, 512)
    handle = put_object(image, 0, 0, 512, 1, SHIFT)
    image.words(FRAMES.virt(FRAMES.page(PFNS[0])) + 512, SLOTS + 64 | 1)
    assert parts(image, handle) is None
    image.words(
        FRAMES.virt(FRAMES.page(PFNS[0])) + 512, handle
    )  # OBJ_ALLOCATED_TAG is no part of it
    assert parts(image, handle) == [part(0, 520, 100)]
    assert parts(image, MISSING) is None


def test_why_the_data_of_an_entry_is_not_found() -> None:
    """Once a handle led to its object, it is known where page frame numbers are."""
    image = kernel()
    put_zspage(image, 512)
    good = put_object(image, 0, 0, 512, 1, SHIFT)
    other = put_object(image, 1, 0, 1024, 2, SHIFT)
    image.words(SLOTS + 16, PFNS[0] << SHIFT | 3, 0x300 << SHIFT | 3)
    image.words(FRAMES.page(0x300) + 40, ZSPAGE + 512)
    image.make("struct zspage", ZSPAGE + 512, {"class": 9, "pool": ZS_POOL})
    image.words(ZS_POOL + 8 * 10, CLASS + 512)
    image.make("struct size_class", CLASS + 512, {"size": 512, "pages_per_zspage": 17})
    reader = ZswapReader(image)

    def why(handle: int, length: int = 100) -> tuple[str, int, str]:
        reader.placement.examples.clear()
        assert reader.parts(ZswapEntry(ENTRIES, length, handle, OBJCG, POOL)) is None
        [missed] = reader.placement.examples
        return missed.what, missed.address, missed.reason

    assert reader.parts(ZswapEntry(ENTRIES, 100, good, OBJCG, POOL)) == [part(0, 520, 100)]
    what = "data of a zswap entry", ENTRIES
    longer = 4 * 4096 - 1024 - 8 + 1
    assert why(other, longer) == (*what, "the object is longer than its zspage")
    assert why(MISSING) == (*what, f"not made: {MISSING:#x}")
    assert why(SLOTS + 16) == (*what, "the header of the object does not have its handle")
    assert why(SLOTS + 24) == (*what, f"a zspage of 17 pages: {CLASS + 512:#x}")


def test_objects_of_a_zspage_take_few_reads() -> None:
    """Their handles lie in one slab, and the zspage is read once."""
    image = kernel()
    put_zspage(image, 96)
    handles = [put_object(image, n, 0, 96 * n, n, SHIFT) for n in range(40)]
    reader = ZswapReader(image)
    for n, handle in enumerate(handles):
        assert reader.parts(ZswapEntry(ENTRIES, 80, handle, OBJCG, POOL)) == [
            part(0, 96 * n + 8, 80)
        ]
    assert image.memory.reads < 12


def test_objects_of_a_running_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles, zspages and nodes of pages change: none is kept."""
    image = kernel()
    monkeypatch.setattr(MadeImage, "is_moving", True)
    put_zspage(image, 512)
    handle, reader = put_object(image, 0, 0, 512, 1, SHIFT), ZswapReader(image)
    entry = ZswapEntry(ENTRIES, 100, handle, OBJCG, POOL)
    assert reader.parts(entry) == [part(0, 520, 100)]
    put_zspage(image, 1024)
    put_object(image, 0, 0, 3072, 3, SHIFT)
    image.words(FRAMES.page(PFNS[0]), NODE_1)
    assert reader.parts(entry) == [part(0, 3080, 100)._replace(nid=1)]


def test_bytes_of_data_by_node() -> None:
    image = kernel()
    put_zspage(image, 4000)
    handles = [put_object(image, n, 0, 4000 * n, n, SHIFT) for n in (0, 1)]
    reader = ZswapReader(image)

    def nodes(handle: int, length: int) -> dict[int, int]:
        return reader.nodes(ZswapEntry(ENTRIES, length, handle, OBJCG, POOL))

    assert nodes(handles[0], 3900) == {0: 3900}
    assert nodes(handles[1], 3900) == {0: 88, 1: 3812}
    assert nodes(handles[1], 10_000) == {0: 88 + 4096, 1: 4096 + 1720}
    assert nodes(MISSING, 70) == {-1: 70}
    assert nodes(MISSING, 0) == {}  # a page that is all the same (up to 6.12)
    assert (reader.placement.read, reader.placement.unreadable) == (3, 1)


def test_the_entry_whose_data_includes_a_byte() -> None:
    image = kernel()
    put_zspage(image, 512)
    for number in (0, 1):
        handle = put_object(image, number, 0, 512 * number, number, SHIFT)
        put_tree(image, number, put_entry(image, number, handle=handle))
    put_tree(image, 2, put_entry(image, 2, length=0, handle=MISSING))
    reader, page = ZswapReader(image), FRAMES.page(PFNS[0])

    def owner(offset: int, page: int = page) -> int | None:
        found = reader.owner(page, offset)
        return None if found is None else found.address

    offsets = (7, 8, 107, 108, 519, 520, 619, 620)
    first, second = ENTRIES, ENTRIES + 128
    assert [owner(offset) for offset in offsets] == [
        *(None, first, first, None, None, second, second, None)
    ]
    assert owner(8, FRAMES.page(PFNS[1])) is None
    assert reader.placement.unreadable == 0


def test_where_zswap_goes_on_to_write_back() -> None:
    """6.9 has one cursor, 6.8 one of each pool, and older kernels have none."""
    image = MadeImage()
    image.declare("struct list_head { struct list_head *next; struct list_head *prev; };")
    assert zswap_cursors(image) == []
    image.declare("struct zswap_pool { struct list_head list; struct mem_cgroup *next_shrink; };")
    image.variable("zswap_pools", "struct list_head", VARIABLES)
    image.words(VARIABLES, MISSING, MISSING)
    with pytest.raises(FaultError):
        zswap_cursors(image)
    image.declare("struct mem_cgroup { long id; };")
    image.variable("zswap_next_shrink", "struct mem_cgroup *", VARIABLES + 64)
    image.words(VARIABLES + 64, 0xABC0)
    assert zswap_cursors(image) == [0xABC0]


def test_cursors_of_pools_that_are_not_in_the_image() -> None:
    """In 6.8 each pool has one. The first fault ends the search."""
    image = MadeImage()
    image.declare("struct list_head { struct list_head *next; struct list_head *prev; };")
    image.declare("struct zswap_pool { struct list_head list; struct mem_cgroup *next_shrink; };")
    image.variable("zswap_pools", "struct list_head", VARIABLES)
    image.words(VARIABLES, POOL, MISSING)
    image.words(POOL, MISSING, VARIABLES, 0xABC0)
    with pytest.raises(FaultError) as raised:
        zswap_cursors(image)
    assert raised.value.address in range(MISSING, MISSING + 24)
    image.variable("zswap_next_shrink", "unsigned long", MISSING)
    with pytest.raises(FaultError):
        zswap_cursors(image)
    image.variable("zswap_entry_cache", "void *", MISSING)
    with pytest.raises(FaultError):
        zswap_entry_cache(image)
