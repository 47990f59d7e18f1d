# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``node_slab``
----------------------

For each node, whoever pays: ``NR_SLAB_RECLAIMABLE_B`` and ``NR_SLAB_UNRECLAIMABLE_B`` of the
node, in pages, are the pages of its slabs, and for the latter also those of its large
kmallocs. Pages of kfence are in neither.

Where nothing marks large kmallocs, those that no memcg pays for cannot be told from other
pages: only the first of the two is compared.
"""

from __future__ import annotations

from memcg_inspect.checks.rows import make_row
from memcg_inspect.checks.slab import ITEMS
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Row

__all__ = ("node_slab_rows",)


def node_slab_rows(snapshot: Snapshot) -> list[Row]:
    """Hold the pages of slabs and large kmallocs against the counters of nodes."""
    whole = snapshot.complete("pages", "slab_pages")
    rows = []
    for nid in snapshot.image.nodes:
        for detail, item in ITEMS.items():
            is_reclaimable = detail == "reclaimable"
            if not is_reclaimable and not snapshot.features.large_kmalloc_type:
                continue
            slabs = (
                usage.pages
                for usage in snapshot.slab_usage
                if (usage.nid, usage.reclaimable, usage.kfence) == (nid, is_reclaimable, False)
            )
            found = {"slab": sum(slabs)}
            if not is_reclaimable:
                found["large_kmalloc"] = snapshot.large_kmalloc.get(nid, 0)
            stat = snapshot.node_stats.get((nid, item))
            rows.append(
                make_row(
                    "node_slab",
                    memcg=None,
                    nid=nid,
                    item=item,
                    unit="pages",
                    found=found,
                    claimed=None if stat is None else {"vm_stat": stat.folded, "cpu": stat.cpus},
                    missing=None
                    if whole
                    else "struct pages, or caches of slabs, are not in the image",
                )
            )
    return rows
