# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``placement``
----------------------

For each node: the vectors of obj_cgroup pointers of its slabs, where they are apart from the
slab, are on the node, too.
"""

from __future__ import annotations

from dataclasses import replace

from memcg_inspect.checks.check import Check, Proof
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import counted
from memcg_inspect.report import Evidence, Row

__all__ = ("CHECK", "placement_rows")


def placement_rows(snapshot: Snapshot) -> list[Row]:
    """Count the vectors that are on the node of their slab."""
    rows = []
    for nid, vectors in sorted(snapshot.vectors.items()):
        row = make_row(
            RowKey("placement", "obj_exts", "references", nid=nid),
            {"on_node": vectors.total - len(vectors.elsewhere)},
            {"vectors": vectors.total},
        )
        if row.status == "exact" and snapshot.ledger.may_miss("slab", None, nid):
            reason = "slabs on this node are not all in the image"
            row = replace(row, status="unverifiable", reason=reason)
        rows.append(row)
    return rows


def _prove(snapshot: Snapshot, row: Row) -> Proof:
    elsewhere = snapshot.vectors[row.nid or 0].elsewhere
    note = f"slab on node {row.nid}"
    return Proof(
        "misplaced-vector",
        f"{counted(len(elsewhere), 'vectors')} of slabs on node {row.nid} "
        f"{'is' if len(elsewhere) == 1 else 'are'} on another node",
        tuple(
            Evidence(address=vector, kind="obj_exts", nid=nid, page=slab, note=note)
            for vector, nid, slab in elsewhere
        ),
    )


CHECK = Check(
    name="placement",
    counter="none: all vectors",
    unit="references",
    found=(
        "vectors of `obj_cgroup` pointers that were allocated apart from their slab and lie on "
        "the slab's node"
    ),
    sources=("on_node",),
    places=("vectors",),
    rows=placement_rows,
    prove=_prove,
)
