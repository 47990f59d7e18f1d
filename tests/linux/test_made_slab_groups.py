# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Slabs of one cache and node, in a memory map made by hand, with vectors in places that few have.

``tests/linux/test_slab_groups.py`` compares the sums with those of each slab in images.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from drgn import offsetof
from support.layouts import FRAMES, NODE_1, MadeImage
from support.made_pages import NO_TYPE, TYPES, kernel_with_pages, put, put_compound

from memcg_inspect.linux.mm import slab_groups
from memcg_inspect.linux.mm.mm_types import scan_range
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.slab import SlabCache, SlabReader
from memcg_inspect.linux.mm.slab_groups import SlabGroup, SlabGroupReader

DENTRY, FILP, NAME = 0xFFFF888000300000, 0xFFFF888000300100, 0xFFFF888000310000
VECTORS, MISSING = 0xFFFF888000400000, 0xFFFF888077700000
ONE, TWO = 0xFFFF888000111000, 0xFFFF888000222000
OBJECTS, IN_USE = 4, 3


@pytest.fixture
def image() -> MadeImage:
    """Return a kernel of 7.0 with two caches, and no slab."""
    return kernel("unsigned int stride;")


def kernel(fields: str) -> MadeImage:
    """
    Return a kernel with two caches, and no slab.

    :param fields: what follows the counters in ``struct slab``, 4 bytes
    """
    image = kernel_with_pages(TYPES["7.1"])
    image.declare(
        f"""
        struct kmem_cache {{ unsigned int flags; unsigned int size; unsigned int object_size;
                            char *name; }};
        struct slab {{ unsigned long __page_flags; struct kmem_cache *slab_cache;
                      unsigned long list[2]; void *freelist;
                      struct {{ unsigned int inuse:16; unsigned int objects:15;
                               unsigned int frozen:1; {fields} }};
                      unsigned int page_type; int _refcount; unsigned long obj_exts; }};
        struct slabobj_ext {{ struct obj_cgroup *objcg; }};
        """
    )
    image.write(NAME, b"dentry\0")
    for cache in (DENTRY, FILP):
        members = {"size": 192, "object_size": 192, "name": NAME}
        image.make("struct kmem_cache", cache, members)
    for pfn in range(64):
        put(image, pfn, 0, NO_TYPE, 0)
    return image


def put_slab(
    image: MadeImage,
    pfn: int,
    vector: int = 0,
    cache: int = DENTRY,
    *,
    order: int = 0,
    flags: int = 0,
    stride: int = 8,
    objects: int = OBJECTS,
) -> None:
    types = TYPES["7.1"]
    if order:
        put_compound(image, types, pfn, order, flags, types.slab, 0)
    else:
        put(image, pfn, flags, types.slab, 0)
    page, slab = FRAMES.page(pfn), image.type("struct slab")
    image.words(page + offsetof(slab, "slab_cache"), cache)
    image.write(page + 40, (IN_USE | objects << 16).to_bytes(4, "little"))
    image.write(page + 44, stride.to_bytes(4, "little"))
    image.words(page + offsetof(slab, "obj_exts"), vector)


def nobody(cache: SlabCache) -> bool:
    return False


def read(
    image: MadeImage, is_alone: Callable[[SlabCache], bool] = nobody
) -> tuple[list[SlabGroup], list[int]]:
    """Return the groups, and the page frames of the slabs that are left."""
    reader = SlabReader(image)
    [piece] = scan_range(image, PageRange(0, 64))
    groups, left = SlabGroupReader(image, reader, is_alone).read(piece.slabs)
    assert reader.coverage.read == sum(group.slabs for group in groups)
    return groups, [FRAMES.pfn(page.page) for page in left]


def test_the_layout_is_that_of_a_page(image: MadeImage) -> None:
    """What this file writes is where struct page and struct slab have it."""
    slab, page = image.type("struct slab"), image.type("struct page")
    assert offsetof(slab, "obj_exts") == offsetof(page, "memcg_data")
    assert offsetof(slab, "inuse") == 40


def test_sums_of_a_cache_and_node(image: MadeImage) -> None:
    put_slab(image, 1, VECTORS | 1)
    put_slab(image, 2)
    put_slab(image, 4, VECTORS + 64, order=2)
    put_slab(image, 8, VECTORS + 128, flags=NODE_1)
    put_slab(image, 9, VECTORS + 192, FILP)
    image.words(VECTORS, ONE, 0, ONE, TWO)
    image.words(VECTORS + 64, TWO | 2, 0, 0, 0)  # with a flag of enum objext_flags
    image.words(VECTORS + 128, ONE, ONE, ONE, ONE, TWO)  # behind the end
    image.words(VECTORS + 192, 0, 0, 0, 0)
    groups, left = read(image)
    found = {
        (g.cache.address, g.nid): (g.slabs, g.pages, g.objects, g.inuse, dict(g.charged))
        for g in groups
    }
    assert found == {
        (DENTRY, 0): (3, 1 + 1 + 4, 12, 9, {ONE: 2, TWO: 2}),
        (DENTRY, 1): (1, 1, 4, 3, {ONE: 4}),
        (FILP, 0): (1, 1, 4, 3, {}),
    }
    assert left == []
    outside = {place for group in groups for place in group.outside}
    assert outside == {(FRAMES.page(pfn), VECTORS + 64 * n) for n, pfn in enumerate((1, 4, 8, 9))}


def test_vectors_inside_their_slabs(image: MadeImage) -> None:
    """From the first byte to the last of the slab, but not of the pages beside it."""
    start = FRAMES.virt(FRAMES.page(8))
    size = 2 << 12
    for offset, is_inside in ((0, True), (size - 32, True), (-32, False), (size, False)):
        put_slab(image, 8, start + offset, order=1)
        image.words(start + offset, ONE, 0, 0, 0)
        [group] = read(image)[0]
        assert group.charged == {ONE: 1}
        assert group.outside == ([] if is_inside else [(FRAMES.page(8), start + offset)])


def test_elements_in_the_objects(image: MadeImage) -> None:
    """From one to the next is the size of an object (7.0)."""
    start = FRAMES.virt(FRAMES.page(3))
    put_slab(image, 3, start + 184, stride=192)
    image.write(start, bytes(4096))
    for n, objcg in enumerate((ONE, TWO, 0, TWO)):
        image.words(start + 184 + 192 * n, objcg)
    [group] = read(image)[0]
    assert (group.charged, group.outside) == ({ONE: 1, TWO: 2}, [])


def test_elements_that_are_codetags() -> None:
    """In 7.3 a slab has elements for the obj_cgroups, for the codetags, or for both."""
    image = kernel("unsigned int obj_exts_in_object:1; unsigned int obj_exts_needs_objcg:1;")
    put_slab(image, 1, VECTORS, stride=2)
    put_slab(image, 2, VECTORS, stride=0)
    image.words(VECTORS, ONE, TWO, ONE, 0)
    [group], left = read(image)
    assert (group.slabs, group.objects, group.charged, left) == (2, 8, {ONE: 2, TWO: 1}, [])


def test_slabs_that_are_read_one_by_one(image: MadeImage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without objects, of KFENCE, of an unreadable cache, and damaged ones."""
    image.words(VECTORS, ONE, ONE, ONE, ONE, ONE)
    put_slab(image, 1, VECTORS)
    put_slab(image, 2, VECTORS, objects=0)
    put_slab(image, 3, VECTORS)
    put_slab(image, 5, VECTORS, stride=12)
    put_slab(image, 6, VECTORS, MISSING)
    put_slab(image, 7, MISSING)
    put_slab(image, 8)
    odd = FILP + 0x100  # of which the size is no multiple of a word
    image.make("struct kmem_cache", odd, {"size": 196, "object_size": 196, "name": NAME})
    put_slab(image, 9, VECTORS, odd, stride=196)
    kfence = range(FRAMES.page(3), FRAMES.page(4), FRAMES.size)
    monkeypatch.setattr(slab_groups, "kfence_pages", lambda image: kfence)
    [group], left = read(image)
    assert left == [2, 3, 5, 6, 7, 9]
    assert (group.slabs, group.objects, group.charged) == (2, 8, {ONE: 4})


def test_all_slabs_of_some_caches_are_left(image: MadeImage) -> None:
    asked: list[int] = []

    def is_alone(cache: SlabCache) -> bool:
        asked.append(cache.address)
        return cache.address == FILP

    for pfn in range(1, 9):
        put_slab(image, pfn, cache=FILP if pfn % 2 else DENTRY, flags=NODE_1 * (pfn > 4))
    groups, left = read(image, is_alone)
    assert left == [1, 3, 5, 7]
    assert [(g.cache.address, g.nid, g.slabs) for g in groups] == [(DENTRY, 0, 2), (DENTRY, 1, 2)]
    assert sorted(asked) == [DENTRY, FILP]  # each is asked for once


def test_vectors_beside_memory_that_is_missing(image: MadeImage) -> None:
    """Those near each other are read at once, and nothing else is read."""
    far = VECTORS + 3 * 4096
    put_slab(image, 1, VECTORS + 4096 - 32)
    put_slab(image, 2, far)
    put_slab(image, 3, far + 64)
    for vector in (VECTORS + 4096 - 32, far, far + 64):
        image.words(vector, ONE, 0, 0, 0)
    [group], left = read(image)
    assert (group.slabs, group.charged, left) == (3, {ONE: 3}, [])
    # Of those that are read at once, all are left.
    put_slab(image, 4, far + 4096 - 16)
    [group], left = read(image)
    assert (group.slabs, group.charged, left) == (1, {ONE: 1}, [2, 3, 4])


def test_few_reads_for_many_vectors(image: MadeImage) -> None:
    for pfn in range(1, 33):
        put_slab(image, pfn, VECTORS + 4096 * (pfn - 1))
        image.words(VECTORS + 4096 * (pfn - 1), ONE, 0, 0, 0)
    slabs = SlabReader(image)
    reader = SlabGroupReader(image, slabs, nobody)
    [piece] = scan_range(image, PageRange(0, 64))
    reader.read(piece.slabs)
    before = image.memory.reads
    [group] = reader.read(piece.slabs)[0]
    assert image.memory.reads == before + 1
    # A piece has its own sums.
    assert (group.slabs, group.charged, len(group.outside)) == (32, {ONE: 32}, 32)
    assert slabs.coverage.read == 64


def test_sums_of_very_many_objects(image: MadeImage, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted when there are many, and at the end."""
    monkeypatch.setattr(slab_groups, "_MOST_WORDS", 6)
    for pfn in range(1, 6):
        put_slab(image, pfn, VECTORS + 3 * 4096 * pfn, DENTRY if pfn % 2 else FILP)
        image.words(VECTORS + 3 * 4096 * pfn, ONE, ONE, TWO, 0)
    groups = read(image)[0]
    assert {g.cache.address: dict(g.charged) for g in groups} == {
        DENTRY: {ONE: 6, TWO: 3},
        FILP: {ONE: 4, TWO: 2},
    }


def test_vectors_that_are_read_at_once() -> None:
    """Between them is no more than a page, and together they have no more than 1 MiB."""
    page, most = 4096, 1 << 20

    def runs(*vectors: tuple[int, int]) -> list[tuple[list[int], int]]:
        waiting = [(*vector, n, None, None) for n, vector in enumerate(vectors)]
        found = slab_groups._runs(waiting)  # type: ignore[arg-type]
        return [([one[2] for one in run], end) for run, end in found]

    assert runs() == []
    assert runs((0, 8), (8 + page, 16 + page)) == [([0, 1], 16 + page)]
    assert runs((0, 8), (9 + page, 17 + page)) == [([0], 8), ([1], 17 + page)]
    assert runs((5000, 5008), (0, 2000)) == [([1, 0], 5008)]
    # One may end behind those that follow it.
    inside = ((0, page), (8, 16), (2 * page, 2 * page + 8))
    assert runs(*inside) == [([0, 1, 2], 2 * page + 8)]
    steps = [(n * page, (n + 1) * page) for n in range(258)]
    assert runs(*steps[:256]) == [(list(range(256)), most)]
    assert runs(*steps) == [(list(range(256)), most), ([256, 257], most + 2 * page)]
    assert runs((64, 72), (72, 65 + most)) == [([0], 72), ([1], 65 + most)]


@pytest.mark.parametrize("objects", [0, 3])
def test_a_slab_that_has_no_cache_beside_one_that_has(image: MadeImage, objects: int) -> None:
    """Slabs that look the same are told apart by their vectors."""
    put_slab(image, 1, 0, 0, objects=objects)
    put_slab(image, 2, VECTORS, 0, objects=objects)
    image.words(VECTORS, ONE, ONE, ONE, ONE)
    groups, left = read(image)
    assert left == [1, 2] if not objects else [2]
    assert [(g.cache.address, g.slabs, g.charged) for g in groups] == ([(0, 1, {})] * bool(objects))


def test_what_slabs_have_in_common(image: MadeImage) -> None:
    """Their node, order, cache, counters and stride. Where the vector is does not matter."""
    put_slab(image, 1, VECTORS | 1)
    put_slab(image, 2, VECTORS + 64)
    put_slab(image, 4, VECTORS, order=1)
    put_slab(image, 8, VECTORS, flags=NODE_1)
    put_slab(image, 9, VECTORS | 7, FILP)
    put_slab(image, 10, 7, objects=3)
    put_slab(image, 11, VECTORS, stride=192)
    put_slab(image, 12, 0)
    put_slab(image, 13, VECTORS)
    image.write(FRAMES.page(13) + 40, bytes([IN_USE - 1, 0]))
    [piece] = scan_range(image, PageRange(0, 64))
    found = list(SlabReader(image).alike(piece.slabs))
    vectors = [VECTORS, VECTORS + 64, *[VECTORS] * 3, 0, VECTORS, 0, VECTORS]
    assert [exts for _, exts in found] == vectors
    keys = [key for key, _ in found]
    assert keys[0] == keys[1] == keys[7]
    assert len(set(keys)) == 7
    assert keys[0][:2] == (0, 0) and keys[2][:2] == (0, 1) and keys[3][:2] == (1, 0)


def test_a_slab_whose_flags_alone_differ(image: MadeImage) -> None:
    """``__page_flags`` and the links of a list are no part of what slabs have in common."""
    put_slab(image, 1, VECTORS)
    put_slab(image, 2, VECTORS)
    image.words(FRAMES.page(2) + 16, 0x1234, 0x5678, 0x9ABC)
    [piece] = scan_range(image, PageRange(0, 64))
    (first, _), (second, _) = SlabReader(image).alike(piece.slabs)
    assert first == second
