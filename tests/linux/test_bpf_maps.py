# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Which obj_cgroups a BPF map holds, in maps made as kernel/bpf/ lays them out.

The tests of real maps are in tests/linux/test_bpf.py.
"""

from __future__ import annotations

from collections import Counter

import pytest
from drgn import FaultError
from support.layouts import MadeImage

from memcg_inspect.linux.kernel import bpf
from memcg_inspect.linux.kernel.bpf import (
    map_objcgs,
    read_map_references,
    types_with_allocators,
)
from memcg_inspect.model import Coverage

AT, MAPS, OPS = 0xFFFFFFFF82000000, 0xFFFF888000111000, 0xFFFFFFFF83000000
DATA, MISSING = 0xFFFF888030000000, 0xFFFF888077700000
#: obj_cgroups
ONE, TWO, THREE = 0xFFFF888000222000, 0xFFFF888000222100, 0xFFFF888000222200
TYPES = {
    "BPF_MAP_TYPE_UNSPEC": 0,
    "BPF_MAP_TYPE_HASH": 1,
    "BPF_MAP_TYPE_ARRAY": 2,
    "BPF_MAP_TYPE_LPM_TRIE": 11,
    "BPF_MAP_TYPE_SK_STORAGE": 24,
    "BPF_MAP_TYPE_NEWEST": 99,
}
#: Since 6.8, an allocator has the obj_cgroup. Up to 6.7, each CPU's cache has it.
NEW, OLD = (
    "struct bpf_mem_alloc { void *caches; void *cache; struct obj_cgroup *objcg; };",
    "struct bpf_mem_alloc { struct bpf_mem_caches *caches; struct bpf_mem_cache *cache; };",
)
MAP = """
    struct xarray { unsigned int lock; unsigned int flags; void *xa_head; };
    struct xa_node { void *head[5]; void *slots[64]; };
    struct idr { struct xarray idr_rt; unsigned int idr_base; };
    struct obj_cgroup { long refcnt; };
    struct bpf_mem_cache { long lists[3]; struct obj_cgroup *objcg; };
    struct bpf_mem_caches { struct bpf_mem_cache cache[11]; };
    struct bpf_map_ops { void *map_alloc; int *map_btf_id; };
    struct bpf_map { struct bpf_map_ops *ops; unsigned int map_type; struct obj_cgroup *objcg; };
    struct other { struct obj_cgroup *objcg; };
    struct lpm_trie { struct bpf_map map; void *root; };
"""
HTAB = """
    struct bpf_htab { struct bpf_map map; struct bpf_mem_alloc ma; struct other *far;
        int flags; int in_use : 3; struct bpf_mem_alloc pcpu_ma[2]; struct other near[2]; };
"""


def machine(allocator: str = NEW) -> MadeImage:
    image = MadeImage()
    image.declare(allocator + MAP + HTAB)
    image.enum("bpf_map_type", **TYPES)
    image.variable("map_idr", "struct idr", AT)
    image.make("struct idr", AT, {})
    image.variable("__per_cpu_offset", "unsigned long[2]", AT + 64)
    image.words(AT + 64, DATA, DATA + 0x100000)
    for kind in range(100):
        image.make("struct bpf_map_ops", OPS + 64 * kind, {})
    return image


def made(image: MadeImage, number: int, kind: int, objcg: int, has_ops: bool = True) -> int:
    """Make a map, and return its address. Maps of a type share their operations."""
    ops = OPS + 64 * kind if has_ops else 0
    at = MAPS + 0x1000 * number
    structure = {1: "struct bpf_htab", 11: "struct lpm_trie"}.get(kind, "struct bpf_map")
    image.make(structure, at, {})
    image.make("struct bpf_map", at, {"ops": ops, "map_type": kind, "objcg": objcg})
    return at


def held(image: MadeImage, at: int) -> list[int]:
    return list(map_objcgs(image, image.pointer("struct bpf_map *", at)))


def test_a_map_without_allocators() -> None:
    image = machine()
    assert held(image, made(image, 0, 2, ONE)) == [ONE]
    assert held(image, made(image, 0, 2, 0)) == []


@pytest.mark.parametrize("has_ops", [True, False])
def test_the_members_of_a_map_with_allocators(has_ops: bool) -> None:
    """Also those in arrays and structures, but not those behind pointers."""
    image = machine()
    at = made(image, 0, 1, ONE, has_ops)
    table = image.pointer("struct bpf_htab *", at)
    image.words(table.far.address_, ONE)
    image.words(table.ma.objcg.address_, ONE)
    image.words(table.pcpu_ma[1].objcg.address_, TWO)
    image.words(table.near[1].objcg.address_, THREE)
    assert Counter(held(image, at)) == {ONE: 2, TWO: 1, THREE: 1}
    image.words(table.near[0].objcg.address_, TWO)
    image.words(table.pcpu_ma[0].objcg.address_, THREE)
    assert Counter(held(image, at)) == {ONE: 2, TWO: 2, THREE: 2}


@pytest.mark.parametrize("member", ["cache", "caches"])
def test_allocators_up_to_6_7_have_the_obj_cgroup_in_percpu_caches(member: str) -> None:
    image = machine(OLD)
    at = made(image, 0, 1, ONE)
    table = image.pointer("struct bpf_htab *", at)
    image.words(table.ma.member_(member).address_, 0x10000)
    image.make("struct bpf_mem_caches", DATA + 0x10000, {})
    assert held(image, at) == [ONE]
    image.words(DATA + 0x10000 + 24, TWO)
    image.words(DATA + 0x10000 + 32 + 24, THREE)  # the next size class
    assert held(image, at) == [ONE, TWO]


def test_a_map_of_a_type_that_is_not_known() -> None:
    image = machine()
    assert held(image, made(image, 0, 99, ONE)) == [ONE]


def test_references_of_all_maps() -> None:
    image, coverage = machine(), Coverage()
    assert read_map_references(image, coverage).held == {}
    maps = [
        made(image, n, kind, objcg)
        for n, (kind, objcg) in enumerate(
            ((1, ONE), (2, ONE), (11, TWO), (99, THREE), (24, TWO), (77, ONE))
        )
    ]
    image.make("struct xa_node", AT + 0x1000, {})
    image.words(AT + 0x1000 + 40, *maps)
    image.words(AT + 8, AT + 0x1000 + 2)
    found = read_map_references(image, coverage)
    assert found.held == {ONE: 3, TWO: 2, THREE: 1}
    # The structure of socket storage is not declared.
    assert found.unknown == {
        THREE: "BPF_MAP_TYPE_NEWEST",
        TWO: "BPF_MAP_TYPE_SK_STORAGE",
        ONE: "type 77",
    }
    assert coverage == Coverage(read=6)


def test_maps_that_are_not_in_the_image() -> None:
    image, coverage = machine(), Coverage()
    image.make("struct xa_node", AT + 0x1000, {})
    image.words(AT + 0x1000 + 40, MISSING, made(image, 0, 2, ONE))
    image.words(AT + 8, AT + 0x1000 + 2)
    assert read_map_references(image, coverage).held == {ONE: 1}
    assert (coverage.read, coverage.unreadable) == (1, 1)
    assert coverage.examples[0].what == "BPF map"
    image.words(AT + 8, MISSING + 2)
    assert read_map_references(image, coverage).held == {}
    assert (coverage.read, coverage.unreadable) == (1, 2)
    with pytest.raises(FaultError):
        held(image, MISSING)


def test_a_kernel_without_bpf() -> None:
    found = read_map_references(MadeImage(), Coverage())
    assert (found.held, found.unknown) == ({}, {})


def test_types_of_maps_that_have_allocators() -> None:
    assert types_with_allocators(machine()) == {1, 11, 24}


#: Types of maps by structure: the first and the last ones of each, with numbers of this test.
OF_STRUCTURES = {
    "bpf_htab": {"HASH": 1, "HASH_OF_MAPS": 2},
    "bpf_rhtab": {"RHASH": 3},
    "lpm_trie": {"LPM_TRIE": 4},
    "bpf_local_storage_map": {"SK_STORAGE": 5, "CGRP_STORAGE": 6},
    "bpf_map": {"ARRAY": 7, "INSN_ARRAY": 8},
}


@pytest.mark.parametrize("structure", OF_STRUCTURES)
def test_structures_by_type_on_a_kernel_without_btf(structure: str) -> None:
    """Each structure but ``struct bpf_map`` has an allocator behind the map here."""
    image = MadeImage()
    image.declare(NEW + MAP.replace("struct lpm_trie { struct bpf_map map; void *root; };", ""))
    if structure != "bpf_map":
        image.declare(f"struct {structure} {{ struct bpf_map map; struct bpf_mem_alloc ma; }};")
    types = {f"BPF_MAP_TYPE_{n}": v for of in OF_STRUCTURES.values() for n, v in of.items()}
    image.enum("bpf_map_type", **types)
    image.variable("map_idr", "struct idr", AT)
    image.make("struct idr", AT, {})
    image.make("struct bpf_map_ops", OPS, {})
    others = [ONE] if structure == "bpf_map" else [ONE, TWO]
    for number, kind in enumerate(OF_STRUCTURES[structure].values()):
        for ops in (0, OPS + 64 * kind):
            at = MAPS + 0x1000 * number
            image.make("struct bpf_map_ops", OPS + 64 * kind, {})
            image.make("struct bpf_map", at, {"ops": ops, "map_type": kind, "objcg": ONE})
            image.words(at + 24, 0, 0, TWO)
            assert held(image, at) == others
    image.words(AT + 8, MAPS)
    found = read_map_references(image, Coverage())
    assert (found.held, found.unknown) == (Counter(others), {})
    assert types_with_allocators(image) == {1, 2, 3, 4, 5, 6}


def test_structures_by_btf_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """A type that is not known to this program is read, too. The number is 0 without BTF."""
    image, asked = machine(), list[int]()

    def struct_of(_: object, number: int) -> str | None:
        asked.append(number)
        return {5: "bpf_htab"}.get(number)

    monkeypatch.setattr(bpf, "struct_of_btf_id", struct_of)
    at = made(image, 0, 1, ONE)
    image.words(image.pointer("struct bpf_htab *", at).ma.objcg.address_, TWO)
    ids = AT + 0x2000
    for kind, number, held_by in ((99, 5, [ONE, TWO]), (98, 6, [ONE]), (97, 0, [ONE])):
        image.words(ids + 16 * kind, number)
        image.make("struct bpf_map_ops", OPS + 64 * kind, {"map_btf_id": ids + 16 * kind})
        image.make("struct bpf_map", at, {"ops": OPS + 64 * kind, "map_type": kind, "objcg": ONE})
        assert held(image, at) == held_by
    assert asked == [5, 6]
