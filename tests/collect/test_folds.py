# SPDX-License-Identifier: LGPL-2.1-or-later
"""What was folded of counters, and what was not: the arrays of counters are written here."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from drgn import FaultError

from memcg_inspect.collect import folds
from memcg_inspect.collect.folds import Folded, Folds
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.model import Coverage, ImageError
from memcg_inspect.model_counters import LocalStat, Unfolded

MEMCG, OTHER = 0x1000, 0x2000
#: Index of counters and of events.
NAMES = {0: "MEMCG_SOCK", 1: "NR_FILE_PAGES"}
EVENTS = {0: "PGFAULT", 1: "PGMAJFAULT"}


class Arrays(NamedTuple):
    """
    Arrays of counters of a memcg.

    :ivar changes: by CPU, then by index
    :ivar of_pending: ``state_pending``
    :ivar of_local: ``state_local``
    :ivar of_flushed: sums of ``state_prev``
    """

    changes: Mapping[int, Mapping[int, int]] = {}
    of_pending: tuple[int, ...] = (0, 0, 0)
    of_local: tuple[int, ...] | None = (0, 0, 0)
    of_flushed: tuple[int, ...] = (0, 0, 0)

    @property
    def is_zero(self) -> bool:
        sums = (*self.of_pending, *(self.of_local or ()), *self.of_flushed)
        return not self.changes and not any(sums)

    def pending(self) -> tuple[int, ...]:
        return self.of_pending

    def local(self) -> tuple[int, ...] | None:
        return self.of_local

    def flushed(self) -> tuple[int, ...]:
        return self.of_flushed

    def is_same(self, cpu: int, other: Arrays) -> bool:
        return self.changes.get(cpu) == other.changes.get(cpu)


class Machine:
    """
    A machine with three nodes, the last of which may have had no memory for a time.

    :ivar updated: memcgs on the list of each CPU
    :ivar now: arrays that are read of memcgs later, with those of their events
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.updated: dict[int, set[int]] = {}
        self.now: dict[int, tuple[Arrays, Arrays]] = {}
        self.image: Any = SimpleNamespace(
            is_moving=False, pointer=lambda _, address: address, once=lambda find: find(None)
        )
        self.nodes: set[int] | None = {0, 2}
        for name, given in (
            ("slot_names", lambda _: NAMES),
            ("event_slots", lambda _: dict(zip(EVENTS.values(), EVENTS, strict=True))),
            ("memory_nodes", lambda _: self.nodes),
            ("steady_nodes", lambda _: {0, 1}),
            ("read_updated", lambda *_: self.updated),
        ):
            monkeypatch.setattr(folds, name, given)
        self.folds = Folds(self.image)

    def add(self, arrays: Arrays, events: Arrays | None = None, memcg: int = MEMCG) -> None:
        self.folds.add_memcg(memcg, arrays, events or Arrays())  # type: ignore[arg-type]

    def add_node(self, nid: int, arrays: Arrays) -> None:
        self.folds.add_lruvec(MEMCG, nid, arrays)  # type: ignore[arg-type]

    @property
    def found(self) -> Folded:
        return self.folds.found

    def unfolded(self) -> dict[int, Unfolded]:
        return self.folds.unfolded(self, Coverage())  # type: ignore[arg-type]

    # What is used of a StatReader.

    def memcg_arrays(self, memcg: int) -> Arrays:
        if memcg not in self.now:
            raise FaultError("it was freed", memcg)
        return self.now[memcg][0]

    def event_arrays(self, arrays: Arrays) -> Arrays:
        return next((e for a, e in self.now.values() if a is arrays), Arrays())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_changes_of_counters_and_of_events(machine: Machine) -> None:
    """A counter without a name is told by its index."""
    machine.add(
        Arrays({1: {0: 5, 2: -1}, 3: {1: 1}}, (0, 0, 7)),
        Arrays({1: {1: 2}}, (4, 0)),
    )
    assert machine.found.changed == {
        MEMCG: {1: {"MEMCG_SOCK", "2", "PGMAJFAULT"}, 3: {"NR_FILE_PAGES"}}
    }
    assert machine.found.pending == {MEMCG: {"2", "PGFAULT"}}
    assert machine.found.local == {(MEMCG, None): {}}


def test_counters_that_are_all_0(machine: Machine) -> None:
    machine.add(Arrays())
    assert machine.found == Folded({(MEMCG, None): {}}, {MEMCG: {}}, {MEMCG: set()})


def test_local_counters(machine: Machine) -> None:
    """Those of which either is not 0, and that have a name."""
    machine.add(Arrays(of_local=(3, 0, 9), of_flushed=(0, 4, 9)))
    machine.add_node(0, Arrays(of_local=(0, 6, 0), of_flushed=(0, 6, 0)))
    assert machine.found.local == {
        (MEMCG, None): {"MEMCG_SOCK": LocalStat(3, 0), "NR_FILE_PAGES": LocalStat(0, 4)},
        (MEMCG, 0): {"NR_FILE_PAGES": LocalStat(6, 6)},
    }
    assert machine.found.changed == {MEMCG: {}}


def test_kernels_without_local_counters(machine: Machine) -> None:
    machine.add(Arrays({0: {0: 1}}, of_local=None))
    machine.add(Arrays(of_local=None), memcg=OTHER)
    assert machine.found.local == {}
    assert machine.found.changed == {MEMCG: {0: {"MEMCG_SOCK"}}, OTHER: {}}


def test_nodes_without_memory_are_left_out(machine: Machine) -> None:
    """mem_cgroup_css_rstat_flush() does not flush their counters, unless no list says which."""
    machine.add_node(1, Arrays({0: {0: 1}}, (1, 0, 0)))
    assert machine.found == Folded()
    machine.nodes = None
    machine.add_node(1, Arrays({0: {0: 1}}, (1, 0, 0)))
    assert machine.found.changed == {MEMCG: {0: {"MEMCG_SOCK"}}}
    assert machine.found.pending == {MEMCG: {"MEMCG_SOCK"}}


def test_a_node_that_may_have_had_no_memory_for_a_time(machine: Machine) -> None:
    """Its changes may be old. They are told apart, with the node."""
    machine.add_node(2, Arrays({4: {0: 1}}, of_local=(1, 0, 0)))
    assert machine.found.unsteady == {MEMCG: {4: 2}}
    machine.add_node(2, Arrays({5: {0: 1}}, (0, 1, 0)))
    assert machine.found.unsteady == {MEMCG: {4: 2, 5: 2, None: 2}}
    assert (machine.found.changed, machine.found.pending) == ({}, {})
    assert machine.found.local == {(MEMCG, 2): {}}


def test_parts_of_other_processes(machine: Machine) -> None:
    machine.add(Arrays({1: {0: 1}}, (1, 0, 0), (1, 0, 0)))
    machine.add_node(2, Arrays({1: {0: 1}}))
    machine.folds.miss(0x3000)
    total = Folded({(OTHER, None): {}}, {OTHER: {}}, {OTHER: set()}, {OTHER: {0: 2}}, {0x4000})
    total.merge(machine.found)
    assert total == Folded(
        {(OTHER, None): {}} | machine.found.local,
        {OTHER: {}, MEMCG: {1: {"MEMCG_SOCK"}}},
        {OTHER: set(), MEMCG: {"MEMCG_SOCK"}},
        {OTHER: {0: 2}, MEMCG: {1: 2}},
        {0x4000, 0x3000},
    )


def test_what_is_not_folded_yet(machine: Machine) -> None:
    machine.updated = {0: {MEMCG}, 1: {OTHER}}
    machine.add(Arrays({1: {1: 1, 0: 1}, 0: {0: 1}}, (1, 1, 0)))
    machine.add(Arrays(), memcg=OTHER)
    machine.add_node(2, Arrays({3: {0: 1}}))
    machine.folds.miss(OTHER)
    both = ("MEMCG_SOCK", "NR_FILE_PAGES")
    assert machine.unfolded() == {
        MEMCG: Unfolded({0: ("MEMCG_SOCK",), 1: both}, both, {0: True, 1: False}, True, {3: 2}),
        OTHER: Unfolded({}, (), {0: False, 1: True}, False, {}),
    }


@pytest.mark.parametrize(
    ("error", "missed"),
    [
        (FaultError("no page", 0x50), [("names of events", 0x50, "no page: 0x50")]),
        (ImageError("it is damaged"), [("names of events", 0, "it is damaged")]),
        (UnknownKernelError(LookupError("no table")), []),
    ],
)
def test_names_of_events_that_cannot_be_read(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    missed: list[tuple[str, int, str]],
) -> None:
    """An event is told by its index, and that is not all that there is to know."""

    def event_slots(_: object) -> None:
        raise error

    monkeypatch.setattr(folds, "event_slots", event_slots)
    machine.add(Arrays(), Arrays({1: {1: 2}}))
    coverage = Coverage()
    unfolded = machine.folds.unfolded(machine, coverage)  # type: ignore[arg-type]
    assert unfolded[MEMCG].changed == {1: ("1",)}
    assert [(one.what, one.address, one.reason) for one in coverage.examples] == missed


CHANGED = Arrays({0: {0: 1}, 1: {0: 1}}, (1, 0, 0))
NAME = ("MEMCG_SOCK",)


@pytest.mark.parametrize(
    ("updated", "now", "changed", "pending"),
    [
        # All of its CPUs list it, or their lists could not be read: nothing is read again.
        ({0: {MEMCG}, 1: {MEMCG}}, Arrays(), {0: NAME, 1: NAME}, NAME),
        ({0: {MEMCG}}, Arrays(), {0: NAME, 1: NAME}, NAME),
        # CPU 1 does not, and nothing has changed.
        ({0: {MEMCG}, 1: set()}, CHANGED, {0: NAME, 1: NAME}, NAME),
        # It was flushed meanwhile, so that the lists say nothing about its changes.
        ({0: {MEMCG}, 1: set()}, Arrays({0: {0: 1}}, (1, 0, 0)), {0: NAME}, NAME),
        ({0: set(), 1: set()}, Arrays({1: {0: 1}}, (1, 0, 0)), {1: NAME}, NAME),
        ({0: set(), 1: set()}, Arrays({0: {0: 1}, 1: {0: 1}}), {0: NAME, 1: NAME}, ()),
    ],
)
def test_what_was_flushed_meanwhile_on_a_running_kernel(
    machine: Machine,
    updated: dict[int, set[int]],
    now: Arrays,
    changed: dict[int, tuple[str, ...]],
    pending: tuple[str, ...],
) -> None:
    machine.image.is_moving = True
    machine.updated, machine.now = updated, {MEMCG: (now, Arrays())}
    machine.add(CHANGED)
    found = machine.unfolded()[MEMCG]
    assert (found.changed, found.pending) == (changed, pending)


def test_events_that_were_flushed_meanwhile(machine: Machine) -> None:
    """They have arrays of their own."""
    machine.image.is_moving = True
    machine.updated, machine.now = {0: set()}, {MEMCG: (Arrays(), Arrays({0: {0: 2}}, (2, 0)))}
    machine.add(Arrays(), Arrays({0: {0: 1}}, (1, 0)))
    assert machine.unfolded()[MEMCG][:2] == ({}, ())


def test_pending_changes_of_a_memcg_without_others(machine: Machine) -> None:
    """They are read again unless a CPU lists the memcg: its flush is still to come."""
    machine.image.is_moving = True
    machine.add(Arrays({}, (1, 0, 0)))
    machine.now = {MEMCG: (Arrays(), Arrays())}
    for updated, pending in (({0: {MEMCG}, 1: set()}, NAME), ({0: set()}, ())):
        machine.updated = updated
        assert machine.unfolded()[MEMCG].pending == pending


def test_a_memcg_that_was_freed_meanwhile(machine: Machine) -> None:
    machine.image.is_moving = True
    machine.updated = {0: set(), 1: set()}
    machine.add(CHANGED)
    assert machine.unfolded() == {MEMCG: Unfolded({}, (), {0: False, 1: False}, True, {})}
