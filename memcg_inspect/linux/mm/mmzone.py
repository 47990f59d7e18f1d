# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Nodes, sections and page frames
-------------------------------

Mirrors :linux:`include/linux/mmzone.h` and the node in the page flags
(:linux:`include/linux/page-flags-layout.h`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from drgn import FaultError, Object, ProgramFlags, TypeKind, offsetof, sizeof
from drgn.helpers.linux.cpumask import cpu_online_mask, cpu_possible_mask, for_each_possible_cpu
from drgn.helpers.linux.mm import for_each_valid_page_range, in_direct_map, page_to_virt
from drgn.helpers.linux.mmzone import NODE_DATA
from drgn.helpers.linux.nodemask import nr_node_ids

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import array_length, constant, has_member
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.missing import refusal
from memcg_inspect.linux.arch.processor import tag_bits
from memcg_inspect.model import ImageError

__all__ = (
    "MemMap",
    "PageRange",
    "mem_map",
    "memory_map_end",
    "memory_nodes",
    "online_cpus",
    "online_nodes",
    "online_pgdats",
    "page_ranges",
    "possible_cpus",
    "possible_nodes",
    "present_sections",
    "split_ranges",
    "steady_nodes",
    "zone_types",
)


#: ``SUBSECTION_SHIFT``.
SUBSECTION_SHIFT = 21
#: More sections than any machine has: 4 PiB of memory with sections of 128 MiB.
_MOST_SECTIONS = 1 << 25
#: More pages than any machine has: 4 PiB of memory with pages of 4 KiB.
_MOST_PAGES = 1 << 40
#: Bytes of a ``pglist_data`` to compare.
_PGDAT_BYTES = 64


class MemMap(NamedTuple):
    """
    The layout of the memory map, ``struct page[]``.

    :ivar base: address of the ``struct page`` of page frame 0
    :ivar size: ``sizeof(struct page)``
    :ivar page_shift: ``PAGE_SHIFT``
    :ivar flags: offset of the flags word in ``struct page``
    :ivar node_shift: bits below the node id in the flags word
    :ivar node_mask: ``NODES_MASK``; 0 where the kernel has one node only
    :ivar direct_map: address of page frame 0 in the direct map
    :ivar address_bits: bits of a pointer that are no tag
    """

    base: int
    size: int
    page_shift: int
    flags: int
    node_shift: int
    node_mask: int
    direct_map: int
    address_bits: int = -1

    @property
    def page_size(self) -> int:
        """``PAGE_SIZE``, in bytes."""
        return 1 << self.page_shift

    def page(self, pfn: int) -> int:
        """Return the address of the ``struct page`` of a page frame."""
        return self.base + pfn * self.size

    def pfn(self, page: int) -> int:
        """Return the page frame number of a ``struct page *``."""
        return (page - self.base) // self.size

    def virt(self, page: int) -> int:
        """Return the address of a page's memory in the direct map, ``page_to_virt()``."""
        return self.direct_map + (self.pfn(page) << self.page_shift)

    def virt_to_page(self, address: int) -> int:
        """Return the ``struct page *`` of a pointer to memory in the direct map."""
        return self.page((address - self.direct_map & self.address_bits) >> self.page_shift)

    def nid(self, flags: int) -> int:
        """Return the node in a flags word, ``page_to_nid()``."""
        return flags >> self.node_shift & self.node_mask


class PageRange(NamedTuple):
    """
    A range of page frames with contiguous ``struct page``.

    :ivar start: first page frame number
    :ivar end: last page frame number plus 1
    """

    start: int
    end: int


@per_image
def mem_map(image: Image) -> MemMap:
    """
    Find the layout of the memory map.

    The array ``node_data`` has ``1 << NODES_SHIFT`` elements. The node is in the highest bits of
    the flags word: with ``CONFIG_SPARSEMEM_VMEMMAP``, no section number is above it.

    :raises ImageError: if the memory model is neither ``SPARSEMEM_VMEMMAP`` nor ``FLATMEM``, or if
        what leads to the memory map cannot be read
    """
    memory = image.memory
    page = image.type("struct page")
    # drgn's helpers walk masks up to these counts.
    possible_nodes(image)
    possible_cpus(image)
    try:
        base = int(image.object("vmemmap").value_())
    except FaultError as error:
        # drgn has looked at every section that there could be, and would do so for each reader.
        what = "the memory map is not known: mem_section cannot be read"
        raise refusal(what, error) from None
    except UnknownKernelError:
        try:
            base = int(image.object("mem_map").value_())
        except UnknownKernelError:
            raise ImageError(
                "this kernel has neither vmemmap nor mem_map (SPARSEMEM without "
                "CONFIG_SPARSEMEM_VMEMMAP); its page frames cannot be walked"
            ) from None
    try:
        nodes = array_length(image.object("node_data").type_)
    except UnknownKernelError:
        nodes = 1  # CONFIG_NUMA=n
    width, tags = max(nodes - 1, 0).bit_length(), tag_bits(image)
    found = MemMap(
        base=base,
        size=sizeof(page),
        page_shift=int(image.object("PAGE_SHIFT").value_()),
        flags=offsetof(page, "flags"),
        node_shift=8 * memory.word_size - width,
        node_mask=(1 << width) - 1,
        direct_map=int(page_to_virt(image.pointer("struct page *", base)).value_()),
        address_bits=(1 << 8 * memory.word_size) - 1 & ~tags if tags else -1,
    )
    _check_direct_map(image, found)
    _check_base(image, found)
    _check_node_bits(image, found)
    return found


def _check_direct_map(image: Image, found: MemMap) -> None:
    """
    Check the direct map with the ``pglist_data``, whose address in it the kernel keeps.

    ``arch_alloc_nodedata()`` allocates them from memblock. The same memory, with its lists that
    point to themselves, must be at the virtual and the physical address.
    """
    try:
        image.object("node_data")
    except UnknownKernelError:
        return  # CONFIG_NUMA=n: contig_page_data is in the image of the kernel
    if image.memory.word_size < 8 or image.prog.flags & ProgramFlags.IS_LIVE:
        return
    start = offsetof(image.type("struct pglist_data"), "node_start_pfn")
    for pgdat in online_pgdats(image):
        address = pgdat.value_() + start
        physical = address - found.direct_map
        try:
            data = image.memory.read(address, _PGDAT_BYTES)
        except FaultError as error:
            at = f"the pglist_data at {pgdat.value_():#x}"
            what = f"where the direct map begins is not known: {at} cannot be read"
            raise refusal(what, error) from None
        with suppress(FaultError):
            if 0 <= physical < 1 << 63 and data == image.prog.read(physical, _PGDAT_BYTES, True):
                continue
        raise ImageError(
            f"the direct map does not begin at {found.direct_map:#x}: the pglist_data at "
            f"{pgdat.value_():#x} is not at the physical address {physical - start:#x}; "
            "page_offset_base is damaged, or this layout of memory is not known"
        )


def _check_base(image: Image, found: MemMap) -> None:
    """
    Check the memory map with what the sections say of it, ``sparse_encode_mem_map()``.

    drgn takes ``vmemmap`` from the first one. A damaged one differs from most.
    """
    try:
        image.object("vmemmap")
        roots = image.object("mem_section")
    except UnknownKernelError:
        return
    section = image.type("struct mem_section")
    size, at = sizeof(section), offsetof(section, "section_mem_map")
    # SECTION_MAP_LAST_BIT, an enumerator since commit ed7802dd48f7 (in v6.0)
    flags = (1 << (constant(image, "SECTION_MAP_LAST_BIT") or 6)) - 1
    online = _section_flag(image, "ONLINE")
    said: Counter[int] = Counter()
    for _, data in _sections(image, roots, size):
        said.update(w & ~flags for w in image.memory.words(data, at, size) if w & online)
    if said and said[found.base] <= said.total() // 2:
        raise ImageError(
            f"the memory map does not begin at {found.base:#x}: most sections say "
            f"{said.most_common(1)[0][0]:#x}; mem_section is damaged"
        )


def _check_node_bits(image: Image, found: MemMap) -> None:
    # The first page frame of a node must name that node.
    memory = image.memory
    for pgdat in online_pgdats(image):
        pfn, present = int(pgdat.node_start_pfn), int(pgdat.node_present_pages)
        if not present:
            continue
        try:
            flags = memory.word(found.page(pfn) + found.flags)
        except FaultError:
            continue
        if found.nid(flags) != int(pgdat.node_id):
            raise ImageError(
                f"the page flags of page frame {pfn:#x} name node {found.nid(flags)}, its "
                f"pglist_data node {int(pgdat.node_id)}: this layout of page flags is not known"
            )


def page_ranges(image: Image) -> list[PageRange]:
    """
    Return the ranges of valid page frames whose ``struct page`` is initialised, in ascending order.

    With ``SPARSEMEM``, only sections that are online count, as in ``pfn_to_online_page()``. Memory
    that was added and never onlined, or that was taken offline, has a memory map with arbitrary
    contents. The same is true of the part of ``ZONE_DEVICE`` memory that holds its memory map
    (``altmap``). Sections of ``ZONE_DEVICE`` are not online. So pages of a memcg that migrated to
    device memory (``MEMORY_DEVICE_PRIVATE``, ``MEMORY_DEVICE_COHERENT``) are not among them.

    :raises ImageError: if ``__highest_present_section_nr`` or ``max_pfn`` cannot be right
    """
    try:
        roots = image.object("mem_section")
    except UnknownKernelError:  # FLATMEM
        found = [PageRange(start, end) for start, end, _ in for_each_valid_page_range(image.prog)]
        if any(part.end > _MOST_PAGES for part in found):
            raise ImageError(f"max_pfn is {found[-1].end:#x}, more than memory can be") from None
        return found
    return list(_joined(_online_ranges(image, roots)))


def memory_map_end(image: Image) -> int:
    """Return the page frame after the last one that has a ``struct page``, valid or not."""
    end = max((part.end for part in page_ranges(image)), default=0)
    try:
        number = int(image.object("__highest_present_section_nr").value_())
        bits = int(image.object("SECTION_SIZE_BITS").value_())
    except UnknownKernelError:  # FLATMEM
        return end
    return max(end, number + 1 << bits - int(image.object("PAGE_SHIFT").value_()))


def _joined(ranges: Iterable[PageRange]) -> Iterator[PageRange]:
    last: PageRange | None = None
    for part in ranges:
        if last is not None and last.end == part.start:
            last = PageRange(last.start, part.end)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


def _online_ranges(image: Image, roots: Object) -> Iterator[PageRange]:
    """
    Return the valid page frames of sections that are online, in ascending order.

    :param roots: ``mem_section``
    """
    section = image.type("struct mem_section")
    size, usage = sizeof(section), offsetof(section, "usage")
    bits = int(image.object("SECTION_SIZE_BITS").value_())
    pages = 1 << bits - int(image.object("PAGE_SHIFT").value_())
    online, early = _section_flag(image, "ONLINE"), _section_flag(image, "EARLY")
    # struct mem_section_usage.subsection_map is there with CONFIG_SPARSEMEM_VMEMMAP only.
    split = has_member(image, "struct mem_section_usage", "subsection_map")
    for number, data in _sections(image, roots, size):
        words = image.memory.words(data, offsetof(section, "section_mem_map"), size)
        for n, word in enumerate(words):
            start = (number + n) * pages
            if not word & online:
                continue
            # early_section(): its memory map is initialised as a whole, holes included.
            if word & early or not split:
                yield PageRange(start, start + pages)
            else:
                at = image.memory.word_at(data, n * size + usage)
                yield from _subsections(image, at, start, pages, 1 << bits - SUBSECTION_SHIFT)


def present_sections(image: Image) -> Iterator[bytes]:
    """
    Read each ``struct mem_section`` that is present.

    :raises ImageError: if ``__highest_present_section_nr`` cannot be right
    :raises UnknownKernelError: if the kernel has no sections (``FLATMEM``)
    """
    section = image.type("struct mem_section")
    size, at = sizeof(section), offsetof(section, "section_mem_map")
    for _, data in _sections(image, image.object("mem_section"), size):
        for n, word in enumerate(image.memory.words(data, at, size)):
            if word & 1:  # SECTION_MARKED_PRESENT
                yield data[n * size : (n + 1) * size]


def _section_flag(image: Image, name: str) -> int:
    # Macros with the same values until commit ed7802dd48f7 ("mm: memory_hotplug: enumerate all
    # supported section flags") (in v6.0).
    bit = constant(image, f"SECTION_IS_{name}_BIT")
    return 1 << ({"ONLINE": 2, "EARLY": 3}[name] if bit is None else bit)


def _sections(image: Image, roots: Object, size: int) -> Iterator[tuple[int, bytes]]:
    """
    Read all ``struct mem_section`` up to the highest section that is present.

    :param roots: ``mem_section``
    :param size: ``sizeof(struct mem_section)``
    :return: number of the first section, sections next to each other
    """
    memory = image.memory
    count = int(image.object("__highest_present_section_nr").value_()) + 1
    if count > _MOST_SECTIONS:
        raise ImageError(f"__highest_present_section_nr is {count - 1:#x}, more than memory can be")
    if roots.type_.unaliased_kind() == TypeKind.ARRAY:  # without CONFIG_SPARSEMEM_EXTREME
        yield 0, memory.read(int(roots.address_ or 0), count * size)
        return
    each = int(image.object("SECTIONS_PER_ROOT").value_())
    length = -(-count // each) * memory.word_size
    for n, root in enumerate(memory.words(memory.read(int(roots.value_()), length))):
        if root:
            yield n * each, memory.read(root, min(each, count - n * each) * size)


def _subsections(
    image: Image, usage: int, start: int, pages: int, count: int
) -> Iterator[PageRange]:
    """
    Return the valid page frames of a section that was added after boot.

    :param usage: ``struct mem_section_usage *``
    :param start: first page frame of the section
    :param pages: page frames in the section
    :param count: subsections in the section
    """
    at = usage + offsetof(image.type("struct mem_section_usage"), "subsection_map")
    bytes_in_word = image.memory.word_size
    data = image.memory.read(at, -(-count // (8 * bytes_in_word)) * bytes_in_word)
    words = image.memory.words(data)
    each = pages // count
    for n in range(count):
        if words[n // (8 * bytes_in_word)] >> n % (8 * bytes_in_word) & 1:
            yield PageRange(start + n * each, start + (n + 1) * each)


def split_ranges(ranges: Iterable[PageRange], pages: int) -> Iterator[PageRange]:
    """
    Split ranges of page frames.

    :param pages: page frames in each part, except the last one of each range
    """
    for start, end in ranges:
        for first in range(start, end, pages):
            yield PageRange(first, min(first + pages, end))


@per_image
def possible_nodes(image: Image) -> range:
    """
    Return ``[0, nr_node_ids)``, the length of ``memcg->nodeinfo``.

    :raises ImageError: if it does not follow from the nodes that are possible
    """
    number = nr_node_ids(image.prog)
    try:
        found = _nodes_in_state(image, "N_POSSIBLE")
    except UnknownKernelError:
        return range(number)
    if not found or number != found[-1] + 1:  # setup_nr_node_ids()
        raise ImageError(f"nr_node_ids is {number}, and the possible nodes are {found[-9:]}")
    return range(number)


def _set_bits(image: Image, bits: Object) -> list[int]:
    """
    Return the bits that are set in a mask, in ascending order.

    :param bits: ``unsigned long []``
    """
    words = image.memory.words(image.memory.read(int(bits.address_ or 0), sizeof(bits)))
    width = 8 * image.memory.word_size
    every = (
        (n * width + bit, word >> bit & 1) for n, word in enumerate(words) for bit in range(width)
    )
    return [number for number, is_set in every if is_set]


@per_image
def online_nodes(image: Image) -> tuple[int, ...]:
    """
    Return the nodes that are online.

    :raises ImageError: if there are none, or if one is not possible
    """
    found = _nodes_in_state(image, "N_ONLINE")
    if not found or not set(found) <= set(possible_nodes(image)):
        raise ImageError(f"node_states is damaged: nodes {found[-9:]} are online")
    return tuple(found)


def online_pgdats(image: Image) -> Iterator[Object]:
    """
    Iterate over the ``struct pglist_data *`` of all nodes that are online.

    :raises ImageError: if these are damaged
    """
    for nid in online_nodes(image):
        yield NODE_DATA(image.prog, nid).read_()


@per_image
def memory_nodes(image: Image) -> frozenset[int] | None:
    """Return the nodes that have memory (``N_MEMORY``); ``None`` if they are not known."""
    try:
        found = frozenset(_nodes_in_state(image, "N_MEMORY"))
    except (FaultError, UnknownKernelError):
        return None
    return found if found <= set(possible_nodes(image)) else None


@per_image
def steady_nodes(image: Image) -> frozenset[int]:
    """
    Return the nodes that cannot have lost their memory since boot.

    Early boot takes the ``struct pglist_data`` of a node from its own memory if it has any that
    need not go away (``alloc_node_data()``). Such memory is reserved for good, so that a block of
    memory cannot be taken offline that has a page of it (``has_unmovable_pages()``). The nodes that
    get memory later have theirs on another node.
    """
    frames, found = mem_map(image), set()
    reserved = 1 << (constant(image, "PG_reserved") or 0)
    for pgdat in online_pgdats(image):
        with suppress(FaultError):
            nid, address = int(pgdat.node_id), pgdat.value_()
            if not in_direct_map(image.prog, address):
                found.add(nid)  # contig_page_data, in the memory of the kernel's own image
                continue
            page = frames.virt_to_page(address)
            flags = image.memory.word_at(image.memory.read(page, frames.size), frames.flags)
            if flags & reserved and frames.nid(flags) == nid:
                found.add(nid)
    return frozenset(found)


@per_image
def zone_types(image: Image) -> dict[int, str]:
    """Return the enumerators of ``enum zone_type`` by value."""
    values = {e.name: e.value for e in image.type("enum zone_type").enumerators or ()}
    end = values.get("__MAX_NR_ZONES", 0)
    return {value: name for name, value in values.items() if 0 <= value < end}


def _nodes_in_state(image: Image, state: str) -> list[int]:
    """:param state: enumerator of ``enum node_states``"""
    return _set_bits(image, image.object("node_states")[image.object(state)].bits)


@per_image
def possible_cpus(image: Image) -> tuple[int, ...]:
    """
    Return the CPUs in ``cpu_possible_mask``.

    :raises ImageError: if they are not below ``nr_cpu_ids``, or that is above ``NR_CPUS``
    """
    try:
        number = int(image.object("nr_cpu_ids").value_())
    except UnknownKernelError:  # a macro, where NR_CPUS is 1
        return tuple(for_each_possible_cpu(image.prog))
    bits = cpu_possible_mask(image.prog)[0].bits
    found = _set_bits(image, bits)
    # setup_nr_cpu_ids(). On x86, disable_smp() may take CPUs out of the mask later.
    if not found or not found[-1] < number <= 8 * sizeof(bits):
        raise ImageError(f"nr_cpu_ids is {number}, and the possible CPUs are {found[-9:]}")
    return tuple(found)


def online_cpus(image: Image) -> tuple[int, ...]:
    """
    Return the CPUs that are online, or were until a panic stopped them.

    :raises ImageError: if there are none, or if one is not possible
    """
    found = set(_set_bits(image, cpu_online_mask(image.prog)[0].bits))
    if not found or not found <= set(possible_cpus(image)):
        cpus = sorted(found)[-9:]
        raise ImageError(f"__cpu_online_mask is damaged: CPUs {cpus} are online")
    # Without a crash kernel, a panic takes the CPUs that it stops from cpu_online_mask alone:
    # stop_this_cpu() of x86, local_cpu_stop() of arm64.
    with suppress(UnknownKernelError, FaultError):
        active = set(_set_bits(image, image.object("__cpu_active_mask").bits))
        found |= active & set(possible_cpus(image))
    return tuple(sorted(found))
