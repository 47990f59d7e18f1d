# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``objcg_lists``
------------------------

For each memcg, and each node on kernels with an obj_cgroup for each: the obj_cgroups that it refers
to, or that are on its list, are its own and of that node.

``memcg_reparent_objcgs()`` puts the obj_cgroups of a removed memcg on the list of the parent, for
the same node, and sets their ``memcg`` to the parent. The removed memcg still refers to its first
obj_cgroup (``orig_objcg``), which then belongs to an ancestor. Where ``struct obj_cgroup`` has a
``nid`` (the per-memcg-per-node series), it is that node. On other kernels, an obj_cgroup is of the
node where it was found first, and all other places must agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from memcg_inspect.checks.check import Check, Proof
from memcg_inspect.checks.half_done import CGROUP, HalfDone, pattern
from memcg_inspect.checks.rows import RowKey, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Objcg, ObjcgPlace, counted
from memcg_inspect.report import Evidence, Row

__all__ = ("CHECK", "objcg_list_rows")

Cell = tuple[int, int | None]


def objcg_list_rows(snapshot: Snapshot) -> list[Row]:
    """Count the obj_cgroups of each memcg and node, and those that belong there."""
    rows = []
    for (memcg, nid), places in _places(snapshot).items():
        own = sum(not _why_wrong(snapshot, objcg, place) for objcg, place in places)
        key = RowKey("objcg_lists", "objcg_list", "references", memcg, nid)
        # One that does not belong there is a fault, whatever else is on the list.
        unread = memcg in snapshot.unreadable and own == len(places)
        missing = missing_if("its obj_cgroups are not all in the image" if unread else None)
        rows.append(make_row(key, {"own": own}, {"listed": len(places)}, missing))
    return rows


def _places(snapshot: Snapshot) -> Mapping[Cell, list[tuple[Objcg, ObjcgPlace]]]:
    cells: defaultdict[Cell, list[tuple[Objcg, ObjcgPlace]]] = defaultdict(list)
    for objcg in snapshot.objcgs.values():
        for place in objcg.places:
            cells[place.memcg, place.nid].append((objcg, place))
    return cells


def _why_wrong(snapshot: Snapshot, objcg: Objcg, place: ObjcgPlace) -> str | None:
    """Return why an obj_cgroup does not belong to a place; ``None`` if it does."""
    if place.nid is not None and objcg.nid != place.nid:
        return f"it is of node {objcg.nid}"
    # While the memcg is being removed, its obj_cgroups may be its own or those of an ancestor.
    owner: int | None = place.memcg
    while owner is not None and owner != objcg.memcg:
        memcg = snapshot.memcgs[owner]
        owner = memcg.parent if memcg.payer != owner else None
    return None if owner is not None else f"it belongs to the memcg {objcg.memcg:#x}"


def _prove(snapshot: Snapshot, row: Row) -> Proof:
    wrong = [
        (objcg, place, why)
        for objcg, place in _places(snapshot)[row.memcg or 0, row.nid]
        if (why := _why_wrong(snapshot, objcg, place)) is not None
    ]
    where = "" if row.nid is None else f" for node {row.nid}"
    return Proof(
        "misplaced-objcg",
        f"the memcg has {counted(len(wrong), 'obj_cgroups')}{where} that "
        f"{'does' if len(wrong) == 1 else 'do'} not belong there",
        tuple(
            Evidence(
                address=objcg.address,
                kind="obj_cgroup",
                nid=objcg.nid,
                objcg=objcg.address,
                memcg=snapshot.payer(objcg.address),
                note=f"in {place.member}, but {why}",
            )
            for objcg, place, why in wrong
        ),
    )


CHECK = Check(
    name="objcg_lists",
    counter="none: `objcg`, `orig_objcg` and `objcg_list` of the memcg, or of the memcg on a node",
    unit="references",
    found=(
        "the `obj_cgroup`s there that belong to the memcg and the node; for a removed memcg, to an "
        "ancestor"
    ),
    sources=("own",),
    places=("listed",),
    rows=objcg_list_rows,
    half_done=HalfDone(pattern(CGROUP), lambda snapshot: 1),
    prove=_prove,
)
