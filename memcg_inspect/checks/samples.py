# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Samples of a running kernel
---------------------------

A running kernel changes while it is read. Charges are read after the counters, and a difference may
be a change in between. So one sample may show that a row is exact, but not that it differs. A row
is exact if it is exact in at least as many samples as have any one difference, and in flight if it
is so in one. A row that differs is a finding only if it differs in :data:`SAMPLES` samples, with
the same amounts on both sides. Samples that could not verify it do not count. Any other row is
``moving``. The number of samples is high because a busy machine repeats the same half-done
operation often, and because an audit has thousands of rows, so that rare coincidences do occur.
While any row of the same identity changes, twice as many are needed: tasks that fork without end
once took a block of pages from the same free list between the counter and the list in six samples
of six. A row whose two sides change is a finding, too, if it differs by far more than they change
in twice as many samples.

On a machine that is about to come to rest, further samples settle rows that moved: see
:func:`is_coming_to_rest`. A row that moved at first is a finding if it then differs in the same way
in twice as many samples.

A task can wait in the middle of a charge for longer than all samples take. So the last two of the
first :data:`SAMPLES` samples, and all later ones, have the stacks of tasks that are on no CPU.
These may explain a row as they do in a vmcore. At least two samples that have the stacks must leave
a finding unexplained.

The objects that prove a finding must be the same in all samples. If they are not, its row is
``moving``.

Memory that the program itself allocates while it reads is charged to the memcg that it runs in,
maybe by the same amount in each sample. So a difference there proves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from memcg_inspect.checks.findings import PendingFinding
from memcg_inspect.checks.history import SAMPLES, History, histories
from memcg_inspect.checks.judge import Judgement
from memcg_inspect.checks.registry import check_of
from memcg_inspect.checks.rows import RowKey, finding_key, row_key, summarize
from memcg_inspect.model import Coverage
from memcg_inspect.report import OWN_MACHINE, OWN_MEMCG, Finding, Row

__all__ = (
    "SAMPLES",
    "common_coverage",
    "is_coming_to_rest",
    "is_settled",
    "settle",
    "without_rows",
)

#: The most samples that are taken. More than those that prove a finding are needed if a row is
#: unverifiable in some of them because memory was freed while it was read.
_MOST_SAMPLES = 3 * SAMPLES
#: Samples that show whether a machine comes to rest.
_RECENT = 3
#: One of so many rows may move on a machine that does nothing else than a task now and then.
_IDLE = 20


def is_settled(samples: Sequence[Judgement]) -> bool:
    """Return whether another sample could not change the outcome of any row that differs."""
    if len(samples) >= _MOST_SAMPLES:
        return True
    known = histories(samples)
    if any(h.is_constant() and not h.is_proved() for h in known.values()):
        return False
    # The findings of rows are settled with their rows.
    return len(samples) >= SAMPLES or not _findings_without_rows(samples, known)


def is_coming_to_rest(samples: Sequence[Judgement], own_memcgs: Sequence[int] = ()) -> bool:
    """
    Return whether further samples are likely to settle rows that moved.

    Few rows move, the last samples settled half of them, or some stand still, or differ by far more
    than they move. On a machine under load, many rows move, and do not stop.

    :param own_memcgs: as for :func:`settle`
    """
    moving = _moving(samples, own_memcgs)
    if not moving:
        return False
    if len(samples) <= _RECENT or _IDLE * len(moving) <= len(samples[-1].rows):
        return True
    before = _moving(samples[:-_RECENT], own_memcgs)
    return 2 * len(moving) <= len(before) or any(
        len(h.same()) > _RECENT or h.is_far(_RECENT + 1) for h in moving
    )


def _moving(samples: Sequence[Judgement], own_memcgs: Sequence[int]) -> list[History]:
    return [
        history
        for history in histories(samples).values()
        if history.is_moving()
        and not history.is_proved()
        and not _is_own(history.rows[-1], own_memcgs)
    ]


def settle(
    samples: Sequence[Judgement], is_whole: bool, own_memcgs: Sequence[int] = ()
) -> Judgement:
    """
    Combine several samples.

    :param samples: at least one. The result has the rows of the last one.
    :param is_whole: whether everything could be read in at least one sample
    :param own_memcgs: the memcg that this program runs in, and its ancestors,
        ``struct mem_cgroup *``
    """
    last = samples[-1]
    known = histories(samples)
    rows = [_settled(history, is_whole) for history in known.values()]
    rows = [_by_this_program(row) if _is_own(row, own_memcgs) else row for row in rows]
    differing = {row_key(row) for row in rows if row.status == "differs"}
    findings = [
        pending
        for pending in _findings_of_rows(samples, known)
        if finding_key(pending.finding) in differing
    ]
    rows = _without_other_proofs(rows, findings, samples)
    findings += _findings_without_rows(samples, known)
    identities = []
    for identity in last.identities:
        if identity.status == "not-kept":
            identities.append(identity)
        else:
            some = [row for row in rows if row.identity == identity.name]
            identities.append(summarize(identity.name, some))
    return last._replace(identities=identities, rows=rows, findings=findings)


def without_rows(judged: Judgement) -> list[PendingFinding]:
    """Return the findings that belong to no row, and are proved by their evidence alone."""
    known = {row_key(row) for row in judged.rows}
    return [pending for pending in judged.findings if finding_key(pending.finding) not in known]


def common_coverage(samples: Sequence[Coverage]) -> Coverage:
    """
    Return the coverage of several samples, with what was unreadable in all of them.

    Memory that is unreadable in only some samples was freed while it was read. If more was
    unreadable than the examples that are kept, the sample with least of it counts.
    """
    least = min(samples, key=lambda coverage: coverage.unreadable)
    if not least.unreadable or any(c.unreadable > len(c.examples) for c in samples):
        return least
    unreadable = [{(e.what, e.address) for e in coverage.examples} for coverage in samples]
    examples = [e for e in least.examples if all((e.what, e.address) in u for u in unreadable)]
    return Coverage(least.read, len(examples), examples)


def _settled(history: History, is_whole: bool) -> Row:
    rows, last = history.rows, history.rows[-1]
    if history.is_proved():
        return history.same()[-1]
    settled = history.settled()
    if settled is not None:
        return settled
    if not history.verified():
        if not is_whole:
            return last
        reason = f"something else could not be read in {len(rows)} of {history.samples} samples"
        return replace(last, status="moving", reason=reason)
    if last.status == "unverifiable" and history.is_constant():
        return last
    reason = f"changed between {history.samples} samples"
    return replace(last, status="moving", reason=reason, moved=history.moved())


def _is_own(row: Row, own_memcgs: Sequence[int]) -> bool:
    check = check_of(row)
    if check.of_whole_nodes:
        return row.status == "differs" and bool(own_memcgs)
    concerned = own_memcgs if check.of_subtrees else own_memcgs[:1]
    return row.status == "differs" and row.memcg in concerned


def _by_this_program(row: Row) -> Row:
    reason = OWN_MACHINE if check_of(row).of_whole_nodes else OWN_MEMCG
    return replace(row, status="moving", reason=reason)


def _without_other_proofs(
    rows: Sequence[Row], findings: Sequence[PendingFinding], samples: Sequence[Judgement]
) -> list[Row]:
    """
    Make rows moving whose findings are not among those of the result.

    Rows that follow from others have no finding of their own. Without any finding, they follow from
    nothing.
    """
    had = {finding_key(pending.finding) for sample in samples for pending in sample.findings}
    have = {finding_key(pending.finding) for pending in findings}
    reason = "its finding was another one in other samples"
    return [
        replace(row, status="moving", reason=reason)
        if row.status == "differs"
        and row_key(row) not in have
        and (row_key(row) in had or not have)
        else row
        for row in rows
    ]


def _findings_of_rows(
    samples: Sequence[Judgement], known: Mapping[RowKey, History]
) -> list[PendingFinding]:
    """
    Return the newest findings of rows, with the evidence that is in all samples that count.

    A sample that could not verify the row does not count. Neither does one that is older than a
    difference that the others prove. Objects that only may explain a row are left out if they are
    not the same. If those that prove a finding are not, there is none.
    """
    found: dict[tuple[RowKey, str], PendingFinding] = {}
    by_key = [_by_key(sample) for sample in samples]
    for key, history in known.items():
        first = history.since()
        of_row = [
            of_sample[key]
            for of_sample, row in zip(by_key[first:], history.seen[first:], strict=True)
            if row is not None and row.status == "differs"
        ]
        for pending in of_row[-1] if of_row else ():
            finding = _with_common_evidence(pending.finding, of_row)
            if finding is not None:
                found[key, finding.kind] = pending._replace(finding=finding)
    return list(found.values())


def _by_key(judged: Judgement) -> defaultdict[RowKey, list[PendingFinding]]:
    """Return the findings of a sample by the rows that they are about."""
    found: defaultdict[RowKey, list[PendingFinding]] = defaultdict(list)
    for pending in judged.findings:
        found[finding_key(pending.finding)].append(pending)
    return found


def _findings_without_rows(
    samples: Sequence[Judgement], known: Mapping[RowKey, History]
) -> list[PendingFinding]:
    """Return the newest findings without a row that are in all samples, by common evidence."""
    alone = [
        [pending for pending in sample.findings if finding_key(pending.finding) not in known]
        for sample in samples
    ]
    found = []
    for pending in alone[-1]:
        finding = _with_common_evidence(pending.finding, alone)
        if finding is not None and finding.evidence:
            found.append(pending._replace(finding=finding))
    return found


def _with_common_evidence(
    finding: Finding, of_samples: Sequence[Sequence[PendingFinding]]
) -> Finding | None:
    """
    Return a finding with the evidence that all samples have for it.

    :return: ``None`` if they have none in common that proves it
    """
    evidence = finding.evidence
    for some in of_samples:
        seen = {
            one.address
            for other in some
            if _is_about_the_same(finding, other.finding)
            for one in other.finding.evidence
        }
        evidence = tuple(one for one in evidence if one.address in seen)
    if finding.evidence and not evidence and finding.evidence_is == "proof":
        return None
    if len(of_samples) == 1:
        return finding
    # How many of those that are not listed are in all samples is not known.
    return replace(finding, evidence=evidence, evidence_total=None, evidence_tied=None)


def _is_about_the_same(finding: Finding, other: Finding) -> bool:
    # An object of several nodes is not on all of them once a part of it is freed, and what is
    # found of a row may depend on other rows.
    one, two = ((f.identity, f.item, f.memcg) for f in (finding, other))
    return one == two
