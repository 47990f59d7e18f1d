# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Kernels that account kernel memory by node
------------------------------------------

On such a kernel, the node of the obj_cgroup that pays must be the node of the memory. The
counters can follow one of two rules, for percpu memory and for zswap each:

* *physical*: each byte is booked to the node of the page that holds it;
* *posted*: the rule of the series as posted in June 2026, which looks at first pages only. It
  ignores where in its page a percpu allocation begins, so an allocation that crosses into the
  next page is booked to the first one. It books a zswap entry whole to the page in which the data
  begins.

Types do not tell the rules apart. This module finds out which rule the counters follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import NamedTuple

from memcg_inspect.checks.evidence_query import MOST_EVIDENCE
from memcg_inspect.checks.findings import PendingFinding
from memcg_inspect.checks.identities import kmem, objcg_bytes
from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.ledger import Entry, Ledger
from memcg_inspect.checks.registry import check_of
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Follows, Misplaced, PerNodeCharges, SplitKind
from memcg_inspect.report import Evidence, Finding, Row

__all__ = ("PerNodeJudgement", "judge_per_node")

#: The identities that tell the rules apart.
_BOOKED = (kmem.CHECK, objcg_bytes.CHECK)

#: What the posted rule does to each kind of memory.
_WHAT: Mapping[str, str] = {
    "percpu": (
        "percpu memory is booked by the posted rule, which ignores where in its page "
        "an allocation begins, and not to the nodes that hold it"
    ),
    "zswap": (
        "zswap entries are booked by the posted rule, whole to the page in which they begin, "
        "and not to the nodes that hold them"
    ),
}


class PerNodeJudgement(NamedTuple):
    """
    What accounting by node explains.

    :ivar follows: the rule that the counters follow, by kind of memory; ``None`` on kernels that
        do not account by node
    :ivar findings: its findings
    :ivar others: the rows that it does not explain
    """

    follows: Mapping[str, Follows] | None
    findings: list[PendingFinding]
    others: Sequence[Row]


def judge_per_node(snapshot: Snapshot, rows: Sequence[Row]) -> PerNodeJudgement:
    """
    Compare the counters with both rules of accounting by node.

    :param rows: of all identities, by the physical rule
    """
    charges = snapshot.per_node
    if charges is None:
        return PerNodeJudgement(None, [], rows)
    follows = _counters_follow(snapshot, charges, rows)
    findings = _rule_findings(snapshot, charges, rows, follows)
    others = [row for row in rows if not _is_by_rule(row)] if findings else rows
    return PerNodeJudgement(follows, _misplaced_findings(snapshot, charges) + findings, others)


def _counters_follow(
    snapshot: Snapshot, charges: PerNodeCharges, rows: Sequence[Row]
) -> dict[str, Follows]:
    """Return the rule that the counters follow, for each kind of memory."""
    kinds = [kind for kind, extra in charges.posted.items() if any(extra.values())]
    subsets = chain.from_iterable(combinations(kinds, n) for n in range(len(kinds) + 1))
    fitting = [posted for posted in subsets if _fits(snapshot, charges, rows, posted)]
    return {kind: _follows(kind in kinds, kind, fitting) for kind in charges.posted}


def _follows(differ: bool, kind: SplitKind, fitting: Sequence[Collection[SplitKind]]) -> Follows:
    """
    Return the rule that one kind follows.

    :param differ: whether the rules book different bytes
    :param fitting: each set of kinds for which the counters fit if these kinds, and no others,
        follow the posted rule
    """
    physical = any(kind not in posted for posted in fitting)
    posted = any(kind in posted for posted in fitting)
    if physical and (posted or not differ):
        return "both"
    return "physical" if physical else "posted" if posted else "neither"


def _fits(
    snapshot: Snapshot,
    charges: PerNodeCharges,
    rows: Sequence[Row],
    posted: Collection[SplitKind],
) -> bool:
    """Return whether the counters fit if these kinds, and no others, follow the posted rule."""
    if posted:
        ledger = Ledger()
        ledger.merge(snapshot.ledger)
        for kind in posted:
            for (objcg, nid), size in charges.posted[kind].items():
                ledger.add(Entry(objcg, kind, "posted", nid), size, 0)
        shifted = replace(snapshot, ledger=ledger)
        rows = mark_in_flight(shifted, [row for check in _BOOKED for row in check.rows(shifted)])
    return not any(r.status == "differs" and check_of(r) in _BOOKED for r in rows)


def _is_by_rule(row: Row) -> bool:
    """Return whether the posted rule can explain a row."""
    return row.status == "differs" and check_of(row).by_node_rule


def _rule_findings(
    snapshot: Snapshot,
    charges: PerNodeCharges,
    rows: Sequence[Row],
    follows: Mapping[str, Follows],
) -> list[PendingFinding]:
    """Return a finding of kind ``rule`` for each memcg and node that the posted rule explains."""
    findings = []
    for kind, posted in charges.posted.items():
        if follows[kind] != "posted":
            continue
        objcgs = {objcg for (objcg, _), extra in posted.items() if extra}
        payers = {(snapshot.payer(o), nid) for o, nid in posted if o in objcgs}
        cells: dict[tuple[int | None, int | None], Row] = {}
        for row in rows:
            touched = row.objcg in objcgs if row.objcg else (row.memcg, row.nid) in payers
            if touched and _is_by_rule(row) and check_of(row) in _BOOKED:
                cells.setdefault((row.memcg, row.nid), row)
        findings += [
            PendingFinding(_by_rule(snapshot, charges, kind, row)) for row in cells.values()
        ]
    return findings


def _by_rule(snapshot: Snapshot, charges: PerNodeCharges, kind: SplitKind, row: Row) -> Finding:
    straddling = [
        charge
        for charge in charges.straddling
        if charge.kind == kind
        and row.nid in (charge.charged_nid, charge.backing_nid)
        and snapshot.payer(charge.objcg) == row.memcg
    ]
    return Finding(
        identity=row.identity,
        kind="rule",
        memcg=row.memcg,
        objcg=row.objcg,
        nid=row.nid,
        item=row.item,
        unit=row.unit,
        difference=row.difference,
        what=_WHAT[kind],
        evidence_is="proof",
        evidence=_evidence(snapshot, straddling),
        evidence_total=len(straddling),
    )


def _misplaced_findings(snapshot: Snapshot, charges: PerNodeCharges) -> list[PendingFinding]:
    """Return findings for charges on another node than their obj_cgroup, by memcg and nodes."""
    cells: defaultdict[tuple[int | None, str, int | None, int], list[Misplaced]]
    cells = defaultdict(list)
    for charge in charges.misplaced:
        payer = snapshot.payer(charge.objcg)
        cells[payer, charge.kind, charge.charged_nid, charge.backing_nid].append(charge)
    return [
        PendingFinding(_misplaced(snapshot, memcg, kind, charged, backing, misplaced))
        for (memcg, kind, charged, backing), misplaced in cells.items()
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
        evidence=_evidence(snapshot, charges),
        evidence_total=len(charges),
    )


def _evidence(snapshot: Snapshot, charges: Sequence[Misplaced]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            address=charge.address,
            kind=charge.kind,
            nid=charge.backing_nid,
            bytes=charge.bytes,
            objcg=charge.objcg,
            memcg=snapshot.payer(charge.objcg),
        )
        for charge in charges[:MOST_EVIDENCE]
    )
