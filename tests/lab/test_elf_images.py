# SPDX-License-Identifier: LGPL-2.1-or-later
"""Notes of core files, and their byte order, as QEMU writes them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from labkit import elf
from labkit.errors import LabError

#: Registers of a CPU.
REGISTERS = (0x0011_2233_4455_6677, 1 << 63, 5)
MEMORY = bytes(range(48))


def note(order: str, name: bytes, kind: int, data: bytes) -> bytes:
    padded = [part + bytes(-len(part) % 4) for part in (name + b"\0", data)]
    return struct.pack(f"{order}III", len(name) + 1, len(data), kind) + b"".join(padded)


def image(path: Path, order: str, *pids: bytes) -> None:
    """Write a core file with the notes of some CPUs, as QEMU 7.2 does."""
    notes = b""
    for pid in pids or [bytes(4)]:
        status = bytes(32) + pid + bytes(76) + struct.pack(f"{order}3Q", *REGISTERS)
        notes += note(order, b"CORE", 1, status)
        notes += note(order, b"CORE", 2, struct.pack(f"{order}Q", 7) + b"tail")
    notes += note(order, b"VMCOREINFO", 0, b"OSRELEASE=6.12\n")
    at = 64 + 2 * 64 + 2 * 56
    ident = b"\x7fELF" + bytes([2, 1 if order == "<" else 2, 1, 0]) + bytes(8)
    header = ident + struct.pack(
        f"{order}HHIQQQIHHHHHH", 4, 21, 1, 0, 192, 64, 0, 8, 56, 2, 64, 2, 1
    )
    # The names of sections are nowhere in the file.
    names = struct.pack(f"{order}IIQQQQIIQQ", 1, 3, 0, 0, (1 << 64) - 8, 11, 0, 0, 1, 0)
    programs = struct.pack(f"{order}IIQQQQQQ", 4, 0, at + len(MEMORY), 0, 0, len(notes), 0, 0)
    programs += struct.pack(f"{order}IIQQQQQQ", 1, 0, at, 0x4000, 0x4000, *[len(MEMORY)] * 2, 0)
    path.write_bytes(header + bytes(64) + names + programs + MEMORY + notes)


def notes_of(path: Path) -> dict[int, bytes]:
    """Return the notes of a core file by type, as pyelftools reads them."""
    with path.open("rb") as file:
        found = ELFFile(file)
        (segment,) = found.iter_segments("PT_NOTE")
        data, order = segment.data(), "<" if found.little_endian else ">"
    notes, at = {}, 0
    while at < len(data):
        names, size, kind = struct.unpack_from(f"{order}III", data, at)
        start = at + 12 + -(-names // 4) * 4
        notes[kind] = data[start : start + size]
        at = start + -(-size // 4) * 4
    return notes


def test_the_byte_order_of_all_headers(tmp_path: Path) -> None:
    path, wanted = tmp_path / "image", tmp_path / "wanted"
    image(path, ">")
    image(wanted, "<")
    elf.make_little_endian(path)
    assert path.read_bytes() == wanted.read_bytes()
    elf.make_little_endian(path)
    assert path.read_bytes() == wanted.read_bytes()


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_numbers_of_cpus(tmp_path: Path, order: str) -> None:
    right = [struct.pack(f"{order}I", number) for number in (1, 2, 3)]
    image(tmp_path / "wanted", order, *right)
    for wrong in ([bytes(4)] * 3, [pid[::-1] for pid in right], right):
        image(tmp_path / "image", order, *wrong)
        elf.number_cpus(tmp_path / "image")
        assert (tmp_path / "image").read_bytes() == (tmp_path / "wanted").read_bytes()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("size", [1, 4, 3523])
def test_a_note_more(tmp_path: Path, order: str, size: int) -> None:
    path = tmp_path / "image"
    image(path, order)
    before, notes = path.read_bytes(), notes_of(path)
    del notes[0]
    elf.add_note(path, "VMCOREINFO", b"x" * size)
    after = path.read_bytes()
    assert notes_of(path) == {**notes, 0: b"x" * size}
    # Memory and all else stay where they are.
    changed = {n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b}
    assert changed <= set(range(192, 192 + 56))
    assert elf.segments(path) == [elf.Segment(304, 0x4000, len(MEMORY))]
    assert elf.note(path, "CORE") == notes[1]


def test_a_note_that_is_not_there(tmp_path: Path) -> None:
    image(tmp_path / "image", "<")
    with pytest.raises(LabError, match="has no note LINUX"):
        elf.note(tmp_path / "image", "LINUX")
