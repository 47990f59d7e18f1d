# SPDX-License-Identifier: LGPL-2.1-or-later
"""The outcome of all identities on one image, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memcg_inspect.checks.charging import judge_charging
from memcg_inspect.checks.findings import (
    PendingFinding,
    freed_findings,
    orphan_findings,
    row_findings,
    skew_findings,
)
from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.one_charge import judge_together
from memcg_inspect.checks.pernode import judge_per_node
from memcg_inspect.checks.registry import CHECKS, check_of
from memcg_inspect.checks.rows import summarize
from memcg_inspect.checks.skew import skew_matrix
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Coverage, Follows
from memcg_inspect.report import Finding, Identity, Row, Skew, Verdict

__all__ = ("Judgement", "judge", "verdict")


class Judgement(NamedTuple):
    """
    What the checks make of one snapshot.

    :ivar identities: outcome of each identity
    :ivar rows: rows of all identities
    :ivar skew: charges by charged node and backing node
    :ivar findings: findings, some of which still need evidence
    :ivar follows: see :attr:`memcg_inspect.report.Report.follows`
    :ivar is_decisive: whether the stacks of tasks were read that may account for differences
    """

    identities: list[Identity]
    rows: list[Row]
    skew: list[Skew]
    findings: list[PendingFinding]
    follows: Mapping[str, Follows] | None
    is_decisive: bool = True


def judge(snapshot: Snapshot) -> Judgement:
    """Check every identity."""
    not_kept: dict[str, str] = {}
    rows: list[Row] = []
    for check in CHECKS:
        reason = check.why_not_kept(snapshot)
        if reason is not None:
            not_kept[check.name] = reason
            continue
        if check.derive is not None:
            some = check.derive(snapshot, [r for r in rows if not check_of(r).counters_only])
        else:
            some = check.rows(snapshot)
        rows += mark_in_flight(snapshot, some)
    if any(row.allowance is not None for row in rows):
        rows = judge_charging(snapshot, judge_together(snapshot, rows))
    identities = _outcomes(rows, not_kept)
    skew = skew_matrix(snapshot)
    per_node = judge_per_node(snapshot, rows)
    findings = orphan_findings(snapshot) + freed_findings(snapshot) + per_node.findings
    findings += row_findings(snapshot, per_node.others) + skew_findings(snapshot, skew)
    return Judgement(identities, rows, skew, findings, per_node.follows)


def _outcomes(rows: Sequence[Row], not_kept: Mapping[str, str]) -> list[Identity]:
    """
    Return the outcome of each identity.

    :param not_kept: why there are no rows, by name of the identity
    """
    of: dict[str, list[Row]] = {check.name: [] for check in CHECKS}
    for row in rows:
        of[row.identity].append(row)
    return [
        Identity(name, "not-kept", 0, 0, not_kept[name])
        if name in not_kept
        else summarize(name, some)
        for name, some in of.items()
    ]


def verdict(
    identities: Sequence[Identity],
    findings: Sequence[Finding],
    coverage: Mapping[str, Coverage],
) -> Verdict:
    """Return the verdict on the image. A row that differs counts, whether a finding is about it."""
    statuses = {identity.status for identity in identities}
    if findings or "findings" in statuses:
        return "findings"
    if "unverifiable" in statuses or any(c.unreadable for c in coverage.values()):
        return "incomplete"
    return "moving" if "moving" in statuses else "exact"
