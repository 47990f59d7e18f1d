# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which charges of a memory map that is made here are kept as examples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.layouts import FRAMES

from memcg_inspect.checks.ledger import Entry
from memcg_inspect.collect import examples as module
from memcg_inspect.collect.examples import MOST, Examples, FolioGroup, find_examples
from memcg_inspect.collect.zswap import ZswapExamples
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.mm.memcg_data import Folio
from memcg_inspect.linux.mm.mm_types import KmemPage
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabObject
from memcg_inspect.linux.mm.zswap import ZswapEntry
from memcg_inspect.linux.net.sock import Sock
from memcg_inspect.model import NUMA_NO_NODE, Coverage

OBJCG, OTHER, MEMCG = 0xA0, 0xB0, 0x1000
CACHE = SlabCache(0x900, "dentry", 192, 192, 0, True, 200, True)
SLAB = Slab(0x4000, 1, 0, CACHE, 21, 3, None, {OBJCG: 2, OTHER: 1}, b"")


class Machine:
    """A machine with charges."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folios: list[Folio] = []
        self.slabs: list[Slab | None] = []
        self.socks: list[Sock] = []
        self.kmem: list[KmemPage] = []
        self.others: set[int] = set()
        self.entries: list[ZswapEntry] = []
        self.kept: ZswapExamples | None = None
        self.payers: Any = None
        self.coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
        self.image: Any = SimpleNamespace(progress=SimpleNamespace(stop=False))
        area = SimpleNamespace(offset=64, objcg=OBJCG)
        chunks = [[area, SimpleNamespace(offset=96, objcg=OTHER)]]
        for name, value in {
            "SlabReader": lambda _: SimpleNamespace(
                slab=lambda number: self.slabs[number], charged_objects=self._objects
            ),
            "mem_map": lambda _: FRAMES,
            "page_uses": lambda *_: SimpleNamespace(of=lambda kmem, blocks: ("stack", 4)),
            "compound_pages_of_others": lambda image, coverage: self.others,
            "SockReader": lambda image, slabs: SimpleNamespace(read=lambda *_: self.socks),
            "BlockReader": lambda _: None,
            "scan_pages": lambda _: self._pieces(),
            "folios_of": self._folios,
            "PercpuReader": lambda _: SimpleNamespace(
                chunks=lambda: chunks,
                charged=lambda chunk: chunk,
                data_nodes=lambda alloc: {0: 8, 2: 8},
                pointer=lambda alloc: 0x7000 + alloc.offset,
            ),
            "kept_zswap": lambda _: self.kept,
            "ZswapReader": lambda _: SimpleNamespace(
                entries=lambda: self.entries, nodes=lambda entry: {1: 5, 3: 6}
            ),
        }.items():
            monkeypatch.setattr(module, name, value)

    def _pieces(self) -> Iterator[Any]:
        yield SimpleNamespace(
            raw="raw", pages=64, slabs=range(len(self.slabs)), kmem=self.kmem, unreadable=None
        )
        yield SimpleNamespace(raw=None, pages=0, slabs=[], kmem=[], unreadable=0x700)
        yield SimpleNamespace(raw="raw", pages=32, slabs=[], kmem=[], unreadable=None)

    def _folios(self, image: Any, raw: Any, payers: Any) -> list[Folio]:
        self.payers = payers
        found, self.folios = self.folios, []
        return found

    def _objects(self, slab: Slab) -> Iterator[SlabObject]:
        for number, objcg in enumerate([OBJCG, OTHER, OBJCG]):
            yield SlabObject(0x8000 + number, number, slab, objcg, 0x7000 + number)

    def find(self, *kinds: Any) -> Examples:
        return find_examples(self.image, {OBJCG}, {MEMCG}, set(kinds), self.coverage)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_objects_and_sockets(machine: Machine) -> None:
    """Slabs of other payers, and of caches that are missing, have none."""
    machine.slabs = [SLAB, None, SLAB._replace(charged=None), SLAB._replace(charged={OTHER: 3})]
    machine.socks = [Sock(0x100, MEMCG, 0, "TCP")]
    found = machine.find("slab").addresses
    assert found == {
        Entry(OBJCG, "slab", "reclaimable", 1): [0x8000, 0x8002],
        Entry(MEMCG, "sock", "TCP", NUMA_NO_NODE): [0x100] * 3,
    }
    machine.slabs, machine.socks = [SLAB._replace(cache=CACHE._replace(reclaimable=False))], []
    assert list(machine.find("sock").addresses) == [Entry(OBJCG, "slab", "unreclaimable", 1)]


def test_pages_of_the_kernel(machine: Machine) -> None:
    """A compound page of another owner is no large kmalloc."""
    some = KmemPage(FRAMES.page(7), 2, 0, False, "", OBJCG)
    machine.kmem = [some, some._replace(page=FRAMES.page(8)), some._replace(objcg=OTHER)]
    machine.others = {FRAMES.page(8)}
    assert machine.find("kmem").addresses == {
        Entry(OBJCG, "kmem", "stack", 2): [FRAMES.virt(FRAMES.page(7))],
        Entry(OBJCG, "kmem", "other", 2): [FRAMES.virt(FRAMES.page(8))],
    }


def test_user_pages(machine: Machine) -> None:
    """All are counted, and a few of each sort are kept."""
    folio = Folio(FRAMES.page(0), 1, 2, OBJCG, 0x30, False)
    machine.folios = [folio._replace(page=FRAMES.page(4 * n)) for n in range(MOST + 2)]
    machine.folios += [folio._replace(order=0, swap_cache=True), folio._replace(mapping=0x40)]
    found = machine.find("lru").folios
    first = [FRAMES.virt(FRAMES.page(4 * n)) for n in range(MOST)]
    assert found == {
        (OBJCG, 1, 0x30, False): FolioGroup(MOST + 2, 4 * (MOST + 2), first),
        (OBJCG, 1, 0x30, True): FolioGroup(1, 1, first[:1]),
        (OBJCG, 1, 0x40, False): FolioGroup(1, 4, first[:1]),
    }
    assert machine.payers == {OBJCG, MEMCG}


@pytest.mark.parametrize("stop", [False, True])
def test_page_frames_that_could_not_be_read(machine: Machine, stop: bool) -> None:
    machine.image.progress.stop = stop
    machine.find("lru")
    (missed,) = machine.coverage["folios"].examples
    assert (missed.what, missed.address) == ("struct pages", 0x700)
    assert missed.reason == (STOPPED if stop else "not in the image")
    assert machine.coverage["folios"].read == 96


def test_percpu_allocations(machine: Machine) -> None:
    """One is on the nodes of its copies."""
    assert machine.find("percpu").addresses == {
        Entry(OBJCG, "percpu", "", nid): [0x7040] for nid in (0, 2)
    }
    assert machine.coverage == {}


def test_zswap_entries(machine: Machine) -> None:
    """Not of one that is being stored: its obj_cgroup may be anything."""
    one = ZswapEntry(0x10, 100, 1, OBJCG)
    machine.entries = [
        one,
        one._replace(address=0x20, length=FRAMES.page_size),
        one._replace(address=0x30, objcg=OTHER),
        one._replace(address=0x40, listed=False),
    ]
    assert machine.find("zswap").addresses == {
        Entry(OBJCG, "zswap", detail, nid): [address]
        for detail, address in (("compressed", 0x10), ("incompressible", 0x20))
        for nid in (1, 3)
    }


def test_zswap_entries_that_a_session_has_read(machine: Machine) -> None:
    machine.kept = ZswapExamples()
    entry = Entry(OBJCG, "zswap", "compressed", 1)
    machine.kept.found = {entry: [0x10, 0x20], entry._replace(payer=OTHER): [0x30]}
    machine.entries = [ZswapEntry(0x40, 100, 1, OBJCG)]
    assert machine.find("zswap").addresses == {entry: [0x10, 0x20]}


def test_only_some_are_kept(machine: Machine) -> None:
    machine.slabs = [SLAB] * 3
    ((_, addresses),) = machine.find("slab").addresses.items()
    assert addresses == [0x8000, 0x8002, 0x8000][:MOST]
    assert machine.find().addresses == {}
