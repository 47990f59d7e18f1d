# SPDX-License-Identifier: LGPL-2.1-or-later
"""The use of slab objects, found by their cache or their address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.fs.inode import dentry_name
from memcg_inspect.linux.kernel.sched import read_task
from memcg_inspect.linux.lib.percpu_refcount import percpu_ref_count
from memcg_inspect.linux.mm.memcontrol import objcg_owners, on_default_hierarchy
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.linux.mm.zswap import ZswapEntry, ZswapReader
from memcg_inspect.linux.net.sock import SockReader
from memcg_inspect.tables import Value
from memcg_inspect.views.payers import Payers

__all__ = ("Layer", "ObjectUses")


class Layer(NamedTuple):
    """
    One layer that contains an address: a page, a memory area, a slab, an object, or its use.

    :ivar layer: kind of the layer
    :ivar what: description
    :ivar start: address of the layer
    :ivar offset: offset of the address in the layer, in bytes
    :ivar size: size of the layer, in bytes
    :ivar nid: node that backs it
    :ivar payer: ``struct obj_cgroup *`` or ``struct mem_cgroup *`` that pays for it, or that it
        belongs to; 0 if no memcg pays
    :ivar charged: bytes charged for it
    """

    layer: str
    what: Value
    start: int | None = None
    offset: int | None = None
    size: int | None = None
    nid: int | None = None
    payer: int | None = None
    charged: int | None = None


class ObjectUses:
    """Finds the uses of slab objects."""

    def __init__(self, image: Image, payers: Payers, slabs: SlabReader) -> None:
        self.image = image
        self.payers = payers
        self.slabs = slabs
        self.coverage = payers.coverage
        self._caches: dict[str, Callable[[int], Iterator[Layer]]] = {
            "task_struct": self._task,
            "dentry": self._dentry,
            "filp": self._file,
        }

    def of(self, slab: Slab, start: int, address: int) -> Iterator[Layer]:
        """
        Return the layers of an object; none if its use is not known.

        :param start: address of the object
        :param address: address in the object
        """
        found: Iterator[Layer]
        if start in self.payers.memcgs:
            found = self._memcg(start)
        elif start in self.payers.objcgs():
            found = self._objcg(start)
        elif slab.cache.address in self._socks.caches:
            found = self._sock(slab, start)
        elif slab.cache.name in self._caches:
            found = self._caches[slab.cache.name](start)
        elif self._is_zswap_entry(slab, start):
            found = self.zswap_entry(self.zswap.entry(start))
        else:
            return
        try:
            for layer in found:
                is_first = layer.start == start
                yield layer._replace(offset=address - start) if is_first else layer
        except FaultError as error:
            self.coverage["things"].miss("what an object is", error.address, str(error))

    def _memcg(self, address: int) -> Iterator[Layer]:
        memcg = self.payers.memcgs[address]
        refcnt = self.image.pointer("struct mem_cgroup *", address).css.refcnt.address_of_()
        # References to the root are not counted.
        refs = (
            "" if memcg.parent is None else f", {percpu_ref_count(self.image, refcnt)} references"
        )
        state = "removed" if memcg.state == "dying" else "in use"
        yield Layer("mem_cgroup", f"{memcg.path}, {state}{refs}", address, payer=address)

    @cached_property
    def original_memcg(self) -> dict[int, int]:
        """The memcg that each obj_cgroup was created for, as far as it is known, by address."""
        return objcg_owners(self.image, self.payers.memcgs, self.coverage["owners"])

    def _objcg(self, address: int) -> Iterator[Layer]:
        objcg = self.payers.objcgs()[address]
        refs = "unknown" if objcg.refs is None else str(objcg.refs)
        what = [
            f"{refs} references" if not objcg.is_root else "of the root: references are not counted"
        ]
        what.append(f"{objcg.nr_charged_bytes} bytes charged and not used")
        original = self.original_memcg.get(address)
        if original is None:
            what.append("left behind by a removed memcg that is not known")
        elif original != objcg.memcg:
            what.append(f"left behind by {self.payers.memcgs[original].path} at {original:#x}")
        yield Layer("obj_cgroup", ", ".join(what), address, payer=address)

    def _task(self, address: int) -> Iterator[Layer]:
        task = read_task(self.image, address)
        yield Layer("task", f"{task.pid} ({task.comm})", address, payer=task.memcg)
        for objcg in task.objcgs:
            if objcg:
                stale = "stale" if task.stale else "fresh"
                yield Layer("cached", f"obj_cgroup of the task, {stale}", objcg, payer=objcg)

    @cached_property
    def _socks(self) -> SockReader:
        reader = SockReader(self.image, self.slabs)
        self.coverage["sock"] = reader.coverage
        return reader

    def _sock(self, slab: Slab, start: int) -> Iterator[Layer]:
        # Reads all sockets of the slab.
        for sock in self._socks.read(slab, self.payers.memcgs):
            if sock.address == start:
                yield Layer("socket", sock.protocol, start, payer=sock.memcg, charged=sock.charged)

    @cached_property
    def zswap(self) -> ZswapReader:
        """The reader of zswap entries."""
        reader = ZswapReader(self.image)
        self.coverage["zswap"], self.coverage["zswap_nodes"] = reader.coverage, reader.placement
        return reader

    def _is_zswap_entry(self, slab: Slab, address: int) -> bool:
        # The slab cache may be merged with others of the same size, so read all zswap entries.
        return slab.cache.object_size == self.zswap.entry_size and any(
            entry == address for entry in self.zswap.addresses()
        )

    def zswap_entry(self, entry: ZswapEntry) -> Iterator[Layer]:
        """Return the layers of a zswap entry and its compressed data."""
        frames = mem_map(self.image)
        parts = self.zswap.parts(entry) or []
        # On cgroup v1 an entry has an obj_cgroup but is not charged.
        charged = entry.length if entry.objcg and on_default_hierarchy(self.image) else 0
        objcg = self.payers.objcg(entry.objcg) if entry.objcg else None
        yield Layer(
            "zswap entry",
            f"a page compressed to {entry.length} bytes",
            entry.address,
            nid=parts[0].nid if parts else None,
            payer=entry.objcg,
            charged=0 if objcg is not None and objcg.is_root else charged,
        )
        for part in parts:
            start = frames.virt(part.page) + part.offset
            what = f"page frame {frames.pfn(part.page):#x}"
            yield Layer("zswap data", what, start, size=part.length, nid=part.nid)

    def _dentry(self, address: int) -> Iterator[Layer]:
        dentry = self.image.pointer("struct dentry *", address)
        yield Layer("dentry", dentry_name(self.image, dentry), address)

    def _file(self, address: int) -> Iterator[Layer]:
        path = self.image.pointer("struct file *", address).f_path.read_()
        yield Layer("open file", dentry_name(self.image, path.dentry, path.mnt), address)
