# SPDX-License-Identifier: LGPL-2.1-or-later
"""Where percpu memory is: its addresses, its nodes and its pages, and what of it is missing."""

from __future__ import annotations

from collections import Counter

import pytest
from drgn import Object, Program
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.percpu import per_cpu_ptr
from support.guests import DEBIAN_KERNELS, GuestImage, Lab
from support.missing_pages import excluded
from support.percpu import PlainArea, nid_of
from support.planting import Overlay, Write

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.percpu import PcpuArea, PcpuPlace, PercpuReader, percpu_charge
from memcg_inspect.model import NUMA_NO_NODE

pytestmark = [
    pytest.mark.image,
    pytest.mark.each_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]

PAGE, UNIT, POINTER, CPUS = 4096, 4, 8, 4


@pytest.fixture
def image(lab: Lab, kernel: str) -> GuestImage:
    return lab.image(kernel, "4", "mixed")


def spans(prog: Program) -> list[tuple[int, int, int]]:
    """Return the page frames of each node."""
    found = []
    for pgdat in for_each_online_pgdat(prog):
        start = int(pgdat.node_start_pfn)
        found.append((start, start + int(pgdat.node_spanned_pages), int(pgdat.node_id)))
    return found


def offsets(prog: Program) -> list[int]:
    """Return where the copy of each CPU is, from that of the first unit."""
    return [int(prog["pcpu_unit_offsets"][cpu]) for cpu in for_each_possible_cpu(prog)]


def chunks(prog: Program) -> list[Object]:
    found = []
    for slot in range(int(prog["pcpu_nr_slots"])):
        head = prog["pcpu_chunk_lists"][slot].address_of_()
        found += list(list_for_each_entry("struct pcpu_chunk", head, "list"))
    return found


def bits(words: Object, number: int) -> str:
    """Return a bitmap as digits, the first bit first."""
    found = [f"{words[n].value_():064b}"[::-1] for n in range((number + 63) // 64)]
    return "".join(found)[:number]


def plain_areas(prog: Program) -> list[PlainArea]:
    """Return all allocations that the bitmaps have, and who pays for each."""
    found = []
    for chunk in chunks(prog):
        units, start = int(chunk.nr_pages) * PAGE // UNIT, int(chunk.start_offset)
        taken, bounds = bits(chunk.alloc_map, units), bits(chunk.bound_map, units + 1)
        end = units * UNIT - int(chunk.end_offset)
        ends = [unit for unit, digit in enumerate(bounds) if digit == "1"]
        vector = chunk.obj_exts if hasattr(chunk, "obj_exts") else chunk.obj_cgroups
        for unit, after in zip(ends, ends[1:], strict=False):
            if taken[unit] == "1" and start <= unit * UNIT < end:
                element = vector[unit] if vector else None
                objcg = getattr(element, "cgroup", element)
                payer = 0 if objcg is None else objcg.value_()
                size = (after - unit) * UNIT
                found.append(
                    PlainArea(chunk.value_(), chunk.base_addr.value_(), unit * UNIT, size, payer)
                )
    return found


def read(prog: Program) -> tuple[PercpuReader, list[PcpuArea]]:
    reader = PercpuReader(image_of(prog))
    return reader, [area for chunk in reader.chunks() for area in reader.allocations(chunk)]


def some(areas: list[PcpuArea]) -> list[PcpuArea]:
    """Return every 20th allocation, and those on several pages."""
    return [
        area
        for n, area in enumerate(areas)
        if n % 20 == 0 or area.offset // PAGE != (area.offset + area.size - 1) // PAGE
    ]


def test_allocations_are_those_of_a_plain_walk(image: GuestImage) -> None:
    prog = image.program()
    reader, areas = read(prog)
    found = [PlainArea(a.chunk.address, a.chunk.base, a.offset, a.size, a.objcg) for a in areas]
    assert sorted(found) == sorted(plain_areas(prog))
    charged = [area for chunk in reader.chunks() for area in reader.charged(chunk)]
    assert charged == [area for area in areas if area.objcg]
    assert len(charged) > 50
    for area in charged:
        assert prog.read_word(area.element) & ~7 == area.objcg
        assert reader.charge(area) == area.size * CPUS + area.size // UNIT * POINTER
        assert reader.charge(area) == percpu_charge(image_of(prog), area.size)
    assert reader.metadata == POINTER
    assert reader.unit_offsets() == offsets(prog)


def test_addresses_of_allocations(image: GuestImage) -> None:
    prog = image.program()
    reader, areas = read(prog)
    nodes = spans(prog)
    for area in some(areas)[:150:3]:
        pointer = reader.pointer(area)
        for cpu, offset in enumerate(offsets(prog)):
            address = area.chunk.base + area.offset + offset
            copy = per_cpu_ptr(Object(prog, "void *", pointer), cpu)
            assert copy.value_() == address
            place = PcpuPlace(area.chunk, area.offset, cpu, pointer)
            assert place in reader.find(address)
            assert reader.node(place) == nid_of(prog, nodes, address)
        place = PcpuPlace(area.chunk, area.offset + 1, None, (pointer + 1) % (1 << 64))
        assert place in reader.find((pointer + 1) % (1 << 64))
        assert reader.node(place) == NUMA_NO_NODE
    assert not reader.coverage.unreadable


def test_addresses_of_variables(image: GuestImage) -> None:
    prog = image.program()
    reader = PercpuReader(image_of(prog))
    stock = prog["memcg_stock"]
    pointer, start = stock.address_of_().value_(), prog.symbol("__per_cpu_start").address
    for cpu in range(CPUS):
        address = per_cpu_ptr(stock.address_of_(), cpu).value_() + 3
        place = PcpuPlace(None, pointer + 3 - start, cpu, pointer + 3)
        assert place in reader.find(address)
        assert reader.node(place) == nid_of(prog, spans(prog), address)
    assert reader.find(prog["root_mem_cgroup"].value_()) == []
    end = max(chunk.base_addr.value_() + int(chunk.nr_pages) * PAGE for chunk in chunks(prog))
    last = reader.find(end - 1 + offsets(prog)[-1])
    assert [(p.cpu, p.offset) for p in last if p.chunk and p.cpu == CPUS - 1] == [
        (CPUS - 1, p.chunk.nr_pages * PAGE - 1) for p in last if p.chunk and p.cpu == CPUS - 1
    ]


def test_nodes_of_allocations(image: GuestImage) -> None:
    prog = image.program()
    reader, areas = read(prog)
    nodes = spans(prog)
    for area in some(areas)[:60] + [a for a in areas if a.objcg][:60]:
        start = area.chunk.base + area.offset
        data = Counter(
            nid_of(prog, nodes, at + offset)
            for offset in offsets(prog)
            for at in range(start, start + area.size, UNIT)
        )
        assert reader.data_nodes(area) == {nid: UNIT * n for nid, n in data.items()}
        if area.objcg:
            first = area.element - area.element % POINTER
            vector = Counter(
                nid_of(prog, nodes, first + n * reader.element) for n in range(area.size // UNIT)
            )
            assert reader.metadata_nodes(area) == {nid: POINTER * n for nid, n in vector.items()}


def test_pages_of_all_units(image: GuestImage) -> None:
    """Those of static variables are wholly in use."""
    prog = image.program()
    reader, _ = read(prog)
    pages, allocated, nodes = Counter[int](), Counter[int](), spans(prog)
    base, first = prog["pcpu_base_addr"].value_(), prog["pcpu_first_chunk"]
    static = range(base, first.base_addr.value_(), PAGE)
    places = [(at, PAGE) for at in static]
    for chunk in chunks(prog):
        words = [chunk.alloc_map[n].value_() for n in range(int(chunk.nr_pages) * PAGE // 256)]
        for page in range(int(chunk.nr_pages)):
            if chunk.populated[page // 64].value_() >> page % 64 & 1:
                used = sum(word.bit_count() for word in words[page * 16 : page * 16 + 16]) * UNIT
                places.append((chunk.base_addr.value_() + page * PAGE, used))
    for at, used in places:
        for offset in offsets(prog):
            nid = nid_of(prog, nodes, at + offset)
            pages[nid] += 1
            allocated[nid] += used
    assert reader.pages == pages
    assert reader.allocated == allocated
    assert reader.static_pages() == static
    assert reader.static_size == len(static) * PAGE + int(first.start_offset)
    assert reader.placement.read >= pages.total()
    assert (reader.coverage.unreadable, reader.placement.unreadable) == (0, 0)


def with_vector(prog: Program) -> Object:
    """Return the chunk with most charged allocations."""
    reader = PercpuReader(image_of(prog))
    charged = {c.address: len(reader.charged(c)) for c in reader.chunks(place=False)}
    return Object(prog, "struct pcpu_chunk *", max(charged, key=lambda chunk: charged[chunk]))


def test_a_chunk_that_is_missing(image: GuestImage) -> None:
    """Its bitmap, and the pages that it has: the others are read."""
    for member in ("alloc_map", "populated"):
        prog = image.own_program()
        chunk = with_vector(prog)
        where = chunk.member_(member)
        address = where.value_() if member == "alloc_map" else where.address_ or 0
        prog.add_memory_segment(address, 8, excluded, False)
        reader = PercpuReader(image_of(prog))
        left = {found.address for found in reader.chunks()}
        assert left == {c.value_() for c in chunks(prog)} - {chunk.value_()}
        assert reader.coverage.unreadable == 1
        without_nodes = {found.address for found in reader.chunks(place=False)}
        assert (chunk.value_() in without_nodes) == (member == "populated")


def test_a_part_of_a_vector_that_is_missing(image: GuestImage) -> None:
    """The allocations of its page are not known; those of others are."""
    prog = image.own_program()
    chunk = with_vector(prog)
    whole = [area for area in plain_areas(prog) if area.chunk == chunk.value_()]
    reader, areas = read(prog)
    vector = next(a.chunk.vector for a in areas if a.chunk.address == chunk.value_())
    hit = next(a for a in areas if a.chunk.address == chunk.value_() and a.objcg)
    page = hit.element // PAGE * PAGE
    prog.add_memory_segment(page, PAGE, excluded, False)
    reader, left = read(prog)
    here = [area for area in left if area.chunk.address == chunk.value_()]
    expected = [
        a for a in whole if not page <= vector + a.offset // UNIT * reader.element < page + PAGE
    ]
    assert [(a.offset, a.size, a.objcg) for a in here] == [
        (a.offset, a.size, a.objcg) for a in expected
    ]
    assert len(expected) < len(whole)
    assert [missed.what for missed in reader.coverage.examples] == ["objcgs of a percpu chunk"]


def test_static_variables_that_are_missing(image: GuestImage) -> None:
    prog = image.own_program()
    place = prog["pcpu_first_chunk"].address_ or 0
    prog.add_memory_segment(place, 8, excluded, False)
    reader = PercpuReader(image_of(prog))
    assert reader.static_pages() == range(0)
    assert [missed.what for missed in reader.coverage.examples] == ["static percpu variables"]
    assert {chunk.address for chunk in reader.chunks()} == {c.value_() for c in chunks(prog)}
    assert reader.coverage.unreadable == 2
    assert reader.static_size is None


def test_numbers_of_chunks_that_cannot_be_right(image: GuestImage) -> None:
    """More pages than a unit, none, or allocations outside of the chunk."""
    prog = image.own_program()
    overlay, chunk = Overlay(prog), with_vector(prog)
    size, unit = int(chunk.nr_pages) * PAGE, int(prog["pcpu_unit_pages"])

    def is_read(member: str, value: int) -> bool:
        place = chunk.member_(member)
        data = (value % (1 << 32)).to_bytes(4, "little")
        overlay.write((Write(place.address_ or 0, data),))
        reader = PercpuReader(image_of(prog))
        found = {found.address for found in reader.chunks(place=False)}
        overlay.clear()
        assert (chunk.value_() in found) == (not reader.coverage.unreadable)
        return chunk.value_() in found

    assert is_read("nr_pages", int(chunk.nr_pages))
    assert not any(is_read("nr_pages", number) for number in (0, unit + 1, -1))
    assert is_read("start_offset", size) and is_read("end_offset", size)
    assert not any(is_read("start_offset", number) for number in (size + 1, -4))
    assert not any(is_read("end_offset", number) for number in (size + 1, -4))
