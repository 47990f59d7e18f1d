# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``hugetlb_usage``
--------------------------

For each cgroup of the hugetlb controller, and each size of huge pages: the page counter
(``hugepage[]``) is the pages of the huge pages that refer to the cgroup. It includes descendants,
whose counters are subtracted before the comparison. ``hugetlb_cgroup_css_offline()`` gives the
pages of a cgroup that is removed to its parent, so nothing is left in its counter.

Reservations (``rsvd_hugepage[]``) are not compared: no page refers to them.

What huge pages refer to, and what is no cgroup, is in rows of their own, which claim nothing.
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

__all__ = ("CHECK", "hugetlb_usage_rows")


def hugetlb_usage_rows(snapshot: Snapshot) -> list[Row]:
    """Compare huge pages with the page counters of their cgroups, where either is not zero."""
    hugetlb, missing = snapshot.hugetlb, why_pages_missing(snapshot)
    rows = [
        make_row(
            RowKey("hugetlb_usage", item_of(hugetlb, n, "usage", cgroup), "pages"),
            {"hugetlb": compared.found},
            {"page_counter": compared.claimed or 0},
        )
        for (cgroup, n), compared in hugetlb.usage.items()
        if not compared.is_zero
    ]
    return [doubted(row, missing) for row in rows]


def _explain(snapshot: Snapshot, row: Row) -> Explained | None:
    return half_done(snapshot, row, snapshot.hugetlb.usage_off)


CHECK = Check(
    name="hugetlb_usage",
    counter="the page counter behind `hugetlb.*.current`, or `hugetlb.*.usage_in_bytes`",
    unit="pages",
    found=(
        "huge pages of hugetlb that refer to the cgroup, by size. Cgroups that are 0 on both sides "
        "have no row"
    ),
    sources=("hugetlb",),
    places=("page_counter",),
    rows=hugetlb_usage_rows,
    not_kept=why_not_kept,
    explain=_explain,
)
