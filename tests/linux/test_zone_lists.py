# SPDX-License-Identifier: LGPL-2.1-or-later
"""Zones, and the lists of free blocks that are not marked: mm/show_mem.c and mm/page_alloc.c."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from drgn import Object, Program, sizeof
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.list import list_count_nodes, list_empty
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.percpu import per_cpu_ptr
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import excluded
from support.planting import Overlay, Write

from memcg_inspect.image.image import image_of
from memcg_inspect.image.layout import has_member
from memcg_inspect.linux.mm.show_mem import FreeList, counted_memmap, free_lists, read_zones
from memcg_inspect.model import Coverage

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]
KERNEL = pytest.mark.parametrize("kernel", DEBIAN_KERNELS)

#: pindex_to_order() of mm/page_alloc.c on x86-64: three lists for each order up to
#: PAGE_ALLOC_COSTLY_ORDER. The others are for huge pages.
ORDERS = (0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 9, 9)


def zones(prog: Program) -> Iterator[tuple[int, int, Object]]:
    """Return node, number and ``struct zone`` of all zones with pages."""
    for pgdat in for_each_online_pgdat(prog):
        for number, zone in enumerate(pgdat.node_zones):
            if zone.present_pages:
                yield int(pgdat.node_id), number, zone


def largest(prog: Program) -> tuple[int, int, Object]:
    return max(zones(prog), key=lambda found: int(found[2].present_pages))


def place(thing: Object) -> int:
    assert thing.address_ is not None
    return int(thing.address_)


def word(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little")


def plain_lists(prog: Program) -> list[FreeList]:
    found = []
    for nid, number, zone in zones(prog):
        for cpu in for_each_possible_cpu(prog):
            lists = per_cpu_ptr(zone.per_cpu_pageset, cpu).lists
            for head, order in zip(lists, ORDERS, strict=False):
                if not list_empty(head.address_of_()):
                    first = head.next.value_()
                    found.append(FreeList(nid, number, order, place(head), first, place(head)))
    return found


def read(prog: Program) -> tuple[list[FreeList], Coverage]:
    coverage = Coverage()
    return list(free_lists(image_of(prog), coverage)), coverage


@KERNEL
def test_lists_of_cpus(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    found, coverage = read(prog)
    assert sorted(f for f in found if f.end) == sorted(plain_lists(prog))
    assert len(found) > 4
    assert not coverage.unreadable


@KERNEL
def test_the_orders_of_all_lists_of_a_cpu(lab: Lab, kernel: str) -> None:
    """Here each list has a block, and so has ``trylock_free_pages`` (6.15)."""
    prog = lab.image(kernel, "4", "mixed").own_program()
    nid, number, zone = largest(prog)
    lists = per_cpu_ptr(zone.per_cpu_pageset, 1).lists
    others = [f for f in read(prog)[0] if not place(lists) <= f.head < place(lists) + sizeof(lists)]
    assert len(lists) in (13, 14)
    writes = [Write(place(head), word(0x1000 + n)) for n, head in enumerate(lists)]
    expected = [
        FreeList(nid, number, order, place(head), 0x1000 + n, place(head))
        for n, (head, order) in enumerate(zip(lists, ORDERS, strict=False))
    ]
    if has_member(image_of(prog), "struct zone", "trylock_free_pages"):
        at = place(zone.trylock_free_pages)
        writes.append(Write(at, word(0x5000)))
        expected.append(FreeList(nid, number, None, at, 0x5000, 0))
    Overlay(prog).write(tuple(writes))
    found, coverage = read(prog)
    assert [f for f in found if f not in others] == expected
    assert len(found) == len(others) + len(expected)
    assert not coverage.unreadable


@KERNEL
def test_a_cpu_whose_lists_are_missing(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").own_program()
    _, _, zone = largest(prog)
    lists = per_cpu_ptr(zone.per_cpu_pageset, 1).lists
    gone = range(place(lists), place(lists) + sizeof(lists))
    before = read(prog)[0]
    prog.add_memory_segment(gone.start, len(gone), excluded, False)
    found, coverage = read(prog)
    assert found == [f for f in before if f.head not in gone]
    assert coverage.unreadable == 1


@KERNEL
def test_zones_are_what_the_kernel_has(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    coverage = Coverage()
    found = read_zones(image_of(prog), coverage)
    assert list(found) == [(nid, number) for nid, number, _ in zones(prog)]
    assert (coverage.read, coverage.unreadable) == (len(found), 0)
    for nid, number, zone in zones(prog):
        got = found[nid, number]
        assert (got.nid, got.number, got.name.encode()) == (nid, number, zone.name.string_())
        assert (got.present, got.managed) == (zone.present_pages, zone.managed_pages.counter)
        assert got.free_blocks == tuple(int(area.nr_free) for area in zone.free_area)
        assert (got.isolated, got.isolates, got.is_locked) == (0, False, False)


@KERNEL
def test_a_zone_that_is_changed(lab: Lab, kernel: str) -> None:
    """A free list becomes that of isolated blocks, and the lock is held."""
    prog = lab.image(kernel, "4", "mixed").own_program()
    isolate = prog["MIGRATE_ISOLATE"].value_()
    nid, number, order, kind = next(
        (nid, number, order, kind)
        for nid, number, zone in zones(prog)
        for order, area in enumerate(zone.free_area)
        for kind, head in enumerate(area.free_list)
        if order and kind != isolate and not list_empty(head.address_of_())
    )
    zone = next(z for n, i, z in zones(prog) if (n, i) == (nid, number))
    old, new = zone.free_area[order].free_list[kind], zone.free_area[order].free_list[isolate]
    blocks = int(list_count_nodes(old.address_of_()))
    writes = [
        Write(place(new), word(old.next.value_()) + word(old.prev.value_())),
        Write(place(old.next.prev), word(place(new))),
        Write(place(old.prev.next), word(place(new))),
        Write(place(old), 2 * word(place(old))),
        Write(place(zone.nr_isolate_pageblock), word(1)),
        Write(place(zone.lock), word(1, 4)),
    ]
    Overlay(prog).write(tuple(writes))
    got = read_zones(image_of(prog), Coverage())[nid, number]
    assert got.isolated == blocks << order > 0
    assert (got.isolates, got.is_locked) == (True, True)


@KERNEL
def test_a_zone_that_is_missing_ends_the_list(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").own_program()
    whole = list(zones(prog))
    zone = whole[1][2]
    prog.add_memory_segment(place(zone.free_area[0].nr_free), 8, excluded, False)
    coverage = Coverage()
    found = read_zones(image_of(prog), coverage)
    assert list(found) == [whole[0][:2]]
    assert (coverage.read, coverage.unreadable) == (1, 1)


@KERNEL
def test_pages_of_the_memory_map(lab: Lab, kernel: str) -> None:
    """The guest shows both counters in /proc/vmstat. It has them since 6.11."""
    image = lab.image(kernel, "4", "mixed")
    lines = (image.guest / "2/proc/vmstat").read_text().splitlines()
    shown = {name: int(value) for name, value in map(str.split, lines)}
    found = counted_memmap(image_of(image.program()))
    names = ("nr_memmap_pages", "nr_memmap_boot_pages")
    assert found == (sum(shown[n] for n in names) if names[0] in shown else None)
