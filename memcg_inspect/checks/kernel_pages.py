# SPDX-License-Identifier: LGPL-2.1-or-later
"""Rows of pages with ``MEMCG_DATA_KMEM``, which several identities compare by their use."""

from __future__ import annotations

from memcg_inspect.checks.ledger import GONE, Amount
from memcg_inspect.checks.rows import Missing, RowKey, counter_row, doubted, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import counted
from memcg_inspect.report import Row

__all__ = ("gone_pages", "missing_areas", "missing_pages", "rows_by_node")

_NOTHING = Amount(0, 0)


def rows_by_node(
    snapshot: Snapshot, key: RowKey, detail: str, size: int, areas: bool = False
) -> list[Row]:
    """
    Compare the pages of one use with their counter, by memcg and node.

    :param key: identity, item and unit of the rows
    :param detail: use of the pages in the ledger
    :param size: bytes of the row's unit
    :param areas: whether the pages are those of vmalloc areas
    """
    found, gone = snapshot.by_node("kmem", detail), snapshot.by_node("kmem", GONE)
    missing = {
        nid: (missing_areas if areas else missing_pages)(snapshot, detail, nid)
        for nid in snapshot.image.nodes
    }
    rows = []
    for memcg in snapshot.live():
        for nid in snapshot.image.nodes:
            amount = found.get((memcg.address, nid), _NOTHING)
            row = counter_row(
                snapshot,
                RowKey(key.identity, key.item, key.unit, memcg.address, nid),
                {detail: amount.bytes // size},
                missing[nid],
            )
            most = gone.get((memcg.address, nid), _NOTHING).bytes // size if areas else 0
            rows.append(doubted(row, gone_pages(row, most)))
    return rows


def gone_pages(row: Row, most: int) -> Missing | None:
    """Return that pages which are gone may be what a row lacks, if there are enough of them."""
    if not 0 < row.off <= most:
        return None
    return Missing(f"{counted(most, row.unit)} were freed before their use was known")


def missing_pages(snapshot: Snapshot, detail: str, nid: int | None) -> Missing | None:
    """Return why pages of one use may be missing."""
    return missing_if(snapshot.why_missing("kmem", detail, nid))


def missing_areas(snapshot: Snapshot, detail: str, nid: int | None) -> Missing | None:
    """Return why pages of stacks, or of other vmalloc areas, may be missing."""
    # A stack that is not known to be one is counted as another vmalloc area.
    either_way = detail == "vmalloc" and not snapshot.complete("stacks")
    if not snapshot.complete("vmalloc"):
        return Missing("vmalloc areas are not all in the image", either_way)
    if not snapshot.complete("stacks"):
        return Missing(
            "tasks, whose stacks are told from other vmalloc areas, are not all in the image",
            either_way,
        )
    return missing_pages(snapshot, detail, nid)
