# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``node_slab``
----------------------

For each node, charged or not: ``NR_SLAB_RECLAIMABLE_B`` and ``NR_SLAB_UNRECLAIMABLE_B`` of the
node, in pages, are the pages of its slabs. The latter also counts large kmallocs. Pages of kfence
are in neither.

Kernels without a page type for large kmallocs do not mark those that are not charged. On such
kernels, only the first counter is compared.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.identities.slab import ITEMS
from memcg_inspect.checks.rows import Missing, RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "node_slab_rows")


def node_slab_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the pages of slabs and large kmallocs with the counters of nodes."""
    missing = None
    if not snapshot.complete("pages", "slab_pages"):
        missing = Missing("struct pages, or caches of slabs, are not in the image")
    rows = []
    for nid in snapshot.image.nodes:
        for detail, item in ITEMS.items():
            if detail == "unreclaimable" and not snapshot.features.large_kmalloc_type:
                continue
            stat = snapshot.node_stats.get((nid, item))
            rows.append(
                make_row(
                    RowKey("node_slab", item, "pages", nid=nid),
                    _found(snapshot, nid, detail),
                    None if stat is None else {"vm_stat": stat.folded, "cpu": stat.cpus},
                    missing,
                )
            )
    return rows


def _found(snapshot: Snapshot, nid: int, detail: str) -> dict[str, int]:
    is_reclaimable = detail == "reclaimable"
    slabs = (
        usage.pages
        for usage in snapshot.slab_usage
        if usage.nid == nid and usage.reclaimable == is_reclaimable and not usage.kfence
    )
    found = {"slab": sum(slabs)}
    if not is_reclaimable:
        found["large_kmalloc"] = snapshot.large_kmalloc.get(nid, 0)
    return found


def _not_kept(snapshot: Snapshot) -> str | None:
    return None if snapshot.node_stats else "the counters of nodes are not known here"


CHECK = Check(
    name="node_slab",
    counter="`NR_SLAB_RECLAIMABLE_B`, `NR_SLAB_UNRECLAIMABLE_B` of the node",
    unit="pages",
    found=(
        "all slabs and all large kmallocs, charged or not. The second counter is checked only "
        "if the kernel marks large kmallocs (`PGTY_large_kmalloc`)"
    ),
    sources=("slab", "large_kmalloc"),
    places=("vm_stat", "cpu"),
    rows=node_slab_rows,
    not_kept=_not_kept,
)
