# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``lru``
----------------

For each memcg, node, zone and LRU list: the pages that the lruvec counts on the list are
those of the folios with ``PG_lru`` that say they are on it. Folios that were charged and wait
in a CPU's batch are not on a list yet.

The lruvec is that of the memcg that a folio is really charged to: on kernels whose user
pages point to memcgs (before 7.2) the pages of a removed memcg stay on its own lists. Pages
charged to nobody are on the root's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from memcg_inspect.checks.rows import make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Row

__all__ = ("lru_rows",)

#: Names of the counters that a walk of page tables changes.
_BY_GENERATION = "lrugen."
#: Why folios may be of another generation than their list.
_WALKS = "tasks, whose walks of page tables move folios, are not all in the image"
#: Why lists are taken together.
_BY_TYPE = "the generation of a folio is not where it was expected: lists are compared by type"

Cell = tuple[int, int, str]


def lru_rows(snapshot: Snapshot) -> list[Row]:
    """Hold folios on LRU lists against the sizes of the lists, where either is not zero."""
    lru = snapshot.lru
    if lru is None:
        return []
    found = _found(snapshot, lru.pages)
    cells = dict.fromkeys(found)
    for (memcg, nid), sizes in lru.sizes.items():
        cells |= dict.fromkeys((memcg, nid, item) for item in sizes)
    rows = []
    for cell in sorted(cells):
        memcg, nid, item = cell
        places = lru.sizes.get((memcg, nid))
        by_generation = item.startswith(_BY_GENERATION)
        empty = "nr_pages" if by_generation else "lru_zone_size"
        # What walks of page tables hand in later moves folios from one generation to another.
        walks = by_generation and not snapshot.complete("lru_walks")
        row = make_row(
            "lru",
            memcg=memcg,
            nid=nid,
            item=item,
            unit="pages",
            found={"lru": found.get(cell, 0)},
            claimed=None if places is None else places.get(item, {empty: 0}),
            missing=_WALKS if walks else snapshot.why_missing("lru", None, nid),
            missing_hides_both=walks,
            unread="the sizes of the LRU lists could not be read",
        )
        if row.reason is None and not lru.by_generation:
            row = replace(row, reason=_BY_TYPE)
        rows.append(row)
    return rows


def _found(snapshot: Snapshot, pages: Mapping[Cell, int]) -> Mapping[Cell, int]:
    cells: Counter[Cell] = Counter()
    root = next(iter(snapshot.memcgs))
    for (payer, nid, item), number in pages.items():
        objcg = snapshot.objcgs.get(payer)
        memcg = payer if objcg is None else objcg.memcg
        if not payer:
            memcg = root
        if memcg in snapshot.memcgs:
            cells[memcg, nid, item] += number
    return cells
