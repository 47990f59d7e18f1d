# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which tasks create and free BPF maps, and when they are looked for."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError
from support.made import snapshot

from memcg_inspect.collect import unlisted_maps as module
from memcg_inspect.collect.unlisted_maps import UNLISTED_MAP, UnlistedMaps, with_map_makers
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.slab import SlabCache
from memcg_inspect.model import Coverage, StackRef
from memcg_inspect.model_freeing import Transient
from memcg_inspect.report import Row

#: Maps on a list of their makers, and obj_cgroups.
ONE, TWO = 0x1000, 0x2000
OBJCG = 0xA0


def row(off: int = 1, identity: str = "references", status: Any = "differs") -> Row:
    claimed = {"refcnt": 5 + off}
    return Row(identity, None, OBJCG, None, "refs", "references", status, {"slab": 5}, claimed)


def lost_map(address: int, **more: Any) -> Transient:
    return Transient(UNLISTED_MAP, address, **more)


class Machine:
    """
    A machine with maps.

    :ivar queued: maps that are queued to be freed
    :ivar makers: tasks by the map that their stacks point to
    :ivar wanted: maps that were looked for on stacks
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: Any = list
        self.makers: dict[int, tuple[StackRef, ...]] = {}
        self.wanted: list[set[int]] = []
        self.image: Any = SimpleNamespace(is_moving=False)
        monkeypatch.setattr(module, "_being_freed", lambda _: self.queued())
        monkeypatch.setattr(module, "_transients", self._transients)
        monkeypatch.setattr(module, "stack_refs", self._stack_refs)

    def _transients(self, image: Any, bpf_map: Any) -> Iterable[tuple[int, Transient]]:
        return [(OBJCG, lost_map(bpf_map.value_(), references=3)), (0xB0, lost_map(7))]

    def _stack_refs(self, image: Any, wanted: set[int], coverage: Coverage) -> Any:
        self.wanted.append(wanted)
        return self.makers

    def found(self, *some: Transient, rows: Iterable[Row] = ()) -> Any:
        before = snapshot(transients={OBJCG: list(some)})
        after = with_map_makers(self.image, before, rows or [row()])
        return None if after is before else after.transients


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def some_map(address: int) -> Any:
    return SimpleNamespace(value_=lambda: address)


@pytest.mark.parametrize(
    "rows",
    [[row(0)], [row(-1)], [row(1, "slab")], [row(1, status="exact")]],
)
def test_rows_that_maps_do_not_explain(machine: Machine, rows: list[Row]) -> None:
    """More references must be counted than were found."""
    assert machine.found(lost_map(ONE), rows=rows) is None
    assert machine.found(lost_map(ONE), rows=[*rows, row()]) is not None


def test_maps_that_are_queued(machine: Machine) -> None:
    """Those that are known are not added again."""
    machine.queued = lambda: [(some_map(m), f"why {m:#x}") for m in (ONE, TWO, TWO)]
    found = machine.found(lost_map(ONE, freed_by="known"), Transient("memcg", TWO))
    assert found == {
        OBJCG: [
            lost_map(ONE, freed_by="known"),
            Transient("memcg", TWO),
            lost_map(TWO, references=3, freed_by="why 0x2000"),
        ],
        0xB0: [lost_map(7, freed_by="why 0x2000")],
    }
    assert machine.wanted == []


def task(pid: int, *functions: str) -> StackRef:
    return StackRef(pid, "some", None, 1, functions)


def test_tasks_that_create_or_free_a_map(machine: Machine) -> None:
    """They are looked for if nothing else frees it."""
    machine.makers = {ONE: (task(5, "vfs_read"), task(7, "do_syscall_64", "map_create"))}
    found = machine.found(lost_map(ONE), lost_map(TWO, freed_by="why"), Transient("memcg", 9))
    assert machine.wanted == [{ONE}]
    assert found == {
        OBJCG: [
            lost_map(ONE, freed_by="some (7) is in map_create"),
            lost_map(TWO, freed_by="why"),
            Transient("memcg", 9),
        ]
    }


@pytest.mark.parametrize(
    ("tasks", "was_unsure", "unsure"),
    [
        ((), False, False),
        ((), True, True),
        ((task(5, "vfs_read"),), False, False),
        ((task(5, "vfs_read"), task(6)), False, True),
        ((task(5, "vfs_read"), task(6)), True, True),
    ],
)
def test_registers_that_are_not_known(
    machine: Machine, tasks: tuple[StackRef, ...], was_unsure: bool, unsure: bool
) -> None:
    """They may point to a map."""
    machine.makers = {ONE: tasks}
    found = machine.found(lost_map(ONE, unsure=was_unsure))
    assert found == {OBJCG: [lost_map(ONE, unsure=unsure)]}


@pytest.mark.parametrize("function", sorted(module._USES))
def test_functions_that_use_maps(machine: Machine, function: str) -> None:
    machine.makers = {ONE: (task(7, function),)}
    ((found,),) = machine.found(lost_map(ONE)).values()
    assert found.freed_by == f"some (7) is in {function}"


def test_what_could_not_be_read_explains_nothing(machine: Machine) -> None:
    def lost() -> Any:
        raise FaultError("not in the image", 0x10)

    machine.queued = lost
    assert machine.found(lost_map(ONE)) is None


def test_memory_that_changes_can_lead_to_any_error(machine: Machine) -> None:
    def lost() -> Any:
        raise ValueError("odd")

    machine.queued = lost
    with pytest.raises(ValueError, match="odd"):
        machine.found(lost_map(ONE))
    machine.image.is_moving = True
    assert machine.found(lost_map(ONE)) is None


def reader(**more: Any) -> UnlistedMaps:
    """Return a reader that knows the operations of one type of maps."""
    found = UnlistedMaps.__new__(UnlistedMaps)
    found.coverage = Coverage()
    given = {"_operations": frozenset({0x50}), "_size": 200, "_ops": 0, "_type": 24} | more
    for name, value in given.items():
        setattr(found, name, value)
    return found


CACHE = SlabCache(0x900, "kmalloc-cg-256", 256, 256, 0, False, 264, True)


def test_caches_that_may_have_maps() -> None:
    """All maps are charged to somebody."""
    found = reader()
    assert found.may_read(CACHE) is True
    assert found.may_read(CACHE._replace(object_size=199)) is False
    assert found.may_read(CACHE._replace(object_size=200)) is True
    assert found.may_read(CACHE._replace(name="kmalloc-256")) is False
    assert reader(_operations=frozenset()).may_read(CACHE) is False


def of_slab(objects: Any, is_moving: bool = False, charged: Any = (1,)) -> tuple[Any, Any]:
    """Return what is found in a slab, and what was missed."""

    def of_object(address: int) -> Any:
        if address == 0x20:
            raise FaultError("not there", 0x28)
        return [(OBJCG, lost_map(address))]

    slabs = SimpleNamespace(charged_objects=objects)
    found: Any = reader(_slabs=slabs, _image=SimpleNamespace(is_moving=is_moving))
    found._of_object = of_object
    slab: Any = SimpleNamespace(charged=charged, cache=CACHE)
    some = list(found.read(slab))
    return [t.address for _, t in some], [
        (m.what, m.address, m.reason.partition(":")[0]) for m in found.coverage.examples
    ]


def test_objects_that_are_missing() -> None:
    """On a running kernel they were freed."""
    objects = [SimpleNamespace(address=address) for address in (0x10, 0x20, 0x30)]
    missed = ("possible BPF map", 0x20, "not there")
    assert of_slab(lambda _: objects) == ([0x10, 0x30], [missed])
    assert of_slab(lambda _: objects, True) == ([0x10, 0x30], [])
    assert of_slab(lambda _: objects, charged={}) == ([], [])

    def lost(_: object) -> Any:
        yield objects[0]
        raise FaultError("not there", 0x40)

    assert of_slab(lost) == ([0x10], [])


def test_what_may_be_a_map() -> None:
    """map_create() sets the type before it sets the operations."""
    read = [(24, 4)]

    def memory(address: int, size: int) -> bytes:
        read.append((address, size))
        return (7).to_bytes(4, "little")

    found: Any = reader(_types={7}, _memory=SimpleNamespace(read=memory, order="little"))
    assert found._may_be_map(0x100, 0x50) is True
    assert found._may_be_map(0x100, 0x51) is False
    assert found._may_be_map(0x100, 0) is True
    assert read[1:] == [(0x118, 4)]
    found._types = {8}
    assert found._may_be_map(0x100, 0) is False


@pytest.mark.parametrize(
    ("refs", "number", "has_id"), [(1, 1, True), (2, 5, True), (0, 5, False), (1, 0, False)]
)
def test_maps_with_an_id(refs: int, number: int, has_id: bool) -> None:
    bpf_map: Any = SimpleNamespace(refcnt=SimpleNamespace(counter=refs), id=number)
    assert module._has_id(bpf_map) is has_id


def test_a_kernel_without_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> Any:
        raise UnknownKernelError(name)

    image: Any = SimpleNamespace(object=unknown)
    monkeypatch.setattr(module, "has_type", lambda *_: True)
    assert module._operations(image) == frozenset()
    operations = [SimpleNamespace(value_=lambda: 0x50), 0]
    image.object = lambda name: {"bpf_map_types": operations}[name]
    assert module._operations(image) == frozenset({0x50})
    monkeypatch.setattr(module, "has_type", lambda *_: False)
    assert module._operations(image) == frozenset()


def test_operations_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no object can be told to be a map."""
    fault = FaultError("not in the image", 0x1230)

    def lost(_: object) -> Any:
        raise fault

    monkeypatch.setattr(module, "_operations", lost)
    image: Any = SimpleNamespace(memory=None)
    found = UnlistedMaps(image, None)  # type: ignore[arg-type]
    assert found.fault is fault
    assert found.may_read(CACHE) is False


def test_lists_that_a_kernel_does_not_have() -> None:
    def unknown(name: str) -> Any:
        raise UnknownKernelError(name)

    image: Any = SimpleNamespace(symbol=unknown)
    assert list(module._being_freed(image)) == []


class Image:
    """An image with one object, which may be a map."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ops: int) -> None:
        self.ops, self.listed, self.has_id = ops, set[int](), False
        self.objcgs: Any = lambda: [OBJCG, 0xB0, OBJCG]
        monkeypatch.setattr(module, "_has_id", lambda bpf_map: self.has_id)
        monkeypatch.setattr(module, "map_objcgs", lambda image, bpf_map: self.objcgs())

    def pointer(self, name: str, address: int) -> Any:
        assert name == "struct bpf_map *"
        return some_map(address)

    def found(self) -> Any:
        memory = SimpleNamespace(
            word={0x108: self.ops}.__getitem__, read=lambda *_: bytes([7, 0, 0, 0]), order="little"
        )
        of = reader(_image=self, _memory=memory, _listed=self.listed, _types={7}, _ops=8)
        return of._of_object(0x100)


@pytest.mark.parametrize("ops", [0x50, 0])
def test_a_map_without_an_id(monkeypatch: pytest.MonkeyPatch, ops: int) -> None:
    """Its operations may not be set yet."""
    image = Image(monkeypatch, ops)
    wanted = [(OBJCG, lost_map(0x100, references=2)), (0xB0, lost_map(0x100))]
    assert image.found() == wanted
    image.has_id = True
    assert image.found() == []
    image.has_id, image.listed = False, {0x100}
    assert image.found() == []


def test_an_object_that_is_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image(monkeypatch, 0x51)
    assert image.found() == []


def test_a_map_whose_obj_cgroups_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything can look like a map without operations, and is none then."""

    def lost() -> Any:
        raise FaultError("not there", 0x1230)

    image = Image(monkeypatch, 0)
    image.objcgs = lost
    assert image.found() == []
    image.ops = 0x50
    with pytest.raises(FaultError):
        image.found()
