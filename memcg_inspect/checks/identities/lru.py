# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``lru``
----------------

For each memcg, node, zone and LRU list: the number of pages that the lruvec counts on the list is
that of the folios with ``PG_lru`` whose flags name the list. Folios that are charged but still in a
CPU's ``folio_batch`` are not on a list.

A folio is on a list of the memcg that it is charged to. On kernels whose user pages point to memcgs
(up to 7.0), the pages of a removed memcg stay on its own lists. Pages that are not charged are on
the lists of the root memcg.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import LRU, HalfDone, folio_pages, pattern
from memcg_inspect.checks.rows import Missing, RowKey, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "lru_rows")

#: Prefix of the names of the multi-gen LRU's counters.
_BY_GENERATION = "lrugen."
#: Why the generation of folios may differ from that of their list.
_WALKS = "tasks, whose walks of page tables move folios, are not all in the image"
#: Why the lists of all generations are compared together.
_BY_TYPE = "the generation of a folio is not where it was expected: lists are compared by type"

Cell = tuple[int, int, str]


def lru_rows(snapshot: Snapshot) -> list[Row]:
    """Compare folios on LRU lists with the sizes of the lists, where either is not zero."""
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
        empty = "nr_pages" if item.startswith(_BY_GENERATION) else "lru_zone_size"
        row = make_row(
            RowKey("lru", item, "pages", memcg, nid),
            {"lru": found.get(cell, 0)},
            None if places is None else places.get(item, {empty: 0}),
            _missing(snapshot, item, nid),
            unread="the sizes of the LRU lists could not be read",
        )
        if row.reason is None and not lru.by_generation:
            row = replace(row, reason=_BY_TYPE)
        rows.append(row)
    return rows


def _missing(snapshot: Snapshot, item: str, nid: int) -> Missing | None:
    # reset_batch_size() moves folios from one generation to another after a walk.
    if item.startswith(_BY_GENERATION) and not snapshot.complete("lru_walks"):
        return Missing(_WALKS, either_way=True)
    return missing_if(snapshot.why_missing("lru", None, nid))


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


def _not_kept(snapshot: Snapshot) -> str | None:
    return (
        "the sizes of the LRU lists of this kernel are not known" if snapshot.lru is None else None
    )


CHECK = Check(
    name="lru",
    counter=(
        "`lru_zone_size` by node, zone and list; on the multi-gen LRU `lrugen.nr_pages` by "
        "node, generation, type and zone"
    ),
    unit="pages",
    found=(
        "folios with `PG_lru`, by the list that their flags name. Lists that are empty on both "
        "sides have no row"
    ),
    sources=("lru",),
    places=("lru_zone_size", "nr_pages", "mm_walk"),
    rows=lru_rows,
    not_kept=_not_kept,
    half_done=HalfDone(
        pattern(LRU),
        # isolate_lru_folios() takes SWAP_CLUSTER_MAX (32) off a list together.
        lambda snapshot: snapshot.limits.folio_batch + 1,
        folios=folio_pages,
        kinds=["folio"],
        # isolate_lru_folios() takes folios off the lists of all zones.
        rows=4,
    ),
)
