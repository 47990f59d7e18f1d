# SPDX-License-Identifier: LGPL-2.1-or-later
"""
BPF maps without an ID, in the slabs that they are in.

``bpf_map_free_id()`` takes a map out of ``map_idr`` and clears its ID. A map of the image is
changed to what it is then; ``tests/collect/test_unlisted_maps.py`` tells what frees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from drgn import Object, Program, sizeof
from drgn.helpers.linux.bpf import bpf_map_for_each
from support.guests import Lab
from support.missing_pages import excluded, opened
from support.planting import Overlay, Write

from memcg_inspect.collect.unlisted_maps import UNLISTED_MAP, UnlistedMaps
from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.bpf import map_objcgs
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabReader

pytestmark = pytest.mark.image


class Victim(NamedTuple):
    """A map that holds references to obj_cgroups, and the slab that it is in."""

    prog: Program
    bpf_map: Object
    slab: Slab
    holds: Counter[int]
    overlay: Overlay

    def put(self, thing: Object, value: int) -> None:
        data = value.to_bytes(sizeof(thing), "little")
        self.overlay.write((Write(thing.address_ or 0, data),))

    def unlist(self) -> None:
        """Make ``map_idr`` point to no map in place of this one."""
        prog, address = self.prog, self.bpf_map.value_()
        root = prog["map_idr"].idr_rt.xa_head.value_()
        slots = [prog["map_idr"].idr_rt.xa_head]
        if root & 3 == 2:
            slots = list(leaves(Object(prog, "struct xa_node *", root & ~3)))
        (slot,) = [slot for slot in slots if slot.value_() == address]
        self.overlay.write((Write(slot.address_ or 0, bytes(8)),))

    def found(self) -> list[tuple[int, str, int, int]]:
        reader = self.reader()
        found = list(reader.read(self.slab))
        assert reader.coverage.unreadable == 0
        return [(objcg, t.what, t.address, t.references) for objcg, t in found]

    def reader(self) -> UnlistedMaps:
        image = Image(self.prog)
        return UnlistedMaps(image, SlabReader(image))

    def expected(self) -> list[tuple[int, str, int, int]]:
        address = self.bpf_map.value_()
        return [(objcg, UNLISTED_MAP, address, number) for objcg, number in self.holds.items()]


def leaves(node: Object) -> Iterator[Object]:
    """Return the slots of a tree that point to no other node."""
    for slot in (node.slots[number] for number in range(64)):
        if slot.value_() & 3 == 2 and node.shift:
            yield from leaves(Object(node.prog_, "struct xa_node *", slot.value_() & ~3))
        else:
            yield slot


@pytest.fixture
def victim(lab: Lab) -> Iterator[Victim]:
    prog = lab.image("7.3", "2", "bpfmaps").program()
    image = Image(prog)
    slabs = SlabReader(image)
    # These have allocators, which hold references. Those without would be found by their operations
    # only.
    hashes = (m for m in bpf_map_for_each(prog) if m.map_type == prog["BPF_MAP_TYPE_HASH"])
    holders = {m.value_(): m for m in hashes if Counter(map_objcgs(image, m))}
    bpf_map, slab = next(
        (holders[obj.address], slab)
        for piece in scan_pages(image)
        for slab in filter(None, map(slabs.slab, piece.slabs))
        if slab.cache.name.startswith("kmalloc-cg-")
        for obj in slabs.charged_objects(slab)
        if obj.address in holders
    )
    overlay = Overlay(prog)
    yield Victim(prog, bpf_map, slab, Counter(map_objcgs(image, bpf_map)), overlay)
    overlay.clear()


def test_a_map_with_an_id_is_listed(victim: Victim) -> None:
    assert victim.found() == []
    assert victim.reader().fault is None


def test_a_map_that_is_in_no_list_but_has_an_id_is_not_freed(victim: Victim) -> None:
    victim.unlist()
    assert victim.bpf_map.id.value_() > 0
    assert victim.found() == []


def test_a_map_without_an_id_or_references_is_found(victim: Victim) -> None:
    victim.unlist()
    before = victim.bpf_map.id.value_()
    victim.put(victim.bpf_map.id, 0)
    assert sorted(victim.found()) == sorted(victim.expected())
    victim.put(victim.bpf_map.id, before)
    victim.put(victim.bpf_map.refcnt.counter, 0)
    assert sorted(victim.found()) == sorted(victim.expected())


def test_a_map_that_is_being_made_has_no_operations_yet(victim: Victim) -> None:
    """map_create() sets them after the type. Any data may look like such a map."""
    victim.unlist()
    victim.put(victim.bpf_map.id, 0)
    victim.put(victim.bpf_map.ops, 0)
    assert sorted(victim.found()) == sorted(victim.expected())
    victim.put(victim.bpf_map.map_type, 2)  # BPF_MAP_TYPE_ARRAY has no allocators
    assert victim.found() == []


def test_other_operations_are_no_map(victim: Victim) -> None:
    victim.unlist()
    victim.put(victim.bpf_map.id, 0)
    victim.put(victim.bpf_map.ops, victim.bpf_map.ops.value_() + 8)
    assert victim.found() == []


def test_caches_that_may_have_maps(victim: Victim) -> None:
    """bpf_map_area_alloc() charges what it allocates, and a map has a struct bpf_map at least."""
    reader, cache = victim.reader(), victim.slab.cache
    size = sizeof(victim.prog.type("struct bpf_map"))
    assert may_read(reader, cache, "kmalloc-cg-512", 2 * size)
    assert may_read(reader, cache, "kmalloc-cg-512", size)
    assert not may_read(reader, cache, "kmalloc-cg-512", size - 1)
    assert not may_read(reader, cache, "kmalloc-512", 2 * size)
    assert list(reader.read(victim.slab._replace(charged={}))) == []
    assert list(reader.read(victim.slab._replace(charged=None))) == []


def may_read(reader: UnlistedMaps, cache: SlabCache, name: str, size: int) -> bool:
    return reader.may_read(cache._replace(name=name, object_size=size))


def test_an_object_that_is_not_in_the_image_is_missed(lab: Lab, victim: Victim) -> None:
    """It may be a map. What the slab says of its objects is elsewhere, and is read."""
    prog, address = opened(lab.image("7.3", "2", "bpfmaps").core), victim.bpf_map.value_()
    prog.add_memory_segment(address, sizeof(victim.bpf_map.type_.type), excluded, False)
    image = Image(prog)
    reader = UnlistedMaps(image, SlabReader(image))
    assert list(reader.read(victim.slab)) == []
    assert reader.coverage.unreadable == 1
    (missed,) = reader.coverage.examples
    assert (missed.what, missed.address) == ("possible BPF map", address)
