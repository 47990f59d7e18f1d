# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``reparenting``
------------------------

For each memcg that was taken offline: no obj_cgroup belongs to it any more.
``memcg_reparent_objcgs()`` gives them all to the parent.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check, Proof
from memcg_inspect.checks.half_done import CGROUP, HalfDone, pattern
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Objcg, counted
from memcg_inspect.report import Evidence, Row

__all__ = ("CHECK", "reparent_rows")


def reparent_rows(snapshot: Snapshot) -> list[Row]:
    """Count the obj_cgroups that still belong to memcgs taken offline."""
    rows = []
    for memcg in snapshot.memcgs.values():
        if not memcg.offline:
            continue
        nodes = [objcg.nid for objcg in _left_behind(snapshot, memcg.address)]
        for nid in dict.fromkeys(nodes) or [None]:
            key = RowKey("reparenting", "objcg->memcg", "references", memcg.address, nid)
            rows.append(make_row(key, {"left_behind": nodes.count(nid)}, {"allowed": 0}))
    return rows


def _left_behind(snapshot: Snapshot, memcg: int | None) -> list[Objcg]:
    return [objcg for objcg in snapshot.objcgs.values() if objcg.memcg == memcg]


def _prove(snapshot: Snapshot, row: Row) -> Proof:
    objcgs = [objcg for objcg in _left_behind(snapshot, row.memcg) if objcg.nid == row.nid]
    where = "" if row.nid is None else f" of node {row.nid}"
    return Proof(
        "not-reparented",
        f"the memcg is offline, but {counted(len(objcgs), 'obj_cgroups')}{where} still "
        f"{'belongs' if len(objcgs) == 1 else 'belong'} to it and not to its parent",
        tuple(
            Evidence(address=objcg.address, kind="obj_cgroup", nid=objcg.nid, objcg=objcg.address)
            for objcg in objcgs
        ),
    )


CHECK = Check(
    name="reparenting",
    counter="none: memcgs taken offline",
    unit="references",
    found="`obj_cgroup`s that such a memcg still owns; there must be none",
    sources=("left_behind",),
    places=("allowed",),
    rows=reparent_rows,
    half_done=HalfDone(pattern(CGROUP), lambda snapshot: 1),
    prove=_prove,
)
