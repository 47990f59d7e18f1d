# SPDX-License-Identifier: LGPL-2.1-or-later
"""Memory maps made by hand, with ``struct page`` and page types as in the sources of releases."""

from __future__ import annotations

from typing import NamedTuple

from support.layouts import FRAMES, NODE_1, MadeImage

__all__ = (
    "NO_TYPE",
    "PAGES",
    "PG_SLAB",
    "TYPES",
    "Types",
    "kernel_with_pages",
    "put",
    "put_compound",
)

#: ``struct page`` of include/linux/mm_types.h, with what its first tail page holds.
PAGES = {
    "6.2": """
        struct page {
            unsigned long flags;
            union {
                struct { unsigned long lru[2]; void *mapping; unsigned long index;
                         unsigned long private; };
                struct { unsigned long compound_head; unsigned char compound_dtor;
                         unsigned char compound_order; };
            };
            union { int _mapcount; unsigned int page_type; };
            int _refcount;
            unsigned long memcg_data;
        };
        struct folio { struct page page; };
    """,
    "6.3": """
        struct page {
            unsigned long flags;
            union {
                struct { unsigned long lru[2]; void *mapping; unsigned long index;
                         unsigned long private; };
                unsigned long compound_head;
            };
            union { int _mapcount; unsigned int page_type; };
            int _refcount;
            unsigned long memcg_data;
        };
        struct folio {
            struct page page;
            unsigned long _flags_1;
            unsigned long _head_1;
            unsigned char _folio_dtor;
            unsigned char _folio_order;
            unsigned long rest[5];
        };
    """,
    "6.6": """
        struct page {
            unsigned long flags;
            union {
                struct { unsigned long lru[2]; void *mapping; unsigned long index;
                         unsigned long private; };
                unsigned long compound_head;
            };
            union { int _mapcount; unsigned int page_type; };
            int _refcount;
            unsigned long memcg_data;
        };
        struct folio { struct page page; unsigned long _flags_1; unsigned long _head_1; };
    """,
    "7.1": """
        struct memdesc_flags { unsigned long f; };
        struct page {
            struct memdesc_flags flags;
            union {
                struct { unsigned long lru[2]; void *mapping; unsigned long __folio_index;
                         unsigned long private; };
                unsigned long compound_info;
            };
            union { unsigned int page_type; int _mapcount; };
            int _refcount;
            unsigned long memcg_data;
        };
        struct folio { struct page page; unsigned long _flags_1; unsigned long _head_1; };
    """,
}  # fmt: skip
NO_TYPE = 0xFFFFFFFF


class Types(NamedTuple):
    """
    The page types of include/linux/page-flags.h.

    :ivar layout: release in :data:`PAGES`
    :ivar slab: ``page_type`` of a slab; ``NO_TYPE`` if a page flag marks it
    :ivar table: ``page_type`` of a page table
    :ivar buddy: ``page_type`` of a free block
    :ivar enumerators: those of ``enum pagetype``
    :ivar order: offset of the order in the first tail page
    """

    layout: str
    slab: int
    table: int
    buddy: int
    enumerators: dict[str, int]
    order: int = 0


#: Up to 6.9, ``PG_table`` and ``PG_buddy`` are macros.
MACROS = (NO_TYPE, NO_TYPE & ~0x200, NO_TYPE & ~0x80)
BYTES = {"PGTY_buddy": 0xF0, "PGTY_table": 0xF2, "PGTY_slab": 0xF5}
TYPES = {
    "6.2": Types("6.2", *MACROS, {}, order=17),
    "6.3": Types("6.3", *MACROS, {}, order=17),
    "6.6": Types("6.6", *MACROS, {}),
    "6.9": Types("6.6", *MACROS, {}),
    "6.10": Types(
        "6.6",
        NO_TYPE & ~0x1000,
        NO_TYPE & ~0x200,
        NO_TYPE & ~0x80,
        {"PG_buddy": 0x80, "PG_table": 0x200, "PG_slab": 0x1000, "PAGE_TYPE_BASE": 0xF0000000},
    ),
    "6.11": Types(
        "6.6",
        NO_TYPE & ~0x02000000,
        NO_TYPE & ~0x10000000,
        NO_TYPE & ~0x40000000,
        {
            "PG_buddy": 0x40000000,
            "PG_table": 0x10000000,
            "PG_slab": 0x02000000,
            "PAGE_TYPE_BASE": 0x80000000,
        },
    ),
    "6.13": Types("6.6", 0xF5FFFFFF, 0xF2FFFFFF, 0xF0FFFFFF, BYTES),
    "7.1": Types("7.1", 0xF5FFFFFF, 0xF2FFFFFF, 0xF0FFFFFF, BYTES | {"PGTY_large_kmalloc": 0xF8}),
}
PG_SLAB, PG_HEAD = 1 << 9, 1 << 16


def kernel_with_pages(types: Types) -> MadeImage:
    image = MadeImage()
    image.declare(PAGES[types.layout])
    flags = {"PG_lru": 4, "PG_active": 5, "PG_unevictable": 20, "PG_swapbacked": 19, "PG_head": 16}
    image.enum("pageflags", **flags, **({"PG_slab": 9} if types.slab == NO_TYPE else {}))
    image.enum("zone_type", ZONE_DMA=0, ZONE_NORMAL=1, __MAX_NR_ZONES=2)
    if types.enumerators:
        image.enum("pagetype", **types.enumerators)
    return image


def put(image: MadeImage, pfn: int, flags: int, page_type: int, memcg_data: int) -> None:
    members = {"page_type": page_type, "memcg_data": memcg_data, "_refcount": 1}
    image.make("struct page", FRAMES.page(pfn), members)
    image.words(FRAMES.page(pfn), flags)


def put_compound(
    image: MadeImage, types: Types, pfn: int, order: int, flags: int, page_type: int, data: int
) -> None:
    put(image, pfn, flags | PG_HEAD, page_type, data)
    for tail in range(pfn + 1, pfn + (1 << order)):
        put(image, tail, flags & NODE_1, NO_TYPE, 0)
        image.words(FRAMES.page(tail) + 8, FRAMES.page(pfn) + 1)
    image.write(FRAMES.page(pfn + 1) + types.order, bytes([order]))
