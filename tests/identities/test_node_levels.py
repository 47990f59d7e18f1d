# SPDX-License-Identifier: LGPL-2.1-or-later
"""The identities ``node_levels`` and ``node_totals``, by hand and on images of real kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from drgn.helpers.linux.module import for_each_module
from support.guests import DEBIAN_KERNELS, KERNELS, Lab
from support.made import DEAD, ROOT, A, B, features, snapshot
from support.planting import Fault, Subject, Write

from memcg_inspect.checks.counters import Counters
from memcg_inspect.checks.identities.node_levels import EXACT, node_level_rows
from memcg_inspect.checks.identities.node_totals import node_total_rows
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Coverage, LruLists, Nodes, NodeStat, Stat
from memcg_inspect.report import Row

ANON, SHMEM, FILE, CACHE = "NR_INACTIVE_ANON", "NR_SHMEM", "NR_FILE_PAGES", "NR_SWAPCACHE"
MAPPED, WRITEBACK = "NR_FILE_MAPPED", "NR_WRITEBACK"
ITEMS = (ANON, SHMEM, FILE, CACHE, MAPPED)

Cells = dict[tuple[int, str], int]


def made(off: Cells | None = None, uncharged: int = 0, **more: Any) -> Snapshot:
    """
    Each memcg has 1 page of each item on node 0; /a/dead has 10 that are not flushed on node 1.

    The swap cache of the nodes is in their NR_FILE_PAGES, too, all of it on node 0, since a page of
    it migrated from node 1.
    """
    stats = {
        (memcg, nid): {
            item: Stat(
                {ROOT: 3, A: 2}.get(memcg, 1) if not nid else 0,
                0,
                10 if nid and memcg == DEAD else 0,
            )
            for item in ITEMS
        }
        for memcg in (ROOT, A, B, DEAD)
        for nid in (0, 1)
    }
    nodes: Cells = {(nid, item): 10 if nid else 3 for nid in (0, 1) for item in ITEMS}
    nodes[0, FILE] += 13
    nodes[0, MAPPED] += 2  # not charged
    for cell, amount in (off or {}).items():
        nodes[cell] += amount
    return snapshot(
        features=replace(features(*ITEMS), lruvec_items=ITEMS, node_items=ITEMS),
        lruvec_stats=stats,
        node_stats={cell: NodeStat(value - 1, 1) for cell, value in nodes.items()},
        lru=LruLists({(0, 0, "list"): uncharged}, {}, True),
        **more,
    )


def rows_of(taken: Snapshot) -> dict[tuple[str, int | None], Row]:
    return {(row.item, row.nid): row for row in node_level_rows(taken)}


def test_a_node_counts_what_all_memcgs_count() -> None:
    rows = rows_of(made())
    assert Counter(row.status for row in rows.values()) == {"exact": 9}
    assert {row.identity for row in rows.values()} == {"node_levels"}
    row = rows[SHMEM, 1]
    assert (row.found, row.claimed) == ({"memcgs": 10}, {"vm_stat": 9, "cpu": 1})
    assert rows[MAPPED, 0].found == {"memcgs": 3, "not_charged": 2}
    assert rows[FILE, None].found == {"memcgs": 13, "swapcache": 13}


@pytest.mark.parametrize("amount", [1, -4000])
@pytest.mark.parametrize("item", [ANON, SHMEM])
def test_a_node_that_is_off_differs(item: str, amount: int) -> None:
    rows = rows_of(made({(1, item): amount}))
    assert [key for key, row in rows.items() if row.status == "differs"] == [(item, 1)]
    assert rows[item, 1].difference == amount


def test_a_node_that_may_have_had_no_memory_for_a_time() -> None:
    """Its counters, and the sum over nodes, are doubtful where they differ; other nodes are not."""
    off = {(0, ANON): 1, (1, SHMEM): 1, (1, FILE): 1}
    rows = rows_of(made(off, all_nodes=Nodes(unsteady=frozenset({1}))))
    odd = {key: row.status for key, row in rows.items() if row.status != "exact"}
    assert odd == {
        (ANON, 0): "differs",
        (SHMEM, 1): "unverifiable",
        (FILE, None): "unverifiable",
    }


def test_page_cache_is_compared_over_all_nodes() -> None:
    # A page of the swap cache that migrates is counted where it was, too.
    moved = rows_of(made({(0, FILE): 1, (1, FILE): -1}))
    assert moved[FILE, None].status == "exact"
    assert rows_of(made({(0, FILE): 1}))[FILE, None].difference == 1


def test_counters_that_are_zero_have_no_row() -> None:
    taken = snapshot(
        features=replace(features(SHMEM), lruvec_items=(SHMEM,), node_items=(SHMEM,)),
        lruvec_stats={
            (memcg, nid): {SHMEM: Stat(nid, 0, 0)} for memcg in (ROOT, A, B, DEAD) for nid in (0, 1)
        },
        node_stats={(0, SHMEM): NodeStat(0, 0), (1, SHMEM): NodeStat(1, 0)},
    )
    assert rows_of(taken).keys() == {(SHMEM, 1)}


def test_a_counter_that_could_not_be_read() -> None:
    taken = made()
    reason = "a counter of the node, or of a memcg on it, is not in the image"
    for item, nid, key in ((SHMEM, 1, (SHMEM, 1)), (FILE, 1, (FILE, None))):
        stats = {cell: stat for cell, stat in taken.node_stats.items() if cell != (nid, item)}
        rows = rows_of(replace(taken, node_stats=stats))
        assert (rows[key].status, rows[key].reason) == ("unverifiable", reason)
        assert [row.status for row in rows.values()].count("exact") == 8


def test_what_need_not_be_charged_is_only_more() -> None:
    assert rows_of(made({(1, MAPPED): 4000}))[MAPPED, 1].status == "exact"
    assert rows_of(made({(1, MAPPED): -1}))[MAPPED, 1].difference == -1


def test_pages_of_no_memcg_make_counters_of_folios_unverifiable() -> None:
    """Only where they differ, and not those of LRU lists, on which every page has a memcg."""
    rows = rows_of(made({(1, SHMEM): 1, (1, ANON): 1}, uncharged=1))
    assert rows[SHMEM, 0].status == "exact"
    assert (rows[SHMEM, 1].status, rows[SHMEM, 1].reason) == (
        "unverifiable",
        "pages on LRU lists are not charged to any memcg, and only nodes count them",
    )
    assert rows[ANON, 1].status == "differs"


def test_the_swap_cache_of_cgroup_v1() -> None:
    """In 6.1 pages are uncharged before they leave it."""
    v1 = features(*ITEMS, default_hierarchy=False)
    taken = made({(1, CACHE): -5, (0, FILE): -5})
    for kernel, status in ((taken.features, "differs"), (v1, "unverifiable")):
        kernel = replace(kernel, lruvec_items=ITEMS, node_items=ITEMS)
        rows = rows_of(replace(taken, features=kernel))
        assert (rows[CACHE, 0].status, rows[CACHE, 1].status) == ("exact", status)
        reason = (
            "cgroup v1 may have uncharged pages before they left the swap cache "
            "(mem_cgroup_swapout())"
        )
        assert rows[CACHE, 1].reason == (reason if status == "unverifiable" else None)


@pytest.mark.parametrize(("by_nfs", "status"), [(False, "differs"), (True, "unverifiable")])
def test_pages_that_servers_of_nfs_write_back(by_nfs: bool, status: str) -> None:
    """Only nodes count them, so the node may have more. It may not have less."""
    cells = ((0, 5), (1, -5))
    taken = snapshot(
        features=replace(features(WRITEBACK), lruvec_items=(WRITEBACK,), node_items=(WRITEBACK,)),
        lruvec_stats={
            (memcg, nid): {WRITEBACK: Stat(9 * (memcg == ROOT), 0, 0)}
            for memcg in (ROOT, A, B, DEAD)
            for nid, _ in cells
        },
        node_stats={(nid, WRITEBACK): NodeStat(9 + off, 0) for nid, off in cells},
        all_nodes=Nodes(writeback_by_nfs=by_nfs),
    )
    rows = rows_of(taken)
    assert [rows[WRITEBACK, nid].status for nid, _ in cells] == [status, "differs"]
    unstable = "pages that NFS servers have not committed may be counted by nodes only"
    assert rows[WRITEBACK, 0].reason == (unstable if by_nfs else None)


def test_a_root_memcg_that_was_not_read() -> None:
    """What the node counts has nothing to be compared with then, and is not shown."""
    taken = made()
    stats = {cell: {ANON: Stat(1, 0, 0)} for cell in ((A, 0), (A, 1), (B, 0), (B, 1))}
    lost = replace(taken, counters=Counters(taken.memcgs, {}, stats))
    rows = rows_of(lost)
    reason = "a counter of the node, or of a memcg on it, is not in the image"
    assert {(row.status, row.claimed, row.reason) for row in rows.values()} == {
        ("unverifiable", None, reason)
    }
    assert {row.found["memcgs"] for row in rows.values()} == {0}


def test_page_cache_that_may_be_counted_by_nodes_only() -> None:
    """In either direction. Pages of memcgs on LRU lists say nothing about it."""
    for amount in (5, -5):
        row = rows_of(made({(1, FILE): amount}, uncharged=1))[FILE, None]
        assert (row.status, row.unit, row.difference) == ("unverifiable", "pages", amount)
        charged = LruLists({(A, 0, "list"): 7, (0, 0, "list"): 0}, {}, True)
        taken = replace(made({(1, FILE): amount}), lru=charged)
        assert rows_of(taken)[FILE, None].status == "differs"


def test_what_was_not_read() -> None:
    taken = made()
    stats = {cell: stat for cell, stat in taken.node_stats.items() if cell[0] == 0}
    rows = rows_of(replace(taken, node_stats=stats))
    assert {row.status for (_, nid), row in rows.items() if nid == 0} == {"exact"}
    assert {row.status for (_, nid), row in rows.items() if nid != 0} == {"unverifiable"}


def test_totals() -> None:
    stats = {(0, SHMEM): NodeStat(3, 9), (1, SHMEM): NodeStat(4, 0), (0, FILE): NodeStat(0, 1)}
    taken = snapshot(node_stats=stats, all_nodes=Nodes(totals={SHMEM: 7, FILE: 0}))
    [row] = node_total_rows(taken)  # the other is 0 on both sides
    assert (row.item, row.status, row.found) == (SHMEM, "exact", {"nodes": 7})
    [row] = node_total_rows(replace(taken, all_nodes=Nodes(totals={SHMEM: 8})))
    assert (row.status, row.difference) == ("differs", 1)
    missing = {"node_stats": Coverage(1, 1)}
    [row] = node_total_rows(replace(taken, all_nodes=Nodes(totals={SHMEM: 8}), coverage=missing))
    assert row.status == "unverifiable"


def items_of(subject: Subject) -> list[str]:
    """Return the items that the kernel keeps for memcgs and ``node_levels`` compares by node."""
    return sorted({*EXACT} & {*subject.snapshot.features.lruvec_items} - {FILE})


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_item_at_every_level(lab: Lab, kernel: str) -> None:
    """4,000 added to any item at any one level is found, and 1 is, in one audit each."""
    subject = Subject(lab.image(kernel, "4", "mixed").program())
    items, nid = items_of(subject), subject.snapshot.image.nodes[1]
    assert {"NR_ANON_MAPPED", "NR_SHMEM", "NR_ANON_THPS", "NR_INACTIVE_ANON"} <= set(items)
    path, _ = subject.largest("lru")
    prog = subject.prog
    for size in (1, 4_000):
        node = [subject.add(prog["node_data"][nid].vm_stat[prog[item]], size) for item in items]
        report = subject.audit(Fault(tuple(node), (), set()))
        found = {(f.identity, f.item, f.nid, f.difference) for f in report.findings}
        assert found >= {("node_levels", item, nid, size) for item in items}
        # The totals of all nodes were not changed.
        assert found >= {("node_totals", item, None, -size) for item in items}
        for where in (None, nid):
            writes = [subject.add(subject.percpu_counter(path, i, where), size) for i in items]
            report = subject.audit(Fault(tuple(writes), (), set()))
            found = {(f.identity, f.item, f.nid, f.difference) for f in report.findings}
            sign = 1 if where is None else -1
            assert found >= {("page_levels", item, None, sign * size) for item in items}


@pytest.mark.image
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[:1])
def test_a_client_of_nfs(lab: Lab, kernel: str) -> None:
    subject = Subject(lab.image(kernel, "4", "mixed").program())
    counter = subject.prog["node_data"][0].vm_stat[subject.prog[WRITEBACK]]
    one_more = subject.add(counter, 7)
    # A module of the guest is given another name.
    module = next(for_each_module(subject.prog))
    renamed = Write(module.name.address_of_().value_(), b"nfs\0")
    for status, writes in (("differs", (one_more,)), ("unverifiable", (one_more, renamed))):
        report = subject.audit(Fault(writes, (), set()))
        rows = {(row.identity, row.item, row.nid): row for row in report.rows}
        row = rows["node_levels", WRITEBACK, 0]
        assert (row.status, row.difference) == (status, 7)
