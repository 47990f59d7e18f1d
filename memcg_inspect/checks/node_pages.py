# SPDX-License-Identifier: LGPL-2.1-or-later
"""Counters of nodes, and rows of pages that nodes count, charged or not."""

from __future__ import annotations

from memcg_inspect.checks.identities.node_totals import node_unit
from memcg_inspect.checks.rows import RowKey, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import NodeUse
from memcg_inspect.report import Row

__all__ = ("node_counter", "node_page_rows", "why_not_all_pages", "why_not_known")


def node_counter(snapshot: Snapshot, item: str, nid: int) -> dict[str, int] | None:
    """Return a counter of a node in the parts that rows show; ``None`` if it is unknown."""
    stat = snapshot.node_stats.get((nid, item))
    return None if stat is None else {"vm_stat": stat.folded, "cpu": stat.cpus}


def why_not_known(snapshot: Snapshot) -> str | None:
    """Return why identities of nodes are not kept; ``None`` if the counters of nodes are known."""
    return None if snapshot.node_stats else "the counters of nodes of this kernel are not known"


def node_page_rows(snapshot: Snapshot, identity: str, item: str, use: NodeUse) -> list[Row]:
    """
    Compare the pages of one use with the counter of each node.

    :param identity: name of the identity
    :param item: enumerator of ``enum node_stat_item``
    """
    unit = node_unit(item)
    size = snapshot.image.page_size // 1024 if unit == "KiB" else 1
    why, rows = why_not_all_pages(snapshot, use), []
    for nid in snapshot.image.nodes:
        rows.append(
            make_row(
                RowKey(identity, item, unit, nid=nid),
                {use: snapshot.node_pages.get((use, nid), 0) * size},
                node_counter(snapshot, item, nid),
                missing_if(why),
            )
        )
    return rows


def why_not_all_pages(snapshot: Snapshot, use: NodeUse) -> str | None:
    """Return why pages of one use may be missing from what was found."""
    if not snapshot.complete("pages"):
        return "struct pages are not in the image"
    if use == "vmalloc" and not snapshot.complete("vmalloc"):
        return "vmalloc areas are not all in the image"
    if use == "stack" and not snapshot.complete("vmalloc", "stacks"):
        return "tasks, or their stacks, are not all in the image"
    return None
