# SPDX-License-Identifier: LGPL-2.1-or-later
"""A counter that is 0 in all memcgs is one fault of the kernel, if all memcgs were read."""

from __future__ import annotations

import pytest
from drgn.helpers.linux.mm import follow_phys, phys_to_virt
from support.cause_planters import CAUSES
from support.guests import Lab
from support.missing_pages import excluded
from support.never_counted import arrays, never_counted
from support.planting import Fault, Subject

from memcg_inspect.report import Diagnosis, Report

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]


def hide(subject: Subject, memcg: int) -> None:
    """Leave the folded counters of a memcg's first node out of the image."""
    folded = next(f for number, (f, _) in enumerate(arrays(subject, memcg)) if number)
    prog, at, size = subject.prog, folded.value_(), folded.type_.type.size
    assert size is not None
    physical = int(follow_phys(prog["init_mm"].address_of_(), at))
    for virtual in {at, phys_to_virt(prog, physical).value_()}:
        prog.add_memory_segment(virtual, size, excluded, False)
    prog.add_memory_segment(physical, size, excluded, True)


def of_tables(report: Report) -> list[Diagnosis]:
    return [d for d in report.diagnoses if d.cause == "uncounted-item"]


@pytest.fixture
def subject(lab: Lab) -> Subject:
    return Subject(lab.image("7.3", "4", "mixed").own_program())


def test_it_is_sure_if_all_memcgs_were_read(subject: Subject) -> None:
    report = subject.audit(never_counted(subject, "NR_PAGETABLE"))
    [found] = report.diagnoses
    assert (found.cause, found.confidence) == ("uncounted-item", "only-explanation")
    assert report.unexplained == ()


def test_it_is_likely_if_a_counter_could_not_be_read(subject: Subject) -> None:
    """Nothing tells that the kernel did not count there."""
    fault = never_counted(subject, "NR_PAGETABLE")
    memcg = subject.paths[subject.victims()[0]]
    hide(subject, memcg)
    [found] = of_tables(subject.audit(fault))
    assert found.confidence == "likely"
    assert "in all memcgs that could be read" in found.what


def test_it_is_likely_if_more_than_one_counter_is_0(subject: Subject) -> None:
    """Memory of counters may read as 0 since it is not in the dump."""
    items = ("NR_PAGETABLE", "NR_KERNEL_STACK_KB")
    faults = [never_counted(subject, item) for item in items]
    writes = tuple(write for fault in faults for write in fault.writes)
    found = of_tables(subject.audit(Fault(writes, (), set())))
    assert [d.confidence for d in found] == ["likely"] * 2


def test_counters_are_not_charges(subject: Subject) -> None:
    """Sums of nodes are found in rows of two memcgs, and their totals are 0."""
    [planter] = CAUSES["overwritten"]
    faults = []
    for _ in range(2):
        faults.append(planter.plant(subject, planter.sizes[0]))
        subject.doubtful |= frozenset(faults[-1].paths)
    writes = tuple(write for fault in faults for write in fault.writes)
    report = subject.audit(Fault(writes, (), set()))
    assert [d.cause for d in report.diagnoses if d.cause == "overwritten"] == ["overwritten"] * 2
    assert of_tables(report) == []
