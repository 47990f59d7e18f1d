# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Findings
--------

Turns rows that differ, and charges that no rule allows, into findings. What memory must be
looked at again for evidence is asked for by :class:`Suspect`; the answers come back as
:class:`~memcg_inspect.model.Evidence`, so that nothing here reads memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from memcg_inspect.checks.ledger import ChargeKind, Entry
from memcg_inspect.checks.rules import is_task_wrong, left_behind
from memcg_inspect.checks.slab import ITEMS
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Evidence, Finding, Row, Skew, counted

__all__ = ("MOST_EVIDENCE", "Suspect", "row_findings", "skew_findings", "orphan_findings")

#: Pieces of evidence listed with one finding.
MOST_EVIDENCE = 10

_DETAIL = {item: detail for detail, item in ITEMS.items()}


class Suspect(NamedTuple):
    """
    Which charges to list as evidence.

    :ivar payers: the obj_cgroups they are charged to
    :ivar detail: ``None`` for any
    :ivar nid: backing node; ``None`` for any
    :ivar divides: bytes that a number of equal charges must add up to; 0 for any
    :ivar neighbours: obj_cgroups; charges among many of these in one slab come first
    """

    kind: ChargeKind
    payers: frozenset[int]
    detail: str | None = None
    nid: int | None = None
    divides: int = 0
    neighbours: frozenset[int] = frozenset()


class Lead(NamedTuple):
    """A finding that waits for its evidence."""

    finding: Finding
    suspect: Suspect | None


def row_findings(snapshot: Snapshot, rows: Sequence[Row]) -> list[Lead]:
    """Make a finding of each row that differs."""
    differing = [row for row in rows if row.status == "differs"]
    leads = []
    for row in differing:
        if row.identity == "placement":
            leads.append(_misplaced(snapshot, row))
        elif row.identity == "reparenting":
            leads.append(_left_behind(snapshot, row))
        elif row.identity == "task_objcg":
            leads.append(_wrong_tasks(snapshot, row))
        else:
            partner = next((other for other in differing if _offsets(row, other)), None)
            leads.append(_from_row(snapshot, row, partner))
    return leads


def _from_row(snapshot: Snapshot, row: Row, partner: Row | None) -> Lead:
    difference = row.difference or 0
    finding = _finding(
        row,
        kind=_kind(row, difference),
        what=_sentence(snapshot, row, partner, difference),
    )
    return Lead(finding, _suspect(snapshot, row, partner, difference))


def _finding(
    row: Row,
    kind: str,
    what: str,
    evidence_is: Literal["proof", "candidates"] = "candidates",
    evidence: tuple[Evidence, ...] = (),
) -> Finding:
    return Finding(
        identity=row.identity,
        kind=kind,
        memcg=row.memcg,
        objcg=row.objcg,
        nid=row.nid,
        item=row.item,
        unit=row.unit,
        difference=row.difference,
        what=what,
        evidence_is=evidence_is,
        evidence=evidence,
    )


def _kind(row: Row, difference: int) -> str:
    if row.identity == "references":
        return "unknown-references" if difference > 0 else "missing-references"
    return "counter-above-objects" if difference > 0 else "counter-below-objects"


def _misplaced(snapshot: Snapshot, row: Row) -> Lead:
    vectors = snapshot.vectors[row.nid if row.nid is not None else 0]
    number = len(vectors.elsewhere)
    evidence = tuple(
        Evidence(
            address=vector, kind="obj_exts", nid=nid, page=slab, note=f"slab on node {row.nid}"
        )
        for vector, nid, slab in vectors.elsewhere[:MOST_EVIDENCE]
    )
    what = f"{counted(number, 'vectors')} of slabs on node {row.nid} on another node"
    return Lead(_finding(row, "misplaced-vector", what, "proof", evidence), None)


def _left_behind(snapshot: Snapshot, row: Row) -> Lead:
    objcgs = [o for o in left_behind(snapshot, row.memcg or 0) if o.nid == row.nid]
    evidence = tuple(
        Evidence(address=o.address, kind="obj_cgroup", nid=o.nid, objcg=o.address)
        for o in objcgs[:MOST_EVIDENCE]
    )
    where = "" if row.nid is None else f" of node {row.nid}"
    what = (
        "the memcg is offline, and was not left to its parent with all it has: "
        f"{counted(len(objcgs), 'obj_cgroups')}{where}"
    )
    return Lead(_finding(row, "not-reparented", what, "proof", evidence), None)


def _wrong_tasks(snapshot: Snapshot, row: Row) -> Lead:
    wrong = [
        task
        for task in snapshot.tasks
        if snapshot.payer(task.memcg) == row.memcg and is_task_wrong(snapshot, task)
    ]
    evidence = tuple(
        Evidence(
            address=task.address,
            kind="task",
            objcg=next((o for o in task.objcgs if o), None),
            memcg=row.memcg,
            note=f"{task.comm} ({task.pid})",
        )
        for task in wrong[:MOST_EVIDENCE]
    )
    what = f"{counted(len(wrong), 'tasks')} with a cached obj_cgroup of another memcg than its own"
    return Lead(_finding(row, "stale-task-objcg", what, "proof", evidence), None)


def _offsets(row: Row, other: Row) -> bool:
    return (
        (row.identity, row.item) == (other.identity, other.item)
        # obj_cgroups have a node, but one can be off against another of any node
        and (row.nid == other.nid or row.objcg is not None)
        and (row.memcg, row.objcg) != (other.memcg, other.objcg)
        and (row.difference or 0) + (other.difference or 0) == 0
    )


#: What charges the rows of an identity are made of, and the bytes of the row's unit.
_CHARGES: dict[str, ChargeKind] = {
    "slab": "slab",
    "objcg_bytes": "slab",
    "percpu": "percpu",
    "zswap": "zswap",
    "kernel_stack": "kmem",
    "pagetable": "kmem",
    "vmalloc": "kmem",
}


def _suspect(snapshot: Snapshot, row: Row, partner: Row | None, difference: int) -> Suspect | None:
    """The charges that may have an owner that they should not have."""
    kind = _CHARGES.get(row.identity)
    # Charges found beyond the counter are this memcg's; those missing from it may be
    # charged to the one that has as much too much.
    holder, other = (row, partner) if difference < 0 else (partner, row)
    if kind is None or holder is None:
        return None
    size = {"bytes": 1, "KiB": 1024, "pages": snapshot.image.page_size}.get(row.unit, 1)
    return Suspect(
        kind=kind,
        payers=_payers(snapshot, holder),
        detail=_DETAIL.get(row.item),
        nid=None if row.objcg is not None else row.nid,
        divides=abs(difference) * size,
        neighbours=_payers(snapshot, other) if other is not None else frozenset(),
    )


def _payers(snapshot: Snapshot, row: Row) -> frozenset[int]:
    if row.objcg is not None:
        return frozenset({row.objcg})
    return _objcgs_of(snapshot, row.memcg)


def _objcgs_of(snapshot: Snapshot, memcg: int | None) -> frozenset[int]:
    return frozenset(a for a in snapshot.objcgs if snapshot.payer(a) == memcg)


def _sentence(snapshot: Snapshot, row: Row, partner: Row | None, difference: int) -> str:
    amount = counted(abs(difference), row.unit)
    more = "more" if difference > 0 else "less"
    if row.identity == "references":
        rest = (
            "a leak, or a holder that is not known here"
            if difference > 0
            else ("something uses it without a reference")
        )
        return f"the refcount of obj_cgroup {row.objcg:#x} is {amount} {more} than found: {rest}"
    if row.identity == "objcg_bytes":
        return (
            f"the bytes charged to obj_cgroup {row.objcg:#x} are {abs(difference):,} "
            f"{'short of' if difference > 0 else 'beyond'} whole pages"
        )
    where = "" if row.nid is None else f" on node {row.nid}"
    text = f"{row.item}{where} claims {amount} {more} than was found"
    if row.identity == "hierarchy":
        text += " in all of its subtree"
    if partner is None or partner.memcg is None or row.memcg is None:
        return text
    return f"{text}; {_relation(snapshot, row.memcg, partner.memcg)}"


def _relation(snapshot: Snapshot, row: int, partner: int) -> str:
    memcg, other = snapshot.memcgs[row], snapshot.memcgs[partner]
    if _owner(snapshot, memcg.parent) == other.address:
        return (
            "its parent is off by as much the other way: the folded counter of this memcg alone, "
            "or the owner of a charge, is wrong"
        )
    if _owner(snapshot, other.parent) == memcg.address:
        return "a child, whose counter this one's share is taken from, is off the other way"
    return "another memcg is off the other way: charges may have changed owner"


def _owner(snapshot: Snapshot, memcg: int | None) -> int | None:
    return None if memcg is None else snapshot.memcgs[memcg].payer


def orphan_findings(snapshot: Snapshot) -> list[Lead]:
    """Find charges whose payer is no obj_cgroup (or memcg) at all: an address proves it."""
    if not snapshot.complete("objcgs", "memcgs"):
        return []  # it may be one that could not be read
    orphans: dict[tuple[ChargeKind, int], list[Entry]] = {}
    for entry, _ in snapshot.ledger:
        if snapshot.payer(entry.payer) is None:
            orphans.setdefault((entry.kind, entry.payer), []).append(entry)
    return [
        Lead(
            Finding(
                identity=kind,
                kind="unknown-objcg",
                memcg=None,
                objcg=payer,
                nid=entries[0].nid if len({e.nid for e in entries}) == 1 else None,
                item=kind,
                unit="bytes",
                difference=None,
                what=f"{kind} memory is charged to {payer:#x}, which is no obj_cgroup of any memcg",
                evidence_is="proof",
            ),
            Suspect(kind=kind, payers=frozenset({payer})),
        )
        for (kind, payer), entries in orphans.items()
    ]


def skew_findings(snapshot: Snapshot, skew: Sequence[Skew]) -> list[Lead]:
    """On kernels that account per node, find charges whose node is not their obj_cgroup's."""
    if snapshot.image.accounting != "kmem-per-node":
        return []
    leads = []
    for cell in skew:
        if cell.kind not in ("slab", "kmem") or cell.charged_nid in (None, cell.backing_nid):
            continue
        objcgs = frozenset(
            a
            for a in _objcgs_of(snapshot, cell.memcg)
            if snapshot.objcgs[a].nid == cell.charged_nid
        )
        finding = Finding(
            identity=cell.kind,
            kind="skew",
            memcg=cell.memcg,
            objcg=None,
            nid=cell.backing_nid,
            item=cell.kind,
            unit="bytes",
            difference=cell.bytes,
            what=(
                f"{cell.bytes:,} bytes of {cell.kind} memory on node {cell.backing_nid} are "
                f"charged to node {cell.charged_nid}"
            ),
            evidence_is="proof",
        )
        kind: Literal["slab", "kmem"] = "slab" if cell.kind == "slab" else "kmem"
        leads.append(Lead(finding, Suspect(kind=kind, payers=objcgs, nid=cell.backing_nid)))
    return leads


def attach(lead: Lead, evidence: Mapping[Suspect, Sequence[Evidence]]) -> Finding:
    """Give a finding its evidence."""
    if lead.suspect is None:
        return lead.finding
    found = tuple(evidence.get(lead.suspect, ()))[:MOST_EVIDENCE]
    return Finding(**{**vars(lead.finding), "evidence": found})
