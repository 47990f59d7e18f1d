# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which charges of a memory map that is made here are evidence, and what is told of each."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.layouts import FRAMES
from support.made import OBJCG_A, OBJCG_B, A, B, snapshot

from memcg_inspect.checks.evidence_query import Candidates, EvidenceQuery, Rank
from memcg_inspect.collect import evidence as module
from memcg_inspect.collect.evidence import find_evidence
from memcg_inspect.linux.mm.mm_types import KmemPage
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabObject
from memcg_inspect.linux.mm.zswap import ZswapEntry
from memcg_inspect.report import Evidence

PAGE = 4096
CACHE = SlabCache(0x900, "dentry", 192, 192, 0, True, 200, True)
SLAB = Slab(0x4000, 1, 0, CACHE, 21, 3, None, {OBJCG_A: 2, OBJCG_B: 1}, b"")


class Machine:
    """
    A machine with charges.

    :ivar passes: passes over page frames
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = 0
        self.slabs: list[Slab | None] = []
        self.kmem: list[KmemPage] = []
        self.words: list[int] = []
        self.lru: set[int] = set()
        self.entries: list[ZswapEntry] = []
        self.image: Any = SimpleNamespace(
            memory=SimpleNamespace(words=lambda data, offset, size: self.words)
        )
        sites = SimpleNamespace(
            of_slab_object=lambda slab, number: SimpleNamespace(place=f"object {number}"),
            of_page=lambda page: None,
            of_percpu=lambda area: SimpleNamespace(place="percpu"),
        )
        for name, value in {
            "SiteFinder": lambda _: sites,
            "SlabReader": lambda _: SimpleNamespace(
                slab=lambda number: self.slabs[number], charged_objects=self._objects
            ),
            "scan_pages": lambda _: self._pieces(),
            "mem_map": lambda _: FRAMES,
            "page_layout": lambda _: SimpleNamespace(memcg_data=56),
            "ZswapReader": lambda _: SimpleNamespace(entries=lambda: self.entries),
            "PercpuReader": lambda _: self._percpu(),
        }.items():
            monkeypatch.setattr(module, name, value)

    def _pieces(self) -> Iterator[Any]:
        self.passes += 1
        raw = SimpleNamespace(
            data=b"", page=FRAMES.page(100), orders={1: 2}, nid=lambda i: 1 + (i > 2)
        )
        lru = [SimpleNamespace(payer=payer) for payer in self.lru]
        yield SimpleNamespace(slabs=range(len(self.slabs)), kmem=self.kmem, lru=lru, raw=raw)
        yield SimpleNamespace(slabs=[], kmem=[], lru=[], raw=None)

    def _objects(self, slab: Slab) -> Iterator[SlabObject]:
        for number, objcg in enumerate([OBJCG_A, OBJCG_B, OBJCG_A]):
            yield SlabObject(0x8000 + number, number, slab, objcg, 0x7000 + number)

    def _percpu(self) -> Any:
        areas = [
            SimpleNamespace(offset=64, size=16, objcg=OBJCG_A, element=0x70),
            SimpleNamespace(offset=96, size=8, objcg=OBJCG_B, element=0x78),
        ]
        return SimpleNamespace(
            chunks=lambda: [SimpleNamespace(base=0x10000)],
            charged=lambda chunk: areas,
            charge=lambda area: 10 * area.size,
        )

    def find(self, *queries: EvidenceQuery) -> list[Candidates]:
        found = find_evidence(self.image, snapshot(), queries)
        return [found[query] for query in queries]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def query(kind: Any, *payers: int, **more: Any) -> EvidenceQuery:
    return EvidenceQuery(kind, frozenset(payers or {OBJCG_A}), **more)


def test_objects(machine: Machine) -> None:
    """A slab without charges, or of a cache that is missing, has none."""
    machine.slabs = [None, SLAB._replace(charged={}), SLAB, SLAB._replace(charged=None)]
    one, both, other = machine.find(
        query("slab"), query("slab", OBJCG_A, OBJCG_B, amount=200), query("slab", nid=2)
    )
    assert one.sizes == {("slab", 200, OBJCG_A): 2}
    assert both.sizes == {("slab", 200, OBJCG_A): 2, ("slab", 200, OBJCG_B): 1}
    assert other.sizes == {}
    assert (one.total, both.total, machine.passes) == (2, 3, 1)
    assert [rank for rank, _ in one.likeliest] == [Rank(False)] * 2
    assert [rank for rank, _ in both.likeliest] == [Rank(True)] * 3
    assert one.likeliest[1][1] == Evidence(
        address=0x8002,
        kind="slab",
        nid=1,
        bytes=200,
        cache="dentry",
        page=0x4000,
        objcg=OBJCG_A,
        memcg=A,
        note="objcg at 0x7002",
        site="object 2",
    )
    assert [charge.objcg for _, charge in both.likeliest] == [OBJCG_A, OBJCG_B, OBJCG_A]


def test_objects_that_may_be_reclaimed(machine: Machine) -> None:
    machine.slabs = [SLAB]
    reclaimable, others = (query("slab", detail=d) for d in ("reclaimable", "unreclaimable"))
    assert [bool(found.total) for found in machine.find(reclaimable, others)] == [True, False]
    machine.slabs = [SLAB._replace(cache=CACHE._replace(reclaimable=False))]
    assert [bool(found.total) for found in machine.find(reclaimable, others)] == [False, True]


def test_pages(machine: Machine) -> None:
    page = KmemPage(FRAMES.page(7), 2, 1, True, "", OBJCG_A)
    machine.kmem = [page, page._replace(type="table", order=0), page._replace(objcg=OBJCG_B)]
    (found,) = machine.find(query("kmem", amount=PAGE))
    assert found.sizes == {("kmem", PAGE, OBJCG_A): 1}
    (found,) = machine.find(query("kmem"))
    assert found.sizes == {("kmem", PAGE, OBJCG_A): 1, ("kmem", 2 * PAGE, OBJCG_A): 1}
    charges = [charge for _, charge in found.likeliest]
    assert charges[0] == Evidence(
        address=FRAMES.virt(FRAMES.page(7)),
        kind="kmem",
        nid=2,
        bytes=2 * PAGE,
        page=FRAMES.page(7),
        objcg=OBJCG_A,
        memcg=A,
    )
    assert charges[1].note == "table"
    assert machine.find(query("kmem", nid=1))[0].total == 0


def test_user_pages(machine: Machine) -> None:
    """A piece in which nobody is charged is not read."""
    machine.words = [0, OBJCG_A, 0, OBJCG_A, OBJCG_B]
    assert machine.find(query("lru"))[0].total == 0
    machine.lru = {OBJCG_A, OBJCG_B}
    (found,) = machine.find(query("lru"))
    assert found.sizes == {("lru", 4 * PAGE, OBJCG_A): 1, ("lru", PAGE, OBJCG_A): 1}
    charges = [charge for _, charge in found.likeliest]
    assert charges[0] == Evidence(
        address=FRAMES.virt(FRAMES.page(101)),
        kind="lru",
        nid=1,
        bytes=4 * PAGE,
        page=FRAMES.page(101),
        objcg=OBJCG_A,
        memcg=A,
    )
    assert (charges[1].page, charges[1].nid) == (FRAMES.page(103), 2)


def test_percpu_allocations(machine: Machine) -> None:
    """The node of a query says nothing about them."""
    (found,) = machine.find(query("percpu", nid=1))
    assert found.sizes == {("percpu", 160, OBJCG_A): 1}
    assert [charge for _, charge in found.likeliest] == [
        Evidence(
            address=0x10040,
            kind="percpu",
            bytes=160,
            objcg=OBJCG_A,
            memcg=A,
            note="16 bytes for each CPU, objcg at 0x70",
            site="percpu",
        )
    ]
    assert machine.passes == 0


def test_zswap_entries(machine: Machine) -> None:
    machine.entries = [
        ZswapEntry(0x10, 100, 0x1, OBJCG_A),
        ZswapEntry(0x20, 50, 0x2, OBJCG_B),
        ZswapEntry(0x30, 0, 0x3, OBJCG_A),
    ]
    (found,) = machine.find(query("zswap", OBJCG_A, OBJCG_B, amount=50))
    assert found.sizes == {("zswap", 50, OBJCG_B): 1}
    assert [charge for _, charge in found.likeliest] == [
        Evidence(address=0x20, kind="zswap", bytes=50, objcg=OBJCG_B, memcg=B)
    ]
    (found,) = machine.find(query("zswap"))
    assert found.sizes == {("zswap", 100, OBJCG_A): 1}
    assert machine.passes == 0


def test_each_kind_is_read_if_it_is_asked_for(machine: Machine) -> None:
    machine.slabs, machine.lru, machine.words = [SLAB], {OBJCG_A}, [OBJCG_A]
    machine.kmem = [KmemPage(FRAMES.page(7), 2, 0, False, "", OBJCG_A)]
    kinds = ("slab", "kmem", "lru", "percpu")
    for kind in kinds:
        (found,) = machine.find(query(kind))
        assert {each for each, _, _ in found.sizes} == {kind}
    assert machine.passes == 3
    assert all(found.total for found in machine.find(*map(query, kinds)))
    assert machine.passes == 4
