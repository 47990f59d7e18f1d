# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``placement``
----------------------

For each node: the vectors of obj_cgroup pointers that its slabs have outside the slab are in memory
of ``kmalloc()``, on this node or on another one.

``memcg_alloc_slab_cgroups()`` (6.1) and ``alloc_slab_obj_exts()`` pass ``slab_nid()`` to an
allocation that may fall back to another node: ``OBJCGS_CLEAR_MASK`` does not add
``__GFP_THISNODE``, and since 7.3 removes it. So if a node is full, vectors are on other nodes. The
row counts them. A vector in memory that is not allocated, or not by ``kmalloc()``, is a finding.
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
    """Count the vectors on the node of their slab, and on other nodes."""
    rows = []
    for nid, vectors in sorted(snapshot.vectors.items()):
        row = make_row(
            RowKey("placement", "obj_exts", "references", nid=nid),
            {
                "on_node": vectors.total - vectors.elsewhere - len(vectors.dangling),
                "elsewhere": vectors.elsewhere,
            },
            {"vectors": vectors.total},
        )
        if row.status == "exact" and snapshot.ledger.may_miss("slab", None, nid):
            reason = "slabs on this node are not all in the image"
            row = replace(row, status="unverifiable", reason=reason)
        rows.append(row)
    return rows


def _prove(snapshot: Snapshot, row: Row) -> Proof:
    dangling = snapshot.vectors[row.nid or 0].dangling
    note = f"slab on node {row.nid}"
    return Proof(
        "dangling-vector",
        f"{counted(len(dangling), 'vectors')} of slabs on node {row.nid} "
        f"{'is' if len(dangling) == 1 else 'are'} not in memory that kmalloc() returned",
        tuple(
            Evidence(address=vector, kind="obj_exts", nid=nid, page=slab, note=note)
            for vector, nid, slab in dangling
        ),
    )


CHECK = Check(
    name="placement",
    counter="none: all vectors",
    unit="references",
    found=(
        "vectors of `obj_cgroup` pointers outside their slab, in memory that `kmalloc()` returned: "
        "those on the node of the slab, and those on other nodes, which is legal"
    ),
    sources=("on_node", "elsewhere"),
    places=("vectors",),
    rows=placement_rows,
    prove=_prove,
)
