# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables of arm64 with each size of pages and addresses.

Entries are written as the Arm Architecture Reference Manual describes descriptors of stage 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.made_memory import BASE, MadeMemory

from memcg_inspect.image.image import Image
from memcg_inspect.linux.arch.arm64 import Arm64Geometry, arm64_geometry, is_module_address
from memcg_inspect.linux.arch.pgtable import Entry
from memcg_inspect.linux.arch.processor import code_addresses
from memcg_inspect.model import ImageError

#: AF, inner shareable, not global: what user pages have.
FLAGS = 1 << 10 | 3 << 8 | 1 << 11
#: The same with LPA2, whose entries have no shareability.
FLAGS_LPA2 = 1 << 10 | 1 << 11
SPECIAL = 1 << 56


def image(numbers: Mapping[str, object], page_shift: int = 12, new: bool = True) -> Image:
    """
    Return an image with these numbers in VMCOREINFO.

    :param new: whether page types are enumerators, as since 6.10
    """
    made = MadeMemory()
    text = "".join(f"NUMBER({name})={value}\n" for name, value in numbers.items()).encode()
    made.write(BASE, text)
    made.variable("VMCOREINFO", made.array(made.char, len(text) + 1), BASE)
    made.constant("PAGE_SHIFT", page_shift)
    if new:
        made.constant("PGTY_buddy", 0xF0)
    return made.image


def geometry(
    page_shift: int, built: int, actual: int, new: bool = True, physical: int = 0
) -> Arm64Geometry:
    numbers = {
        "VA_BITS": built,
        "TCR_EL1_T1SZ": hex(64 - actual),
        "MAX_PHYSMEM_BITS": physical or (52 if built == 52 else 48),
    }
    return arm64_geometry(image(numbers, page_shift, new))


@pytest.mark.parametrize(
    ("page_shift", "built", "actual", "levels", "top"),
    [
        (12, 39, 39, 3, 512),
        (12, 48, 48, 4, 512),
        (12, 52, 52, 5, 16),
        (12, 52, 48, 4, 512),  # without LPA2
        (14, 36, 36, 2, 2048),
        (14, 47, 47, 3, 2048),
        (14, 48, 48, 4, 2),
        (14, 52, 52, 4, 32),
        (14, 52, 47, 3, 2048),  # without LPA2
        (16, 42, 42, 2, 8192),
        (16, 48, 48, 3, 64),
        (16, 52, 52, 3, 1024),
        (16, 52, 48, 3, 1024),  # without LVA: the last 64 entries
    ],
)
def test_levels(page_shift: int, built: int, actual: int, levels: int, top: int) -> None:
    found = geometry(page_shift, built, actual)
    assert (found.levels, found.top, found.user, found.kernel) == (levels, top, top, 0)
    assert found.entries == 1 << page_shift - 3
    assert found.pages_of(1) == 1
    assert found.pages_of(2) == found.entries
    # The last entry maps the end of the address space.
    step = 1 << found.shift(levels)
    assert found.kernel_base() + found.top * step == 1 << 64


def test_addresses_with_48_bits() -> None:
    found = geometry(12, 48, 48)
    page = 0x8123_4567_9000
    assert found.plain_pfns([page | FLAGS | 3]) == [page >> 12]
    assert found.entry(page | 3, 4) == Entry("table", page >> 12)
    assert found.entry(page | 3, 2) == Entry("table", page >> 12)
    huge = page >> 21 << 21
    assert found.entry(huge | FLAGS | 1, 2) == Entry("page", huge >> 12)
    assert found.entry(0, 3) is None


@pytest.mark.parametrize("page_shift", [12, 14])
def test_addresses_with_lpa2(page_shift: int) -> None:
    """Bits 50 and 51 of the address are where the shareability was."""
    found = geometry(page_shift, 52, 52)
    page = 0xD_8123_4567_8000 >> page_shift << page_shift
    entry = page & (1 << 50) - 1 | page >> 50 << 8
    assert found.plain_pfns([entry | FLAGS_LPA2 | 3]) == [page >> page_shift]
    # The same kernel on a processor without LPA2.
    before = geometry(page_shift, 52, 48 if page_shift == 12 else 47)
    page &= (1 << 48) - 1
    assert before.plain_pfns([page | FLAGS | 3]) == [page >> page_shift]


@pytest.mark.parametrize(("built", "actual"), [(48, 48), (52, 52), (52, 48)])
def test_addresses_with_large_pages(built: int, actual: int) -> None:
    """Bits 48 to 51 of the address are in bits 12 to 15, which are 0 on kernels for 48 bits."""
    found = geometry(16, built, actual)
    page = 0xA_8123_4567_0000 if built == 52 else 0x8123_4567_0000
    entry = page & (1 << 48) - 1 | page >> 48 << 12
    assert found.plain_pfns([entry | FLAGS | 3]) == [page >> 16]


def test_the_bits_around_the_address_are_no_part_of_it() -> None:
    """Guarded, dirty, contiguous, execute-never, and bits that software may use."""
    above = 1 << 50 | 1 << 51 | 1 << 52 | 1 << 53 | 1 << 54 | 1 << 55
    below = 0b111 << 2 | 1 << 5 | 1 << 6 | 1 << 7
    page = 0x1_2345_7000
    for built, actual in ((48, 48), (52, 52)):
        found = geometry(12, built, actual)
        assert found.plain_pfns([page | FLAGS_LPA2 | above | below | 3]) == [page >> 12]
        assert found.entry(page | 1 << 59 | 1 << 63 | 3, 2) == Entry("table", page >> 12)
        assert found.entry(page | 1 << 59 | 1 << 63 | 3, 4) == ("table", page >> 12, 0, 0)


def test_valid_entries() -> None:
    found = geometry(12, 48, 48)
    assert [found.is_valid(entry) for entry in (0x5003, 0x5001, 1, 0, 2, 0x5800)] == [
        *[True] * 3,
        *[False] * 3,
    ]


def test_the_number_of_levels_is_that_of_all_processes() -> None:
    found = geometry(14, 47, 47)
    assert found.levels_of(None) == 3
    assert found.page_shift == 14
    assert [found.length(level, level == 3) for level in (1, 2, 3)] == [2048] * 3
    assert [geometry(16, 42, 42).length(level, level == 2) for level in (1, 2)] == [8192, 8192]
    assert [geometry(14, 48, 48).length(level, level == 4) for level in (1, 3, 4)] == [
        2048,
        2048,
        2,
    ]


def test_entries_that_are_not_valid_have_bits_of_no_meaning() -> None:
    """__swp_offset() takes 50 bits, and pte_present() looks at one bit."""
    new, old = geometry(12, 48, 48), geometry(12, 48, 48, new=False)
    swap = Entry("swap", type=3, offset=77)
    assert list(new.other_entries([3 << 6 | 77 << 12 | 3 << 62])) == [swap]
    assert new.entry(3 << 6 | 77 << 12 | 3 << 62, 2) == swap
    assert list(old.other_entries([3 << 3 | 77 << 8 | 1 << 59])) == [swap]
    assert old.entry(3 << 3 | 77 << 8 | 1 << 60, 2) == swap
    huge = 0x1_2340_0000
    assert old.entry(huge | 1 << 58, 2) == Entry("page", huge >> 12)


def test_only_huge_pages_are_rounded() -> None:
    odd, new, old = 0x1_2345_7000, geometry(12, 48, 48), geometry(12, 48, 48, new=False)
    assert list(new.other_entries([odd | SPECIAL | 3, odd | 1 << 11])) == [
        Entry("special", odd >> 12),
        Entry("page", odd >> 12),
    ]
    assert list(old.other_entries([odd | 1 << 58])) == [Entry("page", odd >> 12)]
    assert new.entry(odd | SPECIAL | 1, 2) == Entry("special", odd >> 21 << 9)


def test_pages_that_are_not_plain() -> None:
    found = geometry(12, 48, 48)
    page = 0x1_2345_6000
    special = page | FLAGS | SPECIAL | 3
    assert found.plain_pfns([special, 0]) == []
    assert list(found.other_entries([special, 0, page | FLAGS | 3])) == [
        Entry("special", page >> 12)
    ]
    # Without access: invalid, and present all the same (PTE_NG).
    none = page | 1 << 10 | 1 << 11
    assert list(found.other_entries([none])) == [Entry("page", page >> 12)]
    old = geometry(12, 48, 48, new=False)
    assert list(old.other_entries([page | 1 << 58])) == [Entry("page", page >> 12)]
    # PMD_PRESENT_INVALID, of tables above those of PTEs.
    huge = 0x1_2340_0000
    assert old.entry(huge | 1 << 59, 2) == Entry("page", huge >> 12)
    assert found.entry(huge | 1 << 11, 2) == Entry("page", huge >> 12)


@pytest.mark.parametrize("number", [0, 1, 17, 31])
@pytest.mark.parametrize("offset", [0, 1, 0x1234567, (1 << 50) - 1])
def test_swap_entries(number: int, offset: int) -> None:
    exclusive = 1 << 2
    new, old = geometry(12, 52, 52), geometry(12, 48, 48, new=False)
    entry = number << 6 | offset << 12 | exclusive
    assert list(new.other_entries([entry])) == [Entry("swap", type=number, offset=offset)]
    assert new.entry(entry, 2) == Entry("swap", type=number, offset=offset)
    entry = number << 3 | offset << 8 | exclusive
    assert list(old.other_entries([entry])) == [Entry("swap", type=number, offset=offset)]
    assert new.swap_pfn_mask == (1 << 40) - 1
    assert old.swap_pfn_mask == (1 << 36) - 1


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"VA_BITS": 48},
        {"VA_BITS": 48, "TCR_EL1_T1SZ": "0x10"},
        {"VA_BITS": 48, "TCR_EL1_T1SZ": "x", "MAX_PHYSMEM_BITS": 48},
        {"VA_BITS": 64, "TCR_EL1_T1SZ": 0, "MAX_PHYSMEM_BITS": 48},
        {"VA_BITS": 48, "TCR_EL1_T1SZ": 12, "MAX_PHYSMEM_BITS": 48},
        {"VA_BITS": 48, "TCR_EL1_T1SZ": 60, "MAX_PHYSMEM_BITS": 48},
        {"VA_BITS": 48, "TCR_EL1_T1SZ": 16, "MAX_PHYSMEM_BITS": 1 << 40},
        {"VA_BITS": 48, "TCR_EL1_T1SZ": 16, "MAX_PHYSMEM_BITS": 12},
        {"VA_BITS": -1, "TCR_EL1_T1SZ": 65, "MAX_PHYSMEM_BITS": 48},
    ],
)
def test_damaged_vmcoreinfo(numbers: dict[str, object]) -> None:
    with pytest.raises(ImageError, match="^VMCOREINFO"):
        arm64_geometry(image(numbers))


@pytest.mark.parametrize(
    ("built", "actual", "physical"),
    [(36, 35, 48), (48, 35, 48), (53, 48, 48), (53, 53, 52), (48, 49, 48), (48, 48, 53)],
)
def test_addresses_of_impossible_sizes(built: int, actual: int, physical: int) -> None:
    with pytest.raises(ImageError, match="^VMCOREINFO is damaged: pages of"):
        geometry(14, built, actual, physical=physical)


@pytest.mark.parametrize(("page_shift", "physical"), [(12, 12), (14, 14), (16, 16)])
def test_memory_of_one_page_is_impossible(page_shift: int, physical: int) -> None:
    with pytest.raises(ImageError, match="^VMCOREINFO is damaged"):
        geometry(page_shift, 48, 48, physical=physical)
    assert geometry(page_shift, 48, 48, physical=physical + 1).swap_pfn_mask == 1


@pytest.mark.parametrize("page_shift", [0, 13, 40])
def test_pages_of_an_impossible_size(page_shift: int) -> None:
    with pytest.raises(ImageError, match="^VMCOREINFO is damaged: pages of"):
        geometry(page_shift, 48, 48)


def test_addresses_of_modules() -> None:
    found = image({"MODULES_VADDR": "0xffff800000000000", "MODULES_END": "0xffff800080000000"})
    assert is_module_address(found, 0xFFFF800000000000)
    assert is_module_address(found, 0xFFFF80007FFFFFFF)
    assert not is_module_address(found, 0xFFFF800080000000)
    assert not is_module_address(found, 0xFFFF7FFFFFFFFFFF)
    assert not is_module_address(image({}), 0xFFFF800000000000)
    assert not is_module_address(image({}), 0)
    to_the_end = image({"MODULES_VADDR": "0xffff800000000000", "MODULES_END": 1 << 64})
    assert is_module_address(to_the_end, (1 << 64) - 1)
    beyond = image({"MODULES_VADDR": "0xffff800000000000", "MODULES_END": (1 << 64) + 1})
    assert not is_module_address(beyond, 0xFFFF800000000000)
    assert not is_module_address(image({"MODULES_VADDR": "x"}), 0xFFFF800000000000)


def test_return_addresses_lose_their_signatures() -> None:
    """All bits above the address are signature, except bit 55."""
    plain, mask = 0xFFFF8000_80012344, 0xFF7F << 48
    signed, user = plain & ~mask | 0x3A15 << 48, 0x0000_FFFF_1234_5678
    found = image({"KERNELPACMASK": hex(mask)})
    assert list(code_addresses(found, [signed | 1 << 55, plain, user, 5])) == [
        plain,
        plain,
        user,
        5,
    ]
    assert list(code_addresses(image({}), [signed, plain])) == [signed, plain]
    assert list(code_addresses(image({"KERNELPACMASK": "?"}), [signed])) == [signed]
