# SPDX-License-Identifier: LGPL-2.1-or-later
"""What lies before an address, where memory is made here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError

from memcg_inspect.collect import neighbours as module
from memcg_inspect.collect.neighbours import with_neighbours
from memcg_inspect.linux.mm.percpu import PcpuPlace
from memcg_inspect.report import Diagnosis, Evidence

IMAGE: Any = object()
CHUNK: Any = object()


def missing(*_: object) -> Any:
    raise FaultError("not in the image", 0x1230)


class Machine:
    """
    A slab with four objects of 100 bytes at 0x1000, and a percpu chunk at 0x9000.

    :ivar objcg: ``struct obj_cgroup *`` of each object
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slab: Any = SimpleNamespace(nid=2, cache=SimpleNamespace(name="dentry"))
        self.page: Any = 0x40
        self.info: Any = SimpleNamespace(slab=0x50)
        self.objcg = 0xA0
        self.is_free: Any = lambda slab, number: number == 1
        self.site: Any = SimpleNamespace(place="a.c:7 f()")
        self.places: list[PcpuPlace] = []
        self.allocs: dict[int, Any] = {}
        self.given = monkeypatch
        slabs = SimpleNamespace(
            slab=lambda page: self.slab,
            number=lambda slab, address: (address - 0x1000) // 100 if address < 0x2000 else None,
            address=lambda slab, number: 0x1000 + 100 * number,
            objcg=lambda slab, number: self.objcg and self.objcg + number,
        )
        sites = SimpleNamespace(
            of_slab_object=self._site_of_object, of_percpu=lambda area: self.site
        )
        percpu = SimpleNamespace(
            find=lambda address: self.places, alloc_at=lambda chunk, at: self.allocs.get(at)
        )
        for name, value in {
            "SlabReader": lambda _: slabs,
            "FreeObjects": lambda image, of: SimpleNamespace(
                is_free=lambda *args: self.is_free(*args)
            ),
            "PercpuReader": lambda _: percpu,
            "SiteFinder": lambda _: sites,
            "page_behind": lambda image, address: self.page,
            "read_page": lambda image, page: self.info,
        }.items():
            monkeypatch.setattr(module, name, value)

    def _site_of_object(self, slab: Any, number: int) -> Any:
        return self.site and SimpleNamespace(place=f"object {number}")

    def before(self, address: int) -> Evidence | None:
        given = overwritten(address)
        (found,) = with_neighbours(IMAGE, [given])
        return None if found == given else found.evidence[-1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def overwritten(address: int, cause: str = "overwritten") -> Diagnosis:
    evidence = (Evidence(address=address, kind="counters"),)
    return Diagnosis(cause, "something", "likely", (), None, 8, "bytes", evidence, None, None, 7)  # type: ignore[arg-type]


OBJECT = Evidence(
    address=0x1000 + 200,
    kind="slab",
    nid=2,
    cache="dentry",
    objcg=0xA0 + 2,
    note="allocated, directly before the range",
    site="object 2",
)


def test_objects(machine: Machine) -> None:
    """One that is free, or not charged, or of no known call site, is told as such."""
    assert machine.before(0x1000 + 300) == OBJECT
    machine.objcg, machine.site = 0, None
    note = "free, before the range, which begins 20 bytes into the next one"
    wanted = replace(OBJECT, address=0x1000 + 100, objcg=None, site=None, note=note)
    assert machine.before(0x1000 + 220) == wanted


def test_the_list_of_free_objects_may_be_missing(machine: Machine) -> None:
    machine.is_free = missing
    note = "state not known, directly before the range"
    assert machine.before(0x1000 + 300) == replace(OBJECT, note=note)


def test_what_is_in_no_slab(machine: Machine) -> None:
    """Nothing is known of the page before a slab."""
    assert machine.before(0x1000) is None
    assert machine.before(0x1000 + 99) is None
    assert machine.before(0x2000) is None
    machine.slab = None
    assert machine.before(0x1000 + 300) is None
    machine.slab, machine.info.slab = object(), None
    assert machine.before(0x1000 + 300) is None
    machine.info, machine.page = None, None
    assert machine.before(0x1000 + 300) is None


@pytest.mark.parametrize("name", ["page_behind", "read_page"])
def test_memory_that_is_missing(machine: Machine, name: str) -> None:
    machine.given.setattr(module, name, missing)
    assert machine.before(0x1000 + 300) is None


def alloc(offset: int, size: int, objcg: int = 0xB0) -> Any:
    return SimpleNamespace(offset=offset, size=size, objcg=objcg)


@pytest.fixture
def percpu(machine: Machine) -> Machine:
    """Return a machine on which CPU 3 has an allocation at 0x9040, and another one before it."""
    machine.page = None
    machine.places = [
        PcpuPlace(None, 0x40, 3, 0),
        PcpuPlace(CHUNK, 0x40, None, 0),
        PcpuPlace(CHUNK, 0x48, 3, 0),
    ]
    machine.allocs = {0x48: alloc(0x40, 16), 0x3F: alloc(0x20, 32)}
    return machine


def test_percpu_allocations(percpu: Machine) -> None:
    """Not of static variables, and not for a pointer that is of no CPU."""
    wanted = Evidence(
        address=0x9048 - 8 - 32,
        kind="percpu",
        bytes=32,
        objcg=0xB0,
        note="copy of CPU 3, before the range, which begins 8 bytes into the next one",
        site="a.c:7 f()",
    )
    assert percpu.before(0x9048) == wanted
    percpu.allocs[0x3F], percpu.site = alloc(0x20, 32, 0), None
    assert percpu.before(0x9048) == replace(wanted, objcg=None, site=None)


def test_free_percpu_memory(percpu: Machine) -> None:
    del percpu.allocs[0x3F]
    assert percpu.before(0x9048) == Evidence(
        address=0x903F,
        kind="percpu",
        note="free percpu memory, before the range, which begins 8 bytes into the next one",
    )


def test_percpu_memory_of_nobody(percpu: Machine) -> None:
    """Before the first allocation of a chunk is another chunk."""
    first = alloc(0, 0x50)
    percpu.allocs[0x48] = first
    assert percpu.before(0x9048) is None
    del percpu.allocs[0x48]
    assert percpu.before(0x9048) is None
    percpu.places.append(PcpuPlace(CHUNK, 0x60, 2, 0))
    percpu.allocs |= {0x60: alloc(0x60, 8), 0x5F: alloc(0x58, 8)}
    found = percpu.before(0x9048)
    assert found is not None
    assert found.note == "copy of CPU 2, directly before the range"


def test_only_what_was_overwritten(machine: Machine) -> None:
    other = overwritten(0x1000 + 300, "object-owner")
    assert with_neighbours(IMAGE, [other]) == (other,)
    first, second = with_neighbours(IMAGE, [other, overwritten(0x1000 + 300)])
    assert first == other
    assert second.evidence_total is None
    assert second.evidence[1:] == (OBJECT,)
    machine.given.setattr(module, "SlabReader", None)
    assert with_neighbours(IMAGE, [other, other]) == (other, other)
