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
from memcg_inspect.checks.half_done import HalfDone, block_pages, pattern
from memcg_inspect.checks.identities.slab import ITEMS
from memcg_inspect.checks.node_pages import node_counter, why_not_known
from memcg_inspect.checks.rows import Missing, RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "node_slab_rows")


def _node_items(snapshot: Snapshot) -> list[str]:
    # See the head of this module: large kmallocs.
    return [
        item
        for detail, item in ITEMS.items()
        if detail == "reclaimable" or snapshot.features.large_kmalloc_type
    ]


def node_slab_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the pages of slabs and large kmallocs with the counters of nodes."""
    missing = None
    if not snapshot.complete("pages", "slab_pages"):
        missing = Missing("struct pages, or caches of slabs, are not in the image")
    rows = []
    for nid in snapshot.image.nodes:
        for detail, item in ITEMS.items():
            if item not in _node_items(snapshot):
                continue
            rows.append(
                make_row(
                    RowKey("node_slab", item, "pages", nid=nid),
                    _found(snapshot, nid, detail),
                    node_counter(snapshot, item, nid),
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
    node_items=_node_items,
    not_kept=why_not_known,
    of_whole_nodes=True,
    # The type of the pages is set before they are counted, and cleared before that is undone.
    half_done=HalfDone(
        pattern(r"(allocate|new|free|discard|rcu_free)_slab|kmalloc_large|free_large_kmalloc"),
        block_pages,
        of_nodes=True,
    ),
)
