# SPDX-License-Identifier: LGPL-2.1-or-later
"""Objects of KFENCE begin at the address in its metadata, at the start or the end of a page."""

from __future__ import annotations

import pytest
from drgn import FaultError, Program, sizeof
from support.guests import Lab
from support.layouts import FRAMES, MadeImage
from support.made_pages import NO_TYPE, TYPES, kernel_with_pages, put
from support.missing_pages import excluded
from support.planting import Overlay, Write

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.kfence import (
    KfenceObject,
    KfencePool,
    kfence_object,
    kfence_pages,
    kfence_pool,
)
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.linux.net.sock import SockReader, socket_caches
from memcg_inspect.model import Coverage


def state_of(prog: Program, number: int, name: str) -> Write:
    """Return the change that gives an object of the pool a state."""
    state = prog["kfence_metadata"][number].state
    return Write(state.address_ or 0, prog[f"KFENCE_OBJECT_{name}"].value_().to_bytes(4, "little"))


def freed_one(prog: Program, overlay: Overlay) -> int:
    """
    Free an object of the pool, as ``kfence_guarded_free()`` does; return its number.

    An image may have no freed one: the next allocation takes it.
    """
    metadata, allocated = prog["kfence_metadata"], prog["KFENCE_OBJECT_ALLOCATED"].value_()
    # Readers need the objects that describe caches.
    number = next(
        number
        for number in range(100)
        if metadata[number].state == allocated
        and not metadata[number].cache.name.string_().startswith((b"kmem_cache", b"kmalloc"))
    )
    address, page = metadata[number].addr.value_(), mem_map(image_of(prog)).page_size
    overlay.write((state_of(prog, number, "FREED"),))
    prog.add_memory_segment(address - address % page, page, excluded, False)
    return number


#: One by default: images with a pool that is used often are made for these tests alone.
POOLED = [pytest.param("6.12", marks=pytest.mark.long), "7.2"]


@pytest.mark.image
@pytest.mark.parametrize("kernel", POOLED)
def test_objects_of_slabs_in_the_pool(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed", append="kfence.sample_interval=1").own_program()
    freed_one(prog, Overlay(prog))
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
        with pytest.raises(FaultError):
            prog.read(address, 8)


@pytest.mark.image
@pytest.mark.parametrize("kernel", POOLED)
def test_what_cannot_be_read_of_the_pool_is_missing_unless_it_was_freed(
    lab: Lab, kernel: str
) -> None:
    """The page of a freed object is not mapped, and that of another one is not in the dump."""
    prog = lab.image(kernel, "4", "mixed", append="kfence.sample_interval=1").own_program()
    overlay = Overlay(prog)
    number = freed_one(prog, overlay)
    image, slabs, frames = image_of(prog), SlabReader(image_of(prog)), mem_map(image_of(prog))
    metadata = prog["kfence_metadata"][number]
    address = metadata.addr.value_()
    page = frames.virt_to_page(address - address % frames.page_size)
    [found] = [slab for piece in scan_pages(image) for slab in piece.slabs if slab.page == page]
    slab = slabs.slab(found)
    assert slab is not None
    protocol = next(iter(socket_caches(image, Coverage()).values()))

    def missed() -> list[tuple[str, int]]:
        socks = SockReader(image, slabs, {slab.cache.address: protocol})
        assert not list(socks.read(slab, memcgs={1}))
        return [(one.what, one.address) for one in socks.coverage.examples]

    assert missed() == []
    overlay.write((state_of(prog, number, "ALLOCATED"),))
    assert missed() == [("socket", address)]
    # Without its metadata, it is not known where in its page the socket begins.
    state = metadata.state.address_ or 0
    prog.add_memory_segment(state, sizeof(metadata.state), excluded, False)
    assert missed() == [("socket", state)]


# Pools made by hand, as in mm/kfence/core.c since 6.6

METADATA, POOL, VARIABLES = 0xFFFF888000400000, 0x800, 0xFFFFFFFF82000000
STATES = ("UNUSED", "ALLOCATED", "RCU_FREEING", "FREED")
ALLOCATED = STATES.index("ALLOCATED")
STEP = 2048


def made_pool(objects: int) -> MadeImage:
    """Make a pool: the metadata of an object takes 2 KiB, and is in a page with one other."""
    image = kernel_with_pages(TYPES["7.1"])
    image.enum("kfence_object_state", **{f"KFENCE_OBJECT_{s}": n for n, s in enumerate(STATES)})
    image.declare("""
        struct kfence_metadata { unsigned long list[2]; enum kfence_object_state state;
                                 unsigned long addr; unsigned long size;
                                 unsigned long more[251]; };
    """)
    image.variable("__kfence_pool", "char *", VARIABLES)
    image.variable("kfence_metadata", "struct kfence_metadata *", VARIABLES + 8)
    image.words(VARIABLES, FRAMES.virt(FRAMES.page(POOL)), METADATA)
    for number in range(objects):
        put_object(image, number)
    image.write(METADATA + STEP * objects, bytes(64))  # what is behind the array is not missing
    return image


def page_of(number: int) -> int:
    """Return the ``struct page *`` of an object: guard pages are before and behind each."""
    return FRAMES.page(POOL + 2 * number + 2)


def put_object(image: MadeImage, number: int) -> None:
    # Some objects begin in the middle of their page.
    address = FRAMES.virt(page_of(number)) + 100 * (number % 3)
    image.make(
        "struct kfence_metadata",
        METADATA + STEP * number,
        {"addr": address, "size": 64 + number, "state": number % len(STATES)},
    )


def lose(image: MadeImage, number: int) -> None:
    """Take the page of the metadata of an object, and of the other one in it, out of the image."""
    del image._pages[(METADATA + STEP * number) // 4096]


def pool_pages(objects: int) -> range:
    first = FRAMES.page(POOL)
    return range(first, first + (2 * objects + 2) * FRAMES.size, FRAMES.size)


def test_the_pool_ends_with_the_last_object() -> None:
    for objects in (0, 1, 5):
        assert kfence_pool(made_pool(objects)) == KfencePool(pool_pages(objects), ())


def test_kernels_without_a_pool() -> None:
    assert kfence_pool(kernel_with_pages(TYPES["7.1"])) == KfencePool()
    for at in (VARIABLES, VARIABLES + 8):
        image = made_pool(3)
        image.words(at, 0)  # it was not allocated
        assert kfence_pool(image) == KfencePool(range(0), ())


def test_metadata_that_is_missing() -> None:
    """Its pages are of the pool if they are marked as slabs."""
    image = made_pool(6)
    lose(image, 2)
    for number in (2, 3):
        put(image, FRAMES.pfn(page_of(number)), 0, TYPES["7.1"].slab, 0)
    lost = (METADATA + 2 * STEP, METADATA + 3 * STEP)
    assert kfence_pool(image) == KfencePool(pool_pages(6), lost)
    # At the end, what is no slab is not of the pool.
    image = made_pool(4)
    lose(image, 2)
    put(image, FRAMES.pfn(page_of(2)), 0, TYPES["7.1"].slab, 0)
    put(image, FRAMES.pfn(page_of(3)), 0, NO_TYPE, 0)
    assert kfence_pool(image) == KfencePool(pool_pages(3), lost[:1])


@pytest.mark.parametrize(("between", "is_found"), [(32, True), (34, False)])
def test_a_large_gap_ends_the_pool(between: int, is_found: bool) -> None:
    """64 KiB are stepped over, where nothing tells that the pages are of the pool."""
    image = made_pool(between + 4)
    for number in range(2, 2 + between, 2):
        lose(image, number)
    assert kfence_pool(image).pages == pool_pages(between + 4 if is_found else 2)


def test_objects_of_pages() -> None:
    image = made_pool(5)
    pages = kfence_pages(image)
    for number in range(5):
        address = FRAMES.virt(page_of(number)) + 100 * (number % 3)
        state = STATES[number % len(STATES)].lower()
        expected = KfenceObject(address, 64 + number, state)
        assert kfence_object(image, page_of(number)) == expected
        assert kfence_object(image, page_of(number) + FRAMES.size) is None
    assert [kfence_object(image, page) for page in pages[:2]] == [None, None]
    for page in (pages[0] - FRAMES.size, pages[-1] + FRAMES.size, pages[2] + 1):
        with pytest.raises(ValueError):
            kfence_object(image, page)
    lose(image, 2)
    with pytest.raises(FaultError):
        kfence_object(image, page_of(2))
