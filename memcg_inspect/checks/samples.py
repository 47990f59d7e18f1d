# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Samples of a running kernel
---------------------------

A running kernel changes while it is read. Charges are read after the counters, and a difference may
be a change in between. So one sample proves that a row is exact, but not that it differs. A row
that is exact or in flight in one sample is so in the result. A row that differs is a finding only
if it differs in :data:`SAMPLES` samples, with the same amounts on both sides. Samples that could
not verify it do not count. Any other row is ``moving``. The number of samples is high because a
busy machine repeats the same half-done operation often, and because an audit has thousands of rows,
so that rare coincidences do occur. While any row of the same identity changes, twice as many are
needed: tasks that fork without end once took a block of pages from the same free list between the
counter and the list in six samples of six.

On a machine that is about to come to rest, further samples settle rows that moved: see
:func:`is_coming_to_rest`. A row that moved at first is a finding if it then differs in the same way
in twice as many samples.

A task can wait in the middle of a charge for longer than all samples take. So the sample with
number :data:`SAMPLES` and all later ones have the stacks of tasks that are on no CPU. These may
explain a row as they do in a vmcore.

Memory that the program itself allocates while it reads is charged to the memcg that it runs in,
maybe by the same amount in each sample. So a difference there proves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from memcg_inspect.checks.findings import PendingFinding
from memcg_inspect.checks.judge import Judgement
from memcg_inspect.checks.registry import check_of
from memcg_inspect.checks.rows import RowKey, finding_key, row_key, summarize
from memcg_inspect.model import Coverage
from memcg_inspect.report import OWN_MACHINE, OWN_MEMCG, Moved, Row

__all__ = (
    "SAMPLES",
    "common_coverage",
    "is_coming_to_rest",
    "is_settled",
    "settle",
    "without_rows",
)

#: Number of samples in which a finding must be the same.
SAMPLES = 6
#: The same, of a row that changed, and of any row if others of its identity changed.
_MORE_SAMPLES = 2 * SAMPLES
#: The most samples that are taken. More than those above are needed if a row is unverifiable in
#: some of them because memory was freed while it was read.
_MOST_SAMPLES = 3 * SAMPLES
#: Samples that show whether a machine comes to rest.
_RECENT = 3
#: One of so many rows may move on a machine that does nothing else than a task now and then.
_IDLE = 20


class _History(NamedTuple):
    """
    One row in all samples.

    :ivar seen: the row in each sample; ``None`` if the sample does not have it
    :ivar is_at_rest: whether no row of its identity changed
    """

    seen: list[Row | None]
    is_at_rest: bool

    @property
    def samples(self) -> int:
        return len(self.seen)

    @property
    def rows(self) -> list[Row]:
        """The row in those samples that have it."""
        return [row for row in self.seen if row is not None]

    def verified(self) -> list[Row]:
        """Return the row in those samples that could verify it."""
        return [row for row in self.rows if row.status != "unverifiable"]

    def since(self) -> int:
        """Return the first of the last samples that have the same difference, an index."""
        first, newest = len(self.seen), None
        for number, row in reversed(list(enumerate(self.seen))):
            if row is None or row.status not in ("differs", "unverifiable"):
                break
            if row.status == "differs":
                newest = newest or row
                if not _is_same(row, newest):
                    break
                first = number
        return first

    def same(self) -> list[Row]:
        """
        Return the row in the last samples that have the same difference.

        Samples that could not verify it are left out.
        """
        return [row for row in self.seen[self.since() :] if row and row.status == "differs"]

    def is_constant(self) -> bool:
        """Return whether all samples have the row, verified ones with the same difference."""
        same = self.same()
        return bool(same) and None not in self.seen and len(same) == len(self.verified())

    def is_proved(self) -> bool:
        """Return whether the difference is the same in enough samples."""
        is_simple = self.is_at_rest and self.is_constant()
        return len(self.same()) >= (SAMPLES if is_simple else _MORE_SAMPLES)

    def is_moving(self) -> bool:
        """Return whether the samples do not tell if the row is exact."""
        statuses = {row.status for row in self.rows}
        return "differs" in statuses and statuses.isdisjoint(("exact", "in-flight"))

    def moved(self) -> Moved:
        """Return how far both sides changed."""
        found = [sum(row.found.values()) for row in self.rows]
        claimed = [sum(row.claimed.values()) for row in self.rows if row.claimed is not None]
        off = [row.difference for row in self.rows if row.difference is not None]
        return Moved(
            looks=len(self.rows),
            found=max(found) - min(found),
            claimed=max(claimed, default=0) - min(claimed, default=0),
            least=min(off, default=0),
            most=max(off, default=0),
        )


def is_settled(samples: Sequence[Judgement]) -> bool:
    """Return whether another sample could not change the outcome of any row that differs."""
    if len(samples) >= _MOST_SAMPLES:
        return True
    histories = _histories(samples)
    if any(h.is_constant() and not h.is_proved() for h in histories.values()):
        return False
    # The findings of rows are settled with their rows.
    common = _common_findings(samples, histories)
    findings = [x for x in common if finding_key(x.finding) not in histories]
    return len(samples) >= SAMPLES or not findings


def is_coming_to_rest(samples: Sequence[Judgement], own_memcgs: Sequence[int] = ()) -> bool:
    """
    Return whether further samples are likely to settle rows that moved.

    Few rows move, the last samples settled half of them, or all of them stand still. On a machine
    under load, many rows move, and do not stop.

    :param own_memcgs: as for :func:`settle`
    """
    moving = _moving(samples, own_memcgs)
    if not moving:
        return False
    if len(samples) <= _RECENT or _IDLE * len(moving) <= len(samples[-1].rows):
        return True
    before = _moving(samples[:-_RECENT], own_memcgs)
    return 2 * len(moving) <= len(before) or all(len(h.same()) > _RECENT for h in moving)


def _moving(samples: Sequence[Judgement], own_memcgs: Sequence[int]) -> list[_History]:
    return [
        history
        for history in _histories(samples).values()
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
    histories = _histories(samples)
    rows = [_settled(history, is_whole) for history in histories.values()]
    rows = [_by_this_program(row) if _is_own(row, own_memcgs) else row for row in rows]
    identities = []
    for identity in last.identities:
        if identity.status == "not-kept":
            identities.append(identity)
        else:
            some = [row for row in rows if row.identity == identity.name]
            identities.append(summarize(identity.name, some))
    differing = {row_key(row) for row in rows if row.status == "differs"}
    findings = [
        pending
        for pending in _common_findings(samples, histories)
        if finding_key(pending.finding) in differing
        or finding_key(pending.finding) not in histories
    ]
    return last._replace(identities=identities, rows=rows, findings=findings)


def without_rows(judged: Judgement) -> list[PendingFinding]:
    """Return the findings that belong to no row, and are proved by their evidence alone."""
    known = {row_key(row) for row in judged.rows}
    return [pending for pending in judged.findings if finding_key(pending.finding) not in known]


def common_coverage(samples: Sequence[Coverage]) -> Coverage:
    """
    Return the coverage of several samples, with what was unreadable in all of them.

    Memory that is unreadable in only some samples was freed while it was read.
    """
    least = min(samples, key=lambda coverage: coverage.unreadable)
    if not least.unreadable or any(c.unreadable > len(c.examples) for c in samples):
        return least
    unreadable = [{(e.what, e.address) for e in coverage.examples} for coverage in samples]
    examples = [e for e in least.examples if all((e.what, e.address) in u for u in unreadable)]
    return Coverage(least.read, len(examples), examples)


def _histories(samples: Sequence[Judgement]) -> dict[RowKey, _History]:
    """Follow each row of the last sample. Rows of memcgs that no longer exist are not needed."""
    by_key = [{row_key(row): row for row in sample.rows} for sample in samples]
    differing = {
        row.identity for rows in by_key for row in rows.values() if row.status == "differs"
    }
    restless = {name for name in differing if _is_restless(by_key, name)}
    return {
        key: _History([rows.get(key) for rows in by_key], key.identity not in restless)
        for key in by_key[-1]
    }


def _is_restless(samples: Sequence[Mapping[RowKey, Row]], identity: str) -> bool:
    """Return whether any row of an identity changed between samples, came or went."""
    some = [{k: row for k, row in rows.items() if k.identity == identity} for rows in samples]
    if any(rows.keys() != some[0].keys() for rows in some):
        return True
    verified = ([r for rows in some if (r := rows[k]).status != "unverifiable"] for k in some[0])
    return any(not _is_same(row, rows[0]) for rows in verified for row in rows)


def _is_same(row: Row, other: Row) -> bool:
    # A flush moves amounts between the parts of a counter. Their sum does not change.
    return row.difference == other.difference and (
        row.found == other.found or _parts(row) == _parts(other)
    )


def _parts(row: Row) -> Counter[str]:
    """Return the parts of *found*. Stocks are added up, since draining moves bytes between them."""
    parts: Counter[str] = Counter()
    for name, value in row.found.items():
        parts["stock" if name == "nr_charged_bytes" else name] += value
    return parts


def _settled(history: _History, is_whole: bool) -> Row:
    rows = history.rows
    for row in reversed(rows):
        if row.status in ("exact", "in-flight"):
            return row
    last = rows[-1]
    if not history.verified():
        if not is_whole:
            return last
        reason = f"something else could not be read in {len(rows)} of {history.samples} samples"
        return replace(last, status="moving", reason=reason)
    if history.is_proved():
        return history.same()[-1]
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


def _common_findings(
    samples: Sequence[Judgement], histories: Mapping[RowKey, _History]
) -> list[PendingFinding]:
    """
    Return the findings that are in all samples, with the evidence that is in all of them.

    A sample that could not verify the row of a finding is not counted. Neither is one that is older
    than a difference that the others prove.
    """
    first = {key: history.since() for key, history in histories.items()}
    unverified = [{row_key(r) for r in s.rows if r.status == "unverifiable"} for s in samples]
    newest: dict[tuple[RowKey, str], PendingFinding] = {}
    for sample in reversed(samples):
        for pending in sample.findings:
            newest.setdefault((finding_key(pending.finding), pending.finding.kind), pending)
    common: list[PendingFinding] = []
    for (key, _), pending in newest.items():
        others = [
            _same(pending, sample)
            for number, (sample, without) in enumerate(zip(samples, unverified, strict=True))
            if key not in without and number >= first.get(key, 0)
        ]
        if any(other is None for other in others):
            continue
        evidence = pending.finding.evidence
        for other in others:
            seen = set() if other is None else {e.address for e in other.finding.evidence}
            evidence = tuple(e for e in evidence if e.address in seen)
        if not evidence and (pending.finding.evidence or key not in histories):
            continue  # all samples have evidence, but not the same
        finding = replace(pending.finding, evidence=evidence)
        if len(others) > 1:
            # How many of those that are not listed are in all samples is not known.
            finding = replace(finding, evidence_total=None, evidence_tied=None)
        common.append(pending._replace(finding=finding))
    return common


def _same(pending: PendingFinding, sample: Judgement) -> PendingFinding | None:
    wanted = (finding_key(pending.finding), pending.finding.kind)
    for other in sample.findings:
        if (finding_key(other.finding), other.finding.kind) == wanted:
            return other
    return None
