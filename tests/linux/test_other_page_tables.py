# SPDX-License-Identifier: LGPL-2.1-or-later
"""Entries of the page tables of s390 and powerpc, put together as the kernel's macros do."""

from __future__ import annotations

import pytest

from memcg_inspect.linux.arch.pgtable import Entry
from memcg_inspect.linux.arch.powerpc import PowerpcGeometry
from memcg_inspect.linux.arch.s390 import S390Geometry

S390 = S390Geometry(46)
#: With pages of 64 KiB, in radix mode.
POWER = PowerpcGeometry(16, (5, 9, 9, 13), 51)


def test_s390_tables() -> None:
    assert [S390.shift(level) for level in range(1, 6)] == [12, 20, 31, 42, 53]
    assert [S390.length(level, False) for level in (1, 2, 5)] == [256, 2048, 2048]
    assert S390.pages_of(2) == 256


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
