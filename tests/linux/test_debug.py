# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is told of a page is what drgn's helpers say of it."""

from __future__ import annotations

import pytest
from drgn.helpers.linux.mm import PageReserved, compound_head, page_to_pfn, pfn_to_page
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.debug import read_page
from memcg_inspect.linux.mm.mmzone import page_ranges


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_flags_and_counts_of_pages(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel).program()
    reserved = {True: 0, False: 0}
    for part in page_ranges(image_of(prog)):
        for pfn in range(part.start, part.end, 61):
            page = pfn_to_page(prog, pfn)
            told = read_page(image_of(prog), page.value_())
            assert told.pfn == pfn == int(page_to_pfn(page))
            assert told.reserved == bool(PageReserved(page)), hex(pfn)
            assert told.refs == int(compound_head(page)._refcount.counter)
            reserved[told.reserved] += 1
    assert min(reserved.values()) > 10
