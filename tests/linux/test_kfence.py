# SPDX-License-Identifier: LGPL-2.1-or-later
"""Objects of KFENCE begin at the address in its metadata, at the start or the end of a page."""

from __future__ import annotations

import pytest
from drgn import FaultError
from support.guests import Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import SlabReader

pytestmark = pytest.mark.image


@pytest.mark.parametrize("kernel", ["6.12", "7.2"])
def test_objects_of_slabs_in_the_pool(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed", append="kfence.sample_interval=1").program()
    image, slabs, frames = image_of(prog), SlabReader(image_of(prog)), mem_map(image_of(prog))
    pool, placed = kfence_pages(image), {}
    for piece in scan_pages(image):
        for slab in (slabs.slab(page) for page in piece.slabs if page.page in pool):
            if slab is not None:
                placed[frames.virt(slab.page)] = list(slabs.objects(slab))
    page, expected, freed = frames.page_size, {}, set[int]()
    for number in range(len(pool) // 2 - 1):
        metadata = prog["kfence_metadata"][number]
        address = metadata.addr.value_()
        expected[address - address % page] = [address]
        if metadata.state == prog["KFENCE_OBJECT_FREED"]:
            expected[address - address % page] = []
            freed.add(address)
    assert placed == {start: expected[start] for start in placed}
    # KFENCE chooses a side of the page at random, so each side has some of so many objects.
    on_a_side = [objects == [start] for start, objects in placed.items() if objects]
    assert len(on_a_side) > 50 and 0 < sum(on_a_side) < len(on_a_side)
    # A slab reader that reads all slots would take them for a gap in the image.
    assert freed
    for address in freed:
        with pytest.raises(FaultError, match="not mapped"):
            prog.read(address, 8)
