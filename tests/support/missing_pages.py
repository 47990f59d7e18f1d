# SPDX-License-Identifier: LGPL-2.1-or-later
"""Images from which pages are taken away."""

from __future__ import annotations

from pathlib import Path

import drgn

from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map


def opened(core: Path) -> drgn.Program:
    return open_program(ImageSource(core=str(core), debuginfo="btf"))


def slab_pages(prog: drgn.Program) -> list[int]:
    frames = mem_map(image_of(prog))
    found: list[int] = []
    for piece in scan_pages(image_of(prog)):
        for slab in piece.slabs:
            first = frames.pfn(slab.page)
            found += range(first, first + (1 << slab.order))
    return found


def excluded(address: int, count: int, offset: int, physical: bool) -> bytes:
    raise drgn.FaultError("Excluded page", address)
