# SPDX-License-Identifier: LGPL-2.1-or-later
"""What charged pages are used for, on images of real kernels."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import cast

import pytest
from drgn import sizeof
from support.guests import Lab
from support.missing_pages import excluded

from memcg_inspect.collect.page_uses import PageUses, compound_pages_of_others
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.mm_types import KmemPage
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges
from memcg_inspect.linux.mm.page_alloc import BlockReader
from memcg_inspect.model import Coverage

pytestmark = pytest.mark.image


def test_pages_of_vmalloc_areas_are_single(lab: Lab) -> None:
    """Each is charged by itself, whatever follows it. So are stacks that are in such areas."""
    uses = PageUses(image_of(lab.image("7.3", "4", "mixed").program()), defaultdict(Coverage))
    blocks = cast("BlockReader", SimpleNamespace(order=lambda page: 3))
    page = KmemPage(0x1000, 0, 0, False, "", 0x2000)
    for use, pages in (("vmalloc", 1), ("stack", 1), ("pipe", 8)):
        uses._uses = {page.page: use}
        assert uses.of(page, blocks) == (use, pages)
    uses.stacks_are_blocks, uses._uses = True, {page.page: "stack"}
    assert uses.of(page, blocks) == ("stack", 8)


def test_owners_of_compound_pages_may_be_missing(lab: Lab) -> None:
    """Before 6.14 no page says that it is a large kmalloc, so all that own others are read."""
    prog = lab.image("6.1", "4", "mixed").own_program()
    first = mem_map(image_of(prog)).page(page_ranges(image_of(prog))[-1].start)
    size = 64 * sizeof(prog.type("struct page"))
    prog.add_memory_segment(first, size, excluded, False)
    coverage = Coverage()
    compound_pages_of_others(Image(prog), coverage)
    assert {(one.what, one.reason) for one in coverage.examples} == {("files", "not in the image")}
