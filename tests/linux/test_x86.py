# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables of x86-64.

Their format follows from VMCOREINFO, which may be damaged. Entries are written as the Intel SDM
describes those that are present, and as arch/x86/include/asm/pgtable_64.h describes others.
"""

from __future__ import annotations

import pytest
from support.made_memory import BASE, MadeMemory

from memcg_inspect.linux.arch.pgtable import Entry
from memcg_inspect.linux.arch.x86 import X86Geometry, has_pti, is_text_address, x86_geometry
from memcg_inspect.model import ImageError

PRESENT, WRITE, USER, ACCESSED, DIRTY = 1, 1 << 1, 1 << 2, 1 << 5, 1 << 6
HUGE, PROTNONE, SPECIAL, NO_EXEC = 1 << 7, 1 << 8, 1 << 9, 1 << 63
#: What a page has that a process writes to. PAT is where huge pages have HUGE.
FLAGS = PRESENT | WRITE | USER | ACCESSED | DIRTY | NO_EXEC
TABLE = PRESENT | WRITE | USER | ACCESSED
ALL = (1 << 64) - 1

FOUR = X86Geometry(4, 0)


def geometry(text: bytes) -> X86Geometry:
    made = MadeMemory()
    made.write(BASE, text)
    made.variable("VMCOREINFO", made.array(made.char, len(text) + 1), BASE)
    return x86_geometry(made.image)


def levels(text: bytes) -> int:
    return geometry(text).levels


def swap(kind: int, offset: int) -> int:
    """Return a swap entry: bits 59 to 63 are the type, bits 9 to 58 the inverted offset."""
    return kind << 59 | (~offset & (1 << 50) - 1) << 9


def test_levels() -> None:
    assert levels(b"OSRELEASE=7.3\n") == 4
    assert levels(b"NUMBER(pgtable_l5_enabled)=1\nNUMBER(sme_mask)=0\n") == 5
    assert levels(b"NUMBER(sme_mask)=0x800000000000\nNUMBER(pgtable_l5_enabled)=0\n") == 4
    assert levels(b"\xff\xfe\nNUMBER(pgtable_l5_enabled)=1\n") == 5


@pytest.mark.parametrize("number", [b"x", b"0x", b"01", b"9_", b"-a"])
@pytest.mark.parametrize("name", [b"pgtable_l5_enabled", b"sme_mask"])
def test_numbers_that_are_none(name: bytes, number: bytes) -> None:
    with pytest.raises(ImageError, match=rf"^VMCOREINFO is damaged: NUMBER\({name.decode()}\)="):
        levels(b"NUMBER(%s)=%s\n" % (name, number))


def test_a_kernel_without_vmcoreinfo_has_four_levels() -> None:
    assert x86_geometry(MadeMemory().image).levels == 4


def test_lines_that_are_no_numbers_are_none() -> None:
    assert levels(b"NUMBER(pgtable_l5_enabled)\nSYMBOL(pgtable_l5_enabled)=1\n") == 4
    assert levels(b"pgtable_l5_enabled=1\n") == 4


@pytest.mark.parametrize(("number", "physical_bits"), [(4, 46), (5, 52)])
def test_shape(number: int, physical_bits: int) -> None:
    found = X86Geometry(number, 0)
    assert found.page_shift == 12
    assert found.levels_of(None) == number
    assert [found.shift(level) for level in range(1, number + 1)] == [12, 21, 30, 39, 48][:number]
    assert [found.pages_of(level) for level in (1, 2, 3)] == [1, 512, 512 * 512]
    # Half of the table at the top maps user space, and all of the others.
    assert [found.length(level, level == number) for level in (1, 2, number)] == [512, 512, 256]
    assert found.length(number - 1, False) == 512
    assert found.kernel == 256
    assert found.uncounted == 0
    assert found.kernel_base() + (512 << found.shift(number)) == 1 << 64
    assert found.swap_pfn_mask == (1 << physical_bits) - 1 >> 12


def test_ptes() -> None:
    page = 0x8_1234_5678_9000
    entries = [
        *(page | FLAGS, 0, page + 0x1000 | FLAGS | HUGE, page | FLAGS | SPECIAL),
        *(ACCESSED | DIRTY, ACCESSED, ~(page + 0x3000) & ALL & ~0xFFF | PROTNONE),
        swap(31, 0x1234567) | WRITE | USER | 1 << 3,
    ]
    assert FOUR.plain_pfns(entries) == [page >> 12, (page >> 12) + 1]
    assert list(FOUR.other_entries(entries)) == [
        Entry("special", page >> 12),
        Entry("page", (page >> 12) + 3),
        Entry("swap", type=31, offset=0x1234567),
    ]
    assert [FOUR.is_valid(entry) for entry in entries] == [True, False, True, True, *[False] * 4]


def test_the_page_of_a_pte_is_not_rounded() -> None:
    hidden, odd = 0x12345000 | FLAGS | SPECIAL, ~0x6789_1000 & ALL & ~0xFFF | PROTNONE
    assert list(FOUR.other_entries([hidden, odd])) == [
        Entry("special", 0x12345),
        Entry("page", 0x67891),
    ]


def test_upper_entries() -> None:
    table = 0x8_1234_5678_9000
    for level in (2, 3, 4):
        assert FOUR.entry(table | TABLE, level) == Entry("table", table >> 12)
        assert FOUR.entry(table | TABLE | NO_EXEC, level) == Entry("table", table >> 12)
        # Some processors set these bits of empty entries.
        for empty in (0, ACCESSED, DIRTY, ACCESSED | DIRTY):
            assert FOUR.entry(empty, level) is None


@pytest.mark.parametrize(("level", "size"), [(2, 1 << 21), (3, 1 << 30)])
def test_huge_pages(level: int, size: int) -> None:
    page = 5 * size
    pat = 1 << 12  # where the address of a small page begins
    assert FOUR.entry(page | FLAGS | HUGE | pat, level) == Entry("page", page >> 12)
    assert FOUR.entry(page | FLAGS | HUGE | SPECIAL, level) == Entry("special", page >> 12)
    inverted = ~page & ALL & -size & (1 << 52) - 1
    assert FOUR.entry(inverted | HUGE | PROTNONE, level) == Entry("page", page >> 12)
    # While a huge page is split, HUGE is all that tells that it is present.
    assert FOUR.entry(inverted | HUGE, level) == Entry("page", page >> 12)
    assert FOUR.entry(swap(30, 77), level) == Entry("swap", type=30, offset=77)


def test_a_small_page_is_not_present_by_the_bit_of_huge_ones() -> None:
    [found] = FOUR.other_entries([swap(1, 2) | HUGE])
    assert found == Entry("swap", type=1, offset=2)


@pytest.mark.parametrize("number", [0, 1, 17, 31])
@pytest.mark.parametrize("offset", [0, 1, 0x1234567, (1 << 50) - 1])
def test_swap_entries(number: int, offset: int) -> None:
    entry = swap(number, offset) | 1 << 1 | 1 << 2 | 1 << 3  # soft-dirty, uffd, exclusive
    assert list(FOUR.other_entries([entry])) == [Entry("swap", type=number, offset=offset)]
    assert FOUR.entry(entry, 2) == Entry("swap", type=number, offset=offset)


def test_the_bit_of_encrypted_memory_is_no_part_of_an_address() -> None:
    found = geometry(b"NUMBER(sme_mask)=0x800000000000\n")
    page, encrypted = 0x1234_5678_9000, 1 << 47
    assert found.plain_pfns([page | encrypted | FLAGS]) == [page >> 12]
    assert FOUR.plain_pfns([page | encrypted | FLAGS]) == [(page | encrypted) >> 12]
    assert found.entry(page | encrypted | TABLE, 4) == Entry("table", page >> 12)


def test_the_bits_above_the_address_are_no_part_of_it() -> None:
    """They are ignored, or protection keys."""
    page = 0xF_FFFF_FFFF_F000
    assert FOUR.plain_pfns([page | FLAGS | 0x7FF << 52]) == [page >> 12]


def test_feature_bits_tell_whether_there_are_tables_for_user_space() -> None:
    made = MadeMemory()
    assert not has_pti(made.image)
    features = made.array(made.int, 20)
    made.variable("boot_cpu_data", made.struct("cpuinfo_x86", [("x86_capability", features)]), BASE)
    for word in range(20):
        for bit in range(31):
            made.write(BASE + 4 * word, 1 << bit, 4)
            assert has_pti(made.image) == (32 * word + bit == 7 * 32 + 11)
        made.write(BASE + 4 * word, 0, 4)


def test_code_is_in_the_last_two_gigabytes() -> None:
    assert is_text_address(0xFFFFFFFF80000000)
    assert is_text_address(0xFFFFFFFFFFFFFFFF)
    assert not is_text_address(0xFFFFFFFF7FFFFFFF)
    assert not is_text_address(0)


def test_the_first_page_is_no_empty_entry() -> None:
    assert FOUR.entry(PRESENT, 4) == Entry("table", 0)
    assert FOUR.plain_pfns([PRESENT]) == [0]
    assert list(FOUR.other_entries([PRESENT, PRESENT | SPECIAL])) == [Entry("special", 0)]


def test_what_an_entry_does_not_have_is_zero() -> None:
    assert FOUR.entry(0x5000 | TABLE, 2) == ("table", 5, 0, 0)
    assert FOUR.entry(5 << 21 | FLAGS | HUGE, 2) == ("page", 5 << 9, 0, 0)
    assert FOUR.entry(swap(3, 4), 2) == ("swap", 0, 3, 4)


def test_entries_are_words() -> None:
    words = [0x8000000012345067, 0, ALL]
    data = b"".join(word.to_bytes(8, "little") for word in words)
    assert FOUR.words(MadeMemory().image.memory, data) == words
