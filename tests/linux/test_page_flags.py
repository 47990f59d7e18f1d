# SPDX-License-Identifier: LGPL-2.1-or-later
"""Where the fields of page->flags are, by include/linux/page-flags-layout.h."""

from __future__ import annotations

import pytest
from support.layouts import MadeImage
from support.made_pages import TYPES, kernel_with_pages

from memcg_inspect.linux.mm import page_flags as page_flags_module
from memcg_inspect.linux.mm.page_flags import FlagBits, lru_generations, page_flags
from memcg_inspect.model import ImageError

VARIABLES = 0xFFFFFFFF82000000
#: Bits below the node.
NODE_SHIFT = 63


def with_zones(zones: int) -> MadeImage:
    """Return a kernel with this ``__MAX_NR_ZONES``."""
    image = kernel_with_pages(TYPES["7.1"])
    image.enum("zone_type", ZONE_NORMAL=0, __MAX_NR_ZONES=zones)
    return image


def with_generations(number: int) -> MadeImage:
    """Return a kernel with a multi-gen LRU of this ``MAX_NR_GENS``."""
    image = with_zones(5)
    image.declare(f"struct lru_gen {{ unsigned long timestamps[{number}]; }};")
    image.declare("struct lruvec { struct lru_gen lrugen; };")
    return image


@pytest.mark.parametrize(
    ("zones", "width"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (8, 3), (9, 4)]
)
def test_the_zone_has_as_many_bits_as_it_needs(zones: int, width: int) -> None:
    """ZONES_WIDTH; it is right below the node."""
    found = page_flags(with_zones(zones))
    assert found.zone == FlagBits(NODE_SHIFT - width, width)
    assert found.generation is None  # CONFIG_LRU_GEN=n


@pytest.mark.parametrize(("number", "width"), [(2, 2), (3, 2), (4, 3), (7, 3), (8, 4)])
def test_the_generation_of_a_folio_may_be_none(number: int, width: int) -> None:
    """LRU_GEN_WIDTH: there is one more value than there are generations."""
    found = page_flags(with_generations(number))
    assert found.generation == FlagBits(found.zone.shift - width, width)


@pytest.mark.parametrize(("cpus", "width"), [(2, 8 + 1), (64, 8 + 6), (8192, 8 + 13), (6, 8 + 3)])
@pytest.mark.parametrize("has_offsets", [True, False])
def test_the_last_cpu_and_task_of_a_page(cpus: int, width: int, has_offsets: bool) -> None:
    """CONFIG_NUMA_BALANCING: LAST__PID_SHIFT bits for the task, and those of NR_CPUS."""
    image, words = with_generations(4), -(-cpus // 64)
    if has_offsets:
        image.variable("__per_cpu_offset", f"unsigned long[{cpus}]", VARIABLES)
    else:  # a cpumask has whole words
        image.declare(f"struct cpumask {{ unsigned long bits[{words}]; }};")
        width = 8 + (64 * words - 1).bit_length()
    image.declare("struct task_struct { unsigned long *numa_faults; };")
    assert page_flags(image).generation == FlagBits(NODE_SHIFT - 3 - width - 3, 3)


def test_kernels_that_do_not_balance_nodes() -> None:
    image = with_generations(4)
    image.variable("__per_cpu_offset", "unsigned long[64]", VARIABLES)
    image.declare("struct task_struct { unsigned long flags; };")
    assert page_flags(image).generation == FlagBits(NODE_SHIFT - 3 - 3, 3)


def test_flags_without_room_for_the_last_cpu_and_task() -> None:
    """LAST_CPUPID_NOT_IN_PAGE_FLAGS: it is a member of struct page."""
    image = with_generations(4)
    image.declare(
        """
        struct task_struct { unsigned long *numa_faults; };
        struct page { struct memdesc_flags flags; int _last_cpupid; };
        """
    )
    image.variable("__per_cpu_offset", "unsigned long[64]", VARIABLES)
    assert page_flags(image).generation == FlagBits(NODE_SHIFT - 3 - 3, 3)


@pytest.mark.parametrize("is_struct", [False, True])
@pytest.mark.parametrize("tags", [None, "hw", "sw"])
def test_tags_of_kasan(tags: str | None, is_struct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """KASAN_TAG_WIDTH is 8 bits, and 4 bits of hardware tags since 6.18, which has a struct."""
    monkeypatch.setattr(page_flags_module, "kasan_tags", lambda image: tags)
    image = with_generations(4)
    kind = "struct memdesc_flags" if is_struct else "unsigned long"
    image.declare(f"struct memdesc_flags {{ unsigned long f; }}; struct page {{ {kind} flags; }};")
    width = 0 if tags is None else 4 if tags == "hw" and is_struct else 8
    assert page_flags(image).generation == FlagBits(NODE_SHIFT - 3 - width - 3, 3)
    assert lru_generations(image) == 4


@pytest.mark.parametrize("missing", ["PG_lru", "PG_active", "PG_unevictable", "PG_swapbacked"])
def test_kernels_without_a_flag(missing: str) -> None:
    image = MadeImage()
    image.enum("zone_type", __MAX_NR_ZONES=5)
    flags = {"PG_lru": 4, "PG_active": 5, "PG_unevictable": 20, "PG_swapbacked": 19}
    image.enum("pageflags", **{name: bit for name, bit in flags.items() if name != missing})
    why = f"^enum pageflags has no {missing}: this kernel cannot be read$"
    with pytest.raises(ImageError, match=why):
        page_flags(image)


def test_flags_of_one_bit() -> None:
    found = page_flags(with_zones(2))
    bits = (found.lru, found.active, found.unevictable, found.swapbacked)
    assert bits == (FlagBits(4, 1), FlagBits(5, 1), FlagBits(20, 1), FlagBits(19, 1))
    assert [found.active.get(flags) for flags in (0, 1 << 4, 1 << 5, 1 << 6, -1)] == [0, 0, 1, 0, 1]
    assert FlagBits(3, 2).get(0b11110101) == 0b10
    assert FlagBits(3, 0).get(-1) == 0


def test_kernels_without_the_enumerators() -> None:
    image = MadeImage()
    with pytest.raises(ImageError, match="no __MAX_NR_ZONES"):
        page_flags(image)
    image = MadeImage()
    image.enum("zone_type", __MAX_NR_ZONES=5)
    with pytest.raises(ImageError, match="no PG_lru"):
        page_flags(image)
