# SPDX-License-Identifier: LGPL-2.1-or-later
"""User pages by state: what a plain walk finds, large folios that straddle, and reads."""

from __future__ import annotations

from collections import Counter

import pytest
from drgn import FaultError, Object, Program
from drgn.helpers.linux.mm import for_each_page
from labkit import kernels, kmodules
from support.guests import DEBIAN_KERNELS, GuestImage, Lab

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.backing_dev import MappingReader
from memcg_inspect.linux.mm.filemap import PagesByItem, UserPageReader
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]
each_kernel = pytest.mark.parametrize("kernel", DEBIAN_KERNELS)


def states(lab: Lab, kernel: str) -> GuestImage:
    modules = kmodules.with_dependencies(kernels.kernel(kernel), "loop")
    return lab.image(kernel, "2", "states", modules=modules, freeze="busy")


def all_pages(image: Image) -> PagesByItem:
    reader, found = UserPageReader(image), PagesByItem()
    for piece in scan_pages(image):
        assert piece.raw is not None
        found += reader.read(piece.raw)
    assert not reader.coverage.unreadable
    return found


def plain_walk(prog: Program) -> Counter[tuple[int, str]]:
    """Return small pages by memcg_data and item, one member at a time."""
    found: Counter[tuple[int, str]] = Counter()
    bits = {name: 1 << prog[f"PG_{name}"].value_() for name in ("writeback", "swapbacked", "head")}
    for page in for_each_page(prog):
        try:
            word, mapping = page.memcg_data.value_(), page.mapping.value_()
            flags = page.flags
            flags = flags.f if hasattr(flags, "f") else flags
            mapcount, info = page._mapcount.counter.value_(), page.member_("lru").next.value_()
        except FaultError:
            continue
        if not word or word & 7 or flags & bits["head"] or info & 1:
            continue
        if mapcount >= 0:
            found[word, "NR_ANON_MAPPED" if mapping & 1 else "NR_FILE_MAPPED"] += 1
        if mapping and not mapping & 3:
            found[word, "NR_FILE_PAGES"] += 1
            if flags & bits["swapbacked"]:
                found[word, "NR_SHMEM"] += 1
        if flags & bits["writeback"]:
            found[word, "NR_WRITEBACK"] += 1
    return found


@each_kernel
def test_small_pages_as_in_a_plain_walk(lab: Lab, kernel: str) -> None:
    """Memcgs without large folios and without mapped kernel memory are compared as a whole."""
    image = lab.image(kernel, "4", "files")
    plain = plain_walk(image.program(dwarf=True))
    found: Counter[tuple[int, str]] = Counter()
    for (payer, _, item), pages in all_pages(image_of(image.program())).items():
        found[payer, item] += pages
    large = {payer for payer, item in found if item.endswith("_THPS")}
    items = {item for _, item in plain}
    assert items >= {"NR_ANON_MAPPED", "NR_FILE_PAGES", "NR_SHMEM"}
    same = [cell for cell in plain if cell[0] not in large and plain[cell] == found[cell]]
    assert len(same) > len(plain) // 2
    assert all(found[cell] >= number for cell, number in plain.items())


@each_kernel
@pytest.mark.newest_kernel
@pytest.mark.parametrize("pages", [34, 500])
def test_folios_that_end_in_another_piece(
    lab: Lab, kernel: str, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = image_of(states(lab, kernel).program())
    whole = all_pages(image)
    assert {item for _, _, item in whole} >= {"NR_SHMEM_THPS", "NR_ANON_THPS", "NR_FILE_MAPPED"}
    monkeypatch.setattr("memcg_inspect.image.memory.PIECE", pages * mem_map(image).size)
    assert all_pages(image) == whole


@each_kernel
def test_what_cannot_be_read_is_missing(
    lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = image_of(states(lab, kernel).program())

    def fail(self: MappingReader, mapping: int) -> bool:
        raise FaultError("not there", mapping)

    monkeypatch.setattr(MappingReader, "can_writeback", fail)
    reader, found = UserPageReader(image), PagesByItem()
    for piece in scan_pages(image):
        assert piece.raw is not None
        found += reader.read(piece.raw)
    assert reader.coverage.unreadable
    assert {item for _, _, item in found} >= {"NR_WRITEBACK", "NR_FILE_PAGES"}
    assert "NR_FILE_DIRTY" not in {item for _, _, item in found}


@each_kernel
def test_files_are_read_once(lab: Lab, kernel: str) -> None:
    """There are hundreds of dirty pages, of few files."""
    image = image_of(states(lab, kernel).program())
    pieces, reader = list(scan_pages(image)), UserPageReader(image)
    before = image.memory.reads
    for piece in pieces:
        assert piece.raw is not None
        reader.read(piece.raw)
    assert image.memory.reads - before <= 2 * len(pieces) + 20


@each_kernel
def test_which_files_are_written_back(lab: Lab, kernel: str) -> None:
    """By ``inode_to_bdi()``: block devices are, files of tmpfs are not."""
    image = image_of(states(lab, kernel).program())
    reader, seen = MappingReader(image), Counter[tuple[bytes, bool]]()
    mapping_at = image.type("struct page").member("mapping").bit_offset // 8
    for piece in scan_pages(image):
        assert piece.raw is not None
        words = image.memory.words(piece.raw.data, mapping_at, mem_map(image).size)
        for mapping in {m for m in words if m and not m & 3 and m >> 63}:
            try:
                host = Object(image.prog, "struct address_space *", mapping).host.read_()
                if not host:
                    continue
                name = host.i_sb.s_type.name.string_()
                seen[name, reader.can_writeback(mapping)] += 1
            except FaultError:
                continue  # not a mapping
    assert seen[b"bdev", True]
    assert seen[b"tmpfs", False]
    assert not seen[b"bdev", False] and not seen[b"tmpfs", True]
