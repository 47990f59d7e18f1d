# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Kernels that account kernel memory by node
------------------------------------------

There the node that is charged must be the node of the memory. Two rules are told apart by
what the counters follow: *physical*, each byte of a percpu allocation on the node of the page
that holds it, and *posted*, that of the series as posted in June 2026, which ignores where in
its page an allocation begins, so that one crossing into the next page is booked to the first
only. The types of a kernel that does it right and of one that does it as posted are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from memcg_inspect.audit.findings import MOST_EVIDENCE, Lead
from memcg_inspect.audit.kmem import kmem_rows
from memcg_inspect.audit.ledger import Entry, Ledger
from memcg_inspect.audit.objcg import objcg_rows
from memcg_inspect.audit.snapshot import Snapshot
from memcg_inspect.model import Evidence, Finding, Follows, Misplaced, Row

__all__ = ("counters_follow", "is_by_rule", "misplaced_findings", "rule_findings")

#: Identities whose rows depend on the rule.
_BY_RULE = ("kmem", "objcg_bytes", "references", "hierarchy")


def counters_follow(snapshot: Snapshot, rows: Sequence[Row]) -> Follows | None:
    """
    Return which of the two rules the counters follow.

    :param rows: those of the physical view
    :return: ``None`` on kernels that do not account by node
    """
    if snapshot.image.accounting != "kmem-per-node":
        return None
    physical = not any(r.status == "differs" and r.identity in _BY_RULE[:2] for r in rows)
    if not snapshot.posted:
        return "both" if physical else "neither"
    posted = not any(row.status == "differs" for row in _posted_rows(snapshot))
    if physical and posted:
        return "both"
    return "physical" if physical else "posted" if posted else "neither"


def _posted_rows(snapshot: Snapshot) -> list[Row]:
    ledger = Ledger()
    for entry, amount in snapshot.ledger:
        ledger.add(entry, amount.bytes, amount.charges)
    for (objcg, nid), size in snapshot.posted.items():
        ledger.add(Entry(objcg, "percpu", "data", nid), size, 0)
    shifted = replace(snapshot, ledger=ledger)
    return kmem_rows(shifted) + objcg_rows(shifted)


def is_by_rule(row: Row) -> bool:
    """Return whether a row that differs is explained by the posted rule."""
    return row.status == "differs" and row.identity in _BY_RULE


def rule_findings(snapshot: Snapshot, rows: Sequence[Row]) -> list[Lead]:
    """Make findings of kind ``rule`` of what the posted rule explains, by memcg and node."""
    cells: dict[tuple[int | None, int | None], Row] = {}
    for row in rows:
        if is_by_rule(row) and row.identity in ("kmem", "objcg_bytes"):
            cells.setdefault((row.memcg, row.nid), row)
    return [
        Lead(
            Finding(
                identity=row.identity,
                kind="rule",
                memcg=memcg,
                objcg=row.objcg,
                nid=nid,
                item=row.item,
                unit=row.unit,
                difference=row.difference,
                what=(
                    "percpu memory is booked by the posted rule, which ignores where in its page "
                    "an allocation begins, and not to the nodes that hold it"
                ),
                evidence_is="proof",
            ),
            None,
        )
        for (memcg, nid), row in cells.items()
    ]


def misplaced_findings(snapshot: Snapshot) -> list[Lead]:
    """Make findings of charges that were found on another node than their obj_cgroup."""
    cells: defaultdict[tuple[int | None, str, int | None, int], list[Misplaced]]
    cells = defaultdict(list)
    for charge in snapshot.misplaced:
        payer = snapshot.payer(charge.objcg)
        cells[payer, charge.kind, charge.charged_nid, charge.backing_nid].append(charge)
    return [
        Lead(_misplaced(snapshot, memcg, kind, charged, backing, charges), None)
        for (memcg, kind, charged, backing), charges in cells.items()
    ]


def _misplaced(
    snapshot: Snapshot,
    memcg: int | None,
    kind: str,
    charged: int | None,
    backing: int,
    charges: Sequence[Misplaced],
) -> Finding:
    size = sum(charge.bytes for charge in charges)
    return Finding(
        identity=kind,
        kind="skew",
        memcg=memcg,
        objcg=None,
        nid=backing,
        item=kind,
        unit="bytes",
        difference=size,
        what=f"{size:,} bytes of {kind} memory on node {backing} are charged to node {charged}",
        evidence_is="proof",
        evidence=tuple(
            Evidence(
                address=charge.address,
                kind=kind,
                nid=backing,
                bytes=charge.bytes,
                objcg=charge.objcg,
                memcg=snapshot.payer(charge.objcg),
            )
            for charge in charges[:MOST_EVIDENCE]
        ),
    )
