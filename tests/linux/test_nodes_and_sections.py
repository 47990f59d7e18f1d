# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Nodes, CPUs, zones and sections of memory, made by hand as in include/linux/mmzone.h.

Masks and counts that contradict each other are damaged, and are refused.
"""

from __future__ import annotations

import pytest
from drgn import Object, Program
from drgn.helpers.linux.mm import for_each_valid_page_range
from fuzz.damage import damaged
from support.guests import ARCH, DEBIAN_KERNELS, Lab
from support.layouts import MadeImage
from support.planting import Overlay, Write
from support.zones import zoneinfo

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.mmzone import (
    MemMap,
    PageRange,
    mem_map,
    memory_map_end,
    memory_nodes,
    online_cpus,
    online_nodes,
    page_ranges,
    possible_cpus,
    possible_nodes,
    present_sections,
    split_ranges,
    steady_nodes,
    zone_types,
)
from memcg_inspect.model import ImageError

of_x86 = pytest.mark.parametrize("kernel", DEBIAN_KERNELS if ARCH == "amd64" else ())

VARIABLES, MEMORY = 0xFFFFFFFF82000000, 0xFFFF888000100000
STATES, CPUS = VARIABLES + 0x100, VARIABLES + 0x200


# Nodes


def bits(*numbers: int) -> tuple[int, int]:
    """Return the two words of a mask."""
    mask = sum(1 << number for number in numbers)
    return mask % (1 << 64), mask >> 64


def nodes(
    number: int,
    possible: tuple[int, ...],
    online: tuple[int, ...] = (0,),
    with_memory: tuple[int, ...] | None = (0,),
) -> MadeImage:
    """Make ``node_states`` with masks of 128 nodes."""
    image = MadeImage()
    image.declare("struct nodemask { unsigned long bits[2]; };")
    image.variable("nr_node_ids", "unsigned int", VARIABLES)
    image.write(VARIABLES, number.to_bytes(4, "little"))
    image.variable("node_states", "struct nodemask[3]", STATES)
    states = {"N_POSSIBLE": 0, "N_ONLINE": 1}
    if with_memory is not None:
        states["N_MEMORY"] = 2
    image.enum("node_states", **states)
    image.words(STATES, *bits(*possible), *bits(*online), *bits(*(with_memory or ())))
    return image


def test_nodes_in_masks() -> None:
    image = nodes(101, (0, 1, 63, 64, 100), (0, 64, 100), (64, 100))
    assert possible_nodes(image) == range(101)
    assert online_nodes(image) == (0, 64, 100)
    assert memory_nodes(image) == {64, 100}
    assert memory_nodes(nodes(1, (0,), with_memory=None)) is None
    assert memory_nodes(nodes(1, (0,), with_memory=(0, 1))) is None


@pytest.mark.parametrize(("number", "possible"), [(2, (0,)), (1, (0, 1)), (0, ()), (1, ())])
def test_a_number_of_nodes_that_is_not_that_of_the_mask(
    number: int, possible: tuple[int, ...]
) -> None:
    with pytest.raises(ImageError, match=f"nr_node_ids is {number}, and the possible nodes are"):
        possible_nodes(nodes(number, possible))


@pytest.mark.parametrize("online", [(), (0, 3), (3,)])
def test_nodes_that_are_online_and_not_possible(online: tuple[int, ...]) -> None:
    with pytest.raises(ImageError, match="node_states is damaged"):
        online_nodes(nodes(3, (0, 1, 2), online))


# CPUs


def cpus(number: int | None, possible: tuple[int, ...], online: tuple[int, ...]) -> MadeImage:
    image = MadeImage()
    del image.given[possible_cpus]
    image.declare("struct cpumask { unsigned long bits[2]; };")
    if number is not None:
        image.variable("nr_cpu_ids", "unsigned int", VARIABLES)
        image.write(VARIABLES, number.to_bytes(4, "little"))
    image.variable("__cpu_possible_mask", "struct cpumask", CPUS)
    image.variable("__cpu_online_mask", "struct cpumask", CPUS + 16)
    image.words(CPUS, *bits(*possible), *bits(*online))
    return image


def test_cpus_in_masks() -> None:
    image = cpus(128, (0, 1, 63, 64, 127), (1, 127))
    assert possible_cpus(image) == (0, 1, 63, 64, 127)
    assert online_cpus(image) == (1, 127)
    image.variable("__cpu_active_mask", "struct cpumask", CPUS + 32)
    image.words(CPUS + 32, *bits(0, 2, 64))  # those that a panic stopped; 2 is not possible
    assert online_cpus(image) == (0, 1, 64, 127)
    assert possible_cpus(cpus(8, (0, 1), (0,))) == (0, 1)  # disable_smp() of x86 takes some out
    assert possible_cpus(cpus(2, (0, 1), (0,))) == (0, 1)


@pytest.mark.parametrize(
    ("number", "possible"), [(2, (0, 2)), (1, (0, 1)), (129, (0, 1)), (4, ()), (0, ())]
)
def test_a_number_of_cpus_that_cannot_be(number: int, possible: tuple[int, ...]) -> None:
    with pytest.raises(ImageError, match=f"nr_cpu_ids is {number}, and the possible CPUs are"):
        possible_cpus(cpus(number, possible, (0,)))


@pytest.mark.parametrize("online", [(), (0, 2), (127,)])
def test_cpus_that_are_online_and_not_possible(online: tuple[int, ...]) -> None:
    with pytest.raises(ImageError, match="__cpu_online_mask is damaged"):
        online_cpus(cpus(2, (0, 1), online))


# Zones


def test_zones_have_names() -> None:
    image = MadeImage()
    image.enum("zone_type", ZONE_DMA=0, ZONE_NORMAL=1, ZONE_MOVABLE=2, __MAX_NR_ZONES=3)
    assert zone_types(image) == {0: "ZONE_DMA", 1: "ZONE_NORMAL", 2: "ZONE_MOVABLE"}
    image = MadeImage()
    image.enum("zone_type", ZONE_DMA=0, ZONE_NORMAL=1)
    assert zone_types(image) == {}


# Sections of 128 MiB

PAGES = 1 << 15
PRESENT, HAS_MAP, ONLINE, EARLY = 1, 2, 4, 8
THERE = PRESENT | HAS_MAP | ONLINE | EARLY


def sections(highest: int, flags: dict[int, int], *, in_roots: bool = True) -> MadeImage:
    """Make ``mem_section``; with CONFIG_SPARSEMEM_EXTREME, two sections are in each root."""
    image = MadeImage()
    image.declare("struct mem_section { unsigned long pad; unsigned long section_mem_map;"
                  " void *usage; unsigned long pad2; };")  # fmt: skip
    image.enum(None, SECTION_SIZE_BITS=27, PAGE_SHIFT=12, SECTIONS_PER_ROOT=2)
    image.variable("__highest_present_section_nr", "unsigned long", VARIABLES + 8)
    image.words(VARIABLES + 8, highest)
    image.variable(
        "mem_section", "struct mem_section **" if in_roots else "struct mem_section[8]", VARIABLES
    )
    if not in_roots:
        image.variable("mem_section", "struct mem_section[8]", MEMORY + 0x1000)
    image.words(VARIABLES, MEMORY)
    roots = {number // 2 for number in flags}
    image.words(MEMORY, *(MEMORY + 0x1000 + 64 * n if n in roots else 0 for n in range(4)))
    for number, word in flags.items():
        # The address of the memory map is above the flags.
        image.words(MEMORY + 0x1000 + 32 * number, 0, 0xEA000000 | word, 0, number)
    return image


def section(first: int, last: int | None = None) -> PageRange:
    return PageRange(first * PAGES, (first if last is None else last) * PAGES + PAGES)


@pytest.mark.parametrize("in_roots", [True, False])
def test_sections_that_are_online(in_roots: bool) -> None:
    image = sections(6, {0: THERE, 1: THERE, 2: PRESENT | HAS_MAP, 4: THERE, 5: ONLINE, 6: THERE},
                     in_roots=in_roots)  # fmt: skip
    assert page_ranges(image) == [section(0, 1), section(4, 6)]
    assert memory_map_end(image) == 7 * PAGES
    found = [int.from_bytes(data[24:32], "little") for data in present_sections(image)]
    assert found == [0, 1, 2, 4, 6]
    assert {len(data) for data in present_sections(image)} == {32}


def test_what_is_above_the_highest_section_is_not_read() -> None:
    assert page_ranges(sections(1, {0: THERE, 1: THERE, 2: THERE})) == [section(0, 1)]
    image = sections(4, {0: THERE, 4: PRESENT})  # the last one is offline
    assert page_ranges(image) == [section(0)]
    assert memory_map_end(image) == 5 * PAGES
    assert page_ranges(sections(0, {0: THERE})) == [section(0)]
    assert page_ranges(sections(3, {})) == []
    assert memory_map_end(sections(3, {})) == 4 * PAGES


@pytest.mark.parametrize("in_roots", [True, False])
def test_more_sections_than_memory_can_have(in_roots: bool) -> None:
    image = sections(1 << 25, {0: THERE}, in_roots=in_roots)
    with pytest.raises(ImageError, match="__highest_present_section_nr is 0x2000000, more than"):
        page_ranges(image)
    with pytest.raises(ImageError, match="more than memory can be"):
        list(present_sections(image))


def test_bits_of_sections_are_enumerators_since_6_0() -> None:
    image = sections(1, {0: 1 << 5, 1: THERE})
    image.enum(None, SECTION_IS_ONLINE_BIT=5, SECTION_IS_EARLY_BIT=6)
    assert page_ranges(image) == [section(0)]


def test_kernels_without_sections() -> None:
    with pytest.raises(UnknownKernelError):
        list(present_sections(MadeImage()))


def test_ranges_in_parts() -> None:
    ranges = [PageRange(0, 10), PageRange(16, 20), PageRange(24, 24), PageRange(32, 33)]
    assert list(split_ranges(ranges, 4)) == [
        PageRange(0, 4),
        PageRange(4, 8),
        PageRange(8, 10),
        PageRange(16, 20),
        PageRange(32, 33),
    ]


# The memory map


def test_pointers_with_a_tag() -> None:
    """Of arm64 with CONFIG_KASAN_SW_TAGS."""
    direct = 0xFFFF000000000000
    frames = MemMap(0xFFFFFC0000000000, 64, 12, 0, 63, 1, direct, (1 << 64) - 1 & ~(0xFF << 56))
    for tag in (0xFF, 0xF3, 0x00):
        address = direct + 5 * 4096 + 7 & (1 << 56) - 1 | tag << 56
        assert frames.virt_to_page(address) == frames.page(5)


@pytest.mark.image
@pytest.mark.each_kernel
@of_x86
def test_nodes_of_a_guest(lab: Lab, kernel: str) -> None:
    """Four nodes have memory since boot, and /proc/zoneinfo has their zones."""
    image = lab.image(kernel)
    prog = image.program()
    found = image_of(prog)
    said = zoneinfo(image, "2")
    assert set(online_nodes(found)) == memory_nodes(found) == {nid for nid, _ in said}
    names = {f"ZONE_{zone.upper()}" for _, zone in said}
    assert names == set(zone_types(found).values())
    assert page_ranges(found) == [PageRange(*both[:2]) for both in for_each_valid_page_range(prog)]
    assert len(possible_cpus(found)) == len(online_cpus(found))
    frames, expected = mem_map(found), set()
    for nid in online_nodes(found):
        # Early boot takes the structure of a node from its own memory.
        pgdat = prog["node_data"][nid]
        at = pgdat.value_() - frames.direct_map >> frames.page_shift
        start = int(pgdat.node_start_pfn)
        if at in range(start, start + int(pgdat.node_spanned_pages)):
            page = Object(prog, "struct page *", frames.page(at))
            flags = page.flags.f if hasattr(page.flags, "f") else page.flags
            assert int(flags) >> prog["PG_reserved"].value_() & 1
            expected.add(nid)
    assert steady_nodes(found) == expected
    assert expected


# Images that are damaged


def word(address: int | None, value: int) -> Write:
    assert address is not None
    return Write(address, (value % (1 << 64)).to_bytes(8, "little"))


def section_words(prog: Program) -> list[Object]:
    """Return ``section_mem_map`` of all sections, each of which is there."""
    each = int(prog["SECTIONS_PER_ROOT"])
    last = int(prog["__highest_present_section_nr"])
    return [prog["mem_section"][n // each][n % each].section_mem_map for n in range(last + 1)]


@pytest.mark.image
@pytest.mark.newest_kernel
@of_x86
def test_most_sections_say_where_the_memory_map_begins(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel).own_program()
    overlay, base = Overlay(prog), mem_map(image_of(prog)).base
    places = section_words(prog)
    assert len(places) == 8
    wrong = [word(at.address_, at.value_() + (1 << 30)) for at in places]
    for number in (1, 3):  # of the others than the first
        overlay.write(tuple(wrong[1 : 1 + number]))
        assert mem_map(Image(prog)).base == base
    overlay.write((wrong[4],))
    with pytest.raises(ImageError, match=f"the memory map does not begin at {base:#x}"):
        mem_map(Image(prog))
    overlay.write((wrong[5],))
    most = f"most sections say {base + (1 << 30):#x}; mem_section is damaged"
    with pytest.raises(ImageError, match=most):
        mem_map(Image(prog))
    # A section that is not online says nothing.
    overlay.write(tuple(word(at.address_, at.value_() & ~ONLINE) for at in places[2:6]))
    assert mem_map(Image(prog)).base == base


@pytest.mark.image
@pytest.mark.newest_kernel
@of_x86
def test_the_first_page_of_a_node_names_it(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel).own_program()
    overlay, frames = Overlay(prog), mem_map(image_of(prog))
    pgdat = prog["node_data"][2]
    pfn = int(pgdat.node_start_pfn)
    flags = frames.page(pfn) + frames.flags
    overlay.write((word(flags, 1 << frames.node_shift),))
    wrong = f"the page flags of page frame {pfn:#x} name node 1, its pglist_data node 2"
    with pytest.raises(ImageError, match=wrong):
        mem_map(Image(prog))
    overlay.write((word(pgdat.node_present_pages.address_, 0),))  # it has no pages
    assert mem_map(Image(prog)) == frames


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("more", [1 << 21, -(1 << 21)])
@of_x86
def test_the_nodes_are_where_the_direct_map_says(lab: Lab, kernel: str, more: int) -> None:
    image = lab.image(kernel)
    variable = image.program()["page_offset_base"]
    assert variable.value_() == mem_map(image_of(image.program())).direct_map
    moved = variable.value_() + more
    changed = damaged(image.core, (variable.address_, moved))
    with pytest.raises(ImageError, match=f"the direct map does not begin at {moved:#x}"):
        mem_map(changed)


@pytest.mark.image
@pytest.mark.newest_kernel
@of_x86
def test_nodes_whose_structure_is_not_reserved_for_good(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel).own_program()
    overlay, frames = Overlay(prog), mem_map(image_of(prog))
    steady = steady_nodes(image_of(prog))
    assert len(steady) > 1
    reserved = 1 << prog["PG_reserved"].value_()
    for nid in steady:
        flags = frames.virt_to_page(prog["node_data"][nid].value_()) + frames.flags
        value = image_of(prog).memory.word(flags)
        overlay.write((word(flags, value & ~reserved),))
        assert steady_nodes(Image(prog)) == steady - {nid}
        # It may be on another node, as that of a node that had no memory.
        overlay.write((word(flags, value ^ 1 << frames.node_shift),))
        assert steady_nodes(Image(prog)) == steady - {nid}
        overlay.write((word(flags, value),))
    assert steady_nodes(Image(prog)) == steady
