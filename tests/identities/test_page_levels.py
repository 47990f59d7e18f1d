# SPDX-License-Identifier: LGPL-2.1-or-later
"""The identity ``page_levels``, on snapshots made by hand and on images of real kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.findings import by_path, lost_updates, named, touched
from support.guests import KERNELS, Lab, Plant
from support.made import DEAD, ROOT, A, B, family, features, snapshot

from memcg_inspect.checks.counters import Counters
from memcg_inspect.checks.identities.page_levels import page_level_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.model import Nodes, Stat

STACK, TABLE = "NR_KERNEL_STACK_KB", "NR_PAGETABLE"


def made(off: int = 0, nodes: tuple[int, ...] = (0, 1)) -> Snapshot:
    """``/a/b`` has 16 KiB of stacks on node 0 and 32 on node 1; its own counter may be off."""
    stacks = {ROOT: 48, A: 48, B: 48, DEAD: 0}
    return snapshot(
        features=replace(features(STACK, TABLE), lruvec_items=(STACK, TABLE)),
        lruvec_stats={
            (memcg, nid): {
                STACK: Stat(total // 3 * (nid + 1), 0, 0),
                TABLE: Stat(7 if memcg == ROOT and not nid else 0, 0, 0),
            }
            for memcg, total in stacks.items()
            for nid in nodes
        },
        memcg_stats={
            memcg: {
                STACK: Stat(total, 0, off if memcg == B else 0),
                TABLE: Stat(0, 0, 7 if memcg == ROOT else 0),
            }
            for memcg, total in stacks.items()
        },
    )


def test_a_memcg_counts_what_its_nodes_count() -> None:
    rows = {(row.memcg, row.item): row for row in page_level_rows(made())}
    assert rows.keys() == {(B, STACK), (ROOT, TABLE)}  # the others are 0 on both sides
    assert {row.status for row in rows.values()} == {"exact"}
    row = rows[B, STACK]
    assert (row.found, row.claimed) == ({"nodes": 48}, {"folded": 48, "pending_cpu": 0})
    assert (row.unit, rows[ROOT, TABLE].unit, row.nid) == ("KiB", "pages", None)


@pytest.mark.parametrize("off", [-16, 4])
def test_a_level_that_is_off_is_a_finding(off: int) -> None:
    findings = [pending.finding for pending in judge(made(off)).findings]
    found = [(f.memcg, f.item, f.difference) for f in findings if f.identity == "page_levels"]
    assert found == [(B, STACK, off)]


def test_counters_of_a_node_that_were_not_read() -> None:
    taken = made(nodes=(0,))
    taken = replace(
        taken, counters=Counters(taken.memcgs, {}, {(ROOT, 0): {STACK: Stat(0, 0, 0)}}, (0, 1))
    )
    rows = {row.memcg: row for row in page_level_rows(taken) if row.item == STACK}
    assert {row.status for row in rows.values()} == {"unverifiable"}
    assert all(row.claimed is None for row in rows.values())


def test_a_counter_of_one_node_that_was_not_read() -> None:
    """It may have been any number, so there is a row of each memcg, also where the rest is 0."""
    taken = made()
    stats = {
        (memcg, nid): {STACK: Stat(0, 0, 0), **({} if nid else {TABLE: Stat(0, 0, 0)})}
        for memcg in (ROOT, A, B, DEAD)
        for nid in (0, 1)
    }
    none = {memcg: {STACK: Stat(0, 0, 0), TABLE: Stat(0, 0, 0)} for memcg in taken.memcgs}
    taken = replace(taken, counters=Counters(taken.memcgs, none, stats))
    rows = page_level_rows(taken)
    assert [(row.memcg, row.item, row.status) for row in rows] == [
        (memcg, TABLE, "unverifiable") for memcg in (ROOT, A, B)
    ]


@pytest.mark.parametrize("kept", [(), ("NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B")])
def test_a_kernel_that_keeps_none_of_the_counters(kept: tuple[str, ...]) -> None:
    """Those of slab memory are compared by another identity."""
    taken = snapshot(memcgs=family(), features=replace(features(), lruvec_items=kept))
    [outcome] = [i for i in judge(taken).identities if i.name == "page_levels"]
    assert outcome.status == "not-kept"
    assert outcome.reason == "this kernel keeps no other counter by memcg and node"


def test_a_node_without_memory() -> None:
    """What was not flushed on such a node is lost with a memcg that is freed."""
    taken = made(off=4)
    for nodes, status in ((frozenset({0, 1}), "differs"), (frozenset({0}), "unverifiable")):
        rows = page_level_rows(replace(taken, all_nodes=Nodes(with_memory=nodes)))
        assert [row.status for row in rows if row.memcg == B] == [status]
        exact = [row for row in rows if row.memcg == ROOT and row.item == TABLE]
        assert [row.status for row in exact] == ["exact"]


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_exact_on_images_and_not_for_want_of_pages(lab: Lab, kernel: str) -> None:
    for workload in ("mixed", "dying"):
        report = lab.image(kernel, "4", workload).report()
        rows = [row for row in report.rows if row.identity == "page_levels"]
        assert rows and {row.status for row in rows} == {"exact"}
    report = lab.image(kernel, "4", "mixed").report()
    root = report.memcgs[0].address
    rows = [row for row in report.rows if row.identity == "page_levels" and row.memcg != root]
    # A counter that is 0 has a row, too, while a CPU has a change that is not folded.
    counted = {row.item for row in rows if row.found["nodes"]}
    assert counted >= {STACK, TABLE, "NR_ANON_MAPPED", "NR_FILE_PAGES", "NR_SHMEM"}


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_planted_difference_is_named(lab: Lab, plant: Plant, kernel: str) -> None:
    image = lab.image(kernel, "4")
    slot = StatReader(image_of(image.program()), [STACK]).slots[STACK]
    mail = by_path(image.report())["/files/mail"]
    memcg = f"Object(prog, 'struct mem_cgroup *', {mail})"
    report = plant(image, (f"per_cpu_ptr({memcg}.vmstats_percpu, 1).state[{slot}]", "old + 16"))
    lost = lost_updates(image.report())
    identities = {finding.identity for finding in report.findings}
    assert identities - ({"updated"} if lost else set()) == {"page_levels"}
    assert named(report, "page_levels") == {("/files/mail", None, STACK, 16)}
    assert touched(report, "/files/mail", *lost)
