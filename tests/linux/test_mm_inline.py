# SPDX-License-Identifier: LGPL-2.1-or-later
"""Sizes of LRU lists, in lruvecs made by hand: two zones, and four generations."""

from __future__ import annotations

import pytest
from drgn import FaultError, Object
from support.layouts import FRAMES, MadeImage

from memcg_inspect.linux.lib.list import OnFault
from memcg_inspect.linux.mm import mm_inline
from memcg_inspect.linux.mm.mm_inline import LruReader
from memcg_inspect.linux.mm.mm_types import LruFlags
from memcg_inspect.linux.mm.page_flags import FlagBits, PageFlags, page_flags
from memcg_inspect.model import Coverage
from memcg_inspect.model_counters import CounterWord

PLACES, MISSING = 0xFFFF888030000000, 0xFFFF888077700000
#: Two lruvecs, of a memcg on two nodes.
FIRST, SECOND = (PLACES + n * 4096 for n in range(2))
MEMCG = 0x1000
KEYS = {(MEMCG, 0): FIRST, (MEMCG, 1): SECOND}
TASKS = PLACES + 0x10000
#: Where the generation is in the flags of a folio.
SHIFT = 56


def kernel(*, generations: bool = True, folios: str = "folios", walks: bool = True) -> MadeImage:
    """Return a kernel with two lruvecs whose lists are empty."""
    image = MadeImage()
    lrugen = "struct lru_gen_folio lrugen;" if generations else ""
    image.declare(
        f"""
        struct list_head {{ struct list_head *next; struct list_head *prev; }};
        struct page {{ unsigned long flags; struct list_head lru; unsigned long more[5]; }};
        struct lru_gen_folio {{
            unsigned long timestamps[4]; struct list_head {folios}[4][2][2];
            long protected; long nr_pages[4][2][2];
        }};
        struct lruvec {{ struct list_head lists[5]; {lrugen} }};
        struct mem_cgroup_per_node {{
            long id; struct lruvec lruvec; unsigned long lru_zone_size[2][5]; long more;
        }};
        struct lru_gen_mm_walk {{ struct lruvec *lruvec; int nr_pages[4][2][2]; int more; }};
        struct reclaim_state {{ long id; {"struct lru_gen_mm_walk *mm_walk;" * walks} }};
        struct task_struct {{ long id; struct reclaim_state *reclaim_state; }};
        """
    )
    names = ("INACTIVE_ANON", "ACTIVE_ANON", "INACTIVE_FILE", "ACTIVE_FILE", "UNEVICTABLE")
    image.enum("lru_list", **{f"LRU_{name}": n for n, name in enumerate(names)}, NR_LRU_LISTS=5)
    image.enum("zone_type", ZONE_NORMAL=0, ZONE_MOVABLE=1, __MAX_NR_ZONES=2)
    one = FlagBits(0, 1)
    bits = FlagBits(SHIFT, 3) if generations else None
    image.given[page_flags] = PageFlags(one, one, one, one, one, bits)
    for place in KEYS.values():
        image.make("struct mem_cgroup_per_node", place, {})
    return image


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tasks of all kernels, ``struct task_struct *``."""
    found: list[int] = []

    def find(image: MadeImage, _: OnFault) -> list[Object]:
        return [image.pointer("struct task_struct *", task) for task in found]

    monkeypatch.setattr(mm_inline, "find_tasks", find)
    return found


def pn(image: MadeImage, address: int) -> Object:
    return image.pointer("struct mem_cgroup_per_node *", address)


def read(image: MadeImage) -> tuple[LruReader, dict[tuple[int, int], mm_inline.Sizes], Coverage]:
    coverage = Coverage()
    reader = LruReader(image, coverage)
    return reader, reader.sizes({key: pn(image, at) for key, at in KEYS.items()}), coverage


def put(image: MadeImage, counter: Object, pages: int) -> int:
    at = counter.address_
    assert at is not None
    image.words(at, pages % (1 << 64))
    return at


def put_folio(image: MadeImage, head: Object, number: int, generation: int) -> None:
    """Make a folio the first of a list."""
    page = FRAMES.page(number)
    image.words(page, generation << SHIFT)
    at = head.address_
    assert at is not None
    image.words(at, page + 8, page + 8)


def of_lists(image: MadeImage, address: int) -> None:
    """Fill some lists of a lruvec."""
    one = pn(image, address)
    put(image, one.lru_zone_size[0][2], 5)
    put(image, one.lru_zone_size[1][1], 6)
    put(image, one.lru_zone_size[1][4], -2)
    put(image, one.lruvec.lrugen.nr_pages[0][1][0], 7)
    put(image, one.lruvec.lrugen.nr_pages[3][0][1], -8)
    put(image, one.lruvec.lrugen.nr_pages[2][1][0], 9)


BY_LIST = {
    "lru_zone_size[ZONE_NORMAL][LRU_INACTIVE_FILE]": {"lru_zone_size": 5},
    "lru_zone_size[ZONE_MOVABLE][LRU_ACTIVE_ANON]": {"lru_zone_size": 6},
    "lru_zone_size[ZONE_MOVABLE][LRU_UNEVICTABLE]": {"lru_zone_size": -2},
    "lrugen.nr_pages[0][LRU_GEN_FILE][ZONE_NORMAL]": {"nr_pages": 7},
    "lrugen.nr_pages[3][LRU_GEN_ANON][ZONE_MOVABLE]": {"nr_pages": -8},
    "lrugen.nr_pages[2][LRU_GEN_FILE][ZONE_NORMAL]": {"nr_pages": 9},
}
#: Where the generation in the flags is not known.
BY_TYPE = {
    "lru_zone_size[ZONE_MOVABLE][LRU_UNEVICTABLE]": {"lru_zone_size": -2},
    "all lists of LRU_GEN_FILE in ZONE_NORMAL": {"lru_zone_size": 5, "nr_pages": 16},
    "all lists of LRU_GEN_ANON in ZONE_MOVABLE": {"lru_zone_size": 6, "nr_pages": -8},
}


@pytest.mark.parametrize("folios", ["folios", "lists"])
def test_sizes_of_lists(folios: str) -> None:
    """Up to 6.2 ``lrugen->folios`` was ``lists``."""
    image = kernel(folios=folios)
    of_lists(image, SECOND)
    put_folio(image, pn(image, SECOND).lruvec.lrugen.member_(folios)[2][1][0], 5, 3)
    reader, sizes, coverage = read(image)
    assert sizes == {(MEMCG, 0): {}, (MEMCG, 1): BY_LIST}
    assert reader.by_generation is True
    assert (coverage.read, coverage.unreadable) == (2, 0)
    assert reader.walks == Coverage()


def test_kernels_without_generations() -> None:
    image = kernel(generations=False)
    put(image, pn(image, FIRST).lru_zone_size[0][3], 4)
    reader, sizes, _ = read(image)
    expected = {"lru_zone_size[ZONE_NORMAL][LRU_ACTIVE_FILE]": {"lru_zone_size": 4}}
    assert sizes == {(MEMCG, 0): expected, (MEMCG, 1): {}}
    assert reader.by_generation is True


def test_a_lruvec_that_is_not_in_the_image() -> None:
    image = kernel()
    of_lists(image, SECOND)
    image.forget(FIRST)
    _, sizes, coverage = read(image)
    assert sizes == {(MEMCG, 1): BY_LIST}
    assert coverage.read == 1
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("sizes of LRU lists", FIRST)
    assert "not made" in missed.reason


@pytest.mark.parametrize(
    ("in_flags", "is_right"),
    [
        ((1, 4), True),
        ((2, 4), True),  # half of them
        ((2, 3), False),
        ((0, 4), False),
        ((1, 5), False),
        ((1, 0), False),
    ],
)
def test_generations_of_first_folios(in_flags: tuple[int, int], is_right: bool) -> None:
    """Each has one, and at least half of them that of their list."""
    image = kernel()
    of_lists(image, SECOND)
    folios = pn(image, SECOND).lruvec.lrugen.folios
    put_folio(image, folios[0][1][0], 5, in_flags[0])
    put_folio(image, folios[3][0][1], 6, in_flags[1])
    empty = folios[1][0][0].address_
    image.words(empty or 0, empty or 0, empty or 0)
    reader, sizes, coverage = read(image)
    assert reader.by_generation is is_right
    assert sizes[MEMCG, 1] == (BY_LIST if is_right else BY_TYPE)
    assert not coverage.unreadable


def test_a_first_folio_that_is_not_in_the_image() -> None:
    """The others tell whether generations are right."""
    image = kernel()
    folios = pn(image, FIRST).lruvec.lrugen.folios
    image.words(folios[0][0][0].address_ or 0, MISSING + 8)
    put_folio(image, folios[3][0][1], 6, 2)
    reader, _, coverage = read(image)
    assert reader.by_generation is False
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("first folio of an LRU list", MISSING)
    assert "not made" in missed.reason


def test_how_many_folios_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check ends with the lruvec that makes them enough."""
    image = kernel()
    put_folio(image, pn(image, FIRST).lruvec.lrugen.folios[0][0][0], 5, 1)
    put_folio(image, pn(image, SECOND).lruvec.lrugen.folios[0][0][0], 6, 0)
    for most, is_right in ((1, True), (2, False)):
        monkeypatch.setattr(mm_inline, "_MOST_SAMPLES", most)
        assert read(image)[0].by_generation is is_right


def test_the_most_folios_that_are_looked_at() -> None:
    """Of 16 lruvecs with 16 lists each; what is behind them is not looked at."""
    image = kernel()
    places = [PLACES + 0x100000 + n * 4096 for n in range(17)]
    for n, place in enumerate(places):
        image.make("struct mem_cgroup_per_node", place, {})
        for generation in range(4):
            for kind, zone in ((0, 0), (0, 1), (1, 0), (1, 1)):
                head = pn(image, place).lruvec.lrugen.folios[generation][kind][zone]
                put_folio(image, head, 100 + generation + 4 * (n == 16), generation + 1)
        if n == 16:
            put_folio(image, pn(image, place).lruvec.lrugen.folios[0][0][0], 200, 0)
    for first, is_right in ((0, True), (1, False)):
        reader = LruReader(image, Coverage())
        reader.sizes({(MEMCG, n): pn(image, places[n]) for n in range(first, 17)})
        assert reader.by_generation is is_right


# Batches of walks


def put_walk(image: MadeImage, task: int, lruvec: int, **pages: int) -> int:
    """Make a task that walks page tables; return it."""
    state, walk = task + 64, task + 128
    image.make("struct task_struct", task, {"reclaim_state": state})
    image.make("struct reclaim_state", state, {"mm_walk": walk})
    image.make("struct lru_gen_mm_walk", walk, {"lruvec": lruvec})
    batch = image.pointer("struct lru_gen_mm_walk *", walk).nr_pages
    for name, number in pages.items():
        generation, kind, zone = (int(digit) for digit in name[1:])
        at = batch[generation][kind][zone].address_ or 0
        image.write(at, number.to_bytes(4, "little", signed=True))
    return task


def lruvec(image: MadeImage, address: int) -> int:
    return pn(image, address).lruvec.address_ or 0


def test_batches_of_page_table_walks(tasks: list[int]) -> None:
    """They are of lruvecs, and more than one task may have one. Other tasks have none."""
    image = kernel()
    of_lists(image, SECOND)
    for n in range(5):
        image.make("struct task_struct", TASKS + 512 * n, {})
    second = lruvec(image, SECOND)
    tasks += [
        TASKS,
        put_walk(image, TASKS + 512, MISSING, n000=3),
        put_walk(image, TASKS + 1024, second, n010=-4, n301=70000),
        put_walk(image, TASKS + 1536, second, n010=1),
    ]
    image.make("struct task_struct", TASKS + 2048, {"reclaim_state": TASKS + 2048 + 64})
    image.make("struct reclaim_state", TASKS + 2048 + 64, {})
    tasks.append(TASKS + 2048)
    reader, sizes, _ = read(image)
    expected = {item: dict(members) for item, members in BY_LIST.items()}
    expected["lrugen.nr_pages[0][LRU_GEN_FILE][ZONE_NORMAL]"]["mm_walk"] = -3
    expected["lrugen.nr_pages[3][LRU_GEN_ANON][ZONE_MOVABLE]"]["mm_walk"] = 70000
    assert sizes == {(MEMCG, 0): {}, (MEMCG, 1): expected}
    assert reader.walks == Coverage()


def test_walks_that_are_not_in_the_image(tasks: list[int]) -> None:
    """The other tasks are read."""
    image = kernel()
    of_lists(image, SECOND)
    image.make("struct task_struct", TASKS, {"reclaim_state": MISSING})
    tasks += [TASKS, put_walk(image, TASKS + 512, lruvec(image, SECOND), n200=1)]
    reader, sizes, coverage = read(image)
    assert sizes[MEMCG, 1]["lrugen.nr_pages[2][LRU_GEN_ANON][ZONE_NORMAL]"] == {"mm_walk": 1}
    [missed] = reader.walks.examples
    assert (missed.what, missed.address) == ("walk of page tables", MISSING + 8)
    assert "not made" in missed.reason
    assert not coverage.unreadable


@pytest.mark.parametrize("why", ["6.1", "unknown generations"])
def test_walks_that_nothing_is_known_of(tasks: list[int], why: str) -> None:
    """Without the member, and where lists are told apart by their type only."""
    image = kernel(walks=why != "6.1")
    of_lists(image, SECOND)
    image.make("struct task_struct", TASKS, {"reclaim_state": MISSING})
    tasks.append(TASKS)
    if why != "6.1":
        put_folio(image, pn(image, SECOND).lruvec.lrugen.folios[0][1][0], 5, 7)
    reader, sizes, _ = read(image)
    assert sizes[MEMCG, 1] == (BY_LIST if why == "6.1" else BY_TYPE)
    assert reader.walks == Coverage()


def test_tasks_that_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(_: MadeImage, on_fault: OnFault) -> list[Object]:
        on_fault(FaultError("a part of the tasks", 5))
        return []

    monkeypatch.setattr(mm_inline, "find_tasks", find)
    image = kernel()
    of_lists(image, FIRST)
    assert [(e.what, e.address) for e in read(image)[0].walks.examples] == [
        ("walk of page tables", 5)
    ]


# Names and words


def test_words_of_lists() -> None:
    image = kernel()
    one = pn(image, SECOND)
    found = list(LruReader(image, Coverage()).words(one))
    assert len(found) == 2 * 5 + 4 * 2 * 2
    by_item = {word.item: word for word in found}
    for item, counter in (
        ("lru_zone_size[ZONE_NORMAL][LRU_INACTIVE_ANON]", one.lru_zone_size[0][0]),
        ("lru_zone_size[ZONE_MOVABLE][LRU_ACTIVE_FILE]", one.lru_zone_size[1][3]),
        ("lrugen.nr_pages[0][LRU_GEN_ANON][ZONE_NORMAL]", one.lruvec.lrugen.nr_pages[0][0][0]),
        ("lrugen.nr_pages[3][LRU_GEN_FILE][ZONE_MOVABLE]", one.lruvec.lrugen.nr_pages[3][1][1]),
        ("lrugen.nr_pages[1][LRU_GEN_ANON][ZONE_MOVABLE]", one.lruvec.lrugen.nr_pages[1][0][1]),
    ):
        assert by_item[item] == CounterWord("lists", item, counter.address_ or 0, 8)
    image = kernel(generations=False)
    assert len(list(LruReader(image, Coverage()).words(pn(image, SECOND)))) == 2 * 5


def test_names_of_lists() -> None:
    """Zones that have no name have their number."""
    reader = LruReader(kernel(), Coverage())
    for flags, item in (
        (LruFlags(True, False, False, False, 0), "lru_zone_size[ZONE_MOVABLE][LRU_INACTIVE_FILE]"),
        (LruFlags(True, True, False, True, 0), "lru_zone_size[ZONE_MOVABLE][LRU_ACTIVE_ANON]"),
        (LruFlags(True, True, True, True, 0), "lru_zone_size[ZONE_MOVABLE][LRU_UNEVICTABLE]"),
        (LruFlags(True, False, False, True, 1), "lrugen.nr_pages[0][LRU_GEN_ANON][ZONE_MOVABLE]"),
        (LruFlags(True, False, True, False, 4), "lrugen.nr_pages[3][LRU_GEN_FILE][ZONE_MOVABLE]"),
    ):
        assert reader.item(1, flags) == item
        assert reader.item(7, flags) == item.replace("ZONE_MOVABLE", "7")
    reader.by_generation = False
    for swapbacked, kind in ((False, "FILE"), (True, "ANON")):
        for generation in (0, 1):
            flags = LruFlags(True, True, False, swapbacked, generation)
            assert reader.item(0, flags) == f"all lists of LRU_GEN_{kind} in ZONE_NORMAL"
    flags = LruFlags(True, True, True, True, 0)
    assert reader.item(0, flags) == "lru_zone_size[ZONE_NORMAL][LRU_UNEVICTABLE]"
