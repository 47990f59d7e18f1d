# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a fault of a released kernel explains on a guest of it, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from support.cause_planters import ITEMS, of_slab, on_another_node, slab_object
from support.guests import Lab
from support.kernel_faults import charges_of, explained, of_one_object
from support.kernel_steps import Steps
from support.never_counted import never_counted
from support.planters import planters_of
from support.planting import Fault, Subject

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

PAGE = 4096


@pytest.fixture(scope="module")
def subject(lab: Lab) -> Subject:
    return Subject(lab.image("7.3", "4", "mixed").program())


def left(subject: Subject, kernel: str, fault: Fault) -> tuple[int, int]:
    """Return how many findings a fault makes, and how many that no fault of the kernel explains."""
    charges = charges_of(subject.image)
    report = subject.audit(fault)
    return len(report.findings), len(report.findings) - len(explained(kernel, report, charges))


def counted(subject: Subject, wrong: Callable[[int], int]) -> Fault:
    """
    Count a slab object wrong in its memcg and node.

    :param wrong: returns by how many bytes, of the bytes that it is charged with
    """
    thing, what, steps = slab_object(subject), of_slab(subject), Steps(subject)
    steps.count(what.path, ITEMS[thing.slab.cache.reclaimable], wrong(what.size), what.nid)
    return Fault(steps.writes(), (what.path,), set())


def test_an_object_that_the_stock_counts_wrong(subject: Subject) -> None:
    freed = counted(subject, lambda size: 2 * size)
    # What is left of the last page is counted, where the object is to be added. An object can be
    # larger than a page.
    allocated = counted(subject, lambda size: -size % PAGE - size)
    for fault in (freed, allocated):
        number, others = left(subject, "6.16", fault)
        assert (number, others) == (3, 0)
        assert left(subject, "7.3", fault) == (number, number)


def test_other_faults_of_slab_memory(subject: Subject) -> None:
    one_level = planters_of("slab")[0]

    def subtracted(size: int) -> int:
        # Twice one object can be what another one is counted wrong by: 2 * 72 is 2 * 2,120 - PAGE.
        made = {amount for sizes in charges.values() for amount in of_one_object(sizes, PAGE)}
        return next(-times * size for times in count(2) if -times * size not in made)

    charges = charges_of(subject.image)
    faults = [
        counted(subject, subtracted),
        counted(subject, lambda size: 2 * size + 100 * PAGE),
        one_level.plant(subject, one_level.sizes[0]),
        on_another_node(subject, 0),
    ]
    for fault in faults:
        _, others = left(subject, "6.16", fault)
        assert others > 0


def test_page_tables_that_no_memcg_counts(subject: Subject) -> None:
    fault = never_counted(subject, "NR_PAGETABLE")
    number, others = left(subject, "6.18", fault)
    assert (number > 2, others) == (True, 0)
    assert left(subject, "6.17", fault) == (number, number)


def test_page_tables_that_one_memcg_counts_wrong(subject: Subject) -> None:
    for planter in planters_of("pagetable"):
        number, others = left(subject, "6.18", planter.plant(subject, planter.sizes[0]))
        assert number == others > 0
