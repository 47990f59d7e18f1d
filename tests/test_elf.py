# SPDX-License-Identifier: LGPL-2.1-or-later
"""ELF files made of bytes: both classes, both byte orders, large counts, and damage."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memcg_inspect.elf import PT_LOAD, ElfError, ElfFile, Section, Segment

FORMS = [(wide, order) for wide in (True, False) for order in "<>"]
SEGMENTS = [
    Segment(4, 0x40, 0, 0, 8, 8),
    Segment(PT_LOAD, 0x200, 0xC0001000, 0x1000, 0x30, 0x1000),
]


@dataclass
class Sample:
    """Make ELF files with the layout of elf(5): header, segments, sections, content."""

    wide: bool = True
    order: str = "<"
    #: Whether the counts are in section header 0.
    large: bool = False
    section_type: int = 1

    def data(self, content: bytes = b"content", name: bytes = b".BTF", **fields: int) -> bytes:
        header, phsize, shsize = (64, 56, 64) if self.wide else (52, 32, 40)
        phoff = header
        shoff = phoff + phsize * len(SEGMENTS)
        names = b"\0" + name + b"\0.shstrtab\0"
        names_at = shoff + 3 * shsize
        count, sections, strings = len(SEGMENTS), 3, 2
        zero = (0, 0, 0, 0, 0, sections, strings, count, 0, 0) if self.large else (0,) * 10
        have: dict[str, Any] = {
            "phoff": phoff, "shoff": shoff, "phentsize": phsize,
            "phnum": 0xFFFF if self.large else count, "shentsize": shsize,
            "shnum": 0 if self.large else sections,
            "shstrndx": 0xFFFF if self.large else strings,
        }  # fmt: skip
        have |= fields
        word = "Q" if self.wide else "I"
        out = b"\x7fELF" + bytes([1 + self.wide, 1 + (self.order == ">"), 1]) + bytes(9)
        out += struct.pack(
            f"{self.order}HHI{word * 3}IHHHHHH", 4, 62, 1, 0, have["phoff"], have["shoff"], 0,
            header, have["phentsize"], have["phnum"], have["shentsize"], have["shnum"],
            have["shstrndx"],
        )  # fmt: skip
        for s in SEGMENTS:
            place = (s.offset, s.virtual, s.physical, s.file_size, s.memory_size)
            if self.wide:
                out += struct.pack(f"{self.order}IIQQQQQQ", s.type, 6, *place, 0)
            else:
                out += struct.pack(f"{self.order}IIIIIIII", s.type, *place, 6, 0)
        rows = [
            zero,
            (1, self.section_type, 0, 0, names_at + len(names), len(content), 0, 0, 1, 0),
            (len(name) + 2, 3, 0, 0, names_at, len(names), 0, 0, 1, 0),
        ]
        form = f"{self.order}II{word * 4}II{word * 2}"
        return out + b"".join(struct.pack(form, *row) for row in rows) + names + content


def elf(data: bytes) -> ElfFile:
    return ElfFile(io.BytesIO(data))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("wide", "order"), FORMS)
def test_segments_and_sections(wide: bool, order: str, large: bool) -> None:
    data = Sample(wide, order, large).data()
    file = elf(data)
    assert file.size == len(data)
    assert file.segments() == SEGMENTS
    section = file.section(b".BTF")
    assert section == Section(len(data) - 7, 7)
    assert file.read(section) == b"content"
    assert file.section(b".BT") is None
    assert file.section(b".BTF.ext") is None


def test_a_section_without_bytes_is_none() -> None:
    # objcopy --only-keep-debug leaves the header of .BTF, as SHT_NOBITS
    assert elf(Sample(section_type=8).data()).section(b".BTF") is None


def test_a_file_without_sections() -> None:
    file = elf(Sample().data(shnum=0, shoff=0, shstrndx=0))
    assert file.section(b".BTF") is None
    assert file.segments() == SEGMENTS


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"\x7fELG".ljust(64, b"\0"), "not an ELF file"),
        (b"\x7fELF\x03\x01".ljust(64, b"\0"), "class 3"),
        (b"\x7fELF\x02\x00".ljust(64, b"\0"), "byte order 0"),
        (Sample().data()[:63], "header end at byte 64, the file has 63 bytes"),
    ],
)
def test_not_an_elf_file(data: bytes, message: str) -> None:
    with pytest.raises(ElfError, match=message):
        elf(data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"phoff": 1 << 63}, "program headers end at byte"),
        ({"phnum": 0xFFFE}, "program headers end at byte"),
        ({"phentsize": 55}, "program headers of 55 bytes each, not 56"),
        ({"phentsize": 0}, "program headers of 0 bytes"),
        ({"shoff": (1 << 64) - 1}, "section headers end at byte"),
        ({"shnum": 1000}, "section headers end at byte"),
        ({"shentsize": 63}, "section headers of 63 bytes each, not 64"),
        ({"shstrndx": 3}, "e_shstrndx is 3 of 3 sections"),
        ({"shnum": 2, "shstrndx": 1, "shentsize": 65535}, "section headers end at byte"),
    ],
)
def test_numbers_out_of_the_file_are_refused(fields: dict[str, int], message: str) -> None:
    file = elf(Sample().data(**fields))
    with pytest.raises(ElfError, match=message):
        (file.segments(), file.section(b".BTF"))


def test_a_count_in_section_0_is_checked_as_well() -> None:
    data = bytearray(Sample(large=True).data())
    at = 64 + 2 * 56
    struct.pack_into("<I", data, at + 44, 0xFFFFFFFF)
    with pytest.raises(ElfError, match="4294967295 program headers cannot be right"):
        elf(bytes(data)).segments()
    struct.pack_into("<I", data, at + 44, 100)
    with pytest.raises(ElfError, match="program headers end at byte"):
        elf(bytes(data)).segments()


@pytest.mark.parametrize(("wide", "order"), FORMS)
@pytest.mark.parametrize("large", [False, True])
def test_cut_anywhere(wide: bool, order: str, large: bool) -> None:
    whole = Sample(wide, order, large).data()
    for size in range(len(whole)):
        with pytest.raises(ElfError, match="truncated"):
            elf(whole[:size]).section(b".BTF")


# A busy machine generates cases slowly.
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(large=st.booleans(), changes=st.dictionaries(st.integers(4, 250), st.integers(0, 255)))
def test_damage_is_refused_or_stays_inside(large: bool, changes: dict[int, int]) -> None:
    data = bytearray(Sample(large=large).data(content=bytes(64)))
    for at, value in changes.items():
        data[at] = value
    try:
        file = elf(bytes(data))
        assert len(file.segments()) <= len(data)
        if (section := file.section(b".BTF")) is not None:
            assert section.offset + section.size <= len(data)
            assert len(file.read(section)) == section.size
    except ElfError as error:
        assert str(error) and "\n" not in str(error)
