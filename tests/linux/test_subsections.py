# SPDX-License-Identifier: LGPL-2.1-or-later
"""Sections of memory that were added after boot are valid in part."""

from __future__ import annotations

from support.made_memory import BASE, MadeMemory

from memcg_inspect.linux.mm import mmzone
from memcg_inspect.linux.mm.mmzone import PageRange

#: Of x86-64: sections of 128 MiB, subsections of 2 MiB.
SECTION, SUBSECTION = 1 << 15, 1 << 9
#: SECTION_MARKED_PRESENT, SECTION_HAS_MEM_MAP, SECTION_IS_ONLINE, SECTION_IS_EARLY
PRESENT, EARLY = 0b0111, 0b1111


def test_page_frames_of_sections() -> None:
    """One of before boot, one that is half there, one that is offline, one that was added."""
    made, at, usage = MadeMemory(), BASE + 0x1000, BASE + 0x2000
    bitmap = made.array(made.word, 1)
    made.struct(
        "mem_section_usage", [("rcu", made.array(made.word, 2)), ("subsection_map", bitmap)]
    )
    type_ = made.struct("mem_section", [("section_mem_map", made.word), ("usage", made.word)])
    roots = made.variable("mem_section", made.array(type_, 4), at)
    made.write(made.variable("__highest_present_section_nr", made.word, BASE + 8).address_ or 0, 3)
    made.constant("SECTION_SIZE_BITS", 27)
    made.constant("PAGE_SHIFT", 12)
    for number, (flags, bits) in enumerate(
        [(EARLY, 0), (PRESENT, 1 | 1 << 63), (PRESENT & ~4, -1), (PRESENT, 1 << 32)]
    ):
        made.write(at + 16 * number, flags)
        made.write(at + 16 * number + 8, usage + 32 * number)
        made.write(usage + 32 * number + 16, bits & (1 << 64) - 1)
    assert list(mmzone._online_ranges(made.image, roots)) == [
        PageRange(0, SECTION),
        PageRange(SECTION, SECTION + SUBSECTION),
        PageRange(2 * SECTION - SUBSECTION, 2 * SECTION),
        PageRange(3 * SECTION + SECTION // 2, 3 * SECTION + SECTION // 2 + SUBSECTION),
    ]
