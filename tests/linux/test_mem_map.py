# SPDX-License-Identifier: LGPL-2.1-or-later
"""The layout of the memory map, and what must agree with it, on memory made by hand."""

from __future__ import annotations

import re

import pytest
from drgn import Object
from support.layouts import MadeImage

from memcg_inspect.linux.mm import mmzone
from memcg_inspect.linux.mm.mmzone import (
    MemMap,
    PageRange,
    mem_map,
    page_ranges,
    possible_cpus,
    steady_nodes,
)
from memcg_inspect.model import ImageError

VARIABLES, MISSING = 0xFFFFFFFF82000000, 0xFFFF888077700000
DIRECT, BASE = 0xFFFF888000000000, 0xFFFFEA0000000000
STATES, SECTIONS = VARIABLES + 256, 0xFFFF888000500000
#: ``struct pglist_data`` of three nodes, and the first page frame of each.
PGDATS = [DIRECT + 0x100000 + n * 4096 for n in range(3)]
FIRST_PFNS = (0, 0x400, 0x800)
#: Flags of a section that is present, has a memory map, and is online.
THERE = 1 | 2 | 4
RESERVED = 1 << 12


@pytest.fixture(autouse=True)
def direct_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """drgn needs a kernel to find the direct map."""

    def virt(page: Object) -> Object:
        assert page.value_() == BASE
        return Object(page.prog_, "void *", DIRECT)

    monkeypatch.setattr(mmzone, "page_to_virt", virt)
    monkeypatch.setattr(mmzone, "in_direct_map", lambda _, at: at >> 44 == DIRECT >> 44)


def kernel(*, array: str = "vmemmap", nodes: int | None = 4) -> MadeImage:
    """
    Return a kernel whose nodes 0 to 2 are online, and whose section 0 is.

    :param array: variable with the memory map
    :param nodes: length of ``node_data``; ``None`` without CONFIG_NUMA
    """
    image = MadeImage()
    del image.given[mem_map]
    image.declare("""
        struct nodemask { unsigned long bits[1]; };
        struct page { unsigned long lru[2]; unsigned long flags; unsigned long more[5]; };
        struct pglist_data {
            unsigned long zones[4]; unsigned long node_start_pfn; unsigned long node_present_pages;
            unsigned long node_spanned_pages; int node_id; unsigned long lists[8];
        };
        struct mem_section { unsigned long section_mem_map; void *usage; };
        struct mem_section_usage { unsigned long subsection_map[1]; };
    """)
    image.enum(None, SECTION_SIZE_BITS=27, PAGE_SHIFT=12, SECTIONS_PER_ROOT=256, PG_reserved=12)
    image.enum("node_states", N_POSSIBLE=0, N_ONLINE=1)
    image.variable("nr_node_ids", "unsigned int", VARIABLES)
    image.words(VARIABLES, 3)
    image.variable("node_states", "struct nodemask[2]", STATES)
    image.words(STATES, 0b111, 0b111)
    image.variable(array, "struct page *", VARIABLES + 8)
    image.words(VARIABLES + 8, BASE)
    if nodes is not None:
        image.variable("node_data", f"struct pglist_data *[{nodes}]", VARIABLES + 16)
        image.words(VARIABLES + 16, *PGDATS)
    for nid, (pgdat, pfn) in enumerate(zip(PGDATS, FIRST_PFNS, strict=True)):
        members = {"node_start_pfn": pfn, "node_present_pages": 64, "node_id": nid}
        for at in (pgdat, pgdat - DIRECT):  # the same memory at both addresses
            image.make("struct pglist_data", at, members)
        flags(image, pfn, nid << 62)
        flags(image, (pgdat - DIRECT) // 4096, nid << 62 | RESERVED)
    if array == "vmemmap":
        image.variable("mem_section", "struct mem_section **", VARIABLES + 512)
        image.variable("__highest_present_section_nr", "unsigned long", VARIABLES + 520)
        image.words(VARIABLES + 512, SECTIONS, 0)
        image.words(SECTIONS, SECTIONS + 4096)
        sections(image, BASE)
    return image


def flags(image: MadeImage, pfn: int, value: int) -> None:
    image.words(BASE + 64 * pfn + 16, value)


def sections(image: MadeImage, *maps: int, bits: int = THERE) -> None:
    """Make sections that say where the memory map begins."""
    image.words(VARIABLES + 520, len(maps) - 1)
    for n, base in enumerate(maps):
        image.words(SECTIONS + 4096 + 16 * n, base | bits, 0)


WHOLE = MemMap(
    base=BASE,
    size=64,
    page_shift=12,
    flags=16,
    node_shift=62,
    node_mask=3,
    direct_map=DIRECT,
    address_bits=-1,
)


@pytest.mark.parametrize("array", ["vmemmap", "mem_map"])
def test_layouts_of_the_memory_map(array: str) -> None:
    assert mem_map(kernel(array=array)) == WHOLE


def test_nodes_in_page_flags() -> None:
    """``NODES_SHIFT`` is that of the array of nodes. Without CONFIG_NUMA there is none."""
    image = kernel(nodes=256)
    for nid, pfn in enumerate(FIRST_PFNS):
        flags(image, pfn, nid << 56)
    assert mem_map(image) == WHOLE._replace(node_shift=56, node_mask=255)
    # Two nodes need one bit.
    image = kernel(nodes=2)
    image.words(STATES, 0b11, 0b11)
    image.words(VARIABLES, 2)
    flags(image, FIRST_PFNS[1], 1 << 63)
    assert mem_map(image) == WHOLE._replace(node_shift=63, node_mask=1)
    # One node needs none: contig_page_data is in the image of the kernel.
    image = kernel(array="mem_map", nodes=None)
    image.words(STATES, 1, 1)
    image.words(VARIABLES, 1)
    image.variable("contig_page_data", "struct pglist_data", VARIABLES + 8192)
    image.make("struct pglist_data", VARIABLES + 8192, {"node_present_pages": 64})
    flags(image, 0, 1 << 63)
    assert mem_map(image) == WHOLE._replace(node_shift=64, node_mask=0)


def test_masks_that_are_damaged() -> None:
    """Nothing else is read then: walks of masks need these counts."""
    image = kernel()
    del image.given[possible_cpus]
    image.declare("struct cpumask { unsigned long bits[1]; };")
    image.variable("nr_cpu_ids", "unsigned int", VARIABLES + 1024)
    image.variable("__cpu_possible_mask", "struct cpumask", VARIABLES + 1032)
    image.words(VARIABLES + 1024, 65, 3)
    with pytest.raises(ImageError, match="nr_cpu_ids is 65, and the possible CPUs are"):
        mem_map(image)
    image = kernel()
    image.words(VARIABLES, 5)
    with pytest.raises(ImageError, match="nr_node_ids is 5, and the possible nodes are"):
        mem_map(image)


def test_tags_in_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest byte, of arm64 with KASAN."""
    monkeypatch.setattr(mmzone, "tag_bits", lambda _: 0xFF << 56)
    assert mem_map(kernel()) == WHOLE._replace(address_bits=(1 << 56) - 1)


def test_kernels_without_a_memory_map() -> None:
    image = kernel(array="another_array")
    del image._objects["another_array"]
    with pytest.raises(ImageError, match=r"^this kernel has neither vmemmap nor mem_map \(SPARSE"):
        mem_map(image)
    image = kernel()
    image.variable("vmemmap", "struct page *", MISSING)
    why = r"^the memory map is not known: mem_section cannot be read \(not made"
    with pytest.raises(ImageError, match=why):
        mem_map(image)


@pytest.mark.parametrize("nid", [0, 2])
def test_a_node_that_cannot_be_read(nid: int) -> None:
    """Its memory is missing; nothing is said of page_offset_base."""
    image = kernel()
    image.words(VARIABLES + 16 + 8 * nid, MISSING)
    with pytest.raises(ImageError) as raised:
        mem_map(image)
    assert re.match(
        rf"where the direct map begins is not known: the pglist_data at {MISSING:#x} cannot be "
        r"read \(not made: 0x\w+\)\. Memory of the kernel is missing from this dump: ",
        str(raised.value),
    )


@pytest.mark.parametrize("nid", [0, 2])
def test_a_direct_map_that_begins_elsewhere(nid: int) -> None:
    """The structure of each node is where the direct map says."""
    image, pgdat = kernel(), PGDATS[nid]
    wrong = (
        f"the direct map does not begin at {DIRECT:#x}: the pglist_data at {pgdat:#x} is not at "
        f"the physical address {pgdat - DIRECT:#x}; page_offset_base is damaged, or this layout "
        "of memory is not known"
    )
    image.words(pgdat - DIRECT + 32 + 56, 5)  # the last of the bytes that are compared
    with pytest.raises(ImageError, match=f"^{re.escape(wrong)}$"):
        mem_map(image)
    image = kernel()
    image.words(pgdat - DIRECT + 32 + 64, 5)
    image.words(pgdat - DIRECT + 24, 5)
    assert mem_map(image) == WHOLE
    image = kernel()
    image.forget(pgdat - DIRECT)
    with pytest.raises(ImageError, match=f"^{re.escape(wrong)}$"):
        mem_map(image)


def test_a_node_below_the_direct_map() -> None:
    """It has no physical address."""
    image, at = kernel(), DIRECT - 4096
    image.words(VARIABLES + 16, at)
    image.make("struct pglist_data", at, {"node_present_pages": 64})
    with pytest.raises(ImageError, match=r"is not at the physical address -0x1000;"):
        mem_map(image)


OTHER = BASE + (1 << 30)


def test_what_sections_say() -> None:
    """More than half of those that are online must agree. Their flags are below the address."""
    image = kernel()
    for maps in ((BASE,), (OTHER, BASE, BASE), (BASE, BASE, BASE, OTHER)):
        sections(image, *maps)
        assert mmzone._check_base(image, WHOLE) is None
    for maps in ((OTHER,), (BASE, OTHER), (OTHER, BASE, BASE, OTHER), (OTHER, OTHER, BASE)):
        sections(image, *maps)
        wrong = (
            f"the memory map does not begin at {BASE:#x}: most sections say "
            f"{(BASE if maps == (BASE, OTHER) else OTHER):#x}; mem_section is damaged"
        )
        with pytest.raises(ImageError, match=f"^{wrong}$"):
            mmzone._check_base(image, WHOLE)
    sections(image, OTHER, OTHER, bits=1 | 2)  # none is online
    assert mmzone._check_base(image, WHOLE) is None


@pytest.mark.parametrize("last", [None, 5, 7])
def test_the_flags_of_sections(last: int | None) -> None:
    """SECTION_MAP_LAST_BIT, which was a macro of 6 up to 5.19."""
    image = kernel()
    if last is not None:
        image.enum(None, SECTION_MAP_LAST_BIT=last)
    highest = 1 << (6 if last is None else last) - 1
    sections(image, BASE, bits=THERE | highest)
    assert mem_map(image) == WHOLE
    image = kernel()
    if last is not None:
        image.enum(None, SECTION_MAP_LAST_BIT=last)
    sections(image, BASE, bits=THERE | highest << 1)
    with pytest.raises(ImageError, match="the memory map does not begin"):
        mem_map(image)


@pytest.mark.parametrize("nid", [1, 2])
def test_the_first_page_of_a_node(nid: int) -> None:
    """It names its node, unless the node has no pages, or the page is not in the image."""
    image, pfn = kernel(), FIRST_PFNS[nid]
    flags(image, pfn, (nid ^ 3) << 62)
    wrong = (
        f"the page flags of page frame {pfn:#x} name node {nid ^ 3}, its pglist_data node {nid}: "
        "this layout of page flags is not known"
    )
    with pytest.raises(ImageError, match=f"^{wrong}$"):
        mem_map(image)
    image = kernel()
    image.forget(BASE + 64 * pfn)
    assert mem_map(image) == WHOLE
    image = kernel()
    flags(image, pfn, 3 << 62)
    for at in (PGDATS[nid], PGDATS[nid] - DIRECT):
        image.words(at + 40, 0)
    assert mem_map(image) == WHOLE


# Nodes that cannot have lost their memory


def steady(image: MadeImage) -> frozenset[int]:
    image.given[mem_map] = WHOLE
    return steady_nodes(image)


def test_nodes_whose_structure_is_in_their_own_memory() -> None:
    assert steady(kernel()) == {0, 1, 2}
    pfn = (PGDATS[1] - DIRECT) // 4096
    for value in (1 << 62, 2 << 62 | RESERVED, 0):
        image = kernel()
        flags(image, pfn, value)
        assert steady(image) == {0, 2}
    image = kernel()
    image.forget(PGDATS[1])
    assert steady(image) == {0, 2}


def test_a_node_whose_structure_is_in_the_image_of_the_kernel() -> None:
    """contig_page_data, without CONFIG_NUMA."""
    image, at = kernel(), VARIABLES + 8192
    image.words(VARIABLES + 16, at)
    image.make("struct pglist_data", at, {})
    assert steady(image) == {0, 1, 2}


# Sections that were added after boot

ONLINE, EARLY = 4, 8
SECTION, SUBSECTION = 1 << 15, 1 << 9


def test_parts_of_a_section() -> None:
    """Each bit is 2 MiB. Of a section that is there since boot, holes are initialised, too."""
    image, usage = kernel(), SECTIONS + 0x8000
    sections(image, BASE, BASE, BASE)
    image.words(SECTIONS + 4096, BASE | THERE, usage, BASE | THERE | EARLY, usage)
    image.words(SECTIONS + 4096 + 32, BASE | 1 | 2, usage)
    image.words(usage, 0b1011 | 1 << 63)
    assert page_ranges(image) == [
        PageRange(0, 2 * SUBSECTION),
        PageRange(3 * SUBSECTION, 4 * SUBSECTION),
        PageRange(63 * SUBSECTION, 2 * SECTION),
    ]
