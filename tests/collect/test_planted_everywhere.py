# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Faults for each identity, planted into an image of each kernel.

Each is named with its memcg, node, item and exact amount, and no finding is on a memcg that
was not touched; ancestors are touched by what happens below them. :mod:`support.planting` says how
an identity gets a planter. All kinds of images and all sizes are in ``test_reliability.py``.
"""

from __future__ import annotations

import pytest
from labkit.kernels import kernel_arch
from support.guests import KERNELS, PERNODE_KERNELS, Lab, Plant
from support.planters import planters_of
from support.planting import Fault, Subject
from support.reliability import Case, plant_one

from memcg_inspect.checks.registry import CHECKS

#: Identities of things that an image need not have: a CPU keeps a stack for a task to come, or not.
BY_CHANCE = {"cached_stacks"}


def test_planters_are_told_apart() -> None:
    for check in CHECKS:
        planters = planters_of(check.name)
        assert planters and all(planter.sizes for planter in planters)
        assert len({planter.what for planter in planters}) == len(planters)


def subject(lab: Lab, kernel: str, **more: str) -> Subject:
    nodes = "4" if kernel_arch(kernel).has_nodes else "1"
    return Subject(lab.image(kernel, nodes, "mixed", **more).program())


def check_all_are_found(subject: Subject, *only: str, most: int | None = None) -> None:
    """Plant the first size of each planter, or of the first few planters of each identity."""
    assert subject.report.findings == ()
    kept = [c.name for c in CHECKS if c.why_not_kept(subject.snapshot) is None]
    chosen = [
        Case(name, planter, planter.sizes[0], False)
        for name in only or kept
        for planter in planters_of(name)[:most]
    ]
    results = [plant_one(subject, case) for case in chosen]
    assert [r for r in results if r.outcome not in ("found", "none")] == []
    found = {r.identity for r in results if r.outcome == "found"}
    assert set(only or kept) - found <= BY_CHANCE
    # Nothing is left of what was planted.
    assert subject.audit(Fault((), (), set())).findings == ()


@pytest.mark.image
@pytest.mark.parametrize("kernel", ["7.3"])
def test_every_identity_names_a_fault(lab: Lab, kernel: str) -> None:
    check_all_are_found(subject(lab, kernel), most=1)


@pytest.mark.image
@pytest.mark.long
@pytest.mark.parametrize("kernel", [*KERNELS, *PERNODE_KERNELS])
def test_every_fault_is_named(lab: Lab, kernel: str) -> None:
    check_all_are_found(subject(lab, kernel))


@pytest.mark.image
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k == "7.3-lab"])
def test_call_sites(lab: Lab, kernel: str) -> None:
    profiled = subject(lab, kernel, append="sysctl.vm.mem_profiling=1")
    check_all_are_found(profiled, "alloc_tags")


@pytest.mark.image
@pytest.mark.long
@pytest.mark.parametrize("kernel", ["7.3"])
def test_an_overlay_reads_as_a_copy_that_was_written(lab: Lab, plant: Plant, kernel: str) -> None:
    """The same fault in a copy of the file gives the same findings."""
    image = lab.image(kernel, "4", "mixed")
    planted = Subject(image.program())
    for name in ("slab", "placement", "usage"):
        planter = planters_of(name)[-1]
        fault = planter.plant(planted, planter.sizes[0])
        copied = plant(image, *fault.writes)
        assert planted.audit(fault).findings == copied.findings != ()
        plant.remove()
