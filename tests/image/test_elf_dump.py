# SPDX-License-Identifier: LGPL-2.1-or-later
"""ELF dumps from which makedumpfile excluded pages, and truncated ones."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from drgn import Architecture as Arch
from drgn import FaultError, Platform, Program

from memcg_inspect.elf import ElfError
from memcg_inspect.image.elf import LEFT_OUT, cut_short, has_holes, hide_holes

VIRTUAL, PHYSICAL = 0xFFFF888000001000, 0x1000


def dump(path: Path, in_file: int, in_memory: int) -> Path:
    """Write a core file of one PT_LOAD segment at offset 0x1000."""
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 4, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 6, 0x1000, VIRTUAL, PHYSICAL, in_file, in_memory, 0)
    path.write_bytes((header + load).ljust(0x1000, b"\0") + b"x" * in_file)
    return path


def program() -> Program:
    """Return a program whose memory reads as zeroes, as drgn fills up a segment."""
    prog = Program(Platform(Arch.X86_64))
    for start, physical in ((PHYSICAL, True), (VIRTUAL, False)):
        prog.add_memory_segment(start, 0x3000, lambda _, n, __, ___: bytes(n), physical)
    return prog


def test_excluded_pages_are_faults(tmp_path: Path) -> None:
    prog = program()
    hide_holes(prog, str(dump(tmp_path / "core", 0x1000, 0x3000)))
    assert has_holes(prog)
    assert prog.read(VIRTUAL, 0x1000) == prog.read(PHYSICAL, 0x1000, True) == bytes(0x1000)
    for address, physical in ((VIRTUAL + 0x1000, False), (PHYSICAL + 0x2FFF, True)):
        with pytest.raises(FaultError, match=LEFT_OUT) as caught:
            prog.read(address, 1, physical)
        assert caught.value.address == address


def test_a_dump_of_all_pages_has_none(tmp_path: Path) -> None:
    prog = program()
    hide_holes(prog, str(dump(tmp_path / "core", 0x3000, 0x3000)))
    assert not has_holes(prog)
    assert prog.read(VIRTUAL, 0x3000) == bytes(0x3000)


def test_other_formats_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "core").write_bytes(b"KDUMP   ".ljust(4096, b"\0"))
    prog = program()
    hide_holes(prog, str(tmp_path / "core"))
    assert not has_holes(prog)
    assert cut_short(str(tmp_path / "core")) is None


def test_truncated_dumps(tmp_path: Path) -> None:
    whole = dump(tmp_path / "whole", 0x2000, 0x2000)
    assert cut_short(str(whole)) is None
    assert cut_short(str(tmp_path / "missing")) is None
    short = tmp_path / "short"
    short.write_bytes(whole.read_bytes()[:0x1800])
    assert cut_short(str(short)) == "the file is truncated: it has 6,144 bytes of 12,288"
    short.write_bytes(whole.read_bytes()[:100])
    said = cut_short(str(short))
    assert said is not None and said.startswith("the file is truncated or damaged: program headers")
    with pytest.raises(ElfError, match="truncated"):
        hide_holes(program(), str(short))
