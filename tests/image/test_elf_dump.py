# SPDX-License-Identifier: LGPL-2.1-or-later
"""ELF dumps from which makedumpfile excluded pages, and truncated ones."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from drgn import Architecture as Arch
from drgn import FaultError, FindObjectFlags, Object, Platform, Program

from memcg_inspect.elf import ElfError
from memcg_inspect.image.elf import (
    LEFT_OUT,
    UNMAPPED,
    check_elf,
    cut_short,
    has_holes,
    hide_holes,
    unmap_low_addresses,
)
from memcg_inspect.image.flattened import begins_with
from memcg_inspect.image.opened import prepare
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.model import ImageError

VIRTUAL, PHYSICAL = 0xFFFF888000001000, 0x1000


def dump(
    path: Path,
    in_file: int,
    in_memory: int,
    virtual: int = VIRTUAL,
    physical: int = PHYSICAL,
    offset: int = 0x1000,
) -> Path:
    """Write a core file of one PT_LOAD segment."""
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 4, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 6, offset, virtual, physical, in_file, in_memory, 0)
    path.write_bytes((header + load).ljust(0x1000, b"\0") + b"x" * min(in_file, 0x4000))
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


@pytest.mark.parametrize(
    "segment",
    [
        {"offset": 1 << 63},
        {"offset": (1 << 63) - 0x2000},
        {"in_file": 1 << 63},
        {"in_memory": 1 << 63},
        {"in_memory": (1 << 63) + 1},
        {"physical": (1 << 64) - 0x1000},
        {"virtual": (1 << 64) - 0x1000},
    ],
)
def test_segments_that_no_machine_has(tmp_path: Path, segment: dict[str, int]) -> None:
    core = dump(tmp_path / "core", **{"in_file": 0x3000, "in_memory": 0x3000} | segment)
    with pytest.raises(ElfError, match="a segment"):
        check_elf(str(core))
    with pytest.raises(ImageError, match="core cannot be opened: a segment"):
        open_program(ImageSource(core=str(core)))


def test_segments_at_the_ends_of_the_address_space(tmp_path: Path) -> None:
    """Of memory without physical address, ``p_paddr`` is -1."""
    for virtual, physical in ((0, 0), ((1 << 64) - 0x3000, (1 << 64) - 1)):
        core = str(dump(tmp_path / "core", 0x3000, 0x3000, virtual, physical))
        check_elf(core)
        assert cut_short(core) is None


def test_more_program_headers_than_a_header_can_say(tmp_path: Path) -> None:
    """``PN_XNUM``: the number is in a section header, which is not in the file."""
    core = dump(tmp_path / "core", 0x3000, 0x3000)
    data = bytearray(core.read_bytes())
    struct.pack_into("<H", data, 56, 0xFFFF)
    for place in (1 << 63, (1 << 64) - 8, len(data) - 10):
        struct.pack_into("<QIHHHH", data, 40, place, 0, 64, 56, 0xFFFF, 64)
        core.write_bytes(data)
        with pytest.raises(ImageError, match="core cannot be opened: the file is truncated"):
            open_program(ImageSource(core=str(core)))


def test_dumps_that_end_in_their_program_headers(tmp_path: Path) -> None:
    whole = dump(tmp_path / "core", 0x3000, 0x3000).read_bytes()
    for size in (64, 65, 100, 119):
        (tmp_path / "core").write_bytes(whole[:size])
        with pytest.raises(ImageError, match="truncated or damaged: program headers"):
            open_program(ImageSource(core=str(tmp_path / "core")))


def made(arch: Arch, stext: int | None = None) -> Program:
    """
    Return a program whose low addresses read as physical memory, as in dumps of QEMU.

    :param stext: address of the kernel's code in VMCOREINFO; ``None`` if it does not say that
    """
    prog = Program(Platform(arch))
    text = b"OSRELEASE=7.3\n" + (b"" if stext is None else b"SYMBOL(_stext)=%x\n" % stext)

    def find(prog: Program, name: str, flags: FindObjectFlags, file: str | None) -> Object | None:
        if name != "VMCOREINFO":
            return None
        char = prog.int_type("char", 1, True)
        return Object(prog, prog.array_type(char, len(text) + 1), [*text, 0])

    prog.register_object_finder("made", find, enable_index=0)
    prog.add_memory_segment(0, 0x300000, lambda _, n, __, ___: b"y" * n, False)
    prog.add_memory_segment(0, 0x300000, lambda _, n, __, ___: b"x" * n, True)
    return prog


@pytest.mark.parametrize("arch", [Arch.X86_64, Arch.AARCH64, Arch.PPC64, Arch.RISCV64])
@pytest.mark.parametrize("stext", [0xFFFF800080010000, 0x7FFF800080010000, None])
def test_low_addresses_fault(tmp_path: Path, arch: Arch, stext: int | None) -> None:
    prog = made(arch, stext)
    unmap_low_addresses(prog, str(dump(tmp_path / "core", 0x3000, 0x3000)))
    for address in (0, 8, 0x1000, 0x2FFFF8, (1 << 47) - 8):
        with pytest.raises(FaultError, match=UNMAPPED):
            prog.read(address, 8)
    assert prog.read(0x1000, 8, True) == b"x" * 8


def test_low_addresses_of_a_direct_map_that_begins_at_0(tmp_path: Path) -> None:
    prog = made(Arch.S390X, 0x100000)
    unmap_low_addresses(prog, str(dump(tmp_path / "core", 0x3000, 0x3000)))
    assert prog.read(0, 8) == prog.read(0x1000, 8) == b"y" * 8


@pytest.mark.parametrize("arch", [Arch.I386, Arch.ARM])
def test_null_pointers_fault_on_32_bits(tmp_path: Path, arch: Arch) -> None:
    prog = made(arch)
    unmap_low_addresses(prog, str(dump(tmp_path / "core", 0x3000, 0x3000)))
    with pytest.raises(FaultError, match=UNMAPPED):
        prog.read(0x1000, 4)
    assert prog.read(0x100000, 4) == b"y" * 4


@pytest.mark.parametrize(
    "text", [b"", b"x", b"OSRELEASE=", b"OSRELEASE=7.3\nPAGESIZE=0\n", bytes(99)]
)
def test_a_vmcoreinfo_that_lacks_what_drgn_needs(tmp_path: Path, text: bytes) -> None:
    note, core = tmp_path / "note", dump(tmp_path / "core", 0x3000, 0x3000)
    note.write_bytes(text)
    with pytest.raises(ImageError, match="note: VMCOREINFO does not contain"):
        open_program(ImageSource(core=str(core), vmcoreinfo=str(note)))


@pytest.mark.parametrize(
    ("machine", "name"), [(243, "RISCV64"), (258, "LOONGARCH64"), (9, "UNKNOWN")]
)
def test_architectures_whose_addresses_drgn_does_not_translate(
    tmp_path: Path, machine: int, name: str
) -> None:
    core, note = dump(tmp_path / "core", 0x3000, 0x3000), tmp_path / "note"
    data = bytearray(core.read_bytes())
    struct.pack_into("<H", data, 18, machine)
    core.write_bytes(data)
    note.write_text(
        "OSRELEASE=7.3.0\nPAGESIZE=4096\nSYMBOL(swapper_pg_dir)=ffffffff81000000\n"
        "SYMBOL(_stext)=ffffffff80002000\n"
    )
    wanted = f"drgn does not translate virtual addresses on the architecture {name}$"
    with pytest.raises(ImageError, match=wanted):
        open_program(ImageSource(core=str(core), vmcoreinfo=str(note)))


def test_a_dump_that_drgn_opened_has_its_holes_hidden(tmp_path: Path) -> None:
    core = dump(tmp_path / "core", 0x1000, 0x3000)
    prog = Program()
    prog.set_core_dump(str(core))
    assert not has_holes(prog)
    for _ in range(2):
        prepare(prog)
        assert has_holes(prog)
        with pytest.raises(FaultError, match=LEFT_OUT):
            prog.read(VIRTUAL + 0x1000, 8)


def test_a_flattened_dump_that_drgn_opened(tmp_path: Path) -> None:
    """What was left out of it reads as zeroes, and nothing tells where."""
    plain = dump(tmp_path / "core", 0x1000, 0x3000).read_bytes()
    path = tmp_path / "flattened"
    stream = b"makedumpfile\0\0\0\0" + struct.pack(">qq", 1, 1)
    stream = stream.ljust(4096, b"\0")
    for offset in (0x1000, 0):
        piece = plain[offset : offset + 0x1000]
        stream += struct.pack(">qq", offset, len(piece)) + piece
    path.write_bytes(stream + struct.pack(">qq", -1, -1))
    assert begins_with(str(path), b"\x7fELF")
    assert not begins_with(str(path), b"KDUMP   ")
    assert not begins_with(str(tmp_path / "core"), b"\x7fELF")
    path.write_bytes(stream[:-0x1000])
    assert not begins_with(str(path), b"\x7fELF")
