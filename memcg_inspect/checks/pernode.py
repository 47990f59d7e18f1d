# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Kernels that account kernel memory by node
------------------------------------------

There the node that is charged must be the node of the memory. Two rules are told apart by
what the counters follow: *physical*, each byte on the node of the page that holds it, and
*posted*, that of the series as posted in June 2026, which looks at first pages only: it ignores
where in its page a percpu allocation begins, so that one crossing into the next page is booked to
the first, and it books a zswap entry whole to the page in which it begins. The types of a kernel
that does it right and of one that does it as posted are the same, and each kind of memory may
follow a rule of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations

from memcg_inspect.checks.findings import MOST_EVIDENCE, Lead
from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.kmem import kmem_rows
from memcg_inspect.checks.ledger import ChargeKind, Entry, Ledger
from memcg_inspect.checks.objcg import objcg_rows
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Evidence, Finding, Follows, Misplaced, Row

__all__ = ("counters_follow", "is_by_rule", "misplaced_findings", "rule_findings")

#: Identities whose rows depend on the rule.
_BY_RULE = ("kmem", "objcg_bytes", "references", "hierarchy")

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


def counters_follow(snapshot: Snapshot, rows: Sequence[Row]) -> dict[str, Follows] | None:
    """
    Return which of the two rules the counters follow, for each kind of memory.

    :param rows: those of the physical view
    :return: ``None`` on kernels that do not account by node
    """
    if snapshot.image.accounting != "kmem-per-node":
        return None
    kinds = [kind for kind, extra in snapshot.posted.items() if any(extra.values())]
    subsets = chain.from_iterable(combinations(kinds, n) for n in range(len(kinds) + 1))
    fitting = [posted for posted in subsets if _fits(snapshot, rows, posted)]
    return {kind: _follows(kind in kinds, kind, fitting) for kind in snapshot.posted}


def _follows(differ: bool, kind: ChargeKind, fitting: Sequence[Collection[ChargeKind]]) -> Follows:
    """:param fitting: kinds by the posted rule, of each choice at which all adds up"""
    physical = any(kind not in posted for posted in fitting)
    posted = any(kind in posted for posted in fitting)
    if physical and (posted or not differ):
        return "both"
    return "physical" if physical else "posted" if posted else "neither"


def _fits(snapshot: Snapshot, rows: Sequence[Row], posted: Collection[ChargeKind]) -> bool:
    """Whether all adds up if these kinds are booked by the posted rule, and others are not."""
    if posted:
        ledger = Ledger()
        for entry, amount in snapshot.ledger:
            ledger.add(entry, amount.bytes, amount.charges)
        for kind in posted:
            for (objcg, nid), size in snapshot.posted[kind].items():
                ledger.add(Entry(objcg, kind, "posted", nid), size, 0)
        shifted = replace(snapshot, ledger=ledger)
        rows = mark_in_flight(shifted, kmem_rows(shifted) + objcg_rows(shifted))
    return not any(r.status == "differs" and r.identity in ("kmem", "objcg_bytes") for r in rows)


def is_by_rule(row: Row) -> bool:
    """Return whether a row that differs is explained by the posted rule."""
    return row.status == "differs" and row.identity in _BY_RULE


def rule_findings(
    snapshot: Snapshot, rows: Sequence[Row], follows: Mapping[str, Follows]
) -> list[Lead]:
    """Make findings of kind ``rule`` of what the posted rule explains, by memcg and node."""
    leads = []
    for kind in snapshot.posted:
        if follows.get(kind) != "posted":
            continue
        objcgs = {objcg for (objcg, _), extra in snapshot.posted[kind].items() if extra}
        payers = {(snapshot.payer(o), nid) for o, nid in snapshot.posted[kind] if o in objcgs}
        cells: dict[tuple[int | None, int | None], Row] = {}
        for row in rows:
            touched = row.objcg in objcgs if row.objcg else (row.memcg, row.nid) in payers
            if touched and is_by_rule(row) and row.identity in ("kmem", "objcg_bytes"):
                cells.setdefault((row.memcg, row.nid), row)
        leads += [Lead(_by_rule(snapshot, kind, row), None) for row in cells.values()]
    return leads


def _by_rule(snapshot: Snapshot, kind: ChargeKind, row: Row) -> Finding:
    charges = [
        charge
        for charge in snapshot.straddling
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
        evidence=_evidence(snapshot, charges),
    )


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
        evidence=_evidence(snapshot, charges),
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
