# SPDX-License-Identifier: LGPL-2.1-or-later
"""Blocks of pages that are not compound end where another page is known to begin one."""

from __future__ import annotations

import pytest
from drgn import offsetof
from drgn.helpers.linux.mm import pfn_to_page
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import opened

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mmzone import page_ranges
from memcg_inspect.linux.mm.page_alloc import BlockReader


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_pages_that_free_pages_nolock_put_aside(lab: Lab, kernel: str) -> None:
    """They are in zone->trylock_free_pages, and look like the rest of the block before them."""
    image = lab.image(kernel)
    prog = image.program()
    reader = BlockReader(image_of(prog))
    first = next(
        page
        for part in page_ranges(image_of(prog))
        for pfn in range(part.start + part.start % 2, part.end - 1, 2)
        if reader.order(page := pfn_to_page(prog, pfn).value_()) > 0
    )
    page_type = prog.type("struct page")
    link = first + (page_type.size or 0) + offsetof(page_type, "pcp_list")
    zone = next(iter(for_each_online_pgdat(prog))).node_zones[0]
    head = zone.trylock_free_pages.first.address_
    assert head is not None
    prog = opened(image.core)
    words = {head: link, link: 0}
    for address, word in words.items():
        data = word.to_bytes(8, "little")
        prog.add_memory_segment(address, 8, lambda at, n, offset, _, d=data: d[offset:][:n], False)
    assert BlockReader(image_of(prog)).order(first) == 0
