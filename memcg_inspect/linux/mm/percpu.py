# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Per-CPU memory
--------------

Mirrors :linux:`mm/percpu.c`, :linux:`mm/percpu-internal.h` and :linux:`mm/percpu-vm.c`.

A chunk (``struct pcpu_chunk``) has one unit of memory for each possible CPU. An allocation is the
same range of all units. The bitmaps and the vector of obj_cgroups have one bit or element for each
``PCPU_MIN_ALLOC_SIZE`` bytes of a unit. The first element of an allocation holds its obj_cgroup.
The others are charged, too, but not used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import compress, count, groupby, pairwise
from operator import or_
from typing import NamedTuple

from drgn import FaultError, Object, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.image.memory import SMALLEST_PAGE, Memory, filled
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.lib.list import OnFault, list_entries
from memcg_inspect.linux.mm.memcontrol import accounting
from memcg_inspect.linux.mm.mm_types import MEMCG_DATA_FLAGS
from memcg_inspect.linux.mm.mmzone import mem_map, possible_cpus
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.linux.mm.percpu_vm import PcpuPages
from memcg_inspect.model import NUMA_NO_NODE, Coverage

__all__ = (
    "PcpuArea",
    "PcpuChunk",
    "PcpuPlace",
    "PercpuReader",
    "largest_percpu_charge",
    "largest_percpu_size",
    "percpu_charge",
)

#: ``PCPU_MIN_ALLOC_SIZE``, in bytes.
MIN_ALLOC_SIZE = 4
#: ``PCPU_MIN_UNIT_SIZE``, in bytes, before it is rounded up to pages. No allocation is larger:
#: ``pcpu_alloc_noprof()``.
MIN_UNIT_SIZE = 32 << 10


def largest_percpu_charge(image: Image) -> int:
    """Return the most bytes that are charged for one allocation."""
    size = largest_percpu_size(image)
    if accounting(image) != "kmem-per-node":
        return percpu_charge(image, size)
    # Kernels with per-node accounting charge for the struct, which is larger than the pointer if
    # it has a call site, too.
    more: int = sizeof(image.type("struct pcpuobj_ext")) - image.memory.word_size
    return percpu_charge(image, size) + size // MIN_ALLOC_SIZE * max(more, 0)


def largest_percpu_size(image: Image) -> int:
    """Return the bytes for each CPU of the largest possible allocation."""
    return max(MIN_UNIT_SIZE, mem_map(image).page_size)


def percpu_charge(image: Image, size: int) -> int:
    """
    Return the bytes charged for an allocation on a kernel that charges one obj_cgroup for it.

    :param size: bytes for each CPU
    """
    pointers = size // MIN_ALLOC_SIZE * image.memory.word_size
    return size * len(possible_cpus(image)) + pointers


def _unit_size(image: Image) -> int:
    """
    Return the bytes of a unit. No chunk is larger.

    :raises drgn.FaultError: if the variables that have it differ
    """
    size = image.object("pcpu_unit_size")
    pages = int(image.object("pcpu_unit_pages"))
    if pages <= 0 or pages << mem_map(image).page_shift != int(size):
        raise FaultError(f"a unit of {int(size)} bytes cannot be right", size.address_ or 0)
    return int(size)


def _slots(image: Image) -> int:
    """
    Return the number of lists of chunks.

    :raises drgn.FaultError: if it cannot be right: ``pcpu_setup_first_chunk()`` derives it from
        the slot for empty chunks
    """
    slots = image.object("pcpu_nr_slots")
    last = int(image.object("pcpu_to_depopulate_slot"))
    if int(slots) != last + 1 or not 0 < int(slots) <= 8 * image.memory.word_size:
        raise FaultError(f"{int(slots)} lists of percpu chunks", slots.address_ or 0)
    return int(slots)


class PcpuChunk(NamedTuple):
    """
    One ``struct pcpu_chunk``.

    :ivar address: ``struct pcpu_chunk *``
    :ivar base: ``base_addr``
    :ivar nr_pages: pages in each unit
    :ivar vector: address of the vector of obj_cgroups; 0 for the first and the reserved chunk,
        whose allocations are never charged
    :ivar alloc_map: ``alloc_map``, a bit for each ``PCPU_MIN_ALLOC_SIZE`` bytes of a unit
    :ivar bound_map: ``bound_map``, which has one bit more
    :ivar start: offset of the first allocation in each unit, in bytes
    :ivar end: offset after the last allocation in each unit, in bytes. The first chunk marks what
        is before ``start`` or after ``end`` as allocated; it belongs to static variables
    """

    address: int
    base: int
    nr_pages: int
    vector: int
    alloc_map: int
    bound_map: int
    start: int
    end: int


#: Maps the digits of a binary number to 0 and 1.
_DIGITS = bytes(digit == ord("1") for digit in range(256))


def set_bits(bits: int) -> list[int]:
    """Return the positions of the bits that are set in a bitmap, in ascending order."""
    digits = f"{bits:b}"[::-1].encode().translate(_DIGITS)
    return list(compress(range(len(digits)), digits))


class PcpuArea(NamedTuple):
    """
    One percpu allocation.

    :ivar chunk: its chunk
    :ivar offset: offset in each unit, in bytes
    :ivar size: bytes for one CPU
    :ivar objcg: ``struct obj_cgroup *``; 0 if no memcg pays
    :ivar element: address of the ``struct obj_cgroup *`` in the vector of the chunk
    :ivar codetag: ``struct codetag *`` of its call site; 0 for none
    """

    chunk: PcpuChunk
    offset: int
    size: int
    objcg: int
    element: int
    codetag: int = 0


class PcpuPlace(NamedTuple):
    """
    The location of an address in percpu memory.

    :ivar chunk: its chunk; ``None`` for static percpu variables
    :ivar offset: bytes from the start of each unit of the chunk, or of the static variables
    :ivar cpu: CPU whose copy the address is in; ``None`` if the address is a ``__percpu`` pointer
    :ivar pointer: ``__percpu`` pointer to the same location
    """

    chunk: PcpuChunk | None
    offset: int
    cpu: int | None
    pointer: int


class PercpuReader:
    """
    Reader of percpu chunks and of who pays for their allocations.

    :ivar coverage: counts the chunks that were read, and those that are unreadable
    :ivar pages: number of pages that back the units of all possible CPUs, by node, those of static
        variables included; complete after :meth:`chunks()`
    :ivar allocated: bytes of these pages that are allocated, by node
    :ivar placement: counts the pages whose node was found, and those whose node was not
    :ivar element: size of an element of the vector of a chunk, in bytes
    :ivar metadata: bytes charged for an element of the vector
    :ivar static_size: bytes of static and reserved percpu memory for one CPU; ``None`` before
        :meth:`chunks()`, or if unreadable
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self.memory: Memory = image.memory
        self.coverage = Coverage()
        self.pages: Counter[int] = Counter()
        self.allocated: Counter[int] = Counter()
        self.static_size: int | None = None
        # Named obj_cgroups, an array of pointers, until commit 24e44cc22aa3 ("mm: percpu:
        # enable per-cpu allocation tagging") (in v6.10).
        if has_member(image, "struct pcpu_chunk", "obj_exts"):
            ext = image.type("struct pcpuobj_ext")
            self._vector, self.element = "obj_exts", sizeof(ext)
            self._objcg = offsetof(ext, "cgroup")
            self._codetag = offsetof(ext, "tag") if ext.has_member("tag") else None
        else:
            self._vector, self.element, self._objcg = "obj_cgroups", self.memory.word_size, 0
            self._codetag = None
        # pcpu_obj_full_size() charges the size of a pointer for each element, even where elements
        # are larger. The per-node series charges the size of the element.
        per_node = accounting(image) == "kmem-per-node"
        self.metadata = self.element if per_node else self.memory.word_size
        self._unit_offsets = self._read_unit_offsets()
        self._places = PcpuPages(image)
        self.placement = self._places.coverage
        self._unit_pages: dict[tuple[int, int], Counter[int]] = {}
        #: Chunks the nodes of whose vectors were looked for.
        self._expected: set[int] = set()
        #: Most pages are on the same nodes as others: equal counters are one.
        self._counters: dict[tuple[tuple[int, int], ...], Counter[int]] = {}

    def _read_unit_offsets(self) -> list[int]:
        offsets = self.image.object("pcpu_unit_offsets").read_()
        return [int(offsets[cpu]) for cpu in possible_cpus(self.image)]

    def chunks(self, place: bool = True) -> Iterator[PcpuChunk]:
        """
        Iterate over all chunks. Those whose bitmaps are unreadable are counted and left out.

        :param place: whether to find the nodes of all pages, for :attr:`pages` and
            :attr:`allocated`
        """

        def missed(error: FaultError) -> None:
            self.coverage.miss("percpu chunk", error.address, str(error))

        try:
            if place:
                self._count_static()
        except FaultError as error:
            missed(error)
        for chunk in self._listed(missed):
            try:
                found = self._chunk(chunk)
                if place:
                    self._count(found, chunk)
            except FaultError as error:
                missed(error)
                continue
            if self.image.progress.stop:
                self.coverage.miss("percpu chunk", found.address, STOPPED)
                return
            yield found

    def _listed(self, on_fault: OnFault) -> Iterator[Object]:
        """Return all chunks, ``struct pcpu_chunk *``, each once."""
        try:
            slots = _slots(self.image)
            lists = self.image.object("pcpu_chunk_lists").read_()
        except FaultError as error:
            on_fault(error)
            return
        seen: set[int] = set()
        for slot in range(slots):
            head = lists[slot].address_of_()
            for chunk in list_entries(self.image, "struct pcpu_chunk", head, "list", on_fault):
                if chunk.value_() in seen:
                    on_fault(FaultError("the chunk is on two lists", chunk.value_()))
                    continue
                seen.add(chunk.value_())
                yield chunk

    def find(self, address: int) -> list[PcpuPlace]:
        """
        Find an address in percpu memory.

        Only the chunk that has the address is read.

        :param address: an address in the copy of a CPU, or a ``__percpu`` pointer
        :return: all locations that the number can mean; it may be both
        """

        def missed(error: FaultError) -> None:
            self.coverage.miss("percpu chunk", error.address, str(error))

        limit = 1 << 8 * self.memory.word_size
        places: list[PcpuPlace] = []
        cpus: list[int | None] = [*possible_cpus(self.image), None]
        shifts = [*self._unit_offsets, -self._to_base]
        for start, size, chunk in self._ranges(missed):
            for cpu, shift in zip(cpus, shifts, strict=True):
                offset = (address - shift - start) % limit
                if offset >= size:
                    continue
                try:
                    found = None if chunk is None else self._chunk(chunk)
                except FaultError as error:
                    missed(error)
                    continue
                pointer = (start + offset - self._to_base) % limit
                places.append(PcpuPlace(found, offset, cpu, pointer))
        return places

    def _ranges(self, on_fault: OnFault) -> Iterator[tuple[int, int, Object | None]]:
        """
        Return the areas of the first unit: that of static variables, and those of all chunks.

        :return: address, size in bytes, ``struct pcpu_chunk *`` (``None`` for static variables)
        """
        shift = mem_map(self.image).page_shift
        try:
            start = self.image.object("pcpu_base_addr").value_()
            yield start, self.image.object("pcpu_first_chunk").base_addr.value_() - start, None
        except FaultError as error:
            on_fault(error)
        for chunk in self._listed(on_fault):
            try:
                yield chunk.base_addr.value_(), int(chunk.nr_pages) << shift, chunk
            except FaultError as error:
                on_fault(error)

    @property
    def _to_base(self) -> int:
        # __pcpu_ptr_to_addr(): distance from a percpu pointer to the address in the first unit.
        cpu = possible_cpus(self.image)[0]
        return percpu_offsets(self.image)[cpu] - self._unit_offsets[0]

    def pointer(self, alloc: PcpuArea) -> int:
        """Return the ``__percpu`` pointer of an allocation."""
        address = alloc.chunk.base + alloc.offset - self._to_base
        return address % (1 << 8 * self.memory.word_size)

    def node(self, place: PcpuPlace) -> int:
        """
        Return the node of the page of a location.

        :return: ``NUMA_NO_NODE`` for a ``__percpu`` pointer, or if the page is not found
        """
        if place.cpu is None:
            return NUMA_NO_NODE
        return self._places.nid(place.pointer + percpu_offsets(self.image)[place.cpu])

    def alloc_at(self, chunk: PcpuChunk, offset: int) -> PcpuArea | None:
        """
        Return the allocation at an offset in the units of a chunk, charged or not.

        :param offset: any byte of the allocation
        :return: ``None`` if nothing is allocated there
        :raises drgn.FaultError: if its element of the vector cannot be read
        """
        before = chunk.bound_map & (2 << offset // MIN_ALLOC_SIZE) - 1
        unit = before.bit_length() - 1
        rest = chunk.bound_map >> unit + 1
        if unit < 0 or not rest or not chunk.alloc_map >> unit & 1:
            return None
        end = unit + (rest & -rest).bit_length()
        objcg = codetag = 0
        if chunk.vector:
            data = self.memory.read(chunk.vector + unit * self.element, self.element)
            objcg = self.memory.word_at(data, self._objcg)
            if self._codetag is not None:
                codetag = self.memory.word_at(data, self._codetag)
        return self._alloc(chunk, unit, end, objcg, codetag)

    def _chunk(self, chunk: Object) -> PcpuChunk:
        nr_pages = int(chunk.nr_pages)
        size = nr_pages << mem_map(self.image).page_shift
        start, end = int(chunk.start_offset), size - int(chunk.end_offset)
        if not 0 < size <= _unit_size(self.image) or not 0 <= start <= end <= size:
            reason = f"{nr_pages} pages with allocations from {start} to {end}"
            raise FaultError(reason, chunk.value_())
        bits = size // MIN_ALLOC_SIZE
        vector = 0
        if chunk.type_.type.has_member(self._vector):
            vector = int(chunk.member_(self._vector).value_())
        return PcpuChunk(
            address=chunk.value_(),
            base=chunk.base_addr.value_(),
            nr_pages=nr_pages,
            vector=vector,
            alloc_map=self._bitmap(chunk.alloc_map.value_(), bits),
            bound_map=self._bitmap(chunk.bound_map.value_(), bits + 1),
            start=start,
            end=end,
        )

    def _count_static(self) -> None:
        """Count the pages before the first chunk: static and reserved percpu memory."""
        size = mem_map(self.image).page_size
        pages = self._static_pages()
        for offset in self._unit_offsets:
            for nid in self._places.nids(pages.start + offset, len(pages)):
                self.pages[nid] += 1
                self.allocated[nid] += size

    def _static_pages(self) -> range:
        """
        Return the addresses of the pages before the first chunk, in the first unit.

        :raises drgn.FaultError: if they cannot be read
        """
        size = mem_map(self.image).page_size
        start = self.image.object("pcpu_base_addr").value_()
        first = self.image.object("pcpu_first_chunk")
        end = first.base_addr.value_()
        if not start <= end <= start + _unit_size(self.image):
            raise FaultError(f"the first chunk does not begin at {end:#x}", first.value_())
        self.static_size = end - start + int(first.start_offset)
        return range(start, end - size + 1, size)

    def static_pages(self) -> range:
        """
        Return the addresses of the pages of static percpu variables, in the first unit.

        If they cannot be read, they are counted as unreadable.
        """
        try:
            return self._static_pages()
        except FaultError as error:
            self.coverage.miss("static percpu variables", error.address, str(error))
            return range(0)

    def unit_offsets(self) -> list[int]:
        """Return the bytes from the first unit of a chunk to that of each possible CPU."""
        return list(self._unit_offsets)

    def populated(self, chunk: PcpuChunk) -> int:
        """
        Return the pages of each unit that have memory, a bit for each.

        If they cannot be read, they are counted as unreadable.
        """
        found = self.image.pointer("struct pcpu_chunk *", chunk.address)
        try:
            return self._bitmap(found.populated.address_ or 0, chunk.nr_pages)
        except FaultError as error:
            self.coverage.miss("percpu chunk", error.address, str(error))
            return 0

    def used(self, chunk: PcpuChunk, page: int) -> int:
        """
        Return the allocated bytes of a page of a unit.

        :param page: index of the page
        """
        units = (1 << mem_map(self.image).page_shift) // MIN_ALLOC_SIZE
        return (chunk.alloc_map >> page * units & (1 << units) - 1).bit_count() * MIN_ALLOC_SIZE

    def _count(self, found: PcpuChunk, chunk: Object) -> None:
        """Count the pages that back a chunk, and how much of them is allocated."""
        populated = self._bitmap(chunk.populated.address_ or 0, found.nr_pages)
        self._place(found, populated)
        for page in set_bits(populated):
            taken = self.used(found, page)
            for nid, cpus in self.page_nodes(found, page).items():
                self.pages[nid] += cpus
                self.allocated[nid] += taken * cpus

    def _place(self, chunk: PcpuChunk, populated: int) -> None:
        """Find the nodes of all pages of a chunk."""
        shift, pages = mem_map(self.image).page_shift, set_bits(populated)
        for _, group in groupby(enumerate(pages), lambda pair: pair[1] - pair[0]):
            run = [page for _, page in group]
            start = chunk.base + (run[0] << shift)
            rows = [self._places.nids(start + at, len(run)) for at in self._unit_offsets]
            for page, nids in zip(run, zip(*rows, strict=True), strict=True):
                nodes = Counter(nids)
                key = tuple(sorted(nodes.items()))
                self._unit_pages[chunk.address, page] = self._counters.setdefault(key, nodes)

    def _bitmap(self, address: int, bits: int) -> int:
        word = self.memory.word_size
        size = (bits + 8 * word - 1) // (8 * word) * word
        data = self.memory.read(address, size)
        if self.memory.order == "big":
            words = self.memory.words(data)
            data = b"".join(w.to_bytes(word, "little") for w in words)
        return int.from_bytes(data, "little") & (1 << bits) - 1

    def units(self, chunk: PcpuChunk) -> int:
        """Return the number of elements of the vector of a chunk."""
        return (chunk.nr_pages << mem_map(self.image).page_shift) // MIN_ALLOC_SIZE

    def charged(self, chunk: PcpuChunk) -> list[PcpuArea]:
        """
        Return the charged allocations of a chunk.

        Unreadable parts of the vector are counted in :attr:`coverage`.
        """
        return [alloc for alloc in self.recorded(chunk) if alloc.objcg]

    def recorded(self, chunk: PcpuChunk) -> list[PcpuArea]:
        """
        Return the allocations of a chunk that are charged, or that refer to their call site.

        Unreadable parts of the vector are counted in :attr:`coverage`.
        """
        return self._recorded(chunk, [])

    def allocations(self, chunk: PcpuChunk) -> Iterator[PcpuArea]:
        """
        Iterate over all allocations of a chunk, charged or not.

        Allocations whose part of the vector is unreadable are left out. Such parts are counted in
        :attr:`coverage`.
        """
        unreadable: list[range] = []
        recorded = {alloc.offset: alloc for alloc in self._recorded(chunk, unreadable)}
        bounds, taken = set_bits(chunk.bound_map), set(set_bits(chunk.alloc_map))
        hidden = {unit for units in unreadable for unit in units}
        for unit, end in pairwise(bounds):
            offset = unit * MIN_ALLOC_SIZE
            if unit in taken and chunk.start <= offset < chunk.end and unit not in hidden:
                yield recorded.get(offset) or self._alloc(chunk, unit, end, 0, 0)

    def _recorded(self, chunk: PcpuChunk, unreadable: list[range]) -> list[PcpuArea]:
        if not chunk.vector:
            return []
        found: list[PcpuArea] = []
        units, bounds = self.units(chunk), set_bits(chunk.bound_map)
        length = units * self.element
        for offset, data in self.memory.pieces(chunk.vector, length, self.element):
            first = offset // self.element
            if data is None:
                # Memory.pieces() returned a missing page of the vector, or the end of it.
                in_page = SMALLEST_PAGE // self.element
                unreadable.append(range(first, min(first + in_page, units)))
                continue
            for at, part in filled(data, self.element):
                for unit, objcg, codetag in self._elements(part):
                    unit += first + at // self.element
                    # The next bound ends the allocation.
                    after = bisect_right(bounds, unit)
                    if after == len(bounds):
                        reason = "bound_map has no end of the allocation"
                        self.coverage.miss("percpu allocation", chunk.address, reason)
                        continue
                    found.append(self._alloc(chunk, unit, bounds[after], objcg, codetag))
        if unreadable:
            self.coverage.miss("objcgs of a percpu chunk", chunk.vector, "not in the image")
        else:
            self.coverage.read += 1
        return found

    def _elements(self, data: bytes) -> Iterator[tuple[int, int, int]]:
        """Return index, objcg and codetag of the elements of a vector that are not 0."""
        words = self.memory.words(data, self._objcg, self.element)
        if self._codetag is None:
            yield from ((number, words[number], 0) for number in compress(count(), words))
            return
        tags = self.memory.words(data, self._codetag, self.element)
        for number in compress(count(), map(or_, words, tags)):
            yield number, words[number], tags[number]

    def _alloc(self, chunk: PcpuChunk, unit: int, end: int, objcg: int, codetag: int) -> PcpuArea:
        """
        Return one allocation.

        :param unit: its first element
        :param end: the element after its last
        """
        return PcpuArea(
            chunk=chunk,
            offset=unit * MIN_ALLOC_SIZE,
            size=(end - unit) * MIN_ALLOC_SIZE,
            objcg=objcg & ~MEMCG_DATA_FLAGS,
            element=chunk.vector + unit * self.element + self._objcg,
            codetag=codetag,
        )

    def charge(self, alloc: PcpuArea) -> int:
        """Return the bytes charged for an allocation, ``pcpu_obj_full_size()``."""
        cpus = len(self._unit_offsets)
        return alloc.size * cpus + alloc.size // MIN_ALLOC_SIZE * self.metadata

    def data_nodes(self, alloc: PcpuArea) -> Counter[int]:
        """Return the bytes of an allocation on all CPUs, by the node of the page they are on."""
        shift = mem_map(self.image).page_shift
        nodes: Counter[int] = Counter()
        start, end = alloc.offset, alloc.offset + alloc.size
        while start < end:
            page = start >> shift
            page_end = min(end, page + 1 << shift)
            for nid, cpus in self.page_nodes(alloc.chunk, page).items():
                nodes[nid] += (page_end - start) * cpus
            start = page_end
        return nodes

    def metadata_nodes(self, alloc: PcpuArea) -> Counter[int]:
        """
        Return the bytes charged for the elements of an allocation, by the node of their page.

        An allocation has an element for each ``PCPU_MIN_ALLOC_SIZE`` bytes.
        """
        nodes: Counter[int] = Counter()
        shift = mem_map(self.image).page_shift
        if alloc.chunk.address not in self._expected:
            self._expect_vector(alloc.chunk)
        start = alloc.chunk.vector + alloc.offset // MIN_ALLOC_SIZE * self.element
        end = start + alloc.size // MIN_ALLOC_SIZE * self.element
        while start < end:
            page_end = min(end, (start >> shift) + 1 << shift)
            nodes[self._places.nid(start)] += (page_end - start) // self.element * self.metadata
            start = page_end
        return nodes

    def _expect_vector(self, chunk: PcpuChunk) -> None:
        self._expected.add(chunk.address)
        shift = mem_map(self.image).page_shift
        first, end = chunk.vector >> shift, chunk.vector + self.units(chunk) * self.element
        self._places.expect(first << shift, (end - 1 >> shift) - first + 1)

    def page_nodes(self, chunk: PcpuChunk, page: int) -> Counter[int]:
        """
        Return the nodes of a page of a chunk in the units of all CPUs.

        :param page: index of the page in a unit
        :return: number of CPUs whose page is on a node, by node
        """
        key = (chunk.address, page)
        nodes = self._unit_pages.get(key)
        if nodes is None:
            address = chunk.base + (page << mem_map(self.image).page_shift)
            nodes = Counter(self._places.nid(address + offset) for offset in self._unit_offsets)
            self._unit_pages[key] = nodes
        return nodes
