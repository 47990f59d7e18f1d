# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a snapshot keeps of charges, slabs, call sites and counters that a test makes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.made import (
    DEAD,
    OBJCG_A,
    OBJCG_B,
    OBJCG_DEAD,
    ROOT,
    A,
    B,
    family_objcgs,
    ledger,
    snapshot,
)

from memcg_inspect.checks.profile import Profile, Use
from memcg_inspect.collect import charge_snapshot as module
from memcg_inspect.collect.slab_cells import SlabCell, SlabKey
from memcg_inspect.model import NUMA_NO_NODE, CallSite, Coverage, Stat
from memcg_inspect.model_snapshot import (
    ImageTime,
    SavedCharge,
    SavedCounter,
    SavedMemcg,
    SavedSite,
    SavedSlab,
)
from memcg_inspect.report import Row

IMAGE: Any = SimpleNamespace(is_moving=False)
#: Indexes of the memcgs of a family.
NUMBERS = {ROOT: 0, A: 1, B: 2, DEAD: 3}


def test_charges_of_a_memcg() -> None:
    """Those of a removed memcg are its parent's. Sockets have no node."""
    objcgs = family_objcgs()
    objcgs[OBJCG_A] = replace(objcgs[OBJCG_A], nid=1)
    objcgs[OBJCG_DEAD] = replace(objcgs[OBJCG_DEAD], nid=1)
    charges: Any = {
        (OBJCG_DEAD, "slab", "reclaimable", 1): (100, 2),
        (OBJCG_A, "slab", "reclaimable", 1): (8, 1),
        (OBJCG_B, "kmem", "stack", 0): (4096, 1),
        (B, "sock", "TCP", NUMA_NO_NODE): (8192, 2),
        (0x9999, "kmem", "stack", 0): (1, 1),
    }
    read = snapshot(charges=ledger(charges), objcgs=objcgs)
    assert list(module._charges(read, NUMBERS)) == [
        SavedCharge(1, 1, 1, "slab", "reclaimable", 108, 3),
        SavedCharge(2, 0, 0, "kmem", "stack", 4096, 1),
        SavedCharge(2, None, None, "sock", "TCP", 8192, 2),
        SavedCharge(None, 0, None, "kmem", "stack", 1, 1),
    ]


def test_objects_of_slabs() -> None:
    """Objects that nobody pays for have no pointer to who does."""
    caches = {0x10: SimpleNamespace(name="dentry")}
    cells = {
        SlabKey(A, 0x10, 1): SlabCell(objects=2, bytes=100, charged=116),
        SlabKey(None, 0x10, 0): SlabCell(objects=3, bytes=150),
        SlabKey(B, 0x10, 0): SlabCell(objects=0, bytes=9, charged=9),
        SlabKey(A, -8192, 1): SlabCell(objects=1, bytes=8192, charged=8192),
        SlabKey(0, 0x10, 1): SlabCell(objects=1, bytes=50, charged=58),
    }
    made: Any = SimpleNamespace(cells=cells, caches=caches)
    assert list(module._slabs(made, NUMBERS)) == [
        SavedSlab(1, 1, "dentry", 116, 2),
        SavedSlab(None, 0, "dentry", 150, 3),
        SavedSlab(None, 1, "dentry", 58, 1),
    ]


def test_the_time_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the image, if this machine is the image."""
    clock = SimpleNamespace(
        time_ns=lambda: 7, clock_gettime_ns={5: 9}.__getitem__, CLOCK_BOOTTIME=5
    )
    monkeypatch.setattr(module, "time", clock)
    read = snapshot()
    assert module._own_time(read) is None
    live = replace(read, image=replace(read.image, source="live"))
    assert module._own_time(live) == ImageTime(7, 9)
    assert module._own_time(replace(read, image=replace(read.image, source="qemu"))) is None


def test_kinds_that_may_be_missing() -> None:
    read = snapshot()
    assert module._missing(read) == {}
    read.ledger.note_missing("kmem", "stack")
    assert module._missing(read) == {"kmem": "kmem memory is not all in the image"}
    profile = Profile(missing="why")
    assert module._missing(replace(snapshot(), profile=profile)) == {module.SITES: "why"}
    assert module._missing(replace(snapshot(), profile=Profile())) == {}


def test_call_sites() -> None:
    profile = Profile(sites={0x10: CallSite(0x10, "a.c", 7, None, "f", True, 0, 0, 0)})
    profile.add(Use(0x10, "slab", OBJCG_DEAD, 1), 100, 2)
    profile.add(Use(0x10, "page", 0, NUMA_NO_NODE), 4096, 1)
    profile.add(Use(0x20, "slab", OBJCG_B, 0), 8, 1)
    assert module._sites(replace(snapshot(), profile=profile), NUMBERS) == (
        SavedSite(1, 1, "slab", "a.c:7 f", 100, 2),
        SavedSite(None, None, "page", "a.c:7 f", 4096, 1),
        SavedSite(2, 0, "slab", "codetag 0x20", 8, 1),
    )
    assert module._sites(replace(snapshot(), profile=Profile()), NUMBERS) == ()


@pytest.mark.parametrize("profile", [None, Profile("it was not built in")])
def test_a_kernel_that_does_not_profile(profile: Profile | None) -> None:
    assert module._sites(replace(snapshot(), profile=profile), NUMBERS) is None


def row(memcg: int, nid: int | None, status: Any, **found: int) -> Row:
    return Row("kmem", memcg, None, nid, "KMEM", "pages", status, found, {"folded": 1})


def test_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of kernel memory with what was found in memory; of others, those that are not 0."""
    nothing, kept = Stat(0, 0, 0), {"KMEM": Stat(3, 0, 0), "SOCK": Stat(0, 0, 0)}
    stats = {
        ROOT: {"KMEM": nothing, "SOCK": Stat(5, 0, 0)},
        A: {"KMEM": nothing, "SOCK": nothing},
        B: kept,
        DEAD: {"KMEM": nothing, "SOCK": nothing},
    }
    none = {"FILE": nothing}
    nodes = {(memcg, nid): none for memcg in stats for nid in (0, 1)}
    nodes |= {(memcg, 1): {"FILE": Stat(7, 0, 0)} for memcg in (B, A, ROOT)}
    del nodes[B, 0]
    monkeypatch.setattr(module, "memcg_items", lambda _: ("KMEM", "SOCK"))
    monkeypatch.setattr(module, "lruvec_items", lambda _: ("FILE",))
    rows = [row(A, None, "exact", slab=2, percpu=3), row(B, None, "unverifiable", slab=9)]
    monkeypatch.setattr(module, "kmem_rows", lambda _: rows)
    read = snapshot(memcg_stats=stats, lruvec_stats=nodes)
    found = {(c.memcg, c.node, c.item): c for c in module._counters(IMAGE, read, NUMBERS)}
    assert found[0, None, "SOCK"] == SavedCounter(0, None, "SOCK", 5)
    # Counters include descendants: what A has for itself is below 0.
    assert found[1, None, "KMEM"] == SavedCounter(1, None, "KMEM", -3, 5)
    assert found[2, None, "KMEM"] == SavedCounter(2, None, "KMEM", 3, None)
    assert found[2, 1, "FILE"] == SavedCounter(2, 1, "FILE", 7)
    assert (1, None, "SOCK") not in found
    assert (2, None, "SOCK") not in found
    assert (2, 0, "FILE") not in found
    assert {number for number, _, _ in found} <= {0, 1, 2}


def test_counters_of_kernel_memory_that_are_0(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Stat(0, 0, 0)
    stats = {memcg: {"KMEM": nothing, "SOCK": nothing} for memcg in NUMBERS}
    monkeypatch.setattr(module, "memcg_items", lambda _: ("KMEM", "SOCK"))
    monkeypatch.setattr(module, "lruvec_items", lambda _: ())
    monkeypatch.setattr(module, "kmem_rows", lambda _: [row(A, None, "exact")])
    read = snapshot(memcg_stats=stats)
    assert list(module._counters(IMAGE, read, NUMBERS)) == [SavedCounter(1, None, "KMEM", 0, 0)]


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_is_taken(monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    """One process reads slabs with all else; several read them again."""
    read = snapshot(coverage={"slab": Coverage(3, 2), "pages": Coverage(5)})
    collected: list[Any] = []

    def collect(image: Any, cells: Any = None) -> Any:
        collected.append(cells)
        return read

    cells = SimpleNamespace(cells={}, caches={})
    for name, value in {
        "read_owners": lambda _: SimpleNamespace(payer="payer"),
        "jobs_of": lambda _: jobs,
        "collect": collect,
        "SlabCells": lambda image, payer: cells,
        "read_slabs": lambda image, payer, coverage: cells if payer == "payer" else None,
        "read_time": lambda _: None,
        "boot_id": lambda _: "an ID",
        "memcg_items": lambda _: (),
        "lruvec_items": lambda _: (),
        "kmem_rows": lambda _: [],
    }.items():
        monkeypatch.setattr(module, name, value)
    found = module._take(IMAGE)
    assert collected == [cells if jobs == 1 else None]
    assert (found.image, found.time, found.boot_id) == (read.image, None, "an ID")
    assert found.memcgs[3] == SavedMemcg("/a/dead", 4, "dying")
    assert len(found.memcgs) == 4
    assert (found.is_moving, found.unread, found.sites) == (False, {"slab": 2}, None)
    monkeypatch.setattr(module, "read_time", lambda _: ImageTime(1, 2))
    monkeypatch.setattr(IMAGE, "is_moving", True)
    found = module._take(IMAGE)
    assert (found.time, found.is_moving) == (ImageTime(1, 2), True)


@pytest.mark.parametrize(
    ("is_moving", "tries", "taken", "left"),
    [
        (False, ["gaps"], "gaps", 0),
        (False, ["error", "whole"], None, 1),
        (True, ["whole", "whole"], "whole", 1),
        (True, ["gaps", "gaps", "gaps", "whole"], "gaps", 1),
        (True, ["gaps", "error", "whole"], "whole", 0),
        (True, ["error", "error", "gaps"], "gaps", 0),
        (True, ["error", "error", "error", "whole"], None, 1),
        (True, ["gaps", "error", "error"], "gaps", 0),
    ],
)
def test_how_often_a_kernel_is_read(
    monkeypatch: pytest.MonkeyPatch, is_moving: bool, tries: list[str], taken: str | None, left: int
) -> None:
    """An image once; a running kernel three times at most, until all of it could be read."""
    rest = list(tries)

    def take(_: object) -> Any:
        kind = rest.pop(0)
        if kind == "error":
            raise ValueError("odd")
        return SimpleNamespace(kind=kind, is_whole=kind == "whole")

    progress = SimpleNamespace(stop=False)
    image: Any = SimpleNamespace(is_moving=is_moving, progress=progress)
    monkeypatch.setattr(module, "_take", take)
    if taken is None:
        with pytest.raises(ValueError, match="odd"):
            module.take_snapshot(image)
    else:
        found: Any = module.take_snapshot(image)
        assert found.kind == taken
    assert len(rest) == left


def test_a_walk_that_was_cancelled_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = SimpleNamespace(stop=True)
    image: Any = SimpleNamespace(is_moving=True, progress=progress)
    given: list[Any] = [SimpleNamespace(is_whole=False), SimpleNamespace(is_whole=True)]
    monkeypatch.setattr(module, "_take", lambda _: given.pop(0))
    assert not module.take_snapshot(image).is_whole
    assert len(given) == 1
