# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the findings of a report are about."""

from __future__ import annotations

from memcg_inspect.report import Report


def by_path(report: Report) -> dict[str, int]:
    return {m.path: m.address for m in report.memcgs if m.state == "online"}


def named(report: Report, identity: str = "slab") -> set[tuple[str, int | None, str, int | None]]:
    """Return (memcg, node, item, difference) of each finding of an identity."""
    paths = {m.address: m.path for m in report.memcgs}
    return {
        (paths.get(f.memcg or 0, "?"), f.nid, f.item, f.difference)
        for f in report.findings
        if f.identity == identity
    }


def touched(report: Report, *paths: str) -> bool:
    """Return whether every finding is on one of these memcgs or on an ancestor of one."""
    allowed = set()
    for path in paths:
        parts = path.strip("/").split("/")
        allowed |= {"/" + "/".join(parts[:n]) for n in range(len(parts) + 1)}
    names = {m.address: m.path for m in report.memcgs}
    return all(f.memcg is None or names[f.memcg] in allowed for f in report.findings)
