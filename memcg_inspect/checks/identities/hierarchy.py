# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``hierarchy``
----------------------

For each memcg with children: its counter, including changes that are not flushed, is the sum of
the charges found in its whole subtree, including removed memcgs. If the row of a memcg itself
differs and this identity holds, the memcg's own counter is right: the counter of a child is wrong,
or a charge has the wrong owner within the subtree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from memcg_inspect.checks.check import Check, counter_differs
from memcg_inspect.checks.identities.kmem import HALF_DONE
from memcg_inspect.checks.partial_areas import explain_areas_of_subtree
from memcg_inspect.checks.rows import make_row, missing_if, row_key
from memcg_inspect.checks.snapshot import Snapshot, split
from memcg_inspect.report import Row

__all__ = ("CHECK", "hierarchy_rows")

Cell = tuple[int, int | None, str]


def hierarchy_rows(snapshot: Snapshot, rows: Sequence[Row]) -> list[Row]:
    """
    Compare the counters of memcgs with children with their subtrees.

    :param rows: rows that add up charges. Rows of counters of memcgs have a part ``folded`` in
        ``claimed``; other rows are ignored.
    """
    found: defaultdict[Cell, int] = defaultdict(int)
    models: dict[Cell, Row] = {}
    reasons: dict[Cell, str] = {}
    parents = {snapshot.memcgs[m.parent].payer for m in snapshot.live() if m.parent is not None}
    for row in rows:
        if row.memcg is None or row.claimed is None or "folded" not in row.claimed:
            continue
        if row.memcg in parents:
            models[row.memcg, row.nid, row.item] = row
        memcg: int | None = row.memcg
        amount = sum(row.found.values()) - row.claimed.get("stock", 0)
        if not amount and row.status != "unverifiable":
            continue
        while memcg is not None:
            found[memcg, row.nid, row.item] += amount
            if row.status == "unverifiable":
                reasons.setdefault((memcg, row.nid, row.item), row.reason or "")
            above = snapshot.memcgs[memcg].parent
            memcg = None if above is None else snapshot.memcgs[above].payer
    return [_row(snapshot, model, found[cell], reasons.get(cell)) for cell, model in models.items()]


def _row(snapshot: Snapshot, model: Row, found: int, why: str | None) -> Row:
    claim = snapshot.counters.hierarchical(model.memcg or 0, model.item, model.nid)
    return make_row(
        row_key(model)._replace(identity="hierarchy"),
        {"subtree": found},
        None if claim is None else split(claim),
        missing_if(why, either_way=True),
        unread="counters of its subtree are not all in the image",
        hierarchy=model.hierarchy,
    )


def _sentence(row: Row) -> str:
    return f"{counter_differs(row)} in its whole subtree"


CHECK = Check(
    name="hierarchy",
    counter="the counters above, of memcgs with children",
    unit="as above",
    found="what was found in the whole subtree, including removed memcgs",
    sources=("subtree",),
    places=("folded", "pending_cpu"),
    derive=hierarchy_rows,
    of_subtrees=True,
    by_node_rule=True,
    explain=explain_areas_of_subtree,
    # The counter of a subtree includes the half-done charge of any memcg in it.
    half_done=replace(HALF_DONE, in_many_rows=True),
    sentence=_sentence,
)
