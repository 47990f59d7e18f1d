# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The stocks of CPUs, in structures made as mm/memcontrol.c has them, and the most that they hold.

There are two CPUs, and pages of 4 KiB.
"""

from __future__ import annotations

import pytest
from support.layouts import MadeImage

from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.memcontrol_stock import (
    Bound,
    charge_stock_bound,
    largest_slab_charge,
    obj_stock_name,
    objcg_bytes_bound,
    read_charge_stocks,
    read_obj_stocks,
    slab_bytes_bound,
)
from memcg_inspect.model import ChargeStock, Coverage, ObjStock

VARIABLES, MISSING = 0xFFFFFFFF82000000, 0xFFFF888077700000
CPUS = (0xFFFF888040000000, 0xFFFF888040100000)
#: ``__percpu`` addresses of both stocks.
PAGES, OBJECTS = 0x10000, 0x20000
OBJCG, OTHER, MEMCG, PGDAT = (0xFFFF888030000000 + n * 4096 for n in range(4))
CACHES = 0xFFFF888031000000

TYPES = """
    struct list_head { struct list_head *next; struct list_head *prev; };
    struct atomic { int counter; };
    struct local_lock { };
    struct trylock { unsigned char acquired; };
    struct pglist_data { long id; int node_id; };
    struct kmem_cache { unsigned long id; unsigned int size; struct list_head list; };
    struct obj_cgroup { long id; };
    struct mem_cgroup { long id; };
"""
#: Up to 6.14: one stock. The lock does not record that it is held.
OLD = """
    struct memcg_stock_pcp {
        struct local_lock stock_lock; struct mem_cgroup *cached; unsigned int nr_pages;
        struct obj_cgroup *cached_objcg; struct pglist_data *cached_pgdat; unsigned int nr_bytes;
        int nr_slab_reclaimable_b; int nr_slab_unreclaimable_b;
    };
"""
#: 6.15: it does.
SLOT = OLD.replace("struct local_lock", "struct trylock")
#: 7.2: several slots of objects.
SLOTS = """
    struct memcg_stock_pcp {
        struct trylock lock; unsigned char nr_pages[7]; struct mem_cgroup *cached[7];
    };
    struct obj_stock_pcp {
        struct trylock lock; signed char index; short node_id;
        short nr_slab_reclaimable_b; short nr_slab_unreclaimable_b;
        unsigned short nr_bytes[5]; struct obj_cgroup *cached[5];
    };
"""


def kernel(stocks: str) -> MadeImage:
    """Return a kernel whose stocks are all empty."""
    image = MadeImage()
    image.declare(TYPES + stocks)
    image.variable("__per_cpu_offset", "unsigned long[2]", VARIABLES)
    image.words(VARIABLES, *CPUS)
    image.variable("memcg_stock", "struct memcg_stock_pcp", PAGES)
    if "struct obj_stock_pcp" in stocks:
        image.variable("obj_stock", "struct obj_stock_pcp", OBJECTS)
    for cpu in CPUS:
        image.make("struct memcg_stock_pcp", cpu + PAGES, {})
        if "struct obj_stock_pcp" in stocks:
            image.make("struct obj_stock_pcp", cpu + OBJECTS, {})
    image.make("struct pglist_data", PGDAT, {"node_id": 1})
    image.variable("slab_caches", "struct list_head", VARIABLES + 64)
    put_caches(image)
    return image


def put_caches(image: MadeImage, *sizes: int) -> None:
    ring = [VARIABLES + 64]
    for n, size in enumerate(sizes):
        image.make("struct kmem_cache", CACHES + 64 * n, {"size": size})
        ring.append(CACHES + 64 * n + 16)
    for n, link in enumerate(ring):
        image.words(link, ring[(n + 1) % len(ring)], ring[n - 1])


def array(image: MadeImage, stock: int, member: str, slot: int, value: int) -> None:
    """Write an element of an array of the stock of objects of a CPU."""
    place = image.pointer("struct obj_stock_pcp *", stock).member_(member)[slot]
    image.write(place.address_ or 0, value.to_bytes(8 if member == "cached" else 2, "little"))


# What they hold


@pytest.mark.parametrize(("stocks", "held"), [(OLD, None), (SLOT, True)])
def test_a_stock_with_one_slot(stocks: str, held: bool | None) -> None:
    """A stock without an obj_cgroup has none, whatever is left in it."""
    image, coverage = kernel(stocks), Coverage()
    members = {"cached_objcg": OBJCG, "nr_bytes": 70, "nr_slab_unreclaimable_b": 9}
    lock = {"stock_lock.acquired": 1} if held else {}
    image.make("struct memcg_stock_pcp", CPUS[1] + PAGES, members | lock)
    image.make("struct memcg_stock_pcp", CPUS[0] + PAGES, {"nr_bytes": 70})
    assert read_obj_stocks(image, coverage) == [ObjStock(1, 0, OBJCG, 70, None, 0, 9, held)]
    assert (coverage.read, coverage.unreadable) == (2, 0)
    more = {"cached_pgdat": PGDAT, "nr_slab_reclaimable_b": 8}
    image.make("struct memcg_stock_pcp", CPUS[1] + PAGES, members | more)
    held = None if held is None else False
    assert read_obj_stocks(image, coverage) == [ObjStock(1, 0, OBJCG, 70, 1, 8, 9, held)]
    assert obj_stock_name(image) == "memcg_stock"


def test_a_stock_with_slots() -> None:
    """Since 7.2. The slab bytes are of one of them."""
    image, coverage = kernel(SLOTS), Coverage()
    stock = CPUS[1] + OBJECTS
    members = {"index": 2, "node_id": 1, "lock.acquired": 1}
    slabs = {"nr_slab_reclaimable_b": 5, "nr_slab_unreclaimable_b": 0x10000 - 3}
    image.make("struct obj_stock_pcp", stock, members | slabs)
    for slot, objcg, left in ((0, OBJCG, 40000), (2, OTHER, 7), (4, 0, 9)):
        array(image, stock, "cached", slot, objcg)
        array(image, stock, "nr_bytes", slot, left)
    assert read_obj_stocks(image, coverage) == [
        ObjStock(1, 0, OBJCG, 40000, None, 0, 0, True),
        ObjStock(1, 2, OTHER, 7, 1, 5, -3, True),
    ]
    assert (coverage.read, coverage.unreadable) == (2, 0)
    assert obj_stock_name(image) == "obj_stock"


def test_kernels_without_a_stock_of_objects() -> None:
    for image in (MadeImage(), kernel("struct memcg_stock_pcp { struct mem_cgroup *cached; };")):
        with pytest.raises(UnknownKernelError, match=r"there is no object stock$"):
            obj_stock_name(image)


def test_stocks_of_pages() -> None:
    image, coverage = kernel(SLOT), Coverage()
    image.make("struct memcg_stock_pcp", CPUS[1] + PAGES, {"cached": MEMCG, "nr_pages": 0})
    image.make("struct memcg_stock_pcp", CPUS[0] + PAGES, {"nr_pages": 5})
    assert read_charge_stocks(image, coverage) == [ChargeStock(1, MEMCG, 0, 0)]
    assert (coverage.read, coverage.unreadable) == (2, 0)


@pytest.mark.parametrize("stocks", [SLOT, SLOTS])
def test_a_cpu_whose_stocks_are_not_in_the_image(stocks: str) -> None:
    """Those of the other CPU are read."""
    image = kernel(stocks)
    name = "cached" if stocks == SLOT else "cached[1]"
    stock = image.pointer("struct memcg_stock_pcp *", CPUS[1] + PAGES)
    place = stock.cached if name == "cached" else stock.cached[1]
    image.words(place.address_ or 0, MEMCG)
    image.words(VARIABLES, MISSING)
    objects, pages = Coverage(), Coverage()
    assert read_obj_stocks(image, objects) == []
    slot = 0 if stocks == SLOT else 1
    assert read_charge_stocks(image, pages) == [ChargeStock(1, MEMCG, 0, slot)]
    at = OBJECTS if stocks == SLOTS else PAGES
    for coverage, what, address in (
        (objects, "object stock of CPU 0", at),
        (pages, "charge stock of CPU 0", PAGES),
    ):
        assert coverage.read == 1
        [missed] = coverage.examples
        assert (missed.what, missed.address) == (what, (MISSING + address) % (1 << 64))
        assert "not made" in missed.reason


def test_a_node_that_is_not_in_the_image() -> None:
    image, coverage = kernel(SLOT), Coverage()
    members = {"cached_objcg": OBJCG, "cached_pgdat": MISSING}
    image.make("struct memcg_stock_pcp", CPUS[0] + PAGES, members)
    assert read_obj_stocks(image, coverage) == []
    assert [(e.what, e.address) for e in coverage.examples] == [
        ("object stock of CPU 0", MISSING + 8)
    ]
    assert coverage.read == 1


# The most that they hold

PERCPU = 2 * (32 << 10) + (32 << 10) // 4 * 8
LARGEST = "a page and the largest object, which may be a percpu one"
ONCE = "a page, or the largest object: that is held back once"


def test_the_most_of_a_stock_with_one_slot() -> None:
    """The largest object is charged with a pointer to its obj_cgroup."""
    image, coverage = kernel(OLD), Coverage()
    assert charge_stock_bound(image) == Bound(1, 64 * 4096, "64 pages: MEMCG_CHARGE_BATCH")
    for size, of_bytes, of_slabs in (
        (8, PERCPU, 4096),
        (4080, PERCPU, 4096),
        (4096, PERCPU, 4104),
        (PERCPU, PERCPU + 8, PERCPU + 8),
    ):
        put_caches(image, 64, size, 32)
        assert largest_slab_charge(image, coverage) == max(size, 64) + 8
        assert objcg_bytes_bound(image, coverage) == Bound(1, of_bytes + 4094, LARGEST)
        assert slab_bytes_bound(image, coverage) == Bound(1, of_slabs, ONCE)
    assert (coverage.read, coverage.unreadable) == (4 * 3 * 3, 0)
    put_caches(image)
    assert largest_slab_charge(image, coverage) == 8


def test_the_most_of_a_stock_with_slots() -> None:
    """16 bits, one of them for the sign, whatever the caches are."""
    image, coverage = kernel(SLOTS), Coverage()
    put_caches(image, 1 << 20)
    assert charge_stock_bound(image) == Bound(7, 64 * 4096, "64 pages: MEMCG_CHARGE_BATCH")
    assert objcg_bytes_bound(image, coverage) == Bound(5, 0xFFFF, "nr_bytes has 16 bits")
    rule = "nr_slab_*_b have 16 bits, one of them for the sign"
    assert slab_bytes_bound(image, coverage) == Bound(1, 0x7FFF, rule)
    assert coverage == Coverage()


@pytest.mark.parametrize(
    "nr_bytes", ["unsigned short nr_bytes;", "unsigned int nr_bytes[2];", "unsigned int nr_bytes;"]
)
def test_what_has_16_bits(nr_bytes: str) -> None:
    """With large pages, the members of several slots are wider than what they can hold."""
    image = kernel(OLD.replace("unsigned int nr_bytes;", nr_bytes))
    found = objcg_bytes_bound(image, Coverage())
    if nr_bytes == "unsigned int nr_bytes;":
        assert found == Bound(1, PERCPU + 4094, LARGEST)
    else:
        assert found == Bound(2 if "[2]" in nr_bytes else 1, 0xFFFF, "nr_bytes has 16 bits")


def test_caches_that_are_not_in_the_image() -> None:
    """Any of them may have the largest objects."""
    image, coverage = kernel(OLD), Coverage()
    put_caches(image, 64, 96)
    image.words(CACHES + 16, MISSING + 16)
    assert largest_slab_charge(image, coverage) is None
    # The list is walked from its other end, too.
    assert coverage.read == 2
    found = {(e.what, e.address) for e in coverage.examples}
    assert found == {("list of slab caches", MISSING + 8), ("list of slab caches", MISSING + 16)}
    assert all("not made" in e.reason for e in coverage.examples)
    assert objcg_bytes_bound(image, Coverage()) == Bound(1, None, LARGEST)
    assert slab_bytes_bound(image, Coverage()) == Bound(1, None, ONCE)
