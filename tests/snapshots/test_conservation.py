# SPDX-License-Identifier: LGPL-2.1-or-later
"""Whether counters of kernel memory grow as what is found does."""

from __future__ import annotations

import dataclasses

import pytest
from support.guests import DEBIAN_KERNELS, PERNODE_KERNELS, Lab
from support.made_snapshots import snapshot
from support.planting import Overlay, Subject

from memcg_inspect.collect.charge_snapshot import take_snapshot
from memcg_inspect.image.image import Image
from memcg_inspect.model_snapshot import ChargeSnapshot, SavedCounter, SavedMemcg
from memcg_inspect.snapshots.conservation import (
    conservation_notes,
    conservation_table,
)
from memcg_inspect.snapshots.diff import Named, compared

PAGE = 4096


def made(
    *counters: SavedCounter, accounting: str = "memcg", is_moving: bool = False
) -> ChargeSnapshot:
    one = snapshot({("/a", 0, "slab"): 64, ("/b", 0, "slab"): 64})
    image = dataclasses.replace(one.image, accounting=accounting)
    return dataclasses.replace(one, counters=counters, image=image, is_moving=is_moving)


def of(memcg: int, value: int, found: int | None, node: int | None = None) -> SavedCounter:
    return SavedCounter(memcg, node, "MEMCG_KMEM" if node is None else "NR_KMEM", value, found)


def differences(before: ChargeSnapshot, after: ChargeSnapshot) -> list[tuple[object, ...]]:
    rows = conservation_table(before, after).rows
    return [(row.memcg, row.node, row.counter, row.found, row.difference) for row in rows]


def test_what_grows_alike_is_left_out() -> None:
    table = conservation_table(made(of(1, 7, 7), of(2, 5, 4)), made(of(1, 9, 9), of(2, 8, 7)))
    assert table.rows == []
    assert "(2 counters)" in table.empty


def test_what_does_not() -> None:
    before, after = made(of(1, 7, 7), of(2, 5, 5)), made(of(1, 9, 8), of(2, 1, 4))
    assert differences(before, after) == [
        ("/b", None, -4 * PAGE, -PAGE, -3 * PAGE),
        ("/a", None, 2 * PAGE, PAGE, PAGE),
    ]


def test_what_is_charged_on_one_node_and_uncharged_on_another() -> None:
    before = made(of(1, 5, 5, 0), of(1, 0, 0, 1), accounting="kmem-per-node")
    after = made(of(1, 5, 3, 0), of(1, -2, 0, 1), accounting="kmem-per-node")
    assert differences(before, after) == [
        ("/a", 0, 0, -2 * PAGE, 2 * PAGE),
        ("/a", 1, -2 * PAGE, 0, -2 * PAGE),
    ]


def without(some: ChargeSnapshot, path: str) -> ChargeSnapshot:
    """Return a snapshot in which a memcg, which has no charges, is not there."""
    memcgs = tuple(m._replace(path="/other") if m.path == path else m for m in some.memcgs)
    return dataclasses.replace(some, memcgs=memcgs)


def test_memcgs_that_are_new_or_gone_are_compared() -> None:
    gone = without(made(), "/a")
    assert differences(gone, made(of(1, 3, 2))) == [("/a", None, 3 * PAGE, 2 * PAGE, PAGE)]
    assert differences(made(of(1, 3, 3)), gone) == []


def test_one_that_is_made_again_is_another_one() -> None:
    before, after = made(of(1, 9, 5)), made(of(1, 3, 2))
    memcgs = tuple(m._replace(cgroup_id=77) if m.path == "/a" else m for m in after.memcgs)
    again = dataclasses.replace(after, memcgs=memcgs)
    assert differences(before, again) == [
        ("/a", None, -9 * PAGE, -5 * PAGE, -4 * PAGE),
        ("/a", None, 3 * PAGE, 2 * PAGE, PAGE),
    ]
    # On another boot, all have other IDs.
    other = dataclasses.replace(again, boot_id="other")
    one = dataclasses.replace(before, boot_id="one")
    assert differences(one, other) == [("/a", None, -6 * PAGE, -3 * PAGE, -3 * PAGE)]


def test_what_was_not_read_is_not_compared() -> None:
    assert differences(made(of(1, 3, None)), made(of(1, 5, 4))) == []
    assert differences(made(of(1, 3, 3)), made(of(1, 5, None))) == []
    # A counter of a memcg that is there is not 0 because it is not known.
    assert differences(made(), made(of(1, 5, 4))) == []
    assert differences(made(of(1, 5, 4)), made()) == []


def test_kernels_that_account_in_other_ways() -> None:
    other = made(of(1, 5, 4, 0), accounting="kmem-per-node")
    table = conservation_table(made(of(1, 3, 3)), other)
    assert (table.rows, table.empty) == ([], "nothing to compare")


def test_a_running_machine_is_not_read_at_once() -> None:
    assert not list(conservation_notes(made(), made()))
    assert "not read at once" in next(conservation_notes(made(), made(is_moving=True)))


def test_memcgs_of_one_path() -> None:
    """A removed memcg keeps its path. Its charges are its parent's."""
    one = made(of(1, 3, 3))
    memcgs = (*one.memcgs, SavedMemcg("/a", 9, "dying"))
    assert differences(one, dataclasses.replace(one, memcgs=memcgs)) == []


@pytest.mark.image
@pytest.mark.parametrize("kernel", [DEBIAN_KERNELS[-1], *PERNODE_KERNELS[:1]])
def test_a_counter_that_lost_pages(lab: Lab, kernel: str) -> None:
    """All that another workload charges is in counters. A planted fault is found, to the page."""
    before = take_snapshot(Image(lab.image(kernel, "4", "files").program()))
    subject = Subject(lab.image(kernel, "4", "mixed").own_program())
    after = take_snapshot(Image(subject.image.prog))
    honest = compared([Named("before", before), Named("after", after)])
    (table,) = [table for table in honest.tables if table.name == "conservation"]
    assert table.rows == []
    assert "counters)" in table.empty
    path, nid = subject.largest("kmem", None)
    item = subject.item("NR_KMEM", "MEMCG_KMEM")
    where = nid if item == "NR_KMEM" else None
    Overlay(subject.image.prog).write((subject.add(subject.percpu_counter(path, item, where), -3),))
    broken = take_snapshot(Image(subject.image.prog))
    assert differences(before, broken) == [
        (path, where, row.counter - 3 * PAGE, row.found, -3 * PAGE)
        for row in [_growth(before, after, path, where)]
    ]


@dataclasses.dataclass
class _Growth:
    counter: int
    found: int


def _growth(before: ChargeSnapshot, after: ChargeSnapshot, path: str, nid: int | None) -> _Growth:
    found = [0, 0]
    for number, some in enumerate((before, after)):
        for counter in some.counters:
            wanted = some.memcgs[counter.memcg].path == path and counter.node == nid
            if wanted and counter.item in ("NR_KMEM", "MEMCG_KMEM"):
                found[number] = counter.value * PAGE
    return _Growth(found[1] - found[0], found[1] - found[0])
