# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``objcg_sets``
-----------------------

For each ``struct obj_cgroup_set``: its reference count is the number of its entries, and each
entry is the obj_cgroup of that node and refers to the set. ``obj_cgroup_alloc()`` makes an entry
and takes a reference, ``obj_cgroup_release()`` undoes both. Only kernels that account kernel memory
by node have sets.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check, Proof
from memcg_inspect.checks.half_done import HalfDone, pattern
from memcg_inspect.checks.rows import RowKey, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import ObjcgSet, counted
from memcg_inspect.report import Evidence, Row

__all__ = ("CHECK", "objcg_set_rows")


def objcg_set_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the reference count of each set with its entries."""
    reason = None
    if not snapshot.complete("objcgs", "memcgs"):
        reason = "obj_cgroups are not all in the image"
    rows = []
    for address, members in _members(snapshot).items():
        found = snapshot.objcg_sets.get(address)
        objcg = snapshot.objcgs[members[0]]
        rows.append(
            make_row(
                RowKey(
                    "objcg_sets",
                    "set->refcnt",
                    "references",
                    snapshot.payer(objcg.address),
                    None,
                    objcg.address,
                ),
                {} if found is None else {"entries": len(_right(snapshot, found))},
                None if found is None else {"refcnt": found.refs},
                missing_if(reason or _why_moving(snapshot, objcg.memcg)),
            )
        )
    return rows


def _members(snapshot: Snapshot) -> dict[int, list[int]]:
    """Return the obj_cgroups that refer to each set."""
    members: dict[int, list[int]] = {}
    for objcg in snapshot.objcgs.values():
        if objcg.set:
            members.setdefault(objcg.set, []).append(objcg.address)
    return members


def _right(snapshot: Snapshot, found: ObjcgSet) -> list[int]:
    """Return the entries that are the obj_cgroup of their node, and refer to the set."""
    return [
        entry
        for nid, entry in found.entries.items()
        if (objcg := snapshot.objcgs.get(entry)) is not None
        and (objcg.nid, objcg.set) == (nid, found.address)
    ]


def _why_moving(snapshot: Snapshot, memcg: int) -> str | None:
    # mem_cgroup_css_online() has a reference of its own while it makes the entries.
    css, known = snapshot.css.get(memcg), snapshot.memcgs.get(memcg)
    if css is None or css.is_online or known is None or known.state == "dying":
        return None
    return "the memcg is being created"


def _not_kept(snapshot: Snapshot) -> str | None:
    if snapshot.image.accounting == "kmem-per-node":
        return None
    return "this kernel has no struct obj_cgroup_set"


def _prove(snapshot: Snapshot, row: Row) -> Proof:
    found = snapshot.objcg_sets[snapshot.objcgs[row.objcg or 0].set]
    right = set(_right(snapshot, found))
    wrong = {nid: entry for nid, entry in found.entries.items() if entry and entry not in right}
    difference = row.off
    amount = counted(abs(difference), "references")
    return Proof(
        "objcg-set",
        f"the obj_cgroup_set {found.address:#x} has {amount} "
        f"{'more' if difference > 0 else 'less'} than entries that are obj_cgroups of their nodes",
        (
            Evidence(address=found.address, kind="obj_cgroup_set"),
            *(Evidence(address=entry, kind="obj_cgroup", nid=nid) for nid, entry in wrong.items()),
        ),
    )


CHECK = Check(
    name="objcg_sets",
    counter="the reference count of each `struct obj_cgroup_set`",
    unit="references",
    found="entries of the set that are the `obj_cgroup` of their node, and refer to the set",
    sources=("entries",),
    places=("refcnt",),
    rows=objcg_set_rows,
    not_kept=_not_kept,
    half_done=HalfDone(pattern("obj_cgroup_release", "obj_cgroup_set"), lambda snapshot: 1),
    prove=_prove,
)
