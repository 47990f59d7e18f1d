# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which slab objects are free, compared with drgn, and in lists that are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
from drgn import FaultError
from drgn.helpers.linux.slab import slab_object_info
from support.guests import KERNELS, Lab
from support.layouts import MadeImage
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

    def number(self, slab: Slab, address: int) -> int | None:
        number = (address - FIRST) // SIZE
        return number if 0 <= number < OBJECTS else None


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


def test_an_object_at_the_end_of_all_addresses(made: MadeMemory) -> None:
    """A damaged pointer: where its own pointer would be is not in memory."""
    chain(made, 3, end=(1 << 64) - 8)
    with pytest.raises(FaultError):
        free(made)


@pytest.mark.parametrize("size", [17, (1 << 32) - 1])
def test_a_sheaf_has_no_more_objects_than_room(made: MadeMemory, size: int) -> None:
    made.write(BASE, SHEAF)
    made.write(SHEAF, size, 4)
    with pytest.raises(FaultError, match=f"{size} objects in a sheaf for 16") as raised:
        free(made)
    assert raised.value.address == SHEAF
    assert made.reads < 100


#: Memory of two CPUs and two nodes, at which the kernels below keep objects.
OF_CPUS, OF_NODES, OTHER = (BASE + 0x4000, BASE + 0x5000), BASE + 0x6000, BASE + 0x7000
LIST_HEAD = "struct list_head { struct list_head *next; struct list_head *prev; };"
SHEAVES = """
    struct slab_sheaf { struct list_head barn_list; unsigned int size; int node;
                        void *objects[0]; };
    struct node_barn { long lock; struct list_head sheaves_full; };
    struct slub_percpu_sheaves { struct slab_sheaf *main; struct slab_sheaf *spare; };
    struct slab { void *slab_cache; void *freelist; };
"""
#: struct kmem_cache of 6.12 without CONFIG_SLAB_FREELIST_HARDENED, of 7.0 and of 7.1.
CACHES = {
    "6.12": """
        struct kmem_cache { struct kmem_cache_cpu *cpu_slab; unsigned int offset; };
        struct slab { struct kmem_cache *slab_cache; void *freelist; };
        struct kmem_cache_cpu { void *freelist; struct slab *slab; };
    """,
    "7.0": SHEAVES
    + """
        struct kmem_cache_node { long lock; struct node_barn *barn; };
        struct kmem_cache { struct slub_percpu_sheaves *cpu_sheaves; unsigned int offset;
                            unsigned int sheaf_capacity; struct kmem_cache_node *node[2]; };
    """,
    "7.1": SHEAVES
    + """
        struct per_node { void *node; struct node_barn *barn; };
        struct kmem_cache { struct slub_percpu_sheaves *cpu_sheaves; unsigned int offset;
                            unsigned int sheaf_capacity; struct per_node per_node[2]; };
    """,
}


def kernel(release: str, monkeypatch: pytest.MonkeyPatch) -> MadeImage:
    """Return a kernel with one cache, whose lists are all empty."""
    image = MadeImage()
    image.declare(LIST_HEAD + CACHES[release])
    image.given[slub.percpu_offsets] = dict(enumerate(OF_CPUS))
    monkeypatch.setattr(slub, "possible_nodes", lambda image: range(2))
    members = {"offset": 8}
    if release == "6.12":
        for start in OF_CPUS:
            image.make("struct kmem_cache_cpu", start, {})
    else:
        members |= {"sheaf_capacity": 4, "cpu_sheaves": 0x10}
        for start in OF_CPUS:
            image.make("struct slub_percpu_sheaves", start + 0x10, {})
    image.make("struct kmem_cache", CACHE, members)
    image.make("struct slab", SLAB, {"slab_cache": CACHE})
    image.write(FIRST, bytes(OBJECTS * SIZE))
    return image


def listed(image: MadeImage, *numbers: int, end: int = 0) -> int:
    """Link objects, whose pointers are not hardened; return the first."""
    places = [FIRST + number * SIZE for number in numbers]
    for place, after in zip(places, [*places[1:], end], strict=True):
        image.words(place + 8, after)
    return places[0]


def a_slab() -> Slab:
    cache = SlabCache(CACHE, "made", SIZE, SIZE, 0, False, SIZE)
    return Slab(SLAB, 0, 0, cache, OBJECTS, OBJECTS, None, {}, b"")


def found_free(image: Image) -> set[int]:
    objects = FreeObjects(image, MadeSlabs())  # type: ignore[arg-type]
    return {number for number in range(OBJECTS) if objects.is_free(a_slab(), number)}


def kept(image: Image) -> int:
    return FreeObjects(image, MadeSlabs()).kept(a_slab())  # type: ignore[arg-type]


def test_lists_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 6.19 a CPU has the free objects of the slab that it allocates from."""
    image = kernel("6.12", monkeypatch)
    assert (found_free(image), kept(image)) == (set(), 0)
    image.words(OF_CPUS[0], listed(image, 2, 5), SLAB)
    image.words(SLAB + 8, listed(image, 4, 1, 9))
    assert (found_free(image), kept(image)) == ({1, 2, 4, 5, 9}, 2)
    # The other CPU is between two slabs, or its slab is of another cache.
    image.words(OF_CPUS[1], listed(image, 7), 0)
    assert (found_free(image), kept(image)) == ({1, 2, 4, 5, 9}, 2)
    image.make("struct slab", OTHER, {"slab_cache": CACHE + 64})
    image.words(OF_CPUS[1], listed(image, 7), OTHER)
    assert (found_free(image), kept(image)) == ({1, 2, 4, 5, 9}, 2)
    # Another slab of the cache
    image.make("struct slab", OTHER, {"slab_cache": CACHE})
    image.words(OF_CPUS[1], FIRST + OBJECTS * SIZE)
    image.words(FIRST + OBJECTS * SIZE, 0, 0)
    assert (found_free(image), kept(image)) == ({1, 2, 4, 5, 9}, 2)


def sheaf(image: MadeImage, at: int, *numbers: int) -> int:
    image.make("struct slab_sheaf", at, {"size": len(numbers)})
    image.words(at + 24, *[FIRST + number * SIZE for number in numbers], FIRST + 30 * SIZE)
    return at


@pytest.mark.parametrize("release", ["7.0", "7.1"])
def test_sheaves_of_cpus_and_nodes(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = kernel(release, monkeypatch)
    assert found_free(image) == set()
    image.words(OF_CPUS[0] + 0x10, sheaf(image, SHEAF, 3, 1, 4, 5))
    image.words(OF_CPUS[1] + 0x18, sheaf(image, SHEAF + 0x100, 9))
    assert (found_free(image), kept(image)) == ({1, 3, 4, 5, 9}, 5)
    # Of two nodes, one has no barn. The other has two full sheaves.
    barn, first, second = OF_NODES, SHEAF + 0x200, SHEAF + 0x300
    image.make("struct node_barn", barn, {})
    sheaf(image, first, 10, 11)
    sheaf(image, second, 12)
    for link, after, before in (
        (barn + 8, first, second), (first, second, barn + 8), (second, barn + 8, first),
    ):  # fmt: skip
        image.words(link, after, before)
    if release == "7.0":
        image.make("struct kmem_cache_node", OTHER, {"barn": barn})
        image.words(CACHE + 16 + 8, OTHER)
    else:
        image.words(CACHE + 16 + 16 + 8, barn)
    assert (found_free(image), kept(image)) == ({1, 3, 4, 5, 9, 10, 11, 12}, 8)


def test_caches_without_sheaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 6.18 and 6.19 most have none."""
    image = kernel("7.0", monkeypatch)
    image.words(CACHE, 0)
    image.words(OF_CPUS[0], sheaf(image, SHEAF, 3))  # other percpu memory
    assert (found_free(image), kept(image)) == (set(), 0)


def test_lists_that_are_not_in_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in a list that is there is free. What is in none may be in the missing part."""
    image = kernel("6.12", monkeypatch)
    image.words(OF_CPUS[0], listed(image, 2, 5, end=0xFFFF888077700000), SLAB)
    image.words(OF_CPUS[1], listed(image, 6), SLAB)
    image.words(SLAB + 8, listed(image, 4))
    objects = FreeObjects(image, MadeSlabs())  # type: ignore[arg-type]
    assert all(objects.is_free(a_slab(), number) for number in (2, 4, 5, 6))
    with pytest.raises(FaultError) as raised:
        objects.is_free(a_slab(), 3)
    assert raised.value.address == 0xFFFF888077700008
    with pytest.raises(FaultError):
        objects.kept(a_slab())
    image.words(OF_CPUS[0], 0)
    image.words(SLAB + 8, 0xFFFF888077700000)
    objects = FreeObjects(image, MadeSlabs())  # type: ignore[arg-type]
    assert objects.is_free(a_slab(), 6)
    assert objects.kept(a_slab()) == 1
    with pytest.raises(FaultError):
        objects.is_free(a_slab(), 3)


@pytest.mark.parametrize(("broken", "is_read"), [(0, True), (9, True), (10, False)])
def test_lists_of_a_running_kernel(
    monkeypatch: pytest.MonkeyPatch, broken: int, is_read: bool
) -> None:
    """They change while they are read. They are read again, but not for ever."""
    image, tries = kernel("6.12", monkeypatch), 0
    place = listed(image, 2)
    image.words(OF_CPUS[0], place, SLAB)
    monkeypatch.setattr(MadeImage, "is_moving", True)

    def first(address: int, count: int, offset: int, physical: bool) -> bytes:
        nonlocal tries
        tries += 1
        return (0xFFFF888077700000 if tries <= broken else place).to_bytes(8, "little")

    image.prog.add_memory_segment(OF_CPUS[0], 8, first)
    objects = FreeObjects(image, MadeSlabs())  # type: ignore[arg-type]
    if is_read:
        assert objects.is_free(a_slab(), 2)
    else:
        with pytest.raises(FaultError):
            objects.is_free(a_slab(), 2)
    assert tries == min(broken + 1, 10)


def test_the_longest_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """MAX_OBJS_PER_PAGE; here three."""
    monkeypatch.setattr(slub, "_MOST_OBJECTS", 3)
    image = kernel("6.12", monkeypatch)
    image.words(SLAB + 8, listed(image, 4, 1, 9))
    assert found_free(image) == {1, 4, 9}
    image.words(SLAB + 8, listed(image, 4, 1, 9, 7))
    objects = FreeObjects(image, MadeSlabs())  # type: ignore[arg-type]
    assert [objects.is_free(a_slab(), number) for number in (4, 1, 9)] == [True] * 3
    with pytest.raises(FaultError, match="the list of free objects does not end") as raised:
        objects.is_free(a_slab(), 7)
    assert raised.value.address == FIRST + 7 * SIZE


def test_as_many_objects_as_a_slab_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """MAX_OBJS_PER_PAGE is 32767. Objects of 16 bytes link to the next one."""
    image = kernel("6.12", monkeypatch)
    first, count = FIRST + 0x100000, 32767
    links = (word for n in range(count) for word in (0, first + 16 * (n + 1)))
    image.words(first, *links)
    last = first + 16 * (count - 1)
    image.words(last + 8, 0)
    image.words(SLAB + 8, first)
    objects = FreeObjects(image, MadeSlabs())  # type: ignore[arg-type]
    assert not objects.is_free(a_slab(), 0)
    image.words(last + 8, last + 16)
    image.words(last + 24, 0)
    with pytest.raises(FaultError, match="does not end") as raised:
        objects.is_free(a_slab(), 0)
    assert raised.value.address == last + 16


def test_the_fullest_sheaf(made: MadeMemory) -> None:
    made.write(BASE, SHEAF)
    made.write(SHEAF, 16, 4)
    for number in range(17):
        made.write(SHEAF + 8 + 8 * number, FIRST + number * SIZE)
    assert free(made) == set(range(16))


def test_a_sheaf_of_a_cpu_that_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before it, and those of nodes, are read. Then nobody knows whether others are free."""
    image = kernel("7.1", monkeypatch)
    bad = sheaf(image, SHEAF + 0x100, 9)
    image.words(bad + 16, 5)  # of 4
    image.words(OF_CPUS[0] + 0x10, sheaf(image, SHEAF, 3), bad)
    barn = OF_NODES
    image.make("struct node_barn", barn, {})
    full = sheaf(image, SHEAF + 0x200, 12)
    image.words(barn + 8, full, full)
    image.words(full, barn + 8, barn + 8)
    image.words(CACHE + 16 + 16 + 8, barn)
    objects = FreeObjects(image, MadeSlabs())  # type: ignore[arg-type]
    assert [objects.is_free(a_slab(), number) for number in (3, 12)] == [True, True]
    for ask in (lambda: objects.is_free(a_slab(), 9), lambda: objects.kept(a_slab())):
        with pytest.raises(FaultError, match="5 objects in a sheaf for 4") as raised:
            ask()
        assert raised.value.address == bad


def test_percpu_pointers_wrap_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """The offset of a CPU is added to the pointer as in C."""
    image, pointer = kernel("7.0", monkeypatch), (1 << 64) - 0x1000
    image.given[slub.percpu_offsets] = {n: 0x1000 + start for n, start in enumerate(OF_CPUS)}
    image.words(CACHE, pointer + 0x10)
    image.words(OF_CPUS[1] + 0x10, sheaf(image, SHEAF, 3))
    assert (found_free(image), kept(image)) == ({3}, 1)


def test_the_lists_of_a_cache_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a running kernel, they are read for each object."""
    image = kernel("7.0", monkeypatch)
    image.words(OF_CPUS[0] + 0x10, sheaf(image, SHEAF, 3, 9))
    for is_moving in (False, True):
        monkeypatch.setattr(MadeImage, "is_moving", is_moving)
        objects = FreeObjects(image, MadeSlabs())  # type: ignore[arg-type]
        before = image.memory.reads
        assert objects.kept(a_slab()) == 2
        first = image.memory.reads - before
        assert objects.kept(a_slab()) == 2
        assert image.memory.reads - before == (2 * first if is_moving else first) > 0


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
