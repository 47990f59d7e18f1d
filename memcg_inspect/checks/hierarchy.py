# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identities ``hierarchy`` and ``levels``
---------------------------------------

``hierarchy``: what a memcg with children says, flushed or not, is what was found in all of
its subtree, removed memcgs included. Where a memcg's own share is off and this holds, the
counter of a child is wrong; where it fails, its own.

``levels``: what a memcg counts of slab memory is what it counts on all nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from memcg_inspect.checks.rows import make_row
from memcg_inspect.checks.slab import ITEMS
from memcg_inspect.checks.snapshot import Snapshot, split
from memcg_inspect.model import Row

__all__ = ("hierarchy_rows", "level_rows")


def hierarchy_rows(snapshot: Snapshot, rows: Iterable[Row]) -> list[Row]:
    """
    Hold the counters of memcgs with children against their subtrees.

    :param rows: those of the identities that compare what a memcg claims for itself
    """
    found: defaultdict[tuple[int, int | None, str], int] = defaultdict(int)
    models: dict[tuple[int, int | None, str], Row] = {}
    missing: dict[tuple[int, int | None, str], str] = {}
    parents = {snapshot.memcgs[m.parent].payer for m in snapshot.live() if m.parent is not None}
    for row in rows:
        if row.memcg is None or row.claimed is None or "folded" not in row.claimed:
            continue
        if row.identity == "levels":
            continue  # what it found are counters themselves
        models[row.memcg, row.nid, row.item] = row
        memcg: int | None = row.memcg
        amount = sum(row.found.values()) - row.claimed.get("stock", 0)
        while memcg is not None:
            found[memcg, row.nid, row.item] += amount
            if row.status == "unverifiable":
                missing.setdefault((memcg, row.nid, row.item), row.reason or "")
            above = snapshot.memcgs[memcg].parent
            memcg = None if above is None else snapshot.memcgs[above].payer
    return [
        _row(snapshot, model, found[key], missing.get(key))
        for key, model in models.items()
        if model.memcg in parents
    ]


def _row(snapshot: Snapshot, model: Row, found: int, missing: str | None) -> Row:
    memcg = model.memcg or 0
    claim = snapshot.counters.hierarchical(memcg, model.item, model.nid)
    return make_row(
        "hierarchy",
        memcg=memcg,
        nid=model.nid,
        item=model.item,
        unit=model.unit,
        found={"subtree": found},
        claimed=None if claim is None else split(claim),
        missing=missing,
        missing_hides_both=True,
        unread="counters of its subtree are not all in the image",
        hierarchy=model.hierarchy,
    )


def level_rows(snapshot: Snapshot) -> list[Row]:
    """Hold a memcg's slab counters against the sum of its nodes'."""
    rows = []
    for memcg in snapshot.live():
        for item in ITEMS.values():
            parts = [snapshot.counters.own(memcg.address, item, n) for n in snapshot.image.nodes]
            claim = snapshot.counters.own(memcg.address, item)
            known = claim is not None and None not in parts
            rows.append(
                make_row(
                    "levels",
                    memcg=memcg.address,
                    nid=None,
                    item=item,
                    unit="bytes",
                    found={"nodes": sum(sum(part) for part in parts if part is not None)},
                    claimed=split(claim) if claim is not None and known else None,
                    unread=snapshot.unread(memcg.address),
                    hierarchy=snapshot.folded(memcg.address, item),
                )
            )
    return rows
