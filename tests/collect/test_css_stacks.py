# SPDX-License-Identifier: LGPL-2.1-or-later
"""What may hold references to memcgs for a moment, and what may not be known of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError
from support.made import A, B, snapshot

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import css_stacks
from memcg_inspect.collect.css_stacks import with_css_stacks
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.model import Coverage, Running, StackRef
from memcg_inspect.report import Row

STACKS = {A: (StackRef(7, "some", None, 1, ()),)}


def row(memcg: int | None, identity: str = "css_refs", status: Any = "differs") -> Row:
    return Row(identity, memcg, None, None, "css", "references", status, {}, {"css": 1})


def missing(*_: object) -> Any:
    raise FaultError("not in the image", 0x1230)


class Machine:
    """
    A machine on which tasks hold references.

    :ivar lost: stacks that are not in the image
    :ivar asked: memcgs that were looked for, and what is being freed
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost = 0
        self.asked: list[tuple[Any, Any]] = []
        self.image: Any = SimpleNamespace(is_moving=False)
        self.given = monkeypatch
        for name, value in {
            "foreign_modules": lambda _: iter(()),
            "busy_loops": lambda _: iter(()),
            "stack_refs": self._stack_refs,
            "closing_sockets": lambda image, wanted: Counter(wanted),
            "freed_sockets": lambda _: "freed",
            "deferred_sockets": lambda _: None,
            "broadcast_sockets": lambda _: "broadcast",
            "released_cgwbs": lambda _: "writebacks",
        }.items():
            self.put(name, value)

    def put(self, name: str, value: Any) -> None:
        self.given.setattr(css_stacks, name, value)

    def _stack_refs(self, image: Any, wanted: Any, coverage: Coverage, freeing: Any) -> Any:
        self.asked.append((wanted, freeing))
        for _ in range(self.lost):
            coverage.miss("stack", 0x10, "not in the image")
        return STACKS

    def read(self, *rows: Row, of: Snapshot | None = None) -> Snapshot:
        before = of or snapshot(css_holders={"notify": Counter({B: 1})})
        return with_css_stacks(self.image, before, rows or [row(A)])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_memcgs_whose_references_differ(machine: Machine) -> None:
    """Also those of IDs and of swap. Others are not looked for."""
    found = machine.read(
        row(A),
        row(B, "id_refs"),
        row(0x10, "swap"),
        row(0x20, "swap_usage"),
        row(0x30, "slab"),
        row(0x40, status="exact"),
        row(None),
    )
    assert machine.asked == [({A, B, 0x10, 0x20}, ["freed", "broadcast", "writebacks"])]
    assert (found.css_stacks, found.css_others) == (STACKS, None)
    closing = {A: 1, B: 1, 0x10: 1, 0x20: 1}
    assert found.css_holders == {"notify": {B: 1}, "closing": closing}


def test_no_memcg_of_which_they_differ(machine: Machine) -> None:
    before = snapshot()
    assert machine.read(row(None), row(A, "slab"), row(A, status="exact"), of=before) is before
    assert machine.asked == []


def test_modules_and_loop_devices(machine: Machine) -> None:
    """The first that may hold references is named."""
    machine.put("busy_loops", lambda _: iter(["loop1", "loop2"]))
    assert machine.read().css_others == "requests in flight on loop1 may hold references"
    machine.put("foreign_modules", lambda _: iter(["foreign", "other"]))
    assert machine.read().css_others == "the out-of-tree module foreign may hold references"
    assert machine.read().css_stacks == STACKS


@pytest.mark.parametrize("name", ["foreign_modules", "busy_loops"])
@pytest.mark.parametrize("error", [FaultError("gone", 0), LookupError("gone")])
def test_modules_and_loop_devices_that_are_missing(
    machine: Machine, name: str, error: Exception
) -> None:
    def lost(_: object) -> Any:
        raise error

    machine.put(name, lost)
    others = machine.read().css_others or ""
    start = "modules and loop devices, which may hold references, could not be read (gone"
    assert others.startswith(start)


def test_callbacks_that_are_called(machine: Machine) -> None:
    running = (Running(3, 7, "some", ("rcu_do_batch",), True),)
    why = "RCU callbacks that CPU 3 is calling may hold references"
    machine.lost = 1
    assert machine.read(of=replace(snapshot(), running=running)).css_others == why


def test_stacks_that_are_missing(machine: Machine) -> None:
    machine.lost = 2
    others = machine.read().css_others
    assert others == ("kernel stacks of tasks, which may hold references, are not all in the image")


@pytest.mark.parametrize("error", [FaultError("gone", 0x10), UnknownKernelError("gone")])
def test_sockets_that_are_missing(machine: Machine, error: Exception) -> None:
    def lost(*_: object) -> Any:
        raise error

    machine.lost = 1
    machine.put("closing_sockets", lost)
    found = machine.read()
    assert found.css_others == f"sockets that are being freed could not be read ({error})"
    assert found.css_holders == {"notify": {B: 1}}
    assert found.css_stacks == STACKS


def test_memory_that_changes_meanwhile(machine: Machine) -> None:
    """On a running kernel, any error may be due to that. An image does not change."""

    def lost(*_: object) -> Any:
        raise ValueError("odd")

    machine.put("stack_refs", lost)
    with pytest.raises(ValueError, match="odd"):
        machine.read()
    machine.image.is_moving = True
    found = machine.read()
    assert found.css_others == "what may hold references changed meanwhile (odd)"
    assert found.css_stacks == {}
    assert found.css_holders == {"notify": {B: 1}}
