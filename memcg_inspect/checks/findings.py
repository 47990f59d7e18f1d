# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Findings
--------

Makes findings of rows that differ, and of charges that break a rule of the kernel. Nothing here
reads memory. An :class:`~memcg_inspect.checks.evidence_query.EvidenceQuery` describes the charges
to list as evidence, and :func:`attach` adds those that were found.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from memcg_inspect.checks.check import Charges, Check
from memcg_inspect.checks.evidence_query import MOST_EVIDENCE, Candidates, EvidenceQuery
from memcg_inspect.checks.ledger import ChargeKind, Entry
from memcg_inspect.checks.registry import check_of
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import FreedPage, counted
from memcg_inspect.report import Evidence, Finding, Row, Skew

__all__ = (
    "PendingFinding",
    "attach",
    "candidate_sizes",
    "freed_findings",
    "orphan_findings",
    "row_findings",
    "skew_findings",
)


#: Addresses that are no obj_cgroups, of one kind of memory, that have a finding each. More of them
#: have one cause: a vector of pointers was overwritten, or is looked for in the wrong place.
_MOST_ORPHANS = 100


class PendingFinding(NamedTuple):
    """
    A finding that may still need evidence.

    :ivar finding: the finding
    :ivar queries: charges to search for as evidence; none if the finding has its evidence, or if
        there can be none
    """

    finding: Finding
    queries: tuple[EvidenceQuery, ...] = ()


def row_findings(snapshot: Snapshot, rows: Sequence[Row]) -> list[PendingFinding]:
    """Make a finding of each row that differs."""
    differing = [row for row in rows if row.status == "differs"]
    # There may be as many as rows: each is compared only with those of its own amount.
    alike: defaultdict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in differing:
        alike[row.identity, row.item, row.off].append(row)
    return [
        _from_row(snapshot, row, alike.get((row.identity, row.item, -row.off), ()))
        for row in differing
    ]


def _from_row(snapshot: Snapshot, row: Row, opposite: Sequence[Row]) -> PendingFinding:
    check, difference = check_of(row), row.off
    if check.prove is not None:
        proof = check.prove(snapshot, row)
        finding = replace(
            _finding(row, proof.kind, proof.what),
            evidence_is="proof",
            evidence=proof.evidence[:MOST_EVIDENCE],
            evidence_total=len(proof.evidence),
        )
        return PendingFinding(finding)
    partner = next((other for other in opposite if _offsets(row, other)), None)
    what = check.sentence(row)
    # An obj_cgroup has no counter that its parent's share is computed from.
    if row.objcg is None and partner is not None and row.memcg and partner.memcg:
        what += f"; {_relation(snapshot, row.memcg, partner.memcg)}"
    finding = _finding(row, check.above if difference > 0 else check.below, what)
    return PendingFinding(finding, tuple(_queries(snapshot, check, row, partner)))


def _finding(row: Row, kind: str, what: str) -> Finding:
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
        evidence_is="candidates",
    )


def _offsets(row: Row, other: Row) -> bool:
    """Return whether another row differs by as much in the opposite direction."""
    return (
        (row.identity, row.item) == (other.identity, other.item)
        # obj_cgroups have a node, but one can be off against another of any node
        and (row.nid == other.nid or row.objcg is not None)
        and (row.memcg, row.objcg) != (other.memcg, other.objcg)
        and row.off + other.off == 0
    )


def _queries(
    snapshot: Snapshot, check: Check, row: Row, partner: Row | None
) -> Iterator[EvidenceQuery]:
    """Return queries for the charges that may point to the wrong obj_cgroup."""
    if check.charges is None:
        return
    difference, page = row.off, snapshot.image.page_size
    if check.charges.modulo_page:
        # A remainder does not tell who has too many charges: 8 bytes too many are as far beyond
        # whole pages as a page less 8 bytes too few.
        for holder, other in ((row, partner), (partner, row)):
            if holder is not None:
                amount = -holder.off % page
                yield from _of_holder(snapshot, check.charges, holder, other, amount, page)
        return
    # If more was found than the counter claims, the wrong charge is among those of this memcg. If
    # less was found, it may be charged to the partner, which has too much by the same amount.
    holder, other = (row, partner) if difference < 0 else (partner, row)
    if holder is not None:
        size = {"KiB": 1024, "pages": page}.get(row.unit, 1)
        yield from _of_holder(snapshot, check.charges, holder, other, abs(difference) * size)


def _of_holder(
    snapshot: Snapshot,
    charges: Charges,
    holder: Row,
    other: Row | None,
    amount: int,
    modulo: int = 0,
) -> Iterator[EvidenceQuery]:
    """
    Return queries for the charges of an obj_cgroup or memcg that has too many.

    :param holder: the row of the one that has too many
    :param other: the row of the one that has too few; ``None`` if that is not known
    """
    for kind in charges.kinds:
        if kind == "percpu" and modulo and snapshot.image.accounting == "kmem-per-node":
            continue  # its bytes are split among the obj_cgroups of several nodes
        if kind == "zswap" and not snapshot.features.default_hierarchy:
            continue  # its bytes are not charged: obj_cgroup_charge_zswap()
        yield EvidenceQuery(
            kind=kind,
            payers=_payers(snapshot, holder),
            detail=charges.details.get(holder.item),
            nid=None if holder.objcg is not None else holder.nid,
            amount=amount,
            modulo=modulo,
            neighbours=_payers(snapshot, other) if other is not None else frozenset(),
        )


def _payers(snapshot: Snapshot, row: Row) -> frozenset[int]:
    if row.objcg is not None:
        return frozenset({row.objcg})
    return _objcgs_of(snapshot, row.memcg)


def _objcgs_of(snapshot: Snapshot, memcg: int | None) -> frozenset[int]:
    return frozenset(a for a in snapshot.objcgs if snapshot.payer(a) == memcg)


def _relation(snapshot: Snapshot, row: int, partner: int) -> str:
    """Say how two memcgs that differ by as much in opposite directions are related."""
    memcg, other = snapshot.memcgs[row], snapshot.memcgs[partner]
    if _owner(snapshot, memcg.parent) == other.address:
        return (
            "its parent differs by as much in the opposite direction: either the folded counter of "
            "this memcg alone or the owner of a charge is wrong"
        )
    if _owner(snapshot, other.parent) == memcg.address:
        return (
            "a child, whose counter is subtracted from this memcg's, differs by as much in the "
            "opposite direction"
        )
    return (
        "another memcg differs by as much in the opposite direction: a charge may have changed "
        "owner"
    )


def _owner(snapshot: Snapshot, memcg: int | None) -> int | None:
    return None if memcg is None else snapshot.memcgs[memcg].payer


def orphan_findings(snapshot: Snapshot) -> list[PendingFinding]:
    """
    Make findings of orphans: charges to an address that is no obj_cgroup and no memcg.

    There is one for each address, or one for all, if a vector of pointers was overwritten.
    """
    if not snapshot.complete("objcgs", "memcgs"):
        return []  # it may be one that could not be read
    orphans: dict[ChargeKind, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry, _ in snapshot.ledger:
        if snapshot.payer(entry.payer) is None:
            orphans[entry.kind][entry.payer].append(entry)
    found = []
    for kind, by_payer in orphans.items():
        one_by_one, every = len(by_payer) <= _MOST_ORPHANS, sorted(by_payer)
        for payers in [[payer] for payer in every] if one_by_one else [every]:
            entries = [entry for payer in payers for entry in by_payer[payer]]
            query = EvidenceQuery(kind=kind, payers=frozenset(payers))
            found.append(PendingFinding(_orphan(kind, payers, entries), (query,)))
    return found


def _orphan(kind: ChargeKind, payers: Sequence[int], entries: Sequence[Entry]) -> Finding:
    first = f"{payers[0]:#x}"
    where = (
        f"{first}, which is not an obj_cgroup of any memcg"
        if len(payers) == 1
        else f"{len(payers):,} addresses that are not obj_cgroups of any memcg, such as {first}"
    )
    return Finding(
        identity=kind,
        kind="unknown-objcg",
        memcg=None,
        objcg=payers[0] if len(payers) == 1 else None,
        nid=entries[0].nid if len({e.nid for e in entries}) == 1 else None,
        item=kind,
        unit="bytes",
        difference=None,
        what=f"{kind} memory is charged to {where}",
        evidence_is="proof",
    )


def freed_findings(snapshot: Snapshot) -> list[PendingFinding]:
    """
    Make findings of free pages that are still charged, by memcg and node.

    ``free_pages_prepare()`` uncharges a page before it is on any list of free pages. The counters
    claim the pages, too, so that no row differs.
    """
    freed: dict[tuple[int | None, int], list[FreedPage]] = {}
    for page in snapshot.freed:
        freed.setdefault((snapshot.payer(page.objcg), page.nid), []).append(page)
    return [
        PendingFinding(
            Finding(
                identity="kmem",
                kind="charged-free-page",
                memcg=memcg,
                objcg=None,
                nid=nid,
                item="free pages",
                unit="pages",
                difference=None,
                what=(
                    f"{counted(len(pages), 'pages')} in the page allocator's free lists on node "
                    f"{nid} {'is' if len(pages) == 1 else 'are'} still charged as kernel memory"
                ),
                evidence_is="proof",
                evidence=tuple(
                    Evidence(
                        address=page.page,
                        kind="kmem",
                        nid=page.nid,
                        page=page.page,
                        objcg=page.objcg,
                        memcg=memcg,
                    )
                    for page in pages[:MOST_EVIDENCE]
                ),
                evidence_total=len(pages),
            ),
        )
        for (memcg, nid), pages in freed.items()
    ]


def skew_findings(snapshot: Snapshot, skew: Sequence[Skew]) -> list[PendingFinding]:
    """
    Make findings of charges on another node than their obj_cgroup, where the kernel rules it out.

    A user page or a page of page cache is charged to the obj_cgroup of its node since 7.2:
    ``folio_lruvec_lock()`` relies on it (``get_migration_objcg()``). Linux 7.1 has an obj_cgroup
    for each node, and charges that of the task's node (``charge_memcg()``). Kernel memory is
    charged to that of its node only on kernels that account it by node.
    """
    kinds = {"lru"} if snapshot.features.lru_charged_to_own_node else set[str]()
    if snapshot.image.accounting == "kmem-per-node":
        kinds |= {"slab", "kmem"}
    findings = []
    for cell in skew:
        if cell.kind not in kinds or cell.charged_nid in (None, cell.backing_nid):
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
        kind = cast("ChargeKind", cell.kind)
        query = EvidenceQuery(kind=kind, payers=objcgs, nid=cell.backing_nid)
        findings.append(PendingFinding(finding, (query,)))
    return findings


def candidate_sizes(
    pending: PendingFinding, evidence: Mapping[EvidenceQuery, Candidates]
) -> Counter[tuple[str, int, int]]:
    """Return the number of candidates by kind, bytes of one charge and ``struct obj_cgroup *``."""
    found: Counter[tuple[str, int, int]] = Counter()
    for query in pending.queries:
        if query in evidence:
            found.update(evidence[query].sizes)
    return found


def attach(pending: PendingFinding, evidence: Mapping[EvidenceQuery, Candidates]) -> Finding:
    """Give a finding its evidence."""
    found = [evidence[query] for query in pending.queries if query in evidence]
    if not found:
        return pending.finding
    candidates = Candidates()
    for some in found:
        candidates.merge(some)
    if pending.finding.evidence_is == "proof":
        listed = tuple(replace(charge, rank=None) for charge in candidates.listed)
        return replace(pending.finding, evidence=listed, evidence_total=candidates.total)
    return replace(
        pending.finding,
        evidence=candidates.listed,
        evidence_total=candidates.total,
        evidence_tied=candidates.tied,
    )
