# SPDX-License-Identifier: LGPL-2.1-or-later
"""Counters of user pages, compared by node or for all nodes together."""

from __future__ import annotations

import pytest
from support.made import DEAD, ROOT, A, B, features, snapshot

from memcg_inspect.checks.identities.user_pages import user_page_rows
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Nodes, Stat


def made(item: str, nodes: Nodes) -> Snapshot:
    """Return a kernel that counts 3 pages of ``/a/b``, on node 1, where none are."""
    pages = {ROOT: 3, A: 3, B: 3, DEAD: 0}
    return snapshot(
        features=features(item),
        memcg_stats={memcg: {item: Stat(n, 0, 0)} for memcg, n in pages.items()},
        lruvec_stats={
            (memcg, nid): {item: Stat(n * nid, 0, 0)}
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
