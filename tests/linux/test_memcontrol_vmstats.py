# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters of memcgs and lruvecs, in structures made as mm/memcontrol.c of several releases has them.

What is in each word is written down here, so that every value can be worked out by hand.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from drgn import FaultError, Object, SymbolBinding, sizeof
from support.guests import Lab
from support.layouts import MadeImage

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm import memcontrol_vmstats
from memcg_inspect.linux.mm.memcontrol import on_default_hierarchy
from memcg_inspect.linux.mm.memcontrol_vmstats import (
    LRU_ITEMS,
    ByCpu,
    Cell,
    StatArrays,
    StatReader,
    event_slots,
    item_names,
    lruvec_items,
    memcg_items,
    node_stat_items,
    reparented_items,
    slot_names,
    stat_index,
    stat_items,
)
from memcg_inspect.model import ImageError, Stat
from memcg_inspect.model_counters import CounterWord
from memcg_inspect.model_kernel import LocalItems

VARIABLES, MISSING = 0xFFFFFFFF82000000, 0xFFFF888077700000
MEMCG, PN, STATS, LRUVEC_STATS = (0xFFFF888030000000 + n * 4096 for n in range(4))
#: The memory of both CPUs, and the ``__percpu`` pointers of the memcg and of its lruvec.
CPUS = (0xFFFF888040000000, 0xFFFF888040100000)
PERCPU, LRUVEC_PERCPU = 0x10000, 0x20000

#: Some items: three of nodes, of which memcgs do not count the second, and two of memcgs.
SLAB, DIRTIED, TABLES, SWAP, KMEM = range(5)
NODE_ITEMS = {"NR_SLAB_RECLAIMABLE_B": 0, "NR_DIRTIED": 1, "NR_PAGETABLE": 2}
MEMCG_ITEMS = {"MEMCG_SWAP": 3, "MEMCG_KMEM": 4, "MEMCG_NR_STAT": 5}
ALL = (*NODE_ITEMS, *list(MEMCG_ITEMS)[:2])
EVENTS = {"PGFAULT": 0, "PGMAJFAULT": 1}


class Release(NamedTuple):
    """
    :ivar local: whether ``state_local`` exists
    :ivar embedded: whether ``struct lruvec_stats`` is in ``struct mem_cgroup_per_node``
    :ivar index: ``mem_cgroup_stats_index``; ``None`` if an item is its own index
    :ivar atomics: whether changes made in an NMI are counted in atomics
    """

    local: bool = True
    embedded: bool = False
    index: tuple[int, ...] | None = (0, 0xFF, 1, 2, 3)
    atomics: bool = False

    @property
    def lengths(self) -> tuple[int, int]:
        """Return how many counters a memcg has, and how many a lruvec."""
        return (5, 3) if self.index is None else (4, 2)

    def slot(self, item: int) -> int:
        return item if self.index is None else self.index[item]


RELEASES = {
    "6.2": Release(local=False, embedded=True, index=None),
    "6.9": Release(embedded=True, index=None),
    "6.13": Release(),
    "6.16, NMI": Release(atomics=True),
}


def kernel(release: str, first: str = "") -> MadeImage:
    """
    Return a kernel with one memcg and one node, whose counters are all 0.

    :param first: array that comes before the others in the parts of CPUs
    """
    of = RELEASES[release]
    image, (own, lruvec) = MadeImage(), of.lengths
    local = "long state_local[{0}];" if of.local else ""
    names = sorted(("state", "events", "state_prev", "events_prev"), key=lambda n: n != first)
    arrays = " ".join(f"long {n}[{own if n.startswith('state') else 2}];" for n in names)
    more = "unsigned long events_local[2];" if of.local else ""
    image.declare(
        f"""
        struct atomic {{ int counter; }};
        struct memcg_vmstats {{
            long state[{own}]; unsigned long events[2]; {local.format(own)} {more}
            long state_pending[{own}]; unsigned long events_pending[2]; long updates;
        }};
        struct memcg_vmstats_percpu {{
            unsigned int stats_updates; void *parent; void *vmstats;
            {arrays}
        }};
        struct lruvec_stats {{
            long state[{lruvec}]; {local.format(lruvec)} long state_pending[{lruvec}];
        }};
        struct lruvec_stats_percpu {{ long state[{lruvec}]; long state_prev[{lruvec}]; }};
        struct mem_cgroup {{
            struct memcg_vmstats *vmstats; struct memcg_vmstats_percpu *vmstats_percpu;
            {"struct atomic kmem_stat;" if of.atomics else ""}
        }};
        struct mem_cgroup_per_node {{
            struct lruvec_stats_percpu *lruvec_stats_percpu;
            struct lruvec_stats {"" if of.embedded else "*"}lruvec_stats;
            {"struct atomic slab_reclaimable; struct atomic slab_unreclaimable;" * of.atomics}
        }};
        """
    )
    image.enum("node_stat_item", **NODE_ITEMS, NR_VM_NODE_STAT_ITEMS=3)
    image.enum("memcg_stat_item", **MEMCG_ITEMS)
    image.variable("__per_cpu_offset", "unsigned long[2]", VARIABLES)
    image.words(VARIABLES, *CPUS)
    if of.index is not None:
        image.variable("mem_cgroup_stats_index", "unsigned char[5]", VARIABLES + 64)
        image.write(VARIABLES + 64, bytes(of.index))
    image.make("struct mem_cgroup", MEMCG, {"vmstats": STATS, "vmstats_percpu": PERCPU})
    image.make("struct memcg_vmstats", STATS, {})
    image.make("struct mem_cgroup_per_node", PN, {"lruvec_stats_percpu": LRUVEC_PERCPU})
    if not of.embedded:
        image.words(PN + 8, LRUVEC_STATS)
        image.make("struct lruvec_stats", LRUVEC_STATS, {})
    for start in CPUS:
        image.make("struct memcg_vmstats_percpu", start + PERCPU, {"vmstats": STATS})
        image.make("struct lruvec_stats_percpu", start + LRUVEC_PERCPU, {})
    return image


def memcg(image: MadeImage, address: int = MEMCG) -> Object:
    return image.pointer("struct mem_cgroup *", address)


def pn(image: MadeImage, address: int = PN) -> Object:
    return image.pointer("struct mem_cgroup_per_node *", address)


def put(image: MadeImage, array: Object, slot: int, value: int) -> int:
    """Write an element of an array of counters; return its address."""
    address = array[slot].address_
    assert address is not None
    image.words(address, value % (1 << 64))
    return address


def of_cpu(image: MadeImage, cpu: int, of: str = "memcg_vmstats", at: int = PERCPU) -> Object:
    return image.pointer(f"struct {of}_percpu *", CPUS[cpu] + at)


@pytest.mark.parametrize("release", RELEASES)
def test_counters_of_a_memcg(release: str) -> None:
    image, of = kernel(release), RELEASES[release]
    stats, slot = memcg(image).vmstats, of.slot(KMEM)
    put(image, stats.state, slot, 100)
    put(image, stats.state_pending, slot, -3)
    if of.local:
        put(image, stats.state_local, slot, 40)
    for cpu, now, before in ((0, 7, 5), (1, -10, 0)):
        put(image, of_cpu(image, cpu).state, slot, now)
        put(image, of_cpu(image, cpu).state_prev, slot, before)
    if of.local:  # a counter that nothing else has changed
        put(image, stats.state_local, of.slot(TABLES), 6)
    put(image, stats.state_pending, of.slot(SWAP), 1)
    changes: ByCpu = {}
    found = StatReader(image, ALL).memcg(memcg(image), changes)
    zero, known = 0 if of.local else None, set(ALL)
    if of.index is not None:
        known.remove("NR_DIRTIED")
    assert found == {
        **dict.fromkeys(known, Stat(0, 0, 0, zero)),
        "NR_PAGETABLE": Stat(0, 0, 0, 6 if of.local else None),
        "MEMCG_SWAP": Stat(0, 1, 0, zero),
        "MEMCG_KMEM": Stat(100, -3, -8, 40 if of.local else None),
    }
    assert changes == {0: {"MEMCG_KMEM": 2}, 1: {"MEMCG_KMEM": -10}}


@pytest.mark.parametrize("release", RELEASES)
def test_counters_of_a_lruvec(release: str) -> None:
    """It has none of the items that only memcgs have."""
    image, of = kernel(release), RELEASES[release]
    stats, slot = pn(image).lruvec_stats, of.slot(TABLES)
    reader = StatReader(image, ALL)
    zero = Stat(0, 0, 0, 0 if of.local else None)
    assert reader.lruvec(pn(image)) == dict.fromkeys(
        [name for name in NODE_ITEMS if of.index is None or name != "NR_DIRTIED"], zero
    )
    put(image, stats.state, slot, 9)
    put(image, stats.state_pending, slot, 2)
    put(image, of_cpu(image, 1, "lruvec_stats", LRUVEC_PERCPU).state, slot, 4)
    found = reader.lruvec(pn(image))
    assert found["NR_PAGETABLE"] == Stat(9, 2, 4, zero.local)
    assert found["NR_SLAB_RECLAIMABLE_B"] == zero


def test_counters_that_are_not_flushed_yet() -> None:
    """They are 0 wherever the kernel adds up, until a flush: only a CPU has them."""
    image = kernel("6.13")
    reader = StatReader(image, ALL)
    assert reader.memcg_arrays(memcg(image)).is_zero
    put(image, of_cpu(image, 1).state, 3, 12)
    assert not reader.memcg_arrays(memcg(image)).is_zero
    assert reader.memcg(memcg(image))["MEMCG_KMEM"] == Stat(0, 0, 12, 0)
    put(image, of_cpu(image, 1).state, 3, 0)
    put(image, memcg(image).vmstats.events_pending, 1, 1)
    assert not reader.memcg_arrays(memcg(image)).is_zero


def test_nothing_behind_the_counters_is_read() -> None:
    """The memory behind those of a CPU may be missing."""
    image = kernel("6.13")
    at = 0x80000 - sizeof(image.type("struct memcg_vmstats_percpu"))
    for start in CPUS:
        image.make("struct memcg_vmstats_percpu", start + at, {})
    image.make("struct mem_cgroup", MEMCG, {"vmstats": STATS, "vmstats_percpu": at})
    put(image, of_cpu(image, 0, at=at).state, 3, 4)
    reader = StatReader(image, ALL)
    assert reader.memcg(memcg(image))["MEMCG_KMEM"] == Stat(0, 0, 4, 0)
    assert sum(w.pending or 0 for w in reader.memcg_words(memcg(image))) == 4


def test_changes_made_in_an_nmi() -> None:
    """They wait in atomics, and are changes that are not flushed."""
    image = kernel("6.16, NMI")
    reader = StatReader(image, ALL)
    put(image, memcg(image).vmstats.state, 3, 8)
    image.write(memcg(image).kmem_stat.counter.address_ or 0, (-6 % 2**32).to_bytes(4, "little"))
    image.write(pn(image).slab_reclaimable.counter.address_ or 0, b"\x05")
    image.write(pn(image).slab_unreclaimable.counter.address_ or 0, b"\x07")
    assert reader.memcg(memcg(image))["MEMCG_KMEM"] == Stat(8, 0, -6, 0)
    assert reader.lruvec(pn(image)) == {
        "NR_SLAB_RECLAIMABLE_B": Stat(0, 0, 5, 0),
        "NR_PAGETABLE": Stat(0, 0, 0, 0),
    }
    # Those of items that nobody asked for are left out.
    assert StatReader(image, ["MEMCG_SWAP"]).memcg(memcg(image)).keys() == {"MEMCG_SWAP"}


def test_items_that_share_an_index() -> None:
    """A damaged table gives an index to two items. Nobody knows whose counter it is."""
    image = kernel("6.13")
    image.write(VARIABLES + 64, bytes([0, 0xFF, 3, 2, 3]))
    put(image, memcg(image).vmstats.state, 3, 11)
    found = StatReader(image, ALL).memcg(memcg(image))
    assert found.keys() == {"NR_SLAB_RECLAIMABLE_B", "MEMCG_SWAP"}


@pytest.mark.parametrize("item", [SLAB, TABLES, SWAP, KMEM])
def test_an_item_that_lost_its_index(item: int) -> None:
    """A damaged table says that memcgs do not count it. Its counter has no other item."""
    image, table = kernel("6.13"), [0, 0xFF, 1, 2, 3]
    table[item] = 0xFF
    image.write(VARIABLES + 64, bytes(table))
    free = ({0, 1, 2, 3} - set(table)).pop()
    with pytest.raises(ImageError, match=f"_stats_index is damaged: no item has the index {free}$"):
        stat_index(image)


def test_events_of_a_memcg() -> None:
    """They are beside the other counters, in arrays of their own."""
    image = kernel("6.13")
    stats = memcg(image).vmstats
    put(image, stats.events, 1, 20)
    put(image, stats.events_pending, 1, 2)
    put(image, stats.events_local, 1, 15)
    put(image, of_cpu(image, 1).events, 1, 9)
    put(image, of_cpu(image, 1).events_prev, 1, 6)
    changes: ByCpu = {}
    found = StatReader(image, ALL, EVENTS).memcg(memcg(image), changes)
    assert found["PGMAJFAULT"] == Stat(20, 2, 3, 15)
    assert found["PGFAULT"] == found["MEMCG_KMEM"] == Stat(0, 0, 0, 0)
    assert changes == {1: {"PGMAJFAULT": 3}}
    assert "PGFAULT" not in StatReader(image, ALL).memcg(memcg(image))


@pytest.mark.parametrize("first", ["state", "events", "state_prev", "events_prev"])
def test_any_array_may_be_the_first(first: str) -> None:
    image = kernel("6.13", first)
    for cpu, now, before in ((0, 9, 4), (1, 0, 2)):
        part = of_cpu(image, cpu)
        for array, slot, value in (
            *((part.state, 3, now), (part.state_prev, 3, before)),
            *((part.events, 1, 10 * now), (part.events_prev, 1, 10 * before)),
        ):
            put(image, array, slot, value)
    found = StatReader(image, ALL, EVENTS).memcg(memcg(image))
    assert (found["MEMCG_KMEM"].percpu, found["PGMAJFAULT"].percpu) == (3, 30)


def arrays(image: MadeImage) -> StatArrays:
    return StatReader(image, ALL).memcg_arrays(memcg(image))


def test_what_cpus_have_flushed() -> None:
    """The kernel adds it up in a ``long``, which wraps around."""
    image, most = kernel("6.13"), (1 << 63) - 1
    first, second = of_cpu(image, 0).state_prev, of_cpu(image, 1).state_prev
    put(image, of_cpu(image, 0).state, 0, 99)
    assert arrays(image).flushed() == (0, 0, 0, 0)
    put(image, first, 0, 3)
    put(image, first, 1, most)
    put(image, first, 2, -5)
    assert arrays(image).flushed() == (3, most, -5, 0)
    put(image, second, 0, 4)
    put(image, second, 1, 1)
    put(image, second, 2, 5)
    put(image, second, 3, -1)
    assert arrays(image).flushed() == (7, -most - 1, 0, -1)
    put(image, first, 1, -most)
    put(image, second, 1, -2)
    assert arrays(image).flushed() == (7, most, 0, -1)


def test_whether_a_cpu_has_changed_its_counters() -> None:
    image = kernel("6.13")
    reader, before = StatReader(image, ALL), arrays(image)
    put(image, of_cpu(image, 0).events, 1, 1)
    after = arrays(image)
    assert after.is_same(0, before) and after.is_same(1, before)
    events = reader.event_arrays(after), reader.event_arrays(before)
    assert not events[0].is_same(0, events[1])
    assert events[0].is_same(1, events[1])
    for array in (of_cpu(image, 1).state, of_cpu(image, 1).state_prev):
        put(image, array, 3, 5)
        now = arrays(image)
        assert now.is_same(0, before)
        assert not now.is_same(1, before) and not before.is_same(1, now)
        put(image, array, 3, 0)


@pytest.mark.parametrize("release", ["6.2", "6.13"])
def test_words_of_a_memcg(release: str) -> None:
    image, of = kernel(release), RELEASES[release]
    stats, slot = memcg(image).vmstats, of.slot(KMEM)
    expected = {
        ("state", None): (put(image, stats.state, slot, 50), None),
        ("state_pending", None): (put(image, stats.state_pending, slot, -4), -4),
    }
    if of.local:
        expected["state_local", None] = put(image, stats.state_local, slot, 30), None
    for cpu, now, before in ((0, 7, 5), (1, 2, 9)):
        put(image, of_cpu(image, cpu).state_prev, slot, before)
        place = put(image, of_cpu(image, cpu).state, slot, now)
        expected["percpu", cpu] = place, now - before
    found = list(StatReader(image, ALL).memcg_words(memcg(image)))
    assert {w.item for w in found} == {n for n in ALL if of.index is None or n != "NR_DIRTIED"}
    assert [w for w in found if w.item == "MEMCG_KMEM"] == [
        CounterWord(array, "MEMCG_KMEM", address, 8, cpu=cpu, **pending(amount))
        for (array, cpu), (address, amount) in expected.items()
    ]


def pending(amount: int | None) -> dict[str, int]:
    return {} if amount is None else {"pending": amount}


@pytest.mark.parametrize("release", ["6.9", "6.13"])
def test_words_of_a_lruvec(release: str) -> None:
    image, of = kernel(release), RELEASES[release]
    found = {(w.array, w.item, w.cpu): w for w in StatReader(image, ALL).lruvec_words(pn(image))}
    slot = of.slot(TABLES)
    state = pn(image).lruvec_stats.state[slot].address_
    assert found["state", "NR_PAGETABLE", None].address == state
    part = of_cpu(image, 1, "lruvec_stats", LRUVEC_PERCPU).state[slot].address_
    assert found["percpu", "NR_PAGETABLE", 1].address == part
    assert not {item for _, item, _ in found} & MEMCG_ITEMS.keys()


def test_many_memcgs_of_which_some_are_not_in_the_image() -> None:
    """Each that is not there has an error, and the others are read all the same."""
    image = kernel("6.13")
    put(image, memcg(image).vmstats.state, 0, 1)
    put(image, pn(image).lruvec_stats.state, 0, 2)
    lost = {"no stats": (MISSING, PERCPU), "no parts": (STATS, 0x700000)}
    for n, (stats, percpu) in enumerate(lost.values(), 1):
        members = {"vmstats": stats, "vmstats_percpu": percpu}
        image.make("struct mem_cgroup", MEMCG + 64 * n, members)
    holders: dict[Cell, Object] = {
        (1, None): memcg(image, MISSING),
        (2, None): memcg(image, MEMCG + 64),
        (3, None): memcg(image, MEMCG + 128),
        (4, None): memcg(image),
        (4, 0): pn(image),
        (5, 0): pn(image, MISSING),
    }
    reader = StatReader(image, ALL)
    found = dict(reader.all_arrays(holders))
    assert found.keys() == holders.keys()
    errors = {cell for cell, one in found.items() if isinstance(one, FaultError)}
    assert errors == {(1, None), (2, None), (3, None), (5, 0)}
    own, on_node = found[4, None], found[4, 0]
    assert isinstance(own, StatArrays) and isinstance(on_node, StatArrays)
    assert (own.state()[0], on_node.state()[0]) == (1, 2)
    assert own == reader.memcg_arrays(memcg(image))
    with pytest.raises(FaultError):
        reader.memcg(memcg(image, MEMCG + 128))


def test_names_of_items() -> None:
    """The end of the items of nodes is the first item of memcgs. A group has the name of its first
    item, too."""
    image = kernel("6.13")
    items = {"WORKINGSET_REFAULT_BASE": 1, "WORKINGSET_REFAULT_ANON": 1, "NR_PAGETABLE": 2}
    image.enum("node_stat_item", NR_FREE=0, **items, NR_VM_NODE_STAT_ITEMS=3)
    assert list(node_stat_items(image).items()) == [
        (0, "NR_FREE"), (1, "WORKINGSET_REFAULT_ANON"), (2, "NR_PAGETABLE"),
    ]  # fmt: skip
    assert item_names(image)[3] == "MEMCG_SWAP"
    assert slot_names(image) == {
        0: "NR_FREE", 1: "NR_PAGETABLE", 2: "MEMCG_SWAP", 3: "MEMCG_KMEM",
    }  # fmt: skip
    old = kernel("6.9")
    assert slot_names(old) == item_names(old)
    # An index of a table that is longer than the kernel has items has no name.
    image = kernel("6.13")
    image.variable("mem_cgroup_stats_index", "unsigned char[7]", VARIABLES + 64)
    image.write(VARIABLES + 64 + 5, bytes([4, 5]))
    assert set(slot_names(image)) == {0, 1, 2, 3, 4}


def with_events(length: int, *table: int) -> MadeImage:
    """Return a kernel that says that memcgs count these events."""
    image = kernel("6.13")
    image.enum("vm_event_item", PGPGIN=0, PGFAULT=4, PGMAJFAULT=7)
    image.variable("memcg_vm_event_stat", f"unsigned int[{length}]", VARIABLES + 128)
    image.write(VARIABLES + 128, b"".join(event.to_bytes(4, "little") for event in table))
    return image


def test_indexes_of_events() -> None:
    assert list(event_slots(with_events(2, 7, 4)).items()) == [("PGMAJFAULT", 0), ("PGFAULT", 1)]
    # What kallsyms shows behind the table is no part of it.
    assert event_slots(with_events(3, 7, 4, 99)) == {"PGMAJFAULT": 0, "PGFAULT": 1}


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ((1, 7), "it is too short"),
        ((2, 7, 5), "it has unknown events"),
        ((2, 7, 7), "it has an event twice"),
    ],
)
def test_a_damaged_table_of_events(table: tuple[int, ...], why: str) -> None:
    with pytest.raises(ImageError, match=f"^memcg_vm_event_stat is damaged: {why}$"):
        event_slots(with_events(*table))


class Reparenting(NamedTuple):
    """
    A kernel that may give counters of a removed memcg to its parent.

    :ivar has_function: whether it has ``reparent_memcg_lruvec_state_local()``
    :ivar v2: whether memcgs are on the cgroup v2 hierarchy
    :ivar v1: whether it was built with ``CONFIG_MEMCG_V1``
    :ivar binding: of ``mod_memcg_lruvec_state()``, which became global in 7.3
    """

    has_function: bool = True
    v2: bool = True
    v1: bool = True
    binding: SymbolBinding | None = SymbolBinding.LOCAL


def reparented(case: Reparenting) -> LocalItems:
    image = MadeImage()
    image.given[on_default_hierarchy] = case.v2
    image.declare(f"struct mem_cgroup {{ long id; {'long tcpmem;' if case.v1 else ''} }};")
    if case.has_function:
        image.symbol_at("reparent_memcg_lruvec_state_local", VARIABLES + 128)
    if case.binding is not None:
        image.symbol_at("mod_memcg_lruvec_state", VARIABLES + 192, binding=case.binding)
    return reparented_items(image)


def test_local_counters_that_move_to_the_parent() -> None:
    """On cgroup v1 since 7.1, on cgroup v2 since 7.3. A kernel without v1 has the function then."""
    on_v2 = {*LRU_ITEMS, "NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B"}
    old = Reparenting(has_function=False)
    assert reparented(old) == reparented(old._replace(v2=False)) == LocalItems()
    for v1_only in (Reparenting(), Reparenting(binding=None)):
        assert reparented(v1_only) == LocalItems()
    newer = Reparenting(binding=SymbolBinding.GLOBAL)
    for v2 in (newer, Reparenting(v1=False), Reparenting(v1=False, binding=None)):
        assert reparented(v2) == LocalItems(frozenset(on_v2), frozenset(on_v2))
    found = reparented(Reparenting(v2=False))
    assert found.of_nodes == set(LRU_ITEMS)
    # memcg1_stats[] of mm/memcontrol-v1.c
    assert found.of_memcgs == {
        *LRU_ITEMS,
        *("NR_FILE_PAGES", "NR_ANON_MAPPED", "NR_ANON_THPS", "NR_SHMEM", "NR_FILE_MAPPED"),
        *("NR_FILE_DIRTY", "NR_WRITEBACK", "WORKINGSET_REFAULT_ANON", "WORKINGSET_REFAULT_FILE"),
        *("MEMCG_SWAP", "NR_SWAPCACHE"),
    }
    assert list(LRU_ITEMS) == [
        *("NR_INACTIVE_ANON", "NR_ACTIVE_ANON", "NR_INACTIVE_FILE", "NR_ACTIVE_FILE"),
        "NR_UNEVICTABLE",
    ]


def test_items_that_memcgs_do_not_count() -> None:
    """They have no index. An enumeration without an end has only items."""
    image = kernel("6.13")
    assert memcg_items(image) == ("MEMCG_SWAP", "MEMCG_KMEM")
    assert lruvec_items(image) == ("NR_SLAB_RECLAIMABLE_B", "NR_PAGETABLE")
    assert StatReader(image, ALL).slots == {
        "NR_SLAB_RECLAIMABLE_B": 0,
        "NR_PAGETABLE": 1,
        "MEMCG_SWAP": 2,
        "MEMCG_KMEM": 3,
    }
    assert stat_items(image, "enum node_stat_item", "NO_SUCH_ITEM") == {
        0: "NR_SLAB_RECLAIMABLE_B",
        1: "NR_DIRTIED",
        2: "NR_PAGETABLE",
        3: "NR_VM_NODE_STAT_ITEMS",
    }
    assert StatReader(image, ("NO_SUCH_ITEM", "NR_DIRTIED")).slots == {}


def test_an_index_beyond_the_arrays() -> None:
    """A damaged table has one. The item has no counter then."""
    image = kernel("6.13")
    image.write(VARIABLES + 64, bytes([0, 0xFF, 1, 3, 4]))
    put(image, memcg(image).vmstats.state, 3, 5)
    reader = StatReader(image, ALL)
    found = reader.memcg(memcg(image))
    assert found.keys() == {"NR_SLAB_RECLAIMABLE_B", "NR_PAGETABLE", "MEMCG_SWAP"}
    assert found["MEMCG_SWAP"].state == 5
    assert {word.item for word in reader.memcg_words(memcg(image))} == found.keys()
    assert reader.lruvec(pn(image)).keys() == {"NR_SLAB_RECLAIMABLE_B", "NR_PAGETABLE"}


@pytest.mark.image
def test_items_of_nodes_that_memcgs_do_not_count(lab: Lab) -> None:
    """Up to 6.9 memcgs have a counter for each item of a node, of which these stay 0."""
    image = image_of(lab.image("6.1", "4", "mixed").program())
    known = set(node_stat_items(image).values())
    newer = {"PGDEMOTE_KSWAPD", "PGDEMOTE_DIRECT", "PGDEMOTE_KHUGEPAGED"}
    assert memcontrol_vmstats._ONLY_NODES - known == newer | {"NR_KERNEL_SCS_KB"}
