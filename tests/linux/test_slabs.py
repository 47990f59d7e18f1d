# SPDX-License-Identifier: LGPL-2.1-or-later
"""Caches, slabs and objects as drgn reads them, and slabs that cannot be what they say."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from drgn import Object, Program, sizeof
from drgn.helpers.linux.slab import for_each_slab_cache, slab_object_info
from support.guests import KERNELS, Lab
from support.planting import Overlay, Write, change

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mm_types_slabs import SlabPage
from memcg_inspect.linux.mm.slab import Slab, SlabReader

pytestmark = pytest.mark.image


def slabs_of(image: Image, reader: SlabReader) -> Iterator[Slab]:
    """Return the slabs that are not KFENCE's."""
    pool = kfence_pages(image)
    for piece in scan_pages(image):
        for found in piece.slabs:
            slab = reader.slab(found)
            if slab is not None and slab.page not in pool:
                yield slab


def one_of_each_cache(image: Image, reader: SlabReader) -> list[Slab]:
    """Return a slab of each cache, one with charged objects if it has one."""
    found = dict[int, Slab]()
    for slab in slabs_of(image, reader):
        if slab.cache.address not in found or slab.charged:
            found[slab.cache.address] = slab
    return list(found.values())


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_caches_are_as_drgn_reads_them(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    reader, names = SlabReader(image_of(prog)), set()
    for cache in for_each_slab_cache(prog):
        found = reader.cache(cache.value_())
        assert found.address == cache.value_()
        assert found.name == cache.name.string_().decode()
        assert found.size == cache.size.value_()
        assert found.object_size == cache.object_size.value_()
        assert found.charge == cache.size.value_() + prog.type("void *").size
        if cache.prog_.type("struct kmem_cache").has_member("red_left_pad"):
            assert found.red_left_pad == cache.red_left_pad.value_()
        names.add(found.name)
        kind, _, _ = found.name.removeprefix("kmalloc-").partition("-")
        if found.name.startswith("kmalloc-") and (kind in ("cg", "rcl") or kind[0].isdigit()):
            assert (found.name, found.accounts) == (found.name, kind == "cg")
            assert (found.name, found.reclaimable) == (found.name, kind == "rcl")
    assert {"kmalloc-cg-64", "kmalloc-rcl-64", "dentry", "filp"} <= names
    assert reader.names.unreadable == 0


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_objects_are_where_drgn_finds_them(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    image = image_of(prog)
    reader = SlabReader(image)
    for slab in one_of_each_cache(image, reader):
        struct = Object(prog, "struct slab *", slab.page)
        assert (slab.objects, slab.inuse) == (struct.objects.value_(), struct.inuse.value_())
        assert slab.cache.address == struct.slab_cache.value_()
        places = list(reader.objects(slab))
        assert len(places) == slab.objects
        for number, place in enumerate(places):
            assert reader.address(slab, number) == place
            for at in (place, place + slab.cache.object_size - 1):
                assert reader.number(slab, at) == number
        # drgn walks the lists of free objects for each call.
        number = slab.objects - 1
        info = slab_object_info(prog, places[number] + slab.cache.object_size - 1)
        assert info is not None
        assert (info.address, info.slab.value_()) == (places[number], slab.page)
        assert reader.number(slab, places[0] - 1) is None
        assert reader.number(slab, places[-1] + slab.cache.size) is None


def objcgs(slab: Object) -> list[int]:
    """Return the obj_cgroups of the objects of a slab without call sites, read one by one."""
    prog, objects = slab.prog_, slab.objects.value_()
    has_exts = slab.type_.type.has_member("obj_exts")
    word = (slab.obj_exts if has_exts else slab.memcg_data).value_() & ~7
    if not word:
        return [0] * objects
    stride = sizeof(prog.type("struct slabobj_ext" if has_exts else "void *"))
    if slab.type_.type.has_member("stride"):
        stride = slab.stride.value_() or stride
    elif slab.type_.type.has_member("obj_exts_in_object") and slab.obj_exts_in_object:
        stride = slab.slab_cache.size.value_()
    return [
        Object(prog, "unsigned long", address=word + number * stride).value_() & ~7
        for number in range(objects)
    ]


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_payers_of_objects_are_what_a_plain_walk_reads(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    image = image_of(prog)
    reader, charged = SlabReader(image), 0
    for slab in one_of_each_cache(image, reader):
        wanted = objcgs(Object(prog, "struct slab *", slab.page))
        assert [reader.objcg(slab, number) for number in range(slab.objects)] == wanted
        assert slab.charged == Counter(filter(None, wanted))
        found = list(reader.charged_objects(slab))
        assert [(one.number, one.objcg) for one in found] == [
            (number, objcg) for number, objcg in enumerate(wanted) if objcg
        ]
        for one in found:
            assert one.slab is slab
            assert one.address == reader.address(slab, one.number)
            element = Object(prog, "unsigned long", address=one.element).value_()
            assert element & ~7 == one.objcg
        charged += len(found)
    assert charged > 100


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_slabs_that_look_alike_have_one_shape(lab: Lab, kernel: str) -> None:
    image = image_of(lab.image(kernel, "4", "mixed").program())
    reader, pool = SlabReader(image), kfence_pages(image)
    found = defaultdict[object, set[object]](set)
    for piece in scan_pages(image):
        for slab, (alike, exts) in zip(piece.slabs, reader.alike(piece.slabs), strict=True):
            if slab.page in pool:
                continue
            read, shape = reader.slab(slab), reader.shape(slab)
            assert read is not None
            assert (shape.cache, shape.objects, shape.inuse) == read[3:4] + read[4:6]
            if not exts:
                assert read.vector is None
            elif shape.elements is not None:
                assert read.vector == (exts + shape.elements.offset, shape.elements.stride)
            found[alike].add((slab.nid, slab.order, shape))
    assert len(found) > 100
    assert all(len(shapes) == 1 for shapes in found.values())


def why_unread(prog: Program, slab: Slab, *changes: Write) -> list[tuple[str, str]]:
    """Return what is not read of a slab when memory is changed, and why."""
    overlay, size = Overlay(prog), sizeof(prog.type("struct slab"))
    overlay.write(changes)
    try:
        reader = SlabReader(Image(prog))
        found = SlabPage(slab.page, slab.nid, slab.order, prog.read(slab.page, size))
        read = reader.slab(found)
        assert (read is None or read.charged is None) == (reader.coverage.read == 0)
        return [(m.what, m.reason.partition(":")[0]) for m in reader.coverage.examples]
    finally:
        overlay.clear()


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_slabs_that_cannot_be_are_not_read(lab: Lab, kernel: str) -> None:
    """A slab that is as full as can be is read; with one object more it is not."""
    prog = lab.image(kernel, "4", "mixed").own_program()
    reader = SlabReader(image_of(prog))
    slab = next(s for s in slabs_of(reader.image, reader) if s.cache.name == "kmalloc-4k")
    room = reader.frames.page_size << slab.order
    assert slab.objects * slab.cache.size == room
    assert why_unread(prog, slab) == []
    more = slab.objects + 1
    objects = change(Object(prog, "struct slab *", slab.page)[0].objects, more)
    why = f"{more} objects of 4096 bytes in a slab of {room} bytes"
    assert why_unread(prog, slab, objects) == [("kmem_cache of a slab", why)]
    # Objects are aligned to a pointer, so they are not smaller.
    cache, word = (
        Object(prog, "struct kmem_cache *", slab.cache.address)[0],
        reader.memory.word_size,
    )
    assert why_unread(prog, slab, change(cache.size, word)) == []
    why = f"a kmem_cache of objects of {word - 1} bytes"
    size = change(cache.size, word - 1)
    assert why_unread(prog, slab, size) == [("kmem_cache of a slab", why)]


@pytest.mark.parametrize("kernel", ["7.2"])
def test_elements_are_as_far_apart_as_can_be(lab: Lab, kernel: str) -> None:
    """From 7.0 to 7.2, ``slab->stride`` is the size of an element or of an object, or 0."""
    prog = lab.image(kernel, "4", "mixed").own_program()
    reader = SlabReader(image_of(prog))
    slab = next(s for s in slabs_of(reader.image, reader) if s.charged and s.cache.size > 64)
    for stride in (0, sizeof(prog.type("struct slabobj_ext"))):
        right = change(Object(prog, "struct slab *", slab.page)[0].stride, stride)
        assert why_unread(prog, slab, right) == []
    wrong = change(Object(prog, "struct slab *", slab.page)[0].stride, 24)
    why = "a vector with an element in 24 bytes"
    assert why_unread(prog, slab, wrong) == [(f"objcgs of a {slab.cache.name} slab", why)]
