# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memcgs and BPF maps that are being freed
----------------------------------------

A released memcg is in no list (``css_release_work_fn()``), and a BPF map without an id in no idr
(``bpf_map_free_id()``). Both can hold references to obj_cgroups until a worker frees them. They are
found in the slabs that can contain them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from drgn import FaultError, Object, cast, offsetof, sizeof
from drgn.helpers.linux.slab import slab_object_info

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.bpf import map_objcgs
from memcg_inspect.linux.mm.memcontrol import has_node_objcgs, nodeinfo
from memcg_inspect.linux.mm.mmzone import possible_nodes
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.model import Transient

__all__ = ("ReleasedReader",)


class ReleasedReader:
    """Finds memcgs and BPF maps that are being freed in slabs."""

    def __init__(self, image: Image, slabs: SlabReader, memcgs: Container[int]) -> None:
        self.image = image
        self.memory = image.memory
        self.slabs = slabs
        self.memcgs = memcgs
        memcg = image.type("struct mem_cgroup")
        self._memcg_size = sizeof(memcg) + len(possible_nodes(image)) * self.memory.word_size
        self._subsys = offsetof(memcg, "css.ss")
        self._memory_subsys = image.object("memory_cgrp_subsys").address_
        self._map_ops = _map_operations(image)
        self._maps = self._live_maps()

    def _live_maps(self) -> set[int]:
        from drgn.helpers.linux.bpf import bpf_map_for_each

        if not self._map_ops:
            return set()
        try:
            return {bpf_map.value_() for bpf_map in bpf_map_for_each(self.image.prog)}
        except FaultError:
            return set()

    def read(self, slab: Slab) -> Iterator[tuple[int, Transient]]:
        """
        Find objects of a slab that are being freed.

        :return: (``struct obj_cgroup *`` to which the object can hold a reference, the object)
        """
        name, size = slab.cache.name, slab.cache.object_size
        is_general = name.startswith("kmalloc-cg-")
        try:
            if name == "mem_cgroup" or (
                is_general and self._memcg_size <= size < 2 * self._memcg_size
            ):
                yield from self._released_memcgs(slab)
            if is_general and self._map_ops and slab.charged:
                yield from self._dying_maps(slab)
        except FaultError:
            return  # an object that could not be read cannot explain a difference

    def _released_memcgs(self, slab: Slab) -> Iterator[tuple[int, Transient]]:
        for address in self.slabs.objects(slab):
            if address in self.memcgs:
                continue
            if self.memory.word(address + self._subsys) != self._memory_subsys:
                continue
            if not self._is_allocated(address):
                continue
            memcg = Object(self.image.prog, "struct mem_cgroup *", address)
            for objcg in self._original_objcgs(memcg):
                yield objcg, Transient("memcg that was released", address)

    def _original_objcgs(self, memcg: Object) -> Iterator[int]:
        holders = (
            [pn for _, pn in nodeinfo(self.image, memcg)]
            if has_node_objcgs(self.image)
            else [memcg]
        )
        for holder in holders:
            if holder.type_.type.has_member("orig_objcg") and holder.orig_objcg:
                yield holder.orig_objcg.value_()

    def _is_allocated(self, address: int) -> bool:
        # A free object may still have the contents of the memcg that it was.
        try:
            info = slab_object_info(self.image.prog, address)
        except Exception:  # the freelist of a slab that a CPU is changing can be inconsistent
            return False
        return info is not None and info.allocated is True

    def _dying_maps(self, slab: Slab) -> Iterator[tuple[int, Transient]]:
        for obj in self.slabs.charged_objects(slab):
            if obj.address in self._maps:
                continue
            if self.memory.word(obj.address) in self._map_ops:
                bpf_map = cast("struct bpf_map *", Object(self.image.prog, "void *", obj.address))
                for objcg in map_objcgs(self.image, bpf_map):
                    yield objcg, Transient("BPF map that is being freed", obj.address)


def _map_operations(image: Image) -> frozenset[int]:
    """Return all ``struct bpf_map_ops *``. The first word of a BPF map is one of them."""
    if not has_type(image, "struct bpf_map"):
        return frozenset()
    try:
        return frozenset(ops.value_() for ops in image.object("bpf_map_types") if ops)
    except (UnknownKernelError, FaultError):
        return frozenset()
