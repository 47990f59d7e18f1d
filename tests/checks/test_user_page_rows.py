# SPDX-License-Identifier: LGPL-2.1-or-later
"""Counters of user pages by node, for all nodes together, and what both have of each other."""

from __future__ import annotations

from collections.abc import Container

import pytest
from support.made import DEAD, ROOT, A, B, features, snapshot

from memcg_inspect.checks.identities.levels import level_row
from memcg_inspect.checks.identities.user_pages import user_page_rows
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Nodes, Stat


def made(item: str, nodes: Nodes, more: int = 0, on: Container[int] = (1,)) -> Snapshot:
    """
    Return a kernel that counts 3 pages of ``/a/b``, where none are.

    :param more: pages that the memcg counts, and its nodes do not
    :param on: nodes that count 3 pages each
    """
    pages = {ROOT: 3, A: 3, B: 3, DEAD: 0}
    return snapshot(
        features=features(item),
        memcg_stats={m: {item: Stat(n + more * (m == B), 0, 0)} for m, n in pages.items()},
        lruvec_stats={
            (memcg, nid): {item: Stat(n * (nid in on), 0, 0)}
            for memcg, n in pages.items()
            for nid in (0, 1)
        },
        all_nodes=nodes,
    )


@pytest.mark.parametrize("item", ["NR_SHMEM", "NR_FILE_PAGES"])
@pytest.mark.parametrize(
    ("nodes", "status"),
    [
        (Nodes(with_memory=frozenset({0, 1})), "differs"),
        (Nodes(with_memory=frozenset({0})), "unverifiable"),
        (Nodes(unsteady=frozenset({1})), "unverifiable"),
        (Nodes(unsteady=frozenset({0})), "differs"),
    ],
)
def test_counters_of_a_node_that_are_not_flushed(item: str, nodes: Nodes, status: str) -> None:
    """They doubt the counter of that node, and that of all nodes."""
    [row] = user_page_rows(made(item, nodes))
    assert (row.memcg, row.status, row.difference) == (B, status, 3)
    assert row.nid == (1 if item == "NR_SHMEM" else None)


def test_each_node_is_doubted_for_itself() -> None:
    taken = made("NR_SHMEM", Nodes(unsteady=frozenset({0})), on=(0, 1))
    found = {(row.nid, row.status) for row in user_page_rows(taken) if row.memcg == B}
    assert found == {(0, "unverifiable"), (1, "differs")}


@pytest.mark.parametrize("more", [1, -1])
def test_levels_of_a_node_that_is_not_flushed(more: int) -> None:
    """The memcg may have lost changes of either sign."""
    for nodes, status in (
        (Nodes(with_memory=frozenset({0, 1})), "differs"),
        (Nodes(with_memory=frozenset({0})), "unverifiable"),
    ):
        row = level_row(made("NR_SHMEM", nodes, more), RowKey("levels", "NR_SHMEM", "pages", B))
        assert (row.status, row.difference) == (status, more)
