# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults of the same kind in several memcgs, one of which can look like a part of the other."""

from __future__ import annotations

import pytest
from support.made_kernel import BATCH, MAIL, ROOT, SHOP, WEB, Kernel, busy

from memcg_inspect.checks.diagnosis import diagnose
from memcg_inspect.checks.judge import judge
from memcg_inspect.report import Diagnosis

SLAB = "NR_SLAB_RECLAIMABLE_B"


def diagnoses(kernel: Kernel) -> tuple[Diagnosis, ...]:
    made = kernel.snapshot()
    judged = judge(made)
    return diagnose(made, judged.rows, [pending.finding for pending in judged.findings])


def counters(found: tuple[Diagnosis, ...]) -> set[tuple[str, tuple[int, ...], int | None, int]]:
    return {(d.cause, d.memcgs, d.nid, d.amount or 0) for d in found}


@pytest.mark.parametrize("item", ["NR_INACTIVE_FILE", "NR_ANON_MAPPED"])
@pytest.mark.parametrize(("one", "other"), [(WEB, BATCH), (WEB, MAIL), (SHOP, WEB), (SHOP, BATCH)])
def test_counters_of_one_node_in_two_memcgs(item: str, one: int, other: int) -> None:
    """The sum of all memcgs is off by both, so each alone looks like the counter of the memcg."""
    kernel = busy(2)
    kernel.cpu[one, item, 1] += 30_000
    kernel.cpu[other, item, 1] += 1
    found = diagnoses(kernel)
    assert counters(found) == {("counter", (one,), 1, 30_000), ("counter", (other,), 1, 1)}
    assert {d.confidence for d in found} == {"likely"}


@pytest.mark.parametrize("seed", range(4))
def test_of_a_child_and_its_parent_the_smaller_amounts_are_likelier(seed: int) -> None:
    kernel = busy(seed)
    kernel.cpu[SHOP, SLAB, 1] -= 64
    kernel.cpu[WEB, SLAB, 1] += 1_000_003
    found = diagnoses(kernel)
    assert counters(found) == {
        ("counter", (SHOP,), 1, -64),
        ("counter", (WEB,), 1, 1_000_003),
    }
    assert {d.confidence for d in found} == {"likely"}


def test_a_counter_and_that_of_its_parent_are_not_sure() -> None:
    """What the parent lacks may be what the child was given without it."""
    for seed in range(4):
        kernel = busy(seed)
        kernel.state[SHOP, SLAB, None] -= 64
        kernel.state[ROOT, SLAB, None] += 72
        found = diagnoses(kernel)
        assert {d.memcgs for d in found} == {(SHOP,), (ROOT,)}
        assert {d.confidence for d in found} == {"likely"}


def test_two_entries_of_one_memcg_that_went_to_two_others() -> None:
    for seed in range(4):
        kernel = busy(seed)
        for size, owner in ((1634, MAIL), (2418, WEB)):
            kernel.zswap(kernel.objcg(BATCH, 1), size)
            kernel.things[-1].payer = kernel.objcg(owner, 0)
        found = diagnoses(kernel)
        assert counters(found) == {
            ("object-owner", (BATCH, MAIL), None, 1634),
            ("object-owner", (BATCH, WEB), None, 2418),
        }


@pytest.mark.parametrize(
    ("item", "amount"), [("MEMCG_KMEM", 30_000), ("MEMCG_PERCPU_B", -1), (SLAB, 1_000_002)]
)
def test_no_charge_is_of_a_size_that_the_kernel_does_not_charge(item: str, amount: int) -> None:
    """Nothing but the counter itself shows that nothing was charged to the root memcg."""
    kernel = busy(1)
    kernel.cpu[ROOT, item, None] += amount
    if item == SLAB:
        kernel.cpu[ROOT, item, 1] += amount
    [found] = diagnoses(kernel)
    cause = "counted-wrong" if item == SLAB else "counter"
    assert (found.cause, found.memcgs, found.amount) == (cause, (ROOT,), amount)


def test_two_objects_of_one_size_with_other_owners() -> None:
    """No row tells which of two owners has which of two objects."""
    for seed in range(4):
        kernel = busy(seed)
        for was, now in ((WEB, MAIL), (BATCH, SHOP)):
            kernel.slab(kernel.objcg(was, 0), 0, 1112, "unreclaimable")
            kernel.things[-1].payer = kernel.objcg(now, 0)
        found = diagnoses(kernel)
        assert {(d.cause, d.confidence) for d in found} == {("object-owner", "likely")}
        said = " ".join([*(d.what for d in found), *(o for d in found for o in d.others)])
        for was in (WEB, BATCH):
            for now in (MAIL, SHOP):
                assert f"of memcg {was:#x}, and now refers to obj_cgroup {now + 0x100:#x}" in said
