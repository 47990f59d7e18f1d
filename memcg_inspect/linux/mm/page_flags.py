# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Fields of page->flags
---------------------

Mirrors :linux:`include/linux/page-flags-layout.h`. Above the flags, ``page->flags`` holds, from the
highest bit down: the node, the zone, the last CPU and task that used the page (NUMA balancing), the
tag of KASAN, and the generation of the multi-gen LRU. The widths of the fields are macros. They are
derived from types.
"""

from __future__ import annotations

from typing import NamedTuple

from drgn import TypeKind, sizeof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import (
    array_length,
    constant,
    has_member,
    member_type,
)
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.arch.processor import kasan_tags
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import ImageError

__all__ = ("FlagBits", "PageFlags", "page_flags")

#: ``LAST__PID_SHIFT``.
LAST_PID_SHIFT = 8
#: ``KASAN_TAG_WIDTH`` if pages have a tag of KASAN.
KASAN_TAG_WIDTH = 8
#: The same with ``CONFIG_KASAN_HW_TAGS`` in newer kernels: it was 8 in 6.14, and is 4 in 6.18.
KASAN_HW_TAG_WIDTH = 4


class FlagBits(NamedTuple):
    """
    A bit field of ``page->flags``: ``flags >> shift & ((1 << width) - 1)``.

    :ivar shift: its lowest bit
    :ivar width: number of bits
    """

    shift: int
    width: int

    def get(self, flags: int) -> int:
        """Return the value of the field in ``page->flags``."""
        return flags >> self.shift & ((1 << self.width) - 1)


class PageFlags(NamedTuple):
    """
    Fields of ``page->flags`` that tell the LRU list of a folio.

    :ivar lru: ``PG_lru``
    :ivar active: ``PG_active``
    :ivar unevictable: ``PG_unevictable``
    :ivar swapbacked: ``PG_swapbacked``
    :ivar zone: ``page_zonenum()``
    :ivar generation: ``LRU_GEN_MASK``: 1 plus the generation of a folio on a list of the multi-gen
        LRU, 0 for other folios; ``None`` without ``CONFIG_LRU_GEN``
    """

    lru: FlagBits
    active: FlagBits
    unevictable: FlagBits
    swapbacked: FlagBits
    zone: FlagBits
    generation: FlagBits | None


@per_image
def page_flags(image: Image) -> PageFlags:
    """
    Find the fields of ``page->flags`` that tell the LRU list of a folio.

    :raises ImageError: if the kernel does not define the flags
    """
    zones = constant(image, "__MAX_NR_ZONES")
    if zones is None:
        raise ImageError("enum zone_type has no __MAX_NR_ZONES: this kernel cannot be read")
    width = _order_base_2(zones)
    zone = FlagBits(mem_map(image).node_shift - width, width)
    generation = None
    if has_member(image, "struct lruvec", "lrugen"):  # CONFIG_LRU_GEN, 6.1
        width = _order_base_2(lru_generations(image) + 1)
        below = _last_cpupid_width(image) + _kasan_tag_width(image)
        generation = FlagBits(zone.shift - below - width, width)
    return PageFlags(
        lru=_bit(image, "PG_lru"),
        active=_bit(image, "PG_active"),
        unevictable=_bit(image, "PG_unevictable"),
        swapbacked=_bit(image, "PG_swapbacked"),
        zone=zone,
        generation=generation,
    )


def lru_generations(image: Image) -> int:
    """Return ``MAX_NR_GENS``. It is a macro, and the length of ``lrugen.timestamps``."""
    lrugen = member_type(image.type("struct lruvec"), "lrugen")
    # In BTF, nr_pages[MAX_NR_GENS][...][...] has only one dimension.
    return array_length(member_type(lrugen, "timestamps"))


def _bit(image: Image, name: str) -> FlagBits:
    bit = constant(image, name)
    if bit is None:
        raise ImageError(f"enum pageflags has no {name}: this kernel cannot be read")
    return FlagBits(bit, 1)


def _order_base_2(number: int) -> int:
    return max(number - 1, 0).bit_length()


def _last_cpupid_width(image: Image) -> int:
    # LAST_CPUPID_WIDTH is 0 without CONFIG_NUMA_BALANCING, and if the flags have no room for it
    # (LAST_CPUPID_NOT_IN_PAGE_FLAGS): it is a member of its own then.
    if not has_member(image, "struct task_struct", "numa_faults"):
        return 0
    if has_member(image, "struct page", "_last_cpupid"):
        return 0
    try:
        cpus = array_length(image.object("__per_cpu_offset").type_)
    except UnknownKernelError:
        cpus = 8 * sizeof(image.type("struct cpumask"))
    return LAST_PID_SHIFT + _order_base_2(cpus)


def _kasan_tag_width(image: Image) -> int:
    tags = kasan_tags(image)
    if tags is None:
        return 0
    # memdesc_flags_t came in 6.18. No type tells the width in 6.15 to 6.17; LruReader checks it.
    flags = member_type(image.type("struct page"), "flags")
    is_narrow = tags == "hw" and flags.unaliased_kind() == TypeKind.STRUCT
    return KASAN_HW_TAG_WIDTH if is_narrow else KASAN_TAG_WIDTH
