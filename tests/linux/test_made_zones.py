# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Zones and lists of free pages in memory made by hand: other settings, and what is not in the image.

``tests/linux/test_zone_lists.py`` compares those of images with what drgn reads.
"""

from __future__ import annotations

import pytest
from drgn import FaultError, sizeof
from support.layouts import MadeImage

from memcg_inspect.linux.mm import show_mem
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.linux.mm.show_mem import (
    FreeList,
    LostPages,
    counted_memmap,
    free_lists,
    miss_lost_pages,
    read_zones,
)
from memcg_inspect.model import Coverage, NodeStat

PGDATS = (0xFFFF888030000000, 0xFFFF888030010000)
NAMES, PAGES = 0xFFFF888031000000, 0xFFFF888032000000
VARIABLES, MISSING = 0xFFFFFFFF82000000, 0xFFFF888077700000
#: Percpu memory of the two CPUs.
CPUS = {0: 0xFFFF888033000000, 1: 0xFFFF888033010000}
LISTS = 14
#: ``__percpu`` pointer to the lists of each zone.
POINTER = 0x1000


def kernel(
    monkeypatch: pytest.MonkeyPatch, *, isolates: bool = True, trylock: bool = True
) -> MadeImage:
    """
    Return a kernel with two nodes of two zones each. The first zone of node 1 has no pages.

    :param isolates: CONFIG_MEMORY_ISOLATION
    :param trylock: whether zones have ``trylock_free_pages`` (6.15)
    """
    image = MadeImage()
    image.declare(
        f"""
        struct list_head {{ struct list_head *next; struct list_head *prev; }};
        struct llist_node {{ struct llist_node *next; }};
        struct llist_head {{ struct llist_node *first; }};
        struct atomic_long {{ long counter; }};
        struct page {{ unsigned long flags; struct list_head lru; }};
        struct free_area {{ struct list_head free_list[4]; unsigned long nr_free; }};
        struct per_cpu_pages {{ int count; struct list_head lists[{LISTS}]; }};
        struct zone {{ char *name; unsigned long present_pages; struct atomic_long managed_pages;
                      struct per_cpu_pages *per_cpu_pageset; struct free_area free_area[3];
                      {"unsigned long nr_isolate_pageblock;" if isolates else ""}
                      {"struct llist_head trylock_free_pages;" if trylock else ""}
                      int lock; }};
        struct pglist_data {{ struct zone node_zones[2]; int node_id; }};
        """
    )
    if isolates:
        image.enum(None, MIGRATE_ISOLATE=3)
    image.given[percpu_offsets] = CPUS
    image.write(NAMES, b"DMA\0Normal\0")
    for nid, pgdat in enumerate(PGDATS):
        image.make("struct pglist_data", pgdat, {"node_id": nid})
        for number in range(2):
            put_zone(image, nid, number)
    pgdats = [image.pointer("struct pglist_data *", pgdat) for pgdat in PGDATS]
    monkeypatch.setattr(show_mem, "online_pgdats", lambda image: pgdats)
    monkeypatch.setattr(show_mem, "zone_stats", lambda image, zone: {"NR": NodeStat(1, 2)})
    monkeypatch.setattr(show_mem, "spin_is_locked", lambda image, lock: bool(lock))
    monkeypatch.setattr(show_mem, "huge_page_order", lambda image: 9)
    return image


def zone_at(image: MadeImage, nid: int, number: int) -> int:
    return PGDATS[nid] + number * int(sizeof(image.type("struct zone")))


def put_zone(image: MadeImage, nid: int, number: int) -> None:
    zone, index = zone_at(image, nid, number), 2 * nid + number
    members = {"name": NAMES + 4 * number, "present_pages": 1000 + index * (index != 2)}
    members |= {"managed_pages.counter": 900 + index, "lock": number}
    if index == 2:
        members["present_pages"] = 0
    pointer = POINTER + 0x400 * index
    image.make("struct zone", zone, members | {"per_cpu_pageset": pointer})
    areas = zone + image.type("struct zone").member("free_area").offset
    for order in range(3):
        for kind in range(4):
            head = areas + 72 * order + 16 * kind
            image.words(head, head, head)
        image.words(areas + 72 * order + 64, 10 * index + order)
    for start in CPUS.values():
        for n in range(LISTS):
            head = start + pointer + 8 + 16 * n
            image.words(head, head, head)


def isolate(image: MadeImage, nid: int, order: int, *pages: int) -> None:
    """Put blocks on the list of isolated ones of the second zone of a node."""
    areas = zone_at(image, nid, 1) + image.type("struct zone").member("free_area").offset
    ring = [areas + 72 * order + 48, *(page + 8 for page in pages)]
    for before, at, after in zip(ring[-1:] + ring, ring, ring[1:] + ring[:1], strict=False):
        image.words(at, after, before)


def missed(coverage: Coverage) -> list[tuple[str, int, str]]:
    return [(one.what, one.address, one.reason) for one in coverage.examples]


def test_zones_with_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    image, coverage = kernel(monkeypatch), Coverage()
    isolate(image, 1, 0, PAGES, PAGES + 64)
    isolate(image, 1, 2, PAGES + 128)
    offset = image.type("struct zone").member("nr_isolate_pageblock").offset
    image.words(zone_at(image, 0, 1) + offset, 3)
    found = read_zones(image, coverage)
    assert list(found) == [(0, 0), (0, 1), (1, 1)]
    assert (coverage.read, coverage.unreadable) == (3, 0)
    zone = found[1, 1]
    assert (zone.nid, zone.number, zone.name) == (1, 1, "Normal")
    assert (zone.present, zone.managed) == (1003, 903)
    assert zone.free_blocks == (30, 31, 32)
    assert zone.stats == {"NR": NodeStat(1, 2)}
    assert [(z.isolated, z.isolates) for z in found.values()] == [
        *((0, False), (0, True), (2 + 4, False))
    ]
    assert [z.is_locked for z in found.values()] == [False, True, True]
    assert found[0, 0].name == "DMA"


def test_kernels_that_isolate_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CONFIG_MEMORY_ISOLATION, the fourth list is one of another kind."""
    image = kernel(monkeypatch, isolates=False)
    isolate(image, 0, 1, PAGES)
    zone = read_zones(image, Coverage())[0, 1]
    assert (zone.isolated, zone.isolates) == (0, False)


def test_a_list_of_isolated_blocks_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zones before are read."""
    image, coverage = kernel(monkeypatch), Coverage()
    isolate(image, 0, 1, MISSING)
    image.forget(MISSING)
    assert list(read_zones(image, coverage)) == [(0, 0)]
    at = MISSING + 8
    assert missed(coverage) == [("zone", at, f"not made: {at:#x}")]
    assert coverage.read == 1


def lists(image: MadeImage) -> tuple[list[FreeList], Coverage]:
    coverage = Coverage()
    return list(free_lists(image, coverage)), coverage


@pytest.mark.parametrize("types", [None, 3, 4])
def test_lists_of_cpus(monkeypatch: pytest.MonkeyPatch, types: int | None) -> None:
    """CPUs keep blocks of orders 0 to 3, of each kind (MIGRATE_PCPTYPES), and huge pages."""
    image = kernel(monkeypatch)
    if types is not None:
        image.enum(None, MIGRATE_PCPTYPES=types)
    assert lists(image)[0] == []
    heads = [CPUS[1] + POINTER + 0x400 * 3 + 8 + 16 * n for n in range(LISTS)]
    for n, head in enumerate(heads):
        image.words(head, PAGES + n)
    # Of the zone without pages, no list is read.
    image.words(CPUS[0] + POINTER + 0x400 * 2 + 8, PAGES)
    found, coverage = lists(image)
    orders = [n // 4 for n in range(LISTS)] if types == 4 else [*(n // 3 for n in range(12)), 9, 9]
    assert found == [
        FreeList(1, 1, order, head, PAGES + n, head)
        for n, (head, order) in enumerate(zip(heads, orders, strict=True))
    ]
    assert coverage.unreadable == 0


def test_pages_that_a_zone_has_put_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page has its order. Before 6.15 there is no such list."""
    image = kernel(monkeypatch)
    at = image.type("struct zone").member("trylock_free_pages").offset
    head = zone_at(image, 0, 1) + at
    image.words(head, PAGES + 8)
    assert lists(image)[0] == [FreeList(0, 1, None, head, PAGES + 8, 0)]
    image = kernel(monkeypatch, trylock=False)
    assert lists(image)[0] == []


def test_lists_that_are_not_in_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other CPUs are read. Behind a zone that is missing, none is."""
    image = kernel(monkeypatch)
    for start in CPUS.values():
        for index in (0, 3):
            image.words(start + POINTER + 0x400 * index + 8, PAGES)
    image.forget(CPUS[0] + POINTER)
    found, coverage = lists(image)
    assert [(one.nid, one.head - one.head % 4096) for one in found] == [
        (0, CPUS[1] + POINTER),
        (1, CPUS[1] + POINTER),
    ]
    heads = [CPUS[0] + POINTER + 0x400 * index + 8 for index in (0, 1, 3)]
    assert missed(coverage) == [
        ("free pages of a CPU", head, f"not made: {head:#x}") for head in heads
    ]
    image = kernel(monkeypatch)
    image.words(CPUS[0] + POINTER + 8, PAGES)
    image.forget(PGDATS[1])
    found, coverage = lists(image)
    assert [one.nid for one in found] == [0]
    at = PGDATS[1] + 8
    assert missed(coverage) == [("lists of free pages", at, f"not made: {at:#x}")]


def test_pages_of_the_memory_map() -> None:
    """Since 6.11, two counters. Both are needed."""
    image = MadeImage()
    assert counted_memmap(image) is None
    image.symbol_at("nr_memmap_pages", VARIABLES)
    assert counted_memmap(image) is None
    image.symbol_at("nr_memmap_boot_pages", VARIABLES + 8)
    image.words(VARIABLES, 70, 500)
    assert counted_memmap(image) == 570


@pytest.mark.parametrize("moving", [False, True])
def test_pages_that_are_not_in_the_memory_map(
    monkeypatch: pytest.MonkeyPatch, moving: bool
) -> None:
    """While a kernel runs, memory may have gone online meanwhile: a zone must lack pages twice."""
    image, coverage = MadeImage(), Coverage()
    lost = [LostPages(0x900 + n, n, 5000, 4096) for n in range(3)]
    readings = iter([lost[:2], lost[1:]])
    monkeypatch.setattr(show_mem, "lost_pages", lambda _: iter(next(readings)))
    monkeypatch.setattr(MadeImage, "is_moving", moving)
    found = miss_lost_pages(image, coverage)
    assert found == (lost[1:2] if moving else lost[:2])
    assert [(one.what, one.address, one.reason) for one in coverage.examples] == [
        ("memory map of a zone", one.zone, "it has 5,000 pages, and 4,096 page frames are valid")
        for one in found
    ]


def test_zones_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> None:
        raise FaultError("not in the image", 0x1230)

    coverage = Coverage()
    monkeypatch.setattr(show_mem, "lost_pages", missing)
    assert miss_lost_pages(MadeImage(), coverage) == []
    [one] = coverage.examples
    assert (one.what, one.address) == ("zone", 0x1230)
    assert "not in the image" in one.reason
