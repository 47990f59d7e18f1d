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

from memcg_inspect.audit.ledger import Entry, Kind
from memcg_inspect.audit.slab import ITEMS
from memcg_inspect.audit.snapshot import Snapshot
from memcg_inspect.model import Evidence, Finding, Row, Skew

__all__ = ("MOST_EVIDENCE", "Suspect", "row_findings", "skew_findings", "stray_findings")

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

    kind: Kind
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
    return [_from_row(snapshot, row, differing) for row in differing]


def _from_row(snapshot: Snapshot, row: Row, differing: Sequence[Row]) -> Lead:
    difference = row.difference or 0
    partner = next((other for other in differing if _offsets(row, other)), None)
    suspect = _suspect(snapshot, row, partner, difference)
    finding = Finding(
        identity=row.identity,
        kind="counter-above-objects" if difference > 0 else "counter-below-objects",
        memcg=row.memcg,
        objcg=row.objcg,
        nid=row.nid,
        item=row.item,
        unit=row.unit,
        difference=difference,
        what=_sentence(snapshot, row, partner, difference),
        evidence_is="candidates",
    )
    return Lead(finding, suspect)


def _offsets(row: Row, other: Row) -> bool:
    return (
        (row.identity, row.nid, row.item) == (other.identity, other.nid, other.item)
        and row.memcg != other.memcg
        and (row.difference or 0) + (other.difference or 0) == 0
    )


def _suspect(snapshot: Snapshot, row: Row, partner: Row | None, difference: int) -> Suspect | None:
    """The objects that may be charged where they should not be."""
    if row.identity != "slab":
        return None
    # Objects found beyond the counter are this memcg's; those missing from it may be
    # charged to the one that has as much too much.
    holder, other = (row, partner) if difference < 0 else (partner, row)
    if holder is None:
        return None
    return Suspect(
        kind="slab",
        payers=_objcgs_of(snapshot, holder.memcg),
        detail=_DETAIL[row.item],
        nid=row.nid,
        divides=abs(difference),
        neighbours=_objcgs_of(snapshot, other.memcg) if other is not None else frozenset(),
    )


def _objcgs_of(snapshot: Snapshot, memcg: int | None) -> frozenset[int]:
    return frozenset(a for a in snapshot.objcgs if snapshot.payer(a) == memcg)


def _sentence(snapshot: Snapshot, row: Row, partner: Row | None, difference: int) -> str:
    where = "" if row.nid is None else f" on node {row.nid}"
    amount = f"{abs(difference):,} {row.unit}"
    more = "more" if difference > 0 else "less"
    text = f"{row.item}{where} claims {amount} {more} than the objects found"
    if partner is None or partner.memcg is None or row.memcg is None:
        return text
    memcg, other = snapshot.memcgs[row.memcg], snapshot.memcgs[partner.memcg]
    if _owner(snapshot, memcg.parent) == other.address:
        why = (
            "its parent is off by as much the other way: the folded counter of this memcg alone, "
            "or the owner of an object, is wrong"
        )
    elif _owner(snapshot, other.parent) == memcg.address:
        why = "a child, whose counter this one's share is taken from, is off the other way"
    else:
        why = "another memcg is off the other way: charges may have changed owner"
    return f"{text}; {why}"


def _owner(snapshot: Snapshot, memcg: int | None) -> int | None:
    return None if memcg is None else snapshot.memcgs[memcg].payer


def stray_findings(snapshot: Snapshot) -> list[Lead]:
    """Find charges whose payer is no obj_cgroup (or memcg) at all: an address proves it."""
    if not snapshot.complete("objcgs", "memcgs"):
        return []  # it may be one that could not be read
    strays: dict[tuple[Kind, int], list[Entry]] = {}
    for entry, _ in snapshot.ledger:
        if snapshot.payer(entry.payer) is None:
            strays.setdefault((entry.kind, entry.payer), []).append(entry)
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
        for (kind, payer), entries in strays.items()
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
