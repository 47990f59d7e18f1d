# SPDX-License-Identifier: LGPL-2.1-or-later
"""``node_stack``, ``node_pagetable`` and ``node_vmalloc``, by hand and on images of kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.charge_module import guest_image
from support.guests import KERNELS, PERNODE_KERNELS, Lab
from support.made import features, snapshot
from support.planters import planters_of
from support.planting import Subject, ended

from memcg_inspect.checks.identities import (
    kernel_stack,
    node_pagetable,
    node_stack,
    node_vmalloc,
)
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.vmalloc import vm_areas
from memcg_inspect.model import Coverage, Nodes, NodeStat

STACK, TABLE, VMALLOC = "NR_KERNEL_STACK_KB", "NR_PAGETABLE", "NR_VMALLOC"
PAGE = 4096
IDENTITIES = ("node_stack", "node_pagetable", "node_vmalloc")


def made(**more: Any) -> Snapshot:
    """Each node has 5 tables, 40 pages of vmalloc areas and 4 stacks of 16 KiB, and one unknown."""
    pages = {"table": 5, "vmalloc": 40, "stack": 16, "unknown stack": 4}
    counters = {TABLE: 5, VMALLOC: 40, STACK: 64}
    return snapshot(
        **{
            "features": replace(features(), node_items=(STACK, TABLE, VMALLOC)),
            "node_pages": {(use, nid): n for use, n in pages.items() for nid in (0, 1)},
            "node_stats": {
                (nid, item): NodeStat(n + 2, -2) for item, n in counters.items() for nid in (0, 1)
            },
            **more,
        }
    )


def off(item: str, amount: int) -> Snapshot:
    """The counter of node 1 is off."""
    taken = made()
    old = taken.node_stats[1, item]
    changed = {(1, item): old._replace(folded=old.folded + amount)}
    return replace(taken, node_stats={**taken.node_stats, **changed})


ROWS = (
    (STACK, "KiB", node_stack.node_stack_rows),
    (TABLE, "pages", node_pagetable.node_pagetable_rows),
    (VMALLOC, "pages", node_vmalloc.node_vmalloc_rows),
)


@pytest.mark.parametrize(("item", "unit", "rows"), ROWS)
def test_a_node_counts_all_its_pages(item: str, unit: str, rows: Any) -> None:
    assert [(r.nid, r.item, r.unit, r.status) for r in rows(made())] == [
        (nid, item, unit, "exact") for nid in (0, 1)
    ]
    for amount in (-4_000, -1, 4_000):
        found = rows(off(item, amount))
        assert [(r.status, r.difference) for r in found] == [("exact", 0), ("differs", amount)]


@pytest.mark.parametrize(("item", "unit", "rows"), ROWS)
def test_a_node_without_such_pages(item: str, unit: str, rows: Any) -> None:
    empty = {(nid, item): NodeStat(0, 0) for nid in (0, 1)}
    found = rows(made(node_pages={}, node_stats=empty))
    assert [(r.status, sum(r.found.values())) for r in found] == [("exact", 0)] * 2


@pytest.mark.parametrize(("item", "unit", "rows"), ROWS)
def test_pages_that_are_missing_may_be_counted(item: str, unit: str, rows: Any) -> None:
    missing = {"coverage": {"pages": Coverage(1, 1)}}
    assert {r.status for r in rows(made(**missing))} == {"unverifiable"}
    less = replace(off(item, -1), **missing)
    assert [r.status for r in rows(less)] == ["unverifiable", "differs"]


def test_a_stack_of_no_task_may_be_counted() -> None:
    """It is one of a task that exits, or one that RCU frees: nothing in memory tells."""
    statuses = [node_stack.node_stack_rows(off(STACK, amount))[1].status for amount in (-1, 16, 17)]
    assert statuses == ["differs", "unverifiable", "differs"]
    # Node 1 has one such stack, and node 0 none.
    pages = {**made().node_pages, ("unknown stack", 0): 0}
    taken = replace(off(STACK, 16), node_pages=pages)
    row = node_stack.node_stack_rows(taken)[1]
    assert (row.status, row.reason) == (
        "unverifiable",
        "16 KiB of stacks belong to no task that runs, and may be counted or not",
    )
    pages = {**made().node_pages, ("unknown stack", 1): 0}
    assert node_stack.node_stack_rows(replace(taken, node_pages=pages))[1].status == "differs"
    # Most nodes have none.
    known = {key: n for key, n in pages.items() if key[0] != "unknown stack"}
    for amount in (1, 4):
        rows = node_stack.node_stack_rows(replace(off(STACK, amount), node_pages=known))
        assert (rows[1].status, rows[1].difference) == ("differs", amount)
    assert node_stack.node_stack_rows(off(STACK, 1))[1].status == "unverifiable"


def test_one_counter_for_all_nodes() -> None:
    """Up to 7.0."""
    old = made(all_nodes=Nodes(vmalloc_pages=80), features=features())
    [row] = node_vmalloc.node_vmalloc_rows(old)
    assert (row.item, row.nid, row.status) == ("nr_vmalloc_pages", None, "exact")
    [row] = node_vmalloc.node_vmalloc_rows(replace(old, all_nodes=Nodes(vmalloc_pages=79)))
    assert (row.status, row.difference) == ("differs", -1)


def test_stacks_that_are_smaller_than_a_page() -> None:
    """The kernel then takes them from a slab cache. A size of 0 is one that is not known."""
    reason = "kernel stacks are slab objects, since they are smaller than a page"
    sizes = ((0, None), (1 << 11, reason), (PAGE - 1, reason), (PAGE, None), (4 * PAGE, None))
    for size, why in sizes:
        taken = made(features=features(STACK))
        taken = replace(taken, limits=taken.limits._replace(stack=size))
        for check in (node_stack.CHECK, kernel_stack.CHECK):
            assert check.why_not_kept(taken) == why, size


def test_areas_of_the_kernel_before() -> None:
    taken = replace(off(VMALLOC, -3), all_nodes=Nodes(vmalloc_restored=True))
    exact, doubtful = node_vmalloc.node_vmalloc_rows(taken)
    assert (exact.status, doubtful.status) == ("exact", "unverifiable")
    assert doubtful.reason == (
        "the kernel before this one handed over memory: pages of its vmalloc areas are not counted"
    )
    # They are found. That the counter has more may have the same cause.
    taken = replace(off(VMALLOC, 3), all_nodes=Nodes(vmalloc_restored=True))
    assert node_vmalloc.node_vmalloc_rows(taken)[1].status == "unverifiable"


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", [*KERNELS, *PERNODE_KERNELS])
def test_every_size_is_found(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    subject = Subject(image.program())
    rows = [row for row in subject.report.rows if row.identity in IDENTITIES]
    assert {row.identity for row in rows} == set(IDENTITIES)
    assert all(row.status == "exact" and sum(row.found.values()) for row in rows)
    for identity in IDENTITIES:
        for planter in planters_of(identity):
            for size in planter.sizes:
                fault = planter.plant(subject, size)
                end = ended(subject.report, identity, fault, subject.audit(fault))
                assert end.outcome == "found", (identity, size, end)


@pytest.mark.image
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k == "7.3-lab"])
def test_call_sites_of_modules_are_not_counted(lab: Lab, kernel: str, tmp_path: Path) -> None:
    """The kernel allocates the pages of that area itself (``vm_module_tags_populate()``)."""
    image = guest_image(lab, kernel, "sysctl.vm.mem_profiling=1", tmp_path)
    areas = list(vm_areas(image_of(image.program()), Coverage(), Coverage()))
    assert [area.is_counted for area in areas].count(False) == 1
    rows = [row for row in image.report().rows if row.identity == "node_vmalloc"]
    assert {row.status for row in rows} == {"exact"}
