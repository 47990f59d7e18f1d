# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Caches, slabs and objects in memory made by hand, as in mm/slab.h of several releases.

``tests/linux/test_slabs.py`` compares those of images with what drgn reads.
"""

from __future__ import annotations

import pytest
from drgn import FaultError, sizeof
from support.layouts import FRAMES, NODE_1, MadeImage

from memcg_inspect.linux.mm import slab as slab_module
from memcg_inspect.linux.mm.kfence import KfenceObject
from memcg_inspect.linux.mm.mm_types_slabs import SlabPage
from memcg_inspect.linux.mm.slab import (
    Slab,
    SlabCache,
    SlabReader,
    Vector,
    payers,
    slab_layout,
)
from memcg_inspect.model import Coverage, ImageError

CACHE, NAME, KEY = 0xFFFF888000300000, 0xFFFF888000310000, 0xFFFFFFFF82000000
VECTOR, MISSING = 0xFFFF888000400000, 0xFFFF888077700000
ONE, TWO, TAG = 0xFFFF888000111000, 0xFFFF888000222000, 0xFFFFFFFF83000040
#: The page frame of the slab.
PFN = 8
PAGE = FRAMES.page(PFN)
START = 0xFFFF888000000000 + PFN * 4096

#: What a release has behind the counters, the vector, and ``struct slabobj_ext``.
LAYOUTS = {
    "6.2": ("", "memcg_data", ""),
    "6.10": ("", "obj_exts", "struct obj_cgroup *objcg;"),
    "6.12": ("", "obj_exts", "struct obj_cgroup *objcg; unsigned long ref;"),
    "7.0": ("unsigned int stride;", "obj_exts", "struct obj_cgroup *objcg; unsigned long ref;"),
    "7.3": (
        "unsigned int obj_exts_in_object:1; unsigned int obj_exts_needs_objcg:1;",
        "obj_exts",
        "union { struct obj_cgroup *_objcg; unsigned long _ctref; };",
    ),
}


def kernel(release: str, more: str = "", *, has_codetag: bool = False) -> MadeImage:
    """
    Return a kernel with a cache of objects of 192 bytes.

    :param more: members of ``struct kmem_cache``
    :param has_codetag: whether objects have an element for their call site (7.3)
    """
    fields, vector, ext = LAYOUTS[release]
    image = MadeImage()
    image.declare(
        f"""
        struct kmem_cache {{ unsigned int flags; unsigned int size; unsigned int object_size;
                            {more} char *name; }};
        struct slab {{ unsigned long __page_flags; struct kmem_cache *slab_cache;
                      unsigned long list[2]; void *freelist;
                      struct {{ unsigned int inuse:16; unsigned int objects:15;
                               unsigned int frozen:1; {fields} }};
                      unsigned long {vector}; }};
        struct atomic {{ int counter; }};
        struct static_key {{ struct atomic enabled; }};
        struct static_key_true {{ struct static_key key; }};
        """
    )
    if ext:
        image.declare(f"struct slabobj_ext {{ {ext} }};")
    image.variable("slab_obj_ext_has_codetag_key", "struct static_key_true", KEY)
    image.write(KEY, bytes([has_codetag, 0, 0, 0]))
    image.write(NAME, b"dentry\0")
    put_cache(image)
    return image


def put_cache(image: MadeImage, address: int = CACHE, **members: int) -> None:
    given = {"size": 192, "object_size": 184, "name": NAME} | members
    image.make("struct kmem_cache", address, given)


def put_slab(image: MadeImage, vector: int = 0, **members: int) -> None:
    has_exts = image.type("struct slab").has_member("obj_exts")
    given = {"slab_cache": CACHE, "objects": 4, "inuse": 3} | members
    given["obj_exts" if has_exts else "memcg_data"] = vector
    image.make("struct slab", PAGE, given)


def found(image: MadeImage, order: int = 0) -> SlabPage:
    raw = image.prog.read(PAGE, sizeof(image.type("struct slab")))
    return SlabPage(PAGE, 1, order, raw)


def read(image: MadeImage, order: int = 0) -> tuple[SlabReader, Slab]:
    reader = SlabReader(image)
    slab = reader.slab(found(image, order))
    assert slab is not None
    assert (reader.coverage.read, reader.coverage.unreadable) == (1, 0)
    return reader, slab


def missed(coverage: Coverage) -> list[tuple[str, int, str]]:
    return [(one.what, one.address, one.reason) for one in coverage.examples]


# Caches


def test_a_cache() -> None:
    image = kernel("6.10", "unsigned int red_left_pad;")
    put_cache(image, red_left_pad=64)
    reader = SlabReader(image)
    before = image.memory.reads
    cache = reader.cache(CACHE)
    # A pointer is charged with each object, obj_full_size().
    assert cache == SlabCache(CACHE, "dentry", 192, 184, 64, False, 200, False)
    after = image.memory.reads
    assert reader.cache(CACHE) is cache
    assert before < after == image.memory.reads
    assert reader.caches == {CACHE: cache}
    image = kernel("6.10")
    assert SlabReader(image).cache(CACHE) == cache._replace(red_left_pad=0)


def test_flags_of_caches_that_are_macros() -> None:
    """Up to 6.8: SLAB_RECLAIM_ACCOUNT and SLAB_ACCOUNT of include/linux/slab.h."""
    for flags, is_reclaimable, accounts in (
        (0x00020000, True, False),
        (0x04000000, False, True),
        (0x04020000, True, True),
        (0xFBFDFFFF, False, False),
    ):
        image = kernel("6.2")
        put_cache(image, flags=flags)
        cache = SlabReader(image).cache(CACHE)
        assert (cache.reclaimable, cache.accounts) == (is_reclaimable, accounts)


def test_flags_of_caches_that_are_in_an_enum() -> None:
    """Since 6.9, the enumerators are numbers of bits."""
    image = kernel("6.10")
    image.enum(None, _SLAB_CONSISTENCY_CHECKS=0, _SLAB_ACCOUNT=9, _SLAB_RECLAIM_ACCOUNT=10)
    for flags, expected in ((0x200, (False, True)), (0x400, (True, False))):
        put_cache(image, flags=flags)
        cache = SlabReader(image).cache(CACHE)
        assert (cache.reclaimable, cache.accounts) == expected


def test_flags_that_a_tiny_kernel_does_not_have() -> None:
    """With CONFIG_SLUB_TINY, SLAB_RECLAIM_ACCOUNT is 0."""
    image = kernel("6.10")
    image.enum(None, _SLAB_CONSISTENCY_CHECKS=0, _SLAB_ACCOUNT=9)
    put_cache(image, flags=0xFFFFFFFF)
    cache = SlabReader(image).cache(CACHE)
    assert (cache.reclaimable, cache.accounts) == (False, True)


def test_a_cache_without_a_name() -> None:
    image, names = kernel("6.10"), Coverage()
    put_cache(image, name=MISSING)
    reader = SlabReader(image, names)
    assert reader.cache(CACHE).name == f"kmem_cache {CACHE:#x}"
    why = f"not made: {MISSING:#x}"
    assert missed(names) == [("name of a kmem_cache", CACHE, why)]
    assert reader.names is names
    assert reader.unnamed == {CACHE: why}
    assert SlabReader(image).names == Coverage()


def test_a_cache_at_the_end_of_the_memory_that_is_there() -> None:
    """Of its ``node[MAX_NUMNODES]`` there is memory for the nodes of the machine only."""
    image = kernel("6.10")
    put_cache(image, CACHE + 4096 - 24)
    assert SlabReader(image).cache(CACHE + 4096 - 24).name == "dentry"


@pytest.mark.parametrize(("size", "is_right"), [(0, False), (7, False), (8, True)])
def test_sizes_of_objects(size: int, is_right: bool) -> None:
    image = kernel("6.10")
    put_cache(image, size=size)
    reader = SlabReader(image)
    if is_right:
        assert reader.cache(CACHE).size == size
        return
    with pytest.raises(FaultError, match=f"a kmem_cache of objects of {size} bytes") as raised:
        reader.cache(CACHE)
    assert raised.value.address == CACHE
    assert reader.caches == {}


# Slabs


def test_kernels_that_do_not_charge_slab_objects() -> None:
    with pytest.raises(ImageError, match=r"no struct slab: this kernel is older than 5\.17"):
        slab_layout(MadeImage())
    image = MadeImage()
    image.declare("struct slab { void *slab_cache; };")
    with pytest.raises(ImageError, match="has no obj_exts: slab objects are not charged"):
        slab_layout(image)


@pytest.mark.parametrize(
    ("release", "element", "codetag"),
    [("6.2", 8, None), ("6.10", 8, None), ("6.12", 16, 8), ("7.0", 16, 8), ("7.3", 8, 0)],
)
def test_layouts(release: str, element: int, codetag: int | None) -> None:
    layout = slab_layout(kernel(release))
    assert (layout.element, layout.objcg, layout.codetag) == (element, 0, codetag)
    assert (layout.stride is not None) == (release == "7.0")
    assert (layout.in_object is not None) == (layout.needs_objcg is not None) == (release == "7.3")
    assert layout.has_codetag is False
    assert slab_layout(kernel(release, has_codetag=True)).has_codetag is True


@pytest.mark.parametrize("release", LAYOUTS)
def test_a_slab_and_who_pays_for_its_objects(release: str) -> None:
    image = kernel(release)
    put_slab(image, VECTOR | 3, **{"obj_exts_needs_objcg": 1} if release == "7.3" else {})
    words = [ONE | 1, TWO, 0, ONE, TWO]  # the last one is behind the end
    step = 16 if release in ("6.12", "7.0") else 8
    for number, word in enumerate(words):
        image.words(VECTOR + step * number, word, *([TAG] if step == 16 else []))
    reader, slab = read(image, order=2)
    cache = SlabCache(CACHE, "dentry", 192, 184, 0, False, 200)
    assert slab[:6] == (PAGE, 1, 2, cache, 4, 3)
    assert (slab.vector, slab.charged) == (Vector(VECTOR, step), {ONE: 2, TWO: 1})
    assert slab.raw == found(image).raw
    objects = list(reader.charged_objects(slab))
    assert [(one.number, one.objcg) for one in objects] == [(0, ONE), (1, TWO), (3, ONE)]
    assert [one.address for one in objects] == [START, START + 192, START + 3 * 192]
    assert [one.element for one in objects] == [VECTOR, VECTOR + step, VECTOR + 3 * step]
    assert [reader.objcg(slab, number) for number in range(4)] == [ONE, TWO, 0, ONE]
    shape = reader.shape(found(image))
    assert (shape.cache, shape.objects, shape.inuse, shape.elements) == (cache, 4, 3, (0, step))


def test_a_slab_without_a_vector() -> None:
    """OBJEXTS_ALLOC_FAIL is a flag: the vector could not be allocated."""
    for vector in (0, 1, 2, 4, 7):
        image = kernel("6.10")
        put_slab(image, vector)
        reader, slab = read(image)
        assert (slab.vector, slab.charged) == (None, {})
        assert list(reader.charged_objects(slab)) == []
        assert reader.objcg(slab, 2) == 0
        assert reader.vector_page(slab) is None
        assert reader.codetags(slab) is None
        assert reader.codetag(slab, 2) == 0
        assert reader.tagged(slab) == {}


def test_a_page_that_has_no_cache_yet() -> None:
    """allocate_slab() marks a page as a slab before it has one. KFENCE marks unused pages."""
    nothing = SlabCache(0, "(no cache)", 0, 0, 0, False, 8, False)
    image = kernel("6.10")
    image.words(VECTOR, ONE, 0, 0, 0)
    # Without objects, whatever the rest is; and with objects, if there is no vector either.
    for vector, members in ((0, {"objects": 0}), (VECTOR, {"objects": 0}), (1, {"slab_cache": 0})):
        put_slab(image, vector, **members)
        reader, slab = read(image)
        assert (slab.cache, slab.charged) == (nothing, {})
        assert (slab.vector is None) == (vector != VECTOR)
        assert reader.number(slab, START) is None
        assert list(reader.charged_objects(slab)) == []
        assert reader.tagged(slab) == {}
    put_slab(image, VECTOR, slab_cache=0)
    reader = SlabReader(image)
    assert reader.slab(found(image)) is None
    assert reader.coverage.read == 0
    assert [one[:2] for one in missed(reader.coverage)] == [("kmem_cache of a slab", PAGE)]


@pytest.mark.parametrize(("order", "objects"), [(0, 21), (1, 42), (3, 170)])
def test_as_many_objects_as_fit(order: int, objects: int) -> None:
    """Objects of 192 bytes; KFENCE keeps one of any size in a page."""
    image = kernel("6.10")
    put_slab(image, objects=objects)
    assert read(image, order)[1].objects == objects
    put_slab(image, objects=objects + 1)
    reader = SlabReader(image)
    assert reader.slab(found(image, order)) is None
    room = 4096 << order
    why = f"{objects + 1} objects of 192 bytes in a slab of {room} bytes: {PAGE:#x}"
    assert missed(reader.coverage) == [("kmem_cache of a slab", PAGE, why)]
    with pytest.raises(FaultError, match="objects of 192 bytes"):
        reader.shape(found(image, order))
    reader._kfence = range(PAGE, PAGE + 64, 64)
    assert reader.slab(found(image, order)) is not None


def test_vectors_that_are_not_in_the_image() -> None:
    image = kernel("6.10")
    put_slab(image, MISSING + 16)
    reader = SlabReader(image)
    slab = reader.slab(found(image))
    assert slab is not None
    assert (slab.vector, slab.charged) == (Vector(MISSING + 16, 8), None)
    why = f"not made: {MISSING + 16:#x}"
    assert missed(reader.coverage) == [("objcgs of a dentry slab", MISSING + 16, why)]
    assert reader.coverage.read == 0
    # Nothing behind the last element is read.
    last = VECTOR + 4096 - 4 * 8
    image.words(last, 0, 0, 0, ONE)
    put_slab(image, last)
    assert read(image)[1].charged == {ONE: 1}


def test_elements_that_are_too_near_each_other() -> None:
    """From 7.0 to 7.2 they are as far apart as elements or objects, and KFENCE sets no stride."""
    image = kernel("7.0")
    for stride, step in ((0, 16), (16, 16), (192, 192)):
        image.write(VECTOR, bytes(1024))
        image.words(VECTOR + step, TWO, TAG)
        put_slab(image, VECTOR, stride=stride)
        reader, slab = read(image)
        assert (slab.vector, slab.charged) == (Vector(VECTOR, step), {TWO: 1})
        assert reader.codetags(slab) == Vector(VECTOR + 8, step)
        assert [reader.codetag(slab, number) for number in range(3)] == [0, TAG, 0]
    put_slab(image, VECTOR, stride=8)
    reader = SlabReader(image)
    slab = reader.slab(found(image))
    assert slab is not None and (slab.vector, slab.charged) == (None, None)
    why = f"a vector with an element in 8 bytes: {VECTOR:#x}"
    assert missed(reader.coverage) == [("objcgs of a dentry slab", VECTOR, why)]


# Call sites


def test_call_sites_beside_the_objcgs() -> None:
    """From 6.10 to 7.2, if the kernel has memory allocation profiling."""
    image = kernel("6.12")
    put_slab(image, VECTOR)
    image.words(VECTOR, ONE | 2, TAG, 0, TAG, 0, 1, TWO, 0, TWO, TAG)
    reader, slab = read(image)
    assert reader.codetags(slab) == Vector(VECTOR + 8, 16)
    # CODETAG_EMPTY is no call site.
    assert [reader.codetag(slab, number) for number in range(4)] == [TAG, TAG, 0, 0]
    assert reader.tagged(slab) == {(TAG, ONE): 1, (TAG, 0): 1}
    image = kernel("6.10")
    put_slab(image, VECTOR)
    image.words(VECTOR, ONE, TAG, ONE, TAG)
    reader, slab = read(image)
    assert (reader.codetags(slab), reader.tagged(slab)) == (None, {})


@pytest.mark.parametrize(
    ("needs_objcg", "has_codetag", "objcgs", "tags"),
    [
        (False, False, None, None),
        (True, False, (0, 8), None),
        (False, True, None, (0, 8)),
        (True, True, (0, 16), (8, 16)),
    ],
)
def test_elements_of_7_3(
    needs_objcg: bool,
    has_codetag: bool,
    objcgs: tuple[int, int] | None,
    tags: tuple[int, int] | None,
) -> None:
    """Objects have an element for the objcg, one for the call site, both or none."""
    image = kernel("7.3", has_codetag=has_codetag)
    image.write(VECTOR, bytes(1024))
    for is_inside in (False, True):
        put_slab(image, VECTOR, obj_exts_needs_objcg=needs_objcg, obj_exts_in_object=is_inside)
        reader, slab = read(image)
        inside = (192,) if is_inside else ()
        expected = [at and Vector(VECTOR + at[0], (*inside, at[1])[0]) for at in (objcgs, tags)]
        assert [slab.vector, reader.codetags(slab)] == expected
        elements = reader.shape(found(image)).elements
        assert elements == (expected[0] and (0, expected[0].stride))


def test_call_sites_of_objects_that_nobody_pays_for() -> None:
    image = kernel("7.3", has_codetag=True)
    put_slab(image, VECTOR)
    image.words(VECTOR, TAG, 1, 0, TAG)
    reader, slab = read(image)
    assert (slab.vector, slab.charged) == (None, {})
    assert reader.tagged(slab) == {(TAG, 0): 2}
    assert [reader.codetag(slab, number) for number in range(4)] == [TAG, 0, 0, TAG]
    # An element in each: that of the objcg is first.
    put_slab(image, VECTOR, obj_exts_needs_objcg=1)
    image.words(VECTOR, ONE, TAG, 0, TAG, TWO, 0, ONE, 1)
    reader, slab = read(image)
    assert slab.charged == {ONE: 2, TWO: 1}
    assert reader.tagged(slab) == {(TAG, ONE): 1, (TAG, 0): 1}


# Objects


def test_addresses_of_objects() -> None:
    image = kernel("6.10", "unsigned int red_left_pad;")
    put_cache(image, red_left_pad=64)
    put_slab(image)
    reader, slab = read(image)
    first = START + 64
    places = [first, first + 192, first + 384, first + 576]
    assert list(reader.objects(slab)) == places
    assert [reader.address(slab, number) for number in range(4)] == places
    assert [reader.number(slab, first + at) for at in (-1, 0, 191, 192, 767, 768)] == [
        *(None, 0, 0, 1, 3, None)
    ]
    assert not reader.has_freed(slab)


@pytest.mark.parametrize("state", ["allocated", "freed", "no metadata", "unreadable"])
def test_an_object_of_kfence(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """kfence_guarded_alloc() aligns some to the end of their page."""
    image = kernel("6.10", "unsigned int red_left_pad;")
    put_cache(image, red_left_pad=64)
    put_slab(image, objects=1)
    place = START + 4096 - 184

    def kfence_object(image: MadeImage, page: int) -> KfenceObject | None:
        assert page == PAGE
        if state == "unreadable":
            raise FaultError("missing", 0)
        return None if state == "no metadata" else KfenceObject(place, 184, state)

    monkeypatch.setattr(slab_module, "kfence_pages", lambda image: range(PAGE, PAGE + 64, 64))
    monkeypatch.setattr(slab_module, "kfence_object", kfence_object)
    reader, slab = read(image)
    # Objects of KFENCE have no padding before them.
    first = place if state in ("allocated", "freed") else START
    assert reader.address(slab, 0) == first
    assert list(reader.objects(slab)) == ([] if state == "freed" else [first])
    assert reader.has_freed(slab) == (state == "freed")
    assert reader.number(slab, first) == 0


def test_pages_of_vectors() -> None:
    """The first page and the last one of the slab, and those beside it."""
    image = kernel("6.10")
    put_slab(image)
    reader, slab = read(image, order=1)
    for at, page in (
        (-8, PAGE - 64),
        (0, None),
        (8191, None),
        (8192, PAGE + 128),
    ):
        assert reader.page_of(slab, Vector(START + at, 8)) == page
        assert reader.vector_page(slab._replace(vector=Vector(START + at, 8))) == page


def test_nodes_of_pages() -> None:
    image = kernel("6.10")
    reader = SlabReader(image)
    image.words(PAGE, NODE_1)
    image.words(PAGE + 64, 0)
    assert (reader.page_nid(PAGE), reader.page_nid(PAGE + 64)) == (1, 0)
    assert reader.page_nid(FRAMES.page(1 << 20)) == -1


def test_payers_of_elements() -> None:
    assert payers([ONE, 0, TWO, ONE]) == {ONE: 2, TWO: 1}
    assert payers([ONE | 1, 2, TWO | 4, ONE, 0]) == {ONE: 2, TWO: 1}
    assert payers([0]) == payers([]) == {}
