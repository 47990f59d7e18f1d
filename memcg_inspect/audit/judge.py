# SPDX-License-Identifier: LGPL-2.1-or-later
"""One verdict out of all identities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from memcg_inspect.audit.findings import Lead, row_findings, skew_findings, stray_findings
from memcg_inspect.audit.rows import summarize
from memcg_inspect.audit.skew import skew_matrix
from memcg_inspect.audit.slab import slab_rows
from memcg_inspect.audit.snapshot import Snapshot
from memcg_inspect.model import Coverage, Finding, Identity, Row, Skew, Verdict

__all__ = ("IDENTITIES", "Judgement", "judge", "verdict")

#: Every identity, in the order of the report.
IDENTITIES: dict[str, Callable[[Snapshot], list[Row]]] = {
    "slab": slab_rows,
}


class Judgement(NamedTuple):
    """What follows from a snapshot alone."""

    identities: list[Identity]
    rows: list[Row]
    skew: list[Skew]
    leads: list[Lead]


def judge(snapshot: Snapshot) -> Judgement:
    """Check every identity."""
    identities, rows = [], []
    for name, make_rows in IDENTITIES.items():
        some = make_rows(snapshot)
        identities.append(summarize(name, some))
        rows += some
    skew = skew_matrix(snapshot)
    leads = stray_findings(snapshot) + row_findings(snapshot, rows) + skew_findings(snapshot, skew)
    return Judgement(identities, rows, skew, leads)


def verdict(
    identities: Sequence[Identity],
    findings: Sequence[Finding],
    coverage: Mapping[str, Coverage],
) -> Verdict:
    """Say it in one word."""
    statuses = {identity.status for identity in identities}
    if findings:
        return "findings"
    if "unverifiable" in statuses or any(c.unreadable for c in coverage.values()):
        return "incomplete"
    return "moving" if "moving" in statuses else "exact"
