# SPDX-License-Identifier: LGPL-2.1-or-later
"""The identity ``node_slab`` on snapshots made by hand."""

from __future__ import annotations

from typing import Any

from support.made import RECLAIMABLE, UNRECLAIMABLE, features, snapshot

from memcg_inspect.checks.identities.node_slab import node_slab_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Coverage, NodeStat, SlabUsage


def slabs(nid: int, cache: str, pages: int, reclaimable: bool, kfence: bool = False) -> SlabUsage:
    return SlabUsage(nid, cache, 0x700, reclaimable, kfence, 64, 72, pages, pages, 8, 5, 3)


USAGE = (
    slabs(0, "dentry", 10, True),
    slabs(0, "inode_cache", 4, True),
    slabs(0, "task_struct", 3, False),
    slabs(1, "task_struct", 6, False),
    slabs(1, "task_struct", 1, False, kfence=True),
)
STATS = {
    (0, RECLAIMABLE): NodeStat(15, -1),
    (0, UNRECLAIMABLE): NodeStat(7, 0),
    (1, RECLAIMABLE): NodeStat(0, 0),
    (1, UNRECLAIMABLE): NodeStat(4, 2),
}


def image(**more: Any) -> Snapshot:
    what = {"slab_usage": USAGE, "node_stats": STATS, "large_kmalloc": {0: 4}, **more}
    return snapshot(**what)


def test_slabs_and_large_kmallocs_are_what_the_node_counts() -> None:
    rows = {(row.nid, row.item): row for row in node_slab_rows(image())}
    assert rows.keys() == STATS.keys()
    assert {row.status for row in rows.values()} == {"exact"}
    assert {(row.memcg, row.unit) for row in rows.values()} == {(None, "pages")}
    assert rows[0, RECLAIMABLE].found == {"slab": 14}
    assert rows[0, RECLAIMABLE].claimed == {"vm_stat": 15, "cpu": -1}
    assert rows[0, UNRECLAIMABLE].found == {"slab": 3, "large_kmalloc": 4}
    assert rows[1, UNRECLAIMABLE].found == {"slab": 6, "large_kmalloc": 0}


def test_without_a_mark_large_kmallocs_are_not_compared() -> None:
    rows = node_slab_rows(image(features=features(large_kmalloc_type=False)))
    assert [(row.nid, row.item, row.status) for row in rows] == [
        (0, RECLAIMABLE, "exact"),
        (1, RECLAIMABLE, "exact"),
    ]


def test_a_counter_that_is_off_is_a_finding_of_the_node() -> None:
    wrong = image(node_stats={**STATS, (1, UNRECLAIMABLE): NodeStat(9, 2)})
    findings = [
        pending.finding
        for pending in judge(wrong).findings
        if pending.finding.identity == "node_slab"
    ]
    assert [(f.memcg, f.nid, f.item, f.difference) for f in findings] == [
        (None, 1, UNRECLAIMABLE, 5)
    ]


def test_what_could_not_be_read() -> None:
    coverage = Coverage()
    coverage.miss("slab", 0x10, "its cache is not known")
    stats = {key: stat for key, stat in STATS.items() if key != (0, RECLAIMABLE)}
    rows = node_slab_rows(image(coverage={"slab_pages": coverage}, node_stats=stats))
    assert {row.status for row in rows} == {"unverifiable"}
    assert rows[0].claimed is None
    reason = "struct pages, or caches of slabs, are not in the image"
    assert {row.reason for row in rows[1:]} == {reason}


def test_not_kept_where_no_node_was_read() -> None:
    (identity,) = (i for i in judge(snapshot()).identities if i.name == "node_slab")
    assert identity.status == "not-kept"
