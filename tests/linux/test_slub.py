# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which slab objects are free, compared with drgn, and in lists that are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
from drgn import FaultError
from drgn.helpers.linux.slab import slab_object_info
from support.guests import KERNELS, Lab
from support.made_memory import BASE, MadeMemory

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm import slub
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabReader
from memcg_inspect.linux.mm.slub import FreeObjects

CACHE, SLAB, FIRST = BASE + 0x1000, BASE + 0x2000, BASE + 0x10000
SHEAF = BASE + 0x3000
SIZE, OBJECTS = 64, 40
SECRET = 0x0123456789ABCDEF


class MadeSlabs:
    """In place of a :class:`SlabReader`."""

    def address(self, slab: Slab, number: int) -> int:
        return FIRST + number * SIZE


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> MadeMemory:
    """A cache with hardened free lists, and a sheaf on each of two CPUs."""
    made = MadeMemory()
    unsigned = made.prog.int_type("unsigned int", 4, False)
    made.struct(
        "slab_sheaf",
        [("size", unsigned), ("node", made.int), ("objects", made.array(made.word, 0))],
    )
    made.struct("node_barn", [("unused", made.word)])
    made.struct(
        "percpu_sheaves", [("main", made.link("slab_sheaf")), ("spare", made.link("slab_sheaf"))]
    )
    node = made.struct("per_node", [("barn", made.link("node_barn"))])
    made.struct(
        "kmem_cache",
        [
            ("offset", unsigned),
            ("sheaf_capacity", unsigned),
            ("random", made.word),
            ("cpu_sheaves", made.link("percpu_sheaves")),
            ("per_node", made.array(node, 1)),
        ],
    )
    made.struct("slab", [("freelist", made.word)])
    made.write(CACHE, 8, 4)
    made.write(CACHE + 4, 16, 4)
    made.write(CACHE + 8, SECRET)
    made.write(CACHE + 16, BASE)
    monkeypatch.setattr(slub, "possible_cpus", lambda image: (0, 1))
    monkeypatch.setattr(slub, "possible_nodes", lambda image: range(1))
    monkeypatch.setattr(slub, "percpu_offsets", lambda image: {0: 0, 1: 0x100})
    return made


def chain(made: MadeMemory, *numbers: int, end: int = 0) -> None:
    """Write a free list; the last object leads to *end*."""
    places = [FIRST + number * SIZE for number in numbers]
    made.write(SLAB, places[0])
    for place, after in zip(places, [*places[1:], end], strict=True):
        at = place + 8
        made.write(at, after ^ SECRET ^ int.from_bytes(at.to_bytes(8, "little"), "big"))


def free(made: MadeMemory) -> set[int]:
    """Return the free objects."""
    cache = SlabCache(CACHE, "made", SIZE, SIZE, 0, False, SIZE)
    slab = Slab(SLAB, 0, 0, cache, OBJECTS, OBJECTS, None, {}, b"")
    objects = FreeObjects(made.image, MadeSlabs())  # type: ignore[arg-type]
    return {number for number in range(OBJECTS) if objects.is_free(slab, number)}


def test_lists(made: MadeMemory) -> None:
    assert free(made) == set()
    chain(made, 3, 1, 7)
    made.write(BASE + 0x100, SHEAF)
    made.write(SHEAF, 2, 4)
    made.write(SHEAF + 8, FIRST + 9 * SIZE)
    made.write(SHEAF + 16, FIRST + 8 * SIZE)
    made.write(SHEAF + 24, FIRST + 10 * SIZE)  # behind the end
    assert free(made) == {1, 3, 7, 8, 9}


def test_a_list_that_is_a_circle(made: MadeMemory) -> None:
    chain(made, 3, 1, 7, end=FIRST + SIZE)
    with pytest.raises(FaultError, match="does not end") as raised:
        free(made)
    assert raised.value.address == FIRST + SIZE
    assert made.reads < 100


@pytest.mark.parametrize("size", [17, (1 << 32) - 1])
def test_a_sheaf_has_no_more_objects_than_room(made: MadeMemory, size: int) -> None:
    made.write(BASE, SHEAF)
    made.write(SHEAF, size, 4)
    with pytest.raises(FaultError, match=f"{size} objects in a sheaf for 16") as raised:
        free(made)
    assert raised.value.address == SHEAF
    assert made.reads < 100


def slabs_of(image: Image, reader: SlabReader) -> Iterator[Slab]:
    """Return some slabs of each cache, but none of KFENCE, which drgn does not know."""
    seen: dict[int, int] = {}
    pool = kfence_pages(image)
    for piece in scan_pages(image):
        for page in piece.slabs:
            slab = None if page.page in pool else reader.slab(page)
            if slab is not None and seen.setdefault(slab.cache.address, 0) < 3:
                seen[slab.cache.address] += 1
                yield slab


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_objects_are_free_that_drgn_says_are(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    reader = SlabReader(image_of(prog))
    objects = FreeObjects(image_of(prog), reader)
    compared = {True: 0, False: 0}
    for slab in islice(slabs_of(image_of(prog), reader), 0, None, 7):
        for number in range(0, slab.objects, max(slab.objects // 4, 1)):
            info = slab_object_info(prog, reader.address(slab, number))
            assert info is not None
            assert objects.is_free(slab, number) is not info.allocated
            compared[not info.allocated] += 1
    assert compared[True] > 3 and compared[False] > 20


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_as_many_are_kept_as_drgn_says_are_free(lab: Lab, kernel: str) -> None:
    """The others that are free are on the list of the slab: ``objects - inuse``."""
    prog = lab.image(kernel, "4", "mixed").program()
    reader = SlabReader(image_of(prog))
    objects = FreeObjects(image_of(prog), reader)
    kept = 0
    for slab in islice(slabs_of(image_of(prog), reader), 0, None, 5):
        infos = [slab_object_info(prog, reader.address(slab, n)) for n in range(slab.objects)]
        free = sum(info is not None and not info.allocated for info in infos)
        assert objects.kept(slab) == free - (slab.objects - slab.inuse), slab
        kept += objects.kept(slab)
    assert kept > 3
