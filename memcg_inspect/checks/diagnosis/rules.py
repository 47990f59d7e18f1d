# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Causes: a mistake of the kernel that it makes with every charge of one kind
---------------------------------------------------------------------------

Charges that are booked to nodes by another rule, or charged to the wrong node, are proved one by
one. In many memcgs, or on many nodes, they are one mistake, and one diagnosis.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from memcg_inspect.checks.diagnosis.proofs import PROVED
from memcg_inspect.checks.evidence_query import MOST_EVIDENCE
from memcg_inspect.checks.identities import hierarchy, kmem
from memcg_inspect.checks.rows import finding_key
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import counted
from memcg_inspect.report import Diagnosis, Effect, Finding

__all__ = ("rules",)

#: The fewest memcgs that such charges are of, or nodes of memcgs that have several of them each.
#: One may have a fault of its own.
_FEWEST = 3


def rules(snapshot: Snapshot, findings: Sequence[Finding]) -> list[Diagnosis]:
    """Return one diagnosis for each kind of charges that are booked, or charged, wrongly."""
    by_rule: defaultdict[str, list[int]] = defaultdict(list)
    skewed: defaultdict[str, list[int]] = defaultdict(list)
    for number, finding in enumerate(findings):
        if finding.kind == "rule":
            by_rule[finding.what].append(number)
        elif finding.kind == "skew":
            skewed[finding.identity].append(number)
    found = [_diagnosis("rule", what, findings, some, None) for what, some in by_rule.items()]
    for kind, numbers in skewed.items():
        memcgs = {findings[n].memcg for n in numbers}
        if len(memcgs) >= _FEWEST or _on_many_nodes([findings[n] for n in numbers]):
            amount = sum(findings[n].off for n in numbers)
            what = (
                f"{counted(amount, 'bytes')} of {kind} memory of {counted(len(memcgs), 'memcgs')} "
                "are charged to other nodes than theirs: the kernel chooses the wrong node for "
                "such charges"
            )
            some = [*numbers, *_moved(snapshot, findings, numbers)]
            found.append(_diagnosis("skew", what, findings, some, amount))
    return found


def _on_many_nodes(skewed: Sequence[Finding]) -> bool:
    """Return whether charges of several nodes are wrong, and not one of each."""
    nodes = {(finding.memcg, finding.nid) for finding in skewed}
    return len(nodes) >= _FEWEST and all((f.evidence_total or 0) > 1 for f in skewed)


def _moved(snapshot: Snapshot, findings: Sequence[Finding], skewed: Iterable[int]) -> Iterator[int]:
    """Yield the findings on counters of nodes that differ by just what is charged elsewhere."""
    moved: Counter[tuple[int | None, int | None]] = Counter()
    for finding in (findings[number] for number in skewed):
        objcg = snapshot.objcgs.get(finding.evidence[0].objcg or 0) if finding.evidence else None
        if objcg is not None:
            moved[finding.memcg, finding.nid] -= finding.off
            moved[finding.memcg, objcg.nid] += finding.off
    below: Counter[tuple[int | None, int | None]] = Counter()
    for (memcg, nid), size in moved.items():
        for ancestor in () if memcg is None else snapshot.ancestors(memcg):
            below[ancestor, nid] += size
    item = {f.item for f in findings if f.identity == kmem.CHECK.name and f.nid is not None}
    sizes = {kmem.CHECK.name: moved, hierarchy.CHECK.name: below}
    for number, finding in enumerate(findings):
        if finding.identity in sizes and finding.item in item:
            size = sizes[finding.identity][finding.memcg, finding.nid]
            pages = size // snapshot.image.page_size
            if pages and pages == finding.difference:
                yield number


def _diagnosis(
    kind: str, what: str, findings: Sequence[Finding], numbers: Sequence[int], amount: int | None
) -> Diagnosis:
    some = [findings[number] for number in numbers]
    of_memcg: Counter[int] = Counter()
    for finding in some:
        if finding.memcg is not None and finding.kind == kind:
            of_memcg[finding.memcg] += abs(finding.off)
    evidence = {e.address: e for finding in some for e in finding.evidence}
    return Diagnosis(
        cause=PROVED[kind].cause,
        what=what,
        confidence="proved",
        memcgs=tuple(memcg for memcg, _ in of_memcg.most_common()),
        nid=None,
        amount=amount,
        unit="bytes",
        evidence=tuple(evidence.values())[:MOST_EVIDENCE],
        evidence_total=_total(some),
        findings=tuple(sorted(numbers)),
        signature=tuple(
            Effect(**finding_key(f)._asdict(), amount=f.off, difference=f.off)
            for f in some
            if f.kind != "skew"
        ),
        functions=PROVED[kind].functions,
    )


def _total(findings: Sequence[Finding]) -> int | None:
    """Return the number of charges that prove it; a charge may prove the findings of two nodes."""
    if any(f.evidence_total is None for f in findings if f.kind == "skew"):
        return None
    return sum(f.evidence_total or 0 for f in findings if f.kind == "skew") or None
