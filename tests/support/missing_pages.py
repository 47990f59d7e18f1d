# SPDX-License-Identifier: LGPL-2.1-or-later
"""Images from which pages are missing, and what can be asked of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import drgn
from drgn.helpers.linux.mm import follow_phys, virt_to_page
from labkit import elf, kdump, poke

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.missing import as_image_errors
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import ImageError
from support.guests import GuestImage

#: What libkdumpfile says of a page that a dump does not have.
EXCLUDED = "Excluded page"

_REFUSED = re.compile(rf"\({EXCLUDED}: (0x\w+)\)\. Pages of the kernel are missing from this dump")

T = TypeVar("T")


def opened(core: Path) -> drgn.Program:
    """Open an image with types from its BTF. It shares nothing with other programs."""
    return open_program(ImageSource(core=str(core), debuginfo="btf"))


def excluded(address: int, count: int, offset: int, physical: bool) -> bytes:
    """Raise what drgn raises for a page that makedumpfile left out."""
    raise drgn.FaultError(EXCLUDED, address)


def slab_pages(prog: drgn.Program) -> list[int]:
    """Return the page frame numbers of all slabs."""
    frames = mem_map(image_of(prog))
    found: list[int] = []
    for piece in scan_pages(image_of(prog)):
        for slab in piece.slabs:
            first = frames.pfn(slab.page)
            found += range(first, first + (1 << slab.order))
    return found


def without(image: GuestImage, pages: Collection[int]) -> drgn.Program:
    """
    Open an image without some pages.

    :param pages: page frame numbers
    """
    frames, prog = mem_map(image_of(image.program())), opened(image.core)
    for pfn in pages:
        prog.add_memory_segment(pfn << frames.page_shift, frames.page_size, excluded, True)
    return prog


def without_bytes(image: GuestImage, address: int, size: int) -> drgn.Program:
    """Open an image without some bytes. What else is in their pages can be read."""
    whole, prog, end = image.program(), opened(image.core), address + size
    page_size = mem_map(image_of(whole)).page_size
    while address < end:
        part = min(end - address, page_size - address % page_size)
        start = follow_phys(whole["init_mm"].address_of_(), address)
        prog.add_memory_segment(start, part, excluded, True)
        address += part
    return prog


def ask_without(
    image: GuestImage, pages: Collection[int], question: Callable[[Image], T]
) -> tuple[T, frozenset[int]]:
    """
    Ask something of an image without some pages.

    Which page holds what differs from image to image, so any page may be one that nothing can
    be read without, e.g. that of the root memcg. Where the question is refused, the refusal must
    name a missing page; that page is put back, and the question is asked again.

    :return: the answer, and the pages that were missing when it was given
    """
    left = set(pages)
    shift = mem_map(image_of(image.program())).page_shift
    while True:
        try:
            with as_image_errors():
                return question(image_of(without(image, left))), frozenset(left)
        except ImageError as error:
            found = _REFUSED.search(str(error))
            assert found is not None, error
            left.remove(int(found[1], 0) >> shift)  # a page that is there is no reason to refuse


def pages_read(image: GuestImage, question: Callable[[Image], object]) -> list[int]:
    """Return the page frame numbers of all pages that something asked of an ELF image reads."""
    whole, prog, found = image.program(), opened(image.core), set[int]()
    shift = mem_map(image_of(whole)).page_shift

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        found.update(range(address >> shift, (address + count - 1 >> shift) + 1))
        return whole.read(address, count, True)

    for segment in elf.segments(image.core):
        prog.add_memory_segment(segment.physical, segment.file_size, read, True)
    question(image_of(prog))
    return sorted(found)


def filtered(image: GuestImage, out: Path, level: int) -> None:
    """
    Filter a copy of an ELF image with makedumpfile, which is made to keep the root memcg.

    At level 31, makedumpfile takes the second page of any slab of several pages for user data: a
    word of its ``struct page`` reads as ``page->mapping`` with ``PAGE_MAPPING_ANON``. In one image
    of five or so, that is where the root memcg is, without which nothing can be read. The bit is
    cleared for that page, and for no other one.
    """
    copy = out.with_name(f".{out.name}.elf")
    shutil.copyfile(image.core, copy)
    table, prog = elf.segments(copy), image.program()
    root = prog["root_mem_cgroup"]
    with copy.open("r+b") as file:
        for page in {virt_to_page(root).value_(), virt_to_page(root + 1).value_()}:
            word = drgn.Object(prog, "struct page *", page).mapping
            assert word.address_ is not None
            data = (word.value_() & ~1).to_bytes(drgn.sizeof(word), poke.byte_order(prog))
            where = poke.physical(prog, word.address_)
            file.seek(elf.file_offset(table, where, len(data)))
            file.write(data)
    kdump.convert(copy, out, level)
    copy.unlink()
