# SPDX-License-Identifier: LGPL-2.1-or-later
"""The diagnoses of a report: causes of its findings, with what the findings have as evidence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from memcg_inspect.checks.diagnosis.at_once import AtOnce, at_once
from memcg_inspect.checks.diagnosis.cause import Hypothesis
from memcg_inspect.checks.diagnosis.differences import Differences
from memcg_inspect.checks.diagnosis.mistakes import mistakes
from memcg_inspect.checks.diagnosis.places import words_of
from memcg_inspect.checks.diagnosis.proofs import PROVED
from memcg_inspect.checks.diagnosis.registry import CAUSES, cause_of
from memcg_inspect.checks.diagnosis.rules import rules
from memcg_inspect.checks.diagnosis.search import Explanation, explain
from memcg_inspect.checks.diagnosis.uncounted import uncounted
from memcg_inspect.checks.evidence_query import MOST_EVIDENCE
from memcg_inspect.checks.rows import RowKey, finding_key
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model_counters import CounterWord
from memcg_inspect.report import Confidence, Diagnosis, Effect, Evidence, Finding, Row

__all__ = ("diagnose",)

#: Other explanations that are named.
_MOST_OTHERS = 5
_Sizes = Mapping[tuple[str, int, int], int]


def diagnose(
    snapshot: Snapshot,
    rows: Sequence[Row],
    findings: Sequence[Finding],
    words: Sequence[CounterWord] = (),
    sizes: Sequence[_Sizes] = (),
) -> tuple[Diagnosis, ...]:
    """
    Return the causes of findings, the one that explains most of them first.

    :param rows: all rows of the report
    :param findings: all findings of the report, with their evidence
    :param words: where the counters are, of memcgs and nodes with findings
    :param sizes: number of the candidates of each finding by kind, bytes of one charge and
        ``struct obj_cgroup *``; empty if it is not known
    """
    if not findings:
        return ()
    by_row = {finding_key(finding): number for number, finding in enumerate(findings)}
    unknown = [*uncounted(rows, by_row), *rules(snapshot, findings)]
    known = {number for diagnosis in unknown for number in diagnosis.findings}
    unknown += mistakes(snapshot, {n: f for n, f in enumerate(findings) if n not in known})
    known |= {number for diagnosis in unknown for number in diagnosis.findings}
    left = {key for key, number in by_row.items() if number not in known}
    differences = Differences(snapshot, rows, left)
    proved = frozenset(k for k, n in by_row.items() if findings[n].evidence_is == "proof")
    explanations = explain(differences, CAUSES, proved)
    keys = _explained(differences, [e.cause for e in explanations])
    orphans = _orphans(snapshot, findings, [e.cause for e in explanations])
    found = [
        _of_rows(differences, explanation, keys[n], orphans.get(n, ()), by_row, findings, sizes)
        for n, explanation in enumerate(explanations)
    ]
    found = [_with_unfolded(d, e.cause, findings) for d, e in zip(found, explanations, strict=True)]
    found = _with_words(found, explanations, words)
    found = _at_once(found, at_once(explanations, words), findings)
    explained = known | {number for diagnosis in found for number in diagnosis.findings}
    found = _joined(unknown + found + _of_proofs(findings, explained), findings)
    return tuple(sorted(found, key=_place))


def _place(diagnosis: Diagnosis) -> tuple[int, bool, int]:
    # The last part makes the order of two runs the same.
    explained = diagnosis.findings
    return -len(explained), diagnosis.confidence != "proved", min(explained, default=-1)


def _of_rows(
    d: Differences,
    explanation: Explanation,
    keys: Sequence[RowKey],
    orphans: Sequence[int],
    by_row: dict[RowKey, int],
    findings: Sequence[Finding],
    sizes: Sequence[_Sizes],
) -> Diagnosis:
    """
    Return the diagnosis of a cause that was found from rows.

    :param keys: the rows that it explains
    :param orphans: the findings of its charges, if these refer to what is no obj_cgroup
    """
    h, cause = explanation.cause, cause_of(explanation.cause.cause)
    # A charge to the obj_cgroup of another node belongs to no row.
    alone = [n for n, f in enumerate(findings) if f.kind == "skew" and _is_skew_of(h, f)]
    if orphans:
        now = {findings[number].objcg for number in orphans}
        objcgs = (h.objcgs[0], now.pop() if len(now) == 1 else None)
        h, alone = h._replace(cause="object-owner", objcgs=objcgs), [*alone, *orphans]
        cause = cause_of(h.cause)
    numbers = tuple(sorted({*alone, *(by_row[key] for key in keys if key in by_row)}))
    proofs = [n for n in numbers if findings[n].evidence_is == "proof"]
    confidence: Confidence = "likely"
    # What else adds up to the rows does not put there what an address shows.
    if proofs:
        confidence = "proved"
    elif explanation.sure and not explanation.others:
        confidence = "only-explanation"
    evidence, total = _evidence(h, {n: findings[n] for n in proofs or numbers}, sizes)
    return Diagnosis(
        cause=h.cause,
        what=cause.sentence(h),
        confidence=confidence,
        memcgs=h.memcgs,
        nid=h.nid,
        amount=h.amount,
        unit=h.unit,
        evidence=evidence,
        evidence_total=total,
        findings=numbers,
        others=_others(explanation, cause.sentence(h)) if confidence == "likely" else (),
        signature=tuple(_effects(d, h, keys)),
        functions=cause.functions_by_item.get(h.item, cause.functions),
    )


def _with_words(
    found: Sequence[Diagnosis], explanations: Sequence[Explanation], words: Sequence[CounterWord]
) -> list[Diagnosis]:
    """Return diagnoses of counters with the words of memory that are wrong, if they are known."""
    of = words_of(dict(enumerate(explanations)), words)
    return [
        diagnosis
        if diagnosis.evidence or number not in of
        else replace(diagnosis, evidence=of[number][:MOST_EVIDENCE], evidence_total=len(of[number]))
        for number, diagnosis in enumerate(found)
    ]


def _at_once(
    found: Sequence[Diagnosis], events: Sequence[AtOnce], findings: Sequence[Finding]
) -> list[Diagnosis]:
    """
    Return diagnoses, with one of each event in place of those that follow from it.

    :param found: the diagnosis of each explanation
    """
    joined = {number for event in events for number in event.numbers}
    return [
        *(
            Diagnosis(
                cause=event.cause,
                what=event.what,
                confidence="likely",
                memcgs=event.memcgs,
                nid=event.nid,
                amount=event.amount,
                unit=event.unit,
                evidence=event.evidence,
                evidence_total=len(event.evidence) or None,
                findings=tuple(
                    sorted(
                        {f for n in event.numbers for f in found[n].findings}
                        | set(_unfolded(event, findings))
                    )
                ),
                signature=tuple(effect for n in event.numbers for effect in found[n].signature),
                functions=event.functions,
            )
            for event in events
        ),
        *(diagnosis for number, diagnosis in enumerate(found) if number not in joined),
    ]


def _unfolded(event: AtOnce, findings: Sequence[Finding]) -> Iterator[int]:
    """Yield the findings on a memcg with changes that no flush knows of, if an event made these."""
    for number, finding in enumerate(findings):
        is_of_it = finding.kind == "never-folded" and finding.memcg in event.memcgs
        if is_of_it and 0 < finding.off <= event.unfolded:
            yield number


def _with_unfolded(diagnosis: Diagnosis, h: Hypothesis, findings: Sequence[Finding]) -> Diagnosis:
    """
    Return a diagnosis of one counter, with the finding that its change will not be folded.

    Where a change is on no list to fold it from, nothing but the fault itself has made it.
    """
    if h.cause != "counter" or h.place == "folded":
        return diagnosis
    alike = [
        number
        for number, finding in enumerate(findings)
        if finding.kind == "never-folded"
        and (finding.memcg,) == h.memcgs
        and finding.difference == 1
        and re.search(rf"\b{h.item}\b", finding.what)
    ]
    return replace(diagnosis, findings=tuple(sorted({*diagnosis.findings, *alike})))


def _explained(d: Differences, causes: Sequence[Hypothesis]) -> list[list[RowKey]]:
    """
    Return the rows that each cause explains.

    Bytes of objects may round to no page. Then they explain a row of pages only if no other cause
    does: together, the bytes of several may round to one.
    """
    goals = [d.of_goal(h.signature) for h in causes]
    touched = [list(dict.fromkeys(d.touched(h.signature))) for h in causes]
    pairs = list(zip(goals, touched, strict=True))
    changed = {key for goal, keys in pairs for key in keys if goal.observed(key)}
    return [[k for k in keys if k not in changed or goal.observed(k)] for goal, keys in pairs]


class _Orphan(NamedTuple):
    """
    Charges of one kind, detail and node to what is no obj_cgroup.

    :ivar number: index of their finding
    """

    number: int
    kind: str
    detail: str
    nid: int | None
    bytes: int
    charges: int


def _orphans(
    snapshot: Snapshot, findings: Sequence[Finding], causes: Sequence[Hypothesis]
) -> dict[int, tuple[int, ...]]:
    """
    Return the findings of the charges of each cause, if these refer to what is no obj_cgroup.

    :return: indices of findings by index of the cause. If several causes fit, none is known to be
        it.
    """
    unknown = {
        (f.objcg, f.identity): number
        for number, f in enumerate(findings)
        if f.kind == "unknown-objcg"
    }
    orphans = [
        _Orphan(number, entry.kind, entry.detail, entry.nid, amount.bytes, amount.charges)
        for entry, amount in (snapshot.ledger if unknown else ())
        if (number := unknown.get((entry.payer, entry.kind))) is not None
    ]
    entries_of = Counter(orphan.number for orphan in orphans)
    whole = [orphan for orphan in orphans if entries_of[orphan.number] == 1]
    fitting = [
        (n, some)
        for n, h in enumerate(causes)
        if h.cause == "still-charged"
        for some in _charges_of(h, whole)
    ]
    causes_of = Counter(number for _, some in fitting for number in some)
    sets_of = Counter(n for n, _ in fitting)
    return {
        n: some
        for n, some in fitting
        if sets_of[n] == 1 and all(causes_of[number] == 1 for number in some)
    }


def _charges_of(h: Hypothesis, orphans: Sequence[_Orphan]) -> Iterator[tuple[int, ...]]:
    """Yield the findings whose charges can be those of a cause: each one alone, or all of them."""
    what = h.charge
    if what is None:
        return
    alike = [
        o
        for o in orphans
        if o.kind == what.kind
        and (o.kind != "slab" or o.detail == what.detail)
        and what.nid in (None, o.nid)
    ]
    yield from ((o.number,) for o in alike if o.bytes == what.bytes)
    total = sum(o.bytes for o in alike), sum(o.charges for o in alike)
    if what.together and len(alike) > 1 and total == (what.bytes, what.references):
        yield tuple(o.number for o in alike)


def _is_skew_of(h: Hypothesis, finding: Finding) -> bool:
    what = h.charge
    return what is not None and (
        finding.memcg == h.memcgs[-1]
        and finding.identity == what.kind
        and finding.nid == (finding.nid if what.nid is None else what.nid)
        and finding.difference == what.bytes
    )


def _others(explanation: Explanation, what: str) -> tuple[str, ...]:
    """Return other explanations in words, without those that no word tells from the first one."""
    said = (
        "; and ".join(cause_of(other.cause).sentence(other) for other in some)
        for some in explanation.others
    )
    return tuple(other for other in dict.fromkeys(said) if other != what)[:_MOST_OTHERS]


def _effects(d: Differences, h: Hypothesis, keys: Iterable[RowKey]) -> Iterable[Effect]:
    # As rows differ: objcg_bytes does so modulo whole pages.
    alone = d.of_goal(h.signature).differing()
    for key in keys:
        row = d.row(key)
        amount = alone.get(key)
        if amount:
            yield Effect(
                **key._asdict(),
                amount=amount,
                difference=row.off if row is not None else 0,
            )


def _evidence(
    h: Hypothesis, findings: Mapping[int, Finding], sizes: Sequence[_Sizes]
) -> tuple[tuple[Evidence, ...], int | None]:
    """Return the objects of findings that can be what a cause is about, and how many there are."""
    if not findings:
        return (), None
    first = next(iter(findings.values()))
    if first.evidence_is == "proof":
        return first.evidence, first.evidence_total
    if h.charge is None or h.cause not in ("object-owner", "not-counted"):
        return (), None
    owners = {objcg for objcg in h.objcgs[-1:] if objcg is not None}
    kind, size = h.charge.kind, h.charge.bytes
    for number, finding in findings.items():
        fitting = tuple(
            e
            for e in finding.evidence
            if e.kind == kind and e.bytes == size and (not owners or e.objcg in owners)
        )
        if fitting and number < len(sizes) and sizes[number]:
            # All charges of one size fit the query of a finding, or none does.
            return fitting, sum(
                count
                for (k, bytes_of_one, objcg), count in sizes[number].items()
                if (k, bytes_of_one) == (kind, size) and (not owners or objcg in owners)
            )
        if fitting:
            whole = len(finding.evidence) == finding.evidence_total
            return fitting, len(fitting) if whole else None
    return (), None


def _joined(found: Sequence[Diagnosis], findings: Sequence[Finding]) -> list[Diagnosis]:
    """
    Return diagnoses, without those that follow from one that an address proves.

    What is charged to a memcg that was forgotten is charged to no memcg, and what is charged to an
    obj_cgroup that is on another node's list is on another node.
    """
    joined = list(found)
    for cause in ("memcg-leaked", "objcg-owner"):
        for proof in [d for d in joined if d.cause == cause and d.confidence == "proved"]:
            at = {e.address for e in proof.evidence}
            rest = [
                d
                for d in joined
                # Nothing is known of what has no evidence, as after an interrupted search.
                if d is not proof and (about := _about(d, findings)) and about <= at
            ]
            numbers = {*proof.findings, *(n for d in rest for n in d.findings)}
            whole = replace(proof, findings=tuple(sorted(numbers)))
            joined = [whole if d is proof else d for d in joined if d not in rest]
    return joined


def _about(diagnosis: Diagnosis, findings: Sequence[Finding]) -> set[int | None]:
    """Return the addresses of which others are proved, if a diagnosis may follow from that."""
    if diagnosis.cause == PROVED["unknown-objcg"].cause:
        return {findings[number].objcg for number in diagnosis.findings} - {None}
    if diagnosis.cause == PROVED["skew"].cause:
        return {e.objcg for number in diagnosis.findings for e in findings[number].evidence}
    counts = ("reference-lost", "reference-leaked")
    if diagnosis.cause in counts and all(e.objcg is None for e in diagnosis.signature):
        return {effect.memcg for effect in diagnosis.signature}
    return {None}


def _of_proofs(findings: Sequence[Finding], explained: set[int]) -> list[Diagnosis]:
    """Return a diagnosis of each proof that is no part of another one."""
    found: dict[frozenset[int], Diagnosis] = {}
    for number, finding in enumerate(findings):
        proved = PROVED.get(finding.kind)
        if finding.evidence_is != "proof" or proved is None or number in explained:
            continue
        at = frozenset(e.address for e in finding.evidence)
        same = found.get(at) if at else None
        if same is not None:
            found[at] = replace(same, findings=(*same.findings, number))
            continue
        memcgs = () if finding.memcg is None else (finding.memcg,)
        found[at or frozenset({-number})] = Diagnosis(
            cause=proved.cause,
            what=finding.what,
            confidence="proved",
            memcgs=memcgs,
            nid=finding.nid,
            amount=finding.difference,
            unit=finding.unit,
            evidence=finding.evidence,
            evidence_total=finding.evidence_total,
            findings=(number,),
            functions=proved.functions,
        )
    return list(found.values())
