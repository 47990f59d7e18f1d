# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is added to a snapshot of a machine that was stopped, or that runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.made import DEAD, ROOT, A, B, snapshot

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import stopped
from memcg_inspect.collect.released import RELEASED
from memcg_inspect.collect.stopped import with_pending, with_running, with_unlisted, with_waiting
from memcg_inspect.model import Coverage, CssRefs, Running
from memcg_inspect.model_freeing import Transient

IMAGE: Any = object()


class Cpus:
    """
    What CPUs were doing.

    :ivar lost: CPUs whose tasks are not in the image
    :ivar asked: the memcgs, obj_cgroups and released memcgs that were looked for
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost: list[int] = []
        self.held: tuple[Any, ...] | None = ()
        self.asked: list[tuple[Any, ...]] = []
        monkeypatch.setattr(stopped, "read_running", self._running)

    def _running(self, image: Any, *args: Any) -> tuple[Running, ...]:
        *asked, coverage = args
        self.asked.append(tuple(asked))
        for cpu in self.lost:
            coverage.miss("task that a CPU was running", cpu, "not in the image")
        return (
            Running(0, 0, "idle", (), False, None),
            Running(1, 7, "some", (), True, self.held),
        )


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> Cpus:
    return Cpus(monkeypatch)


def test_what_cpus_were_doing(cpus: Cpus) -> None:
    """Memcgs on no list are looked for, too."""
    transients = {0: [Transient(RELEASED, 0x900), Transient(RELEASED, A)], 0xA0: []}
    before = snapshot(transients=transients)
    found = with_running(IMAGE, before)
    assert [cpu.cpu for cpu in found.running] == [0, 1]
    assert cpus.asked == [(before.memcgs, before.objcgs, {0x900})]
    assert "cpus" not in found.coverage
    cpus.lost = [1]
    found = with_running(IMAGE, snapshot(coverage={"slab": Coverage(5)}))
    assert found.coverage["cpus"].unreadable == 1
    assert found.coverage["slab"] == Coverage(5)


def test_what_waiting_tasks_were_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a running kernel, tasks come and go, which can lead to any error."""
    before, asked = snapshot(), list[Any]()
    waiting = (Running(2, 9, "other", (), True, waiting=True),)

    def read_waiting(image: Any, *args: Any) -> Any:
        asked.append(args)
        return waiting

    monkeypatch.setattr(stopped, "read_waiting", read_waiting)
    found = with_waiting(IMAGE, before)
    assert found is not None
    assert found.running == waiting
    assert asked == [(before.memcgs, before.objcgs, set())]

    def lost(*_: object) -> Any:
        raise ValueError

    monkeypatch.setattr(stopped, "read_waiting", lost)
    assert with_waiting(IMAGE, before) is None


def held(kind: str, address: int) -> Any:
    return SimpleNamespace(kind=kind, address=address)


def with_entries(*addresses: int) -> Snapshot:
    return snapshot(unlisted_zswap=list(addresses), coverage={"zswap": Coverage(4)})


def test_zswap_entries_that_tasks_store(cpus: Cpus) -> None:
    """Their charges are looked for among what CPUs have left half done."""
    nothing = snapshot()
    assert with_unlisted(IMAGE, nothing) is nothing
    assert cpus.asked == []
    cpus.held = (held("zswap", 0x100), held("zswap", 0x200))
    found = with_unlisted(IMAGE, with_entries(0x100, 0x200))
    assert len(found.running) == 2
    assert found.coverage["zswap"].unreadable == 0
    assert not found.ledger.missing


def test_zswap_entries_that_nobody_knows(cpus: Cpus) -> None:
    """They may have been charged. The snapshot of a session stays as it was."""
    cpus.held = (held("zswap", 0x100), held("slab", 0x200))
    before = with_entries(0x100, 0x200, 0x300)
    found = with_unlisted(IMAGE, before)
    assert found.ledger.missing == {("zswap", None, None)}
    reason = "it was not found on an LRU list, and no task stores it"
    assert [(m.what, m.address, m.reason) for m in found.coverage["zswap"].examples] == [
        ("zswap entry", 0x200, reason),
        ("zswap entry", 0x300, reason),
    ]
    assert found.coverage["zswap"].read == 4
    assert before.coverage["zswap"] == Coverage(4)
    assert not before.ledger.missing


def refs(number: int) -> CssRefs:
    return CssRefs(number, 0, 0, False, 0)


def test_what_will_free_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A removed memcg without references is being freed, though it is on a list."""
    pending = SimpleNamespace(of=lambda transient: transient._replace(freed_by="a worker"))
    monkeypatch.setattr(stopped, "Pending", lambda _: pending)
    css = {ROOT: refs(0), A: refs(2), B: refs(0), DEAD: refs(0)}
    some = [Transient(RELEASED, 0x900), Transient("BPF map", 0x901)]
    found = with_pending(IMAGE, snapshot(css=css, transients={0xA0: some, 0: some[:1]}))
    freed = [transient._replace(freed_by="a worker") for transient in some]
    unsure = Transient(RELEASED, DEAD, freed_by="a worker", unsure=True)
    assert found.transients == {0xA0: freed, 0: [freed[0], unsure]}
    assert with_pending(IMAGE, snapshot(css=css)).transients == {0: [unsure]}
    found = with_pending(IMAGE, snapshot(css=css | {DEAD: refs(1)}, transients={0xA0: some}))
    assert found.transients == {0xA0: freed, 0: []}


def test_nothing_is_being_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped, "Pending", None)
    before = snapshot(css={B: refs(0), DEAD: refs(1)})
    assert with_pending(IMAGE, before) is before
