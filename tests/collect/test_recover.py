# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which obj_cgroups are looked for if some could not be read through their memcgs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.made import ledger

from memcg_inspect.collect import recover
from memcg_inspect.collect.partial import Partial
from memcg_inspect.collect.recover import recover_for_charges, recover_for_percpu
from memcg_inspect.model import Coverage

IMAGE: Any = None
#: What takes the place of the obj_cgroups that are found.
FOUND: Any = {0x900: "found"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return what obj_cgroups were asked for."""
    calls: list[tuple[Any, ...]] = []

    def recover_objcgs(*args: Any) -> Any:
        calls.append(args)
        return FOUND

    monkeypatch.setattr(recover, "recover_objcgs", recover_objcgs)
    return calls


@pytest.mark.parametrize(("on_lru", "is_whole"), [(True, True), (False, True), (True, False)])
def test_of_charges(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, on_lru: bool, is_whole: bool
) -> None:
    """Sockets are charged to memcgs, and up to 7.0 user pages are, too. 0 is no obj_cgroup."""
    monkeypatch.setattr(recover, "has_node_objcgs", lambda _: on_lru)
    total = Partial()
    charges: Any = {
        (0x10, "slab", "reclaimable", 0): (8, 1),
        (0x11, "kmem", "other", 0): (8, 1),
        (0x12, "lru", "lru", 0): (8, 1),
        (0x13, "sock", "TCP", 0): (8, 1),
        (0x14, "percpu", "data", 0): (8, 1),
        (0x15, "slab", "reclaimable", 0): (8, 1),
        (0, "zswap", "compressed", 0): (8, 1),
    }
    total.ledger.merge(ledger(charges))
    if not is_whole:
        total.coverage["memcgs"].miss("memcg", 0x500, "not in the image")
    memcgs: Any = {0x11: None}
    found = recover_for_charges(IMAGE, total, memcgs, {0x15}, {0x20, 0x15, 0})
    assert found is FOUND
    ((_, of, whole, unknown, coverage),) = asked
    assert of is memcgs
    assert whole is is_whole
    assert set(unknown) == {0x10, 0x14, 0x20} | ({0x12} if on_lru else set())
    assert coverage is total.coverage["objcgs"]


def test_of_percpu_allocations(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of the memcgs that are known, or of any memcg."""
    areas = {1: [0x10, 0x11], 2: [0x12, 0x10]}
    reader = SimpleNamespace(
        chunks=lambda: iter(areas),
        charged=lambda chunk: [SimpleNamespace(objcg=objcg) for objcg in areas[chunk]],
    )
    monkeypatch.setattr(recover, "PercpuReader", lambda _: reader)
    objcgs: Any = {0x11: SimpleNamespace(memcg=0x700)}
    coverage = Coverage()
    assert recover_for_percpu(IMAGE, objcgs, coverage) is FOUND
    ((_, of, whole, unknown, counted),) = asked
    assert (of, whole, set(unknown)) == ({0x700}, False, {0x10, 0x12})
    assert counted is coverage
