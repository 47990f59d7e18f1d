# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Trees and allocators of zswap in releases that the lab does not boot.

Each layout follows mm/zswap.c, mm/zsmalloc.c, mm/zbud.c and mm/z3fold.c of the release it names.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from drgn import offsetof
from support.layouts import FRAMES, NODE_1, MadeImage

from memcg_inspect.linux.mm.zswap import ZswapPart, ZswapReader, zswap_cursors

OBJCG = 0xFFFF888000111000
#: Memory of the made kernel, a page for each structure.
POOL, ZPOOL, DRIVER, NAME, ZSPAGE, ZS_POOL, CLASS, SLOTS, INFO, TREES = (
    0xFFFF888010000000 + n * 4096 for n in range(10)
)
ENTRIES = 0xFFFF888020000000
VARIABLES = 0xFFFFFFFF82000000
#: The page frame that holds the data, and the next one of its zspage.
PFN, NEXT = 0x100, 0x200
SWAP_ADDRESS_SPACE_PAGES = 1 << 14

BASE = """
    struct rb_node { unsigned long color; struct rb_node *rb_right; struct rb_node *rb_left; };
    struct rb_root { struct rb_node *rb_node; };
    struct xarray { unsigned int lock; unsigned int flags; void *xa_head; };
    struct xa_node { unsigned char shift; unsigned char offset; unsigned char count;
                     unsigned char nr; void *parent; void *array; void *list[2];
                     void *slots[64]; };
    struct page { unsigned long flags; unsigned long lru[2]; void *mapping; unsigned long index;
                  unsigned long private; unsigned long rest[2]; };
    struct swap_info_struct { unsigned long flags; unsigned int max; };
"""
ZSWAP = """
    struct zpool_driver { char *type; void *owner; %(shrink)s };
    struct zpool { struct zpool_driver *driver; void *pool; };
    struct zswap_pool { %(zpool)s void *acomp_ctx; };
    struct zswap_entry { %(node)s unsigned int length; struct zswap_pool *pool;
                         unsigned long handle; struct obj_cgroup *objcg; };
    struct zswap_tree { struct rb_root rbroot; unsigned int lock; };
    %(header)s
"""
RB_NODE = "struct rb_node rbnode; unsigned long swpentry;"
XA_NODE = "unsigned long swpentry;"


def kernel(release: str) -> MadeImage:
    minor = int(release.split(".")[1])
    image = MadeImage()
    several, evicts = 6 <= minor <= 10, minor <= 4
    image.declare(BASE)
    image.declare(
        ZSWAP
        % {
            "shrink": "void *shrink;" if evicts else "",
            "zpool": "struct zpool *zpools[32];" if several else "struct zpool *zpool;",
            "node": RB_NODE if minor <= 9 else XA_NODE,
            "header": "struct zswap_header { unsigned long swpentry; };" if evicts else "",
        }
    )
    image.words(VARIABLES, TREES, 0)
    tree = "struct zswap_tree" if minor <= 9 else "struct xarray"
    image.variable("zswap_trees", f"{tree} *[2]", VARIABLES)
    if minor >= 9:
        image.variable("nr_zswap_trees", "unsigned int[2]", VARIABLES + 64)
        image.variable("swap_info", "struct swap_info_struct *[2]", VARIABLES + 128)
        image.words(VARIABLES + 64, 3)
        image.words(VARIABLES + 128, INFO, 0)
        image.make("struct swap_info_struct", INFO, {"max": 3 * SWAP_ADDRESS_SPACE_PAGES})
    return image


def put_entry(image: MadeImage, number: int, handle: int = 0, length: int = 100) -> int:
    address = ENTRIES + number * 128
    members = {"length": length, "pool": POOL, "handle": handle, "objcg": OBJCG}
    image.make("struct zswap_entry", address, members)
    return address


@pytest.mark.parametrize("release", ["6.2", "6.8", "6.9", "6.10", "6.14"])
def test_trees(release: str) -> None:
    """
    Up to 6.8 a swap device has one tree. 6.9 has an array of red-black trees, 6.10 of XArrays.
    """
    image = kernel(release)
    entries = [put_entry(image, n) for n in range(6)]
    minor = int(release.split(".")[1])
    if minor >= 10:
        for n in range(3):
            image.make("struct xarray", TREES + n * 16, {})
        node = TREES + 1024
        image.words(TREES + 8, node + 2)
        image.make("struct xa_node", node, {})
        image.words(node + 40, *entries[:4])
        image.words(TREES + 2 * 16 + 8, entries[4])
        expected = entries[:5]
    else:
        image.make("struct zswap_tree", TREES, {"rbroot.rb_node": entries[0]})
        image.words(entries[0] + 8, entries[1], entries[2])
        image.words(entries[2] + 8, 0, entries[3])
        expected = entries[:4]
        # What is behind the one tree of a device is something else.
        image.make("struct zswap_tree", TREES + 16, {"rbroot.rb_node": entries[5]})
        if minor == 9:
            image.make("struct zswap_tree", TREES + 16, {})
            image.make("struct zswap_tree", TREES + 32, {"rbroot.rb_node": entries[4]})
            expected = entries[:5]
    reader = ZswapReader(image)
    found = list(reader.entries())
    assert sorted(entry.address for entry in found) == expected
    assert {(entry.length, entry.objcg) for entry in found} == {(100, OBJCG)}
    assert not reader.coverage.unreadable


def test_entries_that_are_on_no_list() -> None:
    """Until it is on an LRU list, an entry has what was in its slot before (6.13)."""
    image = kernel("6.14")
    image.declare(
        """
        struct list_head { struct list_head *next; struct list_head *prev; };
        struct zswap_entry { unsigned long swpentry; unsigned int length; struct zswap_pool *pool;
                             unsigned long handle; struct obj_cgroup *objcg;
                             struct list_head lru; };
        """
    )
    head = ENTRIES + 4096
    lru = offsetof(image.type("struct zswap_entry"), "lru")

    def listed(following: int, before: int, forth: int, back: int, length: int = 100) -> bool:
        entry = put_entry(image, 0, length=length)
        links = [entry + lru if link == 0 else link for link in (following, before, forth, back)]
        image.words(entry + lru, *links[:2])
        image.words(head, *links[2:])
        return ZswapReader(image).entry(entry).listed

    assert listed(head, head, 0, 0)
    # __list_add() of another entry behind it, and __list_del() of one before it
    assert listed(head, head, 0, 0x1234)
    assert listed(head, head, 0x1234, 0)
    # list_del_init(), and memory that was something else before
    assert not listed(0, 0, head, head)
    assert not listed(0xDEAD, 0, head, head)
    assert not listed(head, head, head, head)
    # Pages that are all the same have no data (up to 6.12).
    assert listed(0xDEAD, 0xDEAD, head, head, length=0)


@pytest.mark.parametrize("release", ["6.9", "6.10"])
def test_more_trees_than_the_device_has_pages_for(release: str) -> None:
    image = kernel(release)
    image.words(VARIABLES + 64, 4)
    reader = ZswapReader(image)
    assert list(reader.entries()) == []
    assert reader.coverage.unreadable == 1


def put_pool(image: MadeImage, release: str, allocator: bytes) -> None:
    minor = int(release.split(".")[1])
    image.write(NAME, allocator + b"\0")
    evicts = minor <= 4
    shrink = {"shrink": 0xFFFFFFFF81000000} if evicts else {}
    image.make("struct zpool_driver", DRIVER, {"type": NAME} | shrink)
    image.make("struct zpool", ZPOOL, {"driver": DRIVER})
    image.make("struct zswap_pool", POOL, {})
    image.words(POOL, ZPOOL)
    image.make("struct page", FRAMES.page(PFN), {"private": ZSPAGE, "index": FRAMES.page(NEXT)})
    image.words(FRAMES.page(PFN), NODE_1)
    image.make("struct page", FRAMES.page(NEXT), {"private": ZSPAGE})


def part_of(image: MadeImage, handle: int, length: int) -> list[ZswapPart] | None:
    reader = ZswapReader(image)
    return reader.parts(reader.entry(put_entry(image, 9, handle, length)))


ZSMALLOC = """
    struct size_class { int size; int objs_per_zspage; int pages_per_zspage; };
    struct zs_pool { char *name; struct size_class *size_class[255]; };
    struct zspage {
        struct { unsigned int huge:1; unsigned int fullness:%d; unsigned int class:9; };
        unsigned int inuse; unsigned int freeobj; struct page *first_page;
        unsigned long list[2]; struct zs_pool *pool;
    };
"""


class Location(NamedTuple):
    """
    :ivar fullness: ``FULLNESS_BITS``
    :ivar tag_bits: ``OBJ_TAG_BITS`` below the index
    :ivar header: bytes before the data
    """

    fullness: int
    tag_bits: int
    header: int = 0


LOCATIONS = {
    "6.2": Location(2, 2, 8),
    "6.4": Location(4, 2, 8),
    "6.5": Location(4, 1),
    "6.8": Location(4, 1),
    "6.9": Location(4, 0),
    "6.13": Location(4, 0),
}


@pytest.mark.parametrize("release", LOCATIONS)
def test_zsmalloc(release: str) -> None:
    """The second object of 3,072 bytes is on two pages."""
    image, location = kernel(release), LOCATIONS[release]
    put_pool(image, release, b"zsmalloc")
    image.declare(ZSMALLOC % location.fullness)
    image.make(
        "struct zspage", ZSPAGE, {"class": 7, "first_page": FRAMES.page(PFN), "pool": ZS_POOL}
    )
    image.make("struct zs_pool", ZS_POOL, {})
    image.words(ZS_POOL + 8 * 8, CLASS)
    image.make("struct size_class", CLASS, {"size": 3072, "pages_per_zspage": 2})
    handle = SLOTS
    image.words(handle, PFN << 24 | 1 << location.tag_bits)
    image.words(FRAMES.virt(FRAMES.page(PFN)) + 3072, handle | 1)
    start = 3072 + 8 + location.header
    assert part_of(image, handle, 2000) == [
        ZswapPart(FRAMES.page(PFN), 1, start, 4096 - start),
        ZswapPart(FRAMES.page(NEXT), 0, 0, start + 2000 - 4096),
    ]


@pytest.mark.parametrize("release", ["6.1", "6.4", "6.6", "6.14"])
def test_zbud(release: str) -> None:
    """Handles are addresses. Up to 6.4, zswap stores its header before the data."""
    image = kernel(release)
    put_pool(image, release, b"zbud")
    header = 8 if release in ("6.1", "6.4") else 0
    start = FRAMES.virt(FRAMES.page(PFN))
    expected = [ZswapPart(FRAMES.page(PFN), 1, 64 + header, 1000)]
    assert part_of(image, start + 64, 1000) == expected
    last = 4096 - 17 * 64
    expected = [ZswapPart(FRAMES.page(PFN), 1, last + header, 1000)]
    assert part_of(image, start + last, 1000) == expected
    assert part_of(image, start + last, 1100) is None  # beyond the page


Z3FOLD = """
    struct z3fold_header {
        unsigned long buddy[2]; unsigned int page_lock; int refcount; unsigned long work[4];
        void *slots; void *pool; short cpu; unsigned short first_chunks;
        unsigned short middle_chunks; unsigned short last_chunks; unsigned short start_middle;
        unsigned short first_num:2; unsigned short mapped_count:2;
    };
"""


@pytest.mark.parametrize("release", ["6.1", "6.8", "6.14"])
@pytest.mark.parametrize("first_num", [0, 3])
def test_z3fold(release: str, first_num: int) -> None:
    """A slot holds the address of the page, the number of the object, and chunks of the last."""
    image = kernel(release)
    put_pool(image, release, b"z3fold")
    image.declare(Z3FOLD)
    header = 8 if release == "6.1" else 0
    start = FRAMES.virt(FRAMES.page(PFN))
    members = {"start_middle": 20, "last_chunks": 9, "first_num": first_num}
    image.make("struct z3fold_header", start, members)
    for buddy, chunks, offset in ((1, 0, 128), (2, 0, 20 * 64), (3, 9, 4096 - 9 * 64)):
        image.words(SLOTS, start + (buddy + first_num & 3) | chunks << 2)
        expected = [ZswapPart(FRAMES.page(PFN), 1, offset + header, 500)]
        assert part_of(image, SLOTS, 500) == expected
    image.words(SLOTS, start + first_num)  # HEADLESS, which no slot names
    assert part_of(image, SLOTS, 500) is None
    expected = [ZswapPart(FRAMES.page(PFN), 1, header, 4000)]
    assert part_of(image, start | 1, 4000) == expected


@pytest.mark.parametrize(("release", "allocator"), [("6.1", b"z3fold"), ("6.1", b"zsmalloc")])
def test_an_allocator_without_types(release: str, allocator: bytes) -> None:
    """The types of a module may be missing. The entries are read, their places are not known."""
    image = kernel(release)
    put_pool(image, release, allocator)
    reader = ZswapReader(image)
    entry = reader.entry(put_entry(image, 0, SLOTS))
    image.words(SLOTS, FRAMES.virt(FRAMES.page(PFN)) + 1)
    assert reader.nodes(entry) == {-1: 100}
    assert reader.placement.unreadable == 1


def test_cursors_of_pools() -> None:
    """In 6.8 each pool has a cursor."""
    image = MadeImage()
    image.declare(
        """
        struct list_head { struct list_head *next; struct list_head *prev; };
        struct zswap_pool { struct list_head list; struct mem_cgroup *next_shrink; };
        """
    )
    image.variable("zswap_pools", "struct list_head", VARIABLES)
    image.words(VARIABLES, POOL, ZPOOL)
    image.words(POOL, ZPOOL, VARIABLES, 0xABC0)
    image.words(ZPOOL, VARIABLES, POOL, 0)
    assert zswap_cursors(image) == [0xABC0, 0]


def test_handles_that_lead_to_no_object() -> None:
    """An object ends in its page, and begins behind the header of z3fold."""
    image = kernel("6.14")
    put_pool(image, "6.14", b"zbud")
    start = FRAMES.virt(FRAMES.page(PFN))
    assert part_of(image, start, 4096) == [ZswapPart(FRAMES.page(PFN), 1, 0, 4096)]
    assert part_of(image, start + 1, 4096) is None
    assert part_of(image, FRAMES.direct_map - 64, 10) is None
    image.write(NAME, b"z3fold\0")
    image.declare(Z3FOLD)
    image.make("struct z3fold_header", start, {"start_middle": 1})
    image.words(SLOTS, start + 2)
    assert part_of(image, SLOTS, 10) is None  # at byte 64, inside the header
    image.make("struct z3fold_header", start, {"start_middle": 2})
    assert part_of(image, SLOTS, 10) == [ZswapPart(FRAMES.page(PFN), 1, 128, 10)]
    image.words(SLOTS, start + 3 | 63 << 2)
    assert part_of(image, SLOTS, 10) is None  # at byte 64, too


def test_an_allocator_that_is_not_known() -> None:
    image = kernel("6.14")
    put_pool(image, "6.14", b"other")
    reader = ZswapReader(image)
    entry = reader.entry(put_entry(image, 0, SLOTS))
    assert reader.parts(entry) is None
    [missed] = reader.placement.examples
    assert (missed.what, missed.address) == ("data of a zswap entry", ENTRIES)
    assert missed.reason == "the allocator other is not known"
    assert (reader.placement.read, reader.placement.unreadable) == (0, 1)


def test_an_allocator_that_cannot_evict_objects() -> None:
    """zpool_evictable(), up to 6.4: zswap stores no header then."""
    image = kernel("6.4")
    put_pool(image, "6.4", b"zbud")
    image.make("struct zpool_driver", DRIVER, {"type": NAME})
    start = FRAMES.virt(FRAMES.page(PFN))
    assert part_of(image, start + 64, 10) == [ZswapPart(FRAMES.page(PFN), 1, 64, 10)]


def test_the_allocator_of_each_pool() -> None:
    """A pool of another allocator may still have entries of before."""
    image = kernel("6.14")
    put_pool(image, "6.14", b"zbud")
    image.write(NAME + 64, b"other\0")
    image.make("struct zpool_driver", DRIVER + 64, {"type": NAME + 64})
    image.make("struct zpool", ZPOOL + 64, {"driver": DRIVER + 64})
    image.make("struct zswap_pool", POOL + 64, {"zpool": ZPOOL + 64})
    reader = ZswapReader(image)
    handle = FRAMES.virt(FRAMES.page(PFN))
    entry = reader.entry(put_entry(image, 0, handle))
    for _ in range(2):
        assert reader.parts(entry) is not None
        assert reader.parts(entry._replace(pool=POOL + 64)) is None


def test_why_an_object_is_not_found() -> None:
    """zbud and z3fold: the reason of each, and the first and the last byte of a page."""
    image = kernel("6.14")
    put_pool(image, "6.14", b"zbud")
    start = FRAMES.virt(FRAMES.page(PFN))

    def why(handle: int, length: int) -> tuple[str, int, str]:
        reader = ZswapReader(image)
        assert reader.parts(reader.entry(put_entry(image, 9, handle, length))) is None
        [missed] = reader.placement.examples
        return missed.what, missed.address, missed.reason

    what = "data of a zswap entry", ENTRIES + 9 * 128
    assert why(start + 96, 4001) == (*what, "the handle does not lead to an object")
    assert part_of(image, start + 96, 4000) == [ZswapPart(FRAMES.page(PFN), 1, 96, 4000)]
    assert why(FRAMES.direct_map - 4096, 10)[2] == "the handle does not lead to an object"
    image.make("struct page", FRAMES.page(0), {})
    assert part_of(image, FRAMES.direct_map, 10) == [ZswapPart(FRAMES.page(0), 0, 0, 10)]
    image.write(NAME, b"z3fold\0")
    image.declare(Z3FOLD)
    image.make("struct z3fold_header", start, {"start_middle": 1})
    image.words(SLOTS, start + 2)
    assert why(SLOTS, 10) == (*what, "the slot of the handle does not lead to an object")


def test_allocators_are_read_once() -> None:
    image = kernel("6.14")
    put_pool(image, "6.14", b"zbud")
    places = [put_entry(image, n, FRAMES.virt(FRAMES.page(PFN))) for n in range(2)]
    reader = ZswapReader(image)
    entries = [reader.entry(place) for place in places]
    before = image.memory.reads
    assert reader.parts(entries[0]) is not None
    first = image.memory.reads - before
    assert reader.parts(entries[1]) is not None
    assert image.memory.reads - before - first < first
