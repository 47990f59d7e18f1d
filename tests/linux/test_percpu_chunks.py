# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Percpu chunks in memory made by hand: edges of allocations, and numbers that cannot be right.

``tests/linux/test_percpu_places.py`` reads those of images.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from drgn import FaultError
from support.layouts import FRAMES, MadeImage

from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.mm import percpu
from memcg_inspect.linux.mm.memcontrol import accounting
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import (
    PcpuArea,
    PcpuChunk,
    PcpuPlace,
    PercpuReader,
    largest_percpu_charge,
    largest_percpu_size,
)
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.model import Coverage

VARIABLES, LISTS = 0xFFFF888030000000, 0xFFFF888030001000
FIRST, SECOND = 0xFFFF888030002000, 0xFFFF888030003000
MAPS, VECTOR = 0xFFFF888030010000, 0xFFFF888030020000
OBJCG, TAG = 0xFFFF888000111000, 0xFFFFFFFF83000000
#: Static variables have two pages and 256 bytes, and the first chunk begins in the third page.
BASE, BASE_OF_SECOND = 0xFFFF888040000000, 0xFFFFE8FFFFC00000
UNIT, PAGE = 4 * 4096, 4096
#: The units of the two CPUs.
UNITS = (0, 0x100000)
#: ``__per_cpu_offset``: static variables are linked at 0x1000.
OFFSETS = tuple(BASE - 0x1000 + unit for unit in UNITS)
MEMBERS = """
    struct list_head list; int free_bytes; void *base_addr; unsigned long *alloc_map;
    unsigned long *bound_map; int start_offset; int end_offset; struct pcpuobj_ext *obj_exts;
    int nr_pages; unsigned long populated[1];
"""
#: Where each of the variables is.
PLACES = {
    "pcpu_nr_slots": ("int", 0),
    "pcpu_to_depopulate_slot": ("int", 8),
    "pcpu_unit_pages": ("int", 16),
    "pcpu_unit_size": ("int", 24),
    "pcpu_base_addr": ("void *", 32),
    "pcpu_first_chunk": ("struct pcpu_chunk *", 40),
    "pcpu_chunk_lists": ("struct list_head *", 48),
    "pcpu_unit_offsets": ("unsigned long *", 56),
    "__per_cpu_offset": ("unsigned long[2]", 64),
}


class Pages:
    """In place of PcpuPages: the pages of the first CPU are on node 0, those of the other on 1."""

    def __init__(self, image: MadeImage) -> None:
        self.coverage = Coverage()
        self.expected: list[tuple[int, int]] = []
        self.read: list[tuple[int, int]] = []

    def nid(self, address: int) -> int:
        """Return a node; the pages of a vector are on node 2 and 3 in turn."""
        if VECTOR <= address < VECTOR + 0x10000:
            return 2 + (address >> 12 & 1)
        return address >> 20 & 1

    def nids(self, start: int, count: int) -> list[int]:
        self.read.append((start, count))
        return [self.nid(start + number * PAGE) for number in range(count)]

    def expect(self, start: int, count: int) -> None:
        self.expected.append((start, count))


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> MadeImage:
    monkeypatch.setattr(percpu, "PcpuPages", Pages)
    return kernel()


def kernel(element: str = "void *cgroup; unsigned long tag;", members: str = MEMBERS) -> MadeImage:
    """
    Return a kernel with two chunks in lists of their own, and an empty list between them.

    :param element: members of an element of the vector
    :param members: those of a chunk
    """
    image = MadeImage()
    image.declare(
        "struct list_head { struct list_head *next; struct list_head *prev; };"
        f"struct pcpuobj_ext {{ {element} }};"
        f"struct pcpu_chunk {{ {members} }};"
    )
    for name, (type_, at) in PLACES.items():
        image.variable(name, type_, VARIABLES + at)
    image.words(VARIABLES, 3, 2, UNIT // PAGE, UNIT, BASE, FIRST, LISTS, VARIABLES + 128, *OFFSETS)
    image.words(VARIABLES + 128, *UNITS)
    image.words(LISTS, FIRST, FIRST, LISTS + 16, LISTS + 16, SECOND, SECOND)
    first = {"base_addr": BASE + 2 * PAGE, "nr_pages": 1, "start_offset": 256, "end_offset": 512}
    second = {"base_addr": BASE_OF_SECOND, "nr_pages": 3}
    second |= {name: VECTOR for name in ("obj_exts", "obj_cgroups") if name in members}
    for number, (chunk, given) in enumerate(((FIRST, first), (SECOND, second))):
        head, maps = LISTS + 32 * number, MAPS + 0x4000 * number
        given |= {"list.next": head, "list.prev": head}
        given |= {"alloc_map": maps, "bound_map": maps + 0x1000}
        image.make("struct pcpu_chunk", chunk, given)
        image.words(chunk + offset(image, "populated"), 0b101 if number else 1)
        image.words(maps, 0)
        image.words(maps + 0x1000, 0)
    for page in range(VECTOR, VECTOR + 3 * 1024 * 16, PAGE):
        image.words(page, 0)
    return image


def offset(image: MadeImage, member: str) -> int:
    found = next(m for m in image.type("struct pcpu_chunk").members if m.name == member)
    return int(found.offset)


def allocate(image: MadeImage, chunk: int, *areas: tuple[int, int], pages: int) -> None:
    """Write the bitmaps for allocations, whose offset and size are in units of 4 bytes."""
    taken = bounds = 0
    for start, size in areas:
        taken |= (1 << size) - 1 << start
        bounds |= 1 << start | 1 << start + size
    bounds |= 1 | 1 << pages * 1024
    maps = MAPS if chunk == FIRST else MAPS + 0x4000
    image.write(maps, taken.to_bytes(384, "little"))
    image.write(maps + 0x1000, bounds.to_bytes(392, "little"))


def charge(image: MadeImage, unit: int, objcg: int, tag: int = 0) -> None:
    image.words(VECTOR + 16 * unit, objcg, tag)


def chunk_of(reader: PercpuReader, address: int) -> PcpuChunk:
    return next(c for c in reader.chunks(place=False) if c.address == address)


def missed(coverage: Coverage) -> list[tuple[str, int, str]]:
    return [(one.what, one.address, one.reason) for one in coverage.examples]


def test_chunks_and_their_pages(image: MadeImage) -> None:
    allocate(image, FIRST, (0, 64), (64, 10), (896, 128), pages=1)
    allocate(image, SECOND, (0, 2), (2048, 1024), pages=3)
    reader = PercpuReader(image)
    first, second = reader.chunks()
    assert (first.address, first.base, first.nr_pages, first.vector) == (FIRST, BASE + 8192, 1, 0)
    assert (first.start, first.end) == (256, PAGE - 512)
    assert first.alloc_map == (1 << 74) - 1 | (1 << 128) - 1 << 896
    assert first.bound_map == 1 | 1 << 64 | 1 << 74 | 1 << 896 | 1 << 1024
    assert (second.address, second.nr_pages, second.vector) == (SECOND, 3, VECTOR)
    assert (second.start, second.end) == (0, 3 * PAGE)
    # Two pages of static variables, one of the first chunk, and the pages 0 and 2 of the second.
    assert reader.pages == {0: 5, 1: 5}
    used = 2 * PAGE + (64 + 10 + 128) * 4 + 8 + PAGE
    assert reader.allocated == {0: used, 1: used}
    assert reader.static_size == 2 * PAGE + 256
    assert reader.static_pages() == range(BASE, BASE + 2 * PAGE, PAGE)
    assert (reader.populated(first), reader.populated(second)) == (0b1, 0b101)
    assert [reader.used(second, page) for page in range(3)] == [8, 0, PAGE]
    assert reader.units(second) == 3072
    assert missed(reader.coverage) == []


def test_pages_beside_each_other_are_placed_together(
    image: MadeImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(image)
    monkeypatch.setattr(percpu, "PcpuPages", lambda _: pages)
    for populated, runs in ((0b111, [(0, 3)]), (0b110, [(1, 2)]), (0b101, [(0, 1), (2, 1)])):
        image.words(SECOND + offset(image, "populated"), populated)
        pages.read.clear()
        list(PercpuReader(image).chunks())
        places = [(BASE_OF_SECOND + page * PAGE, count) for page, count in runs]
        wanted = [(start + unit, count) for start, count in places for unit in UNITS]
        assert [read for read in pages.read if read in wanted] == wanted


def test_what_is_before_and_after_the_allocations_of_a_chunk(image: MadeImage) -> None:
    """The first chunk marks both as allocated. They belong to static variables."""
    allocate(image, FIRST, (0, 64), (64, 10), (80, 816), (896, 128), pages=1)
    reader = PercpuReader(image)
    found = [(a.offset, a.size) for a in reader.allocations(chunk_of(reader, FIRST))]
    assert found == [(256, 40), (320, 3264)]


def test_the_allocation_at_an_offset(image: MadeImage) -> None:
    allocate(image, SECOND, (0, 1), (1, 3), (8, 4), (3071, 1), pages=3)
    charge(image, 1, OBJCG | 2, TAG)
    charge(image, 2, OBJCG, TAG)  # not the first element of an allocation
    reader = PercpuReader(image)
    chunk = chunk_of(reader, SECOND)

    def at(offset: int) -> tuple[int, int, int, int] | None:
        found = reader.alloc_at(chunk, offset)
        return None if found is None else (found.offset, found.size, found.objcg, found.codetag)

    assert [at(n) for n in (0, 3)] == [(0, 4, 0, 0)] * 2
    assert [at(n) for n in (4, 15)] == [(4, 12, OBJCG, TAG)] * 2
    assert [at(n) for n in (16, 31, 48, 12283)] == [None] * 4
    assert [at(n) for n in (32, 47)] == [(32, 16, 0, 0)] * 2
    assert [at(n) for n in (12284, 12287)] == [(12284, 4, 0, 0)] * 2
    found = reader.alloc_at(chunk, 4)
    assert found is not None and found.element == VECTOR + 16
    # The first chunk has no vector, and what has no beginning or no end is no allocation.
    assert reader.alloc_at(chunk._replace(vector=0), 4) == found._replace(
        chunk=chunk._replace(vector=0), objcg=0, codetag=0, element=16
    )
    assert reader.alloc_at(chunk._replace(bound_map=1 << 3), 8) is None
    assert reader.alloc_at(chunk._replace(bound_map=1), 0) is None
    assert reader.alloc_at(chunk._replace(bound_map=0b11), 3) is not None


def test_allocations_with_an_objcg_or_a_call_site(image: MadeImage) -> None:
    allocate(image, SECOND, (0, 2), (2, 2), (1022, 4), (2046, 2), pages=3)
    charge(image, 0, OBJCG)
    charge(image, 2, 0, TAG)
    charge(image, 1022, OBJCG | 1, TAG)
    reader = PercpuReader(image)
    chunk = chunk_of(reader, SECOND)
    found = [(a.offset, a.size, a.objcg, a.codetag) for a in reader.recorded(chunk)]
    assert found == [(0, 8, OBJCG, 0), (8, 8, 0, TAG), (4088, 16, OBJCG, TAG)]
    assert [a.offset for a in reader.charged(chunk)] == [0, 4088]
    assert [a.element for a in reader.charged(chunk)] == [VECTOR, VECTOR + 16 * 1022]
    areas = list(reader.allocations(chunk))
    assert [a.offset for a in areas] == [0, 8, 4088, 8184]
    assert areas[3] == PcpuArea(chunk, 8184, 8, 0, VECTOR + 16 * 2046, 0)
    assert reader.coverage.read == 4  # once for each walk
    assert PcpuArea(chunk, 0, 8, 0, VECTOR).codetag == 0  # none, unless it is given
    assert reader.recorded(chunk._replace(vector=0)) == []
    assert reader.coverage.read == 4


def test_an_allocation_without_an_end(image: MadeImage) -> None:
    allocate(image, SECOND, (0, 2), (16, 2), pages=3)
    for unit in (0, 16, 18):
        charge(image, unit, OBJCG)
    reader = PercpuReader(image)
    chunk = chunk_of(reader, SECOND)._replace(bound_map=1 | 1 << 2 | 1 << 16 | 1 << 18)
    assert [(a.offset, a.size) for a in reader.charged(chunk)] == [(0, 8), (64, 8)]
    why = "bound_map has no end of the allocation"
    assert missed(reader.coverage) == [("percpu allocation", SECOND, why)]


def test_pages_of_a_vector_that_are_missing(image: MadeImage) -> None:
    """A page has 256 elements. The allocations that begin there are not known."""
    areas = [(254, 1), (255, 1), (256, 1), (511, 1), (512, 1)]
    allocate(image, SECOND, *areas, pages=3)
    for unit, _ in areas:
        charge(image, unit, OBJCG)
    image.forget(VECTOR + PAGE)
    reader = PercpuReader(image)
    chunk = chunk_of(reader, SECOND)
    assert [a.offset // 4 for a in reader.charged(chunk)] == [254, 255, 512]
    why = ("objcgs of a percpu chunk", VECTOR, "not in the image")
    assert (missed(reader.coverage), reader.coverage.read) == ([why], 0)
    assert [a.offset // 4 for a in reader.allocations(chunk)] == [254, 255, 512]
    with pytest.raises(FaultError):
        reader.alloc_at(chunk, 256 * 4)


def test_bitmaps(image: MadeImage) -> None:
    """A bitmap is an array of words, the lowest first, in the byte order of the machine."""
    reader = PercpuReader(image)
    image.words(MAPS, 1 | 1 << 63, 0b111)
    for bits in (128, 65, 64, 63):
        assert reader._bitmap(MAPS, bits) == (1 | 1 << 63 | 0b111 << 64) & (1 << bits) - 1
    reader.memory = SimpleNamespace(  # type: ignore[assignment]
        order="big",
        word_size=8,
        read=lambda address, size: {8: b"\x80" + bytes(6) + b"\x01"}[size],
        words=lambda data: struct.unpack(f">{len(data) // 8}Q", data),
    )
    assert reader._bitmap(MAPS, 64) == 1 | 1 << 63
    assert reader._bitmap(MAPS, 63) == 1


def test_bytes_by_node(image: MadeImage) -> None:
    """An allocation of the last 8 bytes of a page, the next one, and 8 bytes of the third."""
    areas = [(1022, 1028), (2100, 1)]
    allocate(image, SECOND, *areas, pages=3)
    for unit, _ in areas:
        charge(image, unit, OBJCG)
    reader = PercpuReader(image)
    long, short = reader.charged(chunk_of(reader, SECOND))
    assert reader.data_nodes(long) == {0: 4112, 1: 4112}
    assert reader.data_nodes(short) == {0: 4, 1: 4}
    # Its elements are 16 bytes each, and 256 in a page; the charge is a pointer for each.
    pages = Counter(2 + (unit // 256 & 1) for unit in range(1022, 1022 + 1028))
    assert reader.metadata_nodes(long) == {nid: 8 * n for nid, n in pages.items()}
    assert reader.metadata_nodes(short) == {2: 8}
    assert reader._places.expected == [(VECTOR, 12)]  # once, with all pages of the vector
    assert (reader.charge(long), reader.charge(short)) == (4112 * 2 + 1028 * 8, 4 * 2 + 8)


def test_a_vector_that_begins_and_ends_within_pages(image: MadeImage) -> None:
    allocate(image, SECOND, (0, 1), pages=3)
    reader = PercpuReader(image)
    chunk = chunk_of(reader, SECOND)
    for vector, pages in ((VECTOR + 16, 13), (VECTOR + PAGE - 16, 13)):
        moved = chunk._replace(vector=vector, address=vector)
        area = reader.alloc_at(moved, 0)
        assert area is not None
        assert sum(reader.metadata_nodes(area).values()) == 8
        assert reader._places.expected[-1] == (vector // PAGE * PAGE, pages)


def test_places_of_addresses(image: MadeImage) -> None:
    reader = PercpuReader(image)
    first, second = reader.chunks(place=False)
    top = 1 << 64
    pointer = (BASE_OF_SECOND - BASE + 0x1000) % top

    def places(address: int) -> list[PcpuPlace]:
        return reader.find(address % top)

    # Of static variables, the first byte and the last, for each CPU and as a pointer.
    for at in (0, 2 * PAGE - 1):
        for cpu, unit in enumerate(UNITS):
            assert places(BASE + unit + at) == [PcpuPlace(None, at, cpu, 0x1000 + at)]
        assert places(0x1000 + at) == [PcpuPlace(None, at, None, 0x1000 + at)]
    assert places(BASE - 1) == places(0xFFF) == []
    after = PcpuPlace(first, 0, 0, 0x1000 + 2 * PAGE)
    assert places(BASE + 2 * PAGE) == [after]
    assert places(BASE + 3 * PAGE) == []
    for at in (0, 3 * PAGE - 1):
        for cpu, unit in enumerate(UNITS):
            here = PcpuPlace(second, at, cpu, (pointer + at) % top)
            assert places(BASE_OF_SECOND + unit + at) == [here]
            assert reader.node(here) == cpu
        here = PcpuPlace(second, at, None, (pointer + at) % top)
        assert places(pointer + at) == [here]
        assert reader.node(here) == -1
    assert places(BASE_OF_SECOND + 3 * PAGE) == places(BASE_OF_SECOND - 1) == []
    allocate(image, SECOND, (3, 1), pages=3)
    area = reader.alloc_at(chunk_of(reader, SECOND), 12)
    assert area is not None
    assert reader.pointer(area) == (pointer + 12) % top
    assert missed(reader.coverage) == []


def test_places_in_a_chunk_that_is_damaged(image: MadeImage) -> None:
    """Addresses in others are found."""
    image.forget(MAPS + 0x4000)
    reader = PercpuReader(image)
    assert reader.find(BASE_OF_SECOND) == []
    assert missed(reader.coverage) == [
        ("percpu chunk", MAPS + 0x4000, f"not made: {MAPS + 0x4000:#x}")
    ]
    assert len(reader.find(BASE + 2 * PAGE)) == 1
    assert reader.coverage.unreadable == 1  # no other chunk is read


def test_chunks_that_are_not_in_the_image(image: MadeImage) -> None:
    """Of one, the links are there. Others are found, also if the first chunk is not known."""
    lost = 0xFFFF888030005FF0
    image.words(LISTS + 16, lost, lost)
    image.words(lost, LISTS + 16, LISTS + 16)
    at = lost + offset(image, "base_addr")
    why = ("percpu chunk", at, f"not made: {at:#x}")
    reader = PercpuReader(image)
    assert [place.offset for place in reader.find(BASE_OF_SECOND)] == [0]
    assert missed(reader.coverage) == [why]
    at = lost + offset(image, "nr_pages")
    reader = PercpuReader(image)
    assert [chunk.address for chunk in reader.chunks(place=False)] == [FIRST, SECOND]
    assert missed(reader.coverage) == [("percpu chunk", at, f"not made: {at:#x}")]
    gone = MAPS - PAGE
    image.words(VARIABLES + PLACES["pcpu_first_chunk"][1], gone)
    reader, at = PercpuReader(image), gone + offset(image, "base_addr")
    assert len(reader.find(BASE_OF_SECOND)) == 1
    assert missed(reader.coverage)[-1] == ("percpu chunk", at, f"not made: {at:#x}")


@pytest.mark.parametrize("member", ["", "struct obj_cgroup **obj_cgroups;"])
def test_vectors_of_older_kernels(member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 6.9, an element is a pointer. Without memcgs, there is no vector."""
    monkeypatch.setattr(percpu, "PcpuPages", Pages)
    text = MEMBERS.replace("struct pcpuobj_ext *obj_exts;", member)
    image = kernel(members=text)
    allocate(image, SECOND, (0, 2), (2, 1), pages=3)
    image.words(VECTOR, OBJCG | 1, TAG, OBJCG)
    reader = PercpuReader(image)
    assert (reader.element, reader.metadata) == (8, 8)
    chunk = chunk_of(reader, SECOND)
    found = [(a.offset, a.size, a.objcg, a.codetag) for a in reader.allocations(chunk)]
    if member:
        assert chunk.vector == VECTOR
        assert found == [(0, 8, OBJCG, 0), (8, 4, OBJCG, 0)]
        assert [a.offset for a in reader.charged(chunk)] == [0, 4, 8]
    else:
        assert (chunk.vector, reader.charged(chunk)) == (0, [])
        assert found == [(0, 8, 0, 0), (8, 4, 0, 0)]


def put(name: str, value: int) -> Callable[[MadeImage], None]:
    def change(image: MadeImage) -> None:
        image.write(VARIABLES + PLACES[name][1], (value % (1 << 32)).to_bytes(4, "little"))

    return change


@pytest.mark.parametrize(
    ("slots", "last", "is_right"),
    [
        (3, 2, True),
        (1, 0, True),
        (64, 63, True),
        (65, 64, False),
        (0, -1, False),
        (-1, -2, False),
        (3, 3, False),
        (2, 2, False),
    ],
)
def test_numbers_of_lists(image: MadeImage, slots: int, last: int, is_right: bool) -> None:
    image.words(LISTS, *(LISTS + 16 * (n // 2) for n in range(128)))
    put("pcpu_nr_slots", slots)(image)
    put("pcpu_to_depopulate_slot", last)(image)
    reader = PercpuReader(image)
    assert list(reader.chunks(place=False)) == []
    why = f"{slots} lists of percpu chunks: {VARIABLES:#x}"
    assert missed(reader.coverage) == ([] if is_right else [("percpu chunk", VARIABLES, why)])


@pytest.mark.parametrize(("pages", "size"), [(0, 0), (-1, -4096), (4, 4097), (3, UNIT)])
def test_sizes_of_units_that_cannot_be_right(image: MadeImage, pages: int, size: int) -> None:
    put("pcpu_unit_pages", pages)(image)
    put("pcpu_unit_size", size)(image)
    reader = PercpuReader(image)
    assert list(reader.chunks()) == []
    at = VARIABLES + PLACES["pcpu_unit_size"][1]
    why = f"a unit of {size} bytes cannot be right: {at:#x}"
    assert missed(reader.coverage) == [("percpu chunk", at, why)] * 3
    assert reader.static_size is None


@pytest.mark.parametrize(
    ("members", "is_right"),
    [
        ({"nr_pages": 4}, True),
        ({"nr_pages": 5}, False),
        ({"nr_pages": 0}, False),
        ({"start_offset": 3 * PAGE}, True),
        ({"start_offset": 3 * PAGE + 4}, False),
        ({"start_offset": -4}, False),
        ({"end_offset": 3 * PAGE}, True),
        ({"end_offset": 3 * PAGE + 4}, False),
        ({"end_offset": -4}, False),
        ({"start_offset": 8192, "end_offset": 4096}, True),
        ({"start_offset": 8192, "end_offset": 4100}, False),
    ],
)
def test_numbers_of_a_chunk(image: MadeImage, members: dict[str, int], is_right: bool) -> None:
    now = {"nr_pages": 3, "start_offset": 0, "end_offset": 0} | members
    for name, value in now.items():
        image.write(SECOND + offset(image, name), (value % (1 << 32)).to_bytes(4, "little"))
    reader = PercpuReader(image)
    found = [chunk.address for chunk in reader.chunks(place=False)]
    assert found == ([FIRST, SECOND] if is_right else [FIRST])
    end = now["nr_pages"] * PAGE - now["end_offset"]
    why = f"{now['nr_pages']} pages with allocations from {now['start_offset']} to {end}"
    expected = [] if is_right else [("percpu chunk", SECOND, f"{why}: {SECOND:#x}")]
    assert missed(reader.coverage) == expected


@pytest.mark.parametrize(
    ("base", "is_right"),
    [(BASE, True), (BASE + UNIT, True), (BASE - PAGE, False), (BASE + UNIT + PAGE, False)],
)
def test_where_the_first_chunk_begins(image: MadeImage, base: int, is_right: bool) -> None:
    image.words(FIRST + offset(image, "base_addr"), base)
    reader = PercpuReader(image)
    assert len(list(reader.chunks())) == 2
    why = ("percpu chunk", FIRST, f"the first chunk does not begin at {base:#x}: {FIRST:#x}")
    assert missed(reader.coverage) == ([] if is_right else [why])
    static = reader.static_pages()
    assert static == (range(BASE, base - PAGE + 1, PAGE) if is_right else range(0))
    if not is_right:
        assert missed(reader.coverage)[1] == ("static percpu variables", FIRST, why[2])


def test_a_chunk_on_two_lists(image: MadeImage) -> None:
    """It is read once, and those that follow are read."""
    image.words(LISTS + 16, FIRST, FIRST)
    reader = PercpuReader(image)
    assert [chunk.address for chunk in reader.chunks(place=False)] == [FIRST, SECOND]
    assert ("percpu chunk", FIRST, f"the chunk is on two lists: {FIRST:#x}") in missed(
        reader.coverage
    )


def test_pages_that_cannot_be_read(image: MadeImage) -> None:
    reader = PercpuReader(image)
    chunk = chunk_of(reader, SECOND)
    image.forget(SECOND)
    at = SECOND + offset(image, "populated")
    assert reader.populated(chunk) == 0
    assert missed(reader.coverage) == [("percpu chunk", at, f"not made: {at:#x}")]


def test_lists_that_cannot_be_read(image: MadeImage) -> None:
    image.variable("pcpu_nr_slots", "int", MAPS - PAGE)
    reader = PercpuReader(image)
    assert list(reader.chunks(place=False)) == []
    why = ("percpu chunk", MAPS - PAGE, f"not made: {MAPS - PAGE:#x}")
    assert missed(reader.coverage) == [why]


def test_a_reader_that_is_told_to_stop(image: MadeImage) -> None:
    reader = PercpuReader(image)
    image.progress.stop = True
    assert list(reader.chunks(place=False)) == []
    assert missed(reader.coverage) == [("percpu chunk", FIRST, STOPPED)]


def test_the_largest_charge(image: MadeImage) -> None:
    """32 KiB for each of two CPUs, and an element for each 4 bytes: a pointer, or all of it."""
    image.given[accounting] = "memcg"
    assert largest_percpu_size(image) == 0x8000
    assert largest_percpu_charge(image) == 2 * 0x8000 + 0x2000 * 8
    image.given[accounting] = "kmem-per-node"
    assert largest_percpu_charge(image) == 2 * 0x8000 + 0x2000 * 16
    assert PercpuReader(image).metadata == 16
    image.given[mem_map] = FRAMES._replace(page_shift=16)
    assert largest_percpu_size(image) == 0x10000
    image = kernel("void *cgroup;")
    image.given[accounting] = "kmem-per-node"
    assert largest_percpu_charge(image) == 2 * 0x8000 + 0x2000 * 8


def test_offsets_of_the_cpus(image: MadeImage) -> None:
    assert percpu_offsets(image) == dict(enumerate(OFFSETS))
    reader = PercpuReader(image)
    assert reader.unit_offsets() == list(UNITS)
