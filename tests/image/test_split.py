# SPDX-License-Identifier: LGPL-2.1-or-later
"""Split dumps, written by hand."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from memcg_inspect.image.dump_file import open_dump
from memcg_inspect.image.kdump import check_kdump
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.image.room import NoRoomError, Output
from memcg_inspect.image.split import check_no_part, find_set, join, joined_size, part_of
from memcg_inspect.model import ImageError

BLOCK, FRAMES = 4096, 300
#: Where the bitmaps begin and end.
BITMAPS, LIST = 3 * BLOCK, 5 * BLOCK
#: What is in the dump: the page frames at the edges of the parts, and others.
PRESENT = frozenset({0, 1, 7, 8, 9, 99, 100, 101, 102, 103, 104, 105, 200, 207, 208, 299})
RANGES = ((0, 101), (101, 208), (208, 300))
each_machine = pytest.mark.parametrize(
    ("order", "wide"), [("<", True), (">", True), ("<", False), (">", False)]
)


def page(pfn: int) -> bytes:
    return f"page {pfn} ".encode() * (1 + pfn % 3)


def part(
    first: int,
    end: int,
    order: str = "<",
    wide: bool = True,
    *,
    version: int = 6,
    is_part: bool = True,
    status: int = 1,
    note: bytes = b"registers",
    gap: int = 0,
) -> bytes:
    """
    Return one part of a dump as makedumpfile writes it.

    :param gap: bytes between the list of pages and the pages
    """
    own = sorted(pfn for pfn in PRESENT if first <= pfn < end)
    data = bytearray(LIST)
    data[:8] = b"KDUMP   "
    struct.pack_into(f"{order}i", data, 8, version)
    data[12:20] = b"Linux\0\0\0"
    at = 0x1A8 if wide else 0x19C
    struct.pack_into(f"{order}IiiII", data, at, status, BLOCK, 2, 2, FRAMES)
    form, offset = (f"{order}iQQ", 12) if wide else (f"{order}iII", 8)
    struct.pack_into(form, data, BLOCK + offset, int(is_part), first, end)
    if wide and version >= 6:
        struct.pack_into(f"{order}QQQ", data, BLOCK + 80, first, end, FRAMES)
    data[2 * BLOCK : 2 * BLOCK + len(note)] = note
    for bitmap in (3 * BLOCK, 4 * BLOCK):
        # A part may have the bits of others, too, or not.
        for pfn in PRESENT if first == 0 else own:
            data[bitmap + pfn // 8] |= 1 << pfn % 8
    pages, start = b"", LIST + 24 * len(own) + gap
    for pfn in own:
        data += struct.pack(f"{order}QIIQ", start + len(pages), len(page(pfn)), 1, 0)
        pages += page(pfn)
    return bytes(data) + bytes(gap) + pages


def pages_of(data: bytes, order: str) -> dict[int, bytes]:
    """Return the pages of a dump that is not split."""
    bitmap, at, found = data[4 * BLOCK : 5 * BLOCK], LIST, {}
    for pfn in range(FRAMES):
        if bitmap[pfn // 8] >> pfn % 8 & 1:
            offset, size, flags, _ = struct.unpack_from(f"{order}QIIQ", data, at)
            assert flags in (0, 1)
            found[pfn] = data[offset : offset + size]
            at += 24
    return found


def write(folder: Path, parts: Sequence[bytes], name: str = "vmcore.{}") -> list[str]:
    folder.mkdir(exist_ok=True)
    paths = [folder / name.format(number) for number in range(len(parts))]
    for path, data in zip(paths, parts, strict=True):
        path.write_bytes(data)
    return [*map(str, paths)]


def joined(paths: Sequence[str], most: int = 1 << 20) -> bytes:
    parts = find_set(paths)
    with (Path(paths[0]).parent / "joined").open("w+b") as out:
        join(parts, Output(out.fileno(), most), lambda done: None)
        out.seek(0)
        return out.read()


@each_machine
@pytest.mark.parametrize("gap", [0, 10_000])
def test_all_pages_are_joined(tmp_path: Path, order: str, wide: bool, gap: int) -> None:
    paths = write(tmp_path, [part(*r, order, wide, gap=gap) for r in RANGES])
    data = joined(paths)
    assert pages_of(data, order) == {pfn: page(pfn) for pfn in PRESENT}
    # The gap is not copied, and all of the rest is as in a dump that was not split.
    whole = bytearray(part(0, FRAMES, order, wide, is_part=False))
    whole[BLOCK : BLOCK + 200] = data[BLOCK : BLOCK + 200]
    assert data == whole
    copy = tmp_path / "joined"
    assert part_of(str(copy)) is None
    check_kdump(str(copy))


@pytest.mark.parametrize("version", [2, 6])
def test_frames_beyond_32_bits(tmp_path: Path, version: int) -> None:
    """Since version 6, the older members end at 2^32 - 1."""
    data = bytearray(part(100, 200, version=version))
    struct.pack_into("<QQ", data, BLOCK + 16, 7, 9)
    (path,) = write(tmp_path, [bytes(data)])
    found = part_of(path)
    assert found is not None
    assert found.range == ((100, 200) if version == 6 else (7, 9))


def test_a_part_without_pages(tmp_path: Path) -> None:
    """A small machine has fewer pages than makedumpfile takes for one part."""
    ranges = ((0, 300), (300, 300), (300, 300))
    data = joined(write(tmp_path, [part(*r) for r in ranges]))
    assert pages_of(data, "<") == {pfn: page(pfn) for pfn in PRESENT}


def test_the_others_are_found_beside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [part(*r) for r in RANGES]
    paths = write(tmp_path, parts)
    write(tmp_path, [part(*RANGES[0], note=b"another crash")], "vmcore.3{}")
    (tmp_path / "vmcore.7").write_bytes(b"KDUMP   ")
    (tmp_path / "vmcore.8").mkdir()
    (tmp_path / "vmcore.9").symlink_to("nowhere")
    (tmp_path / "other.1").write_bytes(b"")
    for given in (paths, paths[::-1], *([path] for path in paths), [paths[0], paths[0]]):
        assert [found.path for found in find_set(given)] == paths
    monkeypatch.chdir(tmp_path)
    assert [found.path for found in find_set(["vmcore.1"])] == ["vmcore.0", "vmcore.1", "vmcore.2"]
    name = "dump-20{}-of-3.kdump"
    paths = write(tmp_path / "named", parts, name)
    assert [found.path for found in find_set(paths[1:2])] == paths


def test_parts_in_different_folders(tmp_path: Path) -> None:
    first, second, third = (part(*r) for r in RANGES)
    a, b = write(tmp_path / "a", [first, second])
    (c,) = write(tmp_path / "b", [third])
    assert [found.path for found in find_set([c, a])] == [a, b, c]


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ([0, 1], "from 208 to 300"),
        ([1, 2], "from 0 to 101"),
        ([0, 2], "from 101 to 208"),
        ([1], "from 0 to 101 and from 208 to 300"),
    ],
)
def test_parts_that_are_missing(tmp_path: Path, there: list[int], missing: str) -> None:
    paths = write(tmp_path, [part(*RANGES[number]) for number in there])
    for given in (paths, paths[:1]):
        with pytest.raises(ImageError, match="is one part of a split dump") as error:
            find_set(given)
        assert f"and those {missing} are in no part" in str(error.value)


def test_parts_of_different_dumps(tmp_path: Path) -> None:
    a, b = write(tmp_path, [part(*RANGES[0]), part(*RANGES[1], note=b"another crash")])
    with pytest.raises(ImageError, match="are parts of different dumps"):
        find_set([a, b])
    with pytest.raises(ImageError, match=r"those from 101 to 300 are in no part"):
        find_set([a])


def test_what_is_no_part(tmp_path: Path) -> None:
    a, b, c = write(tmp_path, [part(*RANGES[0]), part(0, 300, is_part=False), b"text"])
    for other in (b, c):
        with pytest.raises(ImageError, match="is no part of a split dump"):
            find_set([a, other])
        check_no_part(other)
    with pytest.raises(ImageError, match=r"vmcore.0 is one part .* from 0 to 101 of 300: give all"):
        check_no_part(a)
    check_no_part(str(tmp_path / "missing"))


def test_page_frames_in_common(tmp_path: Path) -> None:
    paths = write(tmp_path, [part(0, 150), part(100, 300)])
    with pytest.raises(ImageError, match="have page frames in common"):
        find_set(paths)


@each_machine
def test_pages_that_are_truncated_are_missing(tmp_path: Path, order: str, wide: bool) -> None:
    """Whatever follows in the joined file must not be taken for them."""
    parts = [part(*r, order, wide) for r in RANGES]
    parts[1] = parts[1][:-20]
    found = pages_of(joined(write(tmp_path, parts)), order)
    lost = {pfn for pfn, data in found.items() if data != page(pfn)}
    assert lost == {207, 200} - ({200} if len(page(207)) >= 20 else set())
    assert all(found[pfn] == b"" for pfn in lost)
    assert set(found) == PRESENT


@pytest.mark.parametrize("offset", [0, 100, LIST, 1 << 40, (1 << 64) - 1])
def test_pages_elsewhere_are_missing(tmp_path: Path, offset: int) -> None:
    """A hostile offset names no page of another part."""
    parts = [part(*r) for r in RANGES]
    data = bytearray(parts[1])
    struct.pack_into("<Q", data, LIST + 24, offset)
    parts[1] = bytes(data)
    found = pages_of(joined(write(tmp_path, parts)), "<")
    assert {pfn for pfn, data in found.items() if data != page(pfn)} == {102}
    assert found[102] == b""


def test_headers_that_are_truncated(tmp_path: Path) -> None:
    parts = [part(*r) for r in RANGES]
    own = sum(RANGES[1][0] <= pfn < RANGES[1][1] for pfn in PRESENT)
    for size in (LIST - 1, LIST + 24 * own - 1):
        paths = write(tmp_path, [parts[0], parts[1][:size], parts[2]])
        with pytest.raises(ImageError, match=r"vmcore.1: the file is truncated or damaged"):
            joined(paths)


def test_a_second_header_that_is_missing(tmp_path: Path) -> None:
    """Then it is not known whether a file is a part: opening it says what is wrong."""
    path = tmp_path / "vmcore.0"
    path.write_bytes(part(*RANGES[0])[:BLOCK])
    check_no_part(str(path))
    assert open_dump([str(path)]) == (str(path), None)
    with pytest.raises(ImageError, match=r"vmcore.0 cannot be opened: .* second header is missing"):
        open_program(ImageSource(core=str(path)))
    (other,) = write(tmp_path, [part(*RANGES[1])], "vmcore.1{}")
    with pytest.raises(ImageError, match=r"vmcore.0: .* second header is missing"):
        find_set([other, str(path)])


def test_a_part_that_had_no_room_marks_the_whole(tmp_path: Path) -> None:
    """``DUMP_DH_COMPRESSED_INCOMPLETE``."""
    paths = write(tmp_path, [part(*r, status=9 if r[0] else 1) for r in RANGES])
    assert struct.unpack_from("<I", joined(paths), 0x1A8) == (9,)


def test_room(tmp_path: Path) -> None:
    paths = write(tmp_path, [part(*r, gap=1 << 20) for r in RANGES])
    assert joined_size(find_set(paths)) >= len(part(0, FRAMES))
    with pytest.raises(NoRoomError):
        joined(paths, most=BITMAPS)
