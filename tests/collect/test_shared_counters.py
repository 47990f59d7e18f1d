# SPDX-License-Identifier: LGPL-2.1-or-later
"""How processes share the counters of memcgs. What is in memory is written here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError

from memcg_inspect.collect import counters
from memcg_inspect.collect.counters import read_counters
from memcg_inspect.collect.folds import Folded
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.model import Coverage, ImageError


class Folds:
    """Takes the place of what adds up arrays of counters."""

    def __init__(self, image: object = None) -> None:
        self.found = Folded()
        self.added: list[tuple[int, int | None]] = []

    def add_memcg(self, memcg: int, arrays: object, events: object) -> None:
        assert events == ("events", arrays)
        self.found.changed[memcg] = {}

    def add_lruvec(self, memcg: int, nid: int, arrays: object) -> None:
        self.found.local[memcg, nid] = {}

    def miss(self, memcg: int) -> None:
        self.found.partial.add(memcg)


class Machine:
    """
    A machine on which each memcg has counters for nodes 0 and 1.

    :ivar lost: counters that are not in the image: memcg, and node or ``None``
    :ivar lost_nodes: memcgs whose nodes are not in the image
    :ivar batches: number of memcgs and nodes that were read at once
    :ivar given: memcgs that each process was given
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost: set[tuple[int, int | None]] = set()
        self.lost_nodes: set[int] = set()
        self.batches: list[int] = []
        self.given: list[list[int]] = []
        self.told: list[tuple[str, float]] = []
        self.jobs = 1
        self.image: Any = SimpleNamespace(
            is_moving=False,
            pool=None,
            pointer=lambda _, address: address,
            progress=SimpleNamespace(stop=False, report=lambda *args: self.told.append(args)),
        )
        for name, given in (
            ("nodeinfo", self._nodeinfo),
            ("online_nodes", lambda _: (0, 5)),
            ("percpu_offsets", lambda _: range(4)),
            ("jobs_of", lambda _: self.jobs),
            ("forked_map", self._forked_map),
            ("Folds", Folds),
            ("Counters", lambda *args: args),
        ):
            monkeypatch.setattr(counters, name, given)

    def _nodeinfo(
        self, image: object, memcg: int, missed: Callable[[FaultError], None]
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        if memcg in self.lost_nodes:
            missed(FaultError("not in the image", memcg + 8))
            return
        yield from ((nid, (memcg, nid)) for nid in (0, 1))

    def _forked_map(self, image: object, jobs: int) -> Callable[..., list[Any]]:
        assert jobs == self.jobs > 1

        def run(read: Callable[[Sequence[int]], Any], parts: list[list[int]]) -> list[Any]:
            self.given += parts
            return [read(part) for part in parts]

        return run

    # What is used of a StatReader.

    def all_arrays(self, holders: Mapping[Any, object]) -> Iterator[tuple[Any, object]]:
        self.batches.append(len(holders))
        # In the order of memory, which is not that of memcgs.
        for cell in reversed(holders):
            yield cell, FaultError("lost", 0x77) if cell in self.lost else ("arrays", cell)

    def memcg_stats(self, holder: int, arrays: object) -> object:
        assert arrays == ("arrays", (holder, None))
        return holder, "stats"

    def lruvec_stats(self, holder: tuple[int, int], arrays: object) -> object:
        assert arrays == ("arrays", holder)
        return holder, "stats"

    def event_arrays(self, arrays: object) -> object:
        return "events", arrays

    def read(
        self, memcgs: Sequence[int], folds: Folds | None = None, only: Sequence[int] | None = None
    ) -> tuple[Any, Coverage]:
        coverage, every = Coverage(), dict.fromkeys(memcgs)
        return read_counters(self.image, self, every, coverage, only, folds), coverage  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def stats(memcgs: Sequence[int]) -> tuple[dict[int, Any], dict[tuple[int, int], Any]]:
    return (
        {memcg: (memcg, "stats") for memcg in memcgs},
        {(memcg, nid): ((memcg, nid), "stats") for memcg in memcgs for nid in (0, 1)},
    )


@pytest.mark.parametrize(("jobs", "few", "number"), [(1, 1, 0), (2, 12, 6), (2, 13, 0)])
def test_processes_share_many_memcgs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, jobs: int, few: int, number: int
) -> None:
    """Three memcgs of four CPUs are twelve; fewer than that are read by one process."""
    monkeypatch.setattr(counters, "_FEW", few)
    machine.jobs = jobs
    found, coverage = machine.read([1, 2, 3])
    assert (found[1], found[2]) == stats([1, 2, 3])
    assert list(found[1]) == [1, 2, 3]
    assert list(found[2]) == [(m, nid) for m in (1, 2, 3) for nid in (0, 1)]
    assert found[3] == {0, 1, 5}
    assert (coverage.read, coverage.unreadable) == (9, 0)
    assert machine.given == ([[1], [2], [3]] if number else [])
    assert machine.batches == ([3, 3, 3] if number else [9])
    assert [share for _, share in machine.told] == ([1 / 3, 2 / 3, 1.0] if number else [])


def test_each_process_gets_several_parts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four, so that one that is early can take another."""
    monkeypatch.setattr(counters, "_FEW", 1)
    machine.jobs = 2
    machine.read(range(20))
    assert [len(part) for part in machine.given] == [3, 3, 3, 3, 3, 3, 2]
    assert sum(machine.given, []) == list(range(20))
    assert {what for what, _ in machine.told} == {"counters"}
    machine.given = []
    machine.read([1], only=[])
    assert machine.given == []


def test_processes_elsewhere_do_not_read_counters(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do any if the size of memory, and so their number, is not known."""
    monkeypatch.setattr(counters, "_FEW", 1)
    machine.jobs, machine.image.pool = 2, object()
    machine.read([1, 2])
    machine.image.pool = None
    for error in (FaultError("not in the image", 0), ImageError("unknown")):

        def unknown(image: object, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr(counters, "jobs_of", unknown)
        assert machine.read([1, 2])[0][:3][1] == stats([1, 2])[0]
    assert machine.given == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_arrays_say_about_flushes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    """Also if another process has read them. A memcg without some of its arrays is partial."""
    monkeypatch.setattr(counters, "_FEW", 1)
    machine.jobs, folds = jobs, Folds()
    machine.lost, machine.lost_nodes = {(1, None), (2, 1)}, {3}
    found, coverage = machine.read([1, 2, 3, 4], folds)
    assert folds.found.changed.keys() == {2, 3, 4}
    assert folds.found.local.keys() == {(1, 0), (1, 1), (2, 0), (4, 0), (4, 1)}
    assert folds.found.partial == {1, 2, 3}
    assert found[1].keys() == {2, 3, 4}
    assert found[2].keys() == folds.found.local.keys()
    assert (coverage.read, coverage.unreadable) == (8, 3)
    assert {(missed.what, missed.address) for missed in coverage.examples} == {
        ("counters of a memcg", 0x77),
        ("counters of a memcg on a node", 0x77),
        ("counters of a memcg on a node", 3 + 8),
    }


def test_nodes_of_counters_that_are_lost_are_nodes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.lost = {(1, 0), (1, 1)}
    found, _ = machine.read([1])
    assert found[3] == {0, 1, 5}
    assert found[2] == {}


def test_counters_that_change_are_read_one_by_one(machine: Machine) -> None:
    """Else a flush between the reads of a counter is taken for a change of it."""
    machine.image.is_moving = True
    found, _ = machine.read([1, 2])
    assert machine.batches == [1] * 6
    assert (found[1], found[2]) == stats([1, 2])


def test_an_interrupted_walk_reads_no_counters(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_FEW", 1)
    machine.jobs, machine.image.progress.stop = 2, True
    folds = Folds()
    found, coverage = machine.read([1, 2], folds)
    assert (found[1], found[2], found[3]) == ({}, {}, {0, 5})
    assert machine.batches == []
    assert [(m.what, m.address, m.reason) for m in coverage.examples] == [
        ("counters of a memcg", memcg, STOPPED) for memcg in (1, 2)
    ]
    assert folds.found == Folded()


@pytest.mark.parametrize(("number", "are_shared"), [(1 << 14, True), ((1 << 14) - 1, False)])
def test_how_many_counters_one_process_reads(
    machine: Machine, number: int, are_shared: bool
) -> None:
    """Up to 65,535 arrays of counters: others would have to be started first."""
    machine.jobs = 2
    machine.read(range(number))
    assert bool(machine.given) == are_shared
