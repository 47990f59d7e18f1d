# SPDX-License-Identifier: LGPL-2.1-or-later
"""Dumps in the kdump format that are truncated or damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from memcg_inspect.image.kdump import check_kdump
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.model import ImageError

BLOCK, PAGES = 4096, 100
#: Where the bitmaps begin and end, and where the list of pages ends.
BITMAPS, LIST = 3 * BLOCK, 5 * BLOCK
END = LIST + 24 * PAGES


def dump(order: str = "<", wide: bool = True, longest: int = BLOCK, split: int = 0) -> bytes:
    """Return a dump of 100 pages, whose bitmaps have a block each."""
    data = bytearray(END + 100)
    data[:8] = b"KDUMP   "
    struct.pack_into(f"{order}iiI", data, 0x1AC if wide else 0x1A0, BLOCK, 2, 2)
    struct.pack_into(f"{order}i", data, BLOCK + (12 if wide else 8), split)
    data[4 * BLOCK : 4 * BLOCK + 13] = b"\xff" * 12 + b"\x0f"
    for page in range(PAGES):
        size = longest if page == 70 else 30
        struct.pack_into(f"{order}QIIQ", data, LIST + 24 * page, END, size, 1, 0)
    return bytes(data)


def check(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    check_kdump(str(path))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("wide", [True, False])
def test_each_part_must_be_in_the_file(tmp_path: Path, order: str, wide: bool) -> None:
    whole = dump(order, wide)
    path = tmp_path / "core"
    check(path, whole)
    check(path, whole[:END])  # pages may be missing: reading one is a fault
    for size, said in (
        (BLOCK, "its second header"),
        (BITMAPS, "its bitmaps end at byte 20,480"),
        (LIST - 1, "its bitmaps end at byte 20,480"),
        (LIST, "its list of pages ends at byte 22,880"),
        (END - 1, "its list of pages ends at byte 22,880"),
    ):
        with pytest.raises(ImageError, match=f"the file is truncated or damaged: {said}"):
            check(path, whole[:size])


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_page_is_a_block_at_most(tmp_path: Path, order: str) -> None:
    check(tmp_path / "core", dump(order))
    with pytest.raises(ImageError, match="a page of 4,097 bytes"):
        check(tmp_path / "core", dump(order, longest=BLOCK + 1))


def test_headers_without_bitmaps_are_refused(tmp_path: Path) -> None:
    data = bytearray(dump())
    struct.pack_into("<I", data, 0x1B4, 0)
    with pytest.raises(ImageError, match="headers are damaged"):
        check(tmp_path / "core", data)


def test_others_are_left_to_libkdumpfile(tmp_path: Path) -> None:
    """Parts of a dump that was split, other formats, and headers that nobody can read."""
    path = tmp_path / "core"
    check(path, dump(split=1)[:LIST])
    check(path, b"")
    check(path, b"\x7fELF" + bytes(100))
    check(path, b"KDUMP   ")
    check(path, b"KDUMP   ".ljust(BLOCK, b"\0"))


def test_opening_a_truncated_dump_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "core"
    path.write_bytes(dump()[:LIST])
    with pytest.raises(ImageError, match=r"core cannot be opened: the file is truncated"):
        open_program(ImageSource(core=str(path)))
