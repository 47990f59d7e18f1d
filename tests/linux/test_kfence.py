# SPDX-License-Identifier: LGPL-2.1-or-later
"""Objects of KFENCE begin at the address in its metadata, at the start or the end of a page."""

from __future__ import annotations

import pytest
from support.guests import Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import SlabReader

pytestmark = pytest.mark.image


def test_objects_of_slabs_in_the_pool(lab: Lab) -> None:
    prog = lab.image("7.2", "4", "mixed", append="kfence.sample_interval=1").program()
    image, slabs, frames = image_of(prog), SlabReader(image_of(prog)), mem_map(image_of(prog))
    pool, placed = kfence_pages(image), {}
    for piece in scan_pages(image):
        for slab in (slabs.slab(page) for page in piece.slabs if page.page in pool):
            if slab is not None:
                placed[frames.virt(slab.page)] = list(slabs.objects(slab))
    metadata, page = prog["kfence_metadata"], frames.page_size
    said = [metadata[number].addr.value_() for number in range(len(pool) // 2 - 1)]
    expected = {address - address % page: [address] for address in said}
    assert placed == {start: expected[start] for start in placed}
    # KFENCE chooses a side of the page at random, so each side has some of so many objects.
    assert len(placed) > 100
    assert 0 < sum(objects != [start] for start, objects in placed.items()) < len(placed)
