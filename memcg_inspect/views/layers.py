# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The layers of an address
------------------------

The layers begin with the page or the vmalloc area that contains the address, and continue with the
object in it and the use of that object. Most are found by following pointers from the address. If
an object does not point to its owner, all possible owners are read. Comments say where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from drgn import FaultError

from memcg_inspect.collect.site import SiteFinder
from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.linux.fs.inode import mapping_name
from memcg_inspect.linux.kernel.sched import read_task, task_of_stack
from memcg_inspect.linux.mm.debug import PageInfo, page_at, page_behind, read_page
from memcg_inspect.linux.mm.kfence import kfence_object, kfence_pages
from memcg_inspect.linux.mm.memcg_data import count_payers
from memcg_inspect.linux.mm.memcontrol import accounting
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PcpuArea, PcpuPlace, PercpuReader
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.linux.mm.slub import FreeObjects
from memcg_inspect.linux.mm.vmalloc import find_mapping, thread_size
from memcg_inspect.model import CallSite
from memcg_inspect.tables import NotRead, Value
from memcg_inspect.views.object_uses import Layer, ObjectUses
from memcg_inspect.views.payers import Payers

__all__ = ("AddressLayers",)

#: Names of page types in the output, where they differ from the kernel's.
_TYPES = {
    "buddy": "free",
    "table": "page table",
    "large_kmalloc": "large kmalloc",
    "zsmalloc": "compressed pages (zsmalloc)",
}


class AddressLayers:
    """Finds the layers of addresses."""

    def __init__(self, image: Image, payers: Payers) -> None:
        self.image = image
        self.payers = payers
        self.coverage = payers.coverage
        self.frames = mem_map(image)
        self.slabs = SlabReader(image)
        self.free = FreeObjects(image, self.slabs)
        self.sites = SiteFinder(image)
        self.coverage["slab"], self.coverage["sites"] = self.slabs.coverage, self.sites.coverage
        self.uses = ObjectUses(image, payers, self.slabs)

    def of(self, address: int) -> list[Layer]:
        """Return the layers of an address, the outermost first; empty if the address is unknown."""
        finders: tuple[Callable[[int], Iterable[Layer]], ...] = (
            self._symbol,
            self._struct_page,
            self._mapping,
            self._direct_map,
            self._percpu,
        )
        layers: list[Layer] = []
        for find in finders:
            try:
                # One at a time, to keep the layers found before a fault.
                for layer in find(address):
                    layers.append(layer)
            except FaultError as error:
                self.coverage["layers"].miss("layer of an address", error.address, str(error))
        self.coverage["layers"].read += len(layers)
        return layers

    def _symbol(self, address: int) -> Iterator[Layer]:
        try:
            symbol = self.image.symbol(address)
        except UnknownKernelError:
            return
        yield Layer("symbol", symbol.name, symbol.address, address - symbol.address, symbol.size)

    def _struct_page(self, address: int) -> Iterator[Layer]:
        page = page_at(self.image, address)
        if page is not None:
            pfn = self.frames.pfn(page)
            what = f"of page frame {pfn:#x}"
            yield Layer("struct page", what, page, address - page, self.frames.size)
            yield from self._page(read_page(self.image, page), None)

    def _direct_map(self, address: int) -> Iterator[Layer]:
        page = page_behind(self.image, address)
        if page is not None:
            at = untagged(self.image, address)
            yield from self._page(read_page(self.image, page), at)

    def _page(self, info: PageInfo, address: int | None) -> Iterator[Layer]:
        """
        Return the layers of a page.

        :param address: address in the direct map; ``None`` for the whole page
        """
        start, size = self.frames.virt(info.head), self.frames.page_size << info.order
        at = self.frames.virt(info.page) if address is None else address
        yield Layer(
            "page",
            f"{_use(info)}; page frame {info.pfn:#x}",
            start,
            at - start,
            size,
            info.nid,
            *((None, None) if info.slab else (info.payer, self._charge(info.payer, size))),
        )
        if info.slab is not None:
            yield from self._slab(info, address)
        elif info.payer and not info.is_kmem:
            yield self._file(info)
        elif address is not None and self._may_be_zsmalloc(info):
            yield from self._zswap(info, address)
        # Slabs, large kmallocs and page tables of 7.x are in use, but have a refcount of 0.
        is_used = info.type or info.payer or info.refs > 0
        if is_used and info.slab is None and info.type != "buddy":
            yield from self._code(self.sites.of_page(info.head))
        if address is not None and not info.type and not info.order:
            yield from self._stack_block(address)

    def _charge(self, payer: int, size: int) -> int:
        """Return the bytes charged to a payer for *size* bytes; 0 for the root memcg."""
        if not payer:
            return 0
        objcg = self.payers.objcg(payer) if payer not in self.payers.memcgs else None
        memcg = self.payers.memcgs.get(payer)
        is_root = objcg.is_root if objcg else memcg is not None and memcg.parent is None
        return 0 if is_root else size

    def _file(self, info: PageInfo) -> Layer:
        offset = info.pgoff * self.frames.page_size
        try:
            name: Value = mapping_name(self.image, info.mapping, info.swap_cache)
        except FaultError as error:
            self.coverage["files"].miss("file of a user page", error.address, str(error))
            name = NotRead("the file could not be read")
        is_file = bool(info.mapping) and not info.mapping & 3
        return Layer("file", name, offset=offset if is_file else None)

    def _code(self, site: CallSite | None) -> Iterator[Layer]:
        if site is not None:
            yield Layer("allocated at", site.place, site.address)

    def _slab(self, info: PageInfo, address: int | None) -> Iterator[Layer]:
        assert info.slab is not None
        slab = self.slabs.slab(info.slab)
        if slab is None:
            return  # counted
        start = self.frames.virt(slab.page)
        is_kfence = slab.page in kfence_pages(self.image)
        yield Layer(
            "slab",
            f"{slab.cache.name}: " + ("kfence" if is_kfence else self._taken(slab)),
            start,
            None if address is None else address - start,
            self.frames.page_size << slab.order,
            slab.nid,
        )
        if address is None:
            return
        if is_kfence:
            yield from self._kfence(slab, address)
            return
        number = self.slabs.number(slab, address)
        if number is None:
            yield Layer("object", "none: the address is between the objects of the slab")
            return
        objcg = self.slabs.objcg(slab, number)
        is_free = self._is_free(slab, number)
        state = {None: "state not known", True: "free", False: "allocated"}[is_free]
        if is_free and objcg:
            state = "freed, and charged until the end of an RCU grace period"
        yield from self._object(slab, number, address, objcg, state)
        if is_free is not True:
            yield from self.uses.of(slab, self.slabs.address(slab, number), address)

    def _taken(self, slab: Slab) -> str:
        """Describe how many objects of a slab are not on its list of free objects."""
        taken = f"{slab.inuse} of {slab.objects} objects taken"
        try:
            kept = self.free.kept(slab)
        except FaultError as error:  # the free lists may be corrupt
            self.coverage["states"].miss("free slab objects", error.address, str(error))
            return taken
        return f"{taken}, {kept} of them free and kept by CPUs" if kept else taken

    def _object(
        self, slab: Slab, number: int, address: int, objcg: int, state: str
    ) -> Iterator[Layer]:
        start = self.slabs.address(slab, number)
        yield Layer(
            "object",
            f"{slab.cache.name} [{number}], {state}",
            start,
            address - start,
            slab.cache.size,
            slab.nid,
            objcg,
            self._charge(objcg, slab.cache.charge),
        )
        yield from self._code(self.sites.of_slab_object(slab, number))

    def _is_free(self, slab: Slab, number: int) -> bool | None:
        """Return whether an object is free or in a CPU's cache; ``None`` if that is not known."""
        try:
            return self.free.is_free(slab, number)
        except FaultError as error:  # the free lists may be corrupt
            self.coverage["states"].miss("state of a slab object", error.address, str(error))
            return None

    def _kfence(self, slab: Slab, address: int) -> Iterator[Layer]:
        obj = kfence_object(self.image, slab.page)
        if obj is None:
            return
        objcg, offset = self.slabs.objcg(slab, 0), address - obj.address
        # The page around an object is filled with a pattern, to find writes outside of it.
        is_outside = bool(obj.size) and not 0 <= offset < obj.size
        yield Layer(
            "object",
            f"{slab.cache.name}, {obj.state}, in the pool of kfence"
            + ("; the address is outside of it" if is_outside else ""),
            obj.address,
            offset,
            obj.size,
            slab.nid,
            objcg,
            self._charge(objcg, slab.cache.charge),
        )
        if obj.state == "allocated" and not is_outside:
            yield from self.uses.of(slab, obj.address, address)

    def _may_be_zsmalloc(self, info: PageInfo) -> bool:
        # Pages of zsmalloc have a page type since 6.12. Before, only zswap entries point to them.
        has_type = info.type == "zsmalloc"
        return has_type or (not info.type and not info.payer and bool(info.mapping & 2))

    def _zswap(self, info: PageInfo, address: int) -> Iterator[Layer]:
        # Reads all zswap entries: compressed data does not point to its entry.
        entry = self.uses.zswap.owner(info.page, address % self.frames.page_size)
        if entry is not None:
            yield from self.uses.zswap_entry(entry)

    def _mapping(self, address: int) -> Iterator[Layer]:
        mapping = find_mapping(self.image, address)
        if mapping is None:
            return
        yield Layer(
            "vmalloc area",
            f"{', '.join(mapping.uses) or 'unknown use'}, by {self._code_at(mapping.caller)}",
            mapping.start,
            address - mapping.start,
            mapping.end - mapping.start,
        )
        if not mapping.pages:
            return
        for (payer, nid), count in count_payers(
            self.image, mapping.pages, self.coverage["pages"]
        ).items():
            size = count * self.frames.page_size
            what = f"{count} {'page' if count == 1 else 'pages'}"
            charged = self._charge(payer, size)
            yield Layer("pages", what, size=size, nid=nid, payer=payer, charged=charged)
        yield from self._stack(mapping.start, address)
        number = (address - mapping.start) // self.frames.page_size
        if number >= len(mapping.pages):
            yield Layer("guard page", "nothing is mapped here")
            return
        page = mapping.pages[number]
        inside = self.frames.virt(page) + address % self.frames.page_size
        yield from self._page(read_page(self.image, page), inside)

    def _code_at(self, address: int) -> str:
        try:
            symbol = self.image.symbol(address)
        except UnknownKernelError:
            return f"{address:#x}"
        return f"{symbol.name}+{address - symbol.address:#x}"

    def _stack(self, start: int, address: int) -> Iterator[Layer]:
        # Reads all tasks: a stack does not point to its task.
        found = task_of_stack(self.image, start, self.coverage["tasks"])
        if found is not None:
            task = read_task(self.image, found)
            what = f"of task {task.pid} ({task.comm})"
            size = thread_size(self.image)
            yield Layer("kernel stack", what, start, address - start, size)

    def _stack_block(self, address: int) -> Iterator[Layer]:
        """Return the layer of a stack that is a block of pages; its first page is charged."""
        if has_member(self.image, "struct task_struct", "stack_vm_area"):
            return
        size = thread_size(self.image)
        start = address - address % size
        for layer in self._stack(start, address):
            first = read_page(self.image, self.frames.virt_to_page(start))
            charged = self._charge(first.payer, size)
            yield layer._replace(nid=first.nid, payer=first.payer, charged=charged)

    @cached_property
    def _percpu_reader(self) -> PercpuReader:
        reader = PercpuReader(self.image)
        self.coverage["percpu"], self.coverage["percpu_nodes"] = reader.coverage, reader.placement
        return reader

    def _percpu(self, address: int) -> Iterator[Layer]:
        reader = self._percpu_reader
        for place in reader.find(address):
            copy = "__percpu pointer" if place.cpu is None else f"copy of CPU {place.cpu}"
            nid = None if place.cpu is None else reader.node(place)
            alloc = None
            if place.chunk is not None:
                alloc = reader.alloc_at(place.chunk, place.offset)
            if alloc is not None:
                yield from self._percpu_alloc(place, alloc, copy, nid, address)
            elif place.chunk is not None:
                yield Layer("percpu", f"{copy}: not allocated", nid=nid)
            else:
                what = f"{copy}: static variable {self._code_at(place.pointer)}"
                yield Layer("percpu", what, nid=nid)

    def _percpu_alloc(
        self, place: PcpuPlace, alloc: PcpuArea, copy: str, nid: int | None, address: int
    ) -> Iterator[Layer]:
        reader, into = self._percpu_reader, place.offset - alloc.offset
        pointer = reader.pointer(alloc)
        is_by_node = accounting(self.image) == "kmem-per-node" and alloc.objcg
        charge = None if is_by_node else self._charge(alloc.objcg, reader.charge(alloc))
        yield Layer(
            "percpu",
            copy if place.cpu is None else f"{copy} of __percpu pointer {pointer:#x}",
            address - into,
            into,
            alloc.size,
            nid,
            alloc.objcg,
            charge,
        )
        data, metadata = reader.data_nodes(alloc), reader.metadata_nodes(alloc)
        for node in sorted(data):
            layer = Layer("copies", "of all CPUs", size=data[node], nid=node)
            if is_by_node:
                payer = self._sibling(alloc.objcg, node)
                charged = self._charge(payer, data[node] + metadata[node])
                layer = layer._replace(payer=payer, charged=charged)
            yield layer
        yield from self._code(self.sites.of_percpu(alloc))

    def _sibling(self, address: int, nid: int) -> int:
        """Return the obj_cgroup of a node, which is charged for the part on that node."""
        objcg = self.payers.objcg(address)
        siblings = () if objcg is None else objcg.siblings
        return siblings[nid] if 0 <= nid < len(siblings) else address


def _use(info: PageInfo) -> str:
    if info.type:
        return _TYPES.get(info.type, info.type)
    if info.reserved:
        return "reserved"
    if info.is_kmem:
        return "kernel memory"
    if info.payer:
        return "user page"
    return "kernel memory" if info.refs > 0 else "free, or part of a larger block"
