# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Obj_cgroups that BPF maps hold
------------------------------

Mirrors :linux:`kernel/bpf/syscall.c` and :linux:`kernel/bpf/memalloc.c`. A map holds one
reference to an obj_cgroup (``bpf_map_save_memcg()``), and each ``struct bpf_mem_alloc`` of a map
holds another one (``bpf_mem_alloc_init()``).
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object, cast, container_of
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import constant, has_member, has_type
from memcg_inspect.linux.lib.list import idr_entries
from memcg_inspect.linux.mm.mmzone import possible_cpus
from memcg_inspect.model import Coverage

__all__ = ("bpf_objcgs", "map_objcgs")

#: By structure: the members that are ``struct bpf_mem_alloc``, and the types of its maps.
_ALLOCATORS = {
    "struct bpf_htab": (
        ("ma", "pcpu_ma"),
        (
            "BPF_MAP_TYPE_HASH",
            "BPF_MAP_TYPE_PERCPU_HASH",
            "BPF_MAP_TYPE_LRU_HASH",
            "BPF_MAP_TYPE_LRU_PERCPU_HASH",
            "BPF_MAP_TYPE_HASH_OF_MAPS",
        ),
    ),
    "struct lpm_trie": (("ma",), ("BPF_MAP_TYPE_LPM_TRIE",)),
    "struct bpf_local_storage_map": (
        ("selem_ma", "storage_ma"),
        (
            "BPF_MAP_TYPE_SK_STORAGE",
            "BPF_MAP_TYPE_INODE_STORAGE",
            "BPF_MAP_TYPE_TASK_STORAGE",
            "BPF_MAP_TYPE_CGRP_STORAGE",
        ),
    ),
}


def bpf_objcgs(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the references to obj_cgroups that BPF maps hold.

    :param coverage: counts the maps that were read, and those that are unreadable
    :return: one ``struct obj_cgroup *`` for each reference
    """
    if not has_type(image, "struct bpf_map"):
        return

    def missed(error: FaultError) -> None:
        coverage.miss("BPF map", error.address, str(error))

    for bpf_map in idr_entries(image, "struct bpf_map", image.object("map_idr"), missed):
        try:
            yield from map_objcgs(image, bpf_map)
            coverage.read += 1
        except FaultError as error:
            missed(error)


def map_objcgs(image: Image, bpf_map: Object) -> Iterator[int]:
    """
    Iterate over the references to obj_cgroups that one map holds.

    :param bpf_map: ``struct bpf_map *``
    :return: one ``struct obj_cgroup *`` for each reference
    :raises drgn.FaultError: if the map cannot be read
    """
    if bpf_map.type_.type.has_member("objcg") and bpf_map.objcg:
        yield bpf_map.objcg.value_()
    structure = _structures(image).get(int(bpf_map.map_type))
    if structure is not None:
        name, members = structure
        whole = container_of(bpf_map, name, "map")
        for member in members:
            yield from _allocator(image, whole.member_(member))


@per_image
def _structures(image: Image) -> dict[int, tuple[str, list[str]]]:
    """Return the structure and the allocators of maps, by value of ``enum bpf_map_type``."""
    found = {}
    for name, (members, types) in _ALLOCATORS.items():
        present = [member for member in members if has_member(image, name, member)]
        for map_type in (constant(image, t) for t in types):
            if map_type is not None and present:
                found[map_type] = (name, present)
    return found


def _allocator(image: Image, ma: Object) -> Iterator[int]:
    # struct bpf_mem_alloc has either one size class (cache) or several (caches). Up to 6.5, the
    # obj_cgroup is in the caches of each CPU, the same in all of them.
    if not ma.cache and not ma.caches:
        return
    if ma.type_.has_member("objcg"):
        objcg = ma.objcg
    else:
        cpu = possible_cpus(image)[0]
        if ma.cache:
            cache = per_cpu_ptr(ma.cache, cpu)
        else:
            caches = per_cpu_ptr(ma.caches, cpu)
            cache = caches.cache[0].address_of_()
        objcg = cast("struct bpf_mem_cache *", cache).objcg
    if objcg:
        yield objcg.value_()
