# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Layouts of releases that the lab does not boot, made as in the sources of each.

Each test names the release and the file that it follows.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
from support.layouts import FRAMES, NODE_1
from support.made_pages import NO_TYPE, PG_SLAB, TYPES, kernel_with_pages, put, put_compound

from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.debug import read_page
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mm_types import page_layout, scan_range
from memcg_inspect.linux.mm.mm_types_slabs import SlabPage
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.page_flags import FlagBits, page_flags
from memcg_inspect.linux.mm.slab import SlabReader, slab_layout

OBJCG, MEMCG = 0xFFFF888000111000, 0xFFFF888000222000


@pytest.mark.parametrize("release", TYPES)
def test_page_types(release: str) -> None:
    """A slab of two pages, a charged page table, one that is not, a large block and a buddy."""
    types = TYPES[release]
    image = kernel_with_pages(types)
    flag = PG_SLAB if types.slab == NO_TYPE else 0
    put_compound(image, types, 0, 1, NODE_1 | flag, types.slab, 0)
    put(image, 2, 0, types.table, OBJCG | 2)
    put(image, 3, NODE_1, types.table, 0)
    put_compound(image, types, 4, 2, NODE_1, NO_TYPE, OBJCG | 2)
    put(image, 8, 0, types.buddy, 0)
    put(image, 9, 1 << 4, 3, MEMCG)  # four page tables map this user page
    pieces = list(scan_range(image, PageRange(0, 10)))
    assert len(pieces) == 1
    slabs, kmem, lru = pieces[0].slabs, pieces[0].kmem, pieces[0].lru
    assert [(s.page, s.order, s.nid) for s in slabs] == [(FRAMES.page(0), 1, 1)]
    assert [(k.page, k.order, k.compound, k.type, k.objcg) for k in kmem] == [
        (FRAMES.page(2), 0, False, "table", OBJCG),
        (FRAMES.page(4), 2, True, "", OBJCG),
    ]
    assert pieces[0].tables == Counter({0: 1, 1: 1})
    assert [(user.payer, user.pages) for user in lru] == [(MEMCG, 1)]
    assert page_layout(image).has_large_kmalloc == (release == "7.1")
    image.declare("struct zone { unsigned long free_area[11]; };")
    said = [read_page(image, FRAMES.page(pfn)).type for pfn in (0, 1, 2, 3, 6, 8, 9)]
    assert said == ["slab", "slab", "table", "table", "", "buddy", ""]


class Slabs(NamedTuple):
    """
    The slabs of mm/slab.h.

    :ivar word: member of ``struct slab`` that refers to the vector
    :ivar element: declaration of an element of the vector; ``""`` for a pointer
    :ivar step: bytes from one element to the next
    :ivar flags: ``enum _slab_flag_bits`` of include/linux/slab.h
    :ivar stride: declaration of ``stride``
    """

    word: str
    element: str
    step: int
    flags: dict[str, int]
    stride: str = ""


EXT = "struct slabobj_ext { struct obj_cgroup *objcg; };"
EXT_AND_TAG = "struct slabobj_ext { struct obj_cgroup *objcg; unsigned long ref; };"
TINY = {"_SLAB_CONSISTENCY_CHECKS": 0, "_SLAB_ACCOUNT": 13}
FLAGS = TINY | {"_SLAB_RECLAIM_ACCOUNT": 17}
SLABS = {
    "6.2": Slabs("memcg_data", "", 8, {}),
    "6.9, SLUB_TINY": Slabs("memcg_data", "", 8, TINY),
    "6.10": Slabs("obj_exts", EXT, 8, FLAGS),
    "6.11, profiling": Slabs("obj_exts", EXT_AND_TAG, 16, FLAGS),
    "7.0, in the objects": Slabs("obj_exts", EXT, 192, FLAGS, "unsigned int stride;"),
    "7.1, beside them": Slabs("obj_exts", EXT, 8, FLAGS, "unsigned int stride;"),
}
CACHE, VECTOR, NAME = 0xFFFF888000300000, 0xFFFF888000400000, 0xFFFF888000500000


@pytest.mark.parametrize("release", SLABS)
def test_slabs(release: str) -> None:
    """Three of four objects are charged. Bit 17 of the flags is SLAB_RECLAIM_ACCOUNT, or free."""
    image, slabs = kernel_with_pages(TYPES["6.10"]), SLABS[release]
    image.declare(f"""
        struct kmem_cache {{
            unsigned long cpu_slab; unsigned int flags; unsigned long min_partial;
            unsigned int size; unsigned int object_size; char *name;
        }};
        struct slab {{
            unsigned long __page_flags; struct kmem_cache *slab_cache; unsigned long list[2];
            void *freelist;
            struct {{ unsigned int inuse:16; unsigned int objects:15; unsigned int frozen:1;
                      {slabs.stride} }};
            unsigned long pad;
            unsigned long {slabs.word};
        }};
        {slabs.element}
    """)
    if slabs.flags:
        image.enum("_slab_flag_bits", **slabs.flags)
    image.write(NAME, b"dentry\0")
    flags = 1 << 17 | 1 << (13 if slabs.flags else 26)
    image.make(
        "struct kmem_cache",
        CACHE,
        {"flags": flags, "size": 192, "object_size": 192, "name": NAME},
    )
    stride = {"stride": slabs.step} if slabs.stride else {}
    image.make(
        "struct slab",
        FRAMES.page(0),
        {"slab_cache": CACHE, "inuse": 3, "objects": 4, slabs.word: VECTOR | 1, **stride},
    )
    for n, objcg in enumerate((OBJCG, 0, OBJCG, OBJCG + 64)):
        image.words(VECTOR + n * slabs.step, objcg)
        if slabs.step == 16:
            image.words(VECTOR + n * slabs.step + 8, 0xFFFFFFFF82000000)
    raw = image.memory.read(FRAMES.page(0), 64)
    slab = SlabReader(image).slab(SlabPage(FRAMES.page(0), 1, 0, raw))
    assert slab is not None
    assert slab.charged == {OBJCG: 2, OBJCG + 64: 1}
    assert (slab.cache.name, slab.cache.charge, slab.cache.accounts) == ("dentry", 200, True)
    assert slab.cache.reclaimable == ("SLUB_TINY" not in release)


def test_slab_is_rejected() -> None:
    """CONFIG_SLAB, up to 6.7: its struct slab has no number of objects (mm/slab.h of 6.2)."""
    image = kernel_with_pages(TYPES["6.2"])
    image.declare("""
        struct slab {
            unsigned long __page_flags; struct kmem_cache *slab_cache; unsigned long list[2];
            void *freelist; void *s_mem; unsigned int active; unsigned int __page_type;
            unsigned long memcg_data;
        };
    """)
    with pytest.raises(UnknownKernelError, match="objects"):
        slab_layout(image)


@pytest.mark.parametrize(
    ("release", "symbol", "width"),
    [
        ("6.13", "kasan_flag_enabled", 8),
        ("7.1", "kasan_flag_enabled", 4),
        ("7.1", "__hwasan_tag_memory", 8),
        ("7.1", "other", 0),
    ],
)
def test_tags_of_kasan(release: str, symbol: str, width: int) -> None:
    """
    The tag of KASAN is between the zone and the generation of the LRU.

    KASAN_TAG_WIDTH of include/linux/page-flags-layout.h was 8. Of CONFIG_KASAN_HW_TAGS it is 4.
    """
    image = kernel_with_pages(TYPES[release])
    image.declare("struct lru_gen { unsigned long timestamps[4]; };")
    image.declare("struct lruvec { struct lru_gen lrugen; };")
    image.symbol_at(symbol, 0xFFFFFFFF82000000)
    found = page_flags(image)
    assert found.zone == FlagBits(62, 1)
    assert found.generation == FlagBits(62 - width - 3, 3)


@pytest.mark.parametrize("release", ["6.2", "6.6"])
def test_pool_of_kfence(release: str) -> None:
    """mm/kfence/core.c: kfence_metadata is an array up to 6.5, and a pointer since 6.6."""
    image = kernel_with_pages(TYPES[release])
    image.declare("struct kfence_metadata { unsigned long list[2]; unsigned long addr; };")
    variables, pool = 0xFFFFFFFF82000000, FRAMES.virt(FRAMES.page(0x800))
    image.variable("__kfence_pool", "char *", variables)
    image.words(variables, pool)
    metadata, type_ = variables + 8, "struct kfence_metadata[3]"
    if release == "6.6":
        image.words(variables + 8, CACHE)
        metadata, type_ = CACHE, "struct kfence_metadata *"
    image.variable("kfence_metadata", type_, variables + 8)
    for n in range(3):
        image.words(metadata + 24 * n, 0, 0, pool + 2 * (n + 1) * 4096 + 64 * n)
    image.words(metadata + 24 * 3, 0, 0, 0)
    first = FRAMES.page(0x800)
    assert kfence_pages(image) == range(first, first + 8 * FRAMES.size, FRAMES.size)
