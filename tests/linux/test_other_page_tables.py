# SPDX-License-Identifier: LGPL-2.1-or-later
"""Entries of the page tables of s390 and powerpc, put together as the kernel's macros do."""

from __future__ import annotations

import pytest
from drgn import Architecture, Object, Platform, PlatformFlags
from support.made_memory import BASE, MadeMemory

from memcg_inspect.linux.arch.pgtable import Entry
from memcg_inspect.linux.arch.powerpc import PowerpcGeometry, powerpc_geometry, table_bits
from memcg_inspect.linux.arch.s390 import S390Geometry, s390_geometry
from memcg_inspect.model import ImageError

S390 = S390Geometry(46)
#: With pages of 64 KiB, in radix mode.
POWER = PowerpcGeometry(16, (5, 9, 9, 13), 51)


def test_s390_tables() -> None:
    assert [S390.shift(level) for level in range(1, 6)] == [12, 20, 31, 42, 53]
    assert [S390.length(level, False) for level in (1, 2, 5)] == [256, 2048, 2048]
    assert S390.pages_of(2) == 256


@pytest.mark.parametrize(("of_asce", "levels"), [(0x0, 2), (0x4, 3), (0x8, 4), (0xC, 5)])
def test_s390_levels_are_those_of_a_process(of_asce: int, levels: int) -> None:
    made = MadeMemory()
    context = made.struct("mm_context_t", [("asce", made.word)])
    mm = made.at(made.struct("mm_struct", [("context", context)]), BASE)
    made.write(BASE, 0x12345000 | 0x33 | of_asce)  # with other bits, and a length
    assert S390.levels_of(mm) == levels


def test_s390_entries_of_swap_may_be_any_page_frame() -> None:
    assert S390.swap_pfn_mask == (1 << 34) - 1
    assert S390Geometry(42).swap_pfn_mask == (1 << 30) - 1
    assert S390.page_shift == 12
    assert S390.uncounted == 2


def test_s390_memory_that_vmcoreinfo_does_not_bound() -> None:
    made = MadeMemory()
    assert s390_geometry(made.image).swap_pfn_mask == (1 << 46) - 1 >> 12
    made = MadeMemory()
    text = b"NUMBER(MAX_PHYSMEM_BITS)=42\n"
    made.write(BASE, text)
    made.variable("VMCOREINFO", made.array(made.char, len(text) + 1), BASE)
    assert s390_geometry(made.image).swap_pfn_mask == (1 << 42) - 1 >> 12


def test_s390_ptes() -> None:
    present, special, invalid, protect = 0x001, 0x040, 0x400, 0x200
    page = 0x1234 << 12 | present | 0x3C
    without_access = 0x1235 << 12 | present | invalid | protect
    hidden = 0x1236 << 12 | present | special
    swap = invalid | protect | 77 << 12 | 3 << 2
    entries = [page, invalid, without_access, hidden, swap, 0]
    assert S390.plain_pfns(entries) == [0x1234, 0x1235]
    assert list(S390.other_entries(entries)) == [
        Entry("special", 0x1236),
        Entry("swap", type=3, offset=77),
    ]


@pytest.mark.parametrize(
    ("entry", "level", "found"),
    [
        (0x20, 2, None),
        (0x24, 3, None),
        # the second table of PTEs of a page
        (0x12345800 | 0x1, 2, Entry("table", 0x12345, offset=0x800)),
        (0x12344000 | 0x7, 3, Entry("table", 0x12344)),
        (0x1234 << 20 | 0x400 | 0xC001, 2, Entry("page", 0x123400)),
        (5 << 31 | 0x400 | 0x7, 3, Entry("page", 5 << 19)),
        # only segments and regions of 2 GiB can be huge
        (0x12344000 | 0x400 | 0xB, 4, Entry("table", 0x12344)),
        # only tables of PTEs share a page
        (0x12344800 | 0x7, 3, Entry("table", 0x12344)),
        (0x12344000 | 0x20 | 0x1, 2, None),
        # without access, up to 6.12
        (0x1234 << 20 | 0x400 | 0x220, 2, Entry("page", 0x123400)),
        # a huge page under migration
        (77 << 12 | 31 << 5 | 0x10 | 0x20, 2, Entry("swap", type=31, offset=77)),
    ],
)
def test_s390_upper_entries(entry: int, level: int, found: Entry | None) -> None:
    assert S390.entry(entry, level) == found


def test_powerpc_tables() -> None:
    assert [POWER.shift(level) for level in range(1, 5)] == [16, 21, 30, 39]
    assert [POWER.length(level, level == 4) for level in range(1, 5)] == [32, 512, 512, 8192]
    assert POWER.pages_of(2) == 32


def test_powerpc_tables_are_those_of_all_processes() -> None:
    assert POWER.levels_of(Object(MadeMemory().prog, "void *", 0)) == 4
    assert POWER.page_shift == 16
    assert POWER.uncounted == 0
    assert POWER.swap_pfn_mask == (1 << 51) - 1 >> 16


def test_powerpc_entries_are_big_endian() -> None:
    data = bytes.fromhex("c0000000123400ff 0000000000000000 0102030405060708")
    assert POWER.words(MadeMemory().image.memory, data) == [
        0xC0000000123400FF,
        0,
        0x0102030405060708,
    ]


def test_powerpc_bits_around_the_address_are_no_part_of_it() -> None:
    """Protection, and what the kernel keeps above the address: _PAGE_PA_MAX is 53."""
    present, pte = 1 << 63, 1 << 62
    page = 0x1234_5678_9ABD << 16 & (1 << 53) - 1
    around = 0x1F << 53 | 0xFF | 0x800 | 0x200 | 0x100
    assert POWER.plain_pfns([page | present | pte | around]) == [page >> 16]
    assert POWER.entry(page | present | pte | around, 3) == Entry("page", page >> 30 << 14)
    assert list(POWER.other_entries([0x1235 << 16 | present | pte | 0x400 | around])) == [
        Entry("special", 0x1235)
    ]
    assert POWER.entry(present | 0xFF | 1 << 62 - 1, 2) == Entry("table", 1 << 45)


def power(page_shift: int, bits: tuple[int, ...], text: bytes = b"") -> MadeMemory:
    """Return a machine with these bits of the number of entries of tables."""
    flags = PlatformFlags.IS_64_BIT | PlatformFlags.IS_LITTLE_ENDIAN
    made = MadeMemory(Platform(Architecture.PPC64, flags))
    made.constant("PAGE_SHIFT", page_shift)
    for at, (level, number) in enumerate(zip(("pte", "pmd", "pud", "pgd"), bits, strict=True)):
        made.write(BASE + 8 * at, number)
        made.symbol(f"__{level}_index_size", BASE + 8 * at, 8)
    if text:
        made.write(BASE + 64, text)
        made.variable("VMCOREINFO", made.array(made.char, len(text) + 1), BASE + 64)
    return made


@pytest.mark.parametrize(
    ("page_shift", "bits", "physical_bits"),
    [
        (16, (5, 9, 9, 13), 51),  # radix
        (16, (8, 10, 10, 8), 51),  # hash
        (12, (9, 9, 9, 13), 46),
        (12, (9, 7, 9, 9), 46),
    ],
)
def test_powerpc_tables_of_each_mode(
    page_shift: int, bits: tuple[int, ...], physical_bits: int
) -> None:
    found = powerpc_geometry(power(page_shift, bits).image)
    assert [found.length(level, level == 4) for level in range(1, 5)] == [1 << b for b in bits]
    assert [found.shift(level) for level in range(1, 5)] == [
        page_shift,
        page_shift + bits[0],
        page_shift + bits[0] + bits[1],
        page_shift + bits[0] + bits[1] + bits[2],
    ]
    assert found.page_shift == page_shift
    assert found.swap_pfn_mask == (1 << physical_bits) - 1 >> page_shift
    told = powerpc_geometry(power(page_shift, bits, b"NUMBER(MAX_PHYSMEM_BITS)=44\n").image)
    assert told.swap_pfn_mask == (1 << 44) - 1 >> page_shift


@pytest.mark.parametrize("number", [0, 14, 64, 1 << 63])
def test_powerpc_tables_of_an_impossible_size(number: int) -> None:
    made = power(16, (5, 9, 9, number))
    assert table_bits(made.image, "__pte_index_size") == 5
    with pytest.raises(ImageError, match=f"^__pgd_index_size cannot be {number}$"):
        powerpc_geometry(made.image)


def test_powerpc_tables_whose_size_is_not_in_the_image() -> None:
    made = power(16, (1, 13, 9, 9))
    assert [table_bits(made.image, f"__{name}_index_size") for name in ("pte", "pmd")] == [1, 13]
    made.symbol("__missing", BASE - 8, 8)
    with pytest.raises(ImageError, match="^__missing cannot be read: "):
        table_bits(made.image, "__missing")


def test_powerpc_ptes() -> None:
    present, pte, invalid, special = 1 << 63, 1 << 62, 1 << 61, 0x400
    page = 0x1234 << 16 | present | pte | 0x100
    changing = 0x1235 << 16 | invalid | pte
    hidden = 0x1236 << 16 | present | pte | special
    swap = pte | 77 << 16 | 3
    hash_bits_alone = 0xF000
    entries = [page, 0, changing, hidden, swap, hash_bits_alone]
    assert POWER.plain_pfns(entries) == [0x1234]
    assert list(POWER.other_entries(entries)) == [
        Entry("page", 0x1235),
        Entry("special", 0x1236),
        Entry("swap", type=3, offset=77),
    ]


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        (0, None),
        (1 << 63 | 0x12345600 | 5, Entry("table", 0x1234, offset=0x5600)),
        (3 << 62 | 0x1240 << 16, Entry("page", 0x1240)),
        (1 << 62 | 77 << 16 | 31, Entry("swap", type=31, offset=77)),
    ],
)
def test_powerpc_upper_entries(entry: int, found: Entry | None) -> None:
    assert POWER.entry(entry, 2) == found
