# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Obj_cgroups that BPF maps hold
------------------------------

Mirrors :linux:`kernel/bpf/syscall.c` and :linux:`kernel/bpf/memalloc.c`. A map holds one
reference to an obj_cgroup (``bpf_map_save_memcg()``), and each ``struct bpf_mem_alloc`` of a map
holds another one (``bpf_mem_alloc_init()``).

The structure of a map is found by the BTF id in its operations (``bpf_map_ops.map_btf_id``). It
begins with the ``struct bpf_map``: ``check_ptr_to_map_access()`` relies on that. All its members
are searched for holders, so a new type of maps needs no entry here. Holders that such a map refers
to by pointers are not found, though.

The allocators of all programs, ``bpf_global_ma`` and ``bpf_cpumask_ma``, were made by the init task
and hold no reference that is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from drgn import FaultError, Object, Type, TypeKind, cast, sizeof
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.image.btf_id import struct_of_btf_id
from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import array_length, constant, has_member, has_type
from memcg_inspect.linux.lib.list import idr_entries
from memcg_inspect.linux.mm.mmzone import possible_cpus
from memcg_inspect.model import Coverage

__all__ = ("MapReferences", "map_objcgs", "read_map_references", "types_with_allocators")

#: The types of maps whose sources were read, up to 7.3, by their structure. A structure without
#: allocators is not named. Used instead of BTF ids where the kernel has no BTF.
_TYPES = {
    "bpf_htab": "HASH PERCPU_HASH LRU_HASH LRU_PERCPU_HASH HASH_OF_MAPS",
    "bpf_rhtab": "RHASH",
    "lpm_trie": "LPM_TRIE",
    "bpf_local_storage_map": "SK_STORAGE INODE_STORAGE TASK_STORAGE CGRP_STORAGE",
    "bpf_map": (
        "ARRAY PROG_ARRAY PERF_EVENT_ARRAY PERCPU_ARRAY STACK_TRACE CGROUP_ARRAY ARRAY_OF_MAPS "
        "DEVMAP SOCKMAP CPUMAP XSKMAP SOCKHASH CGROUP_STORAGE REUSEPORT_SOCKARRAY "
        "PERCPU_CGROUP_STORAGE QUEUE STACK DEVMAP_HASH STRUCT_OPS RINGBUF BLOOM_FILTER "
        "USER_RINGBUF ARENA INSN_ARRAY"
    ),
}


class MapReferences(NamedTuple):
    """
    References to obj_cgroups that BPF maps hold.

    :ivar held: number of references by ``struct obj_cgroup *``
    :ivar unknown: name of a type of maps that may hold more references to obj_cgroups of the same
        memcg, by ``struct obj_cgroup *``
    """

    held: Counter[int]
    unknown: dict[int, str]


def read_map_references(image: Image, coverage: Coverage) -> MapReferences:
    """
    Read all BPF maps.

    :param coverage: counts the maps that were read, and those that are unreadable
    """
    found = MapReferences(Counter(), {})
    if not has_type(image, "struct bpf_map"):
        return found

    def missed(error: FaultError) -> None:
        coverage.miss("BPF map", error.address, str(error))

    known = _known_types(image)
    for bpf_map in idr_entries(image, "struct bpf_map", image.object("map_idr"), missed):
        try:
            objcgs = list(map_objcgs(image, bpf_map))
            if int(bpf_map.map_type) not in known or _holders(image).of(bpf_map) is None:
                found.unknown.update(dict.fromkeys(objcgs, _type_name(image, bpf_map)))
            found.held.update(objcgs)
            coverage.read += 1
        except FaultError as error:
            missed(error)
    return found


def map_objcgs(image: Image, bpf_map: Object) -> Iterator[int]:
    """
    Iterate over the references to obj_cgroups that one map holds.

    :param bpf_map: ``struct bpf_map *``
    :return: one ``struct obj_cgroup *`` for each reference
    :raises drgn.FaultError: if the map cannot be read
    """
    holders = _holders(image).of(bpf_map)
    if holders is None:
        holders = _holders_in(image.type("struct bpf_map"))
    for offset in holders.objcgs:
        objcg = image.memory.word(bpf_map.value_() + offset)
        if objcg:
            yield objcg
    for offset in holders.allocators:
        address = bpf_map.value_() + offset
        yield from _allocator(image, Object(image.prog, "struct bpf_mem_alloc", address=address))


class _Holders(NamedTuple):
    """
    Members of a structure that can hold references, also in members that are structures.

    :ivar objcgs: offsets of members that are ``struct obj_cgroup *``
    :ivar allocators: offsets of members that are ``struct bpf_mem_alloc``
    """

    objcgs: tuple[int, ...]
    allocators: tuple[int, ...]


class _MapHolders:
    """Finds the holders in maps. Each ``struct bpf_map_ops`` is read once."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._by_ops: dict[int, _Holders | None] = {}

    def of(self, bpf_map: Object) -> _Holders | None:
        """
        Return the holders in a map; ``None`` if its structure is not known.

        :param bpf_map: ``struct bpf_map *``
        """
        ops = bpf_map.ops.value_()
        if not ops:  # map_create() has not set them yet
            return self._holders_of(_known_types(self._image).get(int(bpf_map.map_type)))
        if ops not in self._by_ops:
            self._by_ops[ops] = self._holders_of(self._structure(bpf_map))
        return self._by_ops[ops]

    def _holders_of(self, name: str | None) -> _Holders | None:
        """Return the holders in a structure."""
        if name is None or not has_type(self._image, f"struct {name}"):
            return None
        if name != "bpf_map" and not has_member(self._image, f"struct {name}", "map"):
            return None
        return _holders_in(self._image.type(f"struct {name}"))

    def _structure(self, bpf_map: Object) -> str | None:
        if has_member(self._image, "struct bpf_map_ops", "map_btf_id"):
            # resolve_btfids leaves it 0 without CONFIG_DEBUG_INFO_BTF.
            pointer = bpf_map.ops.map_btf_id.read_()
            number = int(pointer[0]) if pointer else 0
            name = struct_of_btf_id(self._image, number) if number > 0 else None
            if name is not None:
                return name
        return _known_types(self._image).get(int(bpf_map.map_type))


@per_image
def _holders(image: Image) -> _MapHolders:
    return _MapHolders(image)


@per_image
def _known_types(image: Image) -> dict[int, str]:
    """Return the name of the structure by value of ``enum bpf_map_type``."""
    found = {}
    for structure, names in _TYPES.items():
        for name in names.split():
            value = constant(image, f"BPF_MAP_TYPE_{name}")
            if value is not None:
                found[value] = structure
    return found


def types_with_allocators(image: Image) -> frozenset[int]:
    """Return the known values of ``enum bpf_map_type`` whose maps have allocators."""
    return frozenset(
        value for value, structure in _known_types(image).items() if structure != "bpf_map"
    )


def _type_name(image: Image, bpf_map: Object) -> str:
    value = int(bpf_map.map_type)
    for enumerator in image.type("enum bpf_map_type").enumerators or ():
        if enumerator.value == value:
            return str(enumerator.name)
    return f"type {value}"


def _holders_in(type_: Type) -> _Holders:
    found: dict[str, list[int]] = {"obj_cgroup": [], "bpf_mem_alloc": []}
    _search(type_, 0, found)
    return _Holders(tuple(found["obj_cgroup"]), tuple(found["bpf_mem_alloc"]))


def _search(type_: Type, offset: int, found: dict[str, list[int]]) -> None:
    """Add the offsets of the holders in a type, which begins at an offset."""
    type_ = type_.unaliased()
    if type_.kind == TypeKind.POINTER:
        target = type_.type.unaliased()
        if target.kind == TypeKind.STRUCT and target.tag == "obj_cgroup":
            found["obj_cgroup"].append(offset)
    elif type_.kind == TypeKind.ARRAY:
        element = type_.type.unaliased()
        if element.kind in (TypeKind.ARRAY, TypeKind.POINTER, TypeKind.STRUCT):
            for i in range(array_length(type_)):
                _search(element, offset + i * sizeof(element), found)
    elif type_.kind == TypeKind.STRUCT and type_.tag == "bpf_mem_alloc":
        found["bpf_mem_alloc"].append(offset)
    elif type_.kind == TypeKind.STRUCT:
        for member in type_.members or ():
            if member.bit_field_size is None:
                _search(member.type, offset + member.bit_offset // 8, found)


def _allocator(image: Image, ma: Object) -> Iterator[int]:
    # bpf_mem_alloc_init() sets the caches last.
    if ma.type_.has_member("objcg"):
        objcg = ma.objcg
    elif ma.cache or ma.caches:
        # Up to 6.7, the obj_cgroup is in the caches of each CPU, the same in all of them. There is
        # either one size class (cache) or several (caches).
        cpu = possible_cpus(image)[0]
        if ma.cache:
            cache = per_cpu_ptr(ma.cache, cpu)
        else:
            caches = per_cpu_ptr(ma.caches, cpu)
            cache = caches.cache[0].address_of_()
        objcg = cast("struct bpf_mem_cache *", cache).objcg
    else:
        return
    if objcg:
        yield objcg.value_()
