# SPDX-License-Identifier: LGPL-2.1-or-later
"""Memcgs that are being freed, in memory that is made here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError

from memcg_inspect.collect import released as module
from memcg_inspect.collect.released import (
    QUEUED_WORK,
    RELEASED,
    Pending,
    ReleasedReader,
    queued_callback,
)
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.slab import SlabCache
from memcg_inspect.model import Coverage
from memcg_inspect.model_freeing import Transient

CACHE = SlabCache(0x900, "mem_cgroup", 2048, 2048, 0, False, 2056, True)
SLAB: Any = SimpleNamespace(cache=CACHE)
#: The address of ``memory_cgrp_subsys``, and offsets in ``struct mem_cgroup``.
SUBSYS, AT_SUBSYS, AT_PARENT, AT_RWORK = 0x700, 8, 16, 24
ONE, TWO, PARENT = 0x10000, 0x20000, 0x30000


def pointer(address: int) -> Any:
    """Return what is at an address."""
    where = SimpleNamespace(value_=lambda: address)
    return SimpleNamespace(address_of_=lambda: where, value_=lambda: address)


def memcg(address: int, flags: int = 0, data: int = 1, **more: Any) -> Any:
    rwork = SimpleNamespace(work=pointer(address + 0x100), rcu=pointer(address + 0x200))
    css = SimpleNamespace(
        flags=flags,
        refcnt=SimpleNamespace(data=data),
        destroy_rwork=rwork,
        destroy_work=pointer(address + 0x300),
        parent=pointer(PARENT),
    )
    return SimpleNamespace(css=css, id=SimpleNamespace(id=5), **more)


def reader(of: dict[int, Any], words: dict[int, int], **more: Any) -> ReleasedReader:
    """Return a reader of one slab with these memcgs, which are on no list."""
    found: Any = ReleasedReader.__new__(ReleasedReader)

    def word(address: int) -> int:
        if address not in words:
            raise FaultError("not there", address)
        return words[address]

    found.image = SimpleNamespace(is_moving=False)
    found.memory = SimpleNamespace(word=word, word_size=8)
    found.slabs = SimpleNamespace(objects=lambda _: list(of))
    found._missed = set()
    found.memcgs, found.coverage, found._being_freed = set(), Coverage(), frozenset()
    found._subsys, found._parent, found._rwork = AT_SUBSYS, AT_PARENT, AT_RWORK
    found._released, found._memory_subsys, found._memcg_size = 4, SUBSYS, 1000
    found._free = SimpleNamespace(is_free=lambda *_: False)
    found._memcg = of.__getitem__
    found._original_objcgs = lambda memcg: []
    for name, value in more.items():
        setattr(found, name, value)
    return found  # type: ignore[no-any-return]


def words_of(address: int, rwork: int = 0) -> dict[int, int]:
    return {
        address + AT_SUBSYS: SUBSYS,
        address + AT_PARENT: PARENT + address,
        address + AT_RWORK: rwork,
    }


@pytest.fixture(autouse=True)
def no_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "untagged", lambda image, address: address)


@pytest.mark.parametrize(
    ("flags", "data", "rwork", "is_found", "holds_parent"),
    [
        (4, 1, 0, True, True),
        (0, 1, 0, False, False),
        (3, 1, 0, False, False),
        (7, 1, 0, True, True),
        (4, 0, 0, False, False),
        (4, 0, 1, False, True),
        (0, 1, 3, False, True),
        (0, 1, 2, False, False),
    ],
)
def test_states_of_a_memcg(
    flags: int, data: int, rwork: int, is_found: bool, holds_parent: bool
) -> None:
    """``percpu_ref_exit()`` clears the counter, and a work item that is queued is pending."""
    memcgs = {ONE: memcg(ONE, flags, data)}
    found = reader(memcgs, words_of(ONE, rwork))
    assert list(found.read(SLAB)) == ([(0, Transient(RELEASED, ONE))] if is_found else [])
    assert list(found.children(SLAB)) == ([PARENT + ONE] if holds_parent else [])


def test_a_worker_frees_a_memcg() -> None:
    """Then the bit is not set any more."""
    found = reader({ONE: memcg(ONE, 4, 0)}, words_of(ONE), _being_freed=frozenset({ONE + 0x100}))
    assert list(found.children(SLAB)) == [PARENT + ONE]


def test_a_kernel_whose_memcgs_have_no_such_work_item() -> None:
    found = reader({ONE: memcg(ONE, 4, 1)}, words_of(ONE, 1), _rwork=None)
    assert list(found.children(SLAB)) == []
    assert found._holds_parent(ONE) is True
    found = reader({ONE: memcg(ONE, 0, 1)}, words_of(ONE, 1), _rwork=None)
    assert found._holds_parent(ONE) is False


def test_objects_that_are_no_memcgs() -> None:
    """Those that are known, that are of another controller, or that are missing."""
    memcgs = {at: memcg(at, 4) for at in (0x1000, ONE, 0x2000, TWO)}
    words = words_of(ONE) | words_of(TWO) | {0x2000 + AT_SUBSYS: SUBSYS + 8}
    found = reader(memcgs, words, memcgs={TWO})
    assert [t.address for _, t in found.read(SLAB)] == [ONE]
    (missed,) = found.coverage.examples
    assert (missed.what, missed.address) == ("possible memcg", 0x1000)
    assert list(found.children(SLAB)) == [PARENT + ONE]
    assert found.coverage.unreadable == 1
    other: Any = SimpleNamespace(cache=CACHE._replace(name="dentry"))
    assert list(found.read(other)) == list(found.children(other)) == []


def test_memory_that_is_used_again_can_point_anywhere() -> None:
    """Nothing more is found there, and later objects are read all the same."""

    def lost(memcg: Any) -> Iterator[int]:
        yield 0xA0
        raise FaultError("not there", 0x1230)

    memcgs = {ONE: memcg(ONE, 4), TWO: memcg(TWO, 0)}
    words = words_of(ONE) | words_of(TWO)
    found = reader(memcgs, words, _original_objcgs=lost)
    transients = {at: Transient(RELEASED, at) for at in memcgs}
    assert list(found.read(SLAB)) == [
        *((objcg, transients[ONE]) for objcg in (0, 0xA0)),
        (0xA0, transients[TWO]),
    ]
    (missed,) = found.coverage.examples  # TWO was not released
    assert (missed.what, missed.address) == ("memcg that is being freed", 0x1230)
    found.image.is_moving = True
    assert len(list(found.read(SLAB))) == 3
    assert found.coverage.unreadable == 1


def test_a_memcg_whose_parent_cannot_be_read() -> None:
    memcgs = {at: memcg(at, 4) for at in (ONE, TWO)}
    words = words_of(ONE) | words_of(TWO)
    del words[ONE + AT_PARENT]
    found = reader(memcgs, words)
    assert list(found.children(SLAB)) == [PARENT + TWO]
    assert [missed.what for missed in found.coverage.examples] == ["memcg that is being freed"]


def test_a_free_object_is_no_memcg() -> None:
    free = SimpleNamespace(is_free=lambda *_: True)
    found = reader({ONE: memcg(ONE, 4)}, words_of(ONE), _free=free)
    assert list(found.read(SLAB)) == []
    assert found.coverage.unreadable == 0


def test_an_object_that_may_be_free_may_hold_references() -> None:
    """A part of the free list is missing, or a CPU was changing it. It is not called a leak."""

    def lost(*_: object) -> bool:
        raise FaultError("a broken list", 0x1230)

    free, original = SimpleNamespace(is_free=lost), lambda _: [0xA0]
    found = reader({ONE: memcg(ONE, 4)}, words_of(ONE), _free=free, _original_objcgs=original)
    assert list(found.read(SLAB)) == [(0xA0, Transient(RELEASED, ONE, unsure=True))]
    assert found.coverage.unreadable == 0


@pytest.mark.parametrize("by_node", [True, False])
def test_original_obj_cgroups(monkeypatch: pytest.MonkeyPatch, by_node: bool) -> None:
    """Since 6.2; since 7.1 there is one for each node."""

    def holder(objcg: int | None, has_member: bool = True) -> Any:
        return SimpleNamespace(
            type_=SimpleNamespace(type=SimpleNamespace(has_member=lambda name: has_member)),
            orig_objcg=None if objcg is None else pointer(objcg),
        )

    nodes = [(0, holder(0xA0)), (1, holder(None)), (2, holder(0xB0)), (3, holder(0xC0, False))]
    monkeypatch.setattr(module, "nodeinfo", lambda *_: nodes)
    monkeypatch.setattr(module, "has_node_objcgs", lambda _: by_node)
    found = reader({}, {})
    del found._original_objcgs  # type: ignore[attr-defined]
    assert list(found._original_objcgs(holder(0xD0))) == ([0xA0, 0xB0] if by_node else [0xD0])


@pytest.mark.parametrize(
    ("error", "faults"), [(FaultError("not there", 0x1230), 1), (UnknownKernelError("why"), 0)]
)
def test_work_items_that_are_not_known(
    monkeypatch: pytest.MonkeyPatch, error: Exception, faults: int
) -> None:
    """What was found before counts. A kernel may not have the function."""

    def works_of(image: Any, function: int, on_fault: Any) -> Iterator[Any]:
        assert function == 0x50
        yield pointer(0x10)
        raise error

    image: Any = SimpleNamespace(symbol=lambda name: SimpleNamespace(address=0x50))
    told: list[FaultError] = []
    monkeypatch.setattr(module, "works_of", works_of)
    assert module._running(image, "some", told.append) == frozenset({0x10})
    assert len(told) == faults


class Machine:
    """
    A machine that frees objects.

    :ivar works: work items that are queued, by the address of their function
    :ivar callbacks: CPUs by the callback that is queued on them
    :ivar symbols: addresses of functions
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.works: dict[int, list[int]] = {}
        self.callbacks: Any = dict
        self.faults = 0
        self.pending: set[int] = set()
        self.memory: dict[int, Any] = {}
        names = ("css_release_work_fn", "css_free_rwork_fn", "bpf_map_free_deferred")
        self.symbols = {name: n for n, name in enumerate(names, 1)}
        self.symbols |= {"bpf_map_free_rcu_gp": 11, "bpf_map_free_mult_rcu_gp": 12}
        self.stats: Any = lambda: {"MEMCG_SOCK": SimpleNamespace(state=7)}
        self.image: Any = SimpleNamespace(
            is_moving=False, symbol=self._symbol, pointer=lambda _, address: self._at(address)
        )
        for name, value in {
            "queued_callbacks": lambda _: self.callbacks(),
            "works_of": self._works_of,
            "is_pending": lambda work: work.value_() in self.pending,
            "StatReader": lambda image, items: SimpleNamespace(memcg=lambda _: self.stats()),
            "container_of": lambda css, *_: pointer(css.value_()),
        }.items():
            monkeypatch.setattr(module, name, value)

    def _symbol(self, name: str) -> Any:
        if name not in self.symbols:
            raise UnknownKernelError(name)
        return SimpleNamespace(address=self.symbols[name])

    def _at(self, address: int) -> Any:
        if address not in self.memory:
            raise FaultError("not there", address)
        return self.memory[address]

    def _works_of(self, image: Any, function: int, missed: Callable[..., None]) -> Iterable[Any]:
        for _ in range(self.faults):
            missed(FaultError("a broken list", 0x10))
        return [pointer(work) for work in self.works.get(function, ())]

    def of(self, what: str = RELEASED, address: int = ONE) -> Transient:
        return Pending(self.image).of(Transient(what, address))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(monkeypatch)
    found.memory[ONE] = memcg(ONE)
    return found


LEAK = Transient(RELEASED, ONE, parent=PARENT, swap_id=5, sock_pages=7)


def test_nothing_frees_a_memcg(machine: Machine) -> None:
    """What its parent's rows need of it is read, as far as it is in the image."""
    assert machine.of() == LEAK
    machine.stats = dict
    assert machine.of() == LEAK._replace(sock_pages=0)

    def lost() -> Any:
        raise FaultError("not there", 0x10)

    machine.stats = lost
    assert machine.of() == Transient(RELEASED, ONE)


@pytest.mark.parametrize(("function", "at"), [(1, 0x300), (2, 0x100), (3, 0x300)])
def test_work_items(machine: Machine, function: int, at: int) -> None:
    machine.works = {function: [ONE + at]}
    assert machine.of() == Transient(RELEASED, ONE, freed_by=QUEUED_WORK)
    machine.works = {function: [ONE]}
    assert machine.of() == LEAK


def test_callbacks(machine: Machine) -> None:
    """CPU 0 is one, too."""
    for cpu in (0, 3):
        machine.callbacks = lambda cpu=cpu: {ONE + 0x200: cpu}
        found = machine.of()
        assert found == Transient(RELEASED, ONE, freed_by=queued_callback(cpu))
        assert found.freed_by == f"its RCU callback is queued on CPU {cpu}"


@pytest.mark.parametrize("at", [0x100, 0x300])
def test_work_items_that_are_pending(machine: Machine, at: int) -> None:
    """On a running kernel, lists change while they are read."""
    machine.pending = {ONE + at}
    assert machine.of() == LEAK._replace(unsure=True)
    machine.image.is_moving = True
    found = Transient(RELEASED, ONE, freed_by="its work item is pending", unsure=True)
    assert machine.of() == found


def test_not_everything_is_known(machine: Machine) -> None:
    """A list that is broken, a function that is missing, or callbacks."""
    unsure = LEAK._replace(unsure=True)
    machine.faults = 1
    assert machine.of() == unsure
    machine.faults = 0
    assert machine.of() == LEAK
    del machine.symbols["bpf_map_free_deferred"]
    assert machine.of() == unsure
    machine.symbols["bpf_map_free_deferred"] = 3
    for error in (FaultError("not there", 0x10), UnknownKernelError("why")):

        def lost(error: Exception = error) -> Any:
            raise error

        machine.callbacks = lost
        assert machine.of() == unsure


def test_objects_that_are_missing(machine: Machine) -> None:
    for what in (RELEASED, "BPF map"):
        assert machine.of(what, TWO) == Transient(what, TWO, unsure=True)
    machine.memory[TWO] = SimpleNamespace()
    for what in (RELEASED, "BPF map"):
        assert machine.of(what, TWO) == Transient(what, TWO, unsure=True)


def bpf_map(function: int = 0) -> Any:
    rcu = SimpleNamespace(**vars(pointer(TWO + 0x200)), func=pointer(function))
    return SimpleNamespace(work=pointer(TWO + 0x100), rcu=rcu)


def test_maps(machine: Machine) -> None:
    """One may wait for a grace period of RCU tasks, whose callbacks are in no list."""
    found = Transient("BPF map", TWO)
    for function, waits in ((0, False), (11, True), (12, True), (2, False)):
        machine.memory[TWO] = bpf_map(function)
        assert machine.of("BPF map", TWO) == found._replace(unsure=waits)
    machine.works = {3: [TWO + 0x100]}
    assert machine.of("BPF map", TWO) == found._replace(freed_by=QUEUED_WORK)
    machine.works, machine.callbacks = {}, lambda: {TWO + 0x200: 1}
    assert machine.of("BPF map", TWO) == found._replace(freed_by=queued_callback(1))
    machine.faults = 1
    assert machine.of("BPF map", TWO) == found._replace(freed_by=queued_callback(1), unsure=True)
    del machine.symbols["bpf_map_free_mult_rcu_gp"]
    machine.faults, machine.memory[TWO] = 0, bpf_map(11)
    assert machine.of("BPF map", TWO).unsure
