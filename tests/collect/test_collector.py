# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a session keeps of a collection, and what the steps of a collection count as unreadable."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError
from support.made_memory import MadeMemory

from memcg_inspect.checks.ledger import Amount, Entry
from memcg_inspect.collect import collector
from memcg_inspect.collect.collector import collect, kept_slabs, kept_zswap
from memcg_inspect.collect.partial import Partial
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mm_types import LruFlags
from memcg_inspect.linux.mm.vmalloc import VmArea
from memcg_inspect.model import Coverage, FreedPage
from memcg_inspect.model_tasks import TaskCharge

ONE, TWO = 0x1000, 0x2000


class Session:
    """
    Collections of an image, as the commands of a session make them.

    :ivar made: of each that was made: whether with call sites, and what else it was to read
    :ivar jobs: processes that read pages
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.image = MadeMemory().image
        self.image.keeps_walks = True
        self.made: list[tuple[bool, Any]] = []
        self.jobs = 1
        self.coverage = {"pages": Coverage(3)}
        self.freed: list[FreedPage] = []
        self.are_all_known = True
        monkeypatch.setattr(collector, "_collect", self._collect)
        monkeypatch.setattr(collector, "jobs_of", lambda _: self.jobs)
        monkeypatch.setattr(collector, "read_owners", lambda _: SimpleNamespace(payer=None))
        monkeypatch.setattr(
            collector,
            "SlabCells",
            lambda *_: SimpleNamespace(are_all_known=self.are_all_known),
        )

    def _collect(self, image: Image, clock: object, call_sites: bool, more: Any = None) -> Any:
        self.made.append((call_sites, more))
        return SimpleNamespace(coverage=self.coverage, freed=self.freed)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    return Session(monkeypatch)


def test_the_next_command_of_a_session_collects_nothing(session: Session) -> None:
    """Unless it wants references to call sites, and the first did not."""
    image = session.image
    assert (kept_slabs(image), kept_zswap(image)) == (None, None)
    first = collect(image, call_sites=False)
    assert collect(image, call_sites=False) is first
    second = collect(image)
    assert second is not first
    assert collect(image) is collect(image, call_sites=False) is second
    assert [call_sites for call_sites, _ in session.made] == [False, True]
    more = session.made[-1][1]
    assert kept_slabs(image) == (more.cells, session.coverage)
    assert kept_zswap(image) is more.zswap


@pytest.mark.parametrize("why", ["not a session", "several processes", "a pool", "moving"])
def test_nothing_is_kept(session: Session, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    image: Any = session.image
    if why == "not a session":
        image.keeps_walks = False
    elif why == "several processes":
        session.jobs = 2
    elif why == "a pool":
        image.pool = object()
    else:
        monkeypatch.setattr(Image, "is_moving", True)
    for _ in range(2):
        collect(image)
    assert session.made == [(True, None)] * 2
    assert kept_slabs(image) is None


def test_an_interrupted_collection_is_not_kept(session: Session) -> None:
    session.image.progress.stop = True
    first = collect(session.image)
    assert first.coverage is session.coverage
    session.image.progress.stop = False
    assert collect(session.image) is not first
    assert len(session.made) == 2


def test_slabs_that_a_command_asks_for_are_collected_for_it(session: Session) -> None:
    """It gets them in any case, and the next command reads its own."""
    cells: Any = object()
    collect(session.image, cells=cells)
    assert session.made[0][1].cells is cells
    assert kept_slabs(session.image) is None


@pytest.mark.parametrize("why", ["unreadable", "unknown payer", "freed"])
def test_slabs_that_are_not_all_known_are_read_again(session: Session, why: str) -> None:
    if why == "unreadable":
        session.coverage["pages"].miss("struct pages", 0x10, "not in the image")
    elif why == "freed":
        session.freed = [FreedPage(0x40, ONE, 0)]
    else:
        session.are_all_known = False
    collect(session.image)
    assert kept_slabs(session.image) is None
    assert kept_zswap(session.image) is not None


def tasks_of(image: Any, coverage: dict[str, Coverage]) -> list[TaskCharge]:
    return collector._tasks(image, {ONE}, coverage)


def test_a_task_keeps_its_memcg(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a memcg that was not found is missing, unless it may be a new one."""
    tasks = [
        TaskCharge(0x10 + n, n, "a", memcg, (), False, True) for n, memcg in enumerate((ONE, TWO))
    ]
    monkeypatch.setattr(collector, "read_tasks", lambda *_: iter(tasks))
    coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
    assert tasks_of(SimpleNamespace(is_moving=True), coverage) == tasks
    assert coverage["tasks"].unreadable == 0
    assert tasks_of(SimpleNamespace(is_moving=False), coverage) == tasks
    (missed,) = coverage["tasks"].examples
    assert (missed.what, missed.address) == ("memcg of a task", 0x11)
    assert f"{TWO:#x}" in missed.reason
    # Memcgs that could not be read count already.
    coverage = defaultdict(Coverage)
    coverage["memcgs"].miss("memcg", TWO, "not in the image")
    tasks_of(SimpleNamespace(is_moving=False), coverage)
    assert coverage["tasks"].unreadable == 0


def test_obj_cgroups_that_tasks_refer_to() -> None:
    """Up to 7.0 one, later one for each node; 0 is none."""
    tasks = [
        TaskCharge(0x10 + n, n, "a", ONE, objcgs, False, True)
        for n, objcgs in enumerate([(5,), (0,), (5, 6, 0), ()])
    ]
    assert collector._objcgs_of_tasks(tasks) == {5: 2, 6: 1}


def test_pages_that_a_running_kernel_charged_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners are read again. A page that nobody or somebody else pays for by now was freed."""
    total = Partial()
    entry = Entry(ONE, "kmem", "other", 1)
    total.unplaced = dict.fromkeys((64, 128, 192, 256), (entry, 4096))
    area = VmArea(*[0] * len(VmArea._fields))._replace(is_stack=True, pages=[0x40])
    monkeypatch.setattr(collector, "vm_areas", lambda *_: [area])
    asked: list[int] = []

    def payers(image: object, pages: list[int]) -> dict[int, tuple[int, int]]:
        asked.extend(pages)
        return {0x80: (ONE, 1), 0xC0: (TWO, 1)}

    monkeypatch.setattr(collector, "kernel_payers", payers)
    collector._add_unplaced_pages(None, total)  # type: ignore[arg-type]
    # A page that cannot be read again is not known to have changed.
    assert dict(total.ledger) == {
        entry._replace(detail="stack"): Amount(4096, 1),
        entry: Amount(2 * 4096, 2),
        entry._replace(detail="gone"): Amount(4096, 1),
    }
    assert asked == [0x80, 0xC0, 0x100]


def test_compound_pages_of_others_are_no_large_kmallocs(monkeypatch: pytest.MonkeyPatch) -> None:
    total, added, kept = Partial(), [], []
    entry = Entry(ONE, "kmem", "large_kmalloc", 1)
    total.compound = {0x40: (entry, 8192), 0x80: (entry, 16384)}

    def pages(files: object, coverage: Coverage) -> set[int]:
        coverage.miss("files", 0x600, "not in the image")
        return {0x40, 0x500}

    owners = SimpleNamespace(pages=pages)
    monkeypatch.setattr(collector, "CompoundOwners", lambda *_: owners)
    monkeypatch.setattr(collector, "SlabReader", lambda _: None)
    monkeypatch.setattr(collector, "mem_map", lambda _: SimpleNamespace(page_size=4096))
    monkeypatch.setattr(
        collector, "keep_pages_of_others", lambda image, pages, coverage: kept.append(pages)
    )
    cells = SimpleNamespace(add_larges=lambda *args: added.append(args))
    collector._add_compound_pages(None, total, cells)  # type: ignore[arg-type]
    assert dict(total.ledger) == {
        entry._replace(detail="other"): Amount(8192, 1),
        entry: Amount(16384, 1),
    }
    assert added == [(ONE, 1, 4, 1)]
    assert kept == [{0x40, 0x500}]
    assert {name: c.unreadable for name, c in total.coverage.items()} == {"compound": 1}


def test_references_to_memcgs_that_other_steps_find(monkeypatch: pytest.MonkeyPatch) -> None:
    total = Partial()
    total.groups[ONE], total.released[TWO] = 2, 1
    monkeypatch.setattr(collector, "zswap_cursors", lambda _: [ONE, ONE])
    found = collector._css_holders(None, total)  # type: ignore[arg-type]
    assert found == {"notify": {ONE: 2}, "released": {TWO: 1}, "zswap": {ONE: 2}}
    assert (total.coverage["zswap_cursor"].read, total.coverage["zswap_cursor"].unreadable) == (
        1,
        0,
    )

    def missing(image: object) -> list[int]:
        raise FaultError("not in the image", 0x1230)

    total = Partial()
    monkeypatch.setattr(collector, "zswap_cursors", missing)
    assert collector._css_holders(None, total)["zswap"] == {}  # type: ignore[arg-type]
    (missed,) = total.coverage["zswap_cursor"].examples
    assert (missed.what, missed.address) == ("cursor of zswap", 0x1230)
    assert total.coverage["zswap_cursor"].read == 0


def test_pages_of_several_flags_are_on_one_list() -> None:
    total = Partial()
    flags = [LruFlags(True, False, False, False, generation) for generation in (1, 2)]
    total.lru = Counter(
        {(ONE, 0, 2, flags[0]): 3, (ONE, 0, 2, flags[1]): 4, (TWO, 1, 2, flags[0]): 5}
    )
    lists: Any = SimpleNamespace(item=lambda zone, flags: f"list of zone {zone}")
    assert collector._pages_on_lists(total, lists) == {
        (ONE, 0, "list of zone 2"): 7,
        (TWO, 1, "list of zone 2"): 5,
    }


@pytest.mark.parametrize(
    ("are_blocks", "is_whole", "may_miss"),
    [(True, True, False), (True, False, True), (False, True, False), (False, False, False)],
)
def test_stacks_that_are_blocks_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, are_blocks: bool, is_whole: bool, may_miss: bool
) -> None:
    """Those in vmalloc areas are found page by page, whoever uses them."""
    uses, total = SimpleNamespace(stacks_are_blocks=are_blocks), Partial()
    if not is_whole:
        total.coverage["stacks"].miss("stack", 0x10, "not in the image")
    monkeypatch.setattr(collector, "page_uses", lambda *_: uses)
    assert collector._page_uses(None, total) is uses  # type: ignore[arg-type, comparison-overlap]
    assert total.ledger.may_miss("kmem", "stack") == may_miss
    assert not total.ledger.may_miss("kmem", "vmalloc")


@pytest.mark.parametrize("lost", ["", "memcgs", "objcgs"])
def test_obj_cgroups_are_looked_for_if_some_are_missing(
    monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """In whatever refers to any."""
    total, held = Partial(), list[set[int]]()
    if lost:
        total.coverage[lost].miss("something", 0x10, "not in the image")

    def recover(*args: Any) -> dict[int, str]:
        held.append(args[-1])
        return {ONE: "found"}

    monkeypatch.setattr(collector, "recover_for_charges", recover)
    stocks: Any = [SimpleNamespace(objcg=5)]
    references = {"task": {6: 1}, "bpf": {7: 1}}
    image: Any = None
    found = collector._recovered(image, total, {}, {}, stocks, references)
    assert found == ({ONE: "found"} if lost else {})
    assert held == ([{5, 6, 7}] if lost else [])
