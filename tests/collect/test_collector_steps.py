# SPDX-License-Identifier: LGPL-2.1-or-later
"""The steps of a collection: under which subject each counts, and what they hand on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError
from support.guests import Lab

from memcg_inspect.checks.ledger import Entry
from memcg_inspect.checks.profile import Profile
from memcg_inspect.collect import collector
from memcg_inspect.collect.clock import Clock
from memcg_inspect.collect.collector import collect
from memcg_inspect.collect.partial import Partial
from memcg_inspect.collect.ranges import PassContext
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mm_types import LruFlags
from memcg_inspect.linux.mm.show_mem import LostPages
from memcg_inspect.model import Coverage, Objcg

IMAGE: Any = None
#: Readers with a coverage as an argument, and its subject.
SUBJECTS = {
    "read_objcg_sets": "objcg_sets",
    "read_counters": "counters",
    "read_usage": "counters",
    "read_page_counters": "counters",
    "read_obj_stocks": "stock",
    "read_css_refs": "css",
    "csses_made_since": "css",
    "swap_ids": "swap_ids",
    "read_swap_entries": "swap_ids",
    "read_map_references": "bpf",
    "read_charge_stocks": "charge_stock",
    "read_moving": "moving",
    "read_active_memcgs": "tasks",
    "read_nodes": "node_stats",
    "read_node_stats": "node_stats",
    "read_zone_counters": "zones",
    "read_hugetlb": "hugetlb",
    "read_lruvecs": "lru",
    "not_accounted": "static_keys",
}


@pytest.fixture
def image(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Image:
    """Return an image, of which the pass over page frames finds nothing: it takes long."""
    monkeypatch.setattr(collector, "collect_ranges", lambda *_: Partial())
    return Image(lab.image("7.3", "4", "mixed").program())


@pytest.mark.image
def test_subjects(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader counts under its own, and the steps are told one after the other."""

    def noted(name: str) -> Any:
        read = getattr(collector, name)

        def reader(*args: Any, **more: Any) -> Any:
            (coverage,) = (arg for arg in args if isinstance(arg, Coverage))
            found = read(*args, **more)
            coverage.miss(name, 0, "for the test")
            return found

        return reader

    for name in SUBJECTS:
        monkeypatch.setattr(collector, name, noted(name))
    clock = Clock(image)
    snapshot = collect(image, clock, call_sites=False)
    missed = {one.what: s for s, found in snapshot.coverage.items() for one in found.examples}
    assert missed == SUBJECTS
    assert list(clock.seconds) == [
        *("memcgs", "counters", "tasks", "vmalloc", "pages", "percpu", "zswap")
    ]
    assert snapshot.profile is None


def lost(monkeypatch: pytest.MonkeyPatch, memcgs: int) -> None:
    """Miss an obj_cgroup of each of the first memcgs."""
    owners = collector._owners

    def lose(image: Image, coverage: Any) -> Any:
        found, objcgs, _ = owners(image, coverage)
        for _ in range(memcgs):
            coverage["objcgs"].miss("objcg", 0x500, "not in the image")
        return found, objcgs, set(list(found)[:memcgs])

    monkeypatch.setattr(collector, "_owners", lose)


@pytest.mark.image
@pytest.mark.parametrize(
    ("by_node", "memcgs", "is_asked"), [(True, 2, True), (True, 0, False), (False, 1, False)]
)
def test_obj_cgroups_of_percpu_allocations_are_looked_for(
    image: Image, monkeypatch: pytest.MonkeyPatch, by_node: bool, memcgs: int, is_asked: bool
) -> None:
    """On kernels that account by node, if some are missing. Later steps know them."""
    lost(monkeypatch, memcgs)
    splitters: list[set[int]] = []

    def per_node_of(image: Image, objcgs: dict[int, Objcg], coverage: Coverage) -> None:
        assert coverage.unreadable == memcgs
        splitters.append(set(objcgs))

    recovered = {0x900: Objcg(0x900, 0x800, None, False, 0)}
    late = {0xA00: Objcg(0xA00, 0x800, None, False, 0)}
    monkeypatch.setattr(collector, "accounts_by_node", lambda _: by_node)
    monkeypatch.setattr(collector, "recover_for_percpu", lambda *_: recovered)
    monkeypatch.setattr(collector, "per_node_of", per_node_of)
    monkeypatch.setattr(collector, "_recovered", lambda *_: late)
    snapshot = collect(image)
    assert (0x900 in splitters[0]) == (0x900 in snapshot.objcgs) == is_asked
    assert 0xA00 in snapshot.objcgs
    assert 0xA00 not in splitters[0]
    first = [memcg.payer for memcg in snapshot.memcgs.values()][:memcgs]
    assert snapshot.unreadable == frozenset(first)
    assert snapshot.per_node is None
    assert isinstance(snapshot.profile, Profile)
    assert snapshot.profile.why_not == collector.why_not_profiled(image)


@pytest.mark.image
def test_types_of_maps_that_may_hold_more(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = SimpleNamespace(held=Counter({0x10: 2}), unknown={0x20: "queue"})
    monkeypatch.setattr(collector, "read_map_references", lambda *_: maps)
    owners = collector._owners

    def only_root(image: Image, coverage: Any) -> Any:
        memcgs, objcgs, _ = owners(image, coverage)
        return dict(list(memcgs.items())[:1]), objcgs, set()

    # Nobody is told that accounting is off on a machine with nothing but the root memcg.
    monkeypatch.setattr(collector, "_owners", only_root)
    monkeypatch.setattr(collector, "not_accounted", lambda *_: ("BPF",))
    snapshot = collect(image, call_sites=False)
    assert snapshot.references["bpf"] == {0x10: 2}
    assert snapshot.unknown_holders == {0x20: "BPF maps of queue"}
    assert snapshot.features.not_accounted == ()


class Pages:
    """
    What the pass over page frames finds, and what else is read with it.

    :ivar given: what the pass was given: its context, and what it runs
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = Partial()
        self.given: list[tuple[PassContext, Any]] = []
        self.lost_protocols = 0
        self.metadata: tuple[int, ...] = ()
        self.on_devices: Any = lambda _: False
        self.lost_pages: tuple[LostPages, ...] = ()
        self.has_large_kmalloc = True
        self.elsewhere: list[tuple[Any, ...]] = []
        for name, value in (
            ("socket_caches", self._socket_caches),
            ("collect_ranges", self._collect_ranges),
            ("map_elsewhere", self._map_elsewhere),
            ("kfence_pool", lambda _: SimpleNamespace(unreadable=self.metadata)),
            ("has_user_pages_on_devices", lambda image: self.on_devices(image)),
            ("miss_lost_pages", lambda *_: self.lost_pages),
            ("page_layout", lambda _: self),
        ):
            monkeypatch.setattr(collector, name, value)

    def _socket_caches(self, image: Any, coverage: Coverage) -> Any:
        coverage.read += 3
        for _ in range(self.lost_protocols):
            coverage.miss("protocol", 0x60, "not in the image")
        return {0x10: "TCP"}

    def _collect_ranges(self, image: Any, context: PassContext, run: Any) -> Partial:
        self.given.append((context, run))
        return self.found

    def _map_elsewhere(self, image: Any, pool: Any, context: PassContext) -> str:
        self.elsewhere.append((pool, context))
        return "elsewhere"

    def read(self, pool: Any = None, sites: Any = None) -> Partial:
        total, image = Partial(), SimpleNamespace(pool=pool)
        context = PassContext(frozenset({1}), None)  # type: ignore[arg-type]
        collector._add_pages(image, total, context, sites)  # type: ignore[arg-type]
        return total


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    return Pages(monkeypatch)


def missed(total: Partial, subject: str) -> list[tuple[str, int, str]]:
    return [(m.what, m.address, m.reason) for m in total.coverage[subject].examples]


def test_the_pass_over_page_frames(pages: Pages) -> None:
    entry = Entry(0x10, "slab", "reclaimable", 0)
    pages.found.ledger.add(entry, 8, 1)
    total = pages.read()
    ((context, run),) = pages.given
    assert (context.memcgs, context.protocols) == ({1}, {0x10: "TCP"})
    assert (context.call_sites, run) == (False, None)
    assert dict(total.ledger) == dict(pages.found.ledger)
    assert total.coverage["sock"].read == 3
    assert not total.ledger.missing
    assert not any(found.unreadable for found in total.coverage.values())


def test_a_pool_and_call_sites(pages: Pages) -> None:
    """Processes of a pool get the same context."""
    pages.read(pool="pool", sites="sites")
    ((context, run),) = pages.given
    assert run == "elsewhere"
    assert pages.elsewhere == [("pool", context)]
    assert context.call_sites
    assert context.protocols == {0x10: "TCP"}


def test_protocols_that_are_missing(pages: Pages) -> None:
    """Any memcg may be charged for sockets of them."""
    pages.lost_protocols = 2
    total = pages.read()
    assert total.ledger.missing == {("sock", None, None)}
    assert total.coverage["sock"].unreadable == 2


def test_names_and_metadata_that_are_missing(pages: Pages) -> None:
    pages.metadata, pages.found.unnamed = (0x40, 0x80), {0x300: "why"}
    total = pages.read()
    assert missed(total, "kfence") == [
        ("metadata of KFENCE", address, "not in the image") for address in (0x40, 0x80)
    ]
    assert missed(total, "names") == [("name of a kmem_cache", 0x300, "why")]
    assert not total.ledger.missing


def test_memory_of_devices(pages: Pages) -> None:
    """User pages there are charged, and were not read. It may be missing whether there are any."""
    pages.on_devices = lambda _: True
    total = pages.read()
    assert total.ledger.missing == {("lru", None, None)}
    assert total.coverage["pages"].unreadable == 0

    def unknown(_: object) -> bool:
        raise FaultError("not in the image", 0x1230)

    pages.on_devices = unknown
    total = pages.read()
    assert total.ledger.missing == {("lru", None, None)}
    ((what, address, reason),) = missed(total, "pages")
    assert (what, address) == ("device memory", 0x1230)
    assert "not in the image" in reason


@pytest.mark.parametrize("has_large_kmalloc", [True, False])
def test_pages_without_a_memory_map(pages: Pages, has_large_kmalloc: bool) -> None:
    """They can be of any kind. Up to 6.13 they can own compound pages elsewhere."""
    pages.has_large_kmalloc = has_large_kmalloc
    pages.lost_pages = (LostPages(0x900, 2, 5000, 4096),)
    total = pages.read()
    reason = "it has 5,000 pages, and 4,096 page frames are valid"
    kinds = {("slab", None, 2), ("kmem", None, 2), ("lru", None, 2), ("sock", None, None)}
    assert total.ledger.missing == kinds
    assert missed(total, "compound") == ([] if has_large_kmalloc else [("files", 0x900, reason)])


@pytest.mark.parametrize("with_sites", [False, True])
def test_percpu_allocations(monkeypatch: pytest.MonkeyPatch, with_sites: bool) -> None:
    reader: Any = SimpleNamespace(coverage=Coverage(2), placement=Coverage(3))
    total, added = Partial(), list[Any]()
    sites: Any = SimpleNamespace(percpu=lambda of: ("sites", of)) if with_sites else None
    monkeypatch.setattr(collector, "PercpuReader", lambda _: reader)
    monkeypatch.setattr(collector, "add_percpu", lambda *args: added.append(args))
    monkeypatch.setattr(collector, "percpu_usage", lambda *args: ("usage", *args))
    per_node: Any = object()
    found: Any = collector._add_percpu(IMAGE, total, per_node, sites)
    assert found == ("usage", total.ledger, reader)
    assert added == [(total.ledger, reader, per_node, ("sites", reader) if with_sites else None)]
    assert total.coverage == {"percpu": Coverage(2), "percpu_nodes": Coverage(3)}


@pytest.mark.parametrize("more", [None, SimpleNamespace(zswap="examples")])
def test_zswap_entries(monkeypatch: pytest.MonkeyPatch, more: Any) -> None:
    """On cgroup v1 they are not charged."""
    reader: Any = SimpleNamespace(coverage=Coverage(2), placement=Coverage(3))
    total, added = Partial(), list[Any]()

    def add_zswap(*args: Any) -> Any:
        added.append(args)
        return "added"

    monkeypatch.setattr(collector, "ZswapReader", lambda _: reader)
    monkeypatch.setattr(collector, "on_default_hierarchy", lambda _: False)
    monkeypatch.setattr(collector, "add_zswap", add_zswap)
    objcgs: Any = {1: None}
    found: Any = collector._add_zswap(IMAGE, total, objcgs, None, more)
    assert found == "added"
    examples = None if more is None else "examples"
    assert added == [(total.ledger, reader, objcgs, None, False, examples)]
    assert total.coverage == {"zswap": Coverage(2), "zswap_nodes": Coverage(3)}


def test_lists_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walks of the lists of the multi-gen LRU count by themselves."""
    walks = Coverage(9)
    coverage: Any = {"lru": Coverage(1)}

    def reader(image: Any, found: Coverage) -> Any:
        assert found is coverage["lru"]
        return SimpleNamespace(sizes=lambda lruvecs: ("sizes", lruvecs), walks=walks)

    def read_lruvecs(image: Any, memcgs: Iterable[int], found: Coverage) -> Any:
        assert found is coverage["lru"]
        return list(memcgs)

    monkeypatch.setattr(collector, "LruReader", reader)
    monkeypatch.setattr(collector, "read_lruvecs", read_lruvecs)
    _, sizes = collector._lru_lists(IMAGE, [1, 2], coverage)
    assert sizes == ("sizes", [1, 2])
    assert coverage["lru_walks"] is walks


@pytest.mark.parametrize("caches", [True, False])
def test_stacks_that_the_kernel_caches(monkeypatch: pytest.MonkeyPatch, caches: bool) -> None:
    monkeypatch.setattr(collector, "caches_stacks", lambda _: caches)
    monkeypatch.setattr(collector, "read_cached_stacks", lambda *_: iter([1, 2]))
    found: Any = collector._cached_stacks(IMAGE, Coverage())
    assert found == ([1, 2] if caches else None)


def test_the_profile_of_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "why_not_profiled", lambda _: "it was not built in")
    total, sites = Partial(), SimpleNamespace(finish=lambda total: ("finished", total))
    assert collector._profile(IMAGE, None, total) == Profile("it was not built in")
    found: Any = collector._profile(IMAGE, sites, total)  # type: ignore[arg-type]
    assert found == ("finished", total)


def test_what_the_pass_is_given() -> None:
    uses: Any = object()
    more: Any = SimpleNamespace(cells="cells")
    assert collector._context([1, 2], uses, None) == PassContext(frozenset({1, 2}), uses)
    assert collector._context([1, 2], uses, more).cells == "cells"


@pytest.mark.parametrize("value", [True, False])
def test_what_a_kernel_supports(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    """A machine with nothing but the root memcg has not switched accounting on."""
    for name in ("has_node_objcgs", "charges_node_of_folio"):
        monkeypatch.setattr(collector, name, lambda _: value)
    for name in ("on_default_hierarchy", "caches_objcg"):
        monkeypatch.setattr(collector, name, lambda _: value)
    for name in ("has_type", "has_member"):
        monkeypatch.setattr(collector, name, lambda image, *names: (value, *names))
    layout = SimpleNamespace(has_large_kmalloc=value)
    monkeypatch.setattr(collector, "page_layout", lambda _: layout)
    for name in ("memcg_items", "lruvec_items", "page_counters", "reparented_items"):
        monkeypatch.setattr(collector, name, lambda _, name=name: (name,))
    monkeypatch.setattr(collector, "node_stat_items", lambda _: {1: "NR_A", 2: "NR_B"})
    monkeypatch.setattr(collector, "not_accounted", lambda image, coverage: ("BPF", coverage))
    reader: Any = SimpleNamespace(slots={"NR_A": 3})
    coverage: Any = {"static_keys": "counted"}
    found: Any = collector._features(IMAGE, reader, value, coverage)
    assert found.items == frozenset({"NR_A"})
    assert [found.lru_holds_objcg, found.lru_charged_to_own_node] == [value] * 2
    assert [found.default_hierarchy, found.caches_objcg] == [value] * 2
    assert found.large_kmalloc_type is value
    assert found.zswap == (value, "struct zswap_entry")
    assert found.has_local == (value, "struct memcg_vmstats", "state_local")
    assert (found.memcg_items, found.lruvec_items) == (("memcg_items",), ("lruvec_items",))
    assert (found.page_counters, found.local) == (("page_counters",), ("reparented_items",))
    assert found.node_items == ("NR_A", "NR_B")
    assert found.not_accounted == (("BPF", "counted") if value else ())


def test_no_compound_page_needs_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then none is looked for."""
    monkeypatch.setattr(collector, "CompoundOwners", None)
    monkeypatch.setattr(collector, "vm_areas", None)
    total = Partial()
    collector._add_compound_pages(IMAGE, total, None)
    collector._add_unplaced_pages(IMAGE, total)
    assert dict(total.ledger) == {}


def test_pages_on_the_lists_of_several_nodes_and_zones() -> None:
    total, flags = Partial(), LruFlags(True, False, False, False, 0)
    total.lru = Counter({(1, 0, 2, flags): 3, (1, 1, 2, flags): 4, (1, 0, 3, flags): 5})
    lists: Any = SimpleNamespace(item=lambda zone, flags: "list")
    assert collector._pages_on_lists(total, lists) == {(1, 0, "list"): 8, (1, 1, "list"): 4}
