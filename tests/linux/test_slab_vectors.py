# SPDX-License-Identifier: LGPL-2.1-or-later
"""Where the vectors of slabs are, as drgn's virt_to_page() tells."""

from __future__ import annotations

import pytest
from drgn.helpers.linux.mm import virt_to_page
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import SlabReader


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_a_vector_is_on_another_page_or_inside(lab: Lab, kernel: str) -> None:
    """Since 7.0, the space behind the last object may have the vector."""
    prog, outside = lab.image(kernel, "4", "mixed").program(), 0
    image, frames = image_of(prog), mem_map(image_of(prog))
    slabs = SlabReader(image)
    for piece in scan_pages(image):
        for slab in filter(None, map(slabs.slab, piece.slabs)):
            if slab.vector is None:
                assert slabs.vector_page(slab) is None
                continue
            page = virt_to_page(prog, slab.vector.address).value_()
            own = page in range(slab.page, slab.page + (frames.size << slab.order), frames.size)
            outside += not own
            assert slabs.vector_page(slab) == (None if own else page)
    assert outside > 100
