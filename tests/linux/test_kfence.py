# SPDX-License-Identifier: LGPL-2.1-or-later
"""Objects of KFENCE begin at the address in its metadata, at the start or the end of a page."""

from __future__ import annotations

import pytest
from drgn import FaultError
from support.guests import Lab
from support.planting import Overlay, Write

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.linux.net.sock import SockReader, socket_caches
from memcg_inspect.model import Coverage

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


@pytest.mark.parametrize("kernel", ["6.12", "7.2"])
def test_what_cannot_be_read_of_the_pool_is_missing_unless_it_was_freed(
    lab: Lab, kernel: str
) -> None:
    """The page of a freed object is not mapped, and that of another one is not in the dump."""
    prog = lab.image(kernel, "4", "mixed", append="kfence.sample_interval=1").own_program()
    image, slabs, frames = image_of(prog), SlabReader(image_of(prog)), mem_map(image_of(prog))
    pool, freed = kfence_pages(image), prog["KFENCE_OBJECT_FREED"].value_()
    number = next(
        number
        for number in range(len(pool) // 2 - 1)
        if prog["kfence_metadata"][number].state == freed
    )
    metadata = prog["kfence_metadata"][number]
    address = metadata.addr.value_()
    page = frames.virt_to_page(address - address % frames.page_size)
    [found] = [slab for piece in scan_pages(image) for slab in piece.slabs if slab.page == page]
    slab = slabs.slab(found)
    assert slab is not None
    protocol = next(iter(socket_caches(image, Coverage()).values()))
    overlay, state = Overlay(prog), metadata.state.address_
    assert state is not None

    def missed() -> int:
        socks = SockReader(image, slabs, {slab.cache.address: protocol})
        assert not list(socks.read(slab, memcgs={1}))
        return socks.coverage.unreadable

    assert missed() == 0
    overlay.write((Write(state, prog["KFENCE_OBJECT_ALLOCATED"].value_().to_bytes(4, "little")),))
    assert missed() == 1
