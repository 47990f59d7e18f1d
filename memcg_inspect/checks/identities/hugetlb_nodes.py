# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``hugetlb_nodes``
--------------------------

For each cgroup of the hugetlb controller, each size of huge pages, and each node: the usage of the
node (``nodeinfo[]->usage[]``) is the pages of the huge pages of the node that refer to the cgroup.
It does not include descendants; ``hugetlb.*.numa_stat`` adds them up.

Kernels without ``hugetlb_cgroup_move_usage()`` leave the usage where it was when a huge page
migrates to another node, or its cgroup is removed. When the page is freed, they subtract it from
the other node, or from the parent, which may fall below 0.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check, Explained
from memcg_inspect.checks.hugetlb_charges import (
    half_done,
    item_of,
    why_not_kept,
    why_pages_missing,
)
from memcg_inspect.checks.rows import RowKey, doubted, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "hugetlb_nodes_rows")


def hugetlb_nodes_rows(snapshot: Snapshot) -> list[Row]:
    """Compare huge pages with the usages of nodes of their cgroups, where either is not zero."""
    hugetlb, missing = snapshot.hugetlb, why_pages_missing(snapshot)
    rows = [
        make_row(
            RowKey("hugetlb_nodes", item_of(hugetlb, n, "numa_stat", cgroup), "pages", nid=nid),
            {"hugetlb": compared.found},
            None if compared.claimed is None else {"usage": compared.claimed},
            unread="the cgroup has no usage of this node",
        )
        for (cgroup, n, nid), compared in hugetlb.on_nodes.items()
        if not compared.is_zero
    ]
    return [doubted(row, missing) for row in rows]


def _explain(snapshot: Snapshot, row: Row) -> Explained | None:
    if snapshot.hugetlb.is_locked is False:
        return None
    return half_done(snapshot, row, snapshot.hugetlb.on_nodes_off)


def _not_kept(snapshot: Snapshot) -> str | None:
    reason = why_not_kept(snapshot)
    if reason is None and not snapshot.hugetlb.moves_usage:
        return "this kernel does not move the usage of a node together with a huge page"
    return reason


CHECK = Check(
    name="hugetlb_nodes",
    counter="`nodeinfo[]->usage[]` behind `hugetlb.*.numa_stat`, by node",
    unit="pages",
    found=(
        "huge pages of hugetlb that refer to the cgroup, by size and node. Nodes that are 0 on "
        "both sides have no row"
    ),
    sources=("hugetlb",),
    places=("usage",),
    rows=hugetlb_nodes_rows,
    not_kept=_not_kept,
    explain=_explain,
)
