# SPDX-License-Identifier: LGPL-2.1-or-later
"""Holders of references to memcgs are those of a plain walk, and what is planted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from drgn import FaultError, Object, Program
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mm import page_to_virt
from support.free_pages import free_page
from support.guests import DEBIAN_KERNELS, Lab
from support.planting import Overlay, Write, change

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel import cgroup
from memcg_inspect.linux.kernel.cgroup import read_css_refs
from memcg_inspect.linux.lib.list import OnFault
from memcg_inspect.linux.mm.memcontrol import read_memcgs
from memcg_inspect.model import Coverage, CssRefs

pytestmark = [
    pytest.mark.image,
    pytest.mark.each_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]

#: ``LIST_POISON1`` of include/linux/poison.h: no address.
POISON = 0xDEAD000000000100
#: Of include/linux/cgroup-defs.h and include/linux/workqueue.h.
CSS_ONLINE, CSS_DYING, PENDING = 2, 16, 1


@pytest.fixture
def prog(lab: Lab, kernel: str) -> Program:
    """An image with memcgs that were removed."""
    return lab.image(kernel, "4", "dying").program()


@pytest.fixture
def overlay(prog: Program) -> Iterator[Overlay]:
    overlay = Overlay(prog)
    yield overlay
    overlay.clear()


def read(prog: Program) -> tuple[dict[int, CssRefs], Coverage]:
    """Read the references to the memcgs of an image with what is planted."""
    image, coverage = Image(prog), Coverage()
    memcgs = read_memcgs(image, Coverage())
    return read_css_refs(image, memcgs, coverage), coverage


def memcg_of(prog: Program, address: int) -> Object:
    return Object(prog, "struct mem_cgroup *", address)


def css_sets(memcg: Object) -> list[Object]:
    subsys = int(memcg.prog_["memory_cgrp_id"])
    head = memcg.css.cgroup.e_csets[subsys].address_of_()
    return list(list_for_each_entry("struct css_set", head, f"e_cset_node[{subsys}]"))


def with_tasks(prog: Program, found: dict[int, CssRefs]) -> Object:
    """Return a memcg that a css_set refers to."""
    return next(memcg_of(prog, address) for address, refs in found.items() if refs.css_sets)


def test_holders_are_those_of_a_plain_walk(prog: Program) -> None:
    found, coverage = read(prog)
    assert (coverage.read, coverage.unreadable) == (len(found), 0)
    assert prog["root_mem_cgroup"].value_() not in found
    subsys, states = prog["memory_cgrp_id"], set()
    for address, refs in found.items():
        memcg = memcg_of(prog, address)
        own = [s.value_() for s in css_sets(memcg) if s.subsys[subsys] == memcg.css.address_of_()]
        assert list(refs.css_sets) == own
        if memcg.type_.type.has_member("mm_list"):
            head = memcg.mm_list.fifo.address_of_()
            mms = list_for_each_entry("struct mm_struct", head, "lru_gen.list")
            assert list(refs.mms) == [mm.value_() for mm in mms]
        else:
            assert refs.mms == ()
        assert (refs.id, refs.id_refs) == (memcg.id.id, memcg.id.ref.refs.counter)
        is_online = bool(memcg.css.flags & CSS_ONLINE)
        assert (refs.is_online, refs.base, refs.whole) == (is_online, int(is_online), True)
        states.add(is_online)
    assert states == {True, False}
    assert any(refs.css_sets for refs in found.values())


@pytest.mark.parametrize(
    ("flags", "is_online", "base"),
    [
        (CSS_ONLINE, True, 1),
        (CSS_ONLINE | CSS_DYING, True, 1),  # kill_css() has taken one, and dropped the first
        (CSS_DYING, False, 0),
        (0, False, 1),  # css_create() has not called online_css() yet
    ],
)
def test_references_of_a_memcg_to_itself(
    prog: Program, overlay: Overlay, flags: int, is_online: bool, base: int
) -> None:
    address = with_tasks(prog, read(prog)[0]).value_()
    image = Image(prog)
    memcgs = read_memcgs(image, Coverage())
    overlay.write((change(memcg_of(prog, address).css.flags, flags),))
    refs = read_css_refs(image, memcgs, Coverage())[address]
    assert (refs.is_online, refs.base) == (is_online, base)


def test_the_work_item_that_kills_a_memcg(prog: Program, overlay: Overlay) -> None:
    """It holds a reference while it is pending (7.2)."""
    memcg = with_tasks(prog, read(prog)[0])
    if not memcg.css.type_.has_member("kill_finish_work"):
        return
    data = memcg.css.kill_finish_work.data.counter
    for value, base in ((int(data) & ~PENDING, 1), (int(data) | PENDING, 2)):
        overlay.write((change(data, value % (1 << 64)),))
        assert read(prog)[0][memcg.value_()].base == base


@pytest.mark.parametrize(
    ("state", "offline", "reads"),
    [("online", False, False), ("dying", False, True), ("dying", True, False)],
)
def test_work_items_are_read_while_a_memcg_is_being_removed(
    prog: Program, monkeypatch: pytest.MonkeyPatch, state: str, offline: bool, reads: bool
) -> None:
    """A worker that runs its work item holds a reference (7.2)."""
    image, coverage = Image(prog), Coverage()
    memcgs = read_memcgs(image, Coverage())
    memcg = with_tasks(prog, read_css_refs(image, memcgs, Coverage()))
    before = read_css_refs(image, memcgs, Coverage())[memcg.value_()].base

    def running(_: Image, on_fault: OnFault) -> frozenset[int]:
        on_fault(FaultError("left out", POISON))
        return frozenset({memcg.css.address_of_().value_()})

    monkeypatch.setattr(cgroup, "running_kills", running)
    memcgs = {a: replace(m, state=state, offline=offline) for a, m in memcgs.items()}
    found = read_css_refs(image, memcgs, coverage)
    missed = [(one.what, one.address) for one in coverage.examples]
    assert missed == ([("work items", POISON)] if reads else [])
    more = int(reads and memcg.css.type_.has_member("kill_finish_work"))
    assert found[memcg.value_()].base == before + more


def test_css_sets_of_another_memcg(prog: Program, overlay: Overlay) -> None:
    """Those of zombies stay on the list, after the controller was enabled again."""
    memcg, subsys = with_tasks(prog, read(prog)[0]), int(prog["memory_cgrp_id"])
    first, *others = css_sets(memcg)
    overlay.write((change(first.subsys[subsys], prog["root_mem_cgroup"].value_()),))
    refs = read(prog)[0][memcg.value_()]
    assert refs.css_sets == tuple(one.value_() for one in others)
    assert refs.whole


def test_events_of_the_first_version(prog: Program, overlay: Overlay) -> None:
    """memcg_write_event_control() takes a reference, in kernels that have the first version."""
    memcg = with_tasks(prog, read(prog)[0])
    if not memcg.type_.type.has_member("event_list"):
        assert {refs.events for refs in read(prog)[0].values()} == {0}
        return
    page = Object(prog, "struct page *", free_page(prog, other_than=-1))
    head = memcg.event_list
    places = [head.address_ or 0, page_to_virt(page).value_(), page_to_virt(page).value_() + 1024]
    for n, place in enumerate(places):
        links = places[(n + 1) % 3].to_bytes(8, "little") + places[n - 1].to_bytes(8, "little")
        overlay.write((Write(place, links),))
    found, coverage = read(prog)
    assert found[memcg.value_()].events == 2
    assert {refs.events for a, refs in found.items() if a != memcg.value_()} == {0}
    assert coverage.unreadable == 0


def test_a_list_of_holders_that_is_damaged(prog: Program, overlay: Overlay) -> None:
    """It does not lead back to its head: the memcg may have more holders."""
    whole = read(prog)[0]
    memcg, subsys = with_tasks(prog, whole), int(prog["memory_cgrp_id"])
    node = css_sets(memcg)[-1].e_cset_node[subsys]
    overlay.write((change(node.next, node.address_ or 0),))
    found, coverage = read(prog)
    address = memcg.value_()
    assert found == {**whole, address: whole[address]._replace(whole=False)}
    assert (coverage.read, coverage.unreadable) == (len(found), 1)
    assert coverage.examples[0].what == "holders of references to a memcg"


def test_writebacks_that_are_offline(prog: Program, overlay: Overlay) -> None:
    """They are on one list. If it is damaged, any memcg may have more of them."""
    overlay.write((change(prog["offline_cgwbs"].next, POISON),))
    found, coverage = read(prog)
    assert found
    assert not any(refs.whole for refs in found.values())
    assert "list of writebacks" in {example.what for example in coverage.examples}


def test_a_count_that_is_missing(prog: Program, overlay: Overlay) -> None:
    """The memcg is left out, and counted."""
    whole = read(prog)[0]
    memcg = with_tasks(prog, whole)
    overlay.write((change(memcg.css.refcnt.percpu_count_ptr, POISON),))
    found, coverage = read(prog)
    assert found == {a: refs for a, refs in whole.items() if a != memcg.value_()}
    assert (coverage.read, coverage.unreadable) == (len(found), 1)
    assert coverage.examples[0].what == "references to a memcg"


def test_flags_as_the_kernel_declares_them(
    prog: Program, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types of an image may lack the anonymous enumeration. Then the flags are known."""
    address, constant = with_tasks(prog, read(prog)[0]).value_(), cgroup.constant
    image = Image(prog)
    memcgs = read_memcgs(image, Coverage())
    other = {"CSS_ONLINE": 1 << 5, "CSS_DYING": 1 << 6}
    for flags, declared, is_online, base in (
        (1 << 5, other, True, 1),
        (1 << 6 | CSS_ONLINE, other, False, 0),
        (CSS_DYING, other, False, 1),
        (CSS_ONLINE, dict.fromkeys(other), True, 1),
        (CSS_DYING, dict.fromkeys(other), False, 0),
    ):
        overlay.write((change(memcg_of(prog, address).css.flags, flags),))
        monkeypatch.setattr(
            cgroup,
            "constant",
            lambda image, name, to=declared: to[name] if name in to else constant(image, name),
        )
        refs = read_css_refs(image, memcgs, Coverage())[address]
        assert (refs.is_online, refs.base) == (is_online, base)
