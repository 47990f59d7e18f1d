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


def dump(
    order: str = "<", wide: bool = True, longest: int = BLOCK, part: tuple[int, int] | None = None
) -> bytes:
    """
    Return a dump of 100 pages, whose bitmaps have a block each.

    :param part: page frames of one of several files
    """
    data = bytearray(END + 100)
    data[:8] = b"KDUMP   "
    struct.pack_into(f"{order}iiI", data, 0x1AC if wide else 0x1A0, BLOCK, 2, 2)
    form = f"{order}i{'QQ' if wide else 'II'}"
    struct.pack_into(form, data, BLOCK + (12 if wide else 8), part is not None, *(part or (0, 0)))
    data[4 * BLOCK : 4 * BLOCK + 13] = b"\xff" * 12 + b"\x0f"
    for page in range(PAGES):
        size = longest if page == 70 else 30
        struct.pack_into(f"{order}QIIQ", data, LIST + 24 * page, END, size, 1, 0)
    return bytes(data)


def refusal(path: Path, data: bytes) -> str | None:
    """Return why a dump is refused; ``None`` if it is not."""
    path.write_bytes(data)
    try:
        check_kdump(str(path))
    except ImageError as error:
        return str(error)
    return None


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("wide", [True, False])
def test_each_part_must_be_in_the_file(tmp_path: Path, order: str, wide: bool) -> None:
    whole = dump(order, wide)
    path = tmp_path / "core"
    assert refusal(path, whole) is None
    assert refusal(path, whole[:END]) is None  # pages may be missing: reading one is a fault
    for size, said in (
        (BLOCK, "its second header"),
        (BITMAPS, "its bitmaps end at byte 20,480"),
        (LIST - 1, "its bitmaps end at byte 20,480"),
        (LIST, "its list of pages ends at byte 22,880"),
        (END - 1, "its list of pages ends at byte 22,880"),
    ):
        why = refusal(path, whole[:size]) or ""
        assert why.startswith(f"the file is truncated or damaged: {said}"), size


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_page_is_a_block_at_most(tmp_path: Path, order: str) -> None:
    assert refusal(tmp_path / "core", dump(order)) is None
    why = refusal(tmp_path / "core", dump(order, longest=BLOCK + 1)) or ""
    assert "a page of 4,097 bytes" in why


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("wide", [True, False])
def test_one_of_several_files(tmp_path: Path, order: str, wide: bool) -> None:
    """It has a part of the pages: ``makedumpfile --split``."""
    path = tmp_path / "core"
    for first, end, pages in ((0, 100, 100), (0, 50, 50), (50, 1000, 50), (3, 8, 5), (13, 70, 57)):
        whole = dump(order, wide, part=(first, end))
        assert refusal(path, whole[: LIST + 24 * pages]) is None
        cut = refusal(path, whole[: LIST + 24 * pages - 1]) or ""
        assert "its list of pages ends at byte" in cut
    for first, end in ((50, 40), (0, 1 << 31)):
        why = refusal(path, dump(order, wide, part=(first, end))) or ""
        assert f"page frames {first} to {end} of 32768" in why


def test_headers_without_bitmaps_are_refused(tmp_path: Path) -> None:
    data = bytearray(dump())
    struct.pack_into("<I", data, 0x1B4, 0)
    assert "headers are damaged" in (refusal(tmp_path / "core", data) or "")


def test_others_are_left_to_libkdumpfile(tmp_path: Path) -> None:
    """Other formats, and headers that nobody can read."""
    path, start = tmp_path / "core", dump()[:LIST]
    assert refusal(path, start) is not None
    unreadable = b"KDUMP   ".ljust(BLOCK, b"\0") + start[BLOCK:]
    for data in (b"", b"\x7fELF" + start[4:], b"KDUMP   ", unreadable):
        assert refusal(path, data) is None, data[:8]


def test_opening_a_truncated_dump_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "core"
    path.write_bytes(dump()[:LIST])
    with pytest.raises(ImageError, match=r"core cannot be opened: the file is truncated"):
        open_program(ImageSource(core=str(path)))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("at", [32, 48])
def test_where_vmcoreinfo_is(tmp_path: Path, order: str, at: int) -> None:
    """It may be anywhere in the file, and what is not in it is not read."""
    data, text = bytearray(dump(order)), b"VMCOREINFO\0\0OSRELEASE=7.3\n.a=1\n"
    struct.pack_into(f"{order}i", data, 8, 4)
    data += text
    for offset, said in ((len(data) - len(text), True), (len(data), False), (1 << 62, False)):
        struct.pack_into(f"{order}qQ", data, BLOCK + at, offset, len(text))
        why = refusal(tmp_path / "core", bytes(data)) or ""
        assert ("its VMCOREINFO is damaged" in why) == said, offset
    struct.pack_into(f"{order}qQ", data, BLOCK + at, -1, len(text))
    assert refusal(tmp_path / "core", bytes(data)) is None
